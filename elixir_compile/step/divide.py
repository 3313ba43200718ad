"""Cut a step into laps that run in micro-batches, find the values that stay in parts or pass the link in slices, and
count the bytes and launches of the divided step.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import (
    Activations,
    Batched,
    GroupId,
    Kind,
    Op,
    OpId,
    Phase,
    Plan,
    Saving,
    StepGraph,
    Storage,
    StorageId,
    sizes,
)
from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.ir.schedule import rows_of_micro_batches

# ----------------------------------------------------------------------------------------------------------------------
# Cut a step into laps: runs of consecutive ops that go through the batch together, one micro-batch after another.
#
#   op       embed  | mm  gelu  mm  add | mm  gelu  mm  add | norm  mm  loss || ...
#   module   wte    | h.0  h.0  h.0 h.0 | h.1 h.1  h.1  h.1 | ln_f  head
#   lap      0      | 1                 | 2                 | 3              || the backward begins a lap
#
# Between two laps every value is the value of the whole batch, as one tensor or in parts (see further down). Within a
# lap, each micro-batch passes all ops before the next one begins (layered gradient accumulation, arXiv 2106.02679).
# An op that mixes the rows of the batch is a lap of its own and runs on the whole batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """Consecutive ops of one phase, from `first` to `last` (included), that run in `micro_batches` micro-batches."""

    first: OpId
    last: OpId
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise InvalidPlan(f"the lap from {self.first} has {self.micro_batches} micro-batches; expected 1 or more.")


def laps(step: StepGraph, micro_batches: int) -> tuple[Lap, ...]:
    """Return the laps of the forward and the backward of `step`, in order, each in `micro_batches` if it can be
    divided, else in 1.

    `step` is a step as it runs, recomputed ops included. A lap begins at each phase, at each layer with a number, at
    the first op of another module behind the last such layer, and before and behind an op that mixes the batch.
    """
    ops, begins = step.ops, set[int]()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        places = [i for i, op in enumerate(ops) if op.phase is phase]
        begins |= {*places[:1], *_layer_firsts(ops, places)}
        for i in places:
            begins |= {i, i + 1} if ops[i].mixes else set()
    num_run = sum(op.phase is not Phase.UPDATE for op in ops)
    firsts = sorted(i for i in begins if i < num_run)
    each = {storage.id for storage in step.storages if storage.batched is Batched.EACH}
    found: list[Lap] = []
    for first, end in itertools.pairwise((*firsts, num_run)):
        ops = step.ops[first:end]
        is_divided = not any(op.mixes for op in ops) and any(
            not each.isdisjoint(op.reads) or not each.isdisjoint(op.writes) for op in ops
        )
        found.append(Lap(first=ops[0].id, last=ops[-1].id, micro_batches=micro_batches if is_divided else 1))
    return tuple(found)


def laps_of(plan: Plan) -> tuple[Lap, ...]:
    """Return the regions of `plan` that run in more than one micro-batch, as laps."""
    return tuple(
        Lap(first=region.first, last=region.last, micro_batches=region.micro_batches)
        for region in plan.regions
        if region.micro_batches > 1
    )


def _spans(step: StepGraph, laps: Iterable[Lap]) -> list[range]:
    """Return the indices of the ops of each of `laps`: none if `step` has no such ops."""
    index, end = {op.id: number for number, op in enumerate(step.ops)}, len(step.ops)
    return [range(index.get(lap.first, end), index.get(lap.last, -1) + 1) for lap in laps]


def micro_batches_of(plan: Plan) -> int:
    """Return the largest number of micro-batches of a region of `plan`: that of all its divided laps."""
    return max((region.micro_batches for region in plan.regions), default=1)


def _layer_firsts(ops: Sequence[Op], places: Sequence[int]) -> set[int]:
    """Return where the layers of a phase begin, and where the ops behind the last layer begin; `places` are the indices
    of the ops of the phase.

    A layer begins with the ops of the layer before its first matrix product. A compiler may move single pointwise ops
    of a layer to another place in the phase: they begin no lap.
    """
    by_layer: dict[str, list[int]] = {}
    for i in places:
        if is_numbered(layer := layer_of(ops[i].module)):
            by_layer.setdefault(layer, []).append(i)
    found: set[int] = set()
    end = -1
    for layer, indices in by_layer.items():
        products = [i for i in indices if ops[i].flops] or indices
        first = products[0]
        while first > places[0] and layer_of(ops[first - 1].module) == layer:
            first -= 1
        found.add(first)
        end = max(end, products[-1])
    if end >= 0:
        behind = (i for i in places if i > end and ops[i].module and not is_numbered(layer_of(ops[i].module)))
        found |= set(itertools.islice(behind, 1))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Find the offloaded activations that pass the link slice by slice while the laps that make and read them run.
#
#   lap of the forward    run @0     run @1     run @2     run @3           the device has the slice that leaves, and
#                            slice 0 ^  slice 1 ^  slice 2 ^  slice 3 ^     the slice that the lap makes
#   lap of the backward   run @0     run @1     run @2     run @3           the device has the slice that is read, and
#                  ^ slices 0, 1  ^ slice 2  ^ slice 3                      the next slice
#
# An activation arrives in slices if one divided lap alone reads it in the backward. It also leaves in slices if one
# divided lap alone makes and reads it in the forward. The input of a layer, which the lap of another layer makes,
# leaves as a whole. The slices must be consecutive pieces of the storage.
#
# A step as it runs in micro-batches names the bytes on the device apart from the activation: `h.leaving` is the slice
# of `h` that leaves, `h.arrived` the slice that is read, and `h.next` the slice that arrives meanwhile.


LEAVING, ARRIVED, NEXT = ".leaving", ".arrived", ".next"
"""Suffixes of the storages that stand for slices of an offloaded activation on the device."""
_UNDIVIDED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The storages that pass the link in slices."""

    leaving: frozenset[StorageId] = frozenset()
    arriving: frozenset[StorageId] = frozenset()
    """All of `leaving`, and storages that leave as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The storages of one group that pass the link in slices while the ops `first` to `last` (indices) run."""

    first: int
    last: int
    micro_batches: int
    nbytes: int
    """The bytes of all their slices."""
    num_storages: int

    @property
    def beside_bytes(self) -> int:
        """The bytes that pass while the lap runs. One slice of each storage passes before or behind the lap."""
        return self.nbytes - self.nbytes // self.micro_batches

    @property
    def num_beside(self) -> int:
        """The number of copies while the lap runs."""
        return (self.micro_batches - 1) * self.num_storages


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossings:
    """The slices of one group of offloaded activations in both directions; None if it passes as a whole."""

    leaving: Crossing | None = None
    arriving: Crossing | None = None


WHOLE = Crossings()
"""A group that passes the link as a whole in both directions."""


def leaving_name(name: StorageId) -> StorageId:
    """Return the storage that stands for the slice of `name` that leaves."""
    return StorageId(f"{name}{LEAVING}")


def arrived_name(name: StorageId) -> StorageId:
    """Return the storage that stands for the slice of `name` that is read."""
    return StorageId(f"{name}{ARRIVED}")


def next_name(name: StorageId) -> StorageId:
    """Return the storage that stands for the slice of `name` that arrives while the slice before it is read."""
    return StorageId(f"{name}{NEXT}")


def offloaded_names(activations: Iterable[Activations]) -> Mapping[StorageId, GroupId]:
    """Return the group of each offloaded storage, and of the storages that stand for its slices between laps."""
    return {
        of_device: group.id
        for group in activations
        if group.saving is Saving.OFFLOAD
        for name in group.storages
        for of_device in (name, leaving_name(name), arrived_name(name))
    }


@dataclass(slots=True)
class _Touches:
    """The ops that touch a storage of an offloaded group."""

    forward_laps: set[int] = field(default_factory=set)
    """The indices of the laps of the forward whose ops touch it; `_UNDIVIDED` for ops in no divided lap."""
    backward_laps: set[int] = field(default_factory=set)
    is_made: bool = False
    """Whether the first op that touches it writes it."""
    is_written_again: bool = False
    """Whether an op of the backward writes it."""
    last_lap: int = _UNDIVIDED
    last: int = -1
    """The index of the last op of the forward that touches it, and its lap."""
    first_lap: int = _UNDIVIDED
    first: int = -1
    """The index of the first op of the backward that touches it, and its lap."""


def slices_of(step: StepGraph, laps: Sequence[Lap], activations: Iterable[Activations]) -> Slices:
    """Return the storages of the offloaded groups of `activations` that pass the link in slices.

    `step` is the step as it runs, before it is divided into `laps`. Of a group, the storages of the last lap of the
    forward that touches any of them may leave in slices, and those of the first lap of the backward may arrive in
    slices: the copies of the group are issued behind the one lap and before the other.
    """
    offloaded = [group for group in activations if group.saving is Saving.OFFLOAD]
    if not offloaded or not laps:
        return Slices()
    touches = _touches(step, laps, {name for group in offloaded for name in group.storages})
    may_pass = {s.id for s in step.storages if s.batched is Batched.EACH and s.consecutive} - {*step.outputs}
    leaving: set[StorageId] = set()
    arriving: set[StorageId] = set()
    for group in offloaded:
        members = {name: touches[name] for name in group.storages if name in touches}
        read = [touch for touch in members.values() if touch.backward_laps]
        if not read:
            continue
        back = min(read, key=lambda touch: touch.first).first_lap
        out = max(members.values(), key=lambda touch: touch.last).last_lap
        for name, touch in members.items():
            if name in may_pass and touch.backward_laps == {back} != {_UNDIVIDED} and not touch.is_written_again:
                arriving.add(name)
                is_of_one_lap = touch.is_made and touch.forward_laps == {out} != {_UNDIVIDED}
                if is_of_one_lap and laps[out].micro_batches == laps[back].micro_batches:
                    leaving.add(name)
    return Slices(leaving=frozenset(leaving), arriving=frozenset(arriving))


def _touches(step: StepGraph, laps: Sequence[Lap], names: Collection[StorageId]) -> Mapping[StorageId, _Touches]:
    """Return the ops of `step` that touch each of `names`."""
    lap_of = [_UNDIVIDED] * len(step.ops)
    for number, (lap, span) in enumerate(zip(laps, _spans(step, laps), strict=True)):
        for at in span if lap.micro_batches > 1 else ():
            lap_of[at] = number
    found: dict[StorageId, _Touches] = {}
    for i, op in enumerate(step.ops):
        for name in (*op.reads, *op.writes):
            if name not in names:
                continue
            is_new, touch = name not in found, found.setdefault(name, _Touches())
            if op.phase is Phase.FORWARD:
                touch.is_made = name in op.writes if is_new else touch.is_made
                touch.forward_laps.add(lap_of[i])
                touch.last, touch.last_lap = i, lap_of[i]
            else:
                if not touch.backward_laps:
                    touch.first, touch.first_lap = i, lap_of[i]
                touch.backward_laps.add(lap_of[i])
                touch.is_written_again = touch.is_written_again or name in op.writes
    return found


def crossings(step: StepGraph, activations: Iterable[Activations]) -> Mapping[GroupId, Crossings]:
    """Return the slices of each group of `activations` that has any; `step` is the step as it runs in micro-batches."""
    nbytes = {storage.id: storage.nbytes for storage in step.storages}
    found: dict[GroupId, Crossings] = {}
    for group in activations:
        if group.saving is Saving.OFFLOAD:
            leaving = {leaving_name(name): name for name in group.storages if leaving_name(name) in nbytes}
            arriving = {next_name(name): name for name in group.storages if next_name(name) in nbytes}
            if arriving:
                found[group.id] = Crossings(
                    leaving=_crossing(step, nbytes, leaving) if leaving else None,
                    arriving=_crossing(step, nbytes, arriving),
                )
    return found


def _crossing(step: StepGraph, nbytes: Mapping[StorageId, int], slices: Mapping[StorageId, StorageId]) -> Crossing:
    """Return the crossing of `slices`, from the storage of a slice to the whole storage.

    The first and the last op of the lap touch each of `slices`.
    """
    places = [i for i, op in enumerate(step.ops) if not slices.keys().isdisjoint((*op.reads, *op.writes))]
    of_slice, whole = next(iter(slices.items()))
    return Crossing(
        first=places[0],
        last=places[-1],
        micro_batches=nbytes[whole] // nbytes[of_slice],
        nbytes=sum(nbytes[name] for name in slices.values()),
        num_storages=len(slices),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Find the values that stay in parts, one tensor per micro-batch, instead of filling a tensor of the whole batch.
#
#   lap that makes it    run @0    run @1    run @2    run @3        the body of micro-batch j makes part j
#   device               0         0 1       0 1 2     0 1 2 3       part j stays as the body has made it
#   lap that reads it    run @0    run @1    run @2    run @3        the body of micro-batch j reads part j
#
# A value stays in parts if only divided laps touch it, all in the same number of micro-batches. It may be saved for the
# backward, but not returned to the caller, nor offloaded: its copy to the host is one transfer. The parts must be
# consecutive pieces of the storage.
#
# A lap into which activations arrive in slices makes no parts. It counts the next slice during the whole lap, but in
# the last micro-batch, which has all parts, no slice is next: the plan would count more than there is.
#
# A step as it runs in micro-batches names the parts of all micro-batches but the last apart until the last is made:
# `h.earlier`.


EARLIER = ".earlier"
"""Suffix of the storage that stands for the parts of a value before the part of the last micro-batch is made."""
_MADE_BY_OPS = (Kind.TEMP, Kind.SAVED)


def earlier_name(name: StorageId) -> StorageId:
    """Return the storage that stands for the parts of `name` before the part of the last micro-batch is made."""
    return StorageId(f"{name}{EARLIER}")


def tangents_of_step(step: StepGraph) -> frozenset[StorageId]:
    """Return the storages that the backward of `step` gets from the caller; see `tangents_of`."""
    first = next((op for op in step.ops if op.phase is Phase.BACKWARD), None)
    return frozenset(() if first is None else tangents_of(first))


def tangents_of(first: Op) -> tuple[StorageId, ...]:
    """Return the storages of the tangents among the writes of `first`, the first op of the backward.

    They come before its own result, whose storage has the name of the op. An op with neither reads nor a result is
    fused: its result is computed elsewhere, and it writes tangents alone.
    """
    results = {first.id, *(f"{first.id}.{place}" for place in range(1, len(first.writes)))}
    others = 0 if first.reads else len(first.writes)
    return first.writes[: next((place for place, name in enumerate(first.writes) if name in results), others)]


def parts_of(
    step: StepGraph, laps: Sequence[Lap], activations: Sequence[Activations], slices: Slices
) -> frozenset[StorageId]:
    """Return the storages of `step` that stay in parts between `laps`, and storages that one of `laps` alone touches.

    `step` is the step as it runs with `activations`, before it is divided. `slices` are the offloaded storages that
    pass the link in slices.
    """
    may_stay = {s.id for s in step.storages if s.batched is Batched.EACH and s.consecutive and s.kind in _MADE_BY_OPS}
    may_stay -= {*step.outputs, *offloaded_names(activations), *tangents_of_step(step)}
    if step.batch_size or not may_stay:
        return frozenset()
    spans = _spans(step, laps)
    numbers = [1] * len(step.ops)  # of micro-batches, by op
    for lap, span in zip(laps, spans, strict=True):
        for at in span:
            numbers[at] = lap.micro_batches
    touched: dict[StorageId, set[int]] = {}
    for op, number in zip(step.ops, numbers, strict=True):
        for name in (*op.reads, *op.writes):
            touched.setdefault(name, set()).add(number)
    times_written = Counter(name for op in step.ops for name in op.writes)
    found = {name for name in may_stay if times_written[name] == 1 and len(touched[name]) == 1}
    for span in spans if slices.arriving else ():
        ops = step.ops[span.start : span.stop]
        if any(op.phase is Phase.BACKWARD and not slices.arriving.isdisjoint(op.reads) for op in ops):
            found.difference_update(chain.from_iterable(op.writes for op in ops))
    return frozenset(name for name in found if touched[name] != {1})


# ----------------------------------------------------------------------------------------------------------------------
# Count the bytes and the launches of a step whose laps run in micro-batches.
#
# The result is a step with the same ops, so all that counts a step (liveness, windows, timelines, simulation, search)
# counts a divided step too. For a lap in n micro-batches:
#
#   slices inside of the lap            the bytes of one micro-batch
#   slices read from outside            whole; live until the lap ends
#   slices made here, read outside      whole, live from the first op of the lap on; and the part of one micro-batch
#   slices that stay in parts           all parts, from the op that makes them on; before it, all parts but one (see
#                                       `step.divide`)
#   slices that leave in slices         the slice that leaves, live from the first op of the lap on; and the part of one
#                                       micro-batch (see `step.divide`)
#   slices that arrive in slices        the slice that is read; and the next slice, live during the whole lap
#   equal for all, made and read here   live from the first to the last op of the lap
#   a sum made here                     live from the first op on, in fp32 if the sum has 16 bits; and the part of one
#                                       micro-batch
#   parameters                          read by the first and the last op of the lap
#
# An op of the lap launches n times. It moves the slices once, and all else n times. The last op of the lap also moves
# what fills whole tensors with slices and adds up parts.
#
# A batch with a dynamic number of rows runs in at most n micro-batches. A slice then has the bytes of the largest
# micro-batch of any batch of at most as many rows (`ir.schedule`).


PART, TOTAL = ".part", ".total"
"""Suffixes of the storages that a lap adds: the part of one micro-batch, and the fp32 sum of 16-bit parts."""
_SHORT = ("bfloat16", "float16")
_MADE = (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED, Kind.GRAD)


def divided(step: StepGraph, laps: Sequence[Lap], activations: Sequence[Activations] = ()) -> StepGraph:
    """Return `step`, ops as they run with `activations`, with each of `laps` run in its micro-batches.

    A lap that names no ops of `step` changes nothing: `check_regions` refuses its region.
    """
    touched: dict[StorageId, tuple[int, int, int]] = {}
    for i, op in enumerate(step.ops):
        for name in (*op.reads, *op.writes):
            made, first, _ = touched.get(name, (len(step.ops), i, i))
            touched[name] = (min(made, i) if name in op.writes else made, first, i)
    tangents = tangents_of_step(step)
    outputs = frozenset(step.outputs)
    storages = {storage.id: storage for storage in step.storages}
    symbols = dict(step.symbols)
    slices = slices_of(step, laps, activations)
    parts = parts_of(step, laps, activations, slices)
    ops = list(step.ops)
    for lap, span in zip(laps, _spans(step, laps), strict=True):
        if lap.micro_batches == 1 or not span:
            continue
        num = len(rows_of_micro_batches(step.batch, lap.micro_batches)) if step.batch_size else lap.micro_batches
        cut = _Cut(num, lap.micro_batches, step.batch_size, symbols)
        lap_ops = step.ops[span.start : span.stop]
        writer = _LapWriter(lap_ops, num, cut, storages, touched, span.start, outputs, tangents, slices, parts)
        ops[span.start : span.stop] = writer.written()
    return replace(step, ops=tuple(ops), storages=tuple(storages.values()))


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the slices of a lap are cut."""

    num: int
    """The number of micro-batches."""
    most: int
    """The number of micro-batches that the plan states, an upper limit if the number of rows is dynamic."""
    rows: str
    """The symbol of the number of rows; empty if it is constant."""
    symbols: Mapping[str, int]

    def slice_of(self, storage: Storage) -> Storage:
        """Return `storage` with the bytes of one micro-batch."""
        if not storage.size:
            return replace(storage, nbytes=-(-storage.nbytes // self.num))
        if self.rows:
            size = sizes.of_micro_batch(storage.size, self.rows, self.most)
        else:
            size = sizes.divided(storage.size, self.num)
        return replace(storage, nbytes=sizes.evaluate(size, self.symbols), size=size)


@dataclass(slots=True)
class _LapWriter:
    """Writes the ops of one lap as they run in micro-batches; adds its storages to `storages`, or changes them."""

    ops: Sequence[Op]
    num: int
    """The number of micro-batches."""
    cut: _Cut
    storages: dict[StorageId, Storage]
    touched: Mapping[StorageId, tuple[int, int, int]]
    """By storage: the indices of the first op that writes it, the number of ops if none does, and of the first and the
    last op that touch it."""
    start: int
    """The index of the first op of the lap in its step."""
    outputs: frozenset[StorageId]
    """Storages that the forward returns to the caller."""
    tangents: frozenset[StorageId]
    """Storages written by the first op of the backward that come from the caller."""
    slices: Slices
    """Storages that leave the device or arrive on it in slices."""
    parts: frozenset[StorageId]
    """Storages that stay in parts if other laps read them."""
    reads: list[list[StorageId]] = field(default_factory=list)
    writes: list[list[StorageId]] = field(default_factory=list)
    filled_bytes: int = 0
    """Bytes that fill whole tensors and add up parts."""

    def written(self) -> list[Op]:
        """Return the ops of the lap, with more reads and writes, and with the bytes that they move in the step."""
        moved = [self._moved(op) for op in self.ops]
        self.reads, self.writes = [list(op.reads) for op in self.ops], [list(op.writes) for op in self.ops]
        names = dict.fromkeys(name for op in self.ops for name in (*op.reads, *op.writes))
        for name in names:
            self._place(self.storages[name])
        moved[-1] = (moved[-1][0] + self.filled_bytes, moved[-1][1])
        return [
            op.touching(tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes)), nbytes, times=times)
            for op, reads, writes, (nbytes, times) in zip(self.ops, self.reads, self.writes, moved, strict=True)
        ]

    def _moved(self, op: Op) -> tuple[int, int]:
        """Return the bytes that `op` moves in a step, and how many times it runs."""
        touched = [self.storages[name] for name in dict.fromkeys((*op.reads, *op.writes))]
        if not is_repeated(op, self.storages):
            return op.moved_bytes, 1
        if op.flops == 0 and op.moved_bytes == 0:
            return 0, self.num
        again_bytes = sum(storage.nbytes for storage in touched if storage.batched is not Batched.EACH)
        return op.moved_bytes + (self.num - 1) * again_bytes, self.num

    def _place(self, storage: Storage) -> None:
        if storage.id in self.slices.leaving and self.ops[0].phase is Phase.FORWARD:
            # The slice made in this lap is on its way to the host while the next is made.
            name, part = leaving_name(storage.id), self.cut.slice_of(storage)
            maker = next(i for i, op in enumerate(self.ops) if storage.id in op.writes)
            self._rename(storage.id, name)
            self.storages[name] = replace(part, id=name, kind=Kind.TEMP)
            self.filled_bytes += 2 * storage.nbytes
            self.writes[0].append(name)
            self._read_until_end(name)
            self._add(part, PART, maker)
            return
        if storage.id in self.slices.arriving and self.ops[0].phase is Phase.BACKWARD:
            # The lap reads one slice while the next arrives.
            here, coming = arrived_name(storage.id), next_name(storage.id)
            self._rename(storage.id, here)
            for name in (here, coming):
                self.storages[name] = replace(self.cut.slice_of(storage), id=name, kind=Kind.TEMP)
            self.writes[0].append(coming)
            self._read_until_end(coming)
            return
        made, first, last = self.touched[storage.id]
        end = self.start + len(self.ops)
        is_made = storage.kind in _MADE and self.start <= made < end and first >= self.start
        is_made = is_made and storage.id not in self.tangents
        is_inside = is_made and last < end and storage.id not in self.outputs and storage.kind is not Kind.GRAD
        if not is_made:
            self._read_until_end(storage.id)
            if storage.kind is Kind.PARAM:
                self.reads[0].append(storage.id)
        elif storage.batched is Batched.EACH:
            self._place_slices(storage, made - self.start, is_inside=is_inside)
        elif storage.batched is Batched.SUM:
            self._place_sum(storage, made - self.start)
        elif not is_inside or any(storage.id in op.reads and is_repeated(op, self.storages) for op in self.ops):
            # Computed before the first micro-batch, and read by all of them.
            self.writes[0].append(storage.id)
            self._read_until_end(storage.id)

    def _place_slices(self, storage: Storage, maker: int, *, is_inside: bool) -> None:
        part = self.cut.slice_of(storage)
        if is_inside:
            self.storages[storage.id] = part
            return
        self._read_until_end(storage.id)
        if storage.id in self.parts:
            if maker > 0:  # the parts that are there, in the last micro-batch, before the op `maker` makes its part
                name, earlier_bytes = earlier_name(storage.id), storage.nbytes - part.nbytes
                self.storages[name] = replace(storage, id=name, nbytes=earlier_bytes, size="", kind=Kind.TEMP)
                self.writes[0].append(name)
                self.reads[maker - 1].append(name)
            return
        self.filled_bytes += 2 * storage.nbytes
        self.writes[0].append(storage.id)
        self._add(part, PART, maker)

    def _rename(self, name: StorageId, new: StorageId) -> None:
        """Let the ops of the lap read and write `new` instead of `name`."""
        for names in (*self.reads, *self.writes):
            names[:] = [new if other == name else other for other in names]

    def _place_sum(self, storage: Storage, maker: int) -> None:
        self.filled_bytes += 3 * (self.num - 1) * storage.nbytes
        self._add(storage, PART, maker)
        self._read_until_end(storage.id)
        if storage.dtype not in _SHORT:
            self.writes[0].append(storage.id)
            return
        # The sum in 16 bits is rounded from the fp32 sum after the last micro-batch.
        self.writes[maker].remove(storage.id)
        self.writes[-1].append(storage.id)
        for reads in self.reads[:-1]:
            while storage.id in reads:
                reads.remove(storage.id)
        size = sizes.times(storage.size, 2) if storage.size else ""
        self._add(replace(storage, nbytes=2 * storage.nbytes, size=size), TOTAL, 0)

    def _add(self, like: Storage, suffix: str, maker: int) -> None:
        """Add a temporary storage of the bytes of `like` that lives from the op `maker` of the lap to its end."""
        name = StorageId(f"{like.id}{suffix}")
        self.storages[name] = replace(like, id=name, kind=Kind.TEMP, of=None)
        self.writes[maker].append(name)
        self._read_until_end(name)

    def _read_until_end(self, name: StorageId) -> None:
        self.reads[-1].append(name)


def is_repeated(op: Op, storages: Mapping[StorageId, Storage]) -> bool:
    """Return whether `op`, of a divided lap, runs once per micro-batch.

    An op that reads only values equal for all micro-batches runs once, before the first of them. An op that makes such
    a value of sums runs once, behind the last.
    """
    if any(storages[name].batched is not Batched.SAME for name in op.writes):
        return True
    return not op.writes or any(storages[name].batched is Batched.EACH for name in op.reads)
