"""Levels that differ only where a layer is recomputed: the cast of a weight, which the backward reads instead of it."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Kind, Op, OpId, Phase, StepGraph, StorageId
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation import solver
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.formulation.solver import Solution
from elixir_compile.search.greedy import RULES
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step import verify
from tests.pure.search.test_best import assert_as_good_as_brute_force, machine, random_answer
from tests.pure.search.test_planner import between, problem_of
from tests.pure.strategies import DraftPlan, examples


def cast_chain(numels: list[int], act_numel: int, has_cast: list[bool]) -> StepGraph:
    """Return the step of a chain of matrix products whose weights are cast first, as `torch.autocast` does.

    Layer i has a weight of `numels[i]` elements. If `has_cast[i]`, the forward casts it and saves the cast for the
    backward, which does not read the weight.
    """
    draft = DraftPlan(dtype="float32")
    flowing = draft.storage("x", Kind.INPUT, act_numel)
    used: list[tuple[StorageId, StorageId]] = []
    for i, numel in enumerate(numels):
        weight = draft.storage(f"p{i}", Kind.PARAM, numel)
        module = f"h.{i}"
        if has_cast[i]:
            cast = draft.storage(f"c{i}", Kind.SAVED, numel // 2)
            draft.op(Phase.FORWARD, "_to_copy", [weight], [cast], module)
            draft.ops[-1] = replace(draft.ops[-1], flops=0)
            weight = cast
        product = draft.storage(f"t{i}", Kind.TEMP, act_numel)
        out = draft.storage(f"s{i}", Kind.TEMP if i == len(numels) - 1 else Kind.SAVED, act_numel)
        draft.op(Phase.FORWARD, "mm", [flowing, weight], [product], module)
        draft.op(Phase.FORWARD, "relu", [product], [out], module)
        used.append((flowing, weight))
        flowing = out
    outputs = (flowing,)
    flowing = draft.storage("tangent", Kind.INPUT, act_numel)
    grads: list[StorageId] = []
    for i in reversed(range(len(numels))):
        activation, weight = used[i]
        grad = draft.storage(f"p{i}.grad", Kind.GRAD, numels[i], of=f"p{i}")
        grads += [StorageId(f"p{i}"), grad]
        draft.op(Phase.BACKWARD, "mm", [activation, flowing], [grad], f"h.{i}")
        passed = draft.storage(f"d{i}", Kind.TEMP, act_numel)
        draft.op(Phase.BACKWARD, "mm", [flowing, weight], [passed], f"h.{i}")
        flowing = passed
    draft.ops.append(Op(id=OpId("update"), target="update", phase=Phase.UPDATE, reads=tuple(grads), writes=()))
    return StepGraph(name="casts", ops=tuple(draft.ops), storages=tuple(draft.storages.values()), outputs=outputs)


def cast_problem(seed: int) -> Problem:
    """Return a random chain of two to six casts and matrix products on a random machine of one or two ranks."""
    draw = random.Random(seed)
    numels = [draw.randint(100, 600) for _ in range(draw.randint(2, 6))]
    graph = cast_chain(numels, draw.choice([16, 64, 256]), [draw.random() < 0.9 for _ in numels])
    return problem_of(graph, machine(draw, draw.choice([1, 1, 2])), hybrid=draw.random() < 0.7)


SEEDS = st.integers(0, 10_000)
SHARES = st.sampled_from([0.0, 0.05, 0.1, 0.1, 0.15, 0.2, 0.4, 0.7])
"""Of the way from the least budget to keep-everything; about 0.1 casts are made again and some weights stay."""


def test_a_cast_weight_may_stay_resident_if_its_cast_may_be_made_again() -> None:
    problem = problem_of(cast_chain([400, 400], 64, [True, False]))
    evaluator = Evaluator(gather_facts(problem))
    cast, plain = evaluator.facts.choices
    assert len(evaluator.facts.windows[0]) == 1
    assert Level.ALL_OFF in cast
    assert cast == plain
    recomputed = evaluator.at([len(layer.modes) - 1 for layer in evaluator.facts.layers])
    assert len(recomputed.facts.windows[0]) == 2
    assert recomputed.facts.choices == evaluator.facts.choices
    kept_only = Evaluator(gather_facts(replace(problem, savings=frozenset())))
    assert Level.ALL_OFF not in kept_only.facts.choices[0]


@given(SEEDS, SHARES)
@examples(12)
def test_every_planner_finds_a_plan_if_levels_depend_on_modes(seed: int, share: float) -> None:
    problem = between(cast_problem(seed), share)
    made = plan(problem, timeout_s=0.1)
    verify(problem.graph, made)
    assert made.prediction.device_peak_bytes <= problem.budget_bytes
    assert made.bound_s is None or made.bound_s <= made.prediction.step_s
    for planner in (*RULES, "greedy"):
        try:
            other = plan(problem, planner)
        except NoFeasiblePlan:
            assert planner in RULES
            continue
        verify(problem.graph, other)
        assert made.prediction.step_s <= other.prediction.step_s * (1 + 1e-9), planner


@given(SEEDS)
@examples(12)
def test_any_candidate_is_a_vector_of_the_milp_and_is_bounded_by_it(seed: int) -> None:
    evaluator = Evaluator(gather_facts(cast_problem(seed)))
    milp = Milp(evaluator, reference_s=1.0)
    draw = random.Random(seed)
    for _ in range(10):
        levels, modes = answer = random_answer(draw, evaluator)
        here = evaluator.at(modes)
        x = milp.vector(answer)
        assert milp.candidate(x) == answer
        step_s = here.step_s(levels, moves_at_use(here.facts, levels, draw.choice([0, 1, 8])))
        assert milp.lower_s(x) <= step_s * (1 + 1e-9)
        assert milp.peak_bytes(x) <= here.memory.peak_bytes(levels, 0)


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_brute_force_if_levels_depend_on_modes(seed: int) -> None:
    draw = random.Random(seed)
    graph = cast_chain([draw.randint(100, 600) for _ in range(2)], 64, [True, seed != 1])
    problem = between(problem_of(graph, machine(draw, 1)), draw.choice([0.2, 0.5]))
    assert_as_good_as_brute_force(problem, f"seed {seed}")


def test_whole_solutions_that_do_not_fit_end_the_search_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the least budget the rows count a cast that is made again for too little: 150 solves, none of which fit."""
    num_solves = 0

    solve_integral = solver.solve_integral

    def counted(*arguments: Any, **named: Any) -> Solution | None:
        nonlocal num_solves
        num_solves += 1
        return solve_integral(*arguments, **named)

    monkeypatch.setattr(solver, "solve_integral", counted)
    made = plan(between(cast_problem(6), 0.0))
    assert made.bound_s is not None
    assert 24 <= num_solves < 40
