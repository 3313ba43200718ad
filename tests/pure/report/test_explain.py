"""`explain` and `answer`: what they say is what the plan says, for plans of every planner."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given

from elixir_compile.base.errors import PlanMismatch, UnknownSubject
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Kind, Plan, Saving, StepGraph, Tier, Verb
from elixir_compile.ir.schedule import BucketRef
from elixir_compile.search import Problem, plan
from elixir_compile.step import plan_timeline
from elixir_compile.tools.report.explain import answer, explain
from elixir_compile.tools.report.tables import Move
from tests.pure.exhaustive import best_of_all
from tests.pure.plans import bucket_of, make_plan, planned_graphs
from tests.pure.problems import tight_problem
from tests.pure.search.test_planner import chain_of
from tests.pure.strategies import Layer, chain

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
    assert f"another plan saves {made.gap:.2%} at most" in text
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
