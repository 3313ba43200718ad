"""Collect facts about the activations of a plan as values: by layer and group, by region, and in sum.

Seconds belong to the planner's decision about a whole layer. Only with the graph it is known which ops run again, and
which groups the forward saves only for them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.analysis.laps import laps_of
from elixir_compile.analysis.recompute import as_run, repeated_op, repeats, saved_storages
from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import GroupId, RegionId, Saving, Verb
from elixir_compile.ir.plan import Decision, Plan
from elixir_compile.ir.schedule import GroupRef
from elixir_compile.report.subject import Move, moves_of
from elixir_compile.units import format_bytes

SAID: Mapping[Saving, str] = {
    Saving.KEEP: "kept",
    Saving.RECOMPUTE: "recomputed",
    Saving.OFFLOAD: "offloaded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingAnswer:
    """The sum of all activations with the same treatment."""

    saving: Saving
    nbytes: int
    num_layers: int
    """Number of layers with such activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Number of forward ops that run again in a region to recompute a group."""

    group: GroupId
    region: RegionId
    num_ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """The treatment of a group of activations."""

    group: Activations
    moves: tuple[Move, ...]
    """The offload and the prefetch of the group, if it is offloaded."""
    again: tuple[Again, ...] | None
    """The regions in which the group is recomputed, in order; None if the graph was not given."""
    is_saved: bool | None
    """True if the capture saves the group, False if it is saved only for ops that run again; None without the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnswer:
    """The treatment of the activations of a layer, and the decisions about it."""

    layer: str
    groups: tuple[GroupAnswer, ...]
    """The groups in question."""
    num_groups: int
    """Number of all groups of the layer."""
    decisions: tuple[Decision, ...]
    """Decisions about the layer."""


def layer_of_group(group: GroupId) -> str:
    """Return the layer of a group: `transformer.h.3` for `transformer.h.3.matmul`. Without a dot it is the whole
    name."""
    return group.rpartition(".")[0] or group


def layers_of_plan(plan: Plan) -> frozenset[str]:
    """Return the layers whose activations the plan lists, as its decisions name them."""
    return frozenset(layer_of_group(group.id) for group in plan.activations)


def saving_answers(plan: Plan) -> tuple[SavingAnswer, ...]:
    """Return bytes and layers of activations by treatment; empty for a plan that keeps all."""
    found: list[SavingAnswer] = []
    for saving in Saving if plan.activations else ():
        own = [group for group in plan.activations if group.saving is saving]
        nbytes = sum(group.nbytes for group in own)
        num_layers = len({layer_of_group(group.id) for group in own})
        found.append(SavingAnswer(saving=saving, nbytes=nbytes, num_layers=num_layers))
    return tuple(found)


def savings_text(plan: Plan) -> str:
    """Return the bytes by treatment, as `210 MiB kept, 400 MiB recomputed`; empty for a plan that keeps all."""
    return ", ".join(
        f"{format_bytes(found.nbytes)} {SAID[found.saving]}" for found in saving_answers(plan) if found.nbytes
    )


def layer_answers(plan: Plan, groups: Sequence[Activations], graph: StepGraph | None) -> tuple[LayerAnswer, ...]:
    """Return the facts about `groups` by layer; with the graph of the plan also the regions that recompute them."""
    again = None if graph is None else recomputed(plan, graph)
    saved = None if graph is None else saved_storages(graph)
    by_layer: dict[str, list[GroupAnswer]] = {}
    for group in groups:
        found = GroupAnswer(
            group=group,
            moves=moves_of(plan, (GroupRef(group.id),)),
            again=None if again is None else tuple(part for part in again if part.group == group.id),
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


def moving_at(plan: Plan, region: RegionId, verb: Verb) -> tuple[Activations, ...]:
    """Return the groups whose offload is issued after `region`, or whose prefetch is waited for before it."""
    return tuple(
        group
        for group in plan.activations
        if any(move.verb is verb and move.region == region for move in moves_of(plan, (GroupRef(group.id),)))
    )
