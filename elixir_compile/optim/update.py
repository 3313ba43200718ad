"""One update of one bucket: its tensors and hyperparameters, as they were when the update was asked for.

    update DEVICE, state DEVICE     in place, on the device
    update HOST                     in place, on the host; of a parameter on the device the gradient and the parameter
                                    travel to the host, and the new parameter travels back
    update DEVICE, state elsewhere  streamed: what is on the host travels to the device, is updated there, and back

On a CPU the device and the host are one memory and nothing travels, but for the state that is streamed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from elixir_compile.ir import Lane, Tier
from elixir_compile.optim.clip.guard import GradientGuard
from elixir_compile.optim.group_slice import GroupSlice
from elixir_compile.optim.rule import State, UpdateRule
from elixir_compile.optim.state.disk_update import DiskUpdate
from elixir_compile.optim.state.placer import StateBuffers
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.streams import wait_on_compute
from elixir_compile.runtime.updates import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUpdate:
    """What one optimizer does to one bucket."""

    bucket: RunningBucket
    executor: Executor
    rule: UpdateRule
    buffers: StateBuffers
    parts: tuple[GroupSlice, ...]
    disk: DiskUpdate | None = None
    """What reads the state and writes it back, where it is on disk."""

    @property
    def is_on_device(self) -> bool:
        """Whether the device runs it."""
        return self.bucket.placement.update is Tier.DEVICE

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, of all parts."""
        return [param for part in self.parts for param in part.params]

    @property
    def grads(self) -> list[torch.Tensor]:
        """The gradients, of all parts."""
        return [grad for part in self.parts for grad in part.grads]

    @property
    def label(self) -> str:
        """What ledgers call it."""
        return f"update {self.bucket.spec.id}"

    def run(self) -> None:
        """Do it now; the device may still be at it when this returns, the host is not."""
        if not self.is_on_device:
            wait_on_compute(self.work(None)(), self.executor.device)
            return
        with self.executor.ledger.span(Lane.COMPUTE, self.label):
            for part in self.parts:
                if self.bucket.placement.streamed:
                    self._stream(part)
                else:
                    self.rule.update(part.weights, part.grads, part.states, part.group)
                    _keep(part.states, part.states, part.buffers)

    def work(self, arrived: torch.cuda.Event | None) -> Work:
        """Return what updates the bucket on the host, once `arrived`; on a device, copies to the host begin here."""
        parts = [self._leave(part) for part in self.parts]
        pairs = [
            (home, updated)
            for part, own in zip(self.parts, parts, strict=True)
            for home, updated in zip(part.weights, own.weights, strict=True)
            if home is not updated
        ]
        landed = self.executor.d2h.mark() if pairs else arrived
        # Not `self`, whose gradients are memory of the device.
        rule, disk, ledger, label, h2d = self.rule, self.disk, self.executor.ledger, self.label, self.executor.h2d
        guard = GradientGuard(self.params, self.grads)

        def work() -> torch.cuda.Event | None:
            if landed is not None:
                landed.synchronize()
            guard.check()
            with ledger.span(Lane.HOST, label):
                if disk is not None:
                    disk.run(rule, parts)
                for part in parts if disk is None else ():
                    rule.update(part.weights, part.grads, part.states, part.group)
                    _keep(part.states, part.states, part.buffers)
            guard.check()
            if not pairs:
                return None
            with h2d.beside_compute():
                for home, updated in pairs:
                    home.copy_(updated, non_blocking=True)
            return h2d.mark()

        return work

    def _leave(self, part: GroupSlice) -> GroupSlice:
        """Return `part` as the host updates it; copies to the host of what is not there begin here."""
        if part.weights[0].device.type == "cpu":
            return part
        with self.executor.d2h.behind_compute():
            weights, grads = (
                self.buffers.copies(self.bucket, kind, dict(zip(part.params, values, strict=True)))
                for kind, values in (("landed param", part.weights), ("landed grad", part.grads))
            )
        return replace(part, weights=tuple(weights), grads=tuple(grads))

    def _stream(self, part: GroupSlice) -> None:
        """Update on the device, in copies of what is not there; one bucket's copies are gone before the next's."""
        device = self.executor.device

        def there(tensor: torch.Tensor, *, is_state: bool = False) -> torch.Tensor:
            is_copied = is_state or tensor.device != device
            return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True) if is_copied else tensor

        weights = [there(weight) for weight in part.weights]
        grads = [there(grad) for grad in part.grads]
        states = [
            {
                name: there(value, is_state=True) if self._is_streamed(name, value, part.group) else value
                for name, value in state.items()
            }
            for state in part.states
        ]
        self.rule.update(weights, grads, states, part.group)
        for home, weight in zip(part.weights, weights, strict=True):
            if home is not weight:
                home.copy_(weight, non_blocking=True)
        _keep(part.states, states, part.buffers)
        if device.type == "cuda":
            # Whoever reads the state or the parameter on the host next does not wait for the device.
            torch.cuda.current_stream(device).synchronize()

    def _is_streamed(self, name: str, value: object, group: Mapping[str, Any]) -> bool:
        return isinstance(value, torch.Tensor) and self.rule.travels(name, group)


def _keep(homes: Sequence[State], updated: Sequence[State], buffers: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Bring what an update wrote home: into the tensor that was there before, or into its room."""
    for index, (home, state) in enumerate(zip(homes, updated, strict=True)):
        for name, value in list(state.items()):
            target = buffers[index].get(name, home.get(name)) if buffers else home.get(name)
            is_elsewhere = isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor) and target is not value
            if is_elsewhere and (target.shape, target.dtype) == (value.shape, value.dtype):
                home[name] = target.copy_(value, non_blocking=True)
            else:
                home[name] = value
