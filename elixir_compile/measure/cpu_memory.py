"""Record the blocks of the CPU's allocator in a step, and tell their kinds.

torch.profiler sees the threads that inherit it: the caller's and autograd's. What the worker of host updates allocates
is not in the figures, nor are slabs, which are host memory.
"""

import heapq
import time
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from elixir_compile.compat import cpu_allocations
from elixir_compile.ir.kinds import Kind, Lane
from elixir_compile.ir.observed import Interval, Live
from elixir_compile.ir.record import Span
from elixir_compile.measure.lifetimes import OTHER, live_by_kind
from elixir_compile.measure.step import Resident
from elixir_compile.ops.shards import own_part
from elixir_compile.runtime.recording import Place

_CLOCKS_APART_S = 1e-4
"""How far the profiler's times of allocations may be from the clock of the host: it converts them from a counter of the
processor. Two gathers are further apart."""


class CpuMemory:
    """The blocks of the CPU's allocator from `start` to `stop`."""

    def __init__(self, kinds: dict[int, str]) -> None:
        """`kinds` are the kinds of blocks that are there before the step, by address."""
        self._kinds = kinds
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._resident = Resident()
        self._began_s, self._began_ns = 0.0, 0

    def start(self) -> None:
        """Begin to record."""
        self._profiler.start()
        self._began_s, self._began_ns = time.perf_counter(), time.time_ns()

    def stop(self) -> None:
        """End the recording."""
        self._profiler.stop()
        self._resident.close()

    def live(
        self, began_s: float, intervals: Sequence[Interval], spans: Sequence[Span], places: Iterable[Place]
    ) -> Live:
        """Return the bytes by kind over the step, which began at `began_s` of `time.perf_counter`."""
        resident = {
            address: (nbytes, self._kinds.get(address, OTHER)) for address, nbytes in self._resident.nbytes_at.items()
        }
        freed = sorted((at_ns, address, 0) for at_ns, address in self._resident.freed)
        merged = heapq.merge(freed, cpu_allocations(self._profiler), key=lambda event: event[0])
        offset_s = self._began_s - began_s

        def since_began_s(at_ns: int) -> float:
            return (at_ns - self._began_ns) / 1e9 + offset_s

        events = [(since_began_s(at_ns), address, nbytes) for at_ns, address, nbytes in merged]
        placed = [
            Span(
                lane=Lane.COMPUTE,
                label=place.label,
                start_s=since_began_s(place.start_ns) - _CLOCKS_APART_S,
                end_s=since_began_s(place.end_ns) + _CLOCKS_APART_S,
            )
            for place in places
        ]
        return live_by_kind(resident, events, intervals, spans, placed)


def kinds_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, str]:
    """Return the kinds of the blocks of parameters, gradients, buffers and optimizer state on a CPU, by address.

    Does not wait for queued updates: nothing reads a value.
    """
    found: dict[int, str] = {}
    with torch.DisableTorchFunctionSubclass():
        for optimizer in optimizers:
            for state in vars(optimizer)["state"].values():
                for name, value in state.items():
                    _add(found, value, Kind.MASTER if name == "master" else Kind.MOMENT)
        for buffer in model.buffers():
            _add(found, buffer, Kind.BUFFER)
        for param in model.parameters():
            _add(found, param.grad, Kind.GRAD)
            _add(found, param, Kind.PARAM)
    return found


def _add(found: dict[int, str], value: object, kind: str) -> None:
    if isinstance(value, torch.Tensor):
        own = own_part(value)
        if own.device.type == "cpu" and own.layout is torch.strided:
            found[own.untyped_storage().data_ptr()] = kind
