"""The bound by pricing, and whole answers near the optimum that it is of."""

import random

import numpy as np

from elixir_compile.search.evaluator import Evaluator, deadline_in, leanest
from elixir_compile.search.formulation.milp import SCALE, Milp
from elixir_compile.search.formulation.solver import bound_of, matrix_of, priced, rounded, solve_integral
from elixir_compile.search.greedy import place_exhaustively
from elixir_compile.search.space.facts import gather_facts
from tests.pure.search.test_best import instances, random_answer


def milp_of(evaluator: Evaluator) -> Milp:
    """Return the MILP of `evaluator` whose unit is the step with the fewest bytes."""
    least = leanest(evaluator)
    return Milp(evaluator, least.step_s(least.min_memory_levels, least.at_use(least.min_memory_levels)))


def test_the_bound_is_below_every_step_and_every_whole_optimum() -> None:
    for seed, problem in instances(10):
        evaluator = Evaluator(gather_facts(problem))
        milp = milp_of(evaluator)
        draw, end = random.Random(seed), deadline_in(20)
        seeds = [milp.vector(random_answer(draw, evaluator)) for _ in range(4)]
        found = priced(milp, seeds, end)
        assert found is not None
        best = place_exhaustively(evaluator)
        assert best is not None
        assert 0 < milp.seconds(found.bound) <= best.step_s, f"seed {seed}"
        integral = solve_integral(milp, limit_s=10, gap=0.0)
        assert integral is not None
        assert found.bound <= integral.bound + 1e-4 * SCALE, f"seed {seed}"


def test_any_multipliers_make_a_bound() -> None:
    """Weak duality: it does not matter where they come from."""
    for seed, problem in instances(6):
        evaluator = Evaluator(gather_facts(problem))
        milp, draw = milp_of(evaluator), random.Random(seed)
        answers = [random_answer(draw, evaluator) for _ in range(12)]
        vectors = [milp.vector(answer) for answer in answers]
        for x in vectors:
            milp.add_paths(x)
            milp.add_memory(x)
        best = place_exhaustively(evaluator)
        assert best is not None
        numbers = np.random.default_rng(seed)
        matrix, limits = matrix_of(milp).tocsc(), milp.limits()
        for scale in (1e-3, 1e-2, 0.1, 1.0):
            multipliers = numbers.random(len(limits)) * scale
            bound = bound_of(milp, matrix.T @ multipliers, float(multipliers @ limits))
            assert min(milp.seconds(bound), milp.reference_s) <= best.step_s * (1 + 1e-9), f"seed {seed}"


def test_the_nearest_whole_answer_fits_and_is_near() -> None:
    num_found = 0
    for seed, problem in instances(12, num_layers=8):
        evaluator = Evaluator(gather_facts(problem))
        milp = milp_of(evaluator)
        draw, end = random.Random(seed), deadline_in(20)
        seeds = [milp.vector(random_answer(draw, evaluator)) for _ in range(4)]
        optimum = priced(milp, seeds, end)
        assert optimum is not None
        answers = list(rounded(milp, optimum.x, end))
        if not answers:  # over these options alone nothing fits
            continue
        answer = answers[-1].candidate
        num_found += 1
        assert evaluator.at(answer.modes).fits(answer.levels, ahead=0), f"seed {seed}"
        # Streams are divided at this optimum, so all that can be said of a whole answer is that all of it is no less.
        every = milp.vector(answer, range(len(evaluator.facts.buckets)))
        none = milp.vector(answer)
        assert max(milp.lower_s(every), milp.lower_s(none)) >= milp.seconds(optimum.bound), f"seed {seed}"
    assert num_found >= 6
