"""Find the offloaded activations that pass the link slice by slice while the laps that make and read them run.

```text
  lap of the forward    run @0     run @1     run @2     run @3           the device has the slice that leaves, and
                           slice 0 ^  slice 1 ^  slice 2 ^  slice 3 ^     the slice that the lap makes
  lap of the backward   run @0     run @1     run @2     run @3           the device has the slice that is read, and
                 ^ slices 0, 1  ^ slice 2  ^ slice 3                      the next slice
```

An activation arrives in slices if one divided lap alone reads it in the backward. It also leaves in slices if one
divided lap alone makes and reads it in the forward. The input of a layer, which the lap of another layer makes, leaves
as a whole. The slices must be consecutive pieces of the storage.

A step as it runs in micro-batches names the bytes on the device apart from the activation: `h.leaving` is the slice of
`h` that leaves, `h.arrived` the slice that is read, and `h.next` the slice that arrives meanwhile.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elixir_compile.ir import Activations, Batched, GroupId, Phase, Saving, StepGraph, StorageId
from elixir_compile.step.laps import Lap

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
    index = {op.id: i for i, op in enumerate(step.ops)}
    lap_of = [_UNDIVIDED] * len(step.ops)
    for number, lap in enumerate(laps):
        first, last = index.get(lap.first, len(step.ops)), index.get(lap.last, -1)
        if lap.micro_batches > 1 and first <= last:
            lap_of[first : last + 1] = [number] * (last + 1 - first)
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
