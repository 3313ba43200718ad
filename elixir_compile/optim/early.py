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
from elixir_compile.ops.registry import slot_of
from elixir_compile.optim.update import Part, snapshot


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

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._notes

    def require_first(self, params: Sequence[nn.Parameter]) -> None:
        """Raise GradientsChanged for a parameter that was updated since the last step."""
        for param in params:
            if param in self._notes:
                raise GradientsChanged(_name(param), "another backward pass, or code outside the graph, added to it")

    def note(self, part: Part) -> None:
        """Remember what an update of `part` reads."""
        for param, grad in zip(part.params, part.grads, strict=True):
            self._notes[param] = _Note(grad, grad._version, part.group)

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
                    raise GradientsChanged(_name(param), "its gradient was changed")
                if not _is_same(now, note.group):
                    raise GradientsChanged(_name(param), "a hyperparameter of its group was changed")
        return frozenset(notes)


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name])
        if isinstance(value, torch.Tensor) and isinstance(second[name], torch.Tensor)
        else value == second[name]
        for name, value in first.items()
    )


def _name(param: nn.Parameter) -> str:
    slot = slot_of(param)
    return "outside of every model" if slot is None else slot.name
