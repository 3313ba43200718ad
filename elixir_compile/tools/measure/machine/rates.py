"""Measure all rates of compute, updates and copies, each as the median of several rounds.

Other processes load the machine in bursts of seconds, longer than a measurement, so all repeats of a measurement may be
wrong. Rounds spread the repeats of each measurement over the full time.

Updates are those of `HybridAdamW`, a fused call over the tensors of a bucket, which has the tensors of one transformer
layer. Several buckets take turns, so that none is in a cache.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import distributed
from torch.nn import functional
from torch.optim.adamw import adamw

from elixir_compile.compat.platforms import platform_of
from elixir_compile.compat.platforms.update_threads import as_update, update_threads
from elixir_compile.runtime.slab import Slab, aligned_bytes
from elixir_compile.tools.measure.machine.clock import beside, median_s
from elixir_compile.tools.measure.machine.links import COPY_BYTES, copies_of, measure_copies

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Tokens and width of the MLP of a transformer layer: a small layer, and a large layer that fills an accelerator.
_LAYERS = {"host": (512, 768), "accelerator": (4096, 4096)}
_GROWTH = 8
"""Twice the tokens and twice the width make 2 * 2 * 2 times the arithmetic."""
_POINTWISE_ROWS = {"host": 6144, "accelerator": 262144}
"""Rows of 256 floats: 6 MiB, an activation of a small transformer; 256 MiB, more than an accelerator's cache holds."""
_DRAM_NUMEL = 16 * 2**20
_NUM_LAUNCHES = 200


def _kind(device: torch.device) -> str:
    return "accelerator" if platform_of(device).has_own_memory else "host"


def measure_kernels(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return `pointwise_bytes_per_s`, `launch_s` and the host's `dram_bytes_per_s`."""
    share_s = at_most_s / 3
    return {
        "pointwise_bytes_per_s": _pointwise_bytes_per_s(device, share_s),
        "launch_s": _launch_s(device, share_s),
        "dram_bytes_per_s": _dram_bytes_per_s(share_s),
    }


def measure_products(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return the floating-point operations per second of matrix products by dtype, as `flops_per_s.float32`.

    Timed are the three products of a linear layer in a training step.
    """
    share_s = at_most_s / len(_DTYPES)
    return {
        f"flops_per_s.{str(dtype).removeprefix('torch.')}": _flops_per_s(device, dtype, share_s) for dtype in _DTYPES
    }


def _flops_per_s(device: torch.device, dtype: torch.dtype, at_most_s: float) -> float:
    """Return the rate of `dtype` at the size in `_LAYERS`, or at a smaller size if that would take too long.

    A dtype may be emulated: float16 on a CPU without instructions for it is 40 times slower than float32.
    """
    tokens, width = (size // 8 for size in _LAYERS[_kind(device)])
    while True:
        products, flops = _products(device, dtype, tokens, width)
        first_s = median_s(products, device, 0.0)
        is_last = width >= _LAYERS[_kind(device)][1] or _GROWTH * first_s * 4 > at_most_s
        if is_last:
            return flops / median_s(products, device, at_most_s / 2)
        tokens, width = 2 * tokens, 2 * width


def _products(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> tuple[Callable[[], None], int]:
    x = torch.full((tokens, width), 0.5, dtype=dtype, device=device)
    weight = torch.full((4 * width, width), 0.01, dtype=dtype, device=device)
    gradient = torch.full((tokens, 4 * width), 0.01, dtype=dtype, device=device)

    def products() -> None:
        torch.matmul(x, weight.T)
        torch.matmul(gradient, weight)
        torch.matmul(gradient.T, x)

    return products, 3 * 2 * tokens * width * 4 * width


def _pointwise_bytes_per_s(device: torch.device, at_most_s: float) -> float:
    """Return the bytes that pointwise kernels read and write per second: an addition, a gelu and a softmax."""
    x = torch.linspace(-3, 3, _POINTWISE_ROWS[_kind(device)] * 256, device=device).view(-1, 256)
    y = torch.ones_like(x)

    def kernels() -> None:
        functional.gelu(x)
        torch.add(x, y)
        torch.softmax(x, dim=-1)

    num_passes = 2 + 3 + 2  # each reads its inputs and writes one result
    return num_passes * x.nbytes / median_s(kernels, device, at_most_s)


def _launch_s(device: torch.device, at_most_s: float) -> float:
    """Return the seconds of an op on 16 elements, which is the cost of its launch."""
    one = torch.ones(16, device=device)

    def ops() -> None:
        for _ in range(_NUM_LAUNCHES):
            torch.add(one, one)

    return median_s(ops, device, at_most_s) / _NUM_LAUNCHES


def _dram_bytes_per_s(at_most_s: float) -> float:
    """Return the bytes that the host's memory moves per second, reads and writes together, in a copy and a sum."""
    host = torch.device("cpu")
    x, y, out = (torch.ones(_DRAM_NUMEL, device=host) for _ in range(3))
    copy_s = median_s(lambda: out.copy_(x), host, at_most_s / 2)
    sum_s = median_s(lambda: torch.add(x, y, out=out), host, at_most_s / 2)
    return 5 * x.nbytes / (copy_s + sum_s)


# 7 and 28 million elements, 28 and 113 MB in float32: the sizes of buckets. On an accelerator the launch would take
# most of the time of the smaller bucket.
_WIDTHS = {"host": 768, "accelerator": 1536}
_NUM_BUCKETS = 3
_COPIES = 4
"""Parameters, gradients and two moments."""

Allocate = Callable[[Sequence[tuple[int, ...]]], list[torch.Tensor]]


def measure_updates(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return elements/s as `update.device`, `update.host`, and `update.busy_host` during copies in both directions."""
    share_s = at_most_s / 3
    width = _WIDTHS[_kind(device)]

    def on_device(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return [torch.full(shape, 0.01, device=device) for shape in shapes]

    def on_host(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return _slab_tensors(shapes, pin=platform_of(device).has_own_memory)

    device_s = median_s(_update(on_device, width, device), device, share_s)
    host = torch.device("cpu")
    update = _update(on_host, width, host)
    threads = update_threads(device)
    host_s = as_update(lambda: median_s(update, host, share_s), threads)
    copies = copies_of(device, COPY_BYTES)
    with beside(copies.h2d), beside(copies.d2h):
        busy_s = as_update(lambda: median_s(update, host, share_s), threads)
    numel = _numel(_layer_shapes(width))
    return {"update.device": numel / device_s, "update.host": numel / host_s, "update.busy_host": numel / busy_s}


def _update(allocate: Allocate, width: int, device: torch.device) -> Callable[[], None]:
    """Return a function that updates the next of several buckets at each call."""
    shapes = _layer_shapes(width)
    buckets = [
        (
            *(allocate(shapes) for _ in range(_COPIES)),
            [torch.ones((), device=device) for _ in shapes],
        )
        for _ in range(_NUM_BUCKETS)
    ]
    turns = cycle(buckets)

    def update() -> None:
        params, grads, means, squares, steps = next(turns)
        adamw(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=1e-2,
            eps=1e-8,
            maximize=False,
        )

    return update


def _layer_shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a GPT-2 layer: two norms, attention in and out, the two halves of the MLP."""
    matrices = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return (*((width,) for _ in range(4)), *matrices, *((shape[1],) for shape in matrices))


def _numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _slab_tensors(shapes: Sequence[tuple[int, ...]], *, pin: bool) -> list[torch.Tensor]:
    sizes_bytes = [aligned_bytes(torch.Size(shape).numel() * torch.float32.itemsize) for shape in shapes]
    slab = Slab(sum(sizes_bytes), pin=pin)
    offsets_bytes = [sum(sizes_bytes[:place]) for place in range(len(sizes_bytes))]
    return [
        slab.tensor(torch.float32, shape, offset).fill_(0.01)
        for shape, offset in zip(shapes, offsets_bytes, strict=True)
    ]


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
