"""Find the offload interval of each group of activations at one recompute depth, in points (see `profiles`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Activations, GroupId, Saving, StepGraph, StorageId
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.modes import Layer, Mode, OffloadInterval, offload_intervals, saving_of
from elixir_compile.step.activations import Depth
from elixir_compile.step.liveness import Liveness, liveness
from elixir_compile.step.slices import WHOLE, Crossing, Crossings, arrived_name, crossings, leaving_name, next_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """The offload interval of a group, its ends as points."""

    group: GroupId
    nbytes: int
    num_copies: int
    leave: int
    first: int
    crossings: Crossings = WHOLE
    """The slices of the group, the ends of their laps as points."""
    saved_bytes: NDArray[np.int64] | None = None
    """By op, the bytes that the device has less than with the group kept; None in a step on the whole batch, where
    these are `nbytes` within the interval."""


def trips_of(
    problem: Problem,
    layers: Sequence[Layer],
    depth: Depth,
    activations: Sequence[Activations],
    step: StepGraph,
    lives: Liveness,
    point_of: NDArray[np.int64],
) -> Mapping[GroupId, Trip]:
    """Return the offload interval of each group that is stored at `depth`.

    `step` runs with `activations`, all layers recomputed to `depth` and the rest kept; `lives` are its lives, and
    `point_of` has the point of each of its ops.
    """
    all_groups = frozenset(group.id for layer in layers for group in layer.groups)
    stored = [
        Activations(id=group.id, storages=group.storages, nbytes=group.nbytes, saving=Saving.OFFLOAD)
        for layer in layers
        for group in layer.groups
        if saving_of(group, Mode(depth=depth, away=all_groups)) is Saving.OFFLOAD
    ]
    names = {group.id: group.storages for group in stored}
    moved, moved_lives, is_divided = step, lives, problem.micro_batches > 1
    if is_divided:
        again = [group for group in activations if group.saving is Saving.RECOMPUTE]
        moved = problem.as_run((*stored, *again))
        moved_lives = liveness(moved)
    crosses = crossings(moved, stored)
    return {
        interval.group: Trip(
            group=interval.group,
            nbytes=interval.nbytes,
            num_copies=interval.num_copies,
            leave=int(point_of[interval.leave]),
            first=int(point_of[interval.first]),
            crossings=_in_points(crosses.get(interval.group, WHOLE), point_of),
            saved_bytes=_saved_bytes(moved, lives, moved_lives, interval, names[interval.group])
            if is_divided
            else None,
        )
        for interval in offload_intervals(moved, moved_lives, stored)
    }


def _in_points(found: Crossings, point_of: NDArray[np.int64]) -> Crossings:
    def moved(crossing: Crossing | None) -> Crossing | None:
        if crossing is None:
            return None
        return replace(crossing, first=int(point_of[crossing.first]), last=int(point_of[crossing.last]))

    return Crossings(leaving=moved(found.leaving), arriving=moved(found.arriving))


def _saved_bytes(
    step: StepGraph, kept: Liveness, lives: Liveness, interval: OffloadInterval, names: Iterable[StorageId]
) -> NDArray[np.int64]:
    """Return by op the bytes of the storages `names` if they are kept, with the lives `kept`, less their bytes in
    `step`, where they are offloaded."""
    nbytes = {storage.id: storage.nbytes for storage in step.storages}
    changes = np.zeros(len(step.ops) + 1, dtype=np.int64)

    def add(size: int, first: int, last: int) -> None:
        changes[first] += size
        changes[last + 1] -= size

    for name in names:
        if name not in kept.lives:
            continue
        add(nbytes[name], kept.lives[name].first, kept.lives[name].last)
        out, back = (other if other in nbytes else name for other in (leaving_name(name), arrived_name(name)))
        add(-nbytes[out], lives.lives[out].first, interval.leave)
        add(-nbytes[back], interval.first, lives.lives[back].last)
        if back != name:
            beside = lives.lives[next_name(name)]
            add(-nbytes[next_name(name)], beside.first, beside.last)
    return np.cumsum(changes[:-1])
