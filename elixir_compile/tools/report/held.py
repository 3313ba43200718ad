"""Count once the facts that all answers about a plan share: moves, recomputed ops, bytes of each bucket at each op."""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Kind, OpId, StorageId
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Region
from elixir_compile.step.bucket_bytes import Held
from elixir_compile.step.plan_rows import PlanRows
from elixir_compile.step.recompute import saved_storages
from elixir_compile.step.timeline import MemoryTimeline, timeline_of
from elixir_compile.tools.report.recomputed import Again, recomputed
from elixir_compile.tools.report.subject import PlanMoves


class Holdings:
    """The device bytes of a plan at each op, for its graph."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self.rows = PlanRows(graph, plan)
        self.timeline: MemoryTimeline = timeline_of(self.rows)
        self._index = {op: at for at, op in enumerate(self.timeline.ops)}
        self._in_turns = tuple(self.rows.joint(plan.buckets))

    @functools.cached_property
    def again(self) -> tuple[Again, ...]:
        """The forward ops that run again, by region and group."""
        return recomputed(self._plan, self._graph)

    @functools.cached_property
    def saved(self) -> frozenset[StorageId]:
        """The storages that the capture saves for the backward."""
        return saved_storages(self._graph)

    def position(self, op: OpId) -> int:
        """Return the fullest position of `op` on the axis of the rows."""
        return self.timeline.positions[self._index[op]]

    def ops_of(self, region: Region) -> range:
        """Return the indices of the ops of `region`."""
        return range(self._index[region.first], self._index[region.last] + 1)

    def most_bytes(self, region: Region) -> int:
        """Return the most live bytes while `region` runs."""
        ops = self.ops_of(region)
        return max(self.timeline.live_bytes[ops.start : ops.stop])

    def largest(self, op: OpId, most: int = 10) -> tuple[tuple[str, Kind, int], ...]:
        """Return the buckets and activations that hold the most bytes at `op`: name, kind, bytes."""
        at, rows = self.position(op), self.rows
        held: Counter[tuple[str, Kind]] = Counter()
        for bucket in self._plan.buckets:
            for row in rows.of_bucket(bucket):
                held[bucket.id, row.kind] += _bytes_at(row, at)
        for name, own in rows.storages.items():
            for row in own:
                held[name, row.kind] += _bytes_at(row, at)
        return tuple((name, kind, nbytes) for (name, kind), nbytes in held.most_common(most) if nbytes)

    def of_bucket(self, bucket: Bucket, op: OpId) -> Mapping[Kind, int]:
        """Return the bytes at `op`, by kind, that the step would not hold if the parameters and the optimizer state of
        `bucket` were empty."""
        at, rows = self.position(op), self.rows
        empty = replace(bucket, nbytes=0, state_nbytes=0)
        others = [empty if other.id == bucket.id else other for other in self._plan.buckets]
        unwritten = [(birth, 0) for birth, _ in rows.births(bucket.id)]
        held: Counter[Kind] = Counter()
        for row in (*rows.of_bucket(bucket), *self._in_turns):
            held[row.kind] += _bytes_at(row, at)
        for row in (*rows.of_bucket(empty, unwritten), *(rows.joint(others) if self._in_turns else ())):
            held[row.kind] -= _bytes_at(row, at)
        return {kind: held[kind] for kind in Kind if held[kind]}


def _bytes_at(row: Held, at: int) -> int:
    return row.nbytes if row.first <= at <= row.last else 0


class Survey:
    """The facts that answers about a plan share; `held` is None if the graph is not given."""

    def __init__(self, plan: Plan, graph: StepGraph | None = None) -> None:
        self.plan, self._graph = plan, graph
        self.moves = PlanMoves(plan)
        self.held = None if graph is None else Holdings(graph, plan)

    def of_lean_calls(self) -> "Survey":
        """Return the survey of the plan's lean calls, which it must have."""
        return Survey(self.plan.of_lean_calls(), self._graph)
