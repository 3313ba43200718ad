"""Collect the facts about a problem that a search often reads: the op indices of phases, windows, gradients and offload
intervals.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import (
    Activations,
    Bucket,
    BucketRef,
    GradientRef,
    GroupId,
    GroupRef,
    Kind,
    Phase,
    Saving,
    StepGraph,
    StorageId,
)
from elixir_compile.search.problem import Problem, may_stream
from elixir_compile.search.space.buckets import (
    Level,
    Quota,
    form_buckets,
    gathered_as,
    is_gathered,
    level_of,
    level_sets,
    level_text,
    levels_from,
    limited,
    quotas_of,
    staying,
)
from elixir_compile.search.space.layers import (
    Layer,
    LayerSpan,
    Mode,
    OffloadInterval,
    activations_of,
    begin_of,
    depths_of,
    end_of,
    equal_layers,
    lap_spans,
    layer_spans,
    layers_of,
    mode_text,
    modes_at_depth,
    offload_intervals,
    saving_of,
    windows_by_layer,
)
from elixir_compile.step.as_run import repeats
from elixir_compile.step.bucket_bytes import Sizes
from elixir_compile.step.divide import (
    WHOLE,
    Crossing,
    Crossings,
    Lap,
    arrived_name,
    crossings,
    leaving_name,
    next_name,
)
from elixir_compile.step.liveness import Depth, Liveness, Window, liveness, one_in_each_phase, use_windows

# ----------------------------------------------------------------------------------------------------------------------
# Find the offload interval of each group of activations at one recompute depth, in points (see `profiles`).


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

    def in_points(crossing: Crossing | None) -> Crossing | None:
        if crossing is None:
            return None
        return replace(crossing, first=int(point_of[crossing.first]), last=int(point_of[crossing.last]))

    def crossings_of(group: GroupId) -> Crossings:
        own = crosses.get(group, WHOLE)
        return Crossings(leaving=in_points(own.leaving), arriving=in_points(own.arriving))

    return {
        interval.group: Trip(
            group=interval.group,
            nbytes=interval.nbytes,
            num_copies=interval.num_copies,
            leave=int(point_of[interval.leave]),
            first=int(point_of[interval.first]),
            crossings=crossings_of(interval.group),
            saved_bytes=_saved_bytes(moved, lives, moved_lives, interval, names[interval.group])
            if is_divided
            else None,
        )
        for interval in offload_intervals(moved, moved_lives, stored)
    }


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


# ----------------------------------------------------------------------------------------------------------------------
# Collect the facts about a problem read often by a search: the op indices of phases, windows, gradients and offload
# intervals.
#
# The indices refer to the step as it runs at a choice of modes: a step with more recomputation has more ops.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients of a bucket."""

    births: tuple[tuple[int, int], ...]
    """(op index, bytes) of each allocation."""
    complete: int
    """Index of the last backward op that reads or writes any of them, moved to the last op of its layer by `end_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The targets of actions by bucket and by offload interval, made once because every simulation uses them."""

    buckets: tuple[BucketRef, ...]
    gradients: tuple[GradientRef, ...]
    groups: tuple[GroupRef, ...]


class Change(NamedTuple):
    """A bucket or layer, by its place in `Facts.options`, with option `now` in place of the option `before`, with which
    nothing moves."""

    i: int
    now: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a problem at a choice of modes, indexed by op and by bucket; bucket i is `buckets[i]`.

    It has more than 15 fields, so that each is derived once and the loops of the search read it.
    """

    problem: Problem
    graph: StepGraph
    """The step as it runs at `modes`, recomputed ops included."""
    layers: tuple[Layer, ...]
    """Layers with more than one mode."""
    modes: tuple[int, ...]
    """The mode of each layer, as an index into its `modes`."""
    activations: tuple[Activations, ...]
    offload_intervals: tuple[OffloadInterval, ...]
    buckets: tuple[Bucket, ...]
    sizes: tuple[Sizes, ...]
    targets: Targets
    lives: Liveness
    windows: tuple[tuple[Window, ...], ...]
    copies: tuple[tuple[Sequence[tuple[int, int]], ...], ...]
    """By bucket and level, the first and the last op of each gathered copy."""
    gradients: tuple[Gradients | None, ...]
    """None for a bucket without gradients in this graph, and for every bucket if the graph has no update."""
    streamed: frozenset[int]
    """Buckets in force whose update is streamed, which no candidate changes."""
    streamable: frozenset[int]
    """Buckets whose update may be streamed if their state is on the host."""
    choices: tuple[tuple[Level, ...], ...]
    """Levels of each bucket, from the level in force outward. All modes have the same levels; at some modes two of them
    have the same effect."""
    quotas: tuple[Quota, ...]
    """How many elements must be sharded or off the device, if the user fixed fractions of them."""
    num_forward: int
    """The forward ops are those with a lower index."""
    num_run: int
    """Ops with a lower index run in regions; the others are the update."""
    equal_layers: frozenset[str]
    """Layers with equal ops, if there are enough of them that regions begin with each."""
    spans: tuple[LayerSpan, ...]
    """The ops of the `equal_layers`, or of the divided `laps` if there are any. Windows, gradients and offload
    intervals are extended to the edges of these layers or laps."""
    laps: tuple[Lap, ...]
    """The laps that run in micro-batches."""

    @property
    def is_training(self) -> bool:
        """Whether an update follows the backward."""
        return self.num_run < len(self.graph.ops)

    def phase_start(self, op: int) -> int:
        """Return the index of the first forward op if `op` is a forward op, else of the first backward op."""
        return 0 if op < self.num_forward else self.num_forward

    @property
    def start_levels(self) -> tuple[Level, ...]:
        """The level nearest to the device of each bucket. A quota is met by the first buckets that it takes."""
        return tuple(levels[0] for levels in level_sets(self.choices, self.quotas, takes_most=False))

    @property
    def furthest_levels(self) -> tuple[Level, ...]:
        """The level furthest from the device of each bucket. Quotas are met by as many elements as they allow."""
        return tuple(levels[-1] for levels in level_sets(self.choices, self.quotas, takes_most=True))

    @property
    def options(self) -> tuple[Sequence[int], ...]:
        """The levels of each bucket, then the modes of each layer, from the option that moves nothing on."""
        return (*self.choices, *(range(len(layer.modes)) for layer in self.layers))

    def changes(self, options: Sequence[int]) -> Iterator[Change]:
        """Yield the buckets, and layers if `options` has theirs too, for which an option is chosen that moves them."""
        before = (*self.start_levels, *(0,) * len(self.layers))
        for i, (option, first) in enumerate(zip(options, before, strict=False)):
            if option != first:
                yield Change(i, option, first)

    def subject_of(self, i: int) -> str:
        """Return the name of bucket i, or of the layer whose number is the rest, in a decision."""
        number = i - len(self.buckets)
        return self.buckets[i].id if number < 0 else self.layers[number].name or "step"

    def text_of(self, i: int, option: int) -> str:
        """Return an option of bucket i, or of the layer whose number is the rest, in the words of a decision."""
        number = i - len(self.buckets)
        if number < 0:
            return level_text(Level(option))
        return mode_text(self.layers[number], self.layers[number].modes[option])

    def has_position(self, bucket: int) -> bool:
        """Whether the reduce of a bucket has buffers, so that it is a moment of its own between two ops."""
        return self.sizes[bucket].has_position

    def allows(self, levels: Sequence[Level]) -> bool:
        """Return whether `levels` meet all quotas."""
        return all(quota.allows(levels) for quota in self.quotas)


def gather_facts(problem: Problem, base: Facts | None = None, modes: Sequence[int] = ()) -> Facts:
    """Return the facts of `problem` at `modes`, or with every activation kept if no modes are given.

    `base` are facts of the same problem at other modes: layers, buckets and levels are taken from them.
    """
    layers = base.layers if base else layers_of(problem.graph, problem.savings)
    buckets = base.buckets if base else form_buckets(problem)
    modes = tuple(modes) or (0,) * len(layers)
    activations = activations_of(layers, modes)
    graph = problem.as_run(activations)
    equal = base.equal_layers if base else equal_layers(problem.graph, problem.least_alike)
    lives = liveness(graph)
    found = use_windows(graph, buckets)
    divided = problem.laps(activations)
    spans = lap_spans(graph.ops, divided) if divided else layer_spans(graph.ops, equal)
    windows = tuple(windows_by_layer(spans, sorted(found[each.id], key=lambda use: use.first)) for each in buckets)
    if problem.calls.num > 1:
        windows = tuple(map(one_in_each_phase, windows))
    # The ends of intervals move to the edges of layers.
    moved = (
        replace(interval, leave=end_of(spans, interval.leave), first=begin_of(spans, interval.first))
        for interval in offload_intervals(graph, lives, activations)
    )
    intervals = tuple(sorted(moved, key=lambda interval: (interval.leave, interval.group)))
    choices = base.choices if base else _choices(problem, layers, buckets, windows)
    in_force = {placement.bucket: level_of(placement) for placement in problem.placements}
    streaming = {placement.bucket for placement in problem.placements if placement.streamed}
    return Facts(
        problem=problem,
        graph=graph,
        layers=layers,
        modes=modes,
        activations=activations,
        offload_intervals=intervals,
        buckets=buckets,
        sizes=base.sizes if base else tuple(Sizes.of(bucket, problem.num_copies) for bucket in buckets),
        targets=Targets(
            buckets=tuple(BucketRef(bucket.id) for bucket in buckets),
            gradients=tuple(GradientRef(bucket.id) for bucket in buckets),
            groups=tuple(GroupRef(interval.group) for interval in intervals),
        ),
        lives=lives,
        windows=windows,
        copies=tuple(map(_copies, buckets, windows)),
        gradients=_gradients(graph, buckets, lives, spans),
        streamed=frozenset(i for i, bucket in enumerate(buckets) if bucket.id in streaming),
        streamable=frozenset(
            i
            for i, bucket in enumerate(buckets)
            if may_stream(problem, bucket) and not in_force.get(bucket.id, Level.ON_DEVICE).has_state_on_host
        ),
        choices=choices,
        quotas=base.quotas if base else quotas_of(problem, buckets, choices),
        num_forward=sum(op.phase is Phase.FORWARD for op in graph.ops),
        num_run=sum(op.phase is not Phase.UPDATE for op in graph.ops),
        equal_layers=equal,
        spans=spans,
        laps=divided,
    )


def _choices(
    problem: Problem,
    layers: Sequence[Layer],
    buckets: Sequence[Bucket],
    windows: Sequence[Sequence[Window]],
) -> tuple[tuple[Level, ...], ...]:
    """Return the levels of each bucket that differ at some modes, given its `windows` with every activation kept.

    A bucket that only the forward reads has one window then, but two if an op that reads it is recomputed. An example
    is the cast of a weight under `torch.autocast`: the backward reads the result of the cast, not the weight.
    """
    in_force = {placement.bucket: level_of(placement) for placement in problem.placements}
    # Buckets that recomputed ops read, if all layers are recomputed to the same depth, at any depth.
    treatments = (activations_of(layers, modes_at_depth(layers, depth)) for depth in depths_of(layers))
    repeated = {repeat.op for own in treatments for repeat in repeats(problem.graph, own)}
    read = {name for op in problem.graph.ops if op.id in repeated for name in op.reads}
    read_again = {bucket.id for bucket in buckets if not read.isdisjoint(bucket.params)}
    choices = [
        levels_from(
            in_force.get(bucket.id, Level.ON_DEVICE),
            bucket,
            hybrid=problem.hybrid,
            num_windows=max(len(bucket_windows), 2 if bucket.id in read_again else 0),
        )
        for bucket, bucket_windows in zip(buckets, windows, strict=True)
    ]
    if problem.calls.alternate:
        # What a forward would release, the backward of an earlier call still reads.
        choices = [gathered_as(levels, is_released=False) for levels in choices]
    if problem.params_stay:
        choices = [staying(levels) for levels in choices]
    released = problem.released
    if released is not None:
        choices = [
            gathered_as(levels, is_released=bucket.id in released) if bucket.is_sharded else levels
            for bucket, levels in zip(buckets, choices, strict=True)
        ]
    return tuple(limited(problem, bucket, levels) for bucket, levels in zip(buckets, choices, strict=True))


def _copies(bucket: Bucket, windows: Sequence[Window]) -> tuple[Sequence[tuple[int, int]], ...]:
    each = [(window.first, window.last) for window in windows]
    through = [(each[0][0], each[-1][1])] if each else []
    return tuple((each if level.is_released else through) if is_gathered(bucket, level) else () for level in Level)


def _gradients(
    graph: StepGraph, buckets: tuple[Bucket, ...], lives: Liveness, spans: Sequence[LayerSpan]
) -> tuple[Gradients | None, ...]:
    owner = {param: i for i, bucket in enumerate(buckets) for param in bucket.params}
    grads = [storage for storage in graph.storages if storage.kind is Kind.GRAD]
    of = {grad.id: owner[grad.of] for grad in grads if grad.of is not None and grad.of in owner}
    written: set[int] = set()
    complete: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD:
            written.update(of[name] for name in op.writes if name in of)
            complete |= {of[name]: i for name in (*op.reads, *op.writes) if name in of}
    births: dict[int, list[tuple[int, int]]] = {}
    for grad in grads:
        if grad.id in of and grad.id in lives.lives:
            births.setdefault(of[grad.id], []).append((lives.lives[grad.id].first, grad.nbytes))
    return tuple(
        Gradients(births=tuple(sorted(births[i])), complete=end_of(spans, complete[i]))
        if graph.is_training and i in written
        else None
        for i in range(len(buckets))
    )
