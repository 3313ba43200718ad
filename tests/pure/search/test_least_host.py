"""What `NoFeasiblePlan` names is enough and not a byte too many: on the device and the host, with a disk or without."""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.ir import Saving
from elixir_compile.search import Problem, plan
from elixir_compile.step import verify
from tests.pure.problems import disk_staging
from tests.pure.search.test_best import machine
from tests.pure.search.test_planner import needed_bytes, problem_of
from tests.pure.strategies import Layer, chain

TIMEOUT_S = 60.0
"""No search may end early: on a busy machine the error would name more than the least."""


def short_problem(seed: int, num_ranks: int, *, disk: bool) -> Problem:
    """Return two to four random layers under a tight device budget, with nothing to spare on the host."""
    draw = random.Random(seed)
    layers = [
        Layer(
            module=f"h.{i}",
            params=((f"p{i}", draw.randint(100, 600)),),
            frozen=draw.random() < 0.15,
            act_numel=draw.choice([16, 64]),
        )
        for i in range(draw.randint(2, 4))
    ]
    savings = draw.choice([frozenset({Saving.KEEP}), frozenset({Saving.KEEP, Saving.RECOMPUTE})])
    problem = problem_of(chain(layers), machine(draw, num_ranks), hybrid=draw.random() < 0.8, savings=savings)
    low, high = needed_bytes(problem), plan(problem, "keep_all").prediction.device_peak_bytes
    budget_bytes = low + int((high - low) * draw.choice([0.0, 0.1, 0.3, 0.6]))
    host_base_bytes = draw.choice([0, 77])
    return replace(problem, budget_bytes=budget_bytes, host_budget_bytes=0, host_base_bytes=host_base_bytes, disk=disk)


def refusal(problem: Problem, planner: Planner) -> NoFeasiblePlan:
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(problem, planner, TIMEOUT_S)
    return caught.value


def check_host(problem: Problem, planner: Planner) -> None:
    """Fail unless the error names the least host budget, and names it again one byte below."""
    try:
        plan(problem, planner, TIMEOUT_S)
    except NoFeasiblePlan as caught:
        error = caught
    else:
        assume(False)  # all of it fits on the device
    assert (error.memory, error.budget_bytes) == ("host", problem.host_base_bytes + problem.host_budget_bytes)
    needed = error.needed_bytes - problem.host_base_bytes
    made = plan(replace(problem, host_budget_bytes=needed), planner, TIMEOUT_S)
    verify(problem.graph, made)
    assert made.prediction.host_peak_bytes <= needed
    again = refusal(replace(problem, host_budget_bytes=needed - 1), planner)
    assert (again.memory, again.needed_bytes) == ("host", error.needed_bytes)


@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([None, 0, 300, 2000]),
    st.sampled_from(["greedy", "greedy", "zero3_offload"]),
)
@settings(max_examples=12)
def test_the_named_host_bytes_are_enough_and_the_fewest(
    seed: int, num_ranks: int, staging_bytes: int | None, planner: Planner
) -> None:
    """`staging_bytes` are the buffers of the disk, if there is one."""
    problem = short_problem(seed, num_ranks, disk=staging_bytes is not None)
    if planner != "greedy":  # on two ranks the rule may need more of the device than the greedy planner
        problem = replace(problem, budget_bytes=max(problem.budget_bytes, needed_bytes(problem, planner)))
    with disk_staging(staging_bytes or 0):
        check_host(problem, planner)


@pytest.mark.parametrize("disk", [False, True])
def test_the_default_planner_finds_a_plan_with_the_named_host_bytes(disk: bool) -> None:
    for seed in range(2):
        problem = short_problem(seed, 1, disk=disk)
        with disk_staging(300):
            needed = refusal(problem, "milp").needed_bytes - problem.host_base_bytes
            made = plan(replace(problem, host_budget_bytes=needed), "milp", 0.3)
            assert made.prediction.host_peak_bytes <= needed
            refusal(replace(problem, host_budget_bytes=needed - 1), "milp")


def test_buffers_of_the_disk_that_are_larger_than_all_state_leave_state_in_memory() -> None:
    problem = short_problem(0, 1, disk=True)
    with disk_staging(1 << 30):
        with_disk = refusal(problem, "greedy")
    assert with_disk.needed_bytes == refusal(replace(problem, disk=False), "greedy").needed_bytes


def test_a_disk_is_suggested_only_if_it_gives_a_plan() -> None:
    problem = replace(short_problem(0, 1, disk=False), hybrid=True)
    with disk_staging(300):
        enough = refusal(replace(problem, disk=True), "greedy").needed_bytes - problem.host_base_bytes
        for host_bytes, may_help in ((enough, True), (enough - 1, False)):
            error = refusal(replace(problem, host_budget_bytes=host_bytes), "greedy")
            assert ("disk_path=<folder>" in str(error)) is may_help
            assert (error.disk_bytes > 0) is may_help


@given(st.integers(0, 10_000), st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=12)
def test_the_named_device_bytes_are_enough_and_the_fewest(seed: int, num_ranks: int, disk: bool) -> None:
    problem = replace(short_problem(seed, num_ranks, disk=disk), host_budget_bytes=1 << 40, budget_bytes=1)
    error = refusal(problem, "milp")
    assume(error.memory == "device")
    made = plan(replace(problem, budget_bytes=error.needed_bytes), "milp", 0.1)
    assert made.prediction.device_peak_bytes <= error.needed_bytes
    less = refusal(replace(problem, budget_bytes=error.needed_bytes - 1), "milp")
    assert (less.memory, less.needed_bytes) == ("device", error.needed_bytes)
