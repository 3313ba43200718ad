"""The choices as a mixed-integer program: its columns, its bounds by counting and by pricing, and its quiet
solver."""

import ctypes
import gc
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from elixir_compile.ir import GroupId, Lane, Update
from elixir_compile.ir.cost import copy_s
from elixir_compile.search import Problem, plan, planner
from elixir_compile.search.best import counted_draft
from elixir_compile.search.evaluator import Evaluator, deadline_in, leanest
from elixir_compile.search.formulation import solver
from elixir_compile.search.formulation.cross_step_updates import RunTables, flow_shops
from elixir_compile.search.formulation.flow_shop import Chain, Gated, Phase, Queue, Shop, longest_s
from elixir_compile.search.formulation.milp import SCALE, Milp
from elixir_compile.search.formulation.solver import (
    CountedMilp,
    bound_of,
    decided,
    evenly,
    matrix_of,
    priced,
    rounded,
    solve_integral,
    without_notes,
)
from elixir_compile.search.greedy import place_exhaustively
from elixir_compile.search.space.buckets import Level, is_gathered
from elixir_compile.search.space.facts import gather_facts
from tests.pure.problems import chain_of, problem_of, tight_problem
from tests.pure.search.test_best import SAVINGS, instances, machine, random_answer
from tests.pure.search.test_best import problem_of as random_problem_of

# ----------------------------------------------------------------------------------------------------------------------
# The columns of the MILP against a plain count of each choice on its own, and how often their work is computed.


_Event = tuple[int, bool, int]


def milps() -> Iterator[Milp]:
    """Yield the MILPs of chains on random machines of one rank, of two, and of two copies on two ranks each, in all
    update modes."""
    for seed in range(12):
        draw, num_copies = random.Random(seed), 1 + (seed % 4 == 1)
        cluster = machine(draw, (1 + seed % 2) * num_copies, draw.choice([0.7, 1.0]))
        problem = problem_of(chain_of(5), cluster, num_copies=num_copies)
        update = [None, Update.AFTER_BACKWARD, Update.IN_BACKWARD][seed % 3]
        problem = replace(problem, savings=frozenset(SAVINGS[3 - seed % 2 * 2]), update=update)
        yield Milp(Evaluator(gather_facts(problem)), reference_s=1.0)


class Plain:
    """The seconds of work of a phase, choice by choice."""

    def __init__(self, milp: Milp, first: int, end: int, *, has_trips: bool) -> None:
        self.milp, self.first, self.end, self.has_trips = milp, first, end, has_trips
        self.facts, self.prices = milp.evaluator.facts, milp.evaluator.prices
        trips = [trip for layer in milp.evaluator.profiles for profile in layer for trip in profile.trips]
        groups = dict.fromkeys(trip.group for trip in trips)
        self.numbers: dict[GroupId, int] = {name: i for i, name in enumerate(groups, start=len(self.facts.buckets))}
        events: set[_Event] = {(first, False, -1)}
        events |= {(trip.leave + 1, False, self.numbers[trip.group]) for trip in trips if first <= trip.leave < end}
        events |= {(trip.first, True, self.numbers[trip.group]) for trip in trips if first <= trip.first < end}
        for i, windows in enumerate(self.facts.windows):
            events |= {(window.first, True, i) for window in windows if first <= window.first < end}
        for i, gradients in enumerate(self.facts.gradients):
            if gradients is not None and first <= gradients.complete < end:
                events.add((gradients.complete + 1, False, i))
        self.events = sorted(events)

    def matrix(self, lanes: tuple[Lane | Queue, ...]) -> NDArray[np.float64]:
        """Return seconds[lane, event, choice] of the work on `lanes`."""
        queue = Queue.COLLECTIVES if Queue.COLLECTIVES in lanes else None
        found = np.zeros((len(lanes), len(self.events), self.milp.num_choices))
        for (owner, option), column in self.milp.choices.items():
            is_stream = column >= self.milp.num_options
            is_bucket = owner < len(self.facts.buckets)
            work = () if is_stream else self.bucket(owner, Level(option)) if is_bucket else self.mode(owner, option)
            for lane, event, seconds in work:
                own = self.prices.lane_of[Lane.REDUCE if lane is Queue.AVERAGES else lane]
                if own is Lane.REDUCE and lane is Queue.AVERAGES:
                    own = lane
                elif own in (Lane.GATHER, Lane.REDUCE):
                    own = queue or own
                if own in lanes:
                    found[lanes.index(own), event, column] += seconds
        return found

    def bucket(self, i: int, level: Level) -> Iterator[tuple[Lane | Queue, int, float]]:
        name, gradients, prices = self.facts.buckets[i].id, self.facts.gradients[i], self.prices
        # An all-gather behind a copy that compute makes is on no path.
        is_sent = level.has_param_on_host
        is_on_a_path = prices.lane_of[Lane.H2D] is not Lane.COMPUTE or prices.lane_of[Lane.GATHER] is Lane.COMPUTE
        for first, _ in self.facts.copies[i][level]:
            if self.first <= first < self.end and (is_on_a_path or not is_sent):
                event = self.events.index((first, True, i))
                yield Lane.GATHER, event, prices.gather_s[name]
                yield Lane.H2D, event, prices.h2d_s[name] if is_sent else 0.0
        if gradients is not None and self.first <= gradients.complete < self.end:
            if is_gathered(self.facts.buckets[i], level):
                event = self.events.index((gradients.complete + 1, False, i))
                yield Lane.REDUCE, event, prices.reduce_s[name]
                yield Queue.AVERAGES, event, prices.average_s.get(name, 0.0)
                yield Lane.D2H, event, prices.d2h_s[name] if is_sent else 0.0
            yield Lane.COMPUTE, len(self.events) - 1, prices.add_s.get((name, level.home), 0.0)

    def mode(self, owner: int, mode: int) -> Iterator[tuple[Lane, int, float]]:
        profile = self.milp.evaluator.profiles[owner - len(self.facts.buckets)][mode]
        for point, seconds in profile.added_s:
            if self.first <= point < self.end:
                before = [number for number, event in enumerate(self.events) if event[:2] <= (point, False)]
                yield Lane.COMPUTE, before[-1], seconds
        cluster = self.facts.problem.cluster
        for trip in profile.trips if self.has_trips else ():
            if self.first <= trip.leave < self.end:
                event = self.events.index((trip.leave + 1, False, self.numbers[trip.group]))
                yield Lane.D2H, event, copy_s(trip.nbytes, cluster.d2h, trip.num_copies)
            if self.first <= trip.first < self.end:
                event = self.events.index((trip.first, True, self.numbers[trip.group]))
                yield Lane.H2D, event, copy_s(trip.nbytes, cluster.h2d, trip.num_copies)


def assert_equal(plain: Plain, phase: Phase) -> None:
    expected = plain.matrix(phase.lanes)
    assert phase.num_events == len(plain.events)
    np.testing.assert_allclose(phase.matrix_s.toarray().reshape(expected.shape), expected, rtol=1e-12, atol=0.0)


def test_the_seconds_of_each_column_are_those_of_its_choice_alone() -> None:
    num_modes = num_copied = num_queued = 0
    for milp in milps():
        facts = milp.evaluator.facts
        num_ranks = facts.problem.cluster.num_ranks
        ends = {"forward": (0, facts.num_forward), "backward": (facts.num_forward, facts.num_run)}
        num_modes += sum(map(len, milp.evaluator.profiles))
        for own, is_counted in ((milp, num_ranks == 1), (milp.with_trips(), True)):
            for shops in own.phases:
                if shops[0].name not in ends:
                    continue
                assert_equal(Plain(milp, *ends[shops[0].name], has_trips=is_counted), shops[0])
                for other in cast("list[Phase]", shops[1:]):
                    is_queue = Queue.COLLECTIVES in other.lanes
                    has_trips = is_counted if is_queue else True
                    assert_equal(Plain(milp, *ends[other.name], has_trips=has_trips), other)
                    num_queued, num_copied = num_queued + is_queue, num_copied + (not is_queue)
    assert num_modes > 40
    assert num_copied
    assert num_queued


def test_the_bytes_of_each_mode_are_the_highest_of_each_segment() -> None:
    for milp in milps():
        num_buckets = len(milp.evaluator.facts.buckets)
        for number, layer in enumerate(milp.evaluator.profiles, start=num_buckets):
            for mode, profile in enumerate(layer):
                more_bytes = milp.memory.highest(profile.nbytes - layer[0].nbytes)
                assert (milp.bytes_of[:, milp.choices[number, mode]] == more_bytes).all()


def parts_of(shop: Shop, x: NDArray[np.float64]) -> list[Phase]:
    """Return the flow shops of which `shop` consists at x, with the work that counts there."""
    if isinstance(shop, Chain):
        return [part for own in shop.shops for part in parts_of(own, x)]
    return [shop._counted(x, shop.gate.counts(x))] if isinstance(shop, Gated) else [cast("Phase", shop)]


def with_counts(milp: Milp, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x with the y of all gates."""
    return np.concatenate([x, *(gate.counts(x) for gate in flow_shops(milp._runs).gates)])


def all_shops(milp: Milp) -> list[Shop]:
    return [*(shop for shops in milp.phases for shop in shops), *milp.across, *milp.whole_step]


def test_a_path_adds_up_the_work_along_it() -> None:
    draw = np.random.default_rng(0)
    for milp in milps():
        x = draw.random(milp.num_choices)
        for shop in all_shops(milp):
            path, parts = shop.longest(x), parts_of(shop, x)
            assert path.seconds == pytest.approx(longest_s(shop, x), rel=1e-9)
            expected, whole = np.zeros(len(with_counts(milp, x))), with_counts(milp, x)
            for part in parts:
                own = whole[: part.matrix_s.shape[1]]
                rows = [
                    lane * part.num_events + event
                    for lane, first, last in part._trace(part._work_s(own))
                    for event in range(first, last + 1)
                ]
                expected[: len(own)] += part.matrix_s.toarray()[rows].sum(axis=0)
            found = np.zeros(len(expected))
            found[: len(path.coefficients_s)] = path.coefficients_s
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_the_limits_of_many_answers_at_once_are_those_of_each() -> None:
    draw, num_gated = random.Random(0), 0
    for milp in milps():
        answers = [milp.vector(random_answer(draw, milp.evaluator)) for _ in range(5)]
        mixed = [draw.random() * one + 0.5 * other for one, other in itertools.pairwise(answers)]
        together = milp.lower_each_s([*answers, *mixed])
        np.testing.assert_allclose(together, [milp.lower_s(x) for x in (*answers, *mixed)], rtol=1e-12)
        gated = [shop for shop in all_shops(milp) if not isinstance(shop, Phase)]
        for shop, x in itertools.product(gated, (*answers, *mixed)):
            expected_s = sum(
                part.longest(with_counts(milp, x)[: part.matrix_s.shape[1]]).seconds for part in parts_of(shop, x)
            )
            assert longest_s(shop, x) == pytest.approx(expected_s, rel=1e-9)
            num_gated += 1
    assert num_gated > 20
    assert len(next(milps()).lower_each_s([])) == 0


def test_a_path_found_between_answers_is_no_longer_than_the_work_that_counts_at_any_answer() -> None:
    """Work counts only if a gradient behind it comes to the host; a row from a fractional x holds for all answers."""
    draw, num_exact = random.Random(0), 0
    for milp in milps():
        gated = [shop for shop in all_shops(milp) if not isinstance(shop, Phase)]
        answers = [milp.vector(random_answer(draw, milp.evaluator)) for _ in range(8)]
        for one, other in itertools.pairwise(answers):
            share = draw.random()
            for shop in gated:
                path = shop.longest(share * one + (1 - share) * other)
                for answer in answers:
                    counts = with_counts(milp, answer)[: len(path.coefficients_s)]
                    found_s = path.constant_s + float(path.coefficients_s @ counts)
                    assert found_s <= longest_s(shop, answer) * (1 + 1e-9) + 1e-12
                    num_exact += found_s >= longest_s(shop, answer) * (1 - 1e-9) > 0
    assert num_exact > 100


def test_slower_paths_count_the_seconds_of_all_lanes_but_compute_more() -> None:
    num_longer, draw = 0, random.Random(0)
    for milp in milps():
        plain, slow = milp.with_trips(), milp.with_trips(1.5)
        assert slow.seconds(SCALE) == pytest.approx(plain.seconds(SCALE) / 1.5)
        for usual, own in zip(itertools.chain(*plain.phases), itertools.chain(*slow.phases), strict=True):
            if isinstance(usual, Phase) and isinstance(own, Phase):
                factors = np.repeat([1.0 if lane is Lane.COMPUTE else 1.5 for lane in usual.lanes], usual.num_events)
                assert np.array_equal(own.constants_s, usual.constants_s * factors)
                assert np.array_equal(own.matrix_s.toarray(), usual.matrix_s.toarray() * factors[:, None])
        for _ in range(5):
            x = milp.vector(random_answer(draw, milp.evaluator))
            assert plain.lower_s(x) <= slow.lower_s(x) * (1 + 1e-9) <= 1.5 * plain.lower_s(x) * (1 + 2e-9)
            num_longer += slow.lower_s(x) > plain.lower_s(x)
    assert num_longer > 20


def test_the_work_of_a_phase_is_computed_once_for_all_flow_shops(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    table = RunTables._table

    def counted(self: RunTables, *key: object) -> object:
        if self.profiles:  # without the rates of the host's memory, which are other seconds
            made.append(key)
        return table(self, *key)  # pyright: ignore[reportArgumentType] (handed on)

    monkeypatch.setattr(RunTables, "_table", counted)
    num_across = 0
    for milp in milps():
        made.clear()
        fresh = Milp(milp.evaluator, reference_s=1.0)
        fresh.with_trips()
        num_across += len(fresh.across)
        assert len(made) == len(set(made))
    assert num_across


def test_the_garbage_collector_pauses_while_a_plan_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def noted(problem: Problem) -> None:
        seen.append(gc.isenabled())

    monkeypatch.setattr(planner, "with_larger_buckets", noted)
    planner.plan(problem_of(chain_of(3)))
    assert seen == [False]
    assert gc.isenabled()


# ----------------------------------------------------------------------------------------------------------------------
# The bound by pricing, and whole answers near the optimum that it is of.


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


def test_each_answer_is_in_one_part_of_a_divided_milp_and_takes_as_long_there() -> None:
    draw, num_in = random.Random(0), [0, 0]
    for milp in milps():
        for number, gate in enumerate(milp.gates):
            at = draw.randrange(len(gate.takers))
            halves = milp.divided(number, at)
            column = milp.num_choices + len(milp.phases) + gate.first + at
            assert all(half.constraints[-1].columns.tolist() == [column] for half in halves)
            for x in [milp.vector(random_answer(draw, milp.evaluator)) for _ in range(12)]:
                is_one = bool(gate.counts(x)[at] > 0.5)
                limits = [half.constraints[-1] for half in halves]
                assert [own.values[0] * is_one <= own.limit for own in limits] == [not is_one, is_one]
                assert halves[is_one].lower_s(x) == pytest.approx(milp.lower_s(x), rel=1e-9)
                num_in[is_one] += 1
    assert min(num_in) > 10


def test_the_host_waits_for_the_ops_before_activations_that_come_back() -> None:
    """In the MILP that makes candidates; in that of the bound their copies may come at any time."""
    num_late = 0
    for milp in milps():
        assert not any(gate.others for gate in milp.gates)
        nothing = np.zeros(milp.num_choices)
        for gate in milp.with_trips().gates:
            for number, modes in gate.others:
                for column in modes:
                    own, place = next(choice for choice, at in milp.choices.items() if at == column), nothing.copy()
                    place[column] = 1.0
                    assert milp.evaluator.profiles[own[0] - len(milp.evaluator.facts.buckets)][own[1]].trips
                    assert gate.counts(place).tolist() == [1.0] * (number + 1) + [0.0] * (len(gate.takers) - number - 1)
                    num_late += 1
    assert num_late


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


# ----------------------------------------------------------------------------------------------------------------------
# Candidates from counts of equal buckets and layers.


def evaluators() -> Iterator[Evaluator]:
    """Yield evaluators of chains of equal layers on random machines, under budgets that some buckets exceed."""
    for seed in range(8):
        draw = random.Random(seed)
        problem = random_problem_of(chain_of(10), machine(draw, 1 + seed % 2), hybrid=draw.random() < 0.7)
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


def test_counts_decide_behind_which_gradient_the_host_begins() -> None:
    num_divided = 0
    for evaluator in evaluators():
        milp, end = milp_of(evaluator), deadline_in(20)
        part = decided(milp, end, more_bytes=0)
        if part is milp:
            continue
        start, found = (CountedMilp(own).mean(end, more_bytes=0) for own in (milp, part))
        assert start is not None
        assert found is not None
        assert milp.undecided(start.x) is not None
        num_divided += any(gate.least or gate.most is not None for gate in part.gates)
        for gate in part.gates:
            assert gate.counts(found.x)[: gate.least].min(initial=1.0) == 1.0
            most = len(gate.takers) if gate.most is None else gate.most
            assert gate.counts(found.x)[most:].max(initial=0.0) < 1e-6
    assert num_divided


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


# ----------------------------------------------------------------------------------------------------------------------
# `search.formulation.solver`: what C prints during a solve is dropped, and nothing else.


C = ctypes.CDLL(None)


def printed_in_c(text: str) -> None:
    C.puts(text.encode())
    C.fflush(None)


@pytest.fixture
def _glibc() -> None:
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("only of glibc can the stream be set")


@pytest.mark.usefixtures("_glibc")
def test_what_c_prints_in_a_solve_is_dropped_and_what_python_prints_appears(capfd: pytest.CaptureFixture[str]) -> None:
    printed_in_c("before")
    with without_notes():
        printed_in_c("a note of HiGHS")
        print("of this thread", flush=True)
        other = threading.Thread(target=print, args=("of another thread",), kwargs={"flush": True})
        other.start()
        other.join()
        os.write(1, b"of a file descriptor\n")
    printed_in_c("after")
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "after",
        "before",
        "of a file descriptor",
        "of another thread",
        "of this thread",
    ]


@pytest.mark.usefixtures("_glibc")
def test_the_last_of_several_solves_gives_the_stream_back(capfd: pytest.CaptureFixture[str]) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def solve() -> None:
        with without_notes():
            begun.set()
            may_end.wait()

    other = threading.Thread(target=solve)
    other.start()
    assert begun.wait(60)
    with pytest.raises(ZeroDivisionError), without_notes():
        raise ZeroDivisionError
    printed_in_c("while another solves")
    may_end.set()
    other.join()
    printed_in_c("after both")
    assert capfd.readouterr().out == "after both\n"


@pytest.mark.usefixtures("_glibc")
def test_every_solver_of_a_search_is_quiet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    solved: list[str] = []

    def noisy(name: str) -> Any:
        def solve(*args: Any, **kwargs: Any) -> Any:
            solved.append(name)
            printed_in_c(f"a note of {name}")
            return getattr(scipy.optimize, name)(*args, **kwargs)

        return solve

    monkeypatch.setattr(solver, "solve_milp", noisy("milp"))
    monkeypatch.setattr(solver, "linprog", noisy("linprog"))
    monkeypatch.setattr(solver, "linprog", noisy("linprog"))
    plan(tight_problem())
    assert set(solved) == {"milp", "linprog"}
    assert capfd.readouterr().out == ""
