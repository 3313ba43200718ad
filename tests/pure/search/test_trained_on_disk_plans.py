"""`search.planner`: trained parameters follow their state to the disk if the host has no room for them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir import Plan, StorageId, Tier
from elixir_compile.ir.bucket import WholeUpdate
from elixir_compile.ir.cost import rings_bytes
from elixir_compile.search import Problem, plan
from elixir_compile.search.planner import going_to_disk, params_going_to_disk
from elixir_compile.step import plan_timeline, verify, with_peaks
from elixir_compile.step.timeline import host_bytes
from elixir_compile.tools.report.explain import explain
from tests.pure.memory_walk import walk_memory
from tests.pure.plans import bucket_of, make_plan
from tests.pure.problems import CLUSTERS, problem_of
from tests.pure.search.test_frozen_on_disk import layers_of, planned_on_disk, there
from tests.pure.strategies import chain

GRAPH = chain(layers_of(1, 200 * MIB, (100 * MIB,) * 4))
"""A frozen layer of 200 MiB and four trained ones of 100 MiB, with 200 MiB of state each."""
NAMES = [StorageId(name) for name in ("w0", "a0", "a1", "a2", "a3")]
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == name]) for n, name in enumerate(NAMES)]
IN_MEMORY = make_plan(GRAPH, BUCKETS, ["host", "resident", "host", "resident", "host"])
"""Of which b1 and b3 are gathered once in a step."""


def on_disk(made: Plan, *params: str) -> Plan:
    """Return `made` with all state and frozen parameters on disk, and the trained ones of the buckets `params`."""
    homes = (
        replace(home, optim=Tier.DISK, param=Tier.DISK if home.bucket in ("b0", *params) else home.param)
        for home in made.placements
    )
    return replace(made, placements=tuple(homes))


def test_bytes_are_those_of_a_home_on_the_host_but_on_the_host() -> None:
    state, moved = on_disk(IN_MEMORY), on_disk(IN_MEMORY, "b1", "b2")
    assert plan_timeline(GRAPH, moved).live_bytes == plan_timeline(GRAPH, IN_MEMORY).live_bytes
    assert host_bytes(moved) == host_bytes(state) - 200 * MIB
    assert walk_memory(GRAPH, moved).host_bytes == host_bytes(moved)
    verify(GRAPH, with_peaks(GRAPH, moved))


def over_by(nbytes: int, **more: Any) -> Problem:
    """Return a problem whose host has so many bytes less than all state on disk leaves there."""
    budget_bytes = host_bytes(on_disk(IN_MEMORY)) - nbytes
    return problem_of(GRAPH, host_budget_bytes=budget_bytes, disk=True, params_to_disk=True, **more)


@pytest.mark.parametrize(
    ("over_bytes", "going"),
    [
        (0, set()),
        (1, {"b3"}),
        (100 * MIB, {"b3"}),
        (101 * MIB, {"b1", "b3"}),
        (300 * MIB, {"b1", "b3", "b4"}),
        (400 * MIB, {"b1", "b2", "b3", "b4"}),
        (GIB, {"b1", "b2", "b3", "b4"}),
    ],
)
def test_parameters_go_behind_all_state_and_those_read_once_first(over_bytes: int, going: set[str]) -> None:
    """The ring of gathers is there already, for the frozen ones."""
    problem = over_by(over_bytes)
    assert going_to_disk(problem, IN_MEMORY) == ("b0", "b1", "b2", "b3", "b4")
    assert params_going_to_disk(problem, on_disk(IN_MEMORY)) == going


def test_which_parameters_may_go() -> None:
    state = on_disk(IN_MEMORY)
    whole = WholeUpdate(flops=(), moved_bytes=0, num_kernels=1, most_nbytes=1, most_state_nbytes=1)
    buckets = tuple(replace(own, whole_update=whole) if own.id == "b3" else own for own in state.buckets)
    assert params_going_to_disk(over_by(GIB), replace(state, buckets=buckets)) == {"b1", "b2", "b4"}
    assert params_going_to_disk(replace(over_by(GIB), params_to_disk=False), state) == frozenset()
    assert params_going_to_disk(over_by(GIB, cluster=CLUSTERS["2 x cuda"]), state) == {"b1", "b2", "b3", "b4"}


# ----------------------------------------------------------------------------------------------------------------------
# Plans of small trained layers, with rings of a few bytes.


@pytest.fixture
def small_rings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("ir.cost", "search.evaluator"):
            path = f"elixir_compile.{module}.gather_staging_bytes"
            patch.setattr(path, lambda buckets: 700 if list(buckets) else 0)
        patch.setattr("elixir_compile.ir.cost.disk_staging_bytes", lambda buckets, params: 300 if list(buckets) else 0)
        yield


def small_problem(**more: Any) -> Problem:
    """Return a problem whose host has room for gradients, and for half of the parameters beside them."""
    problem = problem_of(chain(layers_of(0, 0, (4096,) * 6)), disk=True, **more)
    kept = plan(replace(problem, disk=False), "keep_all")
    problem = replace(problem, budget_bytes=int(0.4 * kept.prediction.device_peak_bytes))
    made = plan(problem, "greedy")
    param_bytes = sum(own.home_nbytes for own in made.buckets if made.placement(own.id).param is Tier.HOST)
    return replace(
        problem, host_budget_bytes=3 * param_bytes // 2 + rings_bytes(made.buckets, [own.id for own in made.buckets])
    )


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize(("cluster", "part"), [("cuda", 1.0), ("2 x cuda", 0.75)])
def test_parameters_go_if_the_host_is_short_and_stay_there(cluster: str, part: float) -> None:
    problem = small_problem(cluster=CLUSTERS[cluster])
    problem = replace(problem, host_budget_bytes=int(part * problem.host_budget_bytes))
    made = planned_on_disk(problem)
    decided = {decision.subject: decision.because for decision in made.decisions if decision.choice == "param disk"}
    assert list(decided) == there(made)
    first = there(made)[0]
    assert "of parameters in" in decided[first]
    assert "parameters and optimizer state on the disk, gradients on the host" in explain(made, first)
    assert " of trained parameters, " in explain(made)
    again = replace(problem, host_budget_bytes=GIB, disk=False, buckets=made.buckets, placements=made.placements)
    assert there(plan(again, "greedy")) == there(made)


@pytest.mark.usefixtures("small_rings")
def test_without_a_folder_the_error_counts_parameters() -> None:
    problem = replace(small_problem(), disk=False)
    with pytest.raises(NoFeasiblePlan, match="disk_path=<folder>") as caught:
        plan(problem, "greedy")
    assert caught.value.needed_bytes - caught.value.disk_bytes <= problem.host_budget_bytes


@pytest.mark.usefixtures("small_rings")
def test_parameters_without_state_stay_and_the_error_names_the_host_memory_that_is_enough() -> None:
    """As those of SGD without momentum: their gradients and they need the host, and a disk takes neither."""
    problem = replace(small_problem(state_nbytes={}), disk=True)
    short = replace(problem, host_budget_bytes=problem.host_budget_bytes // 8)
    with pytest.raises(NoFeasiblePlan, match=r"Try host_memory=\d+, the smallest budget that is enough") as caught:
        plan(short, "greedy")
    assert caught.value.memory == "host"
    enough = plan(replace(short, host_budget_bytes=caught.value.needed_bytes), "greedy")
    assert there(enough) == []
