"""The search keeps activations of as many outstanding forwards as fit, and the plan is never slower for it."""

from dataclasses import replace

import pytest

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.ir import BackwardOrder, Calls, Plan, Ring, Saving
from elixir_compile.ir.hardware import TensorRing
from elixir_compile.search import Problem, plan
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.session.line import plan_line
from elixir_compile.step import plan_timeline, verify
from elixir_compile.tools.report.explain import explain
from tests.pure.analysis.test_lean_bytes import recomputing, small_pair
from tests.pure.calls_walk import peak_of_calls
from tests.pure.lean_pairs import kept, pair_of, plan_at, problem_of_mlps

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
