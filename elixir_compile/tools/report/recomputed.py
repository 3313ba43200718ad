"""Count the forward ops that a plan runs again, by the region in which they run and the group that they recompute."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import GroupId, RegionId, Saving
from elixir_compile.ir.plan import Plan
from elixir_compile.step.laps import laps_of
from elixir_compile.step.recompute import as_run, repeated_op, repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Number of forward ops that run again in a region to recompute a group."""

    group: GroupId
    region: RegionId
    num_ops: int


def recomputed(plan: Plan, graph: StepGraph) -> tuple[Again, ...]:
    """Return the number of ops that run again in each region, by the group that they recompute.

    An op without a result in any group counts for the group of the next op with one. An op with results in several
    groups counts for the first.
    """
    index = {op.id: number for number, op in enumerate(as_run(graph, plan.activations, laps_of(plan)).ops)}
    firsts = [index[region.first] for region in plan.regions]
    dropped = [group for group in plan.activations if group.saving is Saving.RECOMPUTE]
    group_of = {name: group.id for group in dropped for name in group.storages}
    writes = {op.id: op.writes for op in graph.ops}
    counts: Counter[tuple[RegionId, GroupId]] = Counter()
    waiting: list[RegionId] = []
    for repeat in repeats(graph, plan.activations):
        waiting.append(plan.regions[bisect_right(firsts, index[repeated_op(repeat.op)]) - 1].id)
        owner = next((group_of[name] for name in writes[repeat.op] if name in group_of), None)
        if owner is not None:
            counts.update((region, owner) for region in waiting)
            waiting.clear()
    return tuple(Again(group=group, region=region, num_ops=count) for (region, group), count in counts.items())
