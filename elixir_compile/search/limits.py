"""Enumerate the modes from which a search starts, and count the limits between which its device bytes lie.

kept, pointwise, matmul, attention, fixed        recompute up to this class, keep the rest on the device
kept, pointwise, matmul, attention, fixed        recompute up to this class, offload the rest
layer by layer                                   from the first and from the leanest of these, as long as bytes fall

The limits are the fewest device bytes of a graph, and its device bytes if nothing moves, both without a search.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elixir_compile.ir import Activations, Bucket, BucketId, Kind, Placement, Plan, Saving, StepGraph
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.levels import Level, placement_of
from elixir_compile.search.space.modes import modes_by_depth
from elixir_compile.step.bucket_bytes import kept_copy_bytes, kept_grad_bytes, resting
from elixir_compile.step.laps import laps_of
from elixir_compile.step.recompute import as_run, given_bytes


def uniform_modes(evaluator: Evaluator) -> Iterator[Evaluator]:
    """Yield the evaluator of each choice of modes for the start of a search, each once.

    The first keeps all activations.
    """
    layers = evaluator.facts.layers
    seen: set[tuple[int, ...]] = set()
    for modes in modes_by_depth(layers):
        if modes not in seen:
            seen.add(modes)
            yield evaluator.at(modes)
    if not layers:
        yield evaluator
        return
    for start in (evaluator.at([0] * len(layers)), min(map(evaluator.at, seen), key=lambda at: at.floor_bytes)):
        if start.lowered_modes not in seen:
            seen.add(start.lowered_modes)
            yield evaluator.at(start.lowered_modes)


def leanest(evaluator: Evaluator) -> Evaluator:
    """Return the evaluator of the uniform modes with the fewest device bytes if all buckets are at minimum memory."""
    return min(uniform_modes(evaluator), key=lambda at: at.floor_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Device bytes of a graph, without external usage."""

    peak_bytes: int
    """The peak of a step, `resident_bytes` included."""
    left_bytes: int
    """Activations, inputs and gathered copies live between its forward and its backward."""
    resident: Mapping[BucketId, int]
    """By bucket: parameters, optimizer state and sums of gradients on the device, during the whole step."""
    grads: Mapping[BucketId, int]
    """By bucket: gradients on the device between its backward and the update."""

    @property
    def resident_bytes(self) -> int:
        """The bytes of `resident`."""
        return sum(self.resident.values())

    @property
    def grad_bytes(self) -> int:
        """The bytes of `grads`."""
        return sum(self.grads.values())

    def towards(self, other: "Extent", share: float) -> "Extent":
        """Return the extent at `share` of the way to `other`: this extent at 0, the other at 1."""
        return Extent(
            peak_bytes=_between(self.peak_bytes, other.peak_bytes, share),
            left_bytes=_between(self.left_bytes, other.left_bytes, share),
            resident=_each_between(self.resident, other.resident, share),
            grads=_each_between(self.grads, other.grads, share),
        )


def extents(problem: Problem) -> tuple[Extent, Extent]:
    """Return the smallest extent over the uniform modes for the graph of `problem`, and its extent if nothing moves."""
    evaluator = Evaluator(gather_facts(replace(problem, base_bytes=0, between_bytes=0, after_bytes=0)))
    smallest = min(
        uniform_modes(evaluator),
        key=lambda uniform: (uniform.floor_bytes, _kept_bytes(uniform.facts.graph, uniform.facts.activations)),
    )
    return _extent(smallest, smallest.min_memory_levels), _extent(evaluator, evaluator.facts.start_levels)


def extent_of(graph: StepGraph, plan: Plan) -> Extent:
    """Return the extent of `graph` under `plan`."""
    return _of_homes(
        zip(plan.buckets, plan.placements, strict=True),
        peak_bytes=plan.prediction.device_peak_bytes - plan.base_bytes,
        kept_bytes=_kept_bytes(as_run(graph, plan.activations, laps_of(plan)), plan.activations),
    )


def _extent(evaluator: Evaluator, levels: Sequence[Level]) -> Extent:
    facts = evaluator.facts
    homes = (placement_of(bucket, level) for bucket, level in zip(facts.buckets, levels, strict=True))
    return _of_homes(
        zip(facts.buckets, homes, strict=True),
        peak_bytes=evaluator.memory.peak_bytes(levels, ahead=0),
        kept_bytes=_kept_bytes(facts.graph, facts.activations),
    )


def _of_homes(homes: Iterable[tuple[Bucket, Placement]], *, peak_bytes: int, kept_bytes: int) -> Extent:
    resident: dict[BucketId, int] = {}
    grads: dict[BucketId, int] = {}
    copies_bytes = 0
    for bucket, home in homes:
        resident[bucket.id] = sum(nbytes for _, nbytes in resting(bucket, home))
        # Each parameter counts as having a gradient. The graph may have fewer, so the bytes are an upper limit.
        grads[bucket.id] = kept_grad_bytes(bucket, home) if bucket.trainable else 0
        copies_bytes += kept_copy_bytes(bucket, home)
    return Extent(peak_bytes=peak_bytes, left_bytes=kept_bytes + copies_bytes, resident=resident, grads=grads)


def _kept_bytes(step: StepGraph, activations: Sequence[Activations]) -> int:
    """Return the bytes of saved activations and inputs on the device between forward and backward.

    `step` is the graph as it runs with `activations`, recomputed ops included.
    """
    offloaded = {name for group in activations if group.saving is Saving.OFFLOAD for name in group.storages}
    return given_bytes(step) + sum(s.nbytes for s in step.storages if s.kind is Kind.SAVED and s.id not in offloaded)


def _each_between(low: Mapping[BucketId, int], high: Mapping[BucketId, int], share: float) -> dict[BucketId, int]:
    return {bucket: _between(low.get(bucket, 0), high.get(bucket, 0), share) for bucket in {**low, **high}}


def _between(low: int, high: int, share: float) -> int:
    return round(low + share * (high - low))
