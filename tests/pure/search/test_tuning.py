"""The settings of an optimizer step: which there are, which is the fastest, and what is proved of the others."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from elixir_compile.base.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.base.units import MIB, parse_count
from elixir_compile.ir import Kind, Plan, StepGraph, Tier
from elixir_compile.ir.kinds import Batched
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import deadline_in
from elixir_compile.search.joint.tuning import (
    GAIN,
    TOLERANCE,
    Setting,
    Stage,
    Trial,
    again_bound_s,
    again_record,
    limits_of,
    splits,
    tune,
)
from tests.pure.search.test_planner import CLUSTERS, problem_of
from tests.pure.strategies import Layer, chain

SEQ = 16
QUICK_S = 0.3
"""Limits each search: what is tested holds for the plan found by then."""


def graph_of(rows: int) -> StepGraph:
    """Return a chain of two layers with 4 MiB of parameters each, whose activations have 2 MiB for each trial.

    Within a layer, between its two ops, a temporary tensor has 16 MiB for each trial.
    """
    layers = [
        Layer(module=f"h.{number}", params=((f"p{number}", MIB),), frozen=False, act_numel=rows * MIB // 2)
        for number in range(2)
    ]
    graph = chain(layers)
    kinds = {Kind.INPUT: Batched.EACH, Kind.TEMP: Batched.EACH, Kind.SAVED: Batched.EACH, Kind.GRAD: Batched.SUM}
    storages = (
        replace(
            own, batched=kinds.get(own.kind, Batched.SAME), nbytes=own.nbytes * (8 if own.id in ("t0", "t1") else 1)
        )
        for own in graph.storages
    )
    return replace(graph, batch=rows, storages=tuple(storages))


class HandMade:
    """The questions about `graph_of` under a budget; each setting is planned once."""

    def __init__(self, budget_mib: float, host_mib: float = 1024) -> None:
        self.budget_bytes, self.host_bytes = int(budget_mib * MIB), int(host_mib * MIB)
        self.planned: dict[Setting, tuple[Plan, Problem] | NoFeasiblePlan] = {}

    def problem(self, setting: Setting) -> Problem:
        graph = graph_of(setting.rows)
        trained = {storage.of: storage.nbytes for storage in graph.storages if storage.kind is Kind.GRAD}
        accumulates = setting.forwards > 1
        return problem_of(
            graph,
            CLUSTERS["cuda"],
            budget_bytes=self.budget_bytes,
            host_budget_bytes=self.host_bytes,
            state_nbytes={name: nbytes // 4 * (setting.state_bytes or 8) for name, nbytes in trained.items()},
            accumulates=accumulates,
            sum_nbytes=trained if accumulates else {},
            micro_batches=setting.micro_batches,
            bucket_min_bytes=MIB,
            bucket_max_bytes=4 * MIB,
            moves_what_fits=True,
        )

    def forms(self, setting: Setting) -> Iterator[Problem]:
        yield self.problem(setting)

    def numbers(self, rows: int) -> list[int]:
        return [number for number in (1, 4) if rows % number == 0]

    def plan(self, setting: Setting) -> tuple[Plan, Problem]:
        if setting not in self.planned:
            problem = self.problem(setting)
            try:
                self.planned[setting] = plan(problem, timeout_s=QUICK_S), problem
            except NoFeasiblePlan as error:
                self.planned[setting] = error
        found = self.planned[setting]
        if isinstance(found, NoFeasiblePlan):
            raise found
        return found


def settings_of(tokens: int = 8 * SEQ, states: tuple[int, ...] = (8, 12)) -> list[Setting]:
    return [
        Setting(rows=rows, forwards=forwards, state_bytes=state, tokens=rows * forwards * SEQ)
        for state in states
        for rows, forwards in splits(tokens, SEQ)
    ]


def seconds_alone(asked: HandMade, setting: Setting) -> float | None:
    """Return the seconds of an optimizer step with `setting`, planned alone; None if it does not fit."""
    try:
        made, problem = asked.plan(setting)
    except NoFeasiblePlan:
        return None
    return made.prediction.step_s + (setting.forwards - 1) * again_record(problem, made).step_s


@pytest.mark.parametrize("budget_mib", [300, 186, 120, 60, 40])
def test_the_best_row_and_the_bounds_agree_with_planning_every_setting(budget_mib: int) -> None:
    asked = HandMade(budget_mib)
    tuned = tune(settings_of(), asked, 600.0)
    alone = {trial.setting: seconds_alone(asked, trial.setting) for trial in tuned.trials}
    assert len(alone) == len(tuned.trials) == 2 * (2 + 2 + 1 + 1)
    rates = {setting: setting.tokens / step_s for setting, step_s in alone.items() if step_s is not None}
    for state in (8, 12):
        own = tuned.of_state(state)
        assert own is not None
        fastest = max(rate for setting, rate in rates.items() if setting.state_bytes == state)
        assert own.best.tokens_per_s >= fastest * (1 - GAIN) - 1e-9
        assert own.best.tokens_per_s * (1 + own.gap) >= fastest * (1 - 1e-9)
    for trial in tuned.trials:
        step_s = alone[trial.setting]
        if trial.stage is Stage.SEARCHED:
            assert trial.step_s == step_s
        if step_s is not None:
            assert trial.stage is not Stage.TOO_LARGE
            assert trial.bound_s <= step_s * (1 + 1e-9)
    assert tuned.is_complete


def test_settings_that_their_bounds_show_to_be_no_faster_are_not_searched() -> None:
    """With all memory, the forward and backward alone prove that fewer rows and micro-batches gain nothing."""
    asked = HandMade(1024)
    tuned = tune(settings_of(), asked, 600.0)
    best = tuned.best.setting
    assert (best.rows, best.forwards, best.micro_batches) == (8, 1, 1)
    assert {trial.stage for trial in tuned.trials} == {Stage.SEARCHED, Stage.NOT_BETTER}
    assert len(asked.planned) < len(tuned.trials) / 2


def test_little_memory_takes_fewer_rows_or_more_micro_batches() -> None:
    whole, little = (tune(settings_of(states=(8,)), HandMade(mib), 600.0) for mib in (300, 120))
    assert (whole.best.setting.rows, little.best.setting.rows) == (8, 2)
    assert any(trial.stage is Stage.TOO_LARGE and trial.needed_bytes > 120 * MIB for trial in little.trials)
    fixed = [setting for setting in settings_of(states=(8,)) if setting.rows == 8]
    assert tune(fixed, HandMade(120), 600.0).best.setting.micro_batches == 4


def test_if_the_time_is_over_the_rest_is_not_searched_and_the_gap_says_so() -> None:
    full, early = (tune(settings_of(states=(8,)), HandMade(60), timeout_s) for timeout_s in (600.0, 1e-9))
    assert not early.is_complete
    assert sum(trial.plan is not None for trial in early.trials) == 1
    assert early.best.tokens_per_s * (1 + early.gap) >= full.best.tokens_per_s
    assert Stage.NOT_SEARCHED in {trial.stage for trial in early.trials}


def test_if_nothing_fits_the_error_is_that_of_the_setting_with_the_smallest_need() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        tune(settings_of(), HandMade(2), 600.0)
    needs = []
    for setting in settings_of(states=(8,)):
        for number in HandMade(2).numbers(setting.rows):
            with pytest.raises(NoFeasiblePlan) as other:
                HandMade(2).plan(replace(setting, micro_batches=number))
            needs.append(other.value.needed_bytes)
    assert caught.value.needed_bytes == min(needs)
    with pytest.raises(NoFeasiblePlan) as host:
        tune(settings_of(), HandMade(40, host_mib=2), 600.0)
    assert host.value.memory == "host"


def test_the_forwards_between_updates_take_no_update_and_their_bound_is_below_each_plan() -> None:
    setting = Setting(rows=1, forwards=8, state_bytes=8, tokens=8 * SEQ)
    for budget_mib in (300, 60, 40):
        made, problem = HandMade(budget_mib).plan(setting)
        again = again_record(problem, made)
        assert not any(span.label.startswith("update") for span in again.spans)
        assert 0 < again.step_s <= made.prediction.step_s
        assert 0 < again_bound_s(problem, deadline_in(5.0)) <= again.step_s * (1 + 1e-9)
        assert any(home.optim is Tier.HOST for home in made.placements) == (budget_mib == 40)
        limits = limits_of(problem, made, again, setting.forwards - 1)
        assert any(limit.startswith("compute ") for limit in limits)


def test_exact_splits_are_the_rows_with_the_most_factors_of_two() -> None:
    assert splits(16 * SEQ, SEQ) == [(16, 1), (8, 2), (4, 4), (2, 8), (1, 16)]
    assert splits(12 * SEQ, SEQ) == [(12, 1), (4, 3), (2, 6), (1, 12)]
    assert splits(12 * 2 * SEQ, SEQ, 2) == splits(12 * SEQ, SEQ)
    assert splits(7 * SEQ, SEQ) == [(7, 1), (1, 7)]
    assert splits(16 * SEQ, SEQ, rows=4) == [(4, 4)]
    assert splits(24 * SEQ, SEQ, divisor=3) == [(24, 1), (12, 2), (6, 4), (3, 8)]


@pytest.mark.parametrize(("text", "seq"), [("64k", 1024), ("128k", 2048), ("500k", 1024), ("0.5M", 512), ("1M", 4096)])
def test_round_numbers_of_tokens_are_met_within_the_tolerance(text: str, seq: int) -> None:
    tokens = parse_count(text)
    pairs = splits(tokens, seq)
    assert len(pairs) >= 5
    assert all(abs(rows * forwards * seq / tokens - 1) <= TOLERANCE for rows, forwards in pairs)
    assert len({rows.bit_length() for rows, _ in pairs}) == len(pairs)
    assert pairs[0][1] == 1


@pytest.mark.parametrize(
    ("tokens", "more", "nearest"),
    [(100, {}, "1024: a multiple"), (2500, {}, "2048 or 3072: a multiple of 1024, the tokens of a row"),
     (16384, {"rows": 3}, "15360 or 18432: a multiple of 3072, the tokens of 3 rows on each rank")],
)  # fmt: skip
def test_tokens_that_cannot_be_divided_name_the_nearest_that_can(
    tokens: int, more: dict[str, int], nearest: str
) -> None:
    with pytest.raises(InvalidOption, match=nearest) as caught:
        splits(tokens, 1024, **more)
    assert (caught.value.name, caught.value.got) == ("tokens_per_step", tokens)


def test_a_row_without_a_plan_has_a_limit_on_its_tokens_per_second() -> None:
    trial = Trial(setting=Setting(rows=2, forwards=3, tokens=6 * SEQ), bound_s=2.0)
    assert trial.most_tokens_per_s == 3 * SEQ
    trial.stage = Stage.TOO_LARGE
    assert (trial.most_tokens_per_s, trial.needed_bytes) == (0.0, 0)
