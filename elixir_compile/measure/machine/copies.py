"""Measure the latencies and rates of copies between a slab on the host and the device, made as the executor makes them.

    h2d   a slab into a newly allocated flat tensor, then a second time into the same    (gather)
    d2h   a tensor into a slab used before                                               (offload)

The copy to the device is made twice because a step has copies to new and to reused memory. On a CPU, newly mapped
memory costs a page fault every 4 KiB, and memory reused by the C allocator does not: in GPT-2 under a budget gathers
ran at 11-12 GB/s in the forward, and at 2-4 GB/s in the backward, near the peak of the step. glibc maps each
allocation of 32 MiB or more, so the size here is larger.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from elixir_compile.measure.machine.clock import beside, median_s
from elixir_compile.runtime.slab import Slab
from elixir_compile.runtime.streams import CopyStream
from elixir_compile.units import MIB

COPY_BYTES = 64 * MIB
_LATENCY_BYTES = 4096
_NUM_COPIES = {"h2d": 2, "d2h": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copy of each direction. It is complete as soon as the call returns, and returns the written tensor."""

    h2d: Callable[[], torch.Tensor]
    d2h: Callable[[], torch.Tensor]


def copies_of(device: torch.device, nbytes: int) -> Copies:
    """Return copies of `nbytes` between host memory, pinned for CUDA, and `device`."""
    slab = Slab(2 * nbytes, pin=device.type == "cuda")
    flat = slab.tensor(torch.uint8, (2 * nbytes,), 0).fill_(1)
    home, target = flat[:nbytes], flat[nbytes:]
    leaving = torch.full((nbytes,), 2, dtype=torch.uint8, device=device)
    h2d_stream, d2h_stream = CopyStream(device), CopyStream(device)

    def h2d() -> torch.Tensor:
        arriving = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for _ in range(_NUM_COPIES["h2d"]):
            with h2d_stream.behind_compute():
                arriving.copy_(home, non_blocking=True)
        h2d_stream.synchronize()
        return arriving

    def d2h() -> torch.Tensor:
        with d2h_stream.behind_compute():
            target.copy_(leaving, non_blocking=True)
        d2h_stream.synchronize()
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
