"""Choices over several searches: graphs that keep one budget together, and the settings of an optimizer step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.base.units import MIB, parse_count
from elixir_compile.ir import Bucket, BucketId, Kind, Placement, Plan, StepGraph, StorageId, Tier
from elixir_compile.ir.kinds import Batched
from elixir_compile.search import Problem, extent_of, extents, plan
from elixir_compile.search.evaluator import deadline_in
from elixir_compile.search.joint.joint_budget import GraphRequest, plan_in_least, plan_jointly
from elixir_compile.search.joint.tuning import (
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
from elixir_compile.search.outer import GAIN
from elixir_compile.step.timeline import host_bytes
from tests.pure.problems import CLUSTERS, chain_of, disk_staging, problem_of
from tests.pure.strategies import Layer, chain

# ----------------------------------------------------------------------------------------------------------------------
# `sharing`: graphs that wait for each other keep one budget together.


BESIDE = {"alone": [()], "chain": [(), (0,), (0, 1)], "twice": [(0,)], "thrice": [(0, 0)], "in turn": [(), ()]}


def greedy(problem: Problem) -> Plan:
    return plan(problem, "greedy")


def turns_of(name: str, budget_bytes: int) -> list[GraphRequest]:
    graphs = [chain_of(2 + number % 2) for number in range(len(BESIDE[name]))]
    problems = [problem_of(graph, budget_bytes=budget_bytes, base_bytes=100) for graph in graphs]
    return [
        GraphRequest(problem=problem, beside=beside) for problem, beside in zip(problems, BESIDE[name], strict=True)
    ]


@cache
def least_bytes(name: str) -> int:
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(turns_of(name, 1), greedy)
    return caught.value.needed_bytes


@given(st.sampled_from(sorted(BESIDE)), st.sampled_from([1.05, 1.2, 1.5, 2.0, 10.0]))
@settings(max_examples=25)
def test_plans_keep_the_budget_together(name: str, times: float) -> None:
    """What each needs while it runs, all that the others hold included, counted here once more."""
    requests = turns_of(name, int(times * least_bytes(name)))
    planned = plan_jointly(requests, greedy)
    held = [extent_of(problem.graph, made) for problem, made in planned]
    for number, (request, (_, made)) in enumerate(zip(requests, planned, strict=True)):
        resident_bytes = sum(own.resident_bytes for own in held) - held[number].resident_bytes
        left_bytes = sum(held[other].left_bytes for other in request.beside)
        needed_bytes = request.problem.base_bytes + resident_bytes + left_bytes + held[number].peak_bytes
        assert needed_bytes <= made.prediction.device_peak_bytes <= request.problem.budget_bytes


@pytest.mark.parametrize("name", sorted(BESIDE))
def test_the_least_budget_has_plans_and_a_smaller_one_has_none(name: str) -> None:
    least, planned = plan_in_least(turns_of(name, 1), 1, greedy)
    assert max(made.prediction.device_peak_bytes for _, made in planned) <= least
    assert {made.budget_bytes for _, made in planned} == {least}
    with pytest.raises(NoFeasiblePlan):
        plan_jointly(turns_of(name, least - least // 32), greedy)
    assert plan_in_least(turns_of(name, 1), 2 * least, greedy)[0] == 2 * least


def test_with_room_for_everything_nothing_moves() -> None:
    requests = turns_of("chain", 1 << 30)
    for request, (_, made) in zip(requests, plan_jointly(requests, greedy), strict=True):
        alone = greedy(request.problem)
        assert (made.placements, made.activations) == (alone.placements, alone.activations)


def test_extents_hold_every_plan() -> None:
    problem = problem_of(chain_of(3))
    low, high = extents(problem)
    assert low.left_bytes < high.left_bytes
    assert low.resident_bytes == 0 < high.resident_bytes
    assert extent_of(problem.graph, greedy(problem)) == high
    tight = greedy(replace(problem, budget_bytes=low.peak_bytes))
    assert extent_of(problem.graph, tight).peak_bytes == low.peak_bytes


@pytest.mark.parametrize("field", ["between_bytes", "after_bytes"])
def test_bytes_that_others_need_stay_free(field: str) -> None:
    """Nothing fits above the budget, and below it something has to go that would stay otherwise."""
    problem = problem_of(chain_of(3), budget_bytes=100_000)
    free = extent_of(problem.graph, greedy(problem))
    pressed = greedy(replace(problem, **{field: 100_000 - free.resident_bytes}))
    held = extent_of(problem.graph, pressed)
    assert held.resident_bytes + held.left_bytes < free.resident_bytes + free.left_bytes
    with pytest.raises(NoFeasiblePlan) as caught:
        greedy(replace(problem, **{field: 200_000}))
    assert caught.value.needed_bytes > 100_000


def renamed(graph: StepGraph) -> StepGraph:
    """`graph` with parameters of other names, as another graph of the step has them."""

    def other(name: StorageId) -> StorageId:
        return StorageId(f"other.{name}")

    return replace(
        graph,
        storages=tuple(replace(s, id=other(s.id), of=None if s.of is None else other(s.of)) for s in graph.storages),
        ops=tuple(
            replace(op, reads=tuple(map(other, op.reads)), writes=tuple(map(other, op.writes))) for op in graph.ops
        ),
        outputs=tuple(map(other, graph.outputs)),
        aliases=tuple((value, other(name)) for value, name in graph.aliases),
    )


def two_in_force(host_budget_bytes: int, *, disk: bool = False) -> list[GraphRequest]:
    """Two graphs with parameters of their own, in force on the device, of which little fits there."""
    alone = [problem_of(chain_of(3), hybrid=True), problem_of(renamed(chain_of(3)), hybrid=True)]
    buckets: list[Bucket] = []
    for number, problem in enumerate(alone):
        made = greedy(problem).buckets
        buckets += [replace(bucket, id=BucketId(f"b{number}{i}")) for i, bucket in enumerate(made)]
    homes = tuple(
        Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for bucket in buckets
    )
    problems = [
        replace(problem, buckets=tuple(buckets), placements=homes, host_budget_bytes=host_budget_bytes, disk=disk)
        for problem in alone
    ]
    needed = [GraphRequest(problem=replace(problem, budget_bytes=1), beside=()) for problem in problems]
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(needed, greedy)
    budget_bytes = int(1.1 * caught.value.needed_bytes)
    return [GraphRequest(problem=replace(problem, budget_bytes=budget_bytes), beside=()) for problem in problems]


def test_plans_keep_the_budget_of_the_host_together() -> None:
    def held_bytes(requests: list[GraphRequest]) -> list[int]:
        return [host_bytes(made) for _, made in plan_jointly(requests, greedy)]

    free = held_bytes(two_in_force(1 << 30))
    assert min(free) > 0
    assert sum(held_bytes(two_in_force(sum(free)))) <= sum(free)
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(two_in_force(max(free)), greedy)
    assert (caught.value.memory, caught.value.budget_bytes) == ("host", max(free))
    assert caught.value.needed_bytes > max(free)
    less = 2 * sum(free) // 3
    with disk_staging(0):
        assert sum(held_bytes(two_in_force(less, disk=True))) <= less


def two_readers(budgets: tuple[int, int], models: tuple[int, int]) -> list[GraphRequest]:
    """Two graphs with buckets of equal names in force on the device: those of one model, or of two."""
    problem = problem_of(chain_of(3), hybrid=True)
    buckets = greedy(problem).buckets
    homes = tuple(
        Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for bucket in buckets
    )
    there = replace(problem, buckets=buckets, placements=homes)
    return [
        GraphRequest(problem=replace(there, budget_bytes=budget), beside=(), model=model)
        for budget, model in zip(budgets, models, strict=True)
    ]


def test_what_graphs_of_one_model_read_together_is_there_once() -> None:
    kept = extents(two_readers((1 << 30, 1 << 30), (0, 0))[0].problem)[1]
    budget_bytes = kept.peak_bytes + kept.grad_bytes

    def resident_bytes(models: tuple[int, int]) -> list[int]:
        requests = two_readers((budget_bytes, budget_bytes), models)
        return [extent_of(problem.graph, made).resident_bytes for problem, made in plan_jointly(requests, greedy)]

    assert resident_bytes((0, 0)) == [kept.resident_bytes] * 2
    assert sum(resident_bytes((0, 1))) <= budget_bytes < 2 * kept.resident_bytes + kept.grad_bytes


def test_each_graph_keeps_the_budget_of_its_own_model() -> None:
    kept = extents(two_readers((1 << 30, 1 << 30), (0, 1))[0].problem)[1]
    budgets = 2 * kept.peak_bytes, int(1.2 * kept.peak_bytes)
    for budget_bytes, (_, made) in zip(budgets, plan_jointly(two_readers(budgets, (0, 1)), greedy), strict=True):
        assert made.prediction.device_peak_bytes <= budget_bytes
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(two_readers((budgets[0], 1), (0, 1)), greedy)
    assert caught.value.budget_bytes == 1


# ----------------------------------------------------------------------------------------------------------------------
# The settings of an optimizer step: which there are, which is the fastest, and what is proved of the others.


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


@pytest.mark.parametrize(
    "budget_mib", [300, pytest.param(186, marks=pytest.mark.slow), 120, pytest.param(60, marks=pytest.mark.slow), 40]
)
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
