"""The state of one optimizer that is on disk: where it is put, and updates that read it ahead and write it behind.

    updates of a step are prepared in order        reads begin, as far ahead as there are staging buffers
    each runs in turn                              piece by piece: take, update, write behind

A piece is the same slice of every statistic, so a few megabytes of memory update a bucket of any size. Rules are
element-wise, and pieces are cut at multiples of the cache line, so that a slice is updated bitwise as the whole is:
torch's fused kernels cut tensors into tasks there too.
"""

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from elixir_compile.errors import InvalidOption
from elixir_compile.optim.disk import DiskHome, DiskState, Room
from elixir_compile.optim.rule import State, UpdateRule
from elixir_compile.runtime import disk_file
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.disk import DiskStore
from elixir_compile.runtime.read_ahead import Piece, ReadAhead
from elixir_compile.runtime.updates import finish_updates

_STAGING_BYTES = 16 << 20
"""One buffer: four blocks for four threads, 2 M elements of Adam's two statistics in fp32."""
_NUM_STAGING = 3
"""One is read, one updated, one written."""


class HostSide(Protocol):
    """What one param group has in a bucket, as the host updates it."""

    @property
    def on_host(self) -> Sequence[torch.Tensor]: ...
    @property
    def grads(self) -> Sequence[torch.Tensor]: ...
    @property
    def states(self) -> Sequence[State]: ...
    @property
    def group(self) -> Mapping[str, Any]: ...


class DiskStates:
    """Homes on disk by bucket; `fail` is told what fails in a write that nobody waits for."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._stores: dict[tuple[Path, bool], DiskStore] = {}
        self._homes: dict[tuple[int, ...], DiskHome] = {}
        self._reads: ReadAhead | None = None

    def reserve(self, bucket: RunningBucket, names: Sequence[str]) -> DiskHome:
        """Return the home of the bucket's state, its space taken; DiskFull where there is none, InvalidOption without
        the option `disk_path`."""
        key = tuple(id(slot.param) for slot in bucket.slots)
        home = self._homes.get(key)
        if home is None:
            params = [slot.param for slot in bucket.slots]
            home = self._homes[key] = DiskHome(self._store(bucket), str(bucket.spec.id), params, names)
        home.require(names)
        return home

    def place(
        self,
        states: MutableMapping[nn.Parameter, Any],
        names: Sequence[str],
        bucket: RunningBucket,
        params: Iterable[nn.Parameter],
    ) -> None:
        """Put the state of `params` on disk, zeros where there is none."""
        home = self.reserve(bucket, names)
        for param in params:
            before = states[param]
            if isinstance(before, DiskState) and before.home is home:
                continue
            rest = {name: value for name, value in before.items() if name not in names}
            rest["step"] = rest.get("step", torch.zeros((), dtype=torch.float32)).to("cpu")
            there = DiskState(home, param, names, rest)
            if not before:
                home.clear(id(param))
            for name in names:
                if name in before:
                    there[name] = before[name]
            states[param] = there
            self._leave(before, param)

    def fetch(self, states: MutableMapping[nn.Parameter, Any], param: nn.Parameter) -> None:
        """Bring the state of `param` into memory where it is on disk."""
        before = states.get(param)
        if isinstance(before, DiskState):
            states[param] = dict(before)
            self._leave(before, param)

    def prepare(self, bucket: RunningBucket, states: Iterable[State]) -> "DiskUpdate | None":
        """Begin to read `states`, of one bucket, for its next update, which `DiskUpdate.run` does; None where they are
        in memory. Updates are prepared in the order in which they run."""
        own = [state for state in states if isinstance(state, DiskState)]
        if not own:
            return None
        home = own[0].home
        least_bytes = len(home.names) * disk_file.DISK_BLOCK_BYTES
        if self._reads is None or self._reads.nbytes < least_bytes:
            self.settle()
            self._reads = ReadAhead(_NUM_STAGING, max(_STAGING_BYTES, least_bytes))
        pieces = home.pieces([state.param for state in own], self._reads.nbytes)
        self._reads.announce(pieces)
        return DiskUpdate(home, pieces, self._reads, self._fail)

    def settle(self) -> None:
        """Return when nothing is being written."""
        if self._reads is not None:
            self._reads.settle()

    def _leave(self, before: object, param: nn.Parameter) -> None:
        if isinstance(before, DiskState):
            if self._reads is not None:
                self._reads.stop()  # or files were closed while they are read
            before.home.leave(id(param))
            self._homes = {key: home for key, home in self._homes.items() if home.names}

    def _store(self, bucket: RunningBucket) -> DiskStore:
        disk = bucket.disk
        if disk is None:
            raise InvalidOption(
                "disk_path", None, f"a folder, as the plan keeps the optimizer state of {bucket.spec.id} on disk"
            )
        if disk not in self._stores:
            path, check = disk
            self._stores[disk] = DiskStore(os.fspath(path), check=check)
            # What was registered last runs first: updates that are queued then still find their store open.
            atexit.register(_finish, weakref.ref(self))
        return self._stores[disk]


def _finish(states: "weakref.ref[DiskStates]") -> None:
    """Before the process ends: run what is queued, and write what it updated."""
    finish_updates()
    found = states()
    if found is not None:
        found.settle()


class _Cut:
    """One parameter of an update: what is in memory, flat, and where its statistics are."""

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor, state: DiskState) -> None:
        self.room: Room = state.home.room(state.param)
        self.weight = weight
        self.flat_weight = self.room.flat(weight)
        self.flat_grad = self.room.flat(grad)
        self.state = state
        self.rest: dict[str, Any] = {}

    def at(self, piece: Piece, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, State] | None:
        """Return the slices of weight, gradient and state that `piece` holds; None where it holds nothing of them."""
        start_bytes = max(piece.start_bytes, self.room.start_bytes)
        end_bytes = min(piece.end_bytes, self.room.end_bytes)
        if start_bytes >= end_bytes:
            return None
        size = self.room.dtype.itemsize
        inside = slice((start_bytes - self.room.start_bytes) // size, (end_bytes - self.room.start_bytes) // size)
        there = slice(start_bytes - piece.start_bytes, end_bytes - piece.start_bytes)
        statistics = {
            name: view[there].view(self.room.dtype)
            for name, view in zip(self.state.home.names, views, strict=True)
            if name in self.state.names
        }
        # Each slice counts from the same step; what the last one makes of it is kept.
        self.rest = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.state.rest.items()
        }
        return self.flat_weight[inside], self.flat_grad[inside], {**statistics, **self.rest}

    def finish(self) -> None:
        """Keep what was counted, and a weight that could not be updated in place."""
        for name, value in self.rest.items():
            if isinstance(value, torch.Tensor):
                self.state.rest[name].copy_(value)
        if self.flat_weight.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(self.room.shaped(self.flat_weight))


class DiskUpdate:
    """The update of one bucket whose state is on disk, its first pieces on their way."""

    def __init__(
        self, home: DiskHome, pieces: Sequence[Piece], reads: ReadAhead, fail: Callable[[BaseException], None]
    ) -> None:
        self._home = home
        self._pieces = tuple(pieces)
        self._reads = reads
        self._fail = fail

    def run(self, rule: UpdateRule, sides: Sequence[HostSide]) -> None:
        """Update `sides` piece by piece; writing may go on when this returns.

        Raises what fails in reading or in the rule. Then, unless nothing was updated yet, and when a write fails, the
        state of the bucket is used no more.
        """
        self._home.check("update")
        cuts = [
            [_Cut(*one) for one in zip(side.on_host, side.grads, side.states, strict=True)]  # pyright: ignore[reportArgumentType]  all of one bucket are on disk
            for side in sides
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
                for side, own in zip(sides, cuts, strict=True):
                    _update_slices(rule, [found for cut in own if (found := cut.at(piece, views))], side.group)
            except BaseException as error:
                self._home.fail(error)
                self._reads.give_back(piece)
                raise
            self._home.note_update(cut.state.param for own in cuts for cut in own)
            self._reads.write(piece, self._wrote)
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


def _update_slices(
    rule: UpdateRule, slices: Sequence[tuple[torch.Tensor, torch.Tensor, State]], group: Mapping[str, Any]
) -> None:
    if slices:
        weights, grads, states = zip(*slices, strict=True)
        rule.update(weights, grads, states, group)
