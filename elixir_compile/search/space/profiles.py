"""Count the bytes and the seconds of each mode of each layer, by the ops of the step with every activation kept.

Recomputation adds ops, so steps of different modes have different ops. But each added op runs right before an op of the
step with every activation kept; the index of that op is its point. Bytes and seconds by point add up over layers:

    live bytes at point i  =  rest[i] + sum over layers of bytes[layer, mode][i]

One step per depth is enough, with all layers recomputed to the depth, because a layer recomputes only its own
activations. The bytes of offloaded groups are subtracted afterwards. At a point the repeated ops of a layer run one
after another, and the highest of their bytes counts.

The seconds of a layer must not depend on the modes of other layers, or a path with them is no lower bound. If two
layers in a row are recomputed, the second may recompute its input too, and an op between them may be fused with fewer
ops: neither counts. Layers that add other seconds than all others, such as the first and the last, are also counted
with that layer alone recomputed, because beside a recomputed neighbour their ops may fuse differently. The fewer
seconds are taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Activations, Kind, OpId, StepGraph, StorageId
from elixir_compile.ir.graph import layer_of
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.modes import Layer, Mode, activations_of, deepest, depths_of
from elixir_compile.search.space.trips import Trip, trips_of
from elixir_compile.step.activations import Depth
from elixir_compile.step.call_bytes import Ops, crosses
from elixir_compile.step.liveness import liveness
from elixir_compile.step.prices import OpSeconds
from elixir_compile.step.recompute import Repeat, repeated_op, repeated_storage, repeats, repeats_each

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
        tuple(_profile(steps[mode.depth], number, mode) for mode in layer.modes) for number, layer in enumerate(layers)
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
        activations = activations_of(layers, [deepest(layer, depth, leaves=False) for layer in layers])
        self._step = problem.as_run(activations)
        self._lives = liveness(self._step)
        self._point_of = _points(self._step, index)
        self._number = {layer.name: i for i, layer in enumerate(layers)}
        self.num_outstanding = problem.calls.outstanding
        makes = {op.id: op.writes for op in graph.ops}
        found = repeats(graph, activations)
        self._alone = _repeated_alone(graph, layers, depth)
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

    def bytes_without(self, layer: int, saved_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of `layer` by point, less `saved_bytes` at each op of the step."""
        between = np.minimum(saved_bytes, np.append(saved_bytes[1:], 0))
        return self._by_point(self._bytes_per_op[layer] - np.stack([saved_bytes, between]))

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

        An op that takes longer counts only if it also runs again with its layer alone recomputed.
        """
        found: list[dict[int, float]] = [{} for _ in range(num_layers)]
        owners = self._owner_of_ops()
        for i, op in enumerate(self._step.ops):
            more_s = seconds[i] - kept_s.get(op.id, 0.0)
            layer = owners[i]
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
        activations = activations_of(
            list(apart.values()), [deepest(layer, depth, leaves=False) for layer in apart.values()]
        )
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

    def _owner_of_ops(self) -> list[int | None]:
        """Return for each op of the step the number of the layer that the op's added seconds are counted for.

        Added seconds are those beyond the seconds of the op in the step with every activation kept. A repeated op
        belongs to the layer for which it runs again. An op outside of all layers belongs to the next layer, whose
        input it makes; the result is None if no layer follows.
        """
        found: list[int | None] = []
        owner: int | None = None
        for op in reversed(self._step.ops):
            owner = self._repeated_by.get(op.id, self._number.get(layer_of(op.module), owner))
            found.append(owner)
        return found[::-1]


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
        group = next(
            (members for members in groups if all(abs(places[number] - places[other]) > _CLOSE for other in members)),
            None,
        )
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


def _repeated_alone(graph: StepGraph, layers: Sequence[Layer], depth: Depth) -> list[frozenset[OpId]]:
    """Return, for each layer, the ops that run again if it alone is recomputed to `depth`."""
    alone = [activations_of([layer], [deepest(layer, depth, leaves=False)]) for layer in layers]
    return [frozenset(repeated_op(repeat.op) for repeat in found) for found in repeats_each(graph, alone)]


def _profile(step: _RecomputedStep, number: int, mode: Mode) -> Profile:
    trips = tuple(step.trips[group] for group in sorted(mode.away) if group in step.trips)
    saved_bytes = [trip.saved_bytes for trip in trips if trip.saved_bytes is not None]
    if saved_bytes:
        nbytes = step.bytes_without(number, np.sum(saved_bytes, axis=0))
    else:
        nbytes = step.nbytes[number].copy()
        for trip in trips:
            nbytes[:, trip.leave + 1 : trip.first] -= trip.nbytes
    nbytes[:, : step.num_run_points] -= (step.num_outstanding - 1) * sum(trip.nbytes for trip in trips)
    return Profile(nbytes=nbytes, added_s=step.added_s[number], trips=trips, num_outstanding=step.num_outstanding)


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
