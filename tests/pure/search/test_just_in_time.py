"""Copies as late as their link allows: within the budget, and no step longer for it."""

import random
from dataclasses import replace

import pytest

from elixir_compile.ir import Saving, Update
from elixir_compile.search.facts import gather_facts
from elixir_compile.search.judge import Judge
from elixir_compile.search.just_in_time import just_in_time
from elixir_compile.search.prefetch import raise_prefetch
from elixir_compile.search.streaming import best_moves
from elixir_compile.units import GIB
from tests.pure.search.test_best import instances, random_answer


def test_it_keeps_the_budget_and_best_moves_are_no_longer_than_early_ones() -> None:
    num_played = num_late = 0
    for seed, problem in instances(40, num_layers=8):
        judge, draw = Judge(gather_facts(problem)), random.Random(seed)
        for _ in range(6):
            levels, modes = random_answer(draw, judge)
            here = judge.at(modes)
            if not here.fits(levels, ahead=0):
                continue
            moves, early = just_in_time(here, levels), raise_prefetch(here, levels)
            assert int(here.memory.live_bytes(levels, moves).max()) <= problem.budget_bytes, f"seed {seed}"
            _, step_s = best_moves(here, levels)
            assert step_s <= here.step_s(levels, early) * (1 + 1e-9), f"seed {seed}"
            num_played += 1
            num_late += sum(a.gather for a in moves.stays) > sum(b.gather for b in early.stays)
    assert num_played > 40
    assert num_late > 10


def test_with_all_the_memory_being_later_costs_nothing_on_one_rank() -> None:
    for seed, problem in instances(24, num_layers=8):
        if problem.cluster.num_ranks > 1:
            continue
        roomy = replace(problem, budget_bytes=GIB, update=Update.AFTER_BACKWARD, savings=frozenset({Saving.KEEP}))
        judge = Judge(gather_facts(roomy))
        levels, _ = random_answer(random.Random(seed), judge)
        late_s = judge.step_s(levels, just_in_time(judge, levels))
        early_s = judge.step_s(levels, raise_prefetch(judge, levels))
        assert late_s == pytest.approx(early_s, rel=1e-9), f"seed {seed}"
