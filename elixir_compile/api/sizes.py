"""The sizes that a capture with symbolic dimensions is planned for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.capture.convert import Captured

_ROOM = 8
"""An eighth more."""


class PlannedSizes:
    """The value of each symbol, by name; those of the capture where nothing larger came."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self._have_grown: set[str] = set()

    def grown(self, captured: Captured, args: Sequence[Any]) -> Mapping[str, int]:
        """Return the symbols whose value in `args` exceeds what was planned for."""
        found = {
            name: value
            for name, example, value in _sizes_of(captured, args)
            if value > self.values.setdefault(name, self._planned(name, example))
        }
        self._have_grown |= found.keys()
        return found

    def with_room(self) -> Mapping[str, int]:
        """Return the values with room for more growth where they have grown: tokens of an expert are another number in
        every step, and a plan that fills the budget has to be made anew for each that is larger than all before."""
        return {
            name: value + value // _ROOM if name in self._have_grown else value for name, value in self.values.items()
        }

    def take(self, values: Mapping[str, int]) -> None:
        """Plan for `values` from now on."""
        self.values.update(values)
        self._have_grown.clear()

    def differ(self, captured: Captured, args: Sequence[Any]) -> bool:
        """Whether a symbol in `args` has another value than was planned for."""
        return any(value != self._planned(name, example) for name, example, value in _sizes_of(captured, args))

    def _planned(self, name: str, example: torch.SymInt) -> int:
        return self.values.get(name, compat.evaluate_size(example, {}))


def _sizes_of(captured: Captured, args: Sequence[Any]) -> Iterator[tuple[str, torch.SymInt, int]]:
    """Yield each input that is a symbol: its name, its value in the capture, and its value now."""
    placeholders = captured.forward.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, args, strict=True):
        example = node.meta.get("val")
        if isinstance(example, torch.SymInt):
            name, _ = compat.expression_of(example)
            if name.isidentifier():
                yield name, example, value
