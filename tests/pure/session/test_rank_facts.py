"""What ranks tell each other before a step, and how a plan and a graph that do not match differ."""

import pickle
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import PlanFileError, PlanMismatch
from elixir_compile.base.options import Fractions
from elixir_compile.ir import Calls, Kind, Phase, Saving, Shards, StepGraph, Update
from elixir_compile.ir.kinds import Batched
from elixir_compile.ir.share import equal_shares
from elixir_compile.search import Problem, plan
from elixir_compile.session.rank_facts import (
    Divide,
    RankFacts,
    classes_of,
    differences,
    digest_of,
    facts_from_text,
    facts_of,
    facts_to_text,
    for_all,
    homes_of,
    leader_of,
    lines_of,
    ops_of,
    plan_digest,
)
from elixir_compile.step.legality import require_same_graph
from tests.pure.problems import chain_of, problem_of
from tests.pure.step.test_legality import GELU_PLAN
from tests.pure.steps import GELU, parse_graph
from tests.pure.strategies import Layer, chain, symbolic, with_facts

# ----------------------------------------------------------------------------------------------------------------------
# `rank_facts`: what must be equal is told line by line, and one problem holds for all ranks.


PROBLEM = problem_of(chain_of(3))
PLAN = plan(PROBLEM, "greedy")
SIZES = [field.name for field in fields(RankFacts) if field.name.endswith("bytes")]
FACTS = st.builds(
    RankFacts,
    digest=st.just("d"),
    ops_digest=st.just("o"),
    division_digest=st.just("v"),
    batch=st.integers(1, 64),
    device=st.just("d"),
    flops_per_s=st.floats(0.0, 1e15),
    homes_digest=st.just("h"),
    share=st.just(""),
    **dict.fromkeys(SIZES, st.integers(0, 10)),
)


def with_batch(act_numel: int) -> Problem:
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 400),), frozen=False, act_numel=act_numel) for i in range(3)]
    return replace(PROBLEM, graph=chain(layers))


@given(FACTS)
def test_facts_are_text_that_reads_back(facts: RankFacts) -> None:
    assert facts_from_text(facts_to_text(facts)) == facts


def test_facts_of_another_form_are_refused() -> None:
    text = facts_to_text(facts_of(PROBLEM, (), ()))
    with pytest.raises(PlanFileError, match="base_bytes: expected a value, got 'nothing"):
        facts_from_text(text.replace("base_bytes", "floor_bytes", 1).replace('"floor_bytes": 0,', ""))


@given(st.lists(FACTS, min_size=1, max_size=5))
def test_the_joint_problem_is_within_the_limits_of_each_rank(facts: list[RankFacts]) -> None:
    """Whatever is within its budgets beside its floors is within those of each rank."""
    made = for_all(PROBLEM, facts)
    for name in ("budget_bytes", "host_budget_bytes"):
        assert getattr(made, name) == min(getattr(fact, name) for fact in facts)
    for name in ("base_bytes", "host_base_bytes", "between_bytes", "after_bytes"):
        assert getattr(made, name) == max(getattr(fact, name) for fact in facts)
    unchanged = {name: getattr(PROBLEM, name) for name in ("budget_bytes", "host_budget_bytes")}
    floors = dict.fromkeys(("base_bytes", "host_base_bytes", "between_bytes", "after_bytes"), 0)
    assert replace(made, **unchanged, **floors, common_rows=None) == PROBLEM


def test_a_number_of_micro_batches_divides_the_batch_of_each_rank() -> None:
    facts = [replace(facts_of(PROBLEM, (), ()), batch=rows) for rows in (12, 8, 16)]
    assert for_all(PROBLEM, facts).common_rows == 4
    assert for_all(PROBLEM, [*facts, replace(facts[0], batch=1)]).common_rows == 1  # dynamic sizes


def test_ranks_that_cannot_divide_the_same_ops_are_not_divided() -> None:
    storages = tuple(
        replace(storage, batched=Batched.EACH) if storage.kind is Kind.TEMP else storage
        for storage in PROBLEM.graph.storages
    )
    divided = replace(PROBLEM.graph, batch=8, storages=storages)
    mixing = replace(divided, ops=(replace(divided.ops[0], mixes="a mean over the batch"), *divided.ops[1:]))
    plain, other, odd = (
        facts_of(replace(PROBLEM, graph=graph), (), ops_of(graph))
        for graph in (replace(PROBLEM.graph, batch=8), divided, mixing)
    )
    assert for_all(PROBLEM, [other, other]).common_rows == 8
    assert for_all(PROBLEM, [plain, other]).common_rows == for_all(PROBLEM, [odd, other]).common_rows == 1


ALIKE = replace(facts_of(PROBLEM, (), ()), budget_bytes=100, base_bytes=0, host_budget_bytes=100, flops_per_s=100.0)


@pytest.mark.parametrize(
    ("change", "classes"),
    [
        ({"budget_bytes": 91}, ((0, 1, 2),)),
        ({"budget_bytes": 60}, ((0, 2), (1,))),
        ({"base_bytes": 30}, ((0, 2), (1,))),
        ({"host_budget_bytes": 60}, ((0, 2), (1,))),
        ({"flops_per_s": 92.0}, ((0, 1, 2),)),
        ({"flops_per_s": 30.0}, ((0, 2), (1,))),
        ({"device": "another"}, ((0, 2), (1,))),
        ({"homes_digest": "another"}, ((0, 2), (1,))),
        ({"share": "2 rows, 0.5 of the state"}, ((0, 2), (1,))),
        ({"budget_bytes": 60, "ops_digest": "another"}, ((0, 1, 2),)),
        ({"budget_bytes": 10**9, "storage_bytes": 10**6}, ((0, 2), (1,))),
    ],
)
def test_ranks_within_a_tenth_of_each_other_are_one_class(
    change: dict[str, Any], classes: tuple[tuple[int, ...], ...]
) -> None:
    assert classes_of([ALIKE, replace(ALIKE, **change), ALIKE]) == classes


def test_ranks_with_more_memory_than_any_plan_takes_are_one_class() -> None:
    ample = replace(ALIKE, budget_bytes=10**9, host_budget_bytes=10**9)
    other = replace(ample, budget_bytes=10**8, host_budget_bytes=10**10)
    assert classes_of([ample, other]) == ((0, 1),)
    assert classes_of([ample, replace(other, budget_bytes=100)]) == ((0,), (1,))


def test_a_bucket_that_is_whole_on_each_rank_may_be_released_on_some() -> None:
    """Only gathers of shards are collectives; whether a copy of the rank's own stays is its home."""
    for shards, is_legal in (((PLAN.buckets[0].numel,), True), ((201, 200), False)):
        bucket = replace(PLAN.buckets[0], shard_numels=Shards.of(shards))
        kept = replace(PLAN.placements[0], resident=True)
        both = [
            replace(PROBLEM, buckets=(bucket,), placements=(placement,))
            for placement in (kept, replace(kept, resident=False))
        ]
        assert (lines_of(both[0], {}) == lines_of(both[1], {})) == is_legal
        assert homes_of(both[0]) != homes_of(both[1])


def test_shares_must_be_equal_on_all_ranks() -> None:
    shares = equal_shares(2, 8)
    told = differences(lines_of(PROBLEM, {}), lines_of(replace(PROBLEM, shares=shares), {}), "rank 0", "rank 1")
    assert told[0] == "share of rank 0, 4 rows, 0.5 of the state: only on rank 1"


@given(st.lists(FACTS, min_size=1, max_size=5))
def test_the_first_of_the_largest_leads(facts: list[RankFacts]) -> None:
    place = leader_of(facts)
    sizes = [fact.storage_bytes for fact in facts]
    assert all(size < sizes[place] for size in sizes[:place])
    assert all(size <= sizes[place] for size in sizes)


def test_bytes_of_all_storages_are_counted() -> None:
    facts = facts_of(PROBLEM, (), ())
    assert facts.storage_bytes == sum(storage.nbytes for storage in PROBLEM.graph.storages)
    assert facts_of(with_batch(65), (), ()).storage_bytes > facts.storage_bytes


def test_a_batch_may_differ() -> None:
    assert lines_of(with_batch(65), {}) == lines_of(PROBLEM, {})
    assert ops_of(with_batch(65).graph) == ops_of(PROBLEM.graph)


def test_different_ops_are_listed() -> None:
    first = PROBLEM.graph.ops[0]
    graph = replace(PROBLEM.graph, ops=(replace(first, target="aten.bmm.default"), *PROBLEM.graph.ops[1:]))
    assert lines_of(replace(PROBLEM, graph=graph), {}) == lines_of(PROBLEM, {})
    told = differences(ops_of(PROBLEM.graph), ops_of(graph), "a", "b")
    assert [line.rpartition(": ")[2] for line in told] == ["only on a", "only on b"]
    assert told[1].startswith(f"op {first.id}, aten.bmm.default, forward, ")


def other_problems() -> dict[str, Problem]:
    """Problems that no plan holds for that holds for PROBLEM, by a part of the line that says so."""
    storages = PROBLEM.graph.storages
    larger = [replace(s, nbytes=s.nbytes + 4) if s.kind is Kind.PARAM else s for s in storages]
    bfloat16 = [replace(s, dtype="bfloat16") if s.id == "p0" else s for s in storages]
    return {
        "parameter p0, float32, 1604 bytes": replace(PROBLEM, graph=replace(PROBLEM.graph, storages=tuple(larger))),
        "parameter p0, bfloat16": replace(PROBLEM, graph=replace(PROBLEM.graph, storages=tuple(bfloat16))),
        "not trained": replace(PROBLEM, params={}),
        "in group 1": replace(PROBLEM, params=with_facts(PROBLEM.params, group=dict.fromkeys(PROBLEM.params, 1))),
        "update = in_backward": replace(PROBLEM, update=Update.IN_BACKWARD),
        "activations = keep": replace(PROBLEM, savings=frozenset({Saving.KEEP})),
        "placement policy = static, shard_param_frac 1.0": replace(PROBLEM, fractions=Fractions()),
        "calls of a step = 4 calls, 2 outstanding": replace(PROBLEM, calls=Calls(num=4, outstanding=2)),
        "hybrid optimizer = False": replace(PROBLEM, hybrid=False),
        "disk = True": replace(PROBLEM, disk=True),
        "bucket b0 of": replace(PROBLEM, buckets=PLAN.buckets, placements=PLAN.placements),
    }


@pytest.mark.parametrize("part", list(other_problems()))
def test_illegal_differences_between_ranks_are_listed(part: str) -> None:
    ours, others = lines_of(PROBLEM, {}), lines_of(other_problems()[part], {})
    assert digest_of(ours) != digest_of(others)
    told = differences(ours, others, "rank 0", "rank 1")
    assert any(part in line and line.endswith("only on rank 1") for line in told)


def test_different_settings_are_listed_first() -> None:
    told = differences(lines_of(PROBLEM, {"planner": "milp"}), lines_of(PROBLEM, {"planner": "greedy"}), "a", "b")
    assert told == ["planner = milp: only on a", "planner = greedy: only on b"]


def test_the_first_difference_of_reordered_lines_is_named() -> None:
    assert differences(["x", "y", "z"], ["x", "z", "y"], "a", "b") == ["y on a, where b has z"]


@pytest.mark.parametrize(
    ("said", "odd", "usual"),
    [("aaa", (), 0), ("aba", (1,), 0), ("abb", (0,), 1), ("ab", (1,), 0), ("ba", (1,), 0), ("abc", (1, 2), 0)],
)
def test_the_odd_ranks_differ_from_the_majority(said: str, odd: tuple[int, ...], usual: int) -> None:
    assert Divide.of(said) == Divide(odd=odd, usual=usual)


def test_the_digest_of_a_plan_depends_on_its_actions_only() -> None:
    prediction = replace(PLAN.prediction, step_s=9.0, device_peak_bytes=1)
    assert plan_digest(replace(PLAN, name="other", graph="other", prediction=prediction)) == plan_digest(PLAN)
    schedule = replace(PLAN.schedules[0], actions=PLAN.schedules[0].actions[1:])
    bucket = replace(PLAN.buckets[0], shard_numels=Shards.of((1,)))
    changed = [
        replace(PLAN, schedules=(schedule,)),
        replace(PLAN, buckets=(bucket, *PLAN.buckets[1:])),
        replace(PLAN, placements=(replace(PLAN.placements[0], resident=False), *PLAN.placements[1:])),
        replace(PLAN, regions=PLAN.regions[1:]),
        replace(PLAN, update=Update.ACROSS_STEPS),
        replace(PLAN, loss_chunks=2),
    ]
    assert len({plan_digest(other) for other in (PLAN, *changed)}) == 1 + len(changed)


# ----------------------------------------------------------------------------------------------------------------------
# `step.legality`: a plan for another graph is refused with both models and their first difference.


def refusal(graph: StepGraph) -> PlanMismatch:
    with pytest.raises(PlanMismatch) as caught:
        require_same_graph(GELU_PLAN, graph)
    return caught.value


def test_the_graph_of_the_plan_is_taken() -> None:
    require_same_graph(GELU_PLAN, GELU)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (r"\bw1\b", "w9", "The plan has no parameter w9, which this model reads"),
        (r"(w1 +param +)float32", r"\1bfloat16", "Parameter w1 was float32 and is bfloat16 here"),
        (r"(w1 +param +float32 +)40", r"\g<1>80", "The parameters w0, w1 had 80 B and have 120 B here"),
        (r"grad( +float32 +40) +of w\d", r"temp\1", "Parameter w0 was trained and is frozen here"),
        (
            r"\b(h +saved +float32 +)16",
            r"\g<1>32",
            "The activations acts.h had 16 B and have 32 B here, so the shape or the dtype of the batch differs",
        ),
        (r"fwd\.gelu aten\.gelu", "fwd.silu aten.silu", "This model has no op fwd.gelu, which the plan has"),
        (
            r"(x +input +float32 +)8",
            r"\g<1>24",
            "The parameters and ops that the plan names are all here, so the shape of the batch or the code differs",
        ),
    ],
)
def test_the_first_difference_is_named(old: str, new: str, sentence: str) -> None:
    error = refusal(parse_graph(re.sub(old, new, str(GELU))))
    assert error.difference == sentence
    assert f"{sentence}. Use the model, batch shape, dtypes" in str(error)


def test_a_step_without_backward_is_told_from_a_training_step() -> None:
    ops = tuple(op for op in GELU.ops if op.phase is Phase.FORWARD)
    difference = "The step of the plan has a backward, and this step has no backward"
    assert refusal(replace(GELU, ops=ops)).difference == difference


def test_symbolic_sizes_are_told_from_numbers() -> None:
    difference = "The plan has no symbols, and this graph has the symbols s0 = 3"
    assert refusal(symbolic(GELU)).difference == difference


def test_both_models_are_described() -> None:
    error = refusal(parse_graph(re.sub(r"\bw1\b", "w9", str(replace(GELU, name="Net")))))
    assert (error.expected, error.got) == (GELU_PLAN.graph, error.args[2])
    assert error.expected_model == "model chain, 2 parameters with 80 B"
    assert error.got_model == "model Net, 2 parameters with 80 B, inputs with 8 B"
    assert f"it was made for {GELU_PLAN.graph} ({error.expected_model}), here is {error.got} (" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
