"""`allocator_gaps`: what the allocator holds is compared with the budget, by figures of a device that is not there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.managed import allocator_gaps
from elixir_compile.managed.allocator_gaps import SEGMENT_BYTES, AllocatorGaps, Held, fix, tolerated_bytes
from elixir_compile.platforms.platform import Platform
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import plan
from elixir_compile.units import GIB, MIB
from tests.pure.search.test_planner import chain_of, problem_of

MADE = plan(problem_of(chain_of(3)), "greedy")
PLAN = replace(MADE, budget_bytes=4 * GIB, prediction=replace(MADE.prediction, device_peak_bytes=3 * GIB))


class Device(Platform):
    """A device whose allocator says in each step what the test says."""

    def __init__(self, held: Sequence[int], peak_bytes: int, *, retries: int) -> None:
        super().__init__("cpu")
        self.held, self.peak, self.retries = list(held), peak_bytes, retries
        self.num_freed = self.num_asked = self.num_peaks = 0

    @property
    def has_own_memory(self) -> bool:
        return True

    def reserved_bytes(self, device: torch.device) -> int:
        return self.held[min(self.num_asked, len(self.held) - 1)]

    def alloc_retries(self, device: torch.device) -> int:
        self.num_asked += 1
        return self.retries * self.num_asked

    def empty_cache(self) -> None:
        self.num_freed += 1

    def peak_bytes(self, device: torch.device) -> int:
        self.num_peaks += 1
        return self.peak - self.num_peaks % 2  # it rises while it is measured


def answers(
    device: Device, num_steps: int, *, is_given: bool = True, may_replan: bool = True, **changes: Any
) -> tuple[AllocatorGaps, list[Held | None]]:
    gaps = AllocatorGaps(Executor(torch.device("cpu"), "m"))
    gaps._platform = device
    plans = [replace(PLAN, **changes)]
    found: list[Held | None] = []
    while len(found) < num_steps and not any(found):
        found.append(gaps.found(plans, is_given=is_given, may_replan=may_replan))
    return gaps, found


CASES: dict[str, tuple[list[int], int, dict[str, Any], int, list[int]]] = {
    # by name: GiB held before each step, cache freed for room per step, arguments, times that the cache is freed here,
    # steps that are planned again
    "less than the budget": ([4], 0, {}, 0, []),
    "more than the budget after compilation": ([5, 4], 0, {}, 1, []),
    "more than the budget again": ([5], 0, {}, 1, [1]),
    "a measured budget": ([5], 0, {"is_given": False}, 0, []),
    "a measured budget, no room": ([4], 1, {"is_given": False}, 1, [2]),
    "a given budget, no room": ([4], 1, {}, 1, [2]),
    "a plan that must stay": ([5], 0, {"may_replan": False}, 1, []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cache_is_freed_before_a_step_is_planned_again(case: str, caplog: pytest.LogCaptureFixture) -> None:
    held, retries, options, num_freed, planned = CASES[case]
    device = Device([nbytes * GIB for nbytes in held], 3 * GIB, retries=retries)
    _, found = answers(device, 3, **options)
    assert device.num_freed == num_freed
    assert [number for number, each in enumerate(found) if each is not None][:1] == planned
    for each in filter(None, found):
        assert each.gap_bytes >= device.reserved_bytes(torch.device("cpu")) - 3 * GIB
    assert bool(caplog.messages) == bool(planned or case == "a plan that must stay")
    assert all("expandable_segments:True" in said and "m, whose budget is 4.0 GiB" in said for said in caplog.messages)


def test_tensors_that_took_more_than_planned_are_no_gaps() -> None:
    device = Device([10 * MIB + 400 * MIB], 410 * MIB - 1, retries=0)
    _, found = answers(device, 3, budget_bytes=300 * MIB)
    assert not any(found)


def test_small_budgets_may_be_exceeded_by_a_segment_of_each_kind() -> None:
    assert (tolerated_bytes(100 * MIB), tolerated_bytes(4 * GIB)) == (SEGMENT_BYTES, 0)
    device = Device([100 * MIB + SEGMENT_BYTES], 90 * MIB, retries=0)
    _, found = answers(device, 3, budget_bytes=100 * MIB)
    assert (device.num_freed, any(found)) == (0, False)


def test_later_plans_count_the_gaps_and_the_last_is_the_fourth(caplog: pytest.LogCaptureFixture) -> None:
    device = Device([5 * GIB], 3 * GIB, retries=0)
    gaps, found = answers(device, 2)
    for number in range(1, 7):
        assert found[-1] is not None or number > 4
        gaps.nbytes = 0 if found[-1] is None else found[-1].gap_bytes
        device.held = [(5 + number) * GIB]
        plans = [replace(PLAN)]  # another plan
        found = [gaps.found(plans, is_given=True, may_replan=True) for _ in range(2)]
    assert [said.count("planned again") for said in caplog.messages] == [1] * 5
    assert "It is not planned again" in caplog.messages[-1]


def test_gaps_that_no_plan_leaves_free_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    gaps, found = answers(Device([5 * GIB], 3 * GIB, retries=0), 2)
    assert found[-1] is not None
    gaps.give_up(found[-1], NoFeasiblePlan("", "", 4 * GIB, 6 * GIB, {}))
    assert "needs 6.0 GiB of device memory" in caplog.messages[-1]
    assert not any(gaps.found([replace(PLAN)], is_given=True, may_replan=True) for _ in range(4))


def test_expandable_segments_are_not_recommended_to_who_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native,expandable_segments:True")
    assert fix(GIB) == f"device_memory={GIB} is enough for what it holds"
    assert allocator_gaps.fix(GIB + 1).startswith("device_memory=")
