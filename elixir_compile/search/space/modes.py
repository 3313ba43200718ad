"""Enumerate the modes of each layer, and derive from a choice of modes its activations and offload intervals."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elixir_compile.ir import Activations, GroupId, Phase, Saving, StepGraph
from elixir_compile.step.activations import Depth, Group, activation_groups
from elixir_compile.step.liveness import Liveness
from elixir_compile.step.slices import arrived_name, leaving_name, offloaded_names

_MIN_SHARE = 1e-3
"""A layer with a smaller share of all saved bytes is always kept. A group with a smaller share of the bytes that its
layer stores is never offloaded."""
_MAX_OFFLOADED = 3
"""The largest groups of a layer, so many at most, are offloaded in any combination; smaller groups only with all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Recompute depth and offloaded groups of a layer."""

    depth: Depth
    away: frozenset[GroupId]
    """Offloaded groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer with its groups of activations and its modes."""

    name: str
    groups: tuple[Group, ...]
    modes: tuple[Mode, ...]
    """All modes; mode 0 keeps every group."""


def layers_of(graph: StepGraph, savings: AbstractSet[Saving]) -> tuple[Layer, ...]:
    """Return the layers with more than one mode under `savings`, in the order of their first group."""
    groups: dict[str, list[Group]] = {}
    for group in activation_groups(graph):
        groups.setdefault(group.layer, []).append(group)
    total_bytes = sum(group.nbytes for members in groups.values() for group in members if not group.is_input)
    found: list[Layer] = []
    for name, members in groups.items():
        nbytes = sum(group.nbytes for group in members if not group.is_input)
        if nbytes >= total_bytes * _MIN_SHARE:
            modes = tuple(dict.fromkeys(_modes(members, savings)))
            if len(modes) > 1:
                found.append(Layer(name=name, groups=tuple(members), modes=modes))
    return tuple(found)


def activations_of(layers: Sequence[Layer], modes: Sequence[int]) -> tuple[Activations, ...]:
    """Return the activations of a plan in which each layer has the mode with its index in `modes`.

    The result is empty if every layer has mode 0.
    """
    if not any(modes):
        return ()
    return tuple(
        Activations(id=group.id, storages=group.storages, nbytes=group.nbytes, saving=saving)
        for layer, mode in zip(layers, modes, strict=True)
        for group in layer.groups
        if (saving := saving_of(group, layer.modes[mode])) is not None
    )


def saving_of(group: Group, mode: Mode) -> Saving | None:
    """Return how `mode` saves `group`; None for the input of a layer if the mode does not recompute from it."""
    if group.is_input and mode.depth is not Depth.FIXED:
        return None
    if Depth.KEPT < group.depth <= mode.depth:
        return Saving.RECOMPUTE
    return Saving.OFFLOAD if group.id in mode.away else Saving.KEEP


def mode_text(layer: Layer, mode: Mode) -> str:
    """Return how `mode` saves each group of `layer`, in the words of a decision."""
    by_saving: dict[Saving, list[str]] = {}
    for group in layer.groups:
        saving = saving_of(group, mode)
        if saving is not None:
            by_saving.setdefault(saving, []).append(group.id.rpartition(".")[2])
    return ", ".join(f"{saving} {' and '.join(names)}" for saving, names in by_saving.items())


def deepest(layer: Layer, depth: Depth, *, leaves: bool) -> int:
    """Return the index of the mode of `layer` with the largest depth up to `depth`.

    Of the modes with this depth it is the mode that offloads the most bytes if `leaves`, else the one without offloads.
    """
    reached = max(mode.depth for mode in layer.modes if mode.depth <= depth)
    at_depth = [i for i, mode in enumerate(layer.modes) if mode.depth is reached]
    nbytes = {group.id: group.nbytes for group in layer.groups}
    by_bytes = sorted(at_depth, key=lambda i: sum(nbytes[name] for name in layer.modes[i].away))
    return by_bytes[-1] if leaves else by_bytes[0]


def depths_of(layers: Iterable[Layer]) -> list[Depth]:
    """Return the recompute depths of all modes of `layers`, in order."""
    return sorted({mode.depth for layer in layers for mode in layer.modes})


def modes_by_depth(layers: Sequence[Layer]) -> Iterator[tuple[int, ...]]:
    """Yield the modes of `layers` that recompute each of them up to the same depth, by depth: first with the rest on
    the device, then with the rest offloaded. The same modes may come twice."""
    for leaves in (False, True):
        for depth in depths_of(layers):
            yield tuple(deepest(layer, depth, leaves=leaves) for layer in layers)


def _modes(groups: Sequence[Group], savings: AbstractSet[Saving]) -> Iterator[Mode]:
    depths = {Depth.KEPT} | ({group.depth for group in groups} if Saving.RECOMPUTE in savings else set())
    for depth in sorted(depths):
        without_offloads = Mode(depth=depth, away=frozenset())
        yield without_offloads
        if Saving.OFFLOAD in savings:
            stored = [group for group in groups if saving_of(group, without_offloads) is Saving.KEEP]
            yield from (Mode(depth=depth, away=away) for away in _subsets(stored))


def _subsets(stored: Sequence[Group]) -> Iterator[frozenset[GroupId]]:
    """Yield the sets of `stored` groups that may be offloaded: each combination of the largest, and all together."""
    total_bytes = sum(group.nbytes for group in stored)
    worthwhile = [group for group in stored if group.nbytes >= total_bytes * _MIN_SHARE]
    largest = sorted(worthwhile, key=lambda group: (-group.nbytes, group.id))[:_MAX_OFFLOADED]
    for size in range(1, len(largest) + 1):
        for members in itertools.combinations(largest, size):
            yield frozenset(group.id for group in members)
    if worthwhile:
        yield frozenset(group.id for group in worthwhile)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadInterval:
    """The ops between which an offloaded group of activations need not be on the device."""

    group: GroupId
    nbytes: int
    """Bytes on the host."""
    leaving_bytes: int
    """Bytes on the device before the group has left: less than `nbytes` if it leaves in slices."""
    arriving_bytes: int
    """Bytes on the device from the prefetch on: less than `nbytes` if the group arrives in slices."""
    num_copies: int
    """Number of storages; each is copied on its own."""
    leave: int
    """The last op of the forward that reads or writes any of them; their copies to the host start after it."""
    first: int
    """The first op of the backward that reads any of them."""
    births: tuple[tuple[int, int], ...]
    """(op index, bytes) of each allocation in the forward."""
    lasts: tuple[tuple[int, int], ...]
    """(op index, bytes) of the last use of each in the backward."""


def offload_intervals(
    step: StepGraph, lives: Liveness, activations: Iterable[Activations]
) -> tuple[OffloadInterval, ...]:
    """Return the interval of each offloaded group of `activations` that the backward of `step` reads, by `leave`."""
    offloaded = [group for group in activations if group.saving is Saving.OFFLOAD]
    if not offloaded:
        return ()
    number_of = {group.id: i for i, group in enumerate(offloaded)}
    owner = {name: number_of[group] for name, group in offloaded_names(offloaded).items()}
    leave, first = [0] * len(offloaded), [len(step.ops)] * len(offloaded)
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
        for number, group in enumerate(offloaded)
        if first[number] < len(step.ops)
    ]
    return tuple(sorted(found, key=lambda interval: (interval.leave, interval.group)))


def leave_ends(intervals: Sequence[OffloadInterval], num_forward: int, lag: int) -> dict[int, int]:
    """Return per interval, by its index, the last op at which its activations still occupy the device.

    It is the `leave` of the interval that comes `lag` later, or the last forward op if there is none.
    """
    ends = [interval.leave for interval in intervals[lag:]] + [num_forward - 1] * min(lag, len(intervals))
    return dict(enumerate(ends))


def _offload_interval(group: Activations, lives: Liveness, nbytes: dict, leave: int, first: int) -> OffloadInterval:
    births: list[tuple[int, int]] = []
    lasts: list[tuple[int, int]] = []
    host_bytes = 0
    for name in group.storages:
        out, back = (found if found in lives.lives else name for found in (leaving_name(name), arrived_name(name)))
        if out in lives.lives:
            host_bytes += nbytes[name]
            births.append((lives.lives[out].first, nbytes[out]))
            lasts.append((lives.lives[back].last, nbytes[back]))
    return OffloadInterval(
        group=group.id,
        nbytes=host_bytes,
        leaving_bytes=sum(size for _, size in births),
        arriving_bytes=sum(size for _, size in lasts),
        num_copies=len(births),
        leave=leave,
        first=first,
        births=tuple(births),
        lasts=tuple(lasts),
    )
