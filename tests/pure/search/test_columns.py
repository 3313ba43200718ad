"""The columns of the MILP against a plain count of each choice on its own, and how often their work is computed."""

import gc
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from elixir_compile.ir import GroupId, Lane, Update
from elixir_compile.ir.cost import copy_s
from elixir_compile.search import Problem, planner
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation.cross_step_updates import RunTables, flow_shops
from elixir_compile.search.formulation.flow_shop import Chain, Gated, Phase, Shop, longest_s
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.space.buckets import Level, is_gathered
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import spans
from tests.pure.search.test_best import SAVINGS, machine, random_answer
from tests.pure.search.test_planner import chain_of, problem_of

_Event = tuple[int, bool, int]


def milps() -> Iterator[Milp]:
    """Yield the MILPs of chains on random machines of one and two ranks, in all update modes."""
    for seed in range(12):
        draw = random.Random(seed)
        problem = problem_of(chain_of(5), machine(draw, 1 + seed % 2, draw.choice([0.7, 1.0])))
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

    def matrix(self, lanes: tuple[Lane, ...]) -> NDArray[np.float64]:
        """Return seconds[lane, event, choice] of the work on `lanes`."""
        found = np.zeros((len(lanes), len(self.events), self.milp.num_choices))
        for (owner, option), column in self.milp.choices.items():
            is_stream = column >= self.milp.num_options
            is_bucket = owner < len(self.facts.buckets)
            work = () if is_stream else self.bucket(owner, Level(option)) if is_bucket else self.mode(owner, option)
            for lane, event, seconds in work:
                if self.prices.lane_of[lane] in lanes:
                    found[lanes.index(self.prices.lane_of[lane]), event, column] += seconds
        return found

    def bucket(self, i: int, level: Level) -> Iterator[tuple[Lane, int, float]]:
        name, gradients, prices = self.facts.buckets[i].id, self.facts.gradients[i], self.prices
        # An all-gather behind a copy that compute makes is on no path.
        is_sent = level.has_param_on_host
        is_on_a_path = prices.lane_of[Lane.H2D] is not Lane.COMPUTE or prices.lane_of[Lane.GATHER] is Lane.COMPUTE
        for first, _ in spans(self.facts, i, level):
            if self.first <= first < self.end and (is_on_a_path or not is_sent):
                event = self.events.index((first, True, i))
                yield Lane.GATHER, event, prices.gather_s[name]
                yield Lane.H2D, event, prices.h2d_s[name] if is_sent else 0.0
        if gradients is not None and self.first <= gradients.complete < self.end:
            if is_gathered(self.facts.buckets[i], level):
                event = self.events.index((gradients.complete + 1, False, i))
                yield Lane.REDUCE, event, prices.reduce_s[name] + prices.average_s.get(name, 0.0)
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
    num_modes = num_copied = 0
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
                for copied in shops[1:]:
                    assert_equal(Plain(milp, *ends[copied.name], has_trips=True), copied)
                    num_copied += 1
    assert num_modes > 40
    assert num_copied


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
        answers = [milp.vector(random_answer(draw, milp.evaluator)) for _ in range(12)]
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
