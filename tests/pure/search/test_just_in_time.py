"""Copies as late as their link allows: within the budget, and no step longer for it."""

import itertools
import random
from dataclasses import replace

import pytest

from elixir_compile.base.units import GIB
from elixir_compile.ir import Saving, Update
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.space.facts import Facts, gather_facts
from elixir_compile.search.space.profiles import Moves, Residency
from elixir_compile.search.transfers import best_moves, just_in_time, raise_prefetch
from tests.pure.search.test_best import instances, machine, random_answer
from tests.pure.search.test_planner import problem_of
from tests.pure.strategies import Layer, chain


def test_it_keeps_the_budget_and_best_moves_are_no_longer_than_early_ones() -> None:
    num_played = num_late = 0
    for seed, problem in instances(40, num_layers=8):
        evaluator, draw = Evaluator(gather_facts(problem)), random.Random(seed)
        for _ in range(6):
            levels, modes = random_answer(draw, evaluator)
            here = evaluator.at(modes)
            if not here.fits(levels, ahead=0):
                continue
            moves, early = just_in_time(here, levels), raise_prefetch(here, levels)
            assert int(here.memory.live_bytes(levels, moves).max()) <= problem.budget_bytes, f"seed {seed}"
            _, step_s = best_moves(here, levels)
            assert step_s <= here.step_s(levels, early) * (1 + 1e-9), f"seed {seed}"
            num_played += 1
            num_late += sum(a.gather for a in moves.residencies) > sum(b.gather for b in early.residencies)
    assert num_played > 40
    assert num_late > 10


def test_with_all_the_memory_being_later_costs_nothing_on_one_rank() -> None:
    """Unless a frozen bucket comes from the host: the host updates when the last copy to the device has ended too."""
    num_compared = 0
    for seed, problem in instances(24, num_layers=8):
        if problem.cluster.num_ranks > 1:
            continue
        roomy = replace(problem, budget_bytes=GIB, update=Update.AFTER_BACKWARD, savings=frozenset({Saving.KEEP}))
        evaluator = Evaluator(gather_facts(roomy))
        levels, _ = random_answer(random.Random(seed), evaluator)
        placed = zip(evaluator.facts.buckets, levels, strict=True)
        if any(level.has_param_on_host and not bucket.trainable for bucket, level in placed):
            continue
        num_compared += 1
        late_s = evaluator.step_s(levels, just_in_time(evaluator, levels))
        early_s = evaluator.step_s(levels, raise_prefetch(evaluator, levels))
        assert late_s == pytest.approx(early_s, rel=1e-9), f"seed {seed}"
    assert num_compared > 3


def test_what_the_links_to_the_host_carry_waits_for_no_all_gather() -> None:
    """On two ranks the copies of activations and the gathers of what lives on the device are on links of their own."""
    num_ahead = num_shorter = 0
    for seed in range(120):
        draw = random.Random(seed)
        layers = [
            Layer(module=f"h.{i}", params=((f"p{i}", draw.randint(100, 600)),), frozen=False, act_numel=256)
            for i in range(6)
        ]
        problem = problem_of(chain(layers), machine(draw, num_ranks=2))
        roomy = Evaluator(gather_facts(replace(problem, savings=frozenset({Saving.KEEP, Saving.OFFLOAD}))))
        levels, modes = random_answer(draw, roomy)
        evaluator = roomy.at(modes)
        facts, moves = evaluator.facts, just_in_time(evaluator, levels)
        for before, after in itertools.pairwise(moves.residencies):
            is_gather = before.bucket < len(facts.buckets) and not levels[before.bucket].has_param_on_host
            is_later = facts.phase_start(before.first) == facts.phase_start(after.first)
            num_ahead += is_gather and is_later and after.bucket >= len(facts.buckets) and after.gather < before.gather
        num_shorter += evaluator.step_s(levels, moves) < evaluator.step_s(levels, in_one_line(facts, moves)) * (
            1 - 1e-9
        )
    assert num_ahead > 10
    assert num_shorter > 5


def in_one_line(facts: Facts, moves: Moves) -> Moves:
    """Return `moves` with no transfer issued before one that is needed earlier, whatever links they are on."""
    issued: dict[int, int] = {}
    placed: list[Residency] = []
    for stay in moves.residencies:
        phase = facts.phase_start(stay.first)
        issued[phase] = max(stay.gather, issued.get(phase, 0))
        placed.append(stay._replace(gather=issued[phase]))
    return moves._replace(residencies=tuple(placed))
