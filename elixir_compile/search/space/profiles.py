"""What each mode of each layer takes, counted in the ops of the step with everything kept.

Recomputing adds ops, so steps of different modes differ; but every op that is added stands right before one that is
always there, its slot. Bytes and seconds by slot can be added up over layers:

    live bytes at slot i  =  rest[i] + sum over layers of bytes[layer, mode][i]

One step per depth is enough, with all layers recomputed to it: what a layer makes again comes from that layer, and what
leaves is taken off after. Within a slot the highest bytes of the layer count, its repeated ops one after another.

Seconds must not be more than a layer adds whatever the others do, or no path with them is a lower bound. Where two
layers are recomputed, the second may have to make its input again too, and an op that is always there may fuse with
less: neither counts. Layers that add what no other does, as the first and the last, are looked at alone besides: beside
a neighbour that is recomputed too, their ops may fuse otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elixir_compile.analysis.activations import Depth
from elixir_compile.analysis.liveness import liveness
from elixir_compile.analysis.recompute import Repeat, as_run, repeated_op, repeated_storage, repeats, repeats_each
from elixir_compile.ir import Activations, GroupId, Kind, OpId, Saving, StepGraph, StorageId
from elixir_compile.ir.graph import layer_of
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.modes import Layer, Mode, activations_of, deepest, offload_intervals, saving_of
from elixir_compile.simulate import op_seconds

_Added = tuple[tuple[int, float], ...]
"""(slot, seconds) of compute that a layer adds."""
_MOST_ALONE, _MANY_OPS = 4, 6000
"""So many layers are looked at alone at each depth, and one where a step has more ops than these: each takes 0.1 s for
3,000 ops."""
_CLOSE = 3
"""Layers with fewer than so many between them may change what each other adds: a neighbour makes the other's input, and
an op between them may fuse with either."""
_MOVABLE = (Kind.TEMP, Kind.SAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A group that leaves after one slot and is back before another."""

    group: GroupId
    nbytes: int
    num_copies: int
    leave: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one mode of one layer takes."""

    nbytes: NDArray[np.int64]
    """On the device, by slot."""
    added_s: _Added
    """(slot, seconds) of compute on top of what it takes with everything kept."""
    trips: tuple[Trip, ...]

    @property
    def host_bytes(self) -> int:
        return sum(trip.nbytes for trip in self.trips)


def profiles(problem: Problem, layers: Sequence[Layer]) -> tuple[tuple[Profile, ...], ...]:
    """Return the profile of every mode of every layer."""
    if not layers:
        return ()
    base = as_run(problem.graph)
    index = {op.id: i for i, op in enumerate(base.ops)}
    kept_s = dict(zip(index, op_seconds(problem.graph, problem.cluster, problem.measured), strict=True))
    depths = sorted({mode.depth for layer in layers for mode in layer.modes})
    counts = {depth: _Count(problem, layers, depth, index, kept_s) for depth in depths}
    return tuple(
        tuple(_profile(counts[mode.depth], number, mode) for mode in layer.modes) for number, layer in enumerate(layers)
    )


class _Count:
    """The step with every layer recomputed to one depth, its bytes and seconds by layer and slot."""

    def __init__(
        self,
        problem: Problem,
        layers: Sequence[Layer],
        depth: Depth,
        index: Mapping[OpId, int],
        kept_s: Mapping[OpId, float],
    ) -> None:
        graph = problem.graph
        activations = activations_of(layers, [deepest(layer, depth, leaves=False) for layer in layers])
        self._step = as_run(graph, activations)
        self._lives = liveness(self._step)
        self._slot_of = _slots(self._step, index)
        self._number = {layer.name: i for i, layer in enumerate(layers)}
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
        self.nbytes = self._bytes_by_layer(len(layers), owner, len(index))
        seconds = op_seconds(graph, problem.cluster, problem.measured, activations)
        self.added_s = self._added_s(len(layers), seconds, kept_s)
        totals_s = [round(sum(seconds for _, seconds in own), 12) for own in self.added_s]
        unlike = [i for i, total_s in enumerate(totals_s) if total_s > 0.0 and totals_s.count(total_s) == 1]
        most = _MOST_ALONE if len(graph.ops) <= _MANY_OPS else 1
        chosen = (*unlike[: most - 1], *unlike[most - 1 :][-1:]) if depth is not Depth.KEPT else ()
        for apart in _far_apart(chosen):
            alone = self._added_alone(problem, {i: layers[i] for i in apart}, depth, index, kept_s)
            for i, own in alone.items():
                self.added_s[i] = min(self.added_s[i], own, key=lambda one: sum(seconds for _, seconds in one))
        self.trips = self._trips(layers, depth)

    def _bytes_by_layer(self, num_layers: int, owner: Mapping[StorageId, int], num_slots: int) -> NDArray[np.int64]:
        changes = np.zeros((num_layers, len(self._step.ops) + 1), dtype=np.int64)
        for storage in self._step.storages:
            layer, life = owner.get(storage.id), self._lives.lives.get(storage.id)
            if layer is not None and life is not None and storage.kind in _MOVABLE:
                changes[layer, life.first] += storage.nbytes
                changes[layer, life.last + 1] -= storage.nbytes
        starts = np.searchsorted(self._slot_of, np.arange(num_slots))
        return np.maximum.reduceat(np.cumsum(changes[:, :-1], axis=1), starts, axis=1)

    def _added_s(self, num_layers: int, seconds: Sequence[float], kept_s: Mapping[OpId, float]) -> list[_Added]:
        """(slot, seconds) of what each layer's ops take more than with everything kept."""
        found: list[dict[int, float]] = [{} for _ in range(num_layers)]
        owners = self._owner_of_ops()
        for i, op in enumerate(self._step.ops):
            more_s = seconds[i] - kept_s.get(op.id, 0.0)
            layer = owners[i]
            if layer is None or not more_s or (more_s > 0.0 and op.id not in self._alone[layer]):
                continue
            slot = int(self._slot_of[i])
            found[layer][slot] = found[layer].get(slot, 0.0) + more_s
        return [tuple(own.items()) for own in found]

    def _added_alone(
        self,
        problem: Problem,
        apart: Mapping[int, Layer],
        depth: Depth,
        index: Mapping[OpId, int],
        kept_s: Mapping[OpId, float],
    ) -> dict[int, _Added]:
        """(slot, seconds) that the step takes more than with everything kept if only the layers `apart`, which are so
        far from each other that what one adds has nothing to do with the others, are recomputed to `depth`."""
        graph = problem.graph
        activations = activations_of(
            list(apart.values()), [deepest(own, depth, leaves=False) for own in apart.values()]
        )
        step = as_run(graph, activations)
        seconds = op_seconds(graph, problem.cluster, problem.measured, activations)
        found: dict[int, dict[int, float]] = {number: {} for number in apart}
        near = next(iter(apart))
        slots = _slots(step, index).tolist()
        for op, slot, op_s in reversed(list(zip(step.ops, slots, seconds, strict=True))):
            number = self._repeated_by.get(op.id, self._number.get(layer_of(op.module)))
            if number is not None:
                near = min(apart, key=lambda other, number=number: abs(other - number))
            more_s = op_s - kept_s.get(op.id, 0.0)
            if more_s:
                found[near][slot] = found[near].get(slot, 0.0) + more_s
        return {number: tuple(own.items()) for number, own in found.items()}

    def _owner_of_ops(self) -> list[int | None]:
        """The layer, by its number, that what each op takes more or less is due to: an op outside of all layers takes
        less for the sake of the next layer, which it makes the input of."""
        found: list[int | None] = []
        owner: int | None = None
        for op in reversed(self._step.ops):
            owner = self._repeated_by.get(op.id, self._number.get(layer_of(op.module), owner))
            found.append(owner)
        return found[::-1]

    def _trips(self, layers: Sequence[Layer], depth: Depth) -> Mapping[GroupId, Trip]:
        """The trip of every group that could go on one at this depth."""
        away = frozenset(group.id for layer in layers for group in layer.groups)
        could = [
            Activations(id=group.id, storages=group.storages, nbytes=group.nbytes, saving=Saving.OFFLOAD)
            for layer in layers
            for group in layer.groups
            if saving_of(group, Mode(depth=depth, away=away)) is Saving.OFFLOAD
        ]
        return {
            absence.group: Trip(
                group=absence.group,
                nbytes=absence.nbytes,
                num_copies=absence.num_copies,
                leave=int(self._slot_of[absence.leave]),
                first=int(self._slot_of[absence.first]),
            )
            for absence in offload_intervals(self._step, self._lives, could)
        }


def _far_apart(numbers: Sequence[int]) -> list[list[int]]:
    """Return `numbers` of layers in groups of which none has two that are close to one another."""
    groups: list[list[int]] = []
    for number in numbers:
        group = next((own for own in groups if all(abs(number - other) > _CLOSE for other in own)), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


def _repeated_alone(graph: StepGraph, layers: Sequence[Layer], depth: Depth) -> list[frozenset[OpId]]:
    """By layer, the ops that run again where it alone is recomputed to `depth`."""
    alone = [activations_of([layer], [deepest(layer, depth, leaves=False)]) for layer in layers]
    return [frozenset(repeated_op(repeat.op) for repeat in found) for found in repeats_each(graph, alone)]


def _profile(count: _Count, number: int, mode: Mode) -> Profile:
    nbytes = count.nbytes[number].copy()
    trips = tuple(count.trips[group] for group in sorted(mode.away) if group in count.trips)
    for trip in trips:
        nbytes[trip.leave + 1 : trip.first] -= trip.nbytes
    return Profile(nbytes=nbytes, added_s=count.added_s[number], trips=trips)


def _slots(step: StepGraph, index: Mapping[OpId, int]) -> NDArray[np.int64]:
    """The slot of every op: its own index with everything kept, or that of the next op that has one."""
    slots = np.zeros(len(step.ops), dtype=np.int64)
    at = len(index) - 1
    for i in reversed(range(len(step.ops))):
        at = index.get(step.ops[i].id, at)
        slots[i] = at
    return slots


def _owners(
    step: StepGraph, layers: Sequence[Layer], number: Mapping[str, int], activations: Sequence[Activations]
) -> dict[StorageId, int]:
    """The layer, by its number, that decides about each storage of the step without repeated ops."""
    owner: dict[StorageId, int] = {}
    for op in reversed(step.ops):
        layer = number.get(layer_of(op.module))
        if layer is not None:
            owner.update(dict.fromkeys(op.writes, layer))
    chosen = {group.id for group in activations}
    for i, layer in enumerate(layers):
        own = [group for group in layer.groups if not group.is_input or group.id in chosen]
        owner.update({name: i for group in own for name in group.storages})
    return owner


def _repeated_by(
    layers: Sequence[Layer], found: Sequence[Repeat], makes: Mapping[OpId, Sequence[StorageId]]
) -> Mapping[OpId, int]:
    """The layer for whose sake each repeated op runs: that of the next activation that is made again."""
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
