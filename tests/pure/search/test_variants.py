"""Variants of a step that a search compares: the loss in chunks, micro-batches, narrower state, full and lean
calls."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import given, settings

from elixir_compile.base.errors import IllegalSchedule, InvalidPlan, NoFeasiblePlan
from elixir_compile.base.options import Options, Planner
from elixir_compile.base.units import MIB
from elixir_compile.ir import (
    Activations,
    BackwardOrder,
    Calls,
    GroupId,
    Op,
    OpId,
    Phase,
    Plan,
    Prediction,
    Ring,
    Saving,
    StepGraph,
    Storage,
    StorageId,
)
from elixir_compile.ir.graph import LossRegion
from elixir_compile.ir.hardware import TensorRing
from elixir_compile.ir.kinds import Batched, Kind
from elixir_compile.ir.plan import plan_line
from elixir_compile.search import Problem, plan
from elixir_compile.search.joint import variants as micro_batches
from elixir_compile.search.joint.joint_budget import GraphRequest, plan_jointly
from elixir_compile.search.joint.variants import (
    MICRO_BATCHES,
    LossAttempt,
    decided_chunks,
    is_pressed,
    numbers_to_try,
    plan_as_asked,
    plans_with_fewest_narrower,
    possible_chunks,
    with_chosen_loss,
)
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step import plan_timeline, verify
from elixir_compile.tools.report.explain import explain
from tests.covering import covering
from tests.pure.memory_walk import peak_of_calls, walk_memory
from tests.pure.mixes import collectives
from tests.pure.problems import CLUSTERS, chain_of, kept, needed_bytes, pair_of, plan_at, problem_of, problem_of_mlps
from tests.pure.search.test_ranks_of_a_search import greedy, planned
from tests.pure.step.test_as_run import WIDE
from tests.pure.step.test_calls import recomputing, small_pair
from tests.pure.strategies import step_graphs, with_facts

# ----------------------------------------------------------------------------------------------------------------------
# One function decides whether the loss is computed in chunks, by the plans of both forms of the step.


REGION = LossRegion(name="l", nodes=("l",), num_tokens=4096, num_classes=32_000, logits_bytes=500 * MIB, source="")
CHUNKS = possible_chunks(REGION, Options())
EASY = Plan(
    name="step",
    graph="",
    cluster="1 x cpu",
    budget_bytes=1,
    buckets=(),
    placements=(),
    regions=(),
    schedules=(),
    decisions=(),
    prediction=Prediction(
        step_s=1.0, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=1, device_peak_at=OpId(""), host_peak_bytes=0
    ),
)
GROUP = Activations(id=GroupId("a"), storages=(StorageId("s"),), nbytes=1, saving=Saving.RECOMPUTE)
PRESSED = replace(EASY, activations=(GROUP,))
FASTER = replace(PRESSED, prediction=replace(PRESSED.prediction, step_s=0.9))
NOTHING_FITS = NoFeasiblePlan("op", "", 1, 3, {})
LESS_NEEDED = NoFeasiblePlan("op", "", 1, 2, {})
Outcome = Plan | NoFeasiblePlan


@dataclass
class Steps:
    """Makes the plans of both forms of a step, and notes the numbers of chunks that were asked for."""

    whole: Outcome
    chunked: Outcome = PRESSED
    asked: list[int | None] = field(default_factory=list)

    def make(self, attempt: LossAttempt) -> Plan:
        self.asked.append(attempt.num_chunks)
        found = self.whole if attempt.cut is None else self.chunked
        if isinstance(found, NoFeasiblePlan):
            raise found
        return found if attempt.review is None else attempt.review(found)


def test_without_a_loss_to_chunk_one_form_is_planned() -> None:
    steps = Steps(PRESSED)
    assert with_chosen_loss(None, steps.make) is PRESSED
    assert steps.asked == [None]


@pytest.mark.parametrize(
    ("whole", "chunked", "asked", "num_chunks"),
    [
        (EASY, FASTER, [1], 1),
        (PRESSED, FASTER, [1, 8], 8),
        (PRESSED, PRESSED, [1, 8, 1], 1),
        (PRESSED, NOTHING_FITS, [1, 8, 1], 1),
        (NOTHING_FITS, PRESSED, [1, 8], 8),
    ],
)
def test_chunks_are_planned_if_memory_is_short_and_taken_if_faster(
    whole: Outcome, chunked: Outcome, asked: list[int], num_chunks: int
) -> None:
    steps = Steps(whole, chunked)
    assert with_chosen_loss(CHUNKS, steps.make).loss_chunks == num_chunks
    assert steps.asked == asked


def test_if_nothing_fits_the_error_is_of_the_smaller_need() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        with_chosen_loss(CHUNKS, Steps(NOTHING_FITS, LESS_NEEDED).make)
    assert caught.value.needed_bytes == LESS_NEEDED.needed_bytes


def test_in_inference_a_pressed_plan_is_taken_whole() -> None:
    steps = Steps(PRESSED, FASTER)
    assert with_chosen_loss(CHUNKS, steps.make, is_training=False) is PRESSED
    assert steps.asked == [1]


@pytest.mark.parametrize(
    ("fitting", "expected"),
    [
        ({(1, True)}, [(1, True)]),
        ({(8, True)}, [(1, True), (8, True)]),
        ({(1, False)}, [(1, True), (8, True), (1, False)]),
        ({(8, False)}, [(1, True), (8, True), (1, False), (8, False)]),
    ],
)
def test_if_the_whole_batch_comes_first_it_is_divided_only_if_it_fits_with_neither_form_of_the_loss(
    fitting: set[tuple[int, bool]], expected: list[tuple[int, bool]]
) -> None:
    """An attempt is the number of chunks, and whether the batch stays whole."""
    asked: list[tuple[int | None, bool]] = []

    def make(attempt: LossAttempt) -> Plan:
        asked.append((attempt.num_chunks, attempt.keeps_whole))
        if asked[-1] not in fitting:
            raise NOTHING_FITS
        return EASY if attempt.review is None else attempt.review(EASY)

    made = with_chosen_loss(CHUNKS, make, is_whole_first=True)
    assert asked == expected
    assert made.loss_chunks == expected[-1][0]


@pytest.mark.parametrize("decided", [1, 4])
def test_a_decided_number_of_chunks_is_not_decided_again(decided: int) -> None:
    steps = Steps(PRESSED, FASTER)
    assert with_chosen_loss(CHUNKS, steps.make, decided=decided).loss_chunks == decided
    assert steps.asked == [decided]


def test_the_plan_of_the_user_decides_before_earlier_graphs() -> None:
    assert decided_chunks(replace(EASY, loss_chunks=2), [4]) == 2
    assert decided_chunks(None, [None, 4, 8]) == 4
    assert decided_chunks(None, []) is None


def test_small_losses_are_never_chunked() -> None:
    assert possible_chunks(replace(REGION, logits_bytes=MIB), Options()) is None
    assert possible_chunks(REGION, Options(activations="keep")) is None
    assert possible_chunks(None, Options()) is None


def test_on_several_ranks_only_the_classes_decide() -> None:
    found = [possible_chunks(replace(REGION, logits_bytes=size), Options(), is_shared=True) for size in (1, MIB << 20)]
    assert [chunks and chunks.num_chunks for chunks in found] == [16, 16]
    assert possible_chunks(replace(REGION, num_classes=10), Options(), is_shared=True) is None


# ----------------------------------------------------------------------------------------------------------------------
# The number of micro-batches is chosen together with the plan: as many as memory asks for, no more than pay.


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


@cache
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


def test_one_number_of_each_doubling_is_tried():
    def of_batch(rows: int) -> list[int]:
        return numbers_to_try(problem_of(replace(TRAINED, batch=rows), CLUSTERS["cuda"]))

    assert of_batch(64) == [2, 4, 8, 16, 32, 64]
    assert of_batch(12) == [2, 4, 12]
    assert of_batch(7) == [7]
    assert of_batch(1) == []


def test_inference_is_not_divided():
    assert numbers_to_try(problem_of(WIDE, CLUSTERS["cuda"])) == []


def test_on_several_ranks_the_numbers_divide_the_rows_that_all_batches_have_in_common():
    ranks = next(cluster for cluster in CLUSTERS.values() if cluster.num_ranks > 1)
    problem = problem_of(TRAINED, ranks)
    assert numbers_to_try(problem) == [2, 4, 8, 16, 32, 64]
    assert numbers_to_try(replace(problem, common_rows=8)) == [2, 4, 8]
    assert numbers_to_try(replace(problem, common_rows=1)) == []


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
    assert problem.micro_batches == 1
    plans = {number: plan(replace(problem, micro_batches=number), planner) for number in (1, 2, 8)}
    verbs = {}
    for number, made in plans.items():
        verbs[number] = Counter(str(action.verb) for action in made.schedules[0].actions)
        del verbs[number]["run"], verbs[number]["wait"]
        assert collectives(problem.graph, made) == collectives(problem.graph, plans[1])
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

    monkeypatch.setattr(micro_batches, "numbers_to_try", refuse)
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


# ----------------------------------------------------------------------------------------------------------------------
# `search.joint.variants`: as few bytes of parameters as fit get narrower moments, on one rank and on several.


NUM_LAYERS = 8
ONE, TWO = CLUSTERS["cuda"], CLUSTERS["2 x cuda"]
STATE_NBYTES = 3200
"""Bytes of exact moments of a layer; narrower ones take half."""


@cache
def with_just_enough(num_ranks: int) -> Problem:
    """All state is on the host, which has just enough memory for exact moments."""
    roomy = problem_of(chain_of(NUM_LAYERS), TWO if num_ranks == 2 else ONE, bucket_max_bytes=1600)
    roomy = replace(roomy, budget_bytes=needed_bytes(roomy))
    narrower = dict.fromkeys(roomy.params, (("int8", 0), ("bfloat16", STATE_NBYTES // 2)))
    roomy = replace(roomy, params=with_facts(roomy.params, narrower_nbytes=narrower))
    with pytest.raises(NoFeasiblePlan) as raised:
        greedy(replace(roomy, host_budget_bytes=0))
    assert raised.value.memory == "host"
    return replace(roomy, host_budget_bytes=raised.value.needed_bytes, narrower_dtype="bfloat16")


def short_of_host_memory(missing_bytes: int, num_ranks: int) -> Problem:
    """All state is on the host, where a rank lacks `missing_bytes` for exact moments."""
    enough = with_just_enough(num_ranks)
    return replace(enough, host_budget_bytes=enough.host_budget_bytes - missing_bytes)


def each_greedy(problems: Sequence[Problem]) -> list[Plan]:
    return [greedy(problem) for problem in problems]


def num_narrow(plan: Plan) -> int:
    """Return the number of parameters with narrower moments."""
    return sum(len(bucket.params) for bucket in plan.buckets if bucket.state_dtype == "bfloat16")


@pytest.mark.parametrize(("num_ranks", "num_missing"), covering([1, 2], [1, 3]))
def test_no_more_parameters_have_narrower_moments_than_bytes_are_missing(num_ranks: int, num_missing: int) -> None:
    """A rank lacks what `num_missing` whole parameters save, and has a part of each parameter."""
    problem = short_of_host_memory(num_missing * STATE_NBYTES // 2, num_ranks)
    with pytest.raises(NoFeasiblePlan):
        greedy(problem)
    [plan] = plans_with_fewest_narrower([problem], each_greedy)
    assert num_missing * num_ranks <= num_narrow(plan) <= num_missing * num_ranks + 1
    reasons = {decision.subject for decision in plan.decisions if decision.choice == "moments bfloat16"}
    assert reasons == {bucket.id for bucket in plan.buckets if bucket.state_dtype is not None}


def test_the_first_choice_fits_on_two_ranks() -> None:
    searched: list[int] = []

    def search(problems: Sequence[Problem]) -> list[Plan]:
        searched.append(sum(param.state_dtype is not None for param in problems[0].params.values()))
        return each_greedy(problems)

    plans_with_fewest_narrower([short_of_host_memory(3 * STATE_NBYTES // 2, 2)], search)
    assert len(searched) == 2


def test_classes_of_ranks_have_the_same_narrower_moments() -> None:
    short = short_of_host_memory(3 * STATE_NBYTES // 2, 2)
    other = replace(short, rank=1, host_budget_bytes=1 << 30)
    plans = planned([short, other])
    assert [bucket.state_dtype for bucket in plans[0].buckets] == [bucket.state_dtype for bucket in plans[1].buckets]
    assert 6 <= num_narrow(plans[0]) < NUM_LAYERS
    assert all(num_narrow(plan) == 0 for plan in planned([replace(short, host_budget_bytes=1 << 30), other]))


def test_an_error_names_the_bytes_that_narrower_moments_leave() -> None:
    exact = short_of_host_memory(1, 1)
    least = replace(exact, host_budget_bytes=0)
    with pytest.raises(NoFeasiblePlan) as raised:
        plans_with_fewest_narrower([least], each_greedy)
    assert raised.value.needed_bytes <= exact.host_budget_bytes + 1 - NUM_LAYERS * STATE_NBYTES // 2
    with pytest.raises(NoFeasiblePlan) as raised:
        plans_with_fewest_narrower([replace(least, narrower_dtype=None)], each_greedy)
    assert raised.value.needed_bytes == exact.host_budget_bytes + 1


# ----------------------------------------------------------------------------------------------------------------------
# The search keeps activations of as many outstanding forwards as fit, and the plan is never slower for it.


FIRST = BackwardOrder.FIRST_FIRST


def with_one_treatment(problem: Problem) -> Plan:
    """Return the plan of a search that treats all outstanding forwards alike."""
    made = plan(replace(problem, may_have_lean_calls=False), timeout_s=1.0)
    assert made.lean is None
    return made


def mixed(order: BackwardOrder = FIRST, saving: Saving = Saving.RECOMPUTE, share: float = 0.7) -> Problem:
    """Return a problem whose budget does not hold all activations of eight forwards."""
    problem = problem_of_mlps(Calls(num=8, outstanding=8, backward_order=order), share=share)
    return replace(problem, savings=frozenset({Saving.KEEP, saving}))


@pytest.mark.parametrize(
    ("order", "saving", "share"),
    [*((order, Saving.RECOMPUTE, 0.7) for order in BackwardOrder), (FIRST, Saving.OFFLOAD, 0.5)],
)
def test_some_forwards_keep_and_the_step_is_shorter(order: BackwardOrder, saving: Saving, share: float) -> None:
    problem = mixed(order, saving, share)
    made, alike = plan(problem, timeout_s=1.0), with_one_treatment(problem)
    assert made.lean is not None
    assert {own.saving for own in made.lean.activations} >= {saving}
    assert made.prediction.step_s < alike.prediction.step_s
    assert made.prediction.device_peak_bytes <= problem.budget_bytes
    if order is not BackwardOrder.ANY:
        assert plan_timeline(problem.graph, made).peak.nbytes == peak_of_calls(problem.graph, made)
    assert plan(problem, timeout_s=1.0) == made


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
@pytest.mark.parametrize("calls", [Calls(num=16, outstanding=5), Calls(num=6, outstanding=2, backward_order=FIRST)])
def test_a_plan_is_never_slower_than_with_one_treatment(calls: Calls, share: float) -> None:
    problem = problem_of_mlps(calls, share=share)
    made, alike = plan(problem, timeout_s=1.0), with_one_treatment(problem)
    assert made.prediction.step_s <= alike.prediction.step_s
    assert made == alike or made.prediction.step_s < alike.prediction.step_s


def test_collectives_of_the_tensor_axis_are_those_of_all_calls() -> None:
    """Each `gelu` sums over two ranks, and runs again in the backward of a lean call."""
    problem, _ = small_pair()
    ring, link = Ring(num_ranks=2, nbytes=800, passes=2), problem.cluster.h2d
    ops = tuple(replace(op, ring=ring) if op.target == "aten.gelu.default" else op for op in problem.graph.ops)
    cluster = replace(problem.cluster, tensor=TensorRing(num_ranks=2, link=link))
    problem = replace(problem, graph=replace(problem.graph, ops=ops), cluster=cluster)
    num_layers, made = 4, pair_of(problem, *recomputing(problem), 2)
    once = plan_at(problem, gather_facts(problem).start_levels, recomputing(problem)[0])
    assert once.tensor is not None
    assert once.tensor.num_collectives == 6 * num_layers
    assert made.tensor is not None
    assert made.tensor.num_collectives == (6 + 4) * num_layers
    assert made.tensor.nbytes == 800 * made.tensor.num_collectives


def test_no_more_full_forwards_fit() -> None:
    problem = mixed()
    made = plan(problem, timeout_s=1.0)
    assert made.lean is not None
    more = replace(made, lean=replace(made.lean, num_full=made.lean.num_full + 1))
    assert plan_timeline(problem.graph, more).peak.nbytes > problem.budget_bytes
    with pytest.raises(IllegalSchedule):
        verify(problem.graph, more)


def test_what_fits_by_an_exact_count_is_kept_by_all() -> None:
    """The search counts one outstanding forward too many."""
    calls = Calls(num=4, outstanding=4, input_grads=4, output_grads=4, more_outputs=3, has_loss=True)
    problem = replace(problem_of_mlps(calls), savings=frozenset({Saving.KEEP, Saving.RECOMPUTE}))
    made, alike = plan(problem, timeout_s=1.0), with_one_treatment(problem)
    assert made.lean is None
    assert {own.saving for own in made.activations} <= {Saving.KEEP}
    assert Saving.RECOMPUTE in {own.saving for own in alike.activations}
    assert made.decisions[0].choice == "all keep their activations"
    verify(problem.graph, made)


def test_what_fits_is_kept_by_all() -> None:
    problem = problem_of_mlps(Calls(num=8, outstanding=8), share=1.5)
    made = plan(problem, timeout_s=1.0)
    assert made.lean is None
    assert made.prediction.step_s == pytest.approx(kept(problem).prediction.step_s)


def test_the_decision_says_how_many_keep_and_what_was_rejected() -> None:
    problem = mixed()
    made = plan(problem, timeout_s=1.0)
    assert made.lean is not None
    decision = next(own for own in made.decisions if own.subject == "outstanding forwards")
    number = made.lean.num_full
    assert decision.choice.startswith(f"{number} of 8 keep their activations; the others recompute ")
    assert f"{number + 1} of 8: " in decision.rejected[1]
    assert decision.rejected[0].startswith("all recompute ")
    assert decision.cost_s > 0
    text, lean = explain(made), f"{8 - number} of 8 outstanding forwards: "
    assert decision.choice in text
    assert lean in text
    assert lean in plan_line(made)
    layer = next(own.id.rpartition(".")[0] for own in made.lean.activations if own.saving is Saving.RECOMPUTE)
    assert "in lean calls" in explain(made, layer, problem.graph)
