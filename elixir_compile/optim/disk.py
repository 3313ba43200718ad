"""Optimizer state on disk: a file for each bucket and statistic, moved there and back, and updated a piece at a
time."""

import atexit
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed, nn

from elixir_compile.base.errors import DiskFailed, InvalidOption, UnforeseenState
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir import InnerVerb, Lane, StateRef, label
from elixir_compile.ir.cost import DISK_STAGING_BYTES, NUM_DISK_STAGING
from elixir_compile.optim.rule import GroupSlice, ParamUpdate, State, StatisticLayout, UpdateRule, in_order_of
from elixir_compile.optim.streaming import PassingParam, Segment, update
from elixir_compile.runtime import disk_file
from elixir_compile.runtime.bucket import ALIGN_BYTES, RunningBucket, Slab
from elixir_compile.runtime.disk_store import DiskRegion, DiskStore, Piece, ReadAhead
from elixir_compile.runtime.recording import Ledger
from elixir_compile.runtime.updates import finish_updates

# ----------------------------------------------------------------------------------------------------------------------
# Optimizer state on disk: a file per bucket and statistic, with reads and writes by parameter.
#
#     b1.exp_avg      |--- weight ---|- bias -|        the bucket's parameters, at the elements as in a slab
#     b1.exp_avg_sq   |--- weight ---|- bias -|
#
# Each file has the layout of its statistic, so the same element is at different bytes in different files.
#
# `state[p]` is then a `DiskState`. Reading a statistic returns a new tensor, and assigning a statistic writes it;
# changes of the returned tensor are not written. Other entries, such as the step count, are in memory.
#
# If a write fails, or an update ends before its last piece, the state of the bucket is partly old and partly new. It
# becomes invalid: every access raises DiskFailed until a checkpoint is loaded.


Kind = tuple[str, StatisticLayout]
"""The name and layout of a statistic; parameters of a bucket may keep it in different layouts."""
_ALIGN_NUMEL = 128
"""Parameters begin at multiples of so many elements in their files, which no block of a statistic crosses."""


class Extent:
    """A parameter's range of elements in each file of its bucket, and a meta tensor with its shape and strides."""

    def __init__(self, param: torch.Tensor, start: int) -> None:
        # Dense strides in the memory order of `param`, as in a slab.
        self.like = torch.empty_like(param, device="meta", memory_format=torch.preserve_format)
        self.start = start
        self.end = start + param.numel()

    def nbytes_in(self, piece: Piece, layouts: Iterable[StatisticLayout]) -> int:
        """Return the bytes of the parameter's statistics of `layouts` in `piece`."""
        numel = min(self.end, piece.end) - max(self.start, piece.start)
        return sum(layout.nbytes(max(numel, 0)) for layout in layouts)


class DiskHome:
    """A bucket's files in `store`, which hold the state of `params`."""

    def __init__(self, store: DiskStore, label: str, params: Iterable[torch.Tensor]) -> None:
        self.label = label
        self._store = store
        self._extents: dict[int, Extent] = {}
        self._numel = 0
        for param in params:
            # Aligned as in a slab, so that `coalesce` can join neighbours here too.
            step = max(ALIGN_BYTES // param.element_size(), _ALIGN_NUMEL)
            extent = Extent(own_shard(param).detach(), -(-self._numel // step) * step)
            self._extents[id(param)], self._numel = extent, extent.end
        self._regions: dict[Kind, DiskRegion] = {}
        self._written: set[tuple[int, Kind]] = set()
        self._inside: set[int] = set()
        self.is_free = False
        """Whether the disk space was freed."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the statistics on disk."""
        return tuple(self._regions)

    def require(self, kinds: Iterable[Kind]) -> None:
        """Allocate a file for each statistic in `kinds` that has none. Raises DiskFull if the disk is full."""
        for name, layout in kinds:
            if (name, layout) not in self._regions:
                region = self._store.allocate(f"{self.label}.{name}", layout.nbytes(self._numel))
                self._regions[name, layout] = region

    def fail(self, error: BaseException) -> None:
        """Mark the state as invalid because of `error`."""
        with self._lock:
            self._failure = self._failure or error

    def check(self, operation: str) -> None:
        """Raise DiskFailed if the state is invalid; `operation` names the operation in the error."""
        if self._failure is not None:
            because = (
                f"the optimizer state of {self.label} is partly old and partly new after an update that failed "
                f"({self._failure}). Checkpoints are not affected: load one"
            )
            raise DiskFailed(self._store.path, operation, because) from self._failure

    def extent(self, param: int) -> Extent:
        """Return the extent of the parameter with the id `param`."""
        return self._extents[param]

    def read(self, kind: Kind, param: int) -> torch.Tensor:
        """Read the statistic `kind` of the parameter with the id `param` into a new tensor."""
        self.check("read")
        extent, (_, layout) = self._extents[param], kind
        blocks, own, start_bytes = self._around(extent, layout)
        self._regions[kind].read_into(blocks, start_bytes).wait()
        found = layout.shaped(own, extent.like)
        return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="cpu").copy_(found)

    def write(self, kind: Kind, param: int, value: torch.Tensor) -> None:
        """Write `value` as the statistic `kind` of the parameter with the id `param`."""
        self.check("write")
        extent, region = self._extents[param], self._regions[kind]
        blocks, own, start_bytes = self._around(extent, kind[1])
        if blocks.nbytes > own.nbytes:
            region.read_into(blocks, start_bytes).wait()  # the first and last block may hold other parameters
        kind[1].shaped(own, extent.like).copy_(value)
        self._written.add((param, kind))
        try:
            region.write_from(blocks, start_bytes).wait()
        except BaseException as error:
            self.fail(error)
            raise

    def clear(self, kind: Kind, param: int) -> None:
        """Set the statistic `kind` of the parameter with the id `param` to zeros; no write if it was never written."""
        if (param, kind) in self._written:
            self.write(kind, param, torch.zeros((), dtype=kind[1].dtype, device="cpu"))

    @property
    def least_bytes(self) -> int:
        """Return the bytes in memory of the smallest possible piece."""
        return sum(layout.nbytes(self._unit) for _, layout in self._regions)

    def pieces(self, params: Iterable[int], nbytes: int) -> tuple[Piece, ...]:
        """Return the pieces that hold any of the parameters with the ids `params`, in file order.

        A piece takes at most `nbytes` of memory, but at least `least_bytes`.
        """
        stride = max(nbytes // max(self.least_bytes, 1), 1) * self._unit
        columns = [(region, layout.dtype.itemsize, layout.block) for (_, layout), region in self._regions.items()]
        extents = [self._extents[param] for param in params]
        found: list[Piece] = []
        for start in range(0, self._numel, stride):
            end = min(start + stride, self._numel)
            if any(extent.start < end and start < extent.end for extent in extents):
                found.append(Piece(columns, start, end, stride))
        return tuple(found)

    def note_update(self, params: Iterable[int]) -> None:
        """Record the statistics of `params` as written: `clear` must then write zeros."""
        self._written.update((param, kind) for param in params for kind in self._regions)

    def enter(self, param: int) -> None:
        """Record the state of the parameter with the id `param` as on disk."""
        self._inside.add(param)

    def leave(self, param: int) -> None:
        """Record the state of a parameter as removed from disk; free the files after the last parameter.

        No read or write of these files may be running.
        """
        self._inside.discard(param)
        if not self._inside:
            regions, self._regions, self.is_free = self._regions, {}, True
            for region in regions.values():
                self._store.free(region)

    @property
    def _unit(self) -> int:
        """Return the smallest number of elements that fills whole disk blocks in each file; sizes are powers of two."""
        blocks = [disk_file.DISK_BLOCK_BYTES * layout.block // layout.dtype.itemsize for _, layout in self._regions]
        return max(blocks, default=disk_file.DISK_BLOCK_BYTES)

    def _around(self, extent: Extent, layout: StatisticLayout) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return memory for the disk blocks that hold `extent` in a file of `layout`, and a view of the extent in it.

        The third result is the byte of the file at which the blocks start.
        """
        block_bytes = disk_file.DISK_BLOCK_BYTES
        first_bytes = layout.nbytes(extent.start)
        last_bytes = first_bytes + layout.nbytes(extent.end - extent.start)
        start_bytes = first_bytes // block_bytes * block_bytes
        end_bytes = min(-(-last_bytes // block_bytes) * block_bytes, layout.nbytes(self._numel))
        nbytes = max(end_bytes - start_bytes, 0)
        slab = Slab(nbytes, pin=False)
        slab.keep_from_children()
        blocks = slab.tensor(torch.uint8, (nbytes,), 0)
        return blocks, blocks[first_bytes - start_bytes : last_bytes - start_bytes].view(layout.dtype), start_bytes


class DiskState(MutableMapping[str, Any]):
    """The state of a parameter: statistics on disk, other entries in memory."""

    def __init__(
        self, home: DiskHome, param: nn.Parameter, kinds: Mapping[str, StatisticLayout], in_memory: Mapping[str, Any]
    ) -> None:
        self.home = home
        self.param = id(param)
        self.kinds = dict(kinds)
        """The statistics with a file, and their layouts. Other parameters of the bucket may have more."""
        self.made: set[str] = set()
        """The existing statistics; an optimizer class may create a statistic at the first update, or later."""
        self.in_memory = dict(in_memory)
        """The entries in memory."""
        home.enter(self.param)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the existing statistics, in the order of `kinds`."""
        return tuple(name for name in self.kinds if name in self.made)

    def begin(self, name: str) -> None:
        """Create the statistic `name` as zeros."""
        self.home.clear((name, self.kinds[name]), self.param)
        self.made.add(name)

    def note_made(self, made: Set[str]) -> None:
        """Record that the statistics `made` exist after an update."""
        self.made |= made
        for name in made & self.in_memory.keys():
            del self.in_memory[name]

    def __getitem__(self, name: str) -> Any:
        return self.home.read((name, self.kinds[name]), self.param) if name in self.made else self.in_memory[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.kinds and isinstance(value, torch.Tensor):
            self.home.write((name, self.kinds[name]), self.param, value)
            self.made.add(name)
            self.in_memory.pop(name, None)
        else:
            self.in_memory[name] = value
            self.made.discard(name)

    def __delitem__(self, name: str) -> None:
        if name in self.made:
            raise TypeError(f"{name} is on disk, where the plan wants it: it can be written, not deleted")
        del self.in_memory[name]

    def __contains__(self, name: object) -> bool:
        return name in self.made or name in self.in_memory

    def __iter__(self) -> Iterator[str]:
        yield from (*self.names, *self.in_memory)

    def __len__(self) -> int:
        return len(self.made) + len(self.in_memory)

    def __repr__(self) -> str:
        return f"DiskState({self.home.label}: {', '.join(self.names)} on disk, {self.in_memory})"

    # Copies and pickles are ordinary dicts in memory, because files belong to a single process.

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


# ----------------------------------------------------------------------------------------------------------------------
# Move the state of an optimizer to disk and back, and update it there, a piece at a time.
#
#     updates of a step are prepared in order        reads start, as far ahead as there are staging buffers
#     updates run in the same order                  read a piece, update it, write it behind the next pieces
#
# A bucket has a `DiskHome` from the first parameter whose state moves to disk until the last state has left the disk.
#
# A piece holds the same elements of every statistic, so a few megabytes of memory suffice for a bucket of any size.
# Rules are element-wise, and pieces start at multiples of the cache line, as the tasks of torch's fused kernels do. So
# the result is bitwise equal to an update of whole tensors.
#
# A class that creates statistics at its first update creates them slice by slice; each slice is stored in its piece.


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
                on_disk_state.in_memory.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
                slot, begun = slot_of(param), dict[str, torch.Tensor]()
                device = param.device if slot is None else slot.device
                self._rule.start(param, begun, device, is_fresh=not kinds.keys() <= before.keys())
                on_disk_state.update(begun)
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


class DiskParam(PassingParam):
    """A parameter in an update: its weight and gradient in memory, and its state on disk."""

    def __init__(self, of: ParamUpdate) -> None:
        state = self._state = cast("DiskState", of.state)  # the whole state of the bucket is on disk
        self.extent = state.home.extent(state.param)
        self._home_weight, weight = of.weight, in_order_of(of.weight, self.extent.like)
        super().__init__(ParamUpdate(weight, of.grad, state.in_memory), state.kinds, state.made)

    def segment(self, piece: Piece, views: Sequence[torch.Tensor]) -> "Segment[DiskParam] | None":
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

    def empty(self) -> "Segment[DiskParam]":
        """Return a segment without elements, for a parameter that is empty on this rank."""
        return Segment(self, 0, 0).put(
            {name: torch.empty(0, dtype=layout.dtype, device="cpu") for name, layout in self.layouts.items()}
        )

    def keep_unforeseen(self, segment: Segment[PassingParam], name: str, value: torch.Tensor) -> None:
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
        params = [[DiskParam(each) for each in part.updates] for part in parts]
        has_begun = False
        try:
            for piece in self._pieces:
                views = self._reads.take(piece)
                has_begun = True
                try:
                    for part, members in zip(parts, params, strict=True):
                        found = (param.segment(piece, views) for param in members)
                        update([each for each in found if each is not None], rule, part.group, _HOST)
                except BaseException:
                    self._reads.give_back(piece)
                    raise
                self._home.note_update(id(param) for part in parts for param in part.params)
                self._reads.write(piece, self._wrote)
            for part, members in zip(parts, params, strict=True):
                # The shard of this rank may be empty, but all ranks count steps.
                update([param.empty() for param in members if not param.numel], rule, part.group, _HOST)
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
