"""Track parameters that were updated during the backward, and check at `step()` if their gradients changed.

backward    gradients of a bucket are published -> its update is queued, `note`
step()      `check`: same gradients, unchanged, same hyperparameters -> these parameters need no further update
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir_compile.errors import GradientsChanged
from elixir_compile.optim.clip.guard import name_of, watch
from elixir_compile.optim.group_slice import snapshot
from elixir_compile.optim.rule import GRAD_SCALE
from elixir_compile.runtime.published import GradientSnapshot

_UPDATED = "was updated in its backward, and then"


@dataclass(frozen=True, slots=True)
class _Note:
    """The inputs of an update: gradient and hyperparameters."""

    grad: GradientSnapshot
    group: Mapping[str, Any]


class EarlyUpdates:
    """The updates that an optimizer queued in a backward, until the next `step()`."""

    def __init__(self) -> None:
        self._notes: dict[nn.Parameter, _Note] = {}
        self._overwritten: dict[nn.Parameter, GradientSnapshot] = {}
        """By parameter, the gradient of an update whose result a loaded state dict has replaced."""

    def refuse(self, because: str) -> None:
        """Raise GradientsChanged if a parameter was updated since the last step; forget all updates."""
        notes, self._notes = self._notes, {}
        for param in notes:
            raise GradientsChanged(name_of(param), f"{_UPDATED} {because}")

    def require_first(self, params: Sequence[nn.Parameter]) -> None:
        """Raise GradientsChanged, and forget all, if any of `params` was updated since the last step."""
        for param in params:
            note = self._notes.get(param)
            if note is not None:
                self._notes = {}
                is_added_to = note.grad.is_of(param.grad)
                because = "another backward pass, or code outside the graph, added to it"
                dropped = "its gradient was dropped without a `step()`, so the update is in the weights already"
                raise GradientsChanged(name_of(param), f"{_UPDATED} {because if is_added_to else dropped}")

    def forget_dropped(self) -> None:
        """Forget notes of parameters whose gradient was dropped; called before the first step, when no update runs."""
        self._notes = {param: note for param, note in self._notes.items() if note.grad.is_of(param.grad)}

    def overwrite(self, *, were_updated: bool) -> None:
        """Forget all updates because a state dict is being loaded.

        If `were_updated`, the next `check` raises for each parameter that still has the gradient of its update.
        """
        notes, self._notes = self._notes, {}
        if were_updated:
            self._overwritten.update((param, note.grad) for param, note in notes.items())

    def note(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Record the gradients and hyperparameters that an update of `params`, which are in `group`, reads."""
        now = snapshot(group) if params else {}
        for param in params:
            if param.grad is not None:
                watch(param.grad)
                self._notes[param] = _Note(GradientSnapshot.of(param.grad), now)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> frozenset[nn.Parameter]:
        """Return the parameters that were updated in the backward, and forget them.

        Raises GradientsChanged if a gradient or a hyperparameter differs from the value at the update.
        """
        notes, self._notes = self._notes, {}
        overwritten, self._overwritten = self._overwritten, {}
        for param, grad in overwritten.items():
            if grad.is_of(param.grad):
                raise GradientsChanged(name_of(param), f"{_UPDATED} a state dict was loaded before `step()`")
        if not notes:
            return frozenset()
        for group in groups:
            now = snapshot(group)
            for param in group["params"]:
                note = notes.get(param)
                if note is None:
                    continue
                if not note.grad.is_current(param.grad):
                    raise GradientsChanged(name_of(param), f"{_UPDATED} its gradient was changed")
                if not _is_same(now, note.group):
                    raise GradientsChanged(name_of(param), f"{_UPDATED} {_difference(now, note.group)}")
        return frozenset(notes)


def _difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    is_clipped = now.get(GRAD_SCALE, 1.0) != before.get(GRAD_SCALE, 1.0)
    return "`clip_grad_norm_` scaled its gradient" if is_clipped else "a hyperparameter of its group was changed"


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name])
        if isinstance(value, torch.Tensor) and isinstance(second[name], torch.Tensor)
        else value == second[name]
        for name, value in first.items()
    )
