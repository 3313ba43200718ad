"""Move the state of an optimizer to disk and back, and update it there, a piece at a time.

    updates of a step are prepared in order        reads start, as far ahead as there are staging buffers
    updates run in the same order                  read a piece, update it, write it behind the next pieces

A bucket has a `DiskHome` from the first parameter whose state moves to disk until the last state has left the disk.

A piece holds the same elements of every statistic, so a few megabytes of memory suffice for a bucket of any size. Rules
are element-wise, and pieces start at multiples of the cache line, as the tasks of torch's fused kernels do. So the
result is bitwise equal to an update of whole tensors.

A class that creates statistics at its first update creates them slice by slice; each slice is stored in its piece.
"""

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed, nn

from elixir_compile.base.errors import InvalidOption, UnforeseenState
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.ir import InnerVerb, Lane, StateRef, label
from elixir_compile.ir.staging import DISK_STAGING_BYTES, NUM_DISK_STAGING
from elixir_compile.optim.disk.state import DiskHome, DiskState
from elixir_compile.optim.layout import StatisticLayout, in_order_of
from elixir_compile.optim.pieces import Row, Segment, update
from elixir_compile.optim.rule import GroupSlice, ParamUpdate, State, UpdateRule
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.disk.disk_store import DiskStore
from elixir_compile.runtime.disk.read_ahead import Piece, ReadAhead
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.updates import finish_updates

_HOST = torch.device("cpu")
_STAGING_BYTES = DISK_STAGING_BYTES
"""Bytes of a staging buffer. Buffers take 20 MiB if a bucket has 2-byte statistics, such as low halves of masters."""


class DiskStates:
    """An optimizer's state on disk, with a `DiskHome` per bucket.

    `rule` updates the state. `fail` is called with the exception of a failed write for which no caller waits.
    """

    def __init__(self, rule: UpdateRule, fail: Callable[[BaseException], None]) -> None:
        self._rule = rule
        self._fail = fail
        self._stores: dict[tuple[Path, bool], DiskStore] = {}
        self._homes: dict[tuple[int, ...], DiskHome] = {}
        self._reads: ReadAhead | None = None

    def reserve(self, bucket: RunningBucket, params: Iterable[nn.Parameter], group: Mapping[str, Any]) -> DiskHome:
        """Return the home of the bucket's state, with files for the statistics of `params`.

        Raises DiskFull if there is too little disk space, and InvalidOption if the option `disk_path` is not set.
        """
        home = self._home(bucket)
        home.require(dict.fromkeys(kind for param in params for kind in self._rule.state_layouts(param, group).items()))
        return home

    def place(
        self,
        states: MutableMapping[nn.Parameter, Any],
        group: Mapping[str, Any],
        bucket: RunningBucket,
        params: Iterable[nn.Parameter],
    ) -> None:
        """Move the state of `params`, which are in `group`, to disk; create missing state unless its update does."""
        home, left = self._home(bucket), dict[nn.Parameter, Mapping[str, StatisticLayout]]()
        for param in params:
            state, kinds = states.get(param), self._rule.state_layouts(param, group)
            if not (isinstance(state, DiskState) and state.home is home and kinds.keys() <= state.kinds.keys()):
                left[param] = kinds
        if not left:
            return
        self.reserve(bucket, left, group)
        for param, kinds in left.items():
            before = states[param]
            if before:
                before = self._rule.as_planned(param, before, group)
            others = {
                name: value.to("cpu") if isinstance(value, torch.Tensor) else value
                for name, value in before.items()
                if name not in kinds
            }
            on_disk_state = DiskState(home, param, kinds, others)
            for name in kinds:
                if name in before:
                    on_disk_state[name] = before[name]
                elif not self._rule.makes_state:
                    on_disk_state.begin(name)
            if not self._rule.makes_state:
                self._start(on_disk_state, param, is_fresh=not kinds.keys() <= before.keys())
            former, states[param] = states.get(param), on_disk_state
            if not (isinstance(former, DiskState) and former.home is home):
                self._leave(former, param)

    def fetch(self, states: MutableMapping[nn.Parameter, Any], param: nn.Parameter) -> None:
        """Read the state of `param` into memory if it is on disk."""
        before = states.get(param)
        if isinstance(before, DiskState):
            states[param] = dict(before)
            self._leave(before, param)

    def prepare(self, bucket: RunningBucket, states: Iterable[State], ledger: Ledger) -> "DiskUpdate | None":
        """Start to read `states`, all of `bucket`, for its next update; return None if they are in memory.

        `DiskUpdate.run` of the result does the update. Updates must be prepared in the order in which they run.
        `ledger` times the reads and writes.
        """
        on_disk = [state for state in states if isinstance(state, DiskState)]
        if not on_disk:
            return None
        home = on_disk[0].home
        if self._reads is None or self._reads.nbytes < home.least_bytes:
            self.wait_for_writes()
            self._reads = None  # frees its staging buffers before larger ones are allocated
            self._reads = ReadAhead(NUM_DISK_STAGING, max(_STAGING_BYTES, home.least_bytes))
        pieces = home.pieces([state.param for state in on_disk], self._reads.nbytes)
        for number, piece in enumerate(pieces):
            nbytes = sum(home.extent(state.param).nbytes_in(piece, state.kinds.values()) for state in on_disk)
            piece.begins = partial(_timed, ledger, StateRef(bucket.spec.id), nbytes, number)
        self._reads.announce(pieces)
        return DiskUpdate(home, pieces, self._reads, self._fail)

    def wait_for_writes(self) -> None:
        """Wait for all writes."""
        if self._reads is not None:
            self._reads.wait_for_writes()

    def _start(self, on_disk_state: DiskState, param: nn.Parameter, *, is_fresh: bool) -> None:
        on_disk_state.in_memory.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
        slot, begun = slot_of(param), dict[str, torch.Tensor]()
        self._rule.start(param, begun, param.device if slot is None else slot.device, is_fresh=is_fresh)
        on_disk_state.update(begun)

    def _leave(self, before: object, param: nn.Parameter) -> None:
        if isinstance(before, DiskState):
            if self._reads is not None:
                self._reads.stop()  # else a file could be closed during a read
            before.home.leave(id(param))
            self._homes = {key: home for key, home in self._homes.items() if not home.is_free}

    def _home(self, bucket: RunningBucket) -> DiskHome:
        key = tuple(id(slot.param) for slot in bucket.slots)
        if key not in self._homes:
            params = [slot.param for slot in bucket.slots]
            self._homes[key] = DiskHome(self._store(bucket), str(bucket.spec.id), params)
        return self._homes[key]

    def _store(self, bucket: RunningBucket) -> DiskStore:
        disk = bucket.disk
        if disk is None:
            raise InvalidOption(
                "disk_path", None, f"a folder, as the plan keeps the optimizer state of {bucket.spec.id} on disk"
            )
        if disk not in self._stores:
            path, check = disk
            rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None
            self._stores[disk] = DiskStore(os.fspath(path), check=check, rank=rank)
            # Functions registered last run first, so queued updates run before the store is closed.
            finish = partial(_finish, weakref.ref(self))
            atexit.register(finish)
            weakref.finalize(self, atexit.unregister, finish).atexit = False
        return self._stores[disk]


def _timed(ledger: Ledger, state: StateRef, nbytes: int, number: int, verb: InnerVerb) -> Callable[[], object]:
    """Begin the span of a read or a write of piece `number`, and return the function that ends it."""
    return ledger.begin(Lane.DISK, label(verb, state), nbytes, piece=number)


def _finish(states: "weakref.ref[DiskStates]") -> None:
    """Run queued updates and wait for their writes; called before the process ends."""
    finish_updates()
    found = states()
    if found is not None:
        found.wait_for_writes()


class DiskRow(Row):
    """A parameter in an update: its weight and gradient in memory, and its state on disk."""

    def __init__(self, of: ParamUpdate) -> None:
        state = self._state = cast("DiskState", of.state)  # the whole state of the bucket is on disk
        self.extent = state.home.extent(state.param)
        self._home_weight, weight = of.weight, in_order_of(of.weight, self.extent.like)
        super().__init__(ParamUpdate(weight, of.grad, state.in_memory), state.kinds, state.made)

    def segment(self, piece: Piece, views: Sequence[torch.Tensor]) -> "Segment[DiskRow] | None":
        """Return the elements of the parameter in `piece`, whose bytes are `views`; None if it has none."""
        start, end = max(piece.start, self.extent.start), min(piece.end, self.extent.end)
        if start >= end:
            return None
        statistics = {
            name: view.view(layout.dtype)[layout.span(start - piece.start, end - piece.start)]
            for (name, layout), view in zip(self._state.home.kinds, views, strict=True)
            if self.layouts.get(name) == layout
        }
        return Segment(self, start - self.extent.start, end - self.extent.start).put(statistics)

    def empty(self) -> "Segment[DiskRow]":
        """Return a segment without elements, for a parameter that is empty on this rank."""
        return Segment(self, 0, 0).put(
            {name: torch.empty(0, dtype=layout.dtype, device="cpu") for name, layout in self.layouts.items()}
        )

    def keep_unforeseen(self, segment: Segment[Row], name: str, value: torch.Tensor) -> None:
        """Raise UnforeseenState: the statistic has no file."""
        raise UnforeseenState(self._state.home.label, name, str(value.dtype), tuple(self.like.shape))

    def finish(self) -> None:
        """Note the created statistics; copy back a weight that was not updated in place."""
        self._state.note_made(self.made)
        if self.like is not self._home_weight:
            self._home_weight.copy_(self.like)


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
        rows = [[DiskRow(each) for each in part.updates] for part in parts]
        has_begun = False
        try:
            for piece in self._pieces:
                views = self._reads.take(piece)
                has_begun = True
                try:
                    for part, members in zip(parts, rows, strict=True):
                        found = (row.segment(piece, views) for row in members)
                        update([each for each in found if each is not None], rule, part.group, _HOST)
                except BaseException:
                    self._reads.give_back(piece)
                    raise
                self._home.note_update(id(param) for part in parts for param in part.params)
                self._reads.write(piece, self._wrote)
            for part, members in zip(parts, rows, strict=True):
                # The shard of this rank may be empty, but all ranks count steps.
                update([row.empty() for row in members if not row.numel], rule, part.group, _HOST)
        except BaseException as error:
            if has_begun:
                self._home.fail(error)
            raise

    def _wrote(self, error: BaseException | None) -> None:
        if error is not None:
            error.add_note(
                f"the optimizer state of {self._home.label} is lost with it, and is not used again. "
                "Checkpoints are not affected: load one"
            )
            self._home.fail(error)
            self._fail(error)
