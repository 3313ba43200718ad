"""Update a bucket with its tensors and hyperparameters at the time of the request.

    update DEVICE, state DEVICE     in place, on the device
    update HOST                     in place, on the host; if the parameter is on the device, its value and gradient are
                                    copied to the host, and the new value is copied back
    update DEVICE, state elsewhere  streamed: tensors on the host are copied to the device, updated there, copied back

If the compute device is the CPU, device and host share a memory, and only streamed state is copied.
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
    """An optimizer's update of a bucket."""

    bucket: RunningBucket
    executor: Executor
    rule: UpdateRule
    buffers: StateBuffers
    parts: tuple[GroupSlice, ...]
    disk: DiskUpdate | None = None
    """Reads the state from disk and writes it back; None if the state is in memory."""

    @property
    def is_on_device(self) -> bool:
        """Return whether the update runs on the device."""
        return self.bucket.placement.update is Tier.DEVICE

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the parameters of all group slices."""
        return [param for part in self.parts for param in part.params]

    @property
    def grads(self) -> list[torch.Tensor]:
        """Return the gradients of all group slices."""
        return [grad for part in self.parts for grad in part.grads]

    @property
    def label(self) -> str:
        """Return the name of the update in ledgers and errors."""
        return f"update {self.bucket.spec.id}"

    def run(self) -> None:
        """Run the update now. Device kernels may still run when this returns; host updates have finished."""
        if not self.is_on_device:
            wait_on_compute(self.work(None)(), self.executor.device)
            return
        with self.executor.ledger.span(Lane.COMPUTE, self.label):
            for part in self.parts:
                if self.bucket.placement.streamed:
                    self._stream(part)
                else:
                    self.rule.update(part.weights, part.grads, part.states, part.group)
                    _store_results(part.states, part.states, part.buffers)

    def work(self, arrived: torch.cuda.Event | None) -> Work:
        """Return a function that updates the bucket on the host after the event `arrived`.

        Copies of tensors from the device to the host start before this returns.
        """
        parts = [self._on_host(part) for part in self.parts]
        copied_back = [
            (home, updated)
            for part, host_part in zip(self.parts, parts, strict=True)
            for home, updated in zip(part.weights, host_part.weights, strict=True)
            if home is not updated
        ]
        landed = self.executor.d2h.mark() if copied_back else arrived
        # `work` must not refer to `self`: a queued update would keep the gradients on the device alive.
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
                    _store_results(part.states, part.states, part.buffers)
            guard.check()
            if not copied_back:
                return None
            with h2d.beside_compute():
                for home, updated in copied_back:
                    home.copy_(updated, non_blocking=True)
            return h2d.mark()

        return work

    def _on_host(self, part: GroupSlice) -> GroupSlice:
        """Return `part` with weights and gradients on the host; copies from the device start before this returns."""
        if part.weights[0].device.type == "cpu":
            return part
        with self.executor.d2h.behind_compute():
            weights, grads = (
                self.buffers.copies(self.bucket, kind, dict(zip(part.params, values, strict=True)))
                for kind, values in (("landed param", part.weights), ("landed grad", part.grads))
            )
        return replace(part, weights=tuple(weights), grads=tuple(grads))

    def _stream(self, part: GroupSlice) -> None:
        """Update `part` on the device, in copies of its tensors that live on the host.

        The copies of a bucket are freed before the next bucket is streamed.
        """
        device = self.executor.device

        def on_device(tensor: torch.Tensor, *, is_state: bool = False) -> torch.Tensor:
            is_copied = is_state or tensor.device != device
            return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True) if is_copied else tensor

        weights = [on_device(weight) for weight in part.weights]
        grads = [on_device(grad) for grad in part.grads]
        states = [
            {
                name: on_device(value, is_state=True) if self._is_streamed(name, value, part.group) else value
                for name, value in state.items()
            }
            for state in part.states
        ]
        self.rule.update(weights, grads, states, part.group)
        for home, weight in zip(part.weights, weights, strict=True):
            if home is not weight:
                home.copy_(weight, non_blocking=True)
        _store_results(part.states, states, part.buffers)
        if device.type == "cuda":
            # The next reader of the state or the parameter on the host does not wait for the device by itself.
            torch.cuda.current_stream(device).synchronize()

    def _is_streamed(self, name: str, value: object, group: Mapping[str, Any]) -> bool:
        return isinstance(value, torch.Tensor) and self.rule.moves_with_update(name, group)


def _store_results(
    homes: Sequence[State], updated: Sequence[State], buffers: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """Write the states `updated` to `homes`: in place if shape and dtype are equal, else as new tensors.

    A statistic that has a buffer in `buffers` goes into the buffer. `updated` may be `homes` itself.
    """
    for index, (home, state) in enumerate(zip(homes, updated, strict=True)):
        for name, value in list(state.items()):
            target = buffers[index].get(name, home.get(name)) if buffers else home.get(name)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(target, torch.Tensor)
                and target is not value
                and (target.shape, target.dtype) == (value.shape, value.dtype)
            ):
                home[name] = target.copy_(value, non_blocking=True)
            else:
                home[name] = value
