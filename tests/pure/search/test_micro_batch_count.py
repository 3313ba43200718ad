"""The number of micro-batches is chosen together with the plan: as many as memory asks for, no more than pay."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.base.options import Options, Planner
from elixir_compile.base.units import MIB
from elixir_compile.ir import Op, OpId, Phase, Plan, StepGraph, Storage, StorageId
from elixir_compile.ir.kinds import Batched, Kind
from elixir_compile.search import Problem, plan
from elixir_compile.search.joint import variants as micro_batches
from elixir_compile.search.joint.joint_budget import GraphRequest, plan_jointly
from elixir_compile.search.joint.variants import MICRO_BATCHES, candidates, is_pressed, plan_as_asked
from tests.pure.analysis.test_micro_batches import WIDE
from tests.pure.collectives import collectives
from tests.pure.memory_walk import walk_memory
from tests.pure.search.test_planner import CLUSTERS, problem_of
from tests.pure.strategies import step_graphs

TRAINED = replace(
    WIDE,
    ops=(
        *WIDE.ops,
        Op(
            id=OpId("bwd.d"),
            target="aten.d",
            phase=Phase.BACKWARD,
            reads=(StorageId("x"), StorageId("w")),
            writes=(StorageId("w.grad"),),
            module="embed",
        ),
        Op(
            id=OpId("update"),
            target="update",
            phase=Phase.UPDATE,
            reads=(StorageId("w"), StorageId("w.grad")),
            writes=(),
        ),
    ),
    storages=(
        *WIDE.storages,
        Storage(id=StorageId("w"), nbytes=64, kind=Kind.PARAM, dtype="float32"),
        Storage(
            id=StorageId("w.grad"),
            nbytes=64,
            kind=Kind.GRAD,
            dtype="float32",
            of=StorageId("w"),
            batched=Batched.SUM,
        ),
    ),
)
"""`WIDE` with a parameter of 64 bytes, its gradient and an update."""


def tight(budget_mib: float, micro_batches: int = 1) -> Plan:
    """Return the plan of `TRAINED` in `micro_batches`, or, if they are 1, in as many as the search chooses."""
    budget_bytes = int(budget_mib * MIB) + 4096
    problem = problem_of(TRAINED, CLUSTERS["cuda"], budget_bytes=budget_bytes, micro_batches=micro_batches)
    return plan_as_asked(problem, Options(micro_batches="auto"))


def numbers(made: Plan) -> set[int]:
    return {region.micro_batches for region in made.regions}


def test_a_step_that_fits_as_it_is_runs_on_the_whole_batch():
    made = tight(448)
    assert numbers(made) == {1}
    assert all(decision.subject != MICRO_BATCHES for decision in made.decisions)


@pytest.mark.parametrize(("budget_mib", "number"), [(400, 2), (272, 4), (260, 8), (232, 8), (230, 16)])
def test_the_fewest_micro_batches_that_fit_are_chosen_and_the_decision_says_why(budget_mib: int, number: int):
    made = tight(budget_mib)
    assert numbers(made) == {number}
    (decision,) = (decision for decision in made.decisions if decision.subject == MICRO_BATCHES)
    assert decision.choice == f"{number} of {64 // number} rows"
    assert decision.because == "the whole batch at once needs 448.0 MiB"
    assert [text.partition(":")[0] for text in decision.rejected] == [
        str(other) for other in (2, 4, 8, 16, 32, 64) if other != number
    ]
    assert all("needs" in text for text in decision.rejected if int(text.partition(":")[0]) < number)


def test_the_bound_covers_every_number_that_fits():
    alone = [tight(272, number).bound_s for number in (4, 8, 16, 32, 64)]
    assert None not in alone
    assert tight(272).bound_s <= min(alone) * (1 + 1e-9)  # pyright: ignore[reportOperatorIssue, reportArgumentType]


@pytest.mark.parametrize("budget_mib", [400, 272, 232, 230])
def test_one_gib_more_saves_at_most_what_is_named_though_the_whole_batch_fits_then(budget_mib: int):
    made, more = tight(budget_mib), tight(budget_mib + 1024)
    assert numbers(more) == {1}
    assert made.gib_saves_s == pytest.approx(made.prediction.step_s - more.prediction.step_s, rel=0.01)


def test_if_nothing_fits_the_error_names_the_number_that_needs_the_fewest_bytes():
    with pytest.raises(NoFeasiblePlan) as caught:
        tight(190)
    assert caught.value.needed_bytes == pytest.approx(197 * MIB, abs=4096)
    assert "h1 of 64.0 MiB, is returned to the caller: return the loss alone" in str(caught.value)
    assert caught.value.micro_batches == 64
    assert "of device memory at fwd.c (h.0) in 64 micro-batches, budget 190.0 MiB" in str(caught.value)


def test_one_number_of_each_doubling_is_a_candidate():
    def of_batch(rows: int) -> list[int]:
        return candidates(problem_of(replace(TRAINED, batch=rows), CLUSTERS["cuda"]))

    assert of_batch(64) == [2, 4, 8, 16, 32, 64]
    assert of_batch(12) == [2, 4, 12]
    assert of_batch(7) == [7]
    assert of_batch(1) == []


def test_inference_is_not_divided():
    assert candidates(problem_of(WIDE, CLUSTERS["cuda"])) == []


def test_on_several_ranks_the_candidates_divide_the_rows_that_all_batches_have_in_common():
    ranks = next(cluster for cluster in CLUSTERS.values() if cluster.num_ranks > 1)
    problem = problem_of(TRAINED, ranks)
    assert candidates(problem) == [2, 4, 8, 16, 32, 64]
    assert candidates(replace(problem, common_rows=8)) == [2, 4, 8]
    assert candidates(replace(problem, common_rows=1)) == []


def test_a_problem_refuses_a_number_that_does_not_divide_its_batch():
    with pytest.raises(InvalidPlan, match="a batch of 64 cannot run in 6 micro-batches"):
        problem_of(TRAINED, CLUSTERS["cuda"], micro_batches=6)


def test_more_micro_batches_never_take_less_time_in_the_cost_model():
    def step_s(number: int) -> float:
        problem: Problem = problem_of(TRAINED, CLUSTERS["cuda"], micro_batches=number)
        return plan_as_asked(problem, Options()).prediction.step_s

    found = [step_s(number) for number in (1, 2, 4, 8)]
    assert found == sorted(found)


def batched(graph: StepGraph) -> StepGraph:
    """Return `graph` with activations of 8 rows, each with a row of its own, and gradients that are sums over rows."""

    def of(storage: Storage) -> Batched:
        if storage.kind is Kind.GRAD:
            return Batched.SUM
        return Batched.EACH if storage.kind in (Kind.INPUT, Kind.TEMP, Kind.SAVED) else Batched.SAME

    return replace(graph, batch=8, storages=tuple(replace(storage, batched=of(storage)) for storage in graph.storages))


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
@pytest.mark.parametrize("planner", ["keep_all", "zero3_offload", "milp"])
@given(graph=step_graphs(training=True))
@settings(max_examples=6)
def test_the_number_of_micro_batches_changes_no_transfer(cluster: str, planner: Planner, graph: StepGraph):
    problem = problem_of(batched(graph), CLUSTERS[cluster])
    verbs = {}
    for number in (1, 2, 8):
        made = plan(replace(problem, micro_batches=number), planner)
        verbs[number] = Counter(str(action.verb) for action in made.schedules[0].actions)
        del verbs[number]["run"], verbs[number]["wait"]
        assert collectives(problem.graph, made) == collectives(problem.graph, plan(problem, planner))
        assert walk_memory(problem.graph, made).peak_bytes == made.prediction.device_peak_bytes
    assert verbs[1] == verbs[2] == verbs[8]


def two_graphs(budget_mib: int) -> list[Plan]:
    """Return the plans of two graphs like `TRAINED` under one budget, each in as many micro-batches as are chosen."""
    problem = problem_of(TRAINED, CLUSTERS["cuda"], budget_bytes=budget_mib * MIB)
    requests = [GraphRequest(problem=problem, beside=beside) for beside in ((), (0,))]

    def search(own: Problem) -> Plan:
        return plan_as_asked(own, Options(micro_batches="auto"))

    return [made for _, made in plan_jointly(requests, search, may_divide=True)]


def test_graphs_that_do_not_fit_together_whole_share_the_budget_in_micro_batches():
    with pytest.raises(NoFeasiblePlan) as caught:
        two_graphs(1)
    needed_mib = caught.value.needed_bytes // MIB + 1
    problem = problem_of(TRAINED, CLUSTERS["cuda"], budget_bytes=needed_mib * MIB)
    requests = [GraphRequest(problem=problem, beside=beside) for beside in ((), (0,))]
    with pytest.raises(NoFeasiblePlan):
        plan_jointly(requests, plan)
    made = two_graphs(needed_mib)
    assert max(max(numbers(own)) for own in made) > 1
    assert all(own.prediction.device_peak_bytes <= needed_mib * MIB for own in made)


def fitted(budget_mib: float, planner: Planner = "milp") -> Plan:
    problem = problem_of(TRAINED, CLUSTERS["cuda"], budget_bytes=int(budget_mib * MIB) + 4096)
    return plan_as_asked(problem, Options(planner=planner))


def test_by_default_a_batch_stays_whole_if_any_plan_for_it_fits(monkeypatch: pytest.MonkeyPatch):
    """The parameter of 64 bytes moves to the host before the batch is divided, and no number is looked at."""
    problem = problem_of(TRAINED, CLUSTERS["cuda"])
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(replace(problem, budget_bytes=1))
    least = replace(problem, budget_bytes=caught.value.needed_bytes)
    assert is_pressed(plan(least))

    def refuse(_: Problem) -> list[int]:
        raise AssertionError("numbers of micro-batches were looked at")

    monkeypatch.setattr(micro_batches, "candidates", refuse)
    assert plan_as_asked(least, Options()) == plan_as_asked(least, Options(micro_batches=1)) == plan(least)


@pytest.mark.parametrize("budget_mib", [400, 260, 230])
def test_by_default_a_batch_that_does_not_fit_whole_is_divided_as_by_auto(budget_mib: int):
    made = fitted(budget_mib)
    assert made == tight(budget_mib)
    assert max(numbers(made)) > 1


def test_by_default_the_error_is_that_of_the_number_that_needs_the_fewest_bytes():
    with pytest.raises(NoFeasiblePlan) as caught:
        fitted(190)
    assert caught.value.micro_batches == 64
    with pytest.raises(NoFeasiblePlan):
        plan_as_asked(problem_of(TRAINED, CLUSTERS["cuda"], budget_bytes=caught.value.needed_bytes - 1), Options())
    made = plan_as_asked(problem_of(TRAINED, CLUSTERS["cuda"], budget_bytes=caught.value.needed_bytes), Options())
    assert numbers(made) == {64}


def test_the_rules_for_comparison_divide_nothing_by_default():
    with pytest.raises(NoFeasiblePlan) as caught:
        fitted(400, "zero3_offload")
    assert caught.value.micro_batches == 1
