"""Measure a machine: its rates of compute, updates and copies, its links, its disk and its page-locked memory, and
combine them in a `Cluster`.
"""

import os
import platform
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle
from typing import Any, cast

import torch
from torch import distributed
from torch.nn import functional
from torch.optim.adamw import adamw

from elixir_compile import compat
from elixir_compile.base.errors import ElixirWarning
from elixir_compile.base.process import num_usable_cores
from elixir_compile.base.units import GIB, KIB, MIB
from elixir_compile.compat.platforms import host_memory_bytes, memory_sizes_bytes, num_local_ranks, platform_of
from elixir_compile.compat.platforms.host import as_update, update_threads
from elixir_compile.graph.ops.optimizers import REST_DTYPES
from elixir_compile.ir.hardware import (
    Cluster,
    Fleet,
    FormPrice,
    Link,
    Node,
    fleet_of,
    fleet_of_nodes,
    profile_for,
    with_like_seats,
)
from elixir_compile.optim.host import host_threads_for, mixed_adamw, split_adamw
from elixir_compile.optim.host.passes import Extras
from elixir_compile.optim.precision import MomentForm, num_scales
from elixir_compile.runtime.bucket import Slab, aligned_bytes
from elixir_compile.runtime.disk_store import DiskStore, staging_buffers
from elixir_compile.runtime.distributed.ranks import messenger_of
from elixir_compile.runtime.lanes import lanes_for

# ----------------------------------------------------------------------------------------------------------------------
# Measure the median seconds of several warm runs of a function, alone or beside another function.


MIN_REPEATS = 3
MAX_REPEATS = 50


def median_s(run: Callable[[], object], device: torch.device, at_most_s: float) -> float:
    """Return the median seconds of `run`, including its queued compute on `device`.

    The first run is not counted. The others stop after `at_most_s`, but there are at least `MIN_REPEATS` and at most
    `MAX_REPEATS`.
    """
    # Not the whole device: a function that runs beside `run` has its own stream.
    wait = partial(platform_of(device).synchronize_compute, device)
    _timed_s(run, wait)
    ends_s = time.perf_counter() + at_most_s
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or (len(seconds) < MAX_REPEATS and time.perf_counter() < ends_s):
        seconds.append(_timed_s(run, wait))
    return statistics.median(seconds)


def _timed_s(run: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    began_s = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began_s


@contextmanager
def beside(run: Callable[[], object]) -> Iterator[None]:
    """Repeat `run` in a second thread during the block. An exception of `run` is raised at the end of the block."""
    is_over, has_begun = threading.Event(), threading.Event()

    def repeat() -> None:
        try:
            while not is_over.is_set():
                run()
                has_begun.set()
        finally:
            has_begun.set()

    with ThreadPoolExecutor(max_workers=1) as pool:
        repeating = pool.submit(repeat)
        has_begun.wait()
        try:
            yield
        finally:
            is_over.set()
        repeating.result()


# ----------------------------------------------------------------------------------------------------------------------
# Find the bytes of host memory that this process may page-lock.


def pinned_limit_bytes(device: torch.device) -> int:
    """Return the most bytes of page-locked host memory; all, if `device` is a CPU and none must be."""
    memory_bytes = host_memory_bytes()
    if not platform_of(device).has_own_memory:
        return memory_bytes
    limit_bytes = lock_limit_bytes()
    if limit_bytes is None or limit_bytes >= memory_bytes:
        return memory_bytes
    # Most CUDA drivers ignore the limit, whose default is 8 MiB: try whether more memory can be pinned.
    if limit_bytes <= GIB:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ElixirWarning)
            if Slab(limit_bytes + MIB, pin=True).is_pinned:
                return memory_bytes
    return limit_bytes


def lock_limit_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no limit
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes


# ----------------------------------------------------------------------------------------------------------------------
# Measure the links of a machine: copies between host and device, and collectives between ranks.
#
#     h2d   a slab into a newly allocated flat tensor, then a second time into the same    (gather)
#     d2h   a tensor into a slab used before                                               (offload)
#
# Copies are made as the executor makes them. The copy to the device is made twice because a step has copies to new and
# to reused memory. On a CPU, newly mapped memory costs a page fault every 4 KiB, and memory reused by the C allocator
# does not: in GPT-2 under a budget gathers ran at 11-12 GB/s in the forward, and at 2-4 GB/s in the backward, near the
# peak of the step. glibc maps each allocation of 32 MiB or more, so the size here is larger.
#
#     seconds of a ring of n ranks = (n - 1) * latency_s + bytes sent by each rank / bytes_per_s
#
# In an all-gather and a reduce-scatter, each rank sends (n - 1) / n of the full tensor. Latency and rate minimise the
# squared relative error over all sizes of both collectives.


COPY_BYTES = 64 * MIB
_LATENCY_BYTES = 4096
_NUM_COPIES = {"h2d": 2, "d2h": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copy of each direction. It is complete as soon as the call returns, and returns the written tensor."""

    h2d: Callable[[], torch.Tensor]
    d2h: Callable[[], torch.Tensor]


def copies_of(device: torch.device, nbytes: int) -> Copies:
    """Return copies of `nbytes` between host memory, pinned for an accelerator, and `device`."""
    lanes = lanes_for(device)
    slab = Slab(2 * nbytes, pin=lanes.pins)
    flat = slab.tensor(torch.uint8, (2 * nbytes,), 0).fill_(1)
    home, target = flat[:nbytes], flat[nbytes:]
    leaving = torch.full((nbytes,), 2, dtype=torch.uint8, device=device)
    go_on = lanes.hand_over()

    def h2d() -> torch.Tensor:
        go_on()
        arriving = lanes.empty(nbytes)
        for _ in range(_NUM_COPIES["h2d"]):
            with lanes.h2d.behind_compute():
                lanes.h2d.copy(arriving, home)
        lanes.h2d.synchronize()
        return arriving

    def d2h() -> torch.Tensor:
        go_on()
        with lanes.d2h.behind_compute():
            lanes.d2h.copy(target, leaving)
        lanes.d2h.synchronize()
        return target

    return Copies(h2d=h2d, d2h=d2h)


def measure_copies(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return `latency_s`, `bytes_per_s` and `busy_bytes_per_s` of both directions, with the prefixes `h2d.` and `d2h.`.

    The busy rate is measured while the other direction copies too.
    """
    large, small = copies_of(device, COPY_BYTES), copies_of(device, _LATENCY_BYTES)
    share_s = at_most_s / 6
    directions = (("h2d", large.h2d, small.h2d, large.d2h), ("d2h", large.d2h, small.d2h, large.h2d))
    found: dict[str, float] = {}
    for name, copy, little, other in directions:
        num_copies = _NUM_COPIES[name]
        latency_s = median_s(little, device, share_s) / num_copies
        alone_s = median_s(copy, device, share_s) / num_copies
        with beside(other):
            busy_s = median_s(copy, device, share_s) / num_copies
        found[f"{name}.latency_s"] = latency_s
        found[f"{name}.bytes_per_s"] = _rate(alone_s, latency_s)
        found[f"{name}.busy_bytes_per_s"] = _rate(busy_s, latency_s)
    return found


def _rate(copy_s: float, latency_s: float) -> float:
    """Return bytes/s without the latency. If noise makes the latency more than half of `copy_s`, half is subtracted."""
    return COPY_BYTES / max(copy_s - latency_s, copy_s / 2)


_SHARD_BYTES = (16 * KIB, 256 * KIB, 2 * MIB, 8 * MIB)
# A fixed number, not a time, because all ranks must make the same calls.
_REPEATS = 5


def measure_collectives(device: torch.device, group: "distributed.ProcessGroup | None") -> tuple[float, float]:
    """Return the latency of one hop in seconds and the bytes/s of `group`. None means all ranks.

    All ranks of the group must call this together.
    """
    num_ranks = distributed.get_world_size(group)
    all_gather, reduce_scatter = _collectives(device, group)
    points: list[tuple[float, float]] = []
    for shard_bytes in _SHARD_BYTES:
        shard = torch.ones(shard_bytes // torch.float32.itemsize, device=device)
        whole = torch.ones(num_ranks * shard.numel(), device=device)
        sent_bytes = (num_ranks - 1) * shard_bytes
        wait = partial(platform_of(device).synchronize, device)
        for run in (partial(all_gather, whole, shard), partial(reduce_scatter, shard, whole)):
            seconds = [_timed_s(run, wait) for _ in range(1 + _REPEATS)]
            points.append((sent_bytes, statistics.median(seconds[1:])))
    latency_s, bytes_per_s = fitted_line(points)
    return latency_s / (num_ranks - 1), bytes_per_s


def _collectives(
    device: torch.device, group: "distributed.ProcessGroup | None"
) -> tuple[Callable[..., object], Callable[..., object]]:
    """Return the gather and the reduce of a bucket of `group`, each called with (output, input)."""
    ranks = group or distributed.group.WORLD
    messenger = None if ranks is None else messenger_of(ranks, device)
    if messenger is None:
        all_gather, reduce_scatter = compat.flat_collectives()
        return partial(all_gather, group=group), partial(reduce_scatter, group=group)
    num_ranks = distributed.get_world_size(group)
    return (
        lambda whole, own: messenger.all_gather(whole.view(num_ranks, -1), own).wait(),
        lambda own, whole: messenger.reduce_scatter(own, whole.view(num_ranks, -1)).wait(),
    )


def fitted_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency in seconds, 0 or more, and bytes per second of the (bytes, seconds) in `points`.

    Minimises the sum of ((latency + bytes / rate - seconds) / seconds) ** 2, so small sizes count as much as
    large ones.
    """
    weights = [1 / seconds for _, seconds in points]
    slopes = [nbytes / seconds for nbytes, seconds in points]
    ww, ws, ss = _dot(weights, weights), _dot(weights, slopes), _dot(slopes, slopes)
    w, s = sum(weights), sum(slopes)
    determinant = ww * ss - ws * ws
    latency_s = (w * ss - s * ws) / determinant
    s_per_byte = (s * ww - w * ws) / determinant
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, s / ss
    if s_per_byte <= 0:  # noise: the larger size was not slower
        nbytes, seconds = max(points)
        latency_s, s_per_byte = 0.0, seconds / nbytes
    return latency_s, 1 / s_per_byte


def _dot(xs: Sequence[float], ys: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(xs, ys, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Measure all rates of compute, updates and copies, each as the median of several rounds.
#
# Other processes load the machine in bursts of seconds, longer than a measurement, so all repeats of a measurement may
# be wrong. Rounds spread the repeats of each measurement over the full time.
#
# Updates are those of `HybridAdamW`, a fused call over the tensors of a bucket, which has the tensors of one
# transformer layer. Several buckets take turns, so that none is in a cache.


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Tokens and width of the MLP of a transformer layer: a small layer, and a large layer that fills an accelerator.
_LAYERS = {"host": (512, 768), "accelerator": (4096, 4096)}
_GROWTH = 8
"""Twice the tokens and twice the width make 2 * 2 * 2 times the arithmetic."""
_HOST_DTYPES = (torch.float32, torch.bfloat16)
"""In which optimizer classes multiply matrices: Shampoo and SOAP, and Muon."""
_SQUARE = 1024
"""Rows and columns of a matrix on the host."""
_HOST_FLOPS_PER_S = "host.flops_per_s."
_POINTWISE_ROWS = {"host": 6144, "accelerator": 262144}
"""Rows of 256 floats: 6 MiB, an activation of a small transformer; 256 MiB, more than an accelerator's cache holds."""
_DRAM_NUMEL = 16 * 2**20
_NUM_LAUNCHES = 200


def _kind(device: torch.device) -> str:
    return "accelerator" if platform_of(device).has_own_memory else "host"


def measure_kernels(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return `pointwise_bytes_per_s` of an addition, a gelu and a softmax, `launch_s`, and the host's
    `dram_bytes_per_s` in a copy and a sum."""
    share_s = at_most_s / 3
    x = torch.linspace(-3, 3, _POINTWISE_ROWS[_kind(device)] * 256, device=device).view(-1, 256)
    y = torch.ones_like(x)

    def kernels() -> None:
        functional.gelu(x)
        torch.add(x, y)
        torch.softmax(x, dim=-1)

    num_passes = 2 + 3 + 2  # each kernel reads its inputs and writes one result
    pointwise_bytes_per_s = num_passes * x.nbytes / median_s(kernels, device, share_s)
    one = torch.ones(16, device=device)  # an op on 16 elements costs its launch

    def ops() -> None:
        for _ in range(_NUM_LAUNCHES):
            torch.add(one, one)

    launch_s = median_s(ops, device, share_s) / _NUM_LAUNCHES
    host = torch.device("cpu")
    first, second, out = (torch.ones(_DRAM_NUMEL, device=host) for _ in range(3))
    copy_s = median_s(lambda: out.copy_(first), host, share_s / 2)
    sum_s = median_s(lambda: torch.add(first, second, out=out), host, share_s / 2)
    return {
        "pointwise_bytes_per_s": pointwise_bytes_per_s,
        "launch_s": launch_s,
        "dram_bytes_per_s": 5 * first.nbytes / (copy_s + sum_s),  # reads and writes together
    }


def measure_products(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return the floating-point operations per second of matrix products by dtype, as `flops_per_s.float32`, and those
    of the host with the threads of an update, as `host.flops_per_s.float32`.

    Timed are the three products of a linear layer in a training step, of the size in `_LAYERS`, and on the host the
    product of two squares, as in an update of whole matrices; each of a smaller size if that would take too long. A
    dtype may be emulated: float16 on a CPU without instructions for it is 40 times slower than float32.
    """
    share_s = at_most_s / (len(_DTYPES) + len(_HOST_DTYPES))
    host, threads = torch.device("cpu"), update_threads(device)
    found: dict[str, float] = {}
    for dtype in _DTYPES:
        tokens, width = _LAYERS[_kind(device)]
        found[f"flops_per_s.{_name(dtype)}"] = _flops_per_s(
            partial(_products, device, dtype, tokens, width), device, share_s
        )
    for dtype in _HOST_DTYPES:
        rate = as_update(partial(_flops_per_s, partial(_square, dtype), host, share_s), threads)
        found[f"{_HOST_FLOPS_PER_S}{_name(dtype)}"] = rate
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flops_per_s(
    make: Callable[[int], tuple[Callable[[], object], int]], device: torch.device, at_most_s: float
) -> float:
    """Return the rate of the products that `make` returns, with their FLOPs, in full size or divided by 2, 4 or 8."""
    divisor = 8
    products, flops = make(divisor)
    while divisor > 1 and _GROWTH * median_s(products, device, 0.0) * 4 <= at_most_s:
        divisor //= 2
        products, flops = make(divisor)
    return flops / median_s(products, device, at_most_s / 2)


def _square(dtype: torch.dtype, divisor: int) -> tuple[Callable[[], object], int]:
    size = _SQUARE // divisor
    matrix = torch.full((size, size), 0.01, dtype=dtype)
    return lambda: torch.matmul(matrix, matrix), 2 * size**3


def _products(
    device: torch.device, dtype: torch.dtype, tokens: int, width: int, divisor: int
) -> tuple[Callable[[], None], int]:
    tokens, width = tokens // divisor, width // divisor
    x = torch.full((tokens, width), 0.5, dtype=dtype, device=device)
    weight = torch.full((4 * width, width), 0.01, dtype=dtype, device=device)
    gradient = torch.full((tokens, 4 * width), 0.01, dtype=dtype, device=device)

    def products() -> None:
        torch.matmul(x, weight.T)
        torch.matmul(gradient, weight)
        torch.matmul(gradient.T, x)

    return products, 3 * 2 * tokens * width * 4 * width


# 7 and 28 million elements, 28 and 113 MB in float32: the sizes of buckets. On an accelerator the launch would take
# most of the time of the smaller bucket.
_WIDTHS = {"host": 768, "accelerator": 1536}
_NUM_BUCKETS = 3
_COPIES = 4
"""Parameters, gradients and two moments."""

_ADAMW: Any = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8, "maximize": False,
}  # fmt: skip
_FORMS = [
    (dtype, form)
    for dtype in (torch.float32, *REST_DTYPES)
    for form in MomentForm
    if (dtype, form) != (torch.float32, MomentForm.FLOAT32)
]
"""The dtypes of parameters and the moments of host updates, but for those that are fp32 throughout."""
_MOST_FORM_BYTES = 16
"""Of an element in fp16: parameter and gradient, and master and moments in fp32."""
_OVER_FP32 = "update.over_fp32."
Allocate = Callable[[Sequence[tuple[int, ...]]], list[torch.Tensor]]


def measure_updates(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return elements/s as `update.device`, `update.host`, and `update.busy_host` during copies in both directions; and
    as `update.over_fp32.bfloat16.int8` the seconds of host updates in other dtypes of parameters and moments over those
    of `update.host`."""
    share_s = at_most_s / (3 + len(_FORMS))
    width = _WIDTHS[_kind(device)]

    def on_device(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return [torch.full(shape, 0.01, device=device) for shape in shapes]

    def on_host(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        sizes_bytes = [aligned_bytes(torch.Size(shape).numel() * torch.float32.itemsize) for shape in shapes]
        slab = Slab(sum(sizes_bytes), pin=platform_of(device).has_own_memory)
        offsets_bytes = accumulate(sizes_bytes, initial=0)
        pairs = zip(shapes, offsets_bytes, strict=False)
        return [slab.tensor(torch.float32, shape, offset).fill_(0.01) for shape, offset in pairs]

    device_s = median_s(_update(on_device, width, device), device, share_s)
    host = torch.device("cpu")
    update = _update(on_host, width, host)
    threads = update_threads(device)
    host_s = as_update(lambda: median_s(update, host, share_s), threads)
    copies = copies_of(device, COPY_BYTES)
    with beside(copies.h2d), beside(copies.d2h):
        busy_s = as_update(lambda: median_s(update, host, share_s), threads)
    numel = sum(torch.Size(shape).numel() for shape in _layer_shapes(width))
    found = {"update.device": numel / device_s, "update.host": numel / host_s, "update.busy_host": numel / busy_s}
    nbytes = _NUM_BUCKETS * (_MOST_FORM_BYTES * numel + 4 * KIB)  # and what aligns their tensors
    slab = Slab(nbytes, pin=platform_of(device).has_own_memory)
    for dtype, form in _FORMS:
        narrow = _form_update(slab, numel, dtype, form, device)
        form_s = as_update(partial(median_s, narrow, host, share_s), threads)
        found[f"{_OVER_FP32}{_name(dtype)}.{form.value}"] = form_s / host_s
    return found


def _update(allocate: Allocate, width: int, device: torch.device) -> Callable[[], None]:
    """Return a function that updates the next of several buckets at each call."""
    shapes = _layer_shapes(width)
    turns = cycle(
        [
            (*(allocate(shapes) for _ in range(_COPIES)), [torch.ones((), device=device) for _ in shapes])
            for _ in range(_NUM_BUCKETS)
        ]
    )

    def update() -> None:
        params, grads, means, squares, steps = next(turns)
        adamw(params, grads, means, squares, [], steps, fused=True, amsgrad=False, **_ADAMW)

    return update


def _form_update(
    slab: Slab, numel: int, dtype: torch.dtype, form: MomentForm, device: torch.device
) -> Callable[[], None]:
    """Return a function that updates the next of several buckets in `slab` at each call, as `HybridAdamW` does on the
    host of `device`: `numel` parameters in `dtype`, with fp32 masters if that has 16 bits, and moments in `form`."""
    num_blocks = num_scales(numel) if form.has_scales else 0
    rest = [(REST_DTYPES[dtype], numel)] if dtype in REST_DTYPES else []
    parts = [*((own, numel) for own in (dtype, dtype, *form.dtypes)), *2 * [(torch.float32, num_blocks)], *rest]
    sizes_bytes = [aligned_bytes(size * own.itemsize) for own, size in parts] * _NUM_BUCKETS
    pairs = zip(parts * _NUM_BUCKETS, accumulate(sizes_bytes, initial=0), strict=False)
    tensors = [slab.tensor(own, (size,), offset).fill_(0.01) for (own, size), offset in pairs]
    turns = cycle([tensors[first : first + len(parts)] for first in range(0, len(tensors), len(parts))])
    extras = Extras(**_ADAMW, form=form, threads=host_threads_for(device))

    def update() -> None:
        param, grad, mean, square, mean_scale, square_scale, *rest = next(turns)
        if form.has_scales:
            extras["exp_avg_scale"], extras["exp_avg_sq_scale"] = mean_scale, square_scale
        if not rest:
            mixed_adamw(param, mean, square, grad, None, 2, **extras)
            return
        run = split_adamw if rest[0].dtype == torch.int16 else mixed_adamw
        run(rest[0], mean, square, grad, param, 2, **extras)

    return update


def _layer_shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a GPT-2 layer: two norms, attention in and out, the two halves of the MLP."""
    matrices = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return (*((width,) for _ in range(4)), *matrices, *((shape[1],) for shape in matrices))


Progress = Callable[[str, float], None]
"""Called with the name of the present measurement, and the share of the time that is over, 0 to 1."""

_STAGES = (
    ("copies", 0.4, measure_copies),
    ("updates", 0.25, measure_updates),
    ("matrix products", 0.25, measure_products),
    ("kernels", 0.1, measure_kernels),
)
"""Name, share of the time, measurement. Copies have the largest share: they vary most."""
_ROUND_S = 5.0
"""Seconds of a round. A round takes at least 3 s, with one repeat of each measurement."""
_MAX_ROUNDS = 5


def measure_rates(device: torch.device, seconds: float, progress: Progress) -> dict[str, float]:
    """Return the rates of all stages by name, each the median of an odd number of rounds."""
    num_rounds = min(max(int(seconds / _ROUND_S), 1), _MAX_ROUNDS)
    num_rounds -= 1 - num_rounds % 2
    rounds: list[dict[str, float]] = []
    for number in range(num_rounds):
        found: dict[str, float] = {}
        over = 0.0
        for name, share, measure in _STAGES:
            progress(name, (number + over) / num_rounds)
            if distributed.is_available() and distributed.is_initialized():
                # All ranks measure the same rate at the same time, so that they share links and memory as in training.
                distributed.barrier()
            found.update(measure(device, share * seconds / num_rounds))
            over += share
        rounds.append(found)
    return {name: statistics.median(rates[name] for rates in rounds) for name in rounds[0]}


# ----------------------------------------------------------------------------------------------------------------------
# Measure the machine and combine its rates and sizes in a `Cluster`; add the rates of a disk to a `Cluster`.


def measure_machine(device: torch.device, *, seconds: float = 30.0) -> Cluster:
    """Return the machine with `device`, a CPU or a CUDA device, measured for about `seconds`.

    The number of threads stays as set in torch. If a process group is initialized, all ranks must call this together;
    they measure at the same time, and all ranks get the result of rank 0.
    """
    ranks = _Ranks.present()
    cluster = _measured(device, ranks, _no_report, seconds)
    if ranks.num_ranks == 1:
        return cluster
    of_first = [cluster]
    distributed.broadcast_object_list(of_first, src=0, device=device)
    return of_first[0]


def measure_fleet(device: torch.device, *, progress: Progress | None = None, seconds: float = 30.0) -> Fleet:
    """Return all ranks, each with the machine that it measured for about `seconds`; ranks that are alike are equal.

    If a process group is initialized, all ranks must call this together; all get the same fleet. `device` is as for
    `measure_machine`.
    """
    ranks = _Ranks.present()
    own = _measured(device, ranks, progress or _no_report, seconds)
    if ranks.num_ranks == 1:
        return fleet_of(own)
    said: list[tuple[str, Cluster]] = [(platform.node(), own)] * ranks.num_ranks
    distributed.all_gather_object(said, (platform.node(), own))
    hosts = list(dict.fromkeys(host for host, _ in said))
    links = [cluster.collective for _, cluster in said if cluster.collective is not None]
    slowest = min(links, key=lambda link: link.bytes_per_s, default=None)
    nodes = [cluster.nodes[0] for _, cluster in said]
    return with_like_seats(fleet_of_nodes(nodes, [hosts.index(host) for host, _ in said], slowest))


@torch.no_grad()
def _measured(device: torch.device, ranks: "_Ranks", report: Progress, seconds: float) -> Cluster:
    """Return the machine of this rank, with the links between `ranks`."""
    rates = measure_rates(device, seconds, report)
    source = f"measured, torch {torch.__version__}, num_threads {torch.get_num_threads()}"
    node = _node(device, rates, ranks.num_local, source)
    network: Link | None = None
    if ranks.num_ranks > 1:
        report("collectives", 1.0)

        def link_of(group: "distributed.ProcessGroup | None") -> Link:
            latency_s, bytes_per_s = measure_collectives(device, group)
            return _link(device, bytes_per_s, latency_s, source)

        # The link between the devices of a node, and the link between nodes; None for a missing link.
        over_all = link_of(None)
        peer = over_all if ranks.num_local == ranks.num_ranks else None
        network = None if peer is not None else over_all
        if peer is None and ranks.num_local > 1:
            own, _ = distributed.new_subgroups(group_size=ranks.num_local)
            # Each rank is in one of the subgroups; torch returns a number to ranks outside of all of them.
            peer = link_of(cast("distributed.ProcessGroup", own))
        node = replace(node, peer=peer, num_devices=ranks.num_local)
    cluster = Cluster(nodes=(node,) * (ranks.num_ranks // ranks.num_local), network=network)
    report("done", 1.0)
    return cluster


def _no_report(title: str, share_done: float) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The number of ranks, and the number of ranks on each host."""

    num_ranks: int = 1
    num_local: int = 1

    @classmethod
    def present(cls) -> "_Ranks":
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        num_ranks = distributed.get_world_size()
        num_local = num_local_ranks()
        # Plans assume equal nodes. If hosts have different numbers of ranks, all ranks count as one node.
        return cls(num_ranks=num_ranks, num_local=num_local if num_ranks % num_local == 0 else num_ranks)


def _node(device: torch.device, rates: Mapping[str, float], num_local: int, source: str) -> Node:
    """Return a node with a single device: name and reserves of the rough profile, memory and rates of this machine."""
    rough = profile_for(device.type, *memory_sizes_bytes(device), platform_of(device).name(device)).nodes[0]
    dtypes = [key.removeprefix("flops_per_s.") for key in rates if key.startswith("flops_per_s.")]
    profile = replace(
        rough.device,
        flops_per_s={dtype: _rounded(rates[f"flops_per_s.{dtype}"]) for dtype in dtypes},
        memory_bytes_per_s=_rounded(rates["pointwise_bytes_per_s"]),
        launch_s=_rounded(rates["launch_s"]),
        update_elements_per_s=_rounded(rates["update.device"]),
        source=source,
    )
    # The profile describes the host. Its ranks measured at the same time, each a share of the rate.
    host = replace(
        rough.host,
        pinned_bytes=pinned_limit_bytes(device),
        cores=num_usable_cores(),
        memory_bytes_per_s=_rounded(num_local * rates["dram_bytes_per_s"]),
        update_elements_per_s=_rounded(num_local * rates["update.host"]),
        busy_update_elements_per_s=_rounded(num_local * min(rates["update.busy_host"], rates["update.host"])),
        update_forms=tuple(
            FormPrice(
                dtype=_name(dtype),
                state_dtype=form.value,
                over_fp32=_rounded(rates[f"{_OVER_FP32}{_name(dtype)}.{form.value}"]),
            )
            for dtype, form in _FORMS
        ),
        flops_per_s={
            _name(dtype): _rounded(num_local * rates[f"{_HOST_FLOPS_PER_S}{_name(dtype)}"]) for dtype in _HOST_DTYPES
        },
        source=source,
    )
    h2d, d2h = (
        _link(
            device,
            rates[f"{name}.bytes_per_s"],
            rates[f"{name}.latency_s"],
            source,
            # If the other direction does not slow down this direction, noise may make the busy rate the higher rate.
            _rounded(min(rates[f"{name}.busy_bytes_per_s"], rates[f"{name}.bytes_per_s"])),
        )
        for name in ("h2d", "d2h")
    )
    return replace(rough, device=profile, host=host, h2d=h2d, d2h=d2h)


def _link(
    device: torch.device, bytes_per_s: float, latency_s: float, source: str, busy_bytes_per_s: float | None = None
) -> Link:
    return Link(
        bytes_per_s=_rounded(bytes_per_s),
        latency_s=_rounded(latency_s),
        overlaps_compute=platform_of(device).has_own_memory,
        source=source,
        busy_bytes_per_s=busy_bytes_per_s,
    )


_NBYTES = 256 * MIB
"""Twice the bytes after which four threads of 4 MiB reached their rate."""
_NUM_RUNS = 3


def with_disk(cluster: Cluster, disk_path: "str | os.PathLike[str]", nbytes: int = _NBYTES) -> Cluster:
    """Return `cluster` with the rates of the disk of the folder `disk_path`, measured with a file of `nbytes`.

    Raises DiskFailed if the folder cannot be written, DiskFull if the disk is full.
    """
    store = DiskStore(disk_path)
    try:
        region = store.allocate("measure", nbytes)
        (buffer,) = staging_buffers(1, nbytes)
        buffer.random_(0, 256)  # random bytes, because a drive may store zeros faster
        region.write_from(buffer).wait()  # not timed, because the first write also allocates the blocks of the file
        runs = range(_NUM_RUNS)
        write_s = statistics.median(_timed_s(lambda: region.write_from(buffer).wait()) for _ in runs)
        read_s = statistics.median(_timed_s(lambda: region.read_into(buffer).wait()) for _ in runs)
    finally:
        store.close()
    rates = {"disk_read_bytes_per_s": _rounded(nbytes / read_s), "disk_write_bytes_per_s": _rounded(nbytes / write_s)}
    nodes = tuple(replace(node, host=replace(node.host, **rates)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _rounded(rate: float) -> float:
    """Return `rate` rounded to four digits, the precision of a measurement."""
    return float(f"{rate:.4g}")
