"""`search.disk`: state that the host has no room for."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import BucketId, Plan, StorageId, Tier, plan_from_json, plan_to_json
from elixir_compile.ir.cost import disk_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search import Problem, plan
from elixir_compile.search.planner import going_to_disk
from elixir_compile.step.seconds import simulate
from elixir_compile.step.timeline import host_bytes
from elixir_compile.tools.report.explain import explain
from tests.pure.problems import CLUSTERS, disk_staging, tight_problem

PROBLEM = tight_problem(0.3)
IN_MEMORY = plan(PROBLEM, "greedy")
STATE_BYTES = sum(
    bucket.state_nbytes
    for bucket, placement in zip(IN_MEMORY.buckets, IN_MEMORY.placements, strict=True)
    if placement.optim is Tier.HOST
)
"""What may go to disk."""


@pytest.fixture(autouse=True, scope="module")
def no_staging() -> Iterator[None]:
    with disk_staging(0):
        yield


def on_disk(found: Plan) -> list[str]:
    return [placement.bucket for placement in found.placements if placement.optim is Tier.DISK]


def short_of(nbytes: int, problem: Problem = PROBLEM, **more: object) -> Problem:
    """Return the problem with so many bytes less on the host than all state takes, and a disk."""
    return replace(problem, host_budget_bytes=host_bytes(IN_MEMORY) - nbytes, disk=True, **more)


def with_disk_rates(bytes_per_s: float) -> Cluster:
    node = CLUSTERS["cuda"].nodes[0]
    host = replace(node.host, disk_read_bytes_per_s=bytes_per_s, disk_write_bytes_per_s=2 * bytes_per_s)
    return Cluster(nodes=(replace(node, host=host),))


def test_the_problem_has_state_on_the_host() -> None:
    assert sum(placement.optim is Tier.HOST for placement in IN_MEMORY.placements) > 2


def test_nothing_goes_to_disk_if_the_host_holds_all() -> None:
    found = plan(short_of(0), "greedy")
    assert on_disk(found) == []
    assert found == IN_MEMORY


@pytest.mark.parametrize("planner", [pytest.param("milp", marks=pytest.mark.slow), "greedy", "elixir"])
def test_a_plan_is_byte_for_byte_that_without_a_disk_if_the_host_has_room(planner: Planner) -> None:
    with_disk = replace(PROBLEM, disk=True, params_to_disk=True)
    assert plan_to_json(plan(with_disk, planner)) == plan_to_json(plan(PROBLEM, planner))


@pytest.mark.parametrize("planner", ["greedy", "milp", "zero_offload"])
def test_the_state_needed_last_goes_to_disk_if_the_host_is_a_byte_short(planner: Planner) -> None:
    all_in_memory = plan(PROBLEM, planner, timeout_s=0.3) if planner != "zero_offload" else None
    if all_in_memory is None:
        problem = replace(PROBLEM, budget_bytes=2 * PROBLEM.budget_bytes)
        all_in_memory = plan(problem, planner)
    else:
        problem = PROBLEM
    short = replace(problem, host_budget_bytes=host_bytes(all_in_memory) - 1, disk=True)
    found = plan(short, planner, timeout_s=0.3)
    assert host_bytes(found) <= short.host_budget_bytes
    assert found.prediction.host_peak_bytes == host_bytes(found)
    off = [placement.bucket for placement in found.placements if placement.optim is not Tier.DEVICE]
    if planner == "zero_offload":
        assert on_disk(found) == off[-1:]
    assert plan_from_json(plan_to_json(found)) == found


def test_every_bucket_on_disk_says_why_and_how_much() -> None:
    found = plan(short_of(STATE_BYTES), "greedy")
    there = on_disk(found)
    assert len(there) > 2
    decided = {decision.subject: decision for decision in found.decisions if decision.choice == "optim disk"}
    assert list(decided) == there
    disk_bytes = sum(bucket.state_nbytes for bucket in found.buckets if bucket.id in there)
    assert f" {format_bytes(disk_bytes)} of optimizer state\n" in explain(found)
    text = explain(found, there[0])
    assert "optimizer state on the disk" in text
    assert "are read and written in" in text
    assert "update on the host" in text


def test_without_a_disk_there_is_no_plan() -> None:
    short = short_of(STATE_BYTES)
    with pytest.raises(NoFeasiblePlan, match="host"):
        plan(replace(short, disk=False), "greedy")


@given(st.integers(0, STATE_BYTES))
def test_the_host_holds_the_rest_and_no_bucket_goes_in_vain(over_bytes: int) -> None:
    problem = short_of(over_bytes)
    going = going_to_disk(problem, IN_MEMORY)
    sizes = {bucket.id: bucket.state_nbytes for bucket in IN_MEMORY.buckets}
    gone_bytes = sum(sizes[name] for name in going)
    assert gone_bytes >= over_bytes
    assert all(gone_bytes - sizes[name] < over_bytes for name in going)


@pytest.mark.parametrize("num_eighths", [1, 4])
def test_the_bound_holds(num_eighths: int) -> None:
    problem = short_of(num_eighths * STATE_BYTES // 8, cluster=with_disk_rates(1e6))
    found = plan(problem, "milp", timeout_s=0.3)
    assert found.bound_s is not None
    assert 0 < found.bound_s <= found.prediction.step_s * (1 + 1e-9)
    assert simulate(problem.graph, found, problem.cluster).step_s == found.prediction.step_s


def test_a_slower_disk_is_never_faster() -> None:
    steps = [
        plan(short_of(STATE_BYTES // 2, cluster=with_disk_rates(rate)), "greedy").prediction.step_s
        for rate in (1e12, 1e7, 1e5)
    ]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


def test_state_on_disk_stays_on_disk() -> None:
    first = plan(short_of(1), "greedy")
    assert on_disk(first)
    again = replace(short_of(0), buckets=first.buckets, placements=first.placements)
    assert on_disk(plan(again, "greedy")) == on_disk(first)
    inference = replace(again, hybrid=False)
    assert on_disk(plan(inference, "greedy")) == on_disk(first)


def test_state_on_disk_stays_on_disk_if_no_more_may_go() -> None:
    """As where one optimizer of two cannot keep its state on disk; what is there takes no memory of the host."""
    first = plan(short_of(STATE_BYTES // 2), "greedy")
    closed = replace(short_of(STATE_BYTES // 2), buckets=first.buckets, placements=first.placements, disk=False)
    again = plan(closed, "greedy")
    assert on_disk(again) == on_disk(first) != []
    assert host_bytes(again) <= closed.host_budget_bytes
    assert "it is on disk since an earlier plan" in explain(again, on_disk(again)[0])


def test_another_graph_with_state_on_disk_changes_nothing() -> None:
    bucket = replace(IN_MEMORY.buckets[0], id=BucketId("other"), params=(StorageId("other"),))
    home = replace(IN_MEMORY.placements[0], bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DISK, resident=True)
    assert plan(replace(PROBLEM, buckets=(bucket,), placements=(home,)), "greedy") == IN_MEMORY


@pytest.mark.parametrize("held_bytes", [0, 1000])
def test_without_a_disk_the_error_says_that_a_disk_would_help(held_bytes: int) -> None:
    short = replace(short_of(1), disk=False)
    short = replace(short, host_budget_bytes=short.host_budget_bytes - held_bytes, host_base_bytes=held_bytes)
    with pytest.raises(NoFeasiblePlan, match="disk_path=<folder>") as caught:
        plan(replace(short, host_budget_bytes=least_without_state()), "greedy")
    assert caught.value.budget_bytes == least_without_state() + held_bytes
    assert caught.value.needed_bytes - caught.value.disk_bytes <= caught.value.budget_bytes
    with pytest.raises(NoFeasiblePlan) as refused:
        plan(replace(short, host_budget_bytes=1), "greedy")
    assert "disk_path" not in str(refused.value)


def least_without_state() -> int:
    return host_bytes(IN_MEMORY) - STATE_BYTES


def test_bytes_over_rates() -> None:
    bucket = IN_MEMORY.buckets[0]
    assert disk_s(bucket, with_disk_rates(100.0)) == bucket.state_nbytes * (1 / 100 + 1 / 200)
    assert disk_s(bucket, CLUSTERS["cuda"]) == 2 * bucket.state_nbytes / 1e9


@pytest.mark.parametrize(
    "share", [pytest.param(0.1, marks=pytest.mark.slow), 0.5, pytest.param(0.9, marks=pytest.mark.slow)]
)
def test_staging_buffers_of_the_disk_take_host_memory(share: float) -> None:
    staging_bytes = int(share * STATE_BYTES)
    with disk_staging(staging_bytes):
        found = plan(short_of(1), "greedy")
        gone_bytes = sum(bucket.state_nbytes for bucket in found.buckets if bucket.id in on_disk(found))
        assert gone_bytes > staging_bytes
        assert host_bytes(found) <= short_of(1).host_budget_bytes
        assert found.prediction.host_peak_bytes == host_bytes(found)
        again = replace(short_of(1), buckets=found.buckets, placements=found.placements)
        assert on_disk(plan(again, "greedy")) == on_disk(found)
        # With all state on disk, and not a byte more.
        least = replace(PROBLEM, host_budget_bytes=least_without_state() + staging_bytes, disk=True)
        found = plan(least, "milp", timeout_s=0.3)
        assert host_bytes(found) <= least.host_budget_bytes
        assert found.bound_s is not None
        assert found.bound_s <= found.prediction.step_s * (1 + 1e-9)
        with pytest.raises(NoFeasiblePlan) as caught:
            plan(replace(least, host_budget_bytes=staging_bytes), "greedy")
        assert caught.value.budget_bytes == staging_bytes < caught.value.needed_bytes


def test_a_disk_whose_buffers_are_larger_than_the_state_is_not_used() -> None:
    with disk_staging(2 * STATE_BYTES):
        assert plan(short_of(0), "greedy") == IN_MEMORY
        with pytest.raises(NoFeasiblePlan, match="host"):
            plan(short_of(STATE_BYTES), "greedy")
