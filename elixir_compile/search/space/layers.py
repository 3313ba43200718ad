"""Enumerate the modes of each layer, and find the first and the last op of equal layers, so that their regions are
equal too.
"""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

from elixir_compile.ir import Activations, GroupId, Op, Phase, Saving, StepGraph
from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.step.divide import Lap, arrived_name, leaving_name, offloaded_names
from elixir_compile.step.liveness import Depth, Group, Liveness, Window, activation_groups

# ----------------------------------------------------------------------------------------------------------------------
# Find the first and the last op of each layer that equals other layers, so that their regions are equal too.
#
# A compiler then compiles each distinct region once.
#
#   op       add  norm | mm  gelu  mm  add  norm | mm  gelu  mm  add  norm | mm
#   module   h.0   h.1   h.1  h.1  h.1 h.1   h.2   h.2  h.2  h.2 h.2  ln_f   head
#                  ^     ^ product of h.1    ^ first of h.2
#
# If a plan moves nothing, the region of a layer begins at its first matrix product. The addition at the end of a layer
# and the norm at the start of the next layer then stay in one kernel, and the cut keeps no additional tensor alive.
#
# If a plan moves something, the region of a layer begins at its first op. Actions before the first matrix product of a
# layer move to its first op, and actions after its last matrix product move to its last op: a copy arrives a few
# pointwise ops sooner and is released a few later.


_MIN_PRODUCTS = 2
"""A layer with fewer matrix products in the forward gets no region of its own: it saves little compile time, and costs
much run time."""
_CONVOLUTION = "aten.convolution"
"""Layers with convolutions get no regions of their own, because a compiler chooses the layout of convolutions and of
the ops between them once per region."""


class LayerSpan(NamedTuple):
    """The ops of a layer in a phase, as op indices, both included."""

    first: int
    product: int
    """The first matrix product of the layer."""
    last_product: int
    last: int
    """`first - 1` in the empty span behind the last layer of a phase."""


def equal_layers(graph: StepGraph, least: int | None) -> frozenset[str]:
    """Return the layers that are among at least `least` layers with equal forward ops; no layer if `least` is None.

    Ops are equal if their target, flops and moved bytes are.
    """
    if least is None:
        return frozenset()
    ops: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and is_numbered(layer := layer_of(op.module)):
            ops.setdefault(layer, []).append(op)
    forms = {
        layer: tuple((op.target, op.flops, op.moved_bytes) for op in layer_ops)
        for layer, layer_ops in ops.items()
        if sum(op.flops > 0 for op in layer_ops) >= _MIN_PRODUCTS
        and not any(op.target.startswith(_CONVOLUTION) for op in layer_ops)
    }
    count = Counter(forms.values())
    return frozenset(layer for layer, form in forms.items() if count[form] >= least)


def layer_spans(ops: Sequence[Op], equal: frozenset[str]) -> tuple[LayerSpan, ...]:
    """Return the spans of the layers `equal`, as `equal_layers` returns them, in each phase, in order.

    A layer without a matrix product in a phase has no span in the phase. If a matrix product of the same phase comes
    after the last such layer, an empty span (`last` is `first - 1`) marks where that layer ends.
    """
    if not equal:
        return ()
    layers = [layer_of(op.module) for op in ops]
    products: dict[tuple[Phase, str], list[int]] = {}
    last: dict[Phase, int] = {}
    for i, op in enumerate(ops):
        if op.phase is not Phase.UPDATE and layers[i] in equal:
            last[op.phase] = i
            if op.flops:
                products.setdefault((op.phase, layers[i]), []).append(i)
    found: list[LayerSpan] = []
    for phase, end in last.items():
        by_layer = sorted(indices for (of, _), indices in products.items() if of is phase)
        # The first of the consecutive ops of the same layer and phase that end with its first matrix product.
        firsts: list[int] = []
        for product, *_ in by_layer:
            first = product
            while first > 0 and layers[first - 1] == layers[product] and ops[first - 1].phase is phase:
                first -= 1
            firsts.append(first)
        lasts = [*(first - 1 for first in firsts[1:]), end]
        found += [
            LayerSpan(first, indices[0], min(indices[-1], last), last)
            for first, indices, last in zip(firsts, by_layer, lasts, strict=True)
        ]
        behind = next((i for i in range(end + 1, len(ops)) if ops[i].phase is not phase or ops[i].flops), len(ops))
        if behind < len(ops) and ops[behind].phase is phase:
            found.append(LayerSpan(end + 1, behind, behind, end))
    return tuple(sorted(found))


def lap_spans(ops: Sequence[Op], laps: Sequence[Lap]) -> tuple[LayerSpan, ...]:
    """Return the spans of the divided `laps`, within which a plan cannot act: every op of a lap counts as before the
    first matrix product and as behind the last."""
    index = {op.id: i for i, op in enumerate(ops)}
    return tuple(LayerSpan(index[lap.first], index[lap.last], index[lap.first], index[lap.last]) for lap in laps)


def begin_of(spans: Sequence[LayerSpan], op: int) -> int:
    """Return the first op of the layer of `op` if `op` is not behind its first matrix product, else `op`."""
    span = _span_of(spans, op)
    return op if span is None or op > span.product else span.first


def end_of(spans: Sequence[LayerSpan], op: int) -> int:
    """Return the last op of the layer of `op` if `op` is not before its last matrix product, else `op`."""
    span = _span_of(spans, op)
    return op if span is None or op < span.last_product else span.last


def _span_of(spans: Sequence[LayerSpan], op: int) -> LayerSpan | None:
    at = bisect_right(spans, op, key=lambda span: span.first) - 1
    return spans[at] if at >= 0 and op <= spans[at].last else None


def windows_by_layer(spans: Sequence[LayerSpan], windows: Sequence[Window]) -> tuple[Window, ...]:
    """Return the `windows` of a bucket, in order, extended to the edges of layers by `begin_of` and `end_of`.

    Windows of a phase that then overlap or touch are merged.
    """
    found: list[Window] = []
    for window in windows:
        wide = replace(window, first=begin_of(spans, window.first), last=end_of(spans, window.last))
        if spans and found and found[-1].phase is wide.phase and wide.first <= found[-1].last + 1:
            found[-1] = replace(found[-1], last=max(found[-1].last, wide.last))
        else:
            found.append(wide)
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# Enumerate the modes of each layer, and derive from a choice of modes its activations and offload intervals.


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


def modes_at_depth(layers: Sequence[Layer], depth: Depth = Depth.FIXED, *, leaves: bool = False) -> tuple[int, ...]:
    """Return the uniform modes that recompute each of `layers` up to `depth`, with the rest on the device, or if it
    `leaves`, on the host."""
    return tuple(deepest(layer, depth, leaves=leaves) for layer in layers)


def modes_by_depth(layers: Sequence[Layer]) -> Iterator[tuple[int, ...]]:
    """Yield the uniform modes of `layers`, by depth: first with the rest on the device, then with the rest
    offloaded. The same modes may come twice."""
    for leaves in (False, True):
        for depth in depths_of(layers):
            yield modes_at_depth(layers, depth, leaves=leaves)


def _modes(groups: Sequence[Group], savings: AbstractSet[Saving]) -> Iterator[Mode]:
    depths = {Depth.KEPT} | ({group.depth for group in groups} if Saving.RECOMPUTE in savings else set())
    for depth in sorted(depths):
        without_offloads = Mode(depth=depth, away=frozenset())
        yield without_offloads
        if Saving.OFFLOAD in savings:
            stored = [group for group in groups if saving_of(group, without_offloads) is Saving.KEEP]
            # Each combination of the largest groups is offloaded, and all together.
            total_bytes = sum(group.nbytes for group in stored)
            worthwhile = [group for group in stored if group.nbytes >= total_bytes * _MIN_SHARE]
            largest = sorted(worthwhile, key=lambda group: (-group.nbytes, group.id))[:_MAX_OFFLOADED]
            for size in range(1, len(largest) + 1):
                for members in itertools.combinations(largest, size):
                    yield Mode(depth=depth, away=frozenset(group.id for group in members))
            if worthwhile:
                yield Mode(depth=depth, away=frozenset(group.id for group in worthwhile))


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
    found: list[OffloadInterval] = []
    for number, group in enumerate(offloaded):
        if first[number] == len(step.ops):
            continue
        births: list[tuple[int, int]] = []
        lasts: list[tuple[int, int]] = []
        host_bytes = 0
        for name in group.storages:
            out, back = (own if own in lives.lives else name for own in (leaving_name(name), arrived_name(name)))
            if out in lives.lives:
                host_bytes += nbytes[name]
                births.append((lives.lives[out].first, nbytes[out]))
                lasts.append((lives.lives[back].last, nbytes[back]))
        found.append(
            OffloadInterval(
                group=group.id,
                nbytes=host_bytes,
                leaving_bytes=sum(size for _, size in births),
                arriving_bytes=sum(size for _, size in lasts),
                num_copies=len(births),
                leave=leave[number],
                first=first[number],
                births=tuple(births),
                lasts=tuple(lasts),
            )
        )
    return tuple(sorted(found, key=lambda interval: (interval.leave, interval.group)))


def leave_ends(intervals: Sequence[OffloadInterval], num_forward: int, lag: int) -> dict[int, int]:
    """Return per interval, by its index, the last op at which its activations still occupy the device.

    It is the `leave` of the interval that comes `lag` later, or the last forward op if there is none.
    """
    ends = [interval.leave for interval in intervals[lag:]] + [num_forward - 1] * min(lag, len(intervals))
    return dict(enumerate(ends))
