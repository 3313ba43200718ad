"""Count the bytes and the seconds of each mode of each layer by op, place ops and reduces in one order, and derive the
residencies of gathered copies from levels.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Activations, Kind, OpId, StepGraph, StorageId
from elixir_compile.ir.graph import layer_of
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import Level, is_gathered
from elixir_compile.search.space.facts import Facts, Trip, trips_of
from elixir_compile.search.space.layers import Layer, Mode, activations_of, depths_of, leave_ends, modes_at_depth
from elixir_compile.step.as_run import Repeat, repeated_op, repeated_storage, repeats, repeats_each
from elixir_compile.step.bucket_bytes import Ops, crosses
from elixir_compile.step.liveness import Depth, liveness
from elixir_compile.step.prices import OpSeconds

# ----------------------------------------------------------------------------------------------------------------------
# The ops of a step and the moments between them in one order.
#
# A reduce needs more bytes than the ops around it: the gradients and the buffer into which they are packed. At that
# moment nothing is there that only the op before it reads. So a reduce has a position of its own, behind the op that
# completes the gradients; reduces behind the same op come one after another, in the order of buckets.
#
#   op          0    1    2              3    4    5
#   position    0    1    2    3    4    5    6    7
#                           b1^  ^b0                     op 2 completes the gradients of b0 and b1


class Positions:
    """The positions of the ops and the reduces of a step."""

    def __init__(self, facts: Facts) -> None:
        num_ops = len(facts.graph.ops)
        reduces = sorted(
            (own.complete, bucket)
            for bucket, own in enumerate(facts.gradients)
            if own is not None and facts.has_position(bucket)
        )
        completes = np.array([complete for complete, _ in reduces], dtype=np.int64)
        self.moments: Mapping[int, int] = {
            bucket: complete + 1 + place for place, (complete, bucket) in enumerate(reduces)
        }
        """The position of the reduce of each bucket that has one."""
        ops = np.arange(num_ops + 1)
        self._of: list[int] = (ops + np.searchsorted(completes, ops)).tolist()
        self.num = self._of[num_ops]
        # By position: the number of its op, or for a reduce the number of ops more than the op before it.
        self._places = np.sort(np.concatenate([2 * ops[:-1], 2 * completes + 1]))
        self._places = self._places // 2 + num_ops * (self._places % 2)

    def of(self, op: int) -> int:
        """Return the position of op `op`; the number of positions if `op` is the number of ops."""
        return self._of[op]

    def before_reduce(self, bucket: int, complete: int) -> int:
        """Return the last position before the reduce of `bucket`, whose gradients op `complete` completes."""
        return self.moments[bucket] - 1 if bucket in self.moments else self._of[complete]

    def wait(self, bucket: int, op: int) -> int:
        """Return the last position before the wait for the reduce of `bucket`, which comes after op `op`."""
        return max(self._of[op], self.moments.get(bucket, 0))

    def op_of(self, position: int) -> int:
        """Return the op at `position`, or the op before it if a reduce is there."""
        return int(self._places[position]) % (len(self._of) - 1)

    def spread(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `nbytes` by position, along the last axis. The last two axes of `nbytes` have the bytes at each op,
        and those between each op and the next."""
        return nbytes.reshape(*nbytes.shape[:-2], -1)[..., self._places]


# ----------------------------------------------------------------------------------------------------------------------
# Derive from levels and a prefetch distance the residencies: the ops between which gathered copies and prefetched
# activations are on the device.
#
#     op        0    1    2    3    4    5
#     b1        g~~~~w====r                      gathered before op 0, awaited before op 1, released after op 2
#     b2             g~~~~~~~~~w====r            gathered one window ahead: when the window of b1 begins
#
# A gather is issued when the window `ahead` windows earlier begins, but not before its own phase begins, not before the
# previous copy of the bucket is released, and not before a gather that is needed earlier, because lanes are first in,
# first out. If `ahead` is 0, it is issued right before the wait.


class Residency(NamedTuple):
    """Op indices of one gathered copy or one prefetch. A tuple, because a search makes hundreds of thousands."""

    gather: int
    """Gathered before this op."""
    first: int
    """Awaited before this op."""
    last: int
    """Released after this op."""
    bucket: int
    """Index of the bucket, or the number of buckets plus the index of the offload interval that ends."""


class Moves(NamedTuple):
    """The times of all transfers of a step, as op indices."""

    residencies: tuple[Residency, ...]
    """Sorted by first op."""
    grad_ends: Mapping[int, int]
    """Per bucket whose gradients leave: the last op at which they occupy the device (`gradient_ends`)."""
    leave_ends: Mapping[int, int]
    """Per offload interval: the last op at which its activations still occupy the device."""
    streamed: frozenset[int] = frozenset()
    """Buckets with a streamed update."""


def moves_at_use(facts: Facts, levels: Sequence[Level], ahead: int = 0) -> Moves:
    """Return the moves with every gather `ahead` windows early, and waits for gradients as early as possible."""
    ends = leave_ends(facts.offload_intervals, facts.num_forward, 0)
    streamed = frozenset(i for i in facts.streamed if levels[i].has_state_on_host)
    return Moves(tuple(residencies(facts, levels, ahead)), gradient_ends(facts, levels), ends, streamed)


def residencies(facts: Facts, levels: Sequence[Level], ahead: int) -> list[Residency]:
    """Return every residency at these levels, by first op, each gathered `ahead` windows early."""
    unplaced = [
        (first, bucket, last)
        for bucket, (copies, level) in enumerate(zip(facts.copies, levels, strict=True))
        for first, last in copies[level]
    ]
    for number, interval in enumerate(facts.offload_intervals, start=len(facts.buckets)):
        unplaced.append((interval.first, number, max(last for last, _ in interval.lasts)))
    unplaced.sort()
    if not ahead:
        return [Residency(first, first, last, bucket) for first, bucket, last in unplaced]
    firsts: dict[int, list[int]] = {}
    issued: dict[int, int] = {}
    released: dict[int, int] = {}
    placed: list[Residency] = []
    for first, bucket, last in unplaced:
        start = facts.phase_start(first)
        earlier = firsts.setdefault(start, [])
        gather = start if ahead > len(earlier) else earlier[-ahead]
        gather = max(gather, released.get(bucket, 0), issued.get(start, 0))
        placed.append(Residency(gather, first, last, bucket))
        issued[start] = gather
        earlier.append(first)
        released[bucket] = last + 1
    return placed


def num_ahead(placed: Sequence[Residency]) -> list[int]:
    """Return how many windows each of `placed`, sorted by first op, is gathered early."""
    firsts = [residency.first for residency in placed]
    return [bisect_left(firsts, residency.first) - bisect_left(firsts, residency.gather) for residency in placed]


def gradient_ends(facts: Facts, levels: Sequence[Level], lag: int = 1) -> dict[int, int]:
    """Return the last op at which unreduced gradients occupy the device, per bucket that reduces or offloads them.

    It is the op that completes the gradients of the bucket that comes `lag` later among these buckets, or the last op
    of the backward if there is none. The keys are in the order in which gradients leave.
    """
    order = sorted(
        (gradients.complete, bucket)
        for bucket, gradients in enumerate(facts.gradients)
        if gradients is not None and is_gathered(facts.buckets[bucket], levels[bucket])
    )
    ends = [complete for complete, _ in order] + [facts.num_run - 1] * lag
    return {bucket: end for (_, bucket), end in zip(order, ends[lag:], strict=True)}


# ----------------------------------------------------------------------------------------------------------------------
# Count the bytes and the seconds of each mode of each layer, by the ops of the step with every activation kept.
#
# Recomputation adds ops, so steps of different modes have different ops. But each added op runs right before an op of
# the step with every activation kept; the index of that op is its point. Bytes and seconds by point add up over layers:
#
#     live bytes at point i  =  rest[i] + sum over layers of bytes[layer, mode][i]
#
# One step per depth is enough, with all layers recomputed to the depth, because a layer recomputes only its own
# activations. The bytes of offloaded groups are subtracted afterwards. At a point the repeated ops of a layer run one
# after another, and the highest of their bytes counts.
#
# The seconds of a layer must not depend on the modes of other layers, or a path with them is no lower bound. If two
# layers in a row are recomputed, the second may recompute its input too, and an op between them may be fused with fewer
# ops: neither counts. Layers that add other seconds than all others, such as the first and the last, are also counted
# with that layer alone recomputed, because beside a recomputed neighbour their ops may fuse differently. The fewer
# seconds are taken.


_Added = tuple[tuple[int, float], ...]
"""(point, seconds) of compute added by a layer."""
_MAX_ALONE, _MANY_OPS = 4, 6000
"""So many layers at most are counted alone at each depth, or one layer of a step with more ops than `_MANY_OPS`: each
count takes 0.1 s for 3,000 ops."""
_CLOSE = 3
"""Layers whose places in the model differ by no more than this may change the seconds that the other adds: one layer
makes the input of the next, and an op between two layers may fuse with either."""
_MOVABLE = (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Bytes and seconds of a layer in a mode."""

    nbytes: NDArray[np.int64]
    """Device bytes: a row of those at each point, and a row of those between each point and the next."""
    added_s: _Added
    """(point, seconds) of compute beyond the seconds of the layer with every activation kept."""
    trips: tuple[Trip, ...]
    num_outstanding: int = 1
    """The most forwards that are outstanding at once."""

    @property
    def host_bytes(self) -> int:
        return self.num_outstanding * sum(trip.nbytes for trip in self.trips)


def profiles(
    problem: Problem, layers: Sequence[Layer], ops: OpSeconds | None = None
) -> tuple[tuple[Profile, ...], ...]:
    """Return the profile of each mode of each of `layers`, in their order; `ops` are the seconds of the problem's ops,
    if they are known."""
    if not layers:
        return ()
    base = problem.as_run()
    index = {op.id: i for i, op in enumerate(base.ops)}
    ops = OpSeconds(problem.graph, problem.cluster, problem.measured) if ops is None else ops
    kept_s = dict(zip(index, ops.of((), problem.laps(())), strict=True))
    steps = {depth: _RecomputedStep(problem, layers, depth, index, ops, kept_s) for depth in depths_of(layers)}
    return tuple(
        tuple(steps[mode.depth].profile(number, mode) for mode in layer.modes) for number, layer in enumerate(layers)
    )


class _RecomputedStep:
    """The step with every layer recomputed to one depth, its bytes and seconds by layer and point."""

    def __init__(
        self,
        problem: Problem,
        layers: Sequence[Layer],
        depth: Depth,
        index: Mapping[OpId, int],
        ops: OpSeconds,
        kept_s: Mapping[OpId, float],
    ) -> None:
        graph, base = problem.graph, problem.as_run()
        self._ops = ops
        activations = activations_of(layers, modes_at_depth(layers, depth))
        self._step = problem.as_run(activations)
        self._lives = liveness(self._step)
        self._point_of = _points(self._step, index)
        self._number = {layer.name: i for i, layer in enumerate(layers)}
        self.num_outstanding = problem.calls.outstanding
        makes = {op.id: op.writes for op in graph.ops}
        found = repeats(graph, activations)
        alone = repeats_each(graph, [activations_of([layer], modes_at_depth([layer], depth)) for layer in layers])
        self._alone = [frozenset(repeated_op(repeat.op) for repeat in own) for own in alone]
        """For each layer, the ops that run again if it alone is recomputed to the depth."""
        self._repeated_by = _repeated_by(layers, found, makes)
        owner = _owners(self._step, layers, self._number, activations)
        owner |= {
            repeated_storage(name): self._repeated_by[repeated_op(repeat.op)]
            for repeat in found
            for name in makes[repeat.op]
        }
        self._starts = np.searchsorted(self._point_of, np.arange(len(index)))
        self.num_run_points = Ops.of(base).num_run
        self._bytes_per_op = self._bytes_by_layer(len(layers), owner)
        self.nbytes = self._by_point(self._bytes_per_op)
        seconds = self._ops.of(activations, problem.laps(activations))
        self.added_s = self._added_s(len(layers), seconds, kept_s)
        totals_s = [round(_total_s(added), 12) for added in self.added_s]
        unlike = [i for i, total_s in enumerate(totals_s) if total_s > 0.0 and totals_s.count(total_s) == 1]
        max_alone = _MAX_ALONE if len(graph.ops) <= _MANY_OPS else 1
        chosen = (*unlike[: max_alone - 1], *unlike[max_alone - 1 :][-1:]) if depth is not Depth.KEPT else ()
        self._places = _places(graph, self._number)
        for apart in _far_apart(chosen, self._places):
            alone = self._added_alone(problem, {i: layers[i] for i in apart}, depth, index, kept_s)
            for i, added in alone.items():
                self.added_s[i] = min(self.added_s[i], added, key=_total_s)
        self.trips = trips_of(problem, layers, depth, activations, self._step, self._lives, self._point_of)

    def profile(self, number: int, mode: Mode) -> Profile:
        """Return the profile of the layer with this `number` in `mode`, whose depth is that of this step."""
        trips = tuple(self.trips[group] for group in sorted(mode.away) if group in self.trips)
        saved = [trip.saved_bytes for trip in trips if trip.saved_bytes is not None]
        if saved:
            saved_bytes = np.sum(saved, axis=0)
            between = np.minimum(saved_bytes, np.append(saved_bytes[1:], 0))
            nbytes = self._by_point(self._bytes_per_op[number] - np.stack([saved_bytes, between]))
        else:
            nbytes = self.nbytes[number].copy()
            for trip in trips:
                nbytes[:, trip.leave + 1 : trip.first] -= trip.nbytes
        nbytes[:, : self.num_run_points] -= (self.num_outstanding - 1) * sum(trip.nbytes for trip in trips)
        return Profile(nbytes=nbytes, added_s=self.added_s[number], trips=trips, num_outstanding=self.num_outstanding)

    def _by_point(self, bytes_per_op: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the highest of the bytes at the ops of each point, and the bytes between its last op and the next.

        The last axis of `bytes_per_op` are the ops, and the one before has the bytes at an op and those behind it.
        """
        at, behind = bytes_per_op[..., 0, :], bytes_per_op[..., 1, :]
        lasts = np.append(self._starts[1:], behind.shape[-1]) - 1
        return np.stack([np.maximum.reduceat(at, self._starts, axis=-1), behind[..., lasts]], axis=-2)

    def _bytes_by_layer(self, num_layers: int, owner: Mapping[StorageId, int]) -> NDArray[np.int64]:
        changes = np.zeros((num_layers, len(self._step.ops) + 1), dtype=np.int64)
        ending = np.zeros((num_layers, len(self._step.ops)), dtype=np.int64)
        ops = Ops.of(self._step)
        for storage in self._step.storages:
            layer, life = owner.get(storage.id), self._lives.lives.get(storage.id)
            if layer is not None and life is not None and storage.kind in _MOVABLE:
                changes[layer, life.first] += storage.nbytes
                changes[layer, life.last + 1] -= storage.nbytes
                ending[layer, life.last] += storage.nbytes
                if crosses(life, ops.num_forward):  # other outstanding forwards hold it too
                    changes[layer, 0] += (self.num_outstanding - 1) * storage.nbytes
                    changes[layer, ops.num_run] -= (self.num_outstanding - 1) * storage.nbytes
        at = np.cumsum(changes[:, :-1], axis=1)
        return np.stack([at, at - ending], axis=1)

    def _added_s(self, num_layers: int, seconds: Sequence[float], kept_s: Mapping[OpId, float]) -> list[_Added]:
        """Return (point, seconds) by which the ops of each layer take longer than with every activation kept.

        An op that takes longer counts only if it also runs again with its layer alone recomputed. A repeated op belongs
        to the layer for which it runs again. An op outside of all layers belongs to the next layer, whose input it
        makes, or to none if no layer follows.
        """
        found: list[dict[int, float]] = [{} for _ in range(num_layers)]
        owners: list[int | None] = []
        for op in reversed(self._step.ops):
            after = owners[-1] if owners else None
            owners.append(self._repeated_by.get(op.id, self._number.get(layer_of(op.module), after)))
        for i, (op, layer) in enumerate(zip(self._step.ops, reversed(owners), strict=True)):
            more_s = seconds[i] - kept_s.get(op.id, 0.0)
            if layer is None or not more_s or (more_s > 0.0 and op.id not in self._alone[layer]):
                continue
            point = int(self._point_of[i])
            found[layer][point] = found[layer].get(point, 0.0) + more_s
        return [tuple(by_point.items()) for by_point in found]

    def _added_alone(
        self,
        problem: Problem,
        apart: Mapping[int, Layer],
        depth: Depth,
        index: Mapping[OpId, int],
        kept_s: Mapping[OpId, float],
    ) -> dict[int, _Added]:
        """Return (point, seconds) by which the step takes longer with only the layers `apart` recomputed to `depth`.

        The layers, by number, are so far from each other in the model that each op belongs to the nearest of them.
        """
        activations = activations_of(list(apart.values()), modes_at_depth(list(apart.values()), depth))
        step = problem.as_run(activations)
        seconds = self._ops.of(activations, problem.laps(activations))
        found: dict[int, dict[int, float]] = {number: {} for number in apart}
        near = next(iter(apart))
        places = self._places
        nearest = [min(apart, key=lambda other: abs(places[other] - place)) for place in places]
        points = _points(step, index).tolist()
        for op, point, op_s in reversed(list(zip(step.ops, points, seconds, strict=True))):
            number = self._repeated_by.get(op.id, self._number.get(layer_of(op.module)))
            if number is not None:
                near = nearest[number]
            more_s = op_s - kept_s.get(op.id, 0.0)
            if more_s:
                found[near][point] = found[near].get(point, 0.0) + more_s
        return {number: tuple(by_point.items()) for number, by_point in found.items()}


def _total_s(added: _Added) -> float:
    return sum(seconds for _, seconds in added)


def _places(graph: StepGraph, number: Mapping[str, int]) -> list[int]:
    """Return the place of each layer in the model, by its number: layers are numbered by their first group, and a
    group of the last layer may be read before the groups of others."""
    names = [name for name in dict.fromkeys(layer_of(op.module) for op in graph.ops) if name in number]
    places = [len(names)] * len(number)
    for place, name in enumerate(names):
        places[number[name]] = place
    return places


def _far_apart(numbers: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    """Split the `numbers` of layers into groups in which the `places` of every two differ by more than `_CLOSE`."""
    groups: list[list[int]] = []
    for number in numbers:
        apart = (own for own in groups if all(abs(places[number] - places[other]) > _CLOSE for other in own))
        group = next(apart, None)
        if group is None:
            groups.append(group := [])
        group.append(number)
    return groups


def _points(step: StepGraph, index: Mapping[OpId, int]) -> NDArray[np.int64]:
    """Return the point of each op: its `index`, or for an op that recomputation adds, the point of the next op."""
    points = np.zeros(len(step.ops), dtype=np.int64)
    at = len(index) - 1
    for i in reversed(range(len(step.ops))):
        at = index.get(step.ops[i].id, at)
        points[i] = at
    return points


def _owners(
    step: StepGraph, layers: Sequence[Layer], number: Mapping[str, int], activations: Sequence[Activations]
) -> dict[StorageId, int]:
    """Return the number of the layer to which each storage belongs that no repeated op writes.

    It is the layer whose groups hold the storage, else the layer of the first op that writes it.
    """
    owner: dict[StorageId, int] = {}
    for op in reversed(step.ops):
        layer = number.get(layer_of(op.module))
        if layer is not None:
            owner.update(dict.fromkeys(op.writes, layer))
    chosen = {group.id for group in activations}
    for i, layer in enumerate(layers):
        groups = [group for group in layer.groups if not group.is_input or group.id in chosen]
        owner.update({name: i for group in groups for name in group.storages})
    return owner


def _repeated_by(
    layers: Sequence[Layer], found: Sequence[Repeat], makes: Mapping[OpId, Sequence[StorageId]]
) -> Mapping[OpId, int]:
    """Return the number of the layer for which each repeated op runs: the layer of the next recomputed activation."""
    layer_of_storage = {name: i for i, layer in enumerate(layers) for group in layer.groups for name in group.storages}
    layer_of_op: dict[OpId, int] = {}
    waiting: list[OpId] = []
    for repeat in found:
        waiting.append(repeated_op(repeat.op))
        owners = [layer_of_storage[name] for name in makes[repeat.op] if name in layer_of_storage]
        if owners:
            layer_of_op.update(dict.fromkeys(waiting, owners[0]))
            waiting.clear()
    return layer_of_op
