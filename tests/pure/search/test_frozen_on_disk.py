"""`search.planner`: frozen parameters that the host has no room for are on disk, and each gather reads them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir import BucketId, Plan, StorageId, Tier, cost, plan_from_json, plan_to_json
from elixir_compile.ir.cost import GATHER_STAGING_BYTES, NUM_GATHER_STAGING
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search import Problem, evaluator, plan
from elixir_compile.search.planner import going_to_disk
from elixir_compile.search.space.buckets import form_buckets
from elixir_compile.step import plan_timeline, verify, with_peaks
from elixir_compile.step.seconds import simulate
from elixir_compile.step.timeline import host_bytes
from elixir_compile.tools.report.explain import explain
from tests.pure.memory_walk import walk_memory
from tests.pure.plans import bucket_of, make_plan
from tests.pure.problems import CLUSTERS, problem_of
from tests.pure.strategies import Layer, chain

RING_BYTES = NUM_GATHER_STAGING * GATHER_STAGING_BYTES + 2 * MIB
FROZEN = [StorageId(f"w{n}") for n in range(4)]


def layers_of(
    num_frozen: int, frozen_bytes: int, trained_bytes: Sequence[int] = (), act_numel: int = 64
) -> list[Layer]:
    """Frozen layers w0, w1, ... and behind them trained ones a0, a1, ... of so many bytes."""
    sizes = [(f"w{n}", frozen_bytes, True) for n in range(num_frozen)]
    sizes += [(f"a{n}", nbytes, False) for n, nbytes in enumerate(trained_bytes)]
    return [
        Layer(module=f"h.{name}", params=((name, nbytes // 4),), frozen=is_frozen, act_numel=act_numel)
        for name, nbytes, is_frozen in sizes
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Which buckets go: four frozen ones of 100 MiB, of which b1 and b3 stay gathered, and two trained ones of 30 MiB.


GRAPH = chain(layers_of(4, 100 * MIB, (30 * MIB, 30 * MIB)))
BUCKETS = [
    bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == name])
    for n, name in enumerate([*FROZEN, StorageId("a0"), StorageId("a1")])
]
MADE = make_plan(GRAPH, BUCKETS, ["host", "resident", "host", "resident", "host", "host"])


def over_by(nbytes: int, **more: Any) -> Problem:
    """Return a problem whose host has so many bytes less than `MADE` takes there."""
    return problem_of(GRAPH, host_budget_bytes=host_bytes(MADE) - nbytes, **{"disk": True, **more})


IN_FILES = {"in_file": dict.fromkeys(FROZEN, True), "disk": False}


@pytest.mark.parametrize(
    ("over_bytes", "going"),
    [
        (0, ()),
        (1, ("b3",)),
        (100 * MIB, ("b1", "b3")),
        (200 * MIB, ("b1", "b2", "b3")),
        (300 * MIB, ("b0", "b1", "b2", "b3")),
        # All frozen ones free 400 MiB less the ring of 66; the state, of 60 MiB each, needs a ring of 50 MiB.
        (335 * MIB, ("b0", "b1", "b2", "b3", "b5")),
        (350 * MIB, ("b0", "b1", "b2", "b3", "b4", "b5")),
    ],
)
def test_frozen_parameters_go_before_state_and_those_read_once_first(over_bytes: int, going: tuple[str, ...]) -> None:
    assert going_to_disk(over_by(over_bytes), MADE) == going


@pytest.mark.parametrize(
    ("more", "going"),
    [
        (IN_FILES, ("b0", "b1", "b2", "b3")),
        ({"in_file": {FROZEN[0]: True, FROZEN[2]: True}, "disk": False}, ("b0", "b2")),
        ({"disk": False}, ()),
        ({"hybrid": False}, ("b0", "b1", "b2", "b3")),
        ({"cluster": CLUSTERS["2 x cuda"]}, ("b0", "b1", "b2", "b3", "b4", "b5")),
    ],
)
def test_what_may_go(more: dict[str, Any], going: tuple[str, ...]) -> None:
    """Without a folder, frozen parameters in files of their own; without the hybrid optimizer, frozen parameters."""
    assert going_to_disk(over_by(400 * MIB, **more), MADE) == going


def test_frozen_parameters_smaller_than_the_buffers_stay() -> None:
    graph = chain(layers_of(2, 30 * MIB, (100 * MIB,)))
    names = ["w0", "w1", "a0"]
    buckets = [bucket_of(graph, name, [s for s in graph.storages if s.id == name]) for name in names]
    made = make_plan(graph, buckets, ["host"] * 3)
    problem = problem_of(graph, host_budget_bytes=host_bytes(made) - 1, disk=True)
    assert going_to_disk(problem, made) == ("a0",)
    assert going_to_disk(replace(problem, disk=False, params={}), made) == ()


def on_disk(made: Plan, *names: str) -> Plan:
    placements = (
        replace(home, param=Tier.DISK, optim=Tier.DISK) if home.bucket in names else home for home in made.placements
    )
    return replace(made, placements=tuple(placements))


def test_bytes_are_those_of_a_home_on_the_host_but_on_the_host() -> None:
    """No byte more on the device; on the host the ring, once, in place of the parameters."""
    moved = on_disk(MADE, "b1", "b2")
    assert plan_timeline(GRAPH, moved).live_bytes == plan_timeline(GRAPH, MADE).live_bytes
    assert host_bytes(moved) == host_bytes(MADE) - 200 * MIB + RING_BYTES
    assert walk_memory(GRAPH, moved).host_bytes == host_bytes(moved)
    assert walk_memory(GRAPH, moved).live_bytes == walk_memory(GRAPH, MADE).live_bytes
    verify(GRAPH, with_peaks(GRAPH, moved))


def test_frozen_parameters_in_files_and_others_share_no_bucket() -> None:
    graph = chain(layers_of(64, 64))
    halves = {StorageId(f"w{n}"): n % 2 == 0 for n in range(64)}

    def mixes(problem: Problem) -> bool:
        return any(len({halves[name] for name in bucket.params}) > 1 for bucket in form_buckets(problem))

    assert mixes(problem_of(graph))
    assert mixes(problem_of(graph, in_file=dict.fromkeys(halves, True)))
    assert not mixes(problem_of(graph, in_file={name: True for name, is_in_file in halves.items() if is_in_file}))


# ----------------------------------------------------------------------------------------------------------------------
# Plans of small layers: six frozen ones of 4 KiB and a trained one of 64 bytes, with rings of a few bytes.


@pytest.fixture
def small_rings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (cost, evaluator):
            patch.setattr(module, "gather_staging_bytes", lambda buckets: 700 if list(buckets) else 0)
        patch.setattr(cost, "disk_staging_bytes", lambda buckets, with_params: 300 if list(buckets) else 0)
        yield


def small_problem(**more: Any) -> Problem:
    problem = problem_of(chain(layers_of(6, 4096, (64,))), **more)
    kept = plan(problem, "keep_all")
    return replace(problem, budget_bytes=int(0.5 * kept.prediction.device_peak_bytes))


def short(problem: Problem) -> Problem:
    """Return `problem` with room on the host for half of what its plan with a large host has there."""
    return replace(problem, host_budget_bytes=host_bytes(plan(problem, "greedy")) // 2)


def there(made: Plan) -> list[BucketId]:
    return [home.bucket for home in made.placements if home.param is Tier.DISK]


IN_SMALL_FILES = {"in_file": {StorageId(f"w{n}"): True for n in range(6)}}


def planned_on_disk(problem: Problem) -> Plan:
    """Return the plan of `problem`, which has parameters on disk, fits the host, and is what its figures say."""
    made = plan(problem, "greedy")
    assert there(made)
    assert host_bytes(made) == made.prediction.host_peak_bytes <= problem.host_budget_bytes
    assert simulate(problem.graph, made, problem.cluster).step_s == made.prediction.step_s
    assert plan_from_json(plan_to_json(made)) == made
    return made


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("more", [{"disk": True}, IN_SMALL_FILES, {"disk": True, "cluster": CLUSTERS["2 x cuda"]}])
def test_frozen_parameters_go_if_the_host_is_short_and_stay_there(more: dict[str, Any]) -> None:
    problem = short(small_problem(**more))
    made = planned_on_disk(problem)
    assert "param disk  optim disk" in str(made)
    decided = {decision.subject: decision.because for decision in made.decisions if decision.choice == "param disk"}
    assert list(decided) == there(made)
    first = there(made)[0]
    assert "are read in" in decided[first]
    assert "frozen parameters on the disk" in explain(made, first)
    assert " of frozen parameters, " in explain(made)
    again = replace(problem, host_budget_bytes=GIB, disk=False, buckets=made.buckets, placements=made.placements)
    later = plan(again, "greedy")
    assert there(later) == there(made)
    assert "it is on disk since an earlier plan" in explain(later, first)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("more", [{"disk": True}, IN_SMALL_FILES])
def test_plans_of_a_host_with_room_are_those_without_a_disk(more: dict[str, Any]) -> None:
    assert plan(small_problem(**more), "greedy") == plan(small_problem(), "greedy")


@pytest.mark.usefixtures("small_rings")
def test_the_bound_holds_for_plans_that_read() -> None:
    node = CLUSTERS["cuda"].nodes[0]
    cluster = Cluster(nodes=(replace(node, host=replace(node.host, disk_read_bytes_per_s=1e6)),))
    made = plan(short(small_problem(disk=True, cluster=cluster)), "milp", timeout_s=0.3)
    assert there(made)
    assert made.bound_s is not None
    assert 0 < made.bound_s <= made.prediction.step_s * (1 + 1e-9)


@pytest.mark.usefixtures("small_rings")
def test_without_a_folder_the_error_counts_frozen_bytes() -> None:
    problem = short(small_problem())
    with pytest.raises(NoFeasiblePlan, match="disk_path=<folder>") as caught:
        plan(problem, "greedy")
    assert caught.value.memory == "host"
    assert caught.value.needed_bytes - caught.value.disk_bytes <= problem.host_budget_bytes
