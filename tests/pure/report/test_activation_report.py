"""What reports say of activations: every repeated op, every copy and every byte is told once."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given

from elixir_compile.ir import Decision, GroupId, Kind, Plan, RegionId, Saving, StepGraph, Verb
from elixir_compile.session.line import SavingAnswer, layer_of_group, saving_answers, savings_text
from elixir_compile.step.as_run import as_run, repeats
from elixir_compile.tools.report.explain import answer, explain, moving_at
from elixir_compile.tools.report.tables import Again, Survey, recomputed
from tests.pure.mixes import group
from tests.pure.plans import bucket_of, make_plan, mixed_plans, planned_graphs
from tests.pure.steps import LAYERS

GROUPS = (
    group(LAYERS, "h.0.matmul", Saving.OFFLOAD, "a0"),
    group(LAYERS, "h.0.pointwise", Saving.RECOMPUTE, "g0"),
    group(LAYERS, "h.1.input", Saving.KEEP, "n0"),
    group(LAYERS, "h.1.fixed", Saving.RECOMPUTE, "r0"),
    group(LAYERS, "h.1.kept", Saving.KEEP, "m1"),
)
"""`g0` is made again from `a0`, which comes back; `r0` from `n0`, which is stored for that only."""
WHY = Decision(
    subject="h.0",
    choice="offload matmul, recompute pointwise",
    because="the peak would be 80 B higher",
    cost_s=0.002,
    saves_bytes=80,
    rejected=("keep matmul: 7 B over the budget", "offload pointwise: 3 ms longer"),
)


def made_plan() -> Plan:
    """Return a plan of the two layers; what leaves does so at once and comes back right before its use."""
    params = [storage for storage in LAYERS.storages if storage.kind is Kind.PARAM]
    buckets = [bucket_of(LAYERS, f"b{n}", [param]) for n, param in enumerate(params)]
    made = make_plan(LAYERS, buckets, ["host", "host"], GROUPS)
    return replace(made, decisions=(*made.decisions, WHY))


PLAN = made_plan()
REGIONS = {region.id: region for region in PLAN.regions}


def region_of(op: str) -> RegionId:
    """Return the region that runs `op`."""
    order = [other.id for other in as_run(LAYERS, GROUPS).ops]
    spans = {r.id: (order.index(r.first), order.index(r.last)) for r in PLAN.regions}
    return next(name for name, (first, last) in spans.items() if first <= order.index(op) <= last)


def test_repeated_ops_are_listed_with_their_region() -> None:
    assert recomputed(PLAN, LAYERS) == (
        Again(group=GroupId("h.1.fixed"), region=region_of("bwd.re_add_0"), num_ops=1),
        Again(group=GroupId("h.0.pointwise"), region=region_of("bwd.re_gelu_0"), num_ops=1),
    )


@given(mixed_plans())
def test_every_repeated_op_is_counted_once_in_its_region(planned: tuple[StepGraph, Plan]) -> None:
    graph, made = planned
    order = [op.id for op in as_run(graph, made.activations).ops]
    forward = {op.id for op in graph.ops}
    again = recomputed(made, graph)
    assert sum(one.num_ops for one in again) == len(repeats(graph, made.activations))
    for region in made.regions:
        ops = order[order.index(region.first) : order.index(region.last) + 1]
        told = answer(made, region.id, graph).region.again
        assert told == tuple(one for one in again if one.region == region.id)
        assert sum(one.num_ops for one in told) == len(set(ops) - forward)
    stored = {g.id for g in made.activations if g.saving is not Saving.RECOMPUTE}
    assert stored.isdisjoint(one.group for one in again)


@given(mixed_plans())
def test_every_copy_of_a_group_is_listed_once(planned: tuple[StepGraph, Plan]) -> None:
    _, made = planned
    survey = Survey(made)
    for one in made.activations:
        layers = answer(made, one.id).layers
        moves = next(g.moves for layer in layers for g in layer.groups if g.group == one)
        expected = [Verb.OFFLOAD, Verb.PREFETCH] if one.saving is Saving.OFFLOAD else []
        assert [move.verb for move in moves] == expected
        for move in moves:
            assert move.region == "" or one in moving_at(survey, RegionId(move.region), move.verb)
    num_moving = sum(len(moving_at(survey, region.id, Verb.OFFLOAD)) for region in made.regions)
    assert num_moving == sum(one.saving is Saving.OFFLOAD for one in made.activations)


@given(mixed_plans())
def test_no_byte_is_lost_in_the_sum(planned: tuple[StepGraph, Plan]) -> None:
    _, made = planned
    found = saving_answers(made)
    assert sum(one.nbytes for one in found) == sum(one.nbytes for one in made.activations)
    assert [one.saving for one in found] == (list(Saving) if made.activations else [])


@given(planned_graphs())
def test_a_plan_that_keeps_all_activations_lists_none(planned: tuple[StepGraph, Plan]) -> None:
    _, made = planned
    assert saving_answers(made) == ()
    assert savings_text(made) == ""
    assert "activations" not in explain(made)


def test_bytes_are_summed_by_treatment() -> None:
    assert saving_answers(PLAN) == (
        SavingAnswer(saving=Saving.KEEP, nbytes=12, num_layers=1),
        SavingAnswer(saving=Saving.RECOMPUTE, nbytes=48, num_layers=2),
        SavingAnswer(saving=Saving.OFFLOAD, nbytes=64, num_layers=1),
    )
    assert savings_text(PLAN) == "12 B kept, 48 B recomputed, 64 B offloaded"


@pytest.mark.parametrize(("name", "layer"), [("transformer.h.3.matmul", "transformer.h.3"), ("g0", "g0")])
def test_the_layer_is_the_name_before_the_class(name: str, layer: str) -> None:
    assert layer_of_group(GroupId(name)) == layer


def test_a_layer_lists_its_groups_reasons_and_rejected_choices() -> None:
    lines = explain(PLAN, "h.0", LAYERS).splitlines()
    assert lines[0] == "h.0  activations of 2 groups, 96 B"
    told = {line[2:11].strip(): line[13:] for line in lines[1:] if line[2:11].strip()}
    after, back = region_of("fwd.gelu_0"), region_of("bwd.re_gelu_0")
    assert told == {
        "matmul": f"64 B offloaded: offload after {after}, waited for; prefetch for {back}, right before it",
        "pointwise": f"32 B recomputed: 1 op in {back}",
        "why": f"{WHY.choice}: {WHY.because}; costs 2 ms, saves 80 B",
        "rejected": WHY.rejected[0],
    }
    assert lines[-1].strip() == WHY.rejected[1]


def test_without_the_graph_repeated_ops_are_not_listed() -> None:
    text = explain(PLAN, "h.1")
    assert "  fixed  16 B recomputed\n" in text
    assert "saved for" not in text
    assert "  input  8 B kept; saved for the ops that run again\n" in explain(PLAN, "h.1", LAYERS)
    assert answer(PLAN, "h.1").layers[0].groups[0].again is None


def test_a_group_is_explained_alone_and_without_decisions() -> None:
    text = explain(PLAN, "h.0.pointwise", LAYERS)
    assert text.startswith("h.0  activations of 1 of 2 groups, 32 B\n")
    assert "matmul  " not in text
    assert "no decision of this plan names them" in explain(PLAN, "h.1")
    assert "they fit on the device" in explain(PLAN, "h.1.kept")


def test_a_region_lists_recomputed_offloaded_and_prefetched_groups() -> None:
    back = explain(PLAN, region_of("bwd.re_gelu_0"), LAYERS)
    assert "  prefetched  h.0.matmul (64 B)\n" in back
    assert "  recomputes  h.0.pointwise: 1 op\n" in back
    left = explain(PLAN, region_of("fwd.gelu_0"))
    assert "  offloads  h.0.matmul (64 B)\n" in left
    assert "recomputes" not in left
    assert "prefetched" not in left


def test_the_plan_counts_layers_without_their_reasons() -> None:
    text = explain(PLAN)
    assert "  activations  12 B kept, in 1 layer\n               48 B recomputed, in 2 layers\n" in text
    assert "  moved        1 bucket and 1 layer have decisions of their own" in text
    assert WHY.because not in text
    assert "no decision of this plan: its home is that of" in explain(PLAN, "b1")


@pytest.mark.parametrize("subject", ["", "h.0", "h.1.fixed", "bwd.0"])
def test_an_answer_about_activations_is_json(subject: str) -> None:
    found = json.loads(json.dumps(asdict(answer(PLAN, subject, LAYERS)), allow_nan=False))
    assert len(found["layers"]) == subject.startswith("h.")
    if subject == "h.1.fixed":
        (one,) = found["layers"][0]["groups"]
        assert (one["group"]["saving"], one["again"][0]["num_ops"], one["is_saved"]) == ("recompute", 1, True)
