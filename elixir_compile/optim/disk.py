"""Optimizer state on disk: a file for each bucket and statistic, moved there and back, and updated a piece at a
time."""

import atexit
import copy
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from elixir_compile.base.errors import DiskFailed, InvalidOption, UnforeseenState
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir import StateRef
from elixir_compile.ir.cost import DISK_STAGING_BYTES, NUM_DISK_STAGING
from elixir_compile.optim.masters import begin_rest, rest_layouts
from elixir_compile.optim.rule import GroupSlice, ParamUpdate, State, StatisticLayout, UpdateRule, in_order_of
from elixir_compile.optim.streaming import PassingParam, Segment, update
from elixir_compile.runtime import disk_file
from elixir_compile.runtime.bucket import RunningBucket, Slab, aligned_bytes
from elixir_compile.runtime.disk_params import DiskBucket, ParamFile, extents
from elixir_compile.runtime.disk_store import DiskRegion, DiskStore, Piece, ReadAhead, store_at
from elixir_compile.runtime.recording import Ledger
from elixir_compile.runtime.updates import finish_updates

# ----------------------------------------------------------------------------------------------------------------------
# Optimizer state on disk: a file per bucket and statistic, with reads and writes by parameter.
#
#     b1.exp_avg      |--- weight ---|- bias -|        the bucket's parameters, at the elements as in a slab
#     b1.exp_avg_sq   |--- weight ---|- bias -|
#     b1.param        |--- weight ---|- bias -|        if the home of the parameters is the disk: see
#                                                      `runtime.disk_params`, whose bucket has the file
#
# Each file has the layout of its statistic, so the same element is at different bytes in different files.
#
# If parameters are updated whole, all statistics of a parameter follow each other in one file, because they have any
# shape and are needed at once:
#
#     b2.state        |- GG.0, GG.1, Q.0, Q.1 of a weight -| the same of the next |
#
# `state[p]` is then a `DiskState`. Reading a statistic returns a new tensor, and assigning a statistic writes it;
# changes of the returned tensor are not written. Other entries, such as the step count, are in memory.
#
# If a write fails, or an update ends before its last piece, the state of the bucket is partly old and partly new. It
# becomes invalid: every access raises DiskFailed until a checkpoint is loaded.


Kind = tuple[str, StatisticLayout]
"""The name and layout of a statistic; parameters of a bucket may keep it in different layouts."""
_PARAM = " param"
"""The name of the column of the parameters themselves. No statistic has one of this name, which begins with a space."""


class Extent:
    """A parameter's range of elements in each file of its bucket, and a meta tensor with its shape and strides."""

    def __init__(self, param: torch.Tensor, start: int) -> None:
        # Dense strides in the memory order of `param`, as in a slab.
        self.like = torch.empty_like(param, device="meta", memory_format=torch.preserve_format)
        self.start = start
        self.end = start + param.numel()


Kinds = Mapping[str, StatisticLayout]
"""The statistics of a parameter on disk by name."""


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of a statistic of a parameter: `nbytes` of `region` from `start_bytes` on."""

    region: DiskRegion
    start_bytes: int
    nbytes: int
    piece: tuple[int, int] = (0, 0)
    """The bytes of `region`, first and past the last, that are read with it if the parameter is updated whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """The elements `start` to `stop` of a parameter in a piece."""

    start: int
    stop: int
    bytes_of: Mapping[str, tuple[int, slice]]
    """By name of a statistic, the number of the region among those of the piece, and which bytes in it."""

    @property
    def nbytes(self) -> int:
        """The bytes of the statistics."""
        return sum(own.stop - own.start for _, own in self.bytes_of.values())

    def flat(self, views: Sequence[torch.Tensor], kinds: Kinds) -> dict[str, torch.Tensor]:
        """Return the values of the statistics by name, flat; `views` are the bytes of the piece, by region."""
        return {name: views[at][own].view(kinds[name].dtype) for name, (at, own) in self.bytes_of.items()}


class DiskHome:
    """A bucket's files in `store`, which hold the state of `params`, a file for each statistic."""

    def __init__(self, store: DiskStore, label: str, params: Iterable[torch.Tensor]) -> None:
        self.label = label
        self._store = store
        own = {id(param): own_shard(param).detach() for param in params}
        self._extents = {
            param: Extent(tensor, start)
            for (param, tensor), (start, _) in zip(own.items(), extents(own.values()), strict=True)
        }
        self._numel = max((extent.end for extent in self._extents.values()), default=0)
        self._regions: dict[Kind, DiskRegion] = {}
        self.beside: Kinds = {}
        """The column of the parameters, if pieces have it: see `hold`."""
        self._files: list[DiskRegion] = []
        self._written: set[tuple[int, Kind]] = set()
        self._inside: set[int] = set()
        self.is_free = False
        """Whether the disk space was freed."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def hold(self, bucket: RunningBucket) -> None:
        """Let pieces have the parameters of `bucket` too if their home is the disk, or none if it is not."""
        region = bucket.file.region if isinstance(bucket, DiskBucket) else None
        self._regions = {kind: other for kind, other in self._regions.items() if kind[0] != _PARAM}
        self.beside = {} if region is None else {_PARAM: StatisticLayout(bucket.slots[0].param.dtype)}
        if region is not None:
            self._regions |= dict.fromkeys(self.beside.items(), region)

    def require(self, kinds: Mapping[int, Kinds]) -> None:
        """Allocate disk space for the statistics `kinds`, by the id of the parameter, that have none.

        Raises DiskFull if the disk is full.
        """
        for name, layout in dict.fromkeys(kind for own in kinds.values() for kind in own.items()):
            if (name, layout) not in self._regions:
                self._regions[name, layout] = self._allocate(name, layout.nbytes(self._numel))

    def can_add(self, param: int, kinds: Kinds) -> bool:
        """Return whether `require` finds room for `kinds` while the parameter with the id `param` is on disk."""
        return True

    def _allocate(self, name: str, nbytes: int) -> DiskRegion:
        region = self._store.allocate(f"{self.label}.{name}", nbytes)
        self._files.append(region)
        return region

    def place(self, kind: Kind, param: int) -> Place:
        """Return where the statistic `kind` of the parameter with the id `param` is."""
        extent, (_, layout) = self._extents[param], kind
        return Place(self._regions[kind], layout.nbytes(extent.start), layout.nbytes(extent.end - extent.start))

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
        extent, (_, layout), place = self._extents[param], kind, self.place(kind, param)
        blocks, own, start_bytes = _around(place, layout.dtype)
        place.region.read_into(blocks, start_bytes).wait()
        found = layout.shaped(own, extent.like)
        return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="cpu").copy_(found)

    def write(self, kind: Kind, param: int, value: torch.Tensor) -> None:
        """Write `value` as the statistic `kind` of the parameter with the id `param`."""
        self.check("write")
        extent, place = self._extents[param], self.place(kind, param)
        blocks, own, start_bytes = _around(place, kind[1].dtype)
        if blocks.nbytes > own.nbytes:
            place.region.read_into(blocks, start_bytes).wait()  # the first and last block may hold something else
        kind[1].shaped(own, extent.like).copy_(value)
        self._written.add((param, kind))
        try:
            place.region.write_from(blocks, start_bytes).wait()
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

    def pieces(self, params: Collection[int], nbytes: int) -> tuple[Piece, ...]:
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

    def part(self, param: int, kinds: Kinds, piece: Piece) -> Part | None:
        """Return what `piece` has of the parameter with the id `param` and the statistics `kinds`; None if nothing."""
        extent = self._extents[param]
        start, end = max(piece.start, extent.start), min(piece.end, extent.end)
        if start >= end:
            return None
        bytes_of: dict[str, tuple[int, slice]] = {}
        for at, (name, layout) in enumerate(self._regions):
            if kinds.get(name) == layout:
                own, size_bytes = layout.span(start - piece.start, end - piece.start), layout.dtype.itemsize
                bytes_of[name] = at, slice(own.start * size_bytes, own.stop * size_bytes)
        return Part(start - extent.start, end - extent.start, bytes_of)

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
            regions, self._files, self.is_free = self._files, [], True
            self._regions.clear()
            for region in regions:
                self._store.free(region.file)

    @property
    def _unit(self) -> int:
        """Return the smallest number of elements that fills whole disk blocks in each file; sizes are powers of two."""
        blocks = [disk_file.DISK_BLOCK_BYTES * layout.block // layout.dtype.itemsize for _, layout in self._regions]
        return max(blocks, default=disk_file.DISK_BLOCK_BYTES)


class WholeHome(DiskHome):
    """A bucket's files in `store`, which hold the state of `params`, each updated whole: one parameter after another.

    A piece has whole parameters: one, or as many that follow each other as fit a staging buffer.
    """

    def __init__(self, store: DiskStore, label: str, params: Iterable[torch.Tensor]) -> None:
        super().__init__(store, label, params)
        self._places: dict[tuple[int, Kind], Place] = {}

    def hold(self, bucket: RunningBucket) -> None:
        """Do nothing: parameters that are updated whole are updated in the mapping of their file."""

    def require(self, kinds: Mapping[int, Kinds]) -> None:
        """Allocate disk space as `DiskHome.require`; all statistics of a parameter come at once: see `can_add`.
        There is none for a parameter that another rank owns, whatever the shapes of its statistics."""
        missing = {
            param: {kind: kind[1].nbytes(self._extents[param].like.numel()) for kind in own.items()}
            for param, own in kinds.items()
            if self._extents[param].like.numel() and any((param, kind) not in self._places for kind in own.items())
        }
        block_bytes, end_bytes = disk_file.DISK_BLOCK_BYTES, 0
        pieces: list[list[tuple[int, Kind, int, int]]] = []
        starts_bytes: list[int] = []
        for param, own in missing.items():
            own_bytes = sum(map(aligned_bytes, own.values()))
            if not pieces or end_bytes + own_bytes > starts_bytes[-1] + _STAGING_BYTES:
                end_bytes = -(-end_bytes // block_bytes) * block_bytes
                pieces.append([])
                starts_bytes.append(end_bytes)
            for kind, nbytes in own.items():
                pieces[-1].append((param, kind, end_bytes, nbytes))
                end_bytes += aligned_bytes(nbytes)
        if not pieces:
            return
        region = self._allocate("state", end_bytes)
        for of_piece, start, end in zip(pieces, starts_bytes, [*starts_bytes[1:], end_bytes], strict=True):
            for param, kind, at_bytes, nbytes in of_piece:
                self._places[param, kind] = Place(region, at_bytes, nbytes, (start, end))

    def can_add(self, param: int, kinds: Kinds) -> bool:
        """Return whether the parameter has no statistics yet, or all of `kinds`: one piece has all that it has."""
        known = {kind for of, kind in self._places if of == param}
        return not known or known >= set(kinds.items())

    def place(self, kind: Kind, param: int) -> Place:
        """Return where the statistic `kind` of the parameter with the id `param` is."""
        return self._places[param, kind]

    @property
    def least_bytes(self) -> int:
        """Return the bytes in memory of the largest piece, in whole disk blocks."""
        block_bytes = disk_file.DISK_BLOCK_BYTES
        sizes = (end - start for start, end in {place.piece for place in self._places.values()})
        return -(-max(sizes, default=0) // block_bytes) * block_bytes

    def pieces(self, params: Collection[int], nbytes: int) -> tuple[Piece, ...]:
        """Return the pieces that hold any of the parameters with the ids `params`, each in `least_bytes` or less."""
        wanted = ((place.region, *place.piece) for (param, _), place in self._places.items() if param in params)
        pieces = ((region, start, end) for region, start, end in dict.fromkeys(wanted) if start < end)
        return tuple(Piece([(region, 1, 1)], start, end, end - start) for region, start, end in pieces)

    def part(self, param: int, kinds: Kinds, piece: Piece) -> Part | None:
        """Return the whole parameter with the id `param` if `piece` has its statistics `kinds`, else None."""
        bytes_of: dict[str, tuple[int, slice]] = {}
        for kind in kinds.items():
            place = self._places[param, kind]
            if (place.region, *place.piece) != (piece.columns[0][0], piece.start, piece.end):
                return None
            start_bytes = place.start_bytes - piece.start
            bytes_of[kind[0]] = 0, slice(start_bytes, start_bytes + place.nbytes)
        return Part(0, self._extents[param].like.numel(), bytes_of) if bytes_of else None

    def leave(self, param: int) -> None:
        """Record the state of a parameter as removed from disk, as `DiskHome.leave`."""
        self._places = {(of, kind): place for (of, kind), place in self._places.items() if of != param}
        super().leave(param)


def _around(place: Place, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return memory for the disk blocks that hold `place`, and a view of the place in it, in `dtype`.

    The third result is the byte of the region at which the blocks start.
    """
    block_bytes, last_bytes = disk_file.DISK_BLOCK_BYTES, place.start_bytes + place.nbytes
    start_bytes = place.start_bytes // block_bytes * block_bytes
    end_bytes = min(-(-last_bytes // block_bytes) * block_bytes, place.region.nbytes)
    nbytes = max(end_bytes - start_bytes, 0)
    slab = Slab(nbytes, pin=False)
    slab.keep_from_children()
    blocks = slab.tensor(torch.uint8, (nbytes,), 0)
    return blocks, blocks[place.start_bytes - start_bytes : last_bytes - start_bytes].view(dtype), start_bytes


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

    @property
    def forms(self) -> dict[str, Any]:
        """Return the state with tensors on `meta`, which have no values, in place of those on disk."""
        like = self.home.extent(self.param).like
        return {**{name: self.kinds[name].zeros(like) for name in self.names}, **self.in_memory}

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
# If the rule updates whole tensors, a piece holds all statistics of a parameter, and a staging buffer those of the
# largest.
#
# A class that creates statistics at its first update creates them slice by slice; each slice is stored in its piece.


_HOST = torch.device("cpu")
_STAGING_BYTES = DISK_STAGING_BYTES
"""Bytes of a staging buffer. Buffers take 20 MiB if a bucket has 2-byte statistics, such as low halves of masters, and
the state of the largest parameter if parameters are updated whole."""


class DiskStates:
    """An optimizer's state on disk, with a `DiskHome` per bucket.

    `rule` updates the state. `fail` is called with the exception of a failed write for which no caller waits.
    """

    def __init__(self, rule: UpdateRule, fail: Callable[[BaseException], None]) -> None:
        self._rule = rule
        self._fail = fail
        self._stores: dict[tuple[Path, bool], DiskStore] = {}
        self._homes: dict[tuple[type[DiskHome], tuple[int, ...]], DiskHome] = {}
        self._reads: ReadAhead | None = None
        self._least_bytes = 0
        """Bytes that a staging buffer needs for any home, so that no update of a step waits with a ring too small for
        the next."""

    def reserve(self, bucket: RunningBucket, params: Iterable[nn.Parameter], group: Mapping[str, Any]) -> DiskHome:
        """Return the home of the bucket's state, with files for the statistics of `params`.

        Raises DiskFull if there is too little disk space, and InvalidOption if the option `disk_path` is not set.
        """
        home = self._home(bucket, group)
        home.hold(bucket)
        home.require({id(param): self._rule.state_layouts(param, group) for param in params})
        self._least_bytes = max(self._least_bytes, home.least_bytes)
        return home

    def place(
        self,
        states: MutableMapping[nn.Parameter, Any],
        group: Mapping[str, Any],
        bucket: RunningBucket,
        params: Iterable[nn.Parameter],
    ) -> None:
        """Move the state of `params`, which are in `group`, to disk; create missing state unless its update does."""
        home, left = self._home(bucket, group), dict[nn.Parameter, Kinds]()
        for param in params:
            state, kinds = states.get(param), self._rule.state_layouts(param, group)
            if not (isinstance(state, DiskState) and state.home is home and kinds.keys() <= state.kinds.keys()):
                left[param] = kinds
        if not left:
            return
        for param, kinds in left.items():
            if not home.can_add(id(param), kinds):
                self.fetch(states, param)
        home = self.reserve(bucket, left, group)
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
            rests = rest_layouts(param)
            for name in kinds:
                if name in before:
                    on_disk_state[name] = before[name]
                elif name in rests:
                    begin_rest(param, on_disk_state, rests[name].zeros(own_shard(param).detach(), _HOST))
                elif not self._rule.makes_state:
                    on_disk_state.begin(name)
            if not self._rule.makes_state:
                on_disk_state.in_memory.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
            slot = slot_of(param)
            self._rule.start(param, on_disk_state, param.device if slot is None else slot.device)
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
        if isinstance(bucket, DiskBucket):
            if bucket.has_drifted():
                bucket.move_home(_HOST)
            bucket.settle()
        on_disk = [state for state in states if isinstance(state, DiskState)]
        if not on_disk:
            return None
        home = on_disk[0].home
        home.hold(bucket)
        self._least_bytes = max(self._least_bytes, home.least_bytes)
        if self._reads is None or self._reads.nbytes < self._least_bytes:
            self.wait_for_writes()
            self._reads = None  # frees its staging buffers before larger ones are allocated
            self._reads = ReadAhead(NUM_DISK_STAGING, max(_STAGING_BYTES, self._least_bytes))
        pieces = home.pieces({state.param for state in on_disk}, self._reads.nbytes)
        for number, piece in enumerate(pieces):
            parts = (home.part(state.param, {**state.kinds, **home.beside}, piece) for state in on_disk)
            nbytes = sum(part.nbytes for part in parts if part is not None)
            piece.time_in(ledger, StateRef(bucket.spec.id), nbytes, number)
        self._reads.announce(pieces)
        file = bucket.file if isinstance(bucket, DiskBucket) else None
        return DiskUpdate(home, pieces, self._reads, self._fail, file)

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

    def _home(self, bucket: RunningBucket, group: Mapping[str, Any]) -> DiskHome:
        params = [slot.param for slot in bucket.slots]
        kind = WholeHome if any(self._rule.updates_whole(param, group) for param in params) else DiskHome
        key = kind, tuple(map(id, params))
        if key not in self._homes:
            self._homes[key] = kind(self._store(bucket), str(bucket.spec.id), params)
        return self._homes[key]

    def _store(self, bucket: RunningBucket) -> DiskStore:
        disk = bucket.disk
        if disk is None:
            raise InvalidOption(
                "disk_path", None, f"a folder, as the plan keeps the optimizer state of {bucket.spec.id} on disk"
            )
        if disk not in self._stores:
            path, check = disk
            self._stores[disk] = store_at(path, check=check)
            # Functions registered last run first, so queued updates run before the store is closed.
            finish = partial(_finish, weakref.ref(self))
            atexit.register(finish)
            weakref.finalize(self, atexit.unregister, finish).atexit = False
        return self._stores[disk]


def _finish(states: "weakref.ref[DiskStates]") -> None:
    """Run queued updates and wait for their writes; called before the process ends."""
    finish_updates()
    found = states()
    if found is not None:
        found.wait_for_writes()


class DiskParam(PassingParam):
    """A parameter in an update: its gradient in memory, its state on disk, and its weight where its home is."""

    def __init__(self, of: ParamUpdate) -> None:
        state = self._state = cast("DiskState", of.state)  # the whole state of the bucket is on disk
        self.extent = state.home.extent(state.param)
        self._home_weight, weight = of.weight, in_order_of(of.weight, self.extent.like)
        super().__init__(ParamUpdate(weight, of.grad, state.in_memory), state.kinds, state.made)

    def segment(self, piece: Piece, views: Sequence[torch.Tensor]) -> "Segment[DiskParam] | None":
        """Return the elements of the parameter in `piece`, whose bytes are `views`; None if it has none."""
        kinds = {**self.layouts, **self._state.home.beside}
        found = self._state.home.part(self._state.param, kinds, piece)
        if found is None:
            return None
        values = found.flat(views, kinds)
        weight = values.pop(_PARAM, None)
        return Segment(self, found.start, found.stop).put(values, weight)

    def without_bytes(self) -> "Segment[DiskParam]":
        """Return a segment of a parameter that no piece has, because its statistics have no bytes on this rank."""
        return Segment(self, 0, self.numel).put(
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
        self,
        home: DiskHome,
        pieces: Sequence[Piece],
        reads: ReadAhead,
        fail: Callable[[BaseException], None],
        file: ParamFile | None = None,
    ) -> None:
        """`file` has the parameters, if their home is the disk."""
        self._home = home
        self._file = file
        self._pieces = tuple(pieces)
        self._reads = reads
        self._fail = fail

    def run(self, rule: UpdateRule, parts: Sequence[GroupSlice]) -> None:
        """Update `parts` piece by piece; writes of state may still run when this returns, those of parameters not.

        Raises the exception of a failed read or of the rule, and UnforeseenState if a new statistic has no file.
        If an exception comes after the first piece was read, or a write fails, the state of the bucket becomes invalid,
        and its parameters if their home is the disk.
        """
        self._home.check("update")
        if self._file is not None:
            self._file.begin_update()
        params = [[DiskParam(each) for each in part.updates] for part in parts]
        has_begun, passed = False, set[DiskParam]()
        try:
            for piece in self._pieces:
                views = self._reads.take(piece)
                has_begun = True
                try:
                    for part, members in zip(parts, params, strict=True):
                        found = [each for param in members if (each := param.segment(piece, views)) is not None]
                        update(found, rule, part.group, _HOST)
                        passed.update(each.param for each in found)
                except BaseException:
                    self._reads.give_back(piece)
                    raise
                self._home.note_update(id(param) for part in parts for param in part.params)
                self._reads.write(piece, self._wrote)
            for part, members in zip(parts, params, strict=True):
                # The shard of this rank may be empty, but all ranks count steps.
                update([param.without_bytes() for param in members if param not in passed], rule, part.group, _HOST)
        except BaseException as error:
            if has_begun:
                self._mark_invalid(error)
            raise
        finally:
            if self._file is not None:  # whoever reads the parameters next sees what was written
                self._reads.wait_for_writes()
                params = [param for part in parts for param in part.params]
                self._file.end_update(params, in_file=bool(self._home.beside))
        if self._file is not None and self._file.failure is not None:
            raise self._file.failure

    def _mark_invalid(self, error: BaseException) -> None:
        self._home.fail(error)
        if self._file is not None:
            self._file.failure = self._file.failure or error

    def _wrote(self, error: BaseException | None) -> None:
        if error is not None:
            what = "optimizer state" if self._file is None else "parameters and their optimizer state"
            error.add_note(
                f"the {what} of {self._home.label} is lost with it, and is not used again. "
                "Checkpoints are not affected: load one"
            )
            self._mark_invalid(error)
            if self._file is None:  # else the update waits for the write, and raises its exception
                self._fail(error)
