"""What the search reads again and again about one problem: op indices of windows, gradients and phases, per bucket, and
of activations that leave.

Indices are those of the step as it is run at one choice of modes: where more is recomputed, there are more ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elixir_compile.analysis.liveness import Liveness, liveness
from elixir_compile.analysis.recompute import as_run, repeats
from elixir_compile.analysis.windows import Window, use_windows
from elixir_compile.ir import Activations, Bucket, BucketId, Kind, Phase, StepGraph
from elixir_compile.search.problem import Problem, may_stream
from elixir_compile.search.space.buckets import form_buckets
from elixir_compile.search.space.layers import LayerSpan, begin_of, end_of, layer_spans, layers_alike, windows_by_layer
from elixir_compile.search.space.levels import Level, level_of, levels_from
from elixir_compile.search.space.modes import (
    Layer,
    OffloadInterval,
    activations_of,
    deepest,
    layers_of,
    offload_intervals,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients of one bucket."""

    births: tuple[tuple[int, int], ...]
    """(op index, bytes) of each allocation."""
    complete: int
    """Index of the last backward op that writes or reads any of them, or of the last of its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a problem, indexed by op and by bucket; bucket i is `buckets[i]` everywhere."""

    problem: Problem
    graph: StepGraph
    """The step as it is run."""
    layers: tuple[Layer, ...]
    """Layers whose activations have a choice."""
    modes: tuple[int, ...]
    """The mode of each layer."""
    activations: tuple[Activations, ...]
    offload_intervals: tuple[OffloadInterval, ...]
    buckets: tuple[Bucket, ...]
    lives: Liveness
    windows: tuple[tuple[Window, ...], ...]
    gradients: tuple[Gradients | None, ...]
    """None for a bucket that gets no gradient in this graph, and for all where no update follows."""
    streamed: frozenset[int]
    """Buckets in force whose update is streamed: it stays so."""
    streamable: frozenset[int]
    """Buckets whose update may be streamed once their state is on the host."""
    choices: tuple[tuple[Level, ...], ...]
    """Levels of each bucket from the one in force outward, the same at all modes; some are the same at these."""
    num_forward: int
    """Ops before this index are the forward's."""
    num_run: int
    """Ops before this index run in regions; what follows is the update."""
    alike: frozenset[str]
    """Layers that are equal, and enough of them that regions begin with each."""
    spans: tuple[LayerSpan, ...]
    """Their ops. Windows, gradients and absences begin and end with them."""

    @property
    def is_training(self) -> bool:
        """Whether an update follows the backward."""
        return self.num_run < len(self.graph.ops)

    def phase_start(self, op: int) -> int:
        """Return the index of the first op of the phase that op belongs to."""
        return 0 if op < self.num_forward else self.num_forward

    @property
    def start_levels(self) -> tuple[Level, ...]:
        return tuple(levels[0] for levels in self.choices)

    @property
    def furthest_levels(self) -> tuple[Level, ...]:
        return tuple(levels[-1] for levels in self.choices)


def gather_facts(problem: Problem, base: Facts | None = None, modes: Sequence[int] = ()) -> Facts:
    """Return the facts of `problem`, its buckets formed: with everything kept, or, on top of those `base` facts, at
    `modes`."""
    layers = base.layers if base else layers_of(problem.graph, problem.savings)
    buckets = base.buckets if base else form_buckets(problem)
    modes = tuple(modes) or (0,) * len(layers)
    activations = activations_of(layers, modes)
    graph = as_run(problem.graph, activations)
    alike = base.alike if base else layers_alike(problem.graph, problem.least_alike)
    lives = liveness(graph)
    found = use_windows(graph, buckets)
    spans = layer_spans(graph.ops, alike)
    windows = tuple(
        windows_by_layer(spans, sorted(found[bucket.id], key=lambda window: window.first)) for bucket in buckets
    )
    in_force = {placement.bucket: level_of(placement) for placement in problem.placements}
    streaming = {placement.bucket for placement in problem.placements if placement.streamed}
    return Facts(
        problem=problem,
        graph=graph,
        layers=layers,
        modes=modes,
        activations=activations,
        offload_intervals=_by_layer(spans, offload_intervals(graph, lives, activations)),
        buckets=buckets,
        lives=lives,
        windows=windows,
        gradients=_gradients(graph, buckets, lives, spans),
        streamed=frozenset(i for i, bucket in enumerate(buckets) if bucket.id in streaming),
        streamable=frozenset(
            i
            for i, bucket in enumerate(buckets)
            if may_stream(problem, bucket) and not in_force.get(bucket.id, Level.KEPT).has_state_on_host
        ),
        choices=base.choices if base else _choices(problem, layers, buckets, windows),
        num_forward=sum(op.phase is Phase.FORWARD for op in graph.ops),
        num_run=sum(op.phase is not Phase.UPDATE for op in graph.ops),
        alike=alike,
        spans=spans,
    )


def _by_layer(spans: Sequence[LayerSpan], found: Sequence[OffloadInterval]) -> tuple[OffloadInterval, ...]:
    """Return the absences `found`, each from and to the edge of a layer where it is near one, in order."""
    moved = [replace(own, leave=end_of(spans, own.leave), first=begin_of(spans, own.first)) for own in found]
    return tuple(sorted(moved, key=lambda absence: (absence.leave, absence.group)))


def _choices(
    problem: Problem,
    layers: Sequence[Layer],
    buckets: Sequence[Bucket],
    windows: Sequence[Sequence[Window]],
) -> tuple[tuple[Level, ...], ...]:
    """Return the levels of each bucket that differ at any modes, given its `windows` with everything kept.

    A bucket that only the forward reads has one window, and two where an op that reads it is recomputed: the cast of
    a weight under `torch.autocast`, whose result the backward reads instead of the weight.
    """
    in_force = {placement.bucket: level_of(placement) for placement in problem.placements}
    again = _read_again(problem.graph, layers, buckets)
    return tuple(
        levels_from(
            in_force.get(bucket.id, Level.KEPT),
            bucket,
            hybrid=problem.hybrid,
            num_windows=max(len(own), 2 if bucket.id in again else 0),
        )
        for bucket, own in zip(buckets, windows, strict=True)
    )


def _read_again(graph: StepGraph, layers: Sequence[Layer], buckets: Sequence[Bucket]) -> frozenset[BucketId]:
    """Return the buckets that a recomputed op reads, whichever depth all layers are recomputed to."""
    again = {
        repeat.op
        for depth in {mode.depth for layer in layers for mode in layer.modes}
        for repeat in repeats(graph, activations_of(layers, [deepest(layer, depth, leaves=False) for layer in layers]))
    }
    read = {name for op in graph.ops if op.id in again for name in op.reads}
    return frozenset(bucket.id for bucket in buckets if not read.isdisjoint(bucket.params))


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
    is_training = any(op.phase is Phase.UPDATE for op in graph.ops)
    return tuple(
        Gradients(births=tuple(sorted(births[i])), complete=end_of(spans, complete[i]))
        if is_training and i in written
        else None
        for i in range(len(buckets))
    )
