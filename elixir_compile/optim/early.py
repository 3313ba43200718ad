"""Which parameters were updated inside the backward, and that nothing touched their gradients since.

backward    gradients of a bucket land -> its update is queued, `note`
step()      `check`: the same gradients, unchanged, the same hyperparameters -> nothing left to do for them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir_compile.errors import GradientsChanged
from elixir_compile.optim.guard import name_of
from elixir_compile.optim.update import snapshot

_UPDATED = "was updated in its backward, and then"


@dataclass(frozen=True, slots=True)
class _Note:
    """What an update read."""

    grad: torch.Tensor
    version: int
    group: Mapping[str, Any]


class EarlyUpdates:
    """The updates of one optimizer between a backward and its step."""

    def __init__(self) -> None:
        self._notes: dict[nn.Parameter, _Note] = {}

    def refuse(self, because: str) -> None:
        """Raise GradientsChanged, and forget all, where a parameter was updated since the last step."""
        notes, self._notes = self._notes, {}
        for param in notes:
            raise GradientsChanged(name_of(param), f"{_UPDATED} {because}")

    def require_first(self, params: Sequence[nn.Parameter]) -> None:
        """Raise GradientsChanged for a parameter that was updated since the last step."""
        for param in params:
            if param in self._notes:
                raise GradientsChanged(
                    name_of(param), f"{_UPDATED} another backward pass, or code outside the graph, added to it"
                )

    def note(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Remember what an update of `params`, which are in `group` and have gradients, reads."""
        now = snapshot(group) if params else {}
        for param in params:
            if param.grad is not None:
                self._notes[param] = _Note(param.grad, param.grad._version, now)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> frozenset[nn.Parameter]:
        """Return the parameters that need no update any more, and forget them.

        Raises GradientsChanged where a gradient, or a hyperparameter, is not what the update read.
        """
        notes, self._notes = self._notes, {}
        for group in groups:
            now = snapshot(group)
            for param in group["params"]:
                note = notes.get(param)
                if note is None:
                    continue
                if param.grad is not note.grad or note.grad._version != note.version:
                    raise GradientsChanged(name_of(param), f"{_UPDATED} its gradient was changed")
                if not _is_same(now, note.group):
                    raise GradientsChanged(name_of(param), f"{_UPDATED} a hyperparameter of its group was changed")
        return frozenset(notes)


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name])
        if isinstance(value, torch.Tensor) and isinstance(second[name], torch.Tensor)
        else value == second[name]
        for name, value in first.items()
    )
