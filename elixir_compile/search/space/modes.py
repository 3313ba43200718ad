"""What a planner may choose for the saved activations of each layer, and when offloaded ones leave and come back."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elixir_compile.analysis.activations import Depth, Group, activation_groups
from elixir_compile.analysis.liveness import Liveness
from elixir_compile.ir import Activations, GroupId, Phase, Saving, StepGraph

_LEAST_SHARE = 1e-3
"""Layers with less of all saved bytes, and groups with less of their layer's, stay."""
_MAX_LEAVING = 3
"""So many of a layer's groups leave or stay one by one; the others leave only with all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What happens to the groups of one layer."""

    depth: Depth
    away: frozenset[GroupId]
    """Groups that go to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's groups and what may happen to them."""

    name: str
    groups: tuple[Group, ...]
    modes: tuple[Mode, ...]
    """The first keeps everything."""


def layers_of(graph: StepGraph, savings: AbstractSet[Saving]) -> tuple[Layer, ...]:
    """Return the layers that have a choice among `savings`, in the order of their first group."""
    groups: dict[str, list[Group]] = {}
    for group in activation_groups(graph):
        groups.setdefault(group.layer, []).append(group)
    total_bytes = sum(group.nbytes for own in groups.values() for group in own if not group.is_input)
    found: list[Layer] = []
    for name, own in groups.items():
        nbytes = sum(group.nbytes for group in own if not group.is_input)
        if nbytes >= total_bytes * _LEAST_SHARE:
            modes = tuple(dict.fromkeys(_modes(own, savings)))
            if len(modes) > 1:
                found.append(Layer(name=name, groups=tuple(own), modes=modes))
    return tuple(found)


def activations_of(layers: Sequence[Layer], modes: Sequence[int]) -> tuple[Activations, ...]:
    """Return what a plan says of the activations at these modes, one per layer; nothing where everything is kept."""
    if not any(modes):
        return ()
    return tuple(
        Activations(id=group.id, storages=group.storages, nbytes=group.nbytes, saving=saving)
        for layer, mode in zip(layers, modes, strict=True)
        for group in layer.groups
        if (saving := saving_of(group, layer.modes[mode])) is not None
    )


def saving_of(group: Group, mode: Mode) -> Saving | None:
    """Return what happens to `group` in `mode`; None for an input that nothing is made from."""
    if group.is_input and mode.depth is not Depth.FIXED:
        return None
    if Depth.KEPT < group.depth <= mode.depth:
        return Saving.RECOMPUTE
    return Saving.OFFLOAD if group.id in mode.away else Saving.KEEP


def mode_text(layer: Layer, mode: Mode) -> str:
    """Return what happens to each group of `layer`, as a decision says it."""
    said: dict[Saving, list[str]] = {}
    for group in layer.groups:
        saving = saving_of(group, mode)
        if saving is not None:
            said.setdefault(saving, []).append(group.id.rpartition(".")[2])
    return ", ".join(f"{saving} {' and '.join(names)}" for saving, names in said.items())


def deepest(layer: Layer, depth: Depth, *, leaves: bool) -> int:
    """Return the mode of `layer` that recomputes as deep as it can, at most to `depth`, and keeps the rest, or, where
    it `leaves`, sends as much of it away as can be."""
    reached = max(mode.depth for mode in layer.modes if mode.depth <= depth)
    own = [i for i, mode in enumerate(layer.modes) if mode.depth is reached]
    nbytes = {group.id: group.nbytes for group in layer.groups}
    by_bytes = sorted(own, key=lambda i: sum(nbytes[name] for name in layer.modes[i].away))
    return by_bytes[-1] if leaves else by_bytes[0]


def _modes(groups: Sequence[Group], savings: AbstractSet[Saving]) -> Iterator[Mode]:
    depths = {Depth.KEPT} | ({group.depth for group in groups} if Saving.RECOMPUTE in savings else set())
    for depth in sorted(depths):
        stays = Mode(depth=depth, away=frozenset())
        yield stays
        if Saving.OFFLOAD in savings:
            stored = [group for group in groups if saving_of(group, stays) is Saving.KEEP]
            yield from (Mode(depth=depth, away=away) for away in _subsets(stored))


def _subsets(stored: Sequence[Group]) -> Iterator[frozenset[GroupId]]:
    """What may leave: any of the largest groups, or all."""
    total_bytes = sum(group.nbytes for group in stored)
    worthwhile = [group for group in stored if group.nbytes >= total_bytes * _LEAST_SHARE]
    largest = sorted(worthwhile, key=lambda group: (-group.nbytes, group.id))[:_MAX_LEAVING]
    for size in range(1, len(largest) + 1):
        for members in itertools.combinations(largest, size):
            yield frozenset(group.id for group in members)
    if worthwhile:
        yield frozenset(group.id for group in worthwhile)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadInterval:
    """One group of activations that goes to the host and comes back."""

    group: GroupId
    nbytes: int
    num_copies: int
    """Storages, each a copy of its own."""
    leave: int
    """The last op of the forward that touches any of them: they leave after it."""
    first: int
    """The first op of the backward that reads any of them."""
    births: tuple[tuple[int, int], ...]
    """(op index, bytes) of each allocation in the forward."""
    lasts: tuple[tuple[int, int], ...]
    """(op index, bytes) of the last use of each in the backward."""


def offload_intervals(
    step: StepGraph, lives: Liveness, activations: Iterable[Activations]
) -> tuple[OffloadInterval, ...]:
    """Return the absences under `activations`, in the order in which they begin."""
    away = [group for group in activations if group.saving is Saving.OFFLOAD]
    owner = {name: i for i, group in enumerate(away) for name in group.storages}
    leave, first = [0] * len(away), [len(step.ops)] * len(away)
    for i, op in enumerate(step.ops):
        for name in (*op.reads, *op.writes):
            number = owner.get(name)
            if number is None:
                continue
            if op.phase is Phase.FORWARD:
                leave[number] = i
            else:
                first[number] = min(first[number], i)
    nbytes = {storage.id: storage.nbytes for storage in step.storages}
    found = [
        _offload_interval(group, lives, nbytes, leave[number], first[number])
        for number, group in enumerate(away)
        if first[number] < len(step.ops)
    ]
    return tuple(sorted(found, key=lambda absence: (absence.leave, absence.group)))


def leave_ends(found: Sequence[OffloadInterval], num_forward: int, lag: int) -> dict[int, int]:
    """Return, per absence, the last op at which it is still on the device: its own `leave`, or, with a `lag`, that of
    so many later ones; all are gone when the forward ends."""
    ends = [absence.leave for absence in found[lag:]] + [num_forward - 1] * min(lag, len(found))
    return dict(enumerate(ends))


def _offload_interval(group: Activations, lives: Liveness, nbytes: dict, leave: int, first: int) -> OffloadInterval:
    own = [(lives.lives[name], nbytes[name]) for name in group.storages if name in lives.lives]
    return OffloadInterval(
        group=group.id,
        nbytes=sum(size for _, size in own),
        num_copies=len(own),
        leave=leave,
        first=first,
        births=tuple((life.first, size) for life, size in own),
        lasts=tuple((life.last, size) for life, size in own),
    )
