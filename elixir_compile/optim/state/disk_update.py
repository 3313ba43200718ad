"""Update a bucket whose state is on disk, piece by piece: read a piece, update it, write it behind the next pieces.

A piece holds the same elements of every statistic, so a few megabytes of memory suffice for a bucket of any size. Rules
are element-wise, and pieces start at multiples of the cache line, as the tasks of torch's fused kernels do. So the
result is bitwise equal to an update of whole tensors.

A class that creates statistics at its first update creates them slice by slice; each slice is stored in its piece.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from elixir_compile.errors import UnforeseenState
from elixir_compile.optim.group_slice import GroupSlice
from elixir_compile.optim.rule import State, UpdateRule
from elixir_compile.optim.state.disk import DiskHome, DiskState, Extent
from elixir_compile.runtime.disk.read_ahead import Piece, ReadAhead


class DiskUpdate:
    """An update of a bucket with state on disk. The reads of its first pieces have been announced to `reads`."""

    def __init__(
        self, home: DiskHome, pieces: Sequence[Piece], reads: ReadAhead, fail: Callable[[BaseException], None]
    ) -> None:
        self._home = home
        self._pieces = tuple(pieces)
        self._reads = reads
        self._fail = fail

    def run(self, rule: UpdateRule, parts: Sequence[GroupSlice]) -> None:
        """Update `parts` piece by piece; writes may still run when this returns.

        Raises the exception of a failed read or of the rule, and UnforeseenState if a new statistic has no file.
        If an exception comes after the first piece was read, or a write fails, the state of the bucket becomes invalid.
        """
        self._home.check("update")
        updates = [
            [
                _ParamUpdate(weight, grad, cast("DiskState", state))  # the whole state of this bucket is on disk
                for weight, grad, state in zip(part.weights, part.grads, part.states, strict=True)
            ]
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
                for part, members in zip(parts, updates, strict=True):
                    slices = [found for update in members if (found := update.at(piece, views))]
                    _update_slices(rule, slices, part.group)
            except BaseException as error:
                self._home.fail(error)
                self._reads.give_back(piece)
                raise
            self._home.note_update(update.state.param for members in updates for update in members)
            self._reads.write(piece, self._wrote)
        try:
            for part, members in zip(parts, updates, strict=True):
                # The shard of this rank may be empty, but all ranks count steps.
                _update_slices(
                    rule, [update.empty() for update in members if not update.flat_weight.numel()], part.group
                )
        except BaseException as error:
            self._home.fail(error)
            raise
        for members in updates:
            for update in members:
                update.finish()

    def _wrote(self, error: BaseException | None) -> None:
        if error is not None:
            error.add_note(
                f"the optimizer state of {self._home.label} is lost with it, and is not used again. "
                "Checkpoints are not affected: load one"
            )
            self._home.fail(error)
            self._fail(error)


class _Slice:
    """A parameter's elements in a piece: weight, gradient and state."""

    def __init__(self, update: "_ParamUpdate", inside: slice, buffers: Mapping[str, torch.Tensor]) -> None:
        self.weight = update.flat_weight[inside]
        self.grad = update.flat_grad[inside]
        # The rule counts the step once per slice, so each slice gets a copy, and the last copy is kept.
        in_memory = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in update.state.in_memory.items()
        }
        self.state: State = {**in_memory, **{name: buffers[name] for name in update.state.names}}
        self._update = update
        self._buffers = buffers
        """By name, the memory in the piece for each statistic that has a file."""

    def keep(self) -> None:
        """Copy new or replaced statistics to the piece. Raises UnforeseenState if a statistic has no file."""
        for name, value in self.state.items():
            buffer = self._buffers.get(name)
            if not isinstance(value, torch.Tensor) or not value.dim():
                self._update.in_memory[name] = value
            elif buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                raise UnforeseenState(
                    self._update.state.home.label, name, str(value.dtype), tuple(self._update.extent.shape)
                )
            else:
                self._update.made.add(name)
                if value is not buffer:
                    buffer.copy_(value)


class _ParamUpdate:
    """A parameter in an update: its flat weight and gradient in memory, and its state on disk."""

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor, state: DiskState) -> None:
        self.extent: Extent = state.home.extent(state.param)
        self.weight = weight
        self.flat_weight = self.extent.flat(weight)
        self.flat_grad = self.extent.flat(grad)
        self.state = state
        self.made: set[str] = set()
        self.in_memory: dict[str, Any] = {}

    def at(self, piece: Piece, views: Sequence[torch.Tensor]) -> _Slice | None:
        """Return the parameter's slice of `piece`; None if the piece has no elements of the parameter."""
        start, end = max(piece.start, self.extent.start), min(piece.end, self.extent.end)
        if start >= end:
            return None
        in_piece = slice(start - piece.start, end - piece.start)
        buffers = {
            name: view.view(dtype)[in_piece]
            for (name, dtype), view in zip(self.state.home.kinds, views, strict=True)
            if self.state.kinds.get(name) == dtype
        }
        return _Slice(self, slice(start - self.extent.start, end - self.extent.start), buffers)

    def empty(self) -> _Slice:
        """Return a slice without elements, for a parameter that is empty on this rank."""
        buffers = {name: torch.empty(0, dtype=dtype) for name, dtype in self.state.kinds.items()}
        return _Slice(self, slice(0, 0), buffers)

    def finish(self) -> None:
        """Store counters and the names of created statistics; copy back a weight that was not updated in place."""
        self.state.finish_update(self.made, self.in_memory)
        if self.flat_weight.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(self.extent.shaped(self.flat_weight))


def _update_slices(rule: UpdateRule, slices: Sequence[_Slice], group: Mapping[str, Any]) -> None:
    if not slices:
        return
    rule.update(
        [part.weight for part in slices], [part.grad for part in slices], [part.state for part in slices], group
    )
    for part in slices:
        part.keep()
