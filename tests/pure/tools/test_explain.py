"""A plan in words: why each decision, what differs between two plans, and what becomes of activations and layers."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings

from elixir_compile.base.errors import PlanMismatch, UnknownSubject
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import (
    Activations,
    Decision,
    GroupId,
    Kind,
    Origin,
    Plan,
    Record,
    RegionId,
    Saving,
    StepGraph,
    StorageId,
    Tier,
    Update,
    Verb,
    plan_from_json,
    plan_to_json,
)
from elixir_compile.ir.plan import SavingAnswer, layer_of_group, saving_answers, savings_text
from elixir_compile.ir.schedule import BucketRef
from elixir_compile.search import Problem, plan
from elixir_compile.step import plan_timeline
from elixir_compile.step.as_run import as_run, repeats
from elixir_compile.step.divide import laps_of
from elixir_compile.step.prices import OpSeconds
from elixir_compile.tools.report.diff import Change, diff, plan_diff, run_diff
from elixir_compile.tools.report.explain import answer, explain, moving_at
from elixir_compile.tools.report.tables import Again, Move, Survey, layer_of_param, layer_rows, recomputed
from tests.pure.mixes import group
from tests.pure.plans import bucket_of, make_plan, mixed_plans, planned_graphs
from tests.pure.problems import best_of_all, chain_of, problem_of, problems, tight_problem
from tests.pure.steps import LAYERS
from tests.pure.strategies import Layer, chain
from tests.pure.tools.pages import param_bytes, tight

# ----------------------------------------------------------------------------------------------------------------------
# `explain` and `answer`: what they say is what the plan says, for plans of every planner.


GRAPH = chain([Layer(module=f"h.{n}", params=((f"h.{n}.w", 256),), frozen=False, act_numel=4) for n in range(4)])
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"h.{n}.w"]) for n in range(4)]
PLAN = make_plan(GRAPH, BUCKETS, ["host", "device", "resident", "split"])
TIGHT = tight_problem()


def test_a_moved_bucket_lists_home_reason_and_rejected_choices() -> None:
    lines = explain(PLAN, "h.0", GRAPH).splitlines()
    assert lines[0] == "b0  1 parameter, 256 elements of float32"
    told = {line[2:13].strip(): line[15:] for line in lines[1:] if line[2:13].strip()}
    assert told["asked for"] == "h.0.w"
    assert told["size"] == "1.0 KiB of parameters, 2.0 KiB of optimizer state"
    assert told["lives"] == "parameters, gradients and optimizer state on the host"
    assert told["copy"] == "gathered for each use, then released"
    assert told["why"] == "param host: short by 3 bytes"
    assert told["rejected"] == "keep it"


@pytest.mark.parametrize(
    ("name", "lives", "copy", "always_bytes"),
    [
        ("b0", "parameters, gradients and optimizer state on the host", "gathered for each use, then released", 0),
        ("b1", "parameters, gradients and optimizer state on the device", "none is needed", 3072),
        ("b2", "parameters, gradients and optimizer state on the host", "gathered once, kept until the backward", 0),
        ("b3", "parameters and gradients on the device, optimizer state on the host", "none is needed", 1024),
    ],
)
def test_every_home_is_named(name: str, lives: str, copy: str, always_bytes: int) -> None:
    text = explain(PLAN, name)
    assert f" {lives}\n" in text
    assert f" {copy}" in text
    assert answer(PLAN, name).buckets[0].always_bytes == always_bytes


def test_a_bucket_without_a_decision_says_so() -> None:
    assert "it fits on the device: no decision moved it" in explain(PLAN, "b1")
    assert "its home is that of an earlier plan" in explain(PLAN, "b2")


@given(planned_graphs())
def test_bytes_of_all_buckets_at_the_peak_add_up(planned: tuple[StepGraph, Plan]) -> None:
    graph, made = planned
    peak = plan_timeline(graph, made).peak
    held: dict[Kind, int] = {}
    for bucket in made.buckets:
        (found,) = answer(made, bucket.id, graph).buckets
        assert found.peak_bytes is not None
        for kind, nbytes in found.peak_bytes.items():
            held[kind] = held.get(kind, 0) + nbytes
    kinds = (Kind.PARAM, Kind.GATHERED, Kind.MOMENT, Kind.GRAD)
    bucketed = {param for bucket in made.buckets for param in bucket.params}
    assert bucketed == {storage.id for storage in graph.storages if storage.kind is Kind.PARAM}
    assert held == {kind: peak.by_kind[kind] for kind in kinds if peak.by_kind.get(kind)}


@given(planned_graphs())
def test_every_action_on_a_bucket_is_listed_once(planned: tuple[StepGraph, Plan]) -> None:
    _, made = planned
    told = [move.verb for bucket in made.buckets for move in answer(made, bucket.id).buckets[0].moves]
    actions = [action.verb for action in made.schedules[0].actions if action.verb not in (Verb.RUN, Verb.WAIT)]
    assert sorted(told) == sorted(actions)


def test_moves_say_how_far_ahead() -> None:
    made = plan(TIGHT, "greedy")
    actions = made.schedules[0].actions
    for bucket in made.buckets:
        for move in answer(made, bucket.id).buckets[0].moves:
            if move.verb is Verb.GATHER:
                runs = [str(action.target) for action in actions if action.verb is Verb.RUN]
                start = next(
                    i for i, a in enumerate(actions) if a.verb is Verb.GATHER and a.target == BucketRef(bucket.id)
                )
                run_before = sum(action.verb is Verb.RUN for action in actions[:start])
                assert runs[run_before + move.num_ahead] == move.region
    moves = [answer(made, bucket.id).buckets[0].moves for bucket in made.buckets]
    assert any(move.num_ahead == 2 for own in moves for move in own)


def test_a_gather_right_before_its_use_is_none_ahead() -> None:
    moves = answer(PLAN, "b0").buckets[0].moves
    assert moves[0] == Move(verb=Verb.GATHER, region=PLAN.regions[0].id, num_ahead=0)
    assert f"gather for {PLAN.regions[0].id}, right before it" in explain(PLAN, "b0")


def test_a_bucket_lists_its_choices_rejected_for_others() -> None:
    decision = replace(PLAN.decisions[0], rejected=("b1 param host (saves 3.0 KiB, costs 1 ms)", "b10 param host"))
    text = explain(replace(PLAN, decisions=(decision,)), "b1")
    assert "b1 param host (saves 3.0 KiB, costs 1 ms), when b0 got param host" in text
    assert "b10" not in text


def test_a_region_lists_actions_around_it_and_its_live_bytes() -> None:
    region = PLAN.regions[0]
    text = explain(PLAN, region.id, GRAPH)
    assert text.startswith(f"{region.id}  region of the forward, {region.first} to {region.last}, ")
    assert "reads   b0; 1 of them from the host" in text
    assert "before  gather b0, wait b0" in text
    assert "after   release b0" in text
    most = max(answer(PLAN, region.id, GRAPH).region.peak_bytes for region in PLAN.regions)
    assert most <= PLAN.prediction.device_peak_bytes
    assert "live at most" not in explain(PLAN, region.id)


@pytest.mark.parametrize("search", [lambda problem: plan(problem, "greedy"), best_of_all])
def test_the_plan_is_explained_in_figures(search: Callable[[Problem], Plan]) -> None:
    problem = replace(TIGHT, savings=frozenset({Saving.KEEP}))
    made = search(problem)
    gib_bound_s = made.prediction.step_s - 0.12
    made = replace(made, bound_s=1e-5, binding=("device memory at bwd.mm_14",), gib_bound_s=gib_bound_s)
    text = explain(made)
    assert text.startswith(f"plan t on 1 x cuda, chosen by {made.planner}\n")
    assert format_bytes(made.budget_bytes) in text
    assert f"at {made.prediction.device_peak_at}" in text
    assert f"another plan saves {made.gap:.2%} at most, on 50% of the data sheet (35-80)\n" in text
    assert "data sheet" not in explain(replace(made, peak_share=None))
    assert "device memory at bwd.mm_14" in text
    assert "saves at most 120 ms per step\n" in text
    assert "saves at most 120 ms per step, with the loss in 4 chunks" in explain(replace(made, loss_chunks=4))
    found = answer(made).plan
    assert found is not None
    assert sum(found.num_buckets.values()) == len(made.buckets)
    assert sum(found.counts.values()) == len(made.schedules[0].actions)
    assert found.num_moved == sum(Tier.HOST in (placement.param, placement.optim) for placement in made.placements)


def test_a_plan_without_a_bound_says_so() -> None:
    assert "not proved" in explain(PLAN)


def test_another_graph_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="another graph"):
        explain(PLAN, "b0", chain_of(2))


def test_an_unknown_subject_is_refused() -> None:
    with pytest.raises(UnknownSubject, match="Did you mean"):
        explain(PLAN, "b9")


@pytest.mark.parametrize("subject", ["", "b0", "fwd.0", "h"])
def test_an_answer_is_json(subject: str) -> None:
    found = json.loads(json.dumps(asdict(answer(PLAN, subject, GRAPH)), allow_nan=False))
    assert found["subject"] == subject
    assert len(found["buckets"]) == {"": 0, "b0": 1, "fwd.0": 0, "h": 4}[subject]


def test_updates_are_explained_with_group_and_streaming() -> None:
    first = next(placement for placement in PLAN.placements if placement.optim is Tier.HOST)
    streamed = tuple(replace(home, streamed=True) if home == first else home for home in PLAN.placements)
    grouped = tuple(replace(bucket, group=2) if bucket.id == first.bucket else bucket for bucket in PLAN.buckets)
    made = replace(PLAN, placements=streamed, buckets=grouped)
    assert "streamed through the device" not in explain(PLAN)
    assert f"{PLAN.update}, 1 bucket streamed through the device" in explain(made)
    assert "param group 2" in explain(made, first.bucket)
    assert "with its state streamed both ways" in explain(made, first.bucket)


# ----------------------------------------------------------------------------------------------------------------------
# `diff`: everything that is compared and nothing else, for two plans and for a plan beside a record.


TIGHT_PLAN = plan(tight_problem(0.3), "greedy")
WIDE = plan(problem_of(chain_of(6)), "greedy")


def record_of(made: Plan) -> Record:
    """Return a record of a step that went exactly as planned."""
    return Record(
        origin=Origin.MEASURED,
        step_s=made.prediction.step_s,
        device_peak_bytes=made.prediction.device_peak_bytes,
        host_peak_bytes=made.prediction.host_peak_bytes,
        counts=dict(Counter(action.verb.value for action in made.schedules[0].actions)),
    )


@given(planned_graphs())
def test_equal_plans_say_so(planned: tuple[StepGraph, Plan]) -> None:
    _, made = planned
    found = plan_diff(made, replace(made))
    assert (found.is_equal, found.header, found.buckets, found.activations, found.counts) == (True, (), (), (), ())
    assert diff(made, replace(made)) == "the plans are equal"


def test_a_plan_under_another_budget_lists_other_moves() -> None:
    found = plan_diff(TIGHT_PLAN, WIDE)
    told = {change.what: (change.first, change.second) for change in (*found.header, *found.buckets, *found.counts)}
    assert told["budget_bytes"] == (TIGHT_PLAN.budget_bytes, WIDE.budget_bytes)
    assert told["gather"] == (Counter(action.verb for action in TIGHT_PLAN.schedules[0].actions)["gather"], 0)
    assert "machine" not in told
    assert not found.is_equal
    moved = {p.bucket for p in TIGHT_PLAN.placements if p.param is Tier.HOST}
    assert moved == {what.removesuffix(" param") for what in told if what.endswith(" param")}
    assert moved


def test_the_table_has_units_and_a_row_per_change() -> None:
    lines = diff(TIGHT_PLAN, replace(TIGHT_PLAN, budget_bytes=TIGHT_PLAN.budget_bytes + 2048, bound_s=0.5)).splitlines()
    assert lines[0] == "the plans differ"
    rows = [line.split() for line in lines[3:]]
    assert [row[0] for row in rows] == ["budget_bytes", "bound_s"]
    assert rows[0][2] == "KiB"
    assert rows[1] == ["bound_s", "none", "500", "ms"]


def test_missing_buckets_and_other_parameters_are_listed() -> None:
    fewer = replace(TIGHT_PLAN, buckets=TIGHT_PLAN.buckets[:-1], placements=TIGHT_PLAN.placements[:-1])
    (change,) = plan_diff(TIGHT_PLAN, fewer).buckets
    assert change == Change(what=TIGHT_PLAN.buckets[-1].id, first="present", second="absent")
    renamed = replace(TIGHT_PLAN.buckets[0], params=("other",))
    found = plan_diff(TIGHT_PLAN, replace(TIGHT_PLAN, buckets=(renamed, *TIGHT_PLAN.buckets[1:])))
    assert found.buckets == (Change(what="b0 params", first=" ".join(TIGHT_PLAN.buckets[0].params), second="other"),)


def of_groups(*savings: Saving) -> Plan:
    """Return a plan with a group per saving, of 1, 2, ... bytes."""
    groups = (
        Activations(id=GroupId(f"h.{n}.matmul"), storages=(StorageId(f"s{n}"),), nbytes=n + 1, saving=saving)
        for n, saving in enumerate(savings)
    )
    return replace(TIGHT_PLAN, activations=tuple(groups))


def test_groups_with_other_treatment_are_listed_with_bytes() -> None:
    first = of_groups(Saving.KEEP, Saving.RECOMPUTE, Saving.OFFLOAD, Saving.KEEP)
    second = of_groups(Saving.KEEP, Saving.OFFLOAD, Saving.OFFLOAD, Saving.RECOMPUTE, Saving.RECOMPUTE, Saving.KEEP)
    assert plan_diff(first, second).activations == (
        Change(what="activations_kept_bytes", first=5, second=7),
        Change(what="activations_recomputed_bytes", first=2, second=9),
        Change(what="activations_offloaded_bytes", first=3, second=5),
        Change(what="h.1.matmul", first="recompute", second="offload"),
        Change(what="h.3.matmul", first="keep", second="recompute"),
        Change(what="h.4.matmul", first="not listed", second="recompute"),
    )
    rows = [line.split() for line in diff(first, second).splitlines()[3:]]
    assert ["activations_kept_bytes", "5", "B", "7", "B"] in rows
    assert ["h.1.matmul", "recompute", "offload"] in rows


def test_a_plan_that_keeps_all_activations_is_compared_with_others() -> None:
    """What is kept in both is no difference, although only one of the plans lists it."""
    assert plan_diff(TIGHT_PLAN, of_groups(Saving.KEEP, Saving.OFFLOAD)).activations == (
        Change(what="activations_kept_bytes", first="all", second=1),
        Change(what="activations_offloaded_bytes", first=0, second=2),
        Change(what="h.1.matmul", first="not listed", second="offload"),
    )


def test_plans_with_only_unlisted_differences_are_not_called_equal() -> None:
    other = replace(TIGHT_PLAN, decisions=())
    assert not plan_diff(TIGHT_PLAN, other).is_equal
    assert "have the same placements and counts" in diff(TIGHT_PLAN, other)


def test_a_step_that_went_as_planned_has_nothing_flagged() -> None:
    found = run_diff(TIGHT_PLAN, record_of(TIGHT_PLAN))
    assert [one.what for one in found.comparisons][:3] == ["step_s", "device_peak_bytes", "host_peak_bytes"]
    assert {"gather", "release", "reduce", "offload"} <= {one.what for one in found.comparisons}
    assert not any(one.is_off for one in found.comparisons)
    assert all(one.ratio == 1.0 for one in found.comparisons)
    assert diff(TIGHT_PLAN, record_of(TIGHT_PLAN)).startswith("as planned\n")


def test_figures_off_by_a_tenth_and_all_other_counts_are_flagged() -> None:
    went = record_of(TIGHT_PLAN)
    went = replace(
        went,
        step_s=1.11 * went.step_s,
        device_peak_bytes=int(1.09 * went.device_peak_bytes),
        host_peak_bytes=int(0.85 * went.host_peak_bytes),
        counts={**went.counts, "gather": went.counts["gather"] + 1, "prefetch": 2},
    )
    found = {one.what: one for one in run_diff(TIGHT_PLAN, went).comparisons}
    assert {what for what, one in found.items() if one.is_off} == {"step_s", "host_peak_bytes", "gather", "prefetch"}
    assert found["prefetch"].ratio is None
    text = diff(TIGHT_PLAN, went)
    assert text.startswith("4 of 8 figures are off\n")
    assert text.count("<-- off") == 4
    assert "measured" in text


def test_a_verb_that_was_planned_and_never_ran_is_flagged() -> None:
    found = {one.what: one for one in run_diff(TIGHT_PLAN, replace(record_of(TIGHT_PLAN), counts={})).comparisons}
    assert found["gather"].measured == 0
    assert found["gather"].is_off


def test_differences_are_json() -> None:
    assert json.loads(json.dumps(asdict(plan_diff(TIGHT_PLAN, WIDE)), allow_nan=False))["is_equal"] is False
    assert (
        json.loads(json.dumps(asdict(run_diff(TIGHT_PLAN, record_of(WIDE))), allow_nan=False))["origin"] == "measured"
    )


def test_differences_of_updates_are_listed() -> None:
    first = next(placement for placement in TIGHT_PLAN.placements if placement.optim is Tier.HOST)
    streamed = tuple(replace(home, streamed=True) if home == first else home for home in TIGHT_PLAN.placements)
    others = tuple(
        replace(one, group=3, state_nbytes=0) if one.id == first.bucket else one for one in TIGHT_PLAN.buckets
    )
    other = replace(TIGHT_PLAN, placements=streamed, buckets=others, update=Update.IN_BACKWARD, loss_chunks=4)
    found = plan_diff(TIGHT_PLAN, other)
    told = {change.what: (change.first, change.second) for change in (*found.header, *found.buckets)}
    state_bytes = next(bucket.state_nbytes for bucket in TIGHT_PLAN.buckets if bucket.id == first.bucket)
    assert told == {
        "update": ("across_steps", "in_backward"),
        "loss_chunks": (1, 4),
        f"{first.bucket} streamed": (False, True),
        f"{first.bucket} group": (0, 3),
        f"{first.bucket} state_bytes": (state_bytes, 0),
    }
    assert plan_from_json(plan_to_json(other)) == other


# ----------------------------------------------------------------------------------------------------------------------
# What reports say of activations: every repeated op, every copy and every byte is told once.


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


MADE_PLAN = made_plan()
REGIONS = {region.id: region for region in MADE_PLAN.regions}


def region_of(op: str) -> RegionId:
    """Return the region that runs `op`."""
    order = [other.id for other in as_run(LAYERS, GROUPS).ops]
    spans = {r.id: (order.index(r.first), order.index(r.last)) for r in MADE_PLAN.regions}
    return next(name for name, (first, last) in spans.items() if first <= order.index(op) <= last)


def test_repeated_ops_are_listed_with_their_region() -> None:
    assert recomputed(MADE_PLAN, LAYERS) == (
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
    assert saving_answers(MADE_PLAN) == (
        SavingAnswer(saving=Saving.KEEP, nbytes=12, num_layers=1),
        SavingAnswer(saving=Saving.RECOMPUTE, nbytes=48, num_layers=2),
        SavingAnswer(saving=Saving.OFFLOAD, nbytes=64, num_layers=1),
    )
    assert savings_text(MADE_PLAN) == "12 B kept, 48 B recomputed, 64 B offloaded"


@pytest.mark.parametrize(("name", "layer"), [("transformer.h.3.matmul", "transformer.h.3"), ("g0", "g0")])
def test_the_layer_is_the_name_before_the_class(name: str, layer: str) -> None:
    assert layer_of_group(GroupId(name)) == layer


def test_a_layer_lists_its_groups_reasons_and_rejected_choices() -> None:
    lines = explain(MADE_PLAN, "h.0", LAYERS).splitlines()
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
    text = explain(MADE_PLAN, "h.1")
    assert "  fixed  16 B recomputed\n" in text
    assert "saved for" not in text
    assert "  input  8 B kept; saved for the ops that run again\n" in explain(MADE_PLAN, "h.1", LAYERS)
    assert answer(MADE_PLAN, "h.1").layers[0].groups[0].again is None


def test_a_group_is_explained_alone_and_without_decisions() -> None:
    text = explain(MADE_PLAN, "h.0.pointwise", LAYERS)
    assert text.startswith("h.0  activations of 1 of 2 groups, 32 B\n")
    assert "matmul  " not in text
    assert "no decision of this plan names them" in explain(MADE_PLAN, "h.1")
    assert "they fit on the device" in explain(MADE_PLAN, "h.1.kept")


def test_a_region_lists_recomputed_offloaded_and_prefetched_groups() -> None:
    back = explain(MADE_PLAN, region_of("bwd.re_gelu_0"), LAYERS)
    assert "  prefetched  h.0.matmul (64 B)\n" in back
    assert "  recomputes  h.0.pointwise: 1 op\n" in back
    left = explain(MADE_PLAN, region_of("fwd.gelu_0"))
    assert "  offloads  h.0.matmul (64 B)\n" in left
    assert "recomputes" not in left
    assert "prefetched" not in left


def test_the_plan_counts_layers_without_their_reasons() -> None:
    text = explain(MADE_PLAN)
    assert "  activations  12 B kept, in 1 layer\n               48 B recomputed, in 2 layers\n" in text
    assert "  moved        1 bucket and 1 layer have decisions of their own" in text
    assert WHY.because not in text
    assert "no decision of this plan: its home is that of" in explain(MADE_PLAN, "b1")


@pytest.mark.parametrize("subject", ["", "h.0", "h.1.fixed", "bwd.0"])
def test_an_answer_about_activations_is_json(subject: str) -> None:
    found = json.loads(json.dumps(asdict(answer(MADE_PLAN, subject, LAYERS)), allow_nan=False))
    assert len(found["layers"]) == subject.startswith("h.")
    if subject == "h.1.fixed":
        (one,) = found["layers"][0]["groups"]
        assert (one["group"]["saving"], one["again"][0]["num_ops"], one["is_saved"]) == ("recompute", 1, True)


# ----------------------------------------------------------------------------------------------------------------------
# `layers_table`: every byte of training state and every second of compute is in one row.


@given(problems(training=True))
@settings(max_examples=30)
def test_every_byte_and_every_second_is_in_one_row(problem: Problem) -> None:
    ops = problem.graph.ops
    graph = replace(problem.graph, ops=(replace(ops[0], module=""), *ops[1:]))
    problem = replace(problem, graph=graph)
    made = plan(problem, "greedy")
    seconds = OpSeconds(graph, problem.cluster).of(made.activations, laps_of(made))
    rows = layer_rows(Survey(made, graph), seconds)
    held = {param for bucket in made.buckets for param in bucket.params}
    nbytes = sum(s.nbytes for s in graph.storages if s.kind is Kind.PARAM and s.id in held)
    assert sum(sum(row.param_bytes.values()) for row in rows) == nbytes
    state_bytes = sum(bucket.state_nbytes for bucket in made.buckets)
    assert abs(sum(sum(row.state_bytes.values()) for row in rows) - state_bytes) <= len(held)
    assert sum(row.compute_s for row in rows) == pytest.approx(sum(seconds))


@given(mixed_plans())
@settings(max_examples=30)
def test_activations_are_summed_by_layer_and_treatment(planned: tuple[StepGraph, Plan]) -> None:
    graph, made = planned
    survey = Survey(made, graph)
    assert survey.held is not None
    rows = layer_rows(survey, [0.0] * len(survey.held.timeline.ops))
    assert sum(sum(row.saved_bytes.values()) for row in rows) == sum(group.nbytes for group in made.activations)


def test_a_row_says_where_a_layer_is_and_why() -> None:
    made, problem = tight()
    seconds = OpSeconds(problem.graph, problem.cluster).of(made.activations, laps_of(made))
    rows = {row.layer: row for row in layer_rows(Survey(made, problem.graph), seconds)}
    moved = [row for row in rows.values() if row.param_bytes.get(Tier.HOST)]
    assert moved
    assert all(row.num_gathers and row.decisions for row in moved)
    subjects = {decision.subject for row in rows.values() for decision in row.decisions}
    assert subjects <= {decision.subject for decision in made.decisions}
    assert sum(sum(row.param_bytes.values()) for row in rows.values()) == param_bytes(problem.graph)


@pytest.mark.parametrize(
    ("param", "layer"),
    [("model.layers.3.mlp.up.weight", "model.layers.3"), ("lm_head.weight", "lm_head"), ("scale", "scale")],
)
def test_a_parameter_outside_of_layers_has_the_row_of_its_module(param: str, layer: str) -> None:
    assert layer_of_param(param) == layer
