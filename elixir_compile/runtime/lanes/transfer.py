"""A copy or a collective in flight, as programs hold it between its start and its wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elixir_compile.runtime.lanes.interface import Event


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy in flight."""

    label: str
    event: Event | None
    """Past when the copy is done; None if the copy is synchronous, or is not issued yet."""
    values: tuple[Any, ...] = ()
    """The tensors that the copy makes, and an `ArrivingView` for each value of which it makes the first slice."""
    sources: tuple[torch.Tensor, ...] = ()
    """The tensors that the copy reads, kept alive until the wait."""

    def ensure_issued(self) -> Event | None:
        """Issue the copy if it is not issued yet; return its event, or None if copies are synchronous."""
        return self.event


class LateTransfer(Transfer):
    """A synchronous copy that starts at the wait, to let the program continue until then."""

    __slots__ = ("_begin",)

    def __init__(self, label: str, begin: Callable[[], Transfer]) -> None:
        super().__init__(label, None)
        self._begin = begin

    def ensure_issued(self) -> Event | None:
        """Make the copy; return its event, or None if copies are synchronous."""
        copied = self._begin()
        self.values, copied.sources = copied.values, ()  # the copy is done, and other objects may hold `copied`
        return copied.ensure_issued()
