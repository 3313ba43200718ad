"""Candidates from counts of equal buckets and layers."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.search import plan, planner
from elixir_compile.search.best import counted_draft
from elixir_compile.search.evaluator import Evaluator, deadline_in, leanest
from elixir_compile.search.formulation.solver import CountedMilp, evenly
from elixir_compile.search.space.facts import gather_facts
from tests.pure.search.test_best import SAVINGS, machine, problem_of
from tests.pure.search.test_planner import chain_of
from tests.pure.search.test_pricing import milp_of


def evaluators() -> Iterator[Evaluator]:
    """Yield evaluators of chains of equal layers on random machines, under budgets that some buckets exceed."""
    for seed in range(8):
        draw = random.Random(seed)
        problem = problem_of(chain_of(10), machine(draw, 1 + seed % 2), hybrid=draw.random() < 0.7)
        problem = replace(problem, savings=frozenset(SAVINGS[seed % 4]))
        evaluator = Evaluator(gather_facts(problem))
        least_bytes = leanest(evaluator).floor_bytes
        most_bytes = evaluator.memory.peak_bytes(evaluator.facts.start_levels, 0)
        budget_bytes = least_bytes + int((most_bytes - least_bytes) * draw.choice([0.2, 0.4, 0.6]))
        yield Evaluator(gather_facts(replace(problem, budget_bytes=budget_bytes)))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_options_are_spread_evenly_over_the_members_of_a_class(counts: list[int]) -> None:
    num_members = sum(counts)
    found = list(evenly(dict(enumerate(counts)), num_members))
    assert Counter(found) == {option: count for option, count in enumerate(counts) if count}
    for end in range(1, num_members + 1):
        taken = Counter(found[:end])
        for option, count in enumerate(counts):
            assert taken[option] < count * end / num_members + 1


@given(
    st.lists(st.floats(0.0, 40.0), min_size=1, max_size=6).filter(lambda parts: sum(parts) > 0.1), st.integers(1, 40)
)
def test_parts_of_members_are_spread_as_whole_members(parts: list[float], num_members: int) -> None:
    wanted = {option: part / sum(parts) * num_members for option, part in enumerate(parts)}
    found = list(evenly(wanted, num_members))
    assert len(found) == num_members
    for end in range(1, num_members + 1):
        taken = Counter(found[:end])
        assert all(taken[option] < amount * end / num_members + 1 + 1e-9 for option, amount in wanted.items())


def test_a_candidate_has_the_counts_of_its_optimum_as_whole_numbers() -> None:
    num_shared = 0
    for evaluator in evaluators():
        milp = milp_of(evaluator)
        counted = CountedMilp(milp)
        spreads = list(counted.optima(deadline_in(20), more_bytes=0))
        assert spreads
        for spread in spreads:
            own = milp.vector(spread.candidate)
            for members in counted.classes:
                columns = [column for (owner, _), column in milp.choices.items() if owner in members]
                by_option = np.array(columns).reshape(len(members), -1)
                found, wanted = own[by_option].sum(axis=0), spread.x[by_option].sum(axis=0)
                assert found.sum() == pytest.approx(wanted.sum()) == len(members)
                assert (found < wanted + 1 + 1e-5).all()  # a part of a member counts as a whole one at most
                num_shared += np.count_nonzero(own[by_option].sum(axis=0)) > 1
    assert num_shared  # in some problem the members of a class take different options


def test_less_memory_is_tried_until_the_candidate_fits() -> None:
    num_repaired = 0
    for evaluator in evaluators():
        milp = milp_of(evaluator)
        spreads = list(CountedMilp(milp).optima(deadline_in(20), more_bytes=0))
        fits = [evaluator.at(own.candidate.modes).fits(own.candidate.levels, ahead=0) for own in spreads]
        assert not any(fits[:-1])  # the first that fits is the last
        num_repaired += len(fits) > 1 and fits[-1]
    assert num_repaired


def test_a_large_problem_with_a_small_host_has_a_first_draft_plan_without_the_greedy_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "_MANY_CHOICES", 0)
    monkeypatch.setattr(planner, "place_greedily", pytest.fail)
    num_drafts = 0
    for evaluator in itertools.islice(evaluators(), 4):
        problem = evaluator.facts.problem
        furthest_bytes = evaluator.host_bytes(evaluator.facts.furthest_levels)
        tight = replace(problem, host_budget_bytes=int(0.95 * furthest_bytes))
        draft = counted_draft(Evaluator(gather_facts(tight)))
        if draft is None:
            continue
        num_drafts += 1
        made = plan(tight, timeout_s=0.5)
        assert made.prediction.step_s <= draft.step_s
        assert made.prediction.device_peak_bytes <= tight.budget_bytes
        assert made.prediction.host_peak_bytes <= tight.host_budget_bytes
    assert num_drafts > 1
