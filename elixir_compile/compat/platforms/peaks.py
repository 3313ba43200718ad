"""The peak of a device's memory in a part of a program.

The peak statistics of torch's allocator are the user's, so they are read and never reset, and no tensor is allocated to
raise them again.

    a history of blocks           the bytes at the begin, and of each block that came or went: exact
    none, and the peak rose       the statistic: it rose in this part of the program, so it is exact
    none, and it did not rise     not known: an earlier moment needed as much or more
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from elixir_compile.compat.platforms.blocks import record_blocks

if TYPE_CHECKING:
    from elixir_compile.compat.platforms.platform import Platform

log = logging.getLogger("elixir_compile")
T = TypeVar("T")


class PeakRecord:
    """The most bytes that tensors on a device with memory of its own asked for at once, from its creation to `stop`."""

    def __init__(self, platform: "Platform", device: torch.device) -> None:
        """`platform` is that of `device`."""
        self._platform, self._device = platform, device
        self._earlier_bytes = platform.peak_bytes(device)
        self._blocks = _or_none(lambda: record_blocks(device))
        self.peak_bytes: int | None = None
        """The peak, once the record is stopped; None if it is not known."""

    def stop(self) -> int | None:
        """End the record; return the peak, None if it is not known."""
        events = None if self._blocks is None else _or_none(self._blocks.stop)
        if self._blocks is not None and events is not None:
            self.peak_bytes = most_bytes(self._blocks.nbytes_at.values(), (nbytes for *_, nbytes in events))
        else:
            risen_bytes = self._platform.peak_bytes(self._device)
            self.peak_bytes = risen_bytes if risen_bytes > self._earlier_bytes else None
        return self.peak_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _or_none(ask: Callable[[], T]) -> T | None:
    """Return the result of `ask`, a question about the history; None, with a line in the log, if it fails.

    Histories are private to torch, and no figure is worth a training.
    """
    try:
        return ask()
    except Exception as error:
        log.warning("torch's history of the allocator cannot be read: %s: %s", type(error).__name__, error)
        return None


def most_bytes(before: Iterable[int], changes: Iterable[int]) -> int:
    """Return the most of the sum of `before` and the first of `changes`, for any number of changes."""
    live = most = sum(before)
    for nbytes in changes:
        live += nbytes
        most = max(most, live)
    return most
