"""What a plan does with activations, as values: by layer and group, by region, and summed up.

Seconds are those of the planner's decision, which is about a whole layer. Without the graph nothing here knows which
ops run again, nor which groups the forward would not save by itself.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.analysis.recompute import as_run, repeated_op, repeats, saved_storages
from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import GroupId, RegionId, Saving, Verb
from elixir_compile.ir.plan import Decision, Plan
from elixir_compile.report.subject import Move, moves_of
from elixir_compile.units import format_bytes

SAID: Mapping[Saving, str] = {
    Saving.KEEP: "kept",
    Saving.RECOMPUTE: "recomputed",
    Saving.OFFLOAD: "offloaded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingAnswer:
    """All activations that are treated alike."""

    saving: Saving
    nbytes: int
    num_layers: int
    """Layers with any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Ops of the forward that run again in one region, for the sake of one group."""

    group: GroupId
    region: RegionId
    num_ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """What happens to the activations of one layer and one class."""

    group: Activations
    moves: tuple[Move, ...]
    """The offload and the prefetch, where it is offloaded."""
    again: tuple[Again, ...] | None
    """The regions in which it is computed again, in the order of the step; None where the graph was not given."""
    is_saved: bool | None
    """Whether the forward saves it in any case, or only since ops that run again read it; None as above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnswer:
    """What happens to the activations of one layer, and why."""

    layer: str
    groups: tuple[GroupAnswer, ...]
    """Those that were asked about."""
    num_groups: int
    """All of the layer."""
    decisions: tuple[Decision, ...]
    """About the layer as a whole."""


def layer_of_group(group: GroupId) -> str:
    """Return the layer in `transformer.h.3.matmul`; what has no class is a layer of its own."""
    return group.rpartition(".")[0] or group


def layers_of_plan(plan: Plan) -> frozenset[str]:
    """Return the layers whose activations the plan lists, as its decisions name them."""
    return frozenset(layer_of_group(group.id) for group in plan.activations)


def saving_answers(plan: Plan) -> tuple[SavingAnswer, ...]:
    """Return bytes and layers by what happens to activations; nothing for a plan that keeps all."""
    found: list[SavingAnswer] = []
    for saving in Saving if plan.activations else ():
        own = [group for group in plan.activations if group.saving is saving]
        nbytes = sum(group.nbytes for group in own)
        num_layers = len({layer_of_group(group.id) for group in own})
        found.append(SavingAnswer(saving=saving, nbytes=nbytes, num_layers=num_layers))
    return tuple(found)


def savings_text(plan: Plan) -> str:
    """Return `210 MiB kept, 400 MiB recomputed`; empty for a plan that keeps all."""
    return ", ".join(f"{format_bytes(one.nbytes)} {SAID[one.saving]}" for one in saving_answers(plan) if one.nbytes)


def layer_answers(plan: Plan, groups: Sequence[Activations], graph: StepGraph | None) -> tuple[LayerAnswer, ...]:
    """Return what there is to say about `groups`, by layer; with the graph of the plan also what runs again where."""
    again = None if graph is None else recomputed(plan, graph)
    saved = None if graph is None else saved_storages(graph)
    by_layer: dict[str, list[GroupAnswer]] = {}
    for group in groups:
        found = GroupAnswer(
            group=group,
            moves=moves_of(plan, (group.id,)),
            again=None if again is None else tuple(one for one in again if one.group == group.id),
            is_saved=None if saved is None else saved.issuperset(group.storages),
        )
        by_layer.setdefault(layer_of_group(group.id), []).append(found)
    return tuple(
        LayerAnswer(
            layer=layer,
            groups=tuple(own),
            num_groups=sum(layer_of_group(group.id) == layer for group in plan.activations),
            decisions=tuple(decision for decision in plan.decisions if decision.subject == layer),
        )
        for layer, own in by_layer.items()
    )


def recomputed(plan: Plan, graph: StepGraph) -> tuple[Again, ...]:
    """Return how many ops run again in each region, by the group for whose sake: that of the next recomputed storage.

    What an op makes for several groups counts for the first of them.
    """
    index = {op.id: number for number, op in enumerate(as_run(graph, plan.activations).ops)}
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


def moving_at(plan: Plan, region: RegionId, verb: Verb) -> tuple[Activations, ...]:
    """Return the groups whose copy to the host begins after `region` (`offload`), or has to be back for it
    (`prefetch`)."""
    return tuple(
        group
        for group in plan.activations
        if any(move.verb is verb and move.region == region for move in moves_of(plan, (group.id,)))
    )
