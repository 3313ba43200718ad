"""Measure the links of a machine: copies between host and device, and collectives between ranks.

    h2d   a slab into a newly allocated flat tensor, then a second time into the same    (gather)
    d2h   a tensor into a slab used before                                               (offload)

Copies are made as the executor makes them. The copy to the device is made twice because a step has copies to new and to
reused memory. On a CPU, newly mapped memory costs a page fault every 4 KiB, and memory reused by the C allocator does
not: in GPT-2 under a budget gathers ran at 11-12 GB/s in the forward, and at 2-4 GB/s in the backward, near the peak of
the step. glibc maps each allocation of 32 MiB or more, so the size here is larger.

    seconds of a ring of n ranks = (n - 1) * latency_s + bytes sent by each rank / bytes_per_s

In an all-gather and a reduce-scatter, each rank sends (n - 1) / n of the full tensor. Latency and rate minimise the
squared relative error over all sizes of both collectives.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.base.units import KIB, MIB
from elixir_compile.compat.platforms import platform_of
from elixir_compile.runtime.distributed.exchange import messenger_of
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.slab import Slab
from elixir_compile.tools.measure.machine.clock import beside, median_s

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
        points.append((sent_bytes, _median_s(partial(all_gather, whole, shard), device)))
        points.append((sent_bytes, _median_s(partial(reduce_scatter, shard, whole), device)))
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


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    seconds: list[float] = []
    for _ in range(1 + _REPEATS):
        began_s = time.perf_counter()
        run()
        platform_of(device).synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[1:])


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
