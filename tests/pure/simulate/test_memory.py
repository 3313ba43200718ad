"""The bytes of `plan_timeline` equal those of a second, independent count, which carries the step out."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.ir import Plan, Schedule, StepGraph, Verb
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.search.transfers import raise_prefetch
from elixir_compile.step import plan_timeline, verify
from tests.pure.memory_walk import walk_memory
from tests.pure.mixes import mixed_graphs
from tests.pure.plans import mixed_plans, planned_graphs
from tests.pure.problems import tight_problem
from tests.pure.search.test_planner import problem_of, problems


@given(planned_graphs() | mixed_plans())
def test_two_independent_counts_agree_at_every_op(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    timeline, walk = plan_timeline(graph, plan), walk_memory(graph, plan)
    assert walk.live_bytes == timeline.live_bytes
    assert walk.host_bytes == timeline.host_bytes
    assert walk.peak_bytes == timeline.peak.nbytes


@given(problems() | mixed_graphs().map(problem_of), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_both_counts_agree_for_any_levels_modes_and_moves(problem: Problem, seed: int, is_spread: bool) -> None:
    """On one rank and on two, transfers at their use and as far out as memory allows; every such plan is legal."""
    draw = random.Random(seed)
    evaluator = Evaluator(gather_facts(problem))
    modes = tuple(draw.randrange(len(layer.modes)) for layer in evaluator.facts.layers)
    evaluator = evaluator.at(modes)
    levels = tuple(draw.choice(own) for own in evaluator.facts.choices)
    moves = (
        raise_prefetch(evaluator, levels) if is_spread else moves_at_use(evaluator.facts, levels, draw.randint(0, 2))
    )
    made = write_out(evaluator, DraftPlan(levels=levels, moves=moves, step_s=0.0, modes=modes, decisions=()))
    walk = walk_memory(problem.graph, made)
    assert walk.live_bytes == plan_timeline(problem.graph, made).live_bytes
    assert walk.host_bytes == made.prediction.host_peak_bytes
    verify(problem.graph, replace(made, budget_bytes=walk.peak_bytes))


def test_a_copy_that_is_never_released_counts_to_the_end() -> None:
    problem = tight_problem()
    made = plan(problem)
    actions = tuple(action for action in made.schedules[0].actions if action.verb is not Verb.RELEASE)
    leaking = replace(made, schedules=(Schedule(rank=0, actions=actions),))
    assert walk_memory(problem.graph, leaking).peak_bytes > walk_memory(problem.graph, made).peak_bytes
    assert walk_memory(problem.graph, made).peak_bytes == made.prediction.device_peak_bytes
