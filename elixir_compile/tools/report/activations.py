"""Collect facts about the activations of a plan as values: by layer and group, by region, and in sum.

Seconds belong to the planner's decision about a whole layer. Only with the graph it is known which ops run again, and
which groups the forward saves only for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.kinds import RegionId, Verb
from elixir_compile.ir.plan import Decision, Plan
from elixir_compile.ir.schedule import GroupRef
from elixir_compile.session.line import layer_of_group
from elixir_compile.tools.report.held import Survey
from elixir_compile.tools.report.recomputed import Again
from elixir_compile.tools.report.subject import Move


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
    is_lean: bool = False
    """Whether this is the treatment in lean calls."""


def layers_of_plan(plan: Plan) -> frozenset[str]:
    """Return the layers whose activations the plan lists, as its decisions name them."""
    lean = () if plan.lean is None else plan.lean.activations
    return frozenset(layer_of_group(group.id) for group in (*plan.activations, *lean))


def layer_answers(survey: Survey, groups: Sequence[Activations], *, is_lean: bool = False) -> tuple[LayerAnswer, ...]:
    """Return the facts about `groups` by layer; with the graph of the plan also the regions that recompute them.

    `is_lean` if `survey` is that of the lean calls of a plan.
    """
    plan, held = survey.plan, survey.held
    by_layer: dict[str, list[GroupAnswer]] = {}
    for group in groups:
        found = GroupAnswer(
            group=group,
            moves=survey.moves.of(GroupRef(group.id)),
            again=None if held is None else tuple(part for part in held.again if part.group == group.id),
            is_saved=None if held is None else held.saved.issuperset(group.storages),
        )
        by_layer.setdefault(layer_of_group(group.id), []).append(found)
    return tuple(
        LayerAnswer(
            layer=layer,
            groups=tuple(own),
            num_groups=sum(layer_of_group(group.id) == layer for group in plan.activations),
            decisions=tuple(decision for decision in plan.decisions if decision.subject == layer),
            is_lean=is_lean,
        )
        for layer, own in by_layer.items()
    )


def moving_at(survey: Survey, region: RegionId, verb: Verb) -> tuple[Activations, ...]:
    """Return the groups whose offload is issued after `region`, or whose prefetch is waited for before it."""
    moving = survey.moves.groups_at(region, verb)
    return tuple(group for group in survey.plan.activations if group.id in moving)
