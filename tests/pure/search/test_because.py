"""`search.because`: what a decision says follows from what it saves."""

import random

from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.reasons import decisions
from elixir_compile.search.space.facts import gather_facts
from tests.pure.search.test_best import instances, random_answer


def test_a_decision_names_the_bytes_saved_at_the_peak_or_elsewhere() -> None:
    num_at_peak = num_elsewhere = 0
    for seed, problem in instances(20):
        evaluator = Evaluator(gather_facts(problem))
        levels, modes = random_answer(random.Random(seed), evaluator)
        draft = DraftPlan(
            levels=levels, modes=modes, moves=evaluator.at(modes).at_use(levels), step_s=1.0, decisions=()
        )
        for decision in decisions(Milp(evaluator, reference_s=1.0), draft):
            assert " 0 B" not in decision.because
            if decision.saves_bytes > 0:
                num_at_peak += 1
                assert decision.because.startswith("the peak would be ")
                assert " higher with " in decision.because
            else:
                num_elsewhere += 1
                assert decision.because.startswith("the peak would be no higher with ")
                assert decision.because.endswith(" less would be free")
    assert num_at_peak > 0
    assert num_elsewhere > 0
