"""Measure the latency and the rate of collectives: all-gather and reduce-scatter over the ranks of a group, by size.

    seconds of a ring of n ranks = (n - 1) * latency_s + bytes sent by each rank / bytes_per_s

Each rank sends (n - 1) / n of the full tensor. Latency and rate minimise the squared relative error over all sizes of
both collectives.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.runtime.distributed.exchange import messenger_of
from elixir_compile.units import KIB, MIB

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
        if device.type == "cuda":
            torch.cuda.synchronize(device)
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
