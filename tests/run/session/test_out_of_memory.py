"""A device that is full: new plans with less memory, and what its allocator holds beyond tensors."""

import functools
import itertools
import logging
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.errors import EXPANDABLE_SEGMENTS, MEASURED_OF_THEM, NoFeasiblePlan, OutOfDeviceMemory
from elixir_compile.base.units import GIB, KIB, MIB
from elixir_compile.compat.platforms import platform_of
from elixir_compile.compat.platforms.platform import Platform
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import plan
from elixir_compile.search.joint.joint_budget import Planned
from elixir_compile.session import over_budget as out_of_memory
from elixir_compile.session.allocator_gaps import SEGMENT_BYTES, AllocatorGaps, Held, fix
from elixir_compile.session.over_budget import EarlyShortage, FailedAllocation
from elixir_compile.session.step_profiler import StepProfiler
from tests.pure.problems import chain_of, problem_of
from tests.run.models import ShortStack, seeded, vectors
from tests.run.training import (
    Run,
    assert_same,
    by_elixir,
    free_bytes,
    least_bytes,
    loss_of,
    plain_step,
    planned_peak_bytes,
)

# ----------------------------------------------------------------------------------------------------------------------
# A device that is full in an early step: one new plan with less memory, then an error with the largest tensors.


PLAIN = {"planner": "greedy", "plan_cache": False}
TEXT = "CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 has a total capacity of 79.11 GiB"


def fail(monkeypatch: pytest.MonkeyPatch, verb: str, *numbers: int, text: str = TEXT) -> None:
    """Let the calls of `verb` with these numbers, from 0, find the device full."""
    real, calls = getattr(Executor, verb), []

    def called(*args: Any) -> Any:
        calls.append(verb)
        if len(calls) - 1 in numbers:
            raise torch.OutOfMemoryError(text)
        return real(*args)

    monkeypatch.setattr(Executor, verb, called)


def run_with_slack() -> Run:
    """Return a run under a budget 64 KiB above what it needs if nothing is offloaded."""
    full = free_bytes(seeded(ShortStack), vectors(1)[0], **PLAIN)
    return by_elixir(seeded(ShortStack), device_memory=full + 16 * KIB, **PLAIN)


@dataclass(frozen=True)
class Untroubled:
    """What `run_with_slack` is after some steps of which none finds the device full."""

    losses: list[torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    plan: Plan


@functools.cache
def untroubled(num_steps: int) -> Untroubled:
    """Return it without the model, whose budget would be shared with the models of tests."""
    run = run_with_slack().train(vectors(num_steps))
    return Untroubled(run.losses, run.weights, elixir.compilations(run.model)[0].plan)


def base_bytes(run: Run) -> int:
    return elixir.compilations(run.model)[0].plan.base_bytes


def test_a_forward_that_finds_the_device_full_is_planned_again_and_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="elixir_compile")
    expected, run = untroubled(3), run_with_slack()
    fail(monkeypatch, "ticket", 0, 1)
    run.train(vectors(3))
    assert_same(expected, run)
    assert base_bytes(run) == expected.plan.base_bytes + 128 * KIB
    assert planned_peak_bytes(run) <= expected.plan.prediction.device_peak_bytes + 16 * KIB
    assert any("64.0 KiB requested" in message and "128.0 KiB less" in message for message in caplog.messages)


def test_a_first_forward_that_finds_the_device_full_runs_again_under_its_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels are tuned in it, which takes memory that later forwards do not need."""
    expected, run = untroubled(3), run_with_slack()
    fail(monkeypatch, "ticket", 0)
    platform = Mock(wraps=platform_of(torch.device("cpu")))
    monkeypatch.setattr(out_of_memory, "platform_of", lambda device: platform)
    run.train(vectors(3))
    assert_same(expected, run)
    assert elixir.compilations(run.model)[0].plan == expected.plan
    assert platform.empty_cache.call_count == 1
    assert any("which tunes kernels: it runs again" in message for message in caplog.messages)


def test_a_later_forward_that_finds_the_device_full_is_planned_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run = untroubled(3), run_with_slack()
    fail(monkeypatch, "ticket", 1)
    run.train(vectors(3))
    assert_same(expected, run)
    assert base_bytes(run) == expected.plan.base_bytes + 128 * KIB


def test_after_a_backward_that_finds_the_device_full_the_next_forward_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, run = untroubled(2), run_with_slack()
    fail(monkeypatch, "check", 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    (note,) = raised.value.__notes__
    del raised  # it holds the tensors of the step
    assert "64.0 KiB were asked for beside 0 B of tensors and 0 B of gaps" in note
    (record,) = elixir.compilations(run.model)
    assert record.plan is not None
    assert f"device_memory={record.plan.budget_bytes - 128 * KIB} would leave room for that" in note
    assert EXPANDABLE_SEGMENTS in note
    assert "The next forward is planned with so much less" in note
    run.train(vectors(2))
    assert_same(expected, run)
    assert base_bytes(run) == expected.plan.base_bytes + 128 * KIB


@pytest.mark.parametrize(("verb", "numbers"), [("ticket", (0, 1, 2)), ("check", (0, 1))])
def test_a_second_time_the_error_names_the_largest_tensors(
    verb: str, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_slack()
    fail(monkeypatch, verb, *numbers)
    if verb == "check":
        with pytest.raises(torch.OutOfMemoryError):
            plain_step(run.compiled, run.optimizer, vectors(1)[0])
    with pytest.raises(OutOfDeviceMemory) as raised:
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    error = raised.value
    assert len(error.largest) == 5
    assert max(error.largest, key=lambda name: error.largest[name]) in str(error)
    assert "expandable_segments:True" in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_late_step_raises_the_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = by_elixir(seeded(ShortStack), **PLAIN)
    run.train(vectors(8))
    before = base_bytes(run)
    fail(monkeypatch, "ticket", 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        loss_of(run.compiled, vectors(1)[0])
    run.train(vectors(1))
    assert base_bytes(run) == before


@pytest.mark.parametrize(
    ("budget", "planned", "allocated", "gap", "limit", "excess"),
    [
        (60, 60, 80, 0, None, 2),  # a measured budget leaves the 20 GiB of others out already
        (60, 50, 80, 0, None, 12),  # 10 GiB that the plan did not count, the request, and a gap of its size
        (60, 60, 60, 0, None, 2),
        (80, 80, 80, 0, 80, 22),  # a budget of the user with the 20 GiB of others in it
        (100, 100, 80, 0, 80, 42),
        (50, 50, 70, 0, 80, 1),  # a budget of the user that leaves more than the 20 GiB
        (80, 80, 80, 19, 100, 20),  # gaps of 19 GiB that no tensor fits in: as much less, and the request
        (60, 60, 60, 15, None, 16),
        (60, 60, 80, 15, 200, 1),  # the device has room for the gaps beside the budget
    ],
)
def test_the_excess_counts_each_byte_once(
    budget: int, planned: int, allocated: int, gap: int, limit: int | None, excess: int
) -> None:
    failed = FailedAllocation(
        budget_bytes=budget * GIB,
        planned_bytes=planned * GIB,
        allocated_bytes=allocated * GIB,
        requested_bytes=GIB,
        gap_bytes=gap * GIB,
    )
    assert failed.excess_bytes(20 * GIB, None if limit is None else limit * GIB) == excess * GIB


def test_an_unknown_request_counts_as_a_sixteenth_of_the_budget() -> None:
    failed = FailedAllocation(budget_bytes=64, planned_bytes=60, allocated_bytes=60, requested_bytes=0)
    assert failed.excess_bytes(0, None) == 4 + 4


def test_an_early_forward_keeps_no_input_alive_and_does_not_run_again_without_it() -> None:
    runs: list[str] = []

    def run_forward(args: list[Any]) -> None:
        runs.append("forward")
        died = weakref.ref(args[0])
        args.clear()
        assert died() is None
        raise torch.OutOfMemoryError(TEXT)

    prediction = SimpleNamespace(device_peak_bytes=1)
    plan = SimpleNamespace(budget_bytes=1, prediction=prediction)
    active = SimpleNamespace(plan=plan, graph=StepGraph(name="m", ops=(), storages=(), outputs=()))
    graph: Any = SimpleNamespace(active=active, run_forward=run_forward)
    planner: Any = SimpleNamespace(may_replan=True, excess_bytes=0)
    shortage = EarlyShortage("m", Executor(torch.device("cpu"), "m"), planner)
    for number, wants_plan in enumerate([False, True]):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            shortage.forward(graph, [torch.zeros(2), 3])
        assert runs == ["forward"] * (number + 1)
        assert shortage.wants_plan == wants_plan, "the first forward may lack what tuning took"


class Normed(ShortStack):
    """A stack whose forward writes statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = torch.nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(x))


def test_a_forward_that_writes_its_inputs_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_elixir(seeded(Normed), **PLAIN)
    loss_of(expected.compiled, vectors(1)[0])
    expected.train(vectors(2))
    run = by_elixir(seeded(Normed), **PLAIN)
    fail(monkeypatch, "end", 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        loss_of(run.compiled, vectors(1)[0])
    run.train(vectors(2))
    assert_same(expected, run)
    assert base_bytes(run) == base_bytes(expected) + 128 * KIB


def test_the_backward_of_the_last_early_forward_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    run = by_elixir(seeded(ShortStack), **PLAIN)
    run.train(vectors(6))
    before = base_bytes(run)
    fail(monkeypatch, "check", 0)
    with pytest.raises(torch.OutOfMemoryError):
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    run.train(vectors(1))
    assert base_bytes(run) == before + 128 * KIB


@pytest.mark.parametrize("verb", ["ticket", "check"])
def test_if_no_plan_needs_so_much_less_it_is_planned_with_as_much_as_there_is(
    verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, run = untroubled(2), run_with_slack()
    full_bytes = expected.plan.prediction.device_peak_bytes
    fail(monkeypatch, verb, 0, *([1] if verb == "ticket" else []), text=TEXT.replace("64.00 KiB", "64.00 GiB"))
    if verb == "check":
        with pytest.raises(torch.OutOfMemoryError):
            plain_step(run.compiled, run.optimizer, vectors(1)[0])
    run.train(vectors(2))
    assert_same(expected, run)
    base = base_bytes(run) - expected.plan.base_bytes
    assert 0 < base < full_bytes
    assert planned_peak_bytes(run) - base < 0.6 * full_bytes
    assert any("no plan needs so much less; it is planned with" in message for message in caplog.messages)


@pytest.mark.parametrize("verb", ["ticket", "check"])
def test_if_no_plan_needs_less_the_error_names_the_largest_tensors(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(ShortStack)
    run = by_elixir(model, device_memory=least_bytes(model, vectors(1)[0]), **PLAIN)
    fail(monkeypatch, verb, 0, 1, text=TEXT.replace("64.00 KiB", "64.00 GiB"))
    if verb == "check":
        with pytest.raises(torch.OutOfMemoryError):
            plain_step(run.compiled, run.optimizer, vectors(1)[0])
    with pytest.raises(OutOfDeviceMemory, match="no plan with less memory helped") as raised:
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    assert len(raised.value.largest) == 5
    assert isinstance(raised.value.__cause__, NoFeasiblePlan)


def test_the_first_steps_of_a_later_plan_are_early_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer batch is planned again: under the new plan the device may be full, although it was not before."""
    run = by_elixir(seeded(ShortStack), dynamic=True, **PLAIN).train(vectors(9))
    fail(monkeypatch, "check", 0)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        plain_step(run.compiled, run.optimizer, torch.cat(vectors(3)))
    assert "The next forward is planned with so much less" in raised.value.__notes__[0]


def test_the_steps_are_measured_anew_after_a_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with_slack()
    restarted: list[StepProfiler] = []
    monkeypatch.setattr(StepProfiler, "restart", lambda profiler: restarted.append(profiler))
    fail(monkeypatch, "ticket", 3)
    run.train(vectors(3))
    assert not restarted
    run.train(vectors(1))
    assert len(restarted) == 1


@pytest.mark.parametrize("verb", ["ticket", "check"])
def test_a_shortage_in_a_later_step_names_the_plan_and_its_largest_tensors(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """`ticket` is called in the forward, `check` in the backward."""
    run = by_elixir(seeded(ShortStack), **PLAIN, micro_batches=1).train(vectors(8))
    fail(monkeypatch, verb, 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"64\.00 KiB") as raised:
        run.train(vectors(1))
    (note,) = raised.value.__notes__
    compilation = elixir.compilations(run.model)[0]
    assert compilation.plan is not None
    assert compilation.plan.prediction.device_peak_at in note
    assert "blocks." in note
    assert "64.0 KiB were asked for" in note
    assert "The next forward" not in note, "later steps are not planned again"
    assert "KiB" in note
    run.train(vectors(1))


# ----------------------------------------------------------------------------------------------------------------------
# `allocator_gaps`: what the allocator holds is compared with the budget, by figures of a device that is not there.


PROBLEM = problem_of(chain_of(3))
MADE = plan(PROBLEM, "greedy")
BUDGET, PEAK = 4 * GIB, 3 * GIB


def plans() -> list[Planned]:
    """Return the plan of a graph, another object with each call."""
    prediction = replace(MADE.prediction, device_peak_bytes=PEAK)
    return [(PROBLEM, replace(MADE, budget_bytes=BUDGET, prediction=prediction))]


def no_plans(needed_bytes: int = 6 * GIB) -> NoFeasiblePlan:
    return NoFeasiblePlan("", "", BUDGET, needed_bytes, {})


class Device(Platform):
    """A device whose allocator says in each step what the test says."""

    def __init__(self, held: Sequence[int], peak_bytes: int = PEAK, *, retries: int = 0) -> None:
        super().__init__("cpu")
        self.held, self.peak, self.retries = list(held), peak_bytes, retries
        self.num_freed = self.num_asked = self.num_peaks = 0
        self.in_one: list[tuple[int, int]] = []
        """What was to be taken as one segment, and how much more was to be free, each time."""

    @property
    def has_own_memory(self) -> bool:
        return True

    def reserved_bytes(self, device: torch.device) -> int:
        return self.held[min(self.num_asked, len(self.held)) - 1]

    def alloc_retries(self, device: torch.device) -> int:
        self.num_asked += 1
        return self.retries * self.num_asked

    def empty_cache(self) -> None:
        self.num_freed += 1

    def hold(self, device: torch.device, nbytes: int, *, spare_bytes: int) -> None:
        self.in_one.append((nbytes, spare_bytes))

    def peak_bytes(self, device: torch.device) -> int:
        self.num_peaks += 1
        return self.peak - self.num_peaks % 2  # it rises while it is measured


@dataclass
class Training:
    """Steps of a model on a device; `make` answers when plans are to leave room for gaps."""

    device: Device
    budget_bytes: int | None = BUDGET
    foreign_bytes: int = 0
    why_fixed: str = ""
    make: Callable[[], Sequence[Planned]] = plans
    planned: Sequence[Planned] = field(default_factory=plans)
    found: list[tuple[int, Held]] = field(default_factory=list)
    """The number of each step before which the graphs were to be planned again, and what was found."""

    def __post_init__(self) -> None:
        self.gaps = AllocatorGaps(Executor(torch.device("cpu"), "m"))
        self.gaps._platform = self.device

    def steps(self, num: int) -> "Training":
        for _ in range(num):
            held = self.gaps.found(
                self.planned, lambda: self.foreign_bytes, given_bytes=self.budget_bytes, why_fixed=self.why_fixed
            )
            if held is None:
                continue
            self.found.append((self.device.num_asked - 1, held))
            answer = self.gaps.answer(held, self.make)
            if answer is not None:
                self.planned = answer
                self.gaps.begin(answer)
        return self


LOW, HIGH = 4 * GIB, 5 * GIB
CASES: dict[str, tuple[Training, int, list[int]]] = {
    # by name: steps, times that the cache is freed in five of them, steps that are planned again
    "less than the budget": (Training(Device([LOW])), 0, []),
    "more behind compilation": (Training(Device([LOW, HIGH, LOW])), 1, []),
    "more behind compilation and behind that": (Training(Device([LOW, HIGH, HIGH, LOW])), 2, [2]),
    "more in the second step behind a cache that was freed": (Training(Device([HIGH, HIGH, LOW, HIGH, LOW])), 2, [3]),
    "more in the fourth step": (Training(Device([HIGH, HIGH, LOW, LOW, LOW, HIGH])), 1, []),
    "a measured budget": (Training(Device([HIGH]), budget_bytes=None), 0, []),
    "a measured budget, no room": (Training(Device([LOW], retries=1), budget_bytes=None), 4, [2, 3, 4]),
    "a given budget, no room": (Training(Device([LOW], retries=1)), 4, [2, 3, 4]),
    "a plan that must stay": (Training(Device([HIGH]), why_fixed="the user chose its plan"), 1, []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cache_is_freed_before_a_step_is_planned_again(case: str, caplog: pytest.LogCaptureFixture) -> None:
    training, num_freed, planned = CASES[case]
    training.steps(5)
    assert training.device.num_freed == num_freed
    assert [number for number, _ in training.found] == planned
    assert bool(caplog.messages) == bool(planned or training.why_fixed)
    assert all(training.why_fixed in said and "of m, whose budget is 4.0 GiB" in said for said in caplog.messages)


def test_the_budget_is_taken_as_one_segment_once_it_is_exceeded() -> None:
    training = Training(Device([LOW, LOW, LOW, LOW, LOW, HIGH])).steps(5)
    training.planned = plans()
    assert training.steps(1).device.num_freed == 1
    assert not training.device.in_one
    assert not training.steps(1).found
    assert training.steps(1).found, "not without new plans"
    assert training.device.in_one == [(BUDGET, BUDGET // 4)] * 2


def test_tensors_in_no_plan_are_beside_the_budget_in_that_segment() -> None:
    training = Training(Device([HIGH]), foreign_bytes=GIB // 2).steps(3)
    assert training.device.in_one == [(BUDGET + GIB // 2, (BUDGET + GIB // 2) // 4)] * 2


def test_plans_that_must_stay_have_the_budget_as_one_segment_too() -> None:
    training = Training(Device([HIGH, HIGH, LOW]), why_fixed="several ranks follow one plan").steps(9)
    assert training.device.in_one
    assert training.gaps.is_watching, "the budget is kept in one segment"


@pytest.mark.parametrize("budget_bytes", [None, BUDGET])
def test_where_memory_is_short_segments_stay_apart_so_that_each_can_be_given_back(budget_bytes: int | None) -> None:
    training = Training(Device([LOW], retries=1), budget_bytes=budget_bytes).steps(6)
    assert training.device.num_freed > 1
    assert not training.device.in_one


def test_a_segment_that_leaves_too_little_memory_is_given_up() -> None:
    training = Training(Device([HIGH])).steps(2)
    training.device.retries = 1
    training.steps(9)
    assert len(training.device.in_one) == 1


def test_new_plans_leave_room_for_the_gaps() -> None:
    training = Training(Device([HIGH])).steps(3)
    assert training.gaps.nbytes == training.found[0][1].gap_bytes >= HIGH - PEAK


def test_each_plan_leaves_a_sixteenth_more_free_if_the_allocator_lacks_room(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Device([LOW], PEAK, retries=1), budget_bytes=None).steps(6)
    gaps = [held.gap_bytes for _, held in training.found]
    assert [after - before for before, after in itertools.pairwise(gaps)] == [BUDGET // 16] * 3
    assert all("had to free memory in mid-step to make room" in said for said in caplog.messages)


def test_without_memory_of_its_own_a_device_has_no_gaps() -> None:
    gaps = AllocatorGaps(Executor(torch.device("cpu"), "m"))
    assert not gaps.is_watching


def test_plans_that_must_stay_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Device([HIGH]), why_fixed="several ranks follow one plan").steps(9)
    assert [said.count("because several ranks follow one plan") for said in caplog.messages] == [1]
    assert not training.gaps.is_watching


def test_tensors_that_took_more_than_planned_are_no_gaps() -> None:
    assert not Training(Device([410 * MIB], 410 * MIB), budget_bytes=300 * MIB).steps(9).found


@pytest.mark.parametrize("budget_bytes", [100 * MIB, 4 * GIB])
def test_budgets_may_be_exceeded_by_a_begun_segment_of_each_kind_and_no_more(budget_bytes: int) -> None:
    assert SEGMENT_BYTES == 22 * MIB
    for more_bytes in (0, 1):
        device = Device([budget_bytes + SEGMENT_BYTES + more_bytes], budget_bytes - MIB)
        training = Training(device, budget_bytes=budget_bytes).steps(3)
        assert (device.num_freed > 0, bool(training.found)) == (more_bytes > 0, more_bytes > 0)


def test_steps_that_keep_the_budget_for_long_may_exceed_it_three_times_without_new_plans() -> None:
    device = Device([LOW, *[LOW, LOW, LOW, LOW, HIGH] * 4])
    training = Training(device).steps(20)
    assert (device.num_freed, training.found) == (3, [])
    assert training.steps(1).found


def test_it_goes_back_to_plans_that_kept_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Device([LOW])).steps(5)
    kept, training.planned = training.planned, plans()
    training.device.held = [HIGH]
    training.steps(3)
    assert training.device.num_freed == 3, (
        "before the new plans, before the budget is one segment, before the old plans"
    )
    assert training.planned is kept
    assert training.gaps.nbytes == 0
    assert "It goes back to earlier plans" in caplog.messages[-1]


def test_the_seventh_plans_are_those_of_all_under_which_the_allocator_held_least(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device, tried = Device([9 * GIB]), []

    def make() -> Sequence[Planned]:
        most_bytes = GIB // 8 * len(tried)
        if training.gaps.nbytes > most_bytes:
            raise no_plans(BUDGET + training.gaps.nbytes - most_bytes)
        return plans()

    training = Training(device, make=make)
    training.steps(2)
    for nbytes in (9, 7, 8, 8, 8, 8, 8):
        tried.append(training.planned)
        device.held = [nbytes * GIB]
        training.steps(1)
    assert [said.count("is planned again") for said in caplog.messages] == [1, 1, 1, 1, 1, 1, 0]
    assert training.planned is tried[1]
    assert not training.gaps.is_watching


def test_gaps_for_which_there_are_no_plans_are_left_as_far_as_there_are(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def make() -> Sequence[Planned]:
        asked.append(training.gaps.nbytes)
        if asked[-1] > GIB // 2:
            raise no_plans(BUDGET + asked[-1] - GIB // 2)
        return plans()

    training = Training(Device([HIGH]), make=make)
    training.steps(3)
    assert len(asked) == 2
    assert 0 < GIB // 2 - training.gaps.nbytes <= BUDGET // 64
    assert "planned again with 448.0 MiB for gaps" in caplog.messages[-1]


def test_other_gaps_are_left_if_there_are_no_plans_for_more() -> None:
    asked: list[int] = []

    def make() -> Sequence[Planned]:
        asked.append(training.gaps.nbytes)
        if asked[-1] > 3 * GIB:
            raise no_plans()
        return plans()

    training = Training(Device([HIGH]), make=make)
    training.steps(3)
    training.device.peak = GIB
    training.steps(1)
    assert [nbytes // GIB for nbytes in asked] == [2, 4, 1]
    assert training.gaps.nbytes == asked[-1] == asked[0] // 2


def test_gaps_for_which_there_are_no_plans_at_all_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Sequence[Planned]:
        raise no_plans()

    training = Training(Device([HIGH]), make=make)
    before = training.planned
    training.steps(9)
    assert training.planned is before
    assert [said.count("needs 6.0 GiB of device memory, so the plans stay") for said in caplog.messages] == [1]


def test_what_torch_can_do_is_recommended_to_who_has_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OutOfDeviceMemory("m", BUDGET, PEAK, PEAK, HIGH, {})
    for said in (fix(GIB), str(error)):
        assert EXPANDABLE_SEGMENTS in said
        assert MEASURED_OF_THEM in said
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native,expandable_segments:True")
    assert fix(GIB) == f"device_memory={GIB} is enough for what it holds"
    assert str(error).endswith("Lower device_memory.")


def test_the_recommendation_has_the_figures_of_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "accelerators.md").read_text()
    assert MEASURED_OF_THEM.partition("held ")[2].partition(" in ")[0].replace("%", " %") in text
