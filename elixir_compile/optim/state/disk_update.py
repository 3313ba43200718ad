"""One update of one bucket whose state is on disk: piece by piece, take, update, write behind.

A piece is the same elements of every statistic, so a few megabytes of memory update a bucket of any size. Rules are
element-wise, and pieces are cut at multiples of the cache line, so that a slice is updated bitwise as the whole is:
torch's fused kernels cut tensors into tasks there too.

What a class makes at its first update it makes slice by slice; each goes to the piece that it was made for.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elixir_compile.errors import UnforeseenState
from elixir_compile.optim.group_slice import GroupSlice
from elixir_compile.optim.rule import State, UpdateRule
from elixir_compile.optim.state.disk import DiskHome, DiskState, Extent
from elixir_compile.runtime.disk.read_ahead import Piece, ReadAhead


class DiskUpdate:
    """The update of one bucket whose state is on disk, its first pieces on their way."""

    def __init__(
        self, home: DiskHome, pieces: Sequence[Piece], reads: ReadAhead, fail: Callable[[BaseException], None]
    ) -> None:
        self._home = home
        self._pieces = tuple(pieces)
        self._reads = reads
        self._fail = fail

    def run(self, rule: UpdateRule, parts: Sequence[GroupSlice]) -> None:
        """Update `parts` piece by piece; writing may go on when this returns.

        Raises what fails in reading or in the rule, and UnforeseenState. Then, unless nothing was updated yet, and when
        a write fails, the state of the bucket is used no more.
        """
        self._home.check("update")
        cuts = [
            [_Cut(*one) for one in zip(part.weights, part.grads, part.states, strict=True)]  # pyright: ignore[reportArgumentType]  all of one bucket are on disk
            for part in parts
        ]
        has_begun = False
        for piece in self._pieces:
            try:
                views = self._reads.take(piece)
            except BaseException as error:
                if has_begun:
                    self._home.fail(error)
                raise
            has_begun = True
            try:
                for part, own in zip(parts, cuts, strict=True):
                    _update_slices(rule, [found for cut in own if (found := cut.at(piece, views))], part.group)
            except BaseException as error:
                self._home.fail(error)
                self._reads.give_back(piece)
                raise
            self._home.note_update(cut.state.param for own in cuts for cut in own)
            self._reads.write(piece, self._wrote)
        try:
            for part, own in zip(parts, cuts, strict=True):
                # A rank may have nothing of a parameter, and counts its steps as the others do.
                _update_slices(rule, [cut.nothing() for cut in own if not cut.flat_weight.numel()], part.group)
        except BaseException as error:
            self._home.fail(error)
            raise
        for own in cuts:
            for cut in own:
                cut.finish()

    def _wrote(self, error: BaseException | None) -> None:
        if error is not None:
            error.add_note(
                f"the optimizer state of {self._home.label} is lost with it, and is not used any more. "
                "What checkpoints hold is safe: load one"
            )
            self._home.fail(error)
            self._fail(error)


class _Slice:
    """What a piece has of one parameter."""

    def __init__(self, cut: "_Cut", inside: slice, room: Mapping[str, torch.Tensor]) -> None:
        self.weight = cut.flat_weight[inside]
        self.grad = cut.flat_grad[inside]
        # Each slice counts from the same step; what the last one makes of it is kept.
        rest = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in cut.state.rest.items()
        }
        self.state: State = {**rest, **{name: room[name] for name in cut.state.names}}
        self._cut = cut
        self._room = room
        """By name, the part of the piece that each statistic has, there or not."""

    def keep(self) -> None:
        """Bring what the update replaced or made to the piece; UnforeseenState for what has no room there."""
        for name, value in self.state.items():
            room = self._room.get(name)
            if not isinstance(value, torch.Tensor) or not value.dim():
                self._cut.rest[name] = value
            elif room is None or (room.shape, room.dtype) != (value.shape, value.dtype):
                raise UnforeseenState(self._cut.state.home.label, name, str(value.dtype), tuple(self._cut.extent.shape))
            else:
                self._cut.made.add(name)
                if value is not room:
                    room.copy_(value)


class _Cut:
    """One parameter of an update: what is in memory, flat, and where its statistics are."""

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor, state: DiskState) -> None:
        self.extent: Extent = state.home.extent(state.param)
        self.weight = weight
        self.flat_weight = self.extent.flat(weight)
        self.flat_grad = self.extent.flat(grad)
        self.state = state
        self.made: set[str] = set()
        self.rest: dict[str, Any] = {}

    def at(self, piece: Piece, views: Sequence[torch.Tensor]) -> _Slice | None:
        """Return what `piece` holds of the parameter; None where that is nothing."""
        start, end = max(piece.start, self.extent.start), min(piece.end, self.extent.end)
        if start >= end:
            return None
        there = slice(start - piece.start, end - piece.start)
        room = {
            name: view.view(dtype)[there]
            for (name, dtype), view in zip(self.state.home.kinds, views, strict=True)
            if self.state.kinds.get(name) == dtype
        }
        return _Slice(self, slice(start - self.extent.start, end - self.extent.start), room)

    def nothing(self) -> _Slice:
        """Return the slice of a parameter without elements."""
        room = {name: torch.empty(0, dtype=dtype) for name, dtype in self.state.kinds.items()}
        return _Slice(self, slice(0, 0), room)

    def finish(self) -> None:
        """Keep what was counted and made, and a weight that could not be updated in place."""
        self.state.finish_update(self.made, self.rest)
        if self.flat_weight.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(self.extent.shaped(self.flat_weight))


def _update_slices(rule: UpdateRule, slices: Sequence[_Slice], group: Mapping[str, Any]) -> None:
    if not slices:
        return
    rule.update([own.weight for own in slices], [own.grad for own in slices], [own.state for own in slices], group)
    for own in slices:
        own.keep()
