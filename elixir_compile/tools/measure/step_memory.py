"""The record of the device bytes of a step on any device, and the kinds of the blocks that are there before it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from elixir_compile.graph.ops.shards import own_part
from elixir_compile.ir.kinds import Kind
from elixir_compile.ir.record import Span
from elixir_compile.runtime.recording import Anchor, Taken
from elixir_compile.tools.measure.phases import StepTimes
from elixir_compile.tools.study.observed import Live


class StepMemory(Protocol):
    """The blocks of the allocator of a device from `start` to `stop`."""

    def start(self) -> None:
        """Begin to record."""
        ...

    def stop(self) -> None:
        """End the recording."""
        ...

    def live(
        self,
        times: StepTimes,
        spans: Sequence[Span],
        taken: Iterable[Taken],
    ) -> Live | None:
        """Return the bytes by kind over the step; None if events of the allocator were lost."""
        ...


class AllocatorClock(NamedTuple):
    """The clock of an allocator, that of `time.time_ns`, on the axis of a step: seconds since the step began."""

    began: Anchor
    """The moment at which the record of the allocator began."""
    step_began_s: float
    """As `time.perf_counter`."""

    def at_s(self, time_ns: int) -> float:
        """Return the moment `time_ns` on the axis of the step."""
        return (time_ns - self.began.time_ns) / 1e9 + self.began.perf_s - self.step_began_s


def kinds_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> dict[int, str]:
    """Return the kinds of the blocks of parameters, gradients, buffers and optimizer state on `device`, by address.

    Does not wait for queued updates: nothing reads a value.
    """
    found: dict[int, str] = {}

    def add(value: object, kind: str) -> None:
        if isinstance(value, torch.Tensor):
            own = own_part(value)
            if own.device == device and own.layout is torch.strided:
                found[own.untyped_storage().data_ptr()] = kind

    with torch.DisableTorchFunctionSubclass():
        for optimizer in optimizers:
            for state in vars(optimizer)["state"].values():
                for name, value in state.items():
                    add(value, Kind.MASTER if name == "master" else Kind.MOMENT)
        for buffer in model.buffers():
            add(buffer, Kind.BUFFER)
        for param in model.parameters():
            add(param.grad, Kind.GRAD)
            add(param, Kind.PARAM)
    return found
