"""Good schedules whose works are ordered, and each of them broken in each place: both actions are named."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.ir import (
    Action,
    BucketRef,
    GradientRef,
    GroupRef,
    Kind,
    Plan,
    RegionRef,
    Saving,
    Schedule,
    StepGraph,
    StorageId,
    Target,
    Tier,
    Update,
    Verb,
)
from elixir_compile.search import plan
from elixir_compile.step import as_run, verify
from elixir_compile.step.divide import laps_of
from elixir_compile.step.lane_order import Order, check_order, first_conflict, region_touches, works_of
from elixir_compile.step.structure import illegal
from elixir_compile.step.works import Memory, Walk
from tests.pure.analysis.test_crossings import STEP
from tests.pure.analysis.test_crossings import offloaded as sliced
from tests.pure.lane_graph import closure, graph_of, unordered
from tests.pure.mixes import group
from tests.pure.plans import Trip, bucket_of, claim_peak, make_plan, mixed_plans, planned_graphs
from tests.pure.search.test_planner import CLUSTERS, between, problem_of
from tests.pure.steps import GELU
from tests.pure.strategies import Layer, chain

GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=n == 3, act_numel=4) for n in range(5)])


def check_alone(graph: StepGraph, made: Plan) -> None:
    """Look for accesses without an order, and for nothing else that makes a plan illegal."""
    check_order(made, region_touches(as_run(graph, made.activations, laps_of(made)), made))


def on_host_and_device() -> tuple[StepGraph, Plan]:
    buckets = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(5)]
    return GRAPH, make_plan(GRAPH, buckets, ["host", "device", "resident", "host", "split"])


def streamed() -> tuple[StepGraph, Plan]:
    graph, made = on_host_and_device()
    placements = (
        dataclasses.replace(home, streamed=home.optim is Tier.HOST and bucket.trainable)
        for bucket, home in zip(made.buckets, made.placements, strict=True)
    )
    return graph, claim_peak(graph, dataclasses.replace(made, placements=tuple(placements)))


def offloaded() -> tuple[StepGraph, Plan]:
    groups = group(GELU, "acts.h", Saving.OFFLOAD, "h"), group(GELU, "acts.g", Saving.OFFLOAD, "g")
    buckets = [bucket_of(GELU, "b0", [s for s in GELU.storages if s.kind is Kind.PARAM])]
    trips = {groups[0].id: Trip(leave=2, gone=3, back=4, need=5)}
    return GELU, make_plan(GELU, buckets, ["device"], groups, trips)


def sharded(share: float) -> tuple[StepGraph, Plan]:
    """Two ranks; with `share` 0 the shards are on the host, with 1 on the device."""
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 400),), frozen=False, act_numel=64) for i in range(3)]
    graph = chain(layers)
    shards = {StorageId(f"p{i}"): (200, 200) for i in range(3)}
    problem = problem_of(graph, CLUSTERS["2 x cuda"], shards=shards)
    return graph, plan(between(problem, share), "greedy")


PLANS = {
    "host and device": on_host_and_device(),
    "streamed": streamed(),
    "offloaded": offloaded(),
    "shards on the host": sharded(0.0),
    "shards on the device": sharded(1.0),
}


def in_mode(name: str, update: Update) -> tuple[StepGraph, Plan]:
    graph, made = PLANS[name]
    return graph, claim_peak(graph, dataclasses.replace(made, update=update))


def with_actions(made: Plan, actions: Iterable[Action]) -> Plan:
    return dataclasses.replace(made, schedules=(Schedule(rank=0, actions=tuple(actions)),))


def needed_waits(made: Plan) -> Iterator[int]:
    """Yield the indices of the waits without which two accesses have no order.

    A reduce-scatter is over when a later one is, as the ranks have one stream. So the last wait for one counts alone.
    """
    actions = made.schedules[0].actions
    offloaded = {action.target for action in actions if action.verb is Verb.OFFLOAD}
    waits = [at for at, action in enumerate(actions) if action.verb is Verb.WAIT]
    reduces = [
        at for at in waits if isinstance(actions[at].target, GradientRef) and actions[at].target not in offloaded
    ]
    yield from (at for at in waits if at not in reduces[:-1])


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the regions of a plan touch."""

    reads: dict[Target, set[Target]]
    """By region, the gathered buckets and the offloaded groups that it touches."""
    writes: dict[Target, set[Target]]
    """By region, the gradients and groups that it writes."""
    begins: dict[Target, set[Target]]
    """By region, those of them that no region before it has written."""
    sharded: set[Target]
    """The buckets that are sharded, and their gradients."""


def facts_of(graph: StepGraph, made: Plan) -> Facts:
    touches = region_touches(as_run(graph, made.activations, laps_of(made)), made)
    gathered = {action.target for action in made.schedules[0].actions if action.verb is Verb.GATHER}
    facts = Facts({}, {}, {}, {ref(b.id) for b in made.buckets if b.is_sharded for ref in (BucketRef, GradientRef)})
    seen: set[Target] = set()
    for region in made.regions:
        target, own = RegionRef(region.id), touches[region.id]
        groups = {touch.target for touch in own if isinstance(touch.target, GroupRef)}
        facts.reads[target] = groups | gathered.intersection(BucketRef(name) for name in region.buckets)
        facts.writes[target] = {touch.target for touch in own if touch.is_written}
        facts.begins[target] = facts.writes[target] - seen
        seen |= facts.writes[target]
    return facts


def must_follow(action: Action, other: Action, facts: Facts) -> bool:
    """Return whether an access of `action` must come behind one of `other`, on another lane or on memory that one of
    the two frees."""
    target, start = action.target, other.target
    gradient = GradientRef(target.bucket) if isinstance(target, BucketRef) else target
    of_start = GradientRef(start.bucket) if isinstance(start, BucketRef) else start
    match action.verb, other.verb:
        case Verb.RUN, Verb.WAIT:
            return start in facts.reads[target]
        case Verb.RELEASE, Verb.RUN:
            return target in facts.reads[start]
        case Verb.OFFLOAD, Verb.RUN:
            return target in facts.writes[start]
        case Verb.REDUCE, Verb.RUN:
            return target in facts.sharded and gradient in facts.writes[start]
        case Verb.UPDATE, Verb.RUN:
            return gradient in facts.begins[start]
        case Verb.UPDATE, (Verb.OFFLOAD | Verb.WAIT):
            return start == gradient
        case Verb.OFFLOAD, Verb.REDUCE:
            return of_start == target
        case ((Verb.UPDATE | Verb.WAIT), Verb.REDUCE):
            return of_start == gradient and start in facts.sharded and isinstance(target, GradientRef)
        case (
            (Verb.WAIT, (Verb.GATHER | Verb.OFFLOAD | Verb.PREFETCH))
            | (Verb.RELEASE, Verb.WAIT)
            | (Verb.PREFETCH, (Verb.OFFLOAD | Verb.WAIT))
            | (Verb.GATHER, Verb.RELEASE)
        ):
            return target == start
    return False


def breaks(graph: StepGraph, made: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield what was done to make a good plan bad, and the plan."""
    actions, facts = made.schedules[0].actions, facts_of(graph, made)
    for at in needed_waits(made):
        yield f"without `{actions[at]}`", with_actions(made, [*actions[:at], *actions[at + 1 :]])
    for at, action in enumerate(actions):
        if action.verb is Verb.UPDATE and made.update is Update.IN_BACKWARD:
            continue  # the backward updates where the bucket closes, wherever the schedule says `update`
        done: set[Verb] = set()
        for before in range(at - 1, -1, -1):
            other = actions[before]
            if other.verb not in done and must_follow(action, other, facts):
                done.add(other.verb)
                moved = [*actions[:before], action, *actions[before:at], *actions[at + 1 :]]
                yield f"`{action}` before `{other}`", with_actions(made, moved)


def refused(graph: StepGraph, made: Plan, what: str) -> IllegalSchedule:
    """Return the error for a plan to which `what` was done."""
    try:
        check_alone(graph, made)
    except IllegalSchedule as error:
        return error
    pytest.fail(f"legal {what}")


@pytest.mark.parametrize("update", Update)
@pytest.mark.parametrize("name", PLANS)
def test_a_schedule_broken_in_any_place_is_refused_with_both_actions(name: str, update: Update) -> None:
    graph, made = in_mode(name, update)
    verify(graph, made)
    broken = list(breaks(graph, made))
    assert len(broken) >= len(made.schedules[0].actions) / 2
    for what, bad in broken:
        error = refused(graph, bad, what)
        assert re.match(r"`\w+ \S+`, on .*, and .*`\w+ \S+`, on .*: ", error.sentence)
        marked = [line.split()[:2] for line in error.excerpt.split("\n") if line.endswith("<-- here")]
        named = re.findall(r"`(\w+) (\S+)`", error.sentence)
        assert sorted(marked) == sorted(map(list, named)), what


@pytest.mark.parametrize("update", Update)
def test_a_plan_with_sums_of_gradients_is_also_checked_for_a_step_without_earlier_gradients(update: Update) -> None:
    graph, made = in_mode("shards on the host", update)
    verify(graph, claim_peak(graph, with_sums(made)))
    for what, bad in breaks(graph, made):
        refused(graph, with_sums(bad), what)


def with_sums(made: Plan) -> Plan:
    """Return `made` with memory for the sum of each bucket's gradients."""
    buckets = (dataclasses.replace(bucket, sum_nbytes=bucket.flat_nbytes) for bucket in made.buckets)
    return dataclasses.replace(made, buckets=tuple(buckets))


def test_the_error_shows_both_actions_in_the_schedule() -> None:
    graph, made = PLANS["host and device"]
    actions = [action for action in made.schedules[0].actions if str(action).split() != ["wait", "b2"]]
    what = "`gather b2`, on h2d, writes the gathered copy of b2, and `run fwd.2`, on compute, reads it"
    assert str(refused(graph, with_actions(made, actions), "without `wait b2`")).split("\n") == [
        f"{what}: no wait orders the two.",
        "schedule rank 0",
        "  ...",
        "  run       fwd.0               @0",
        "  release   b0",
        "  run       fwd.1               @0",
        "  gather    b2  <-- here",
        "  run       fwd.2               @0  <-- here",
        "  run       fwd.3               @0",
        "  gather    b3",
        "  wait      b3",
        "  ...",
    ]


def test_two_actions_far_apart_are_shown_with_a_gap() -> None:
    error = illegal("They have no order.", "letters", "abcdefghijklmnop", 1, 13)
    assert error.excerpt.split("\n") == [
        *("letters", "  a", "  b  <-- here", "  c", "  d", "  e", "  ..."),
        *("  k", "  l", "  m", "  n  <-- here", "  o", "  p"),
    ]


def test_verify_refuses_a_plan_whose_accesses_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule passes the tables without the waits that the order needs, so the rules of the runtime are broken: a
    streamed update in the backward that does not wait for its gradient."""
    graph, made = in_mode("streamed", Update.IN_BACKWARD)
    with monkeypatch.context() as patch:
        patch.setattr(Walk, "_gradients_are_there", lambda *args: ())
        with pytest.raises(IllegalSchedule, match=r"`offload b2.grad`, on d2h, .* `update b2`, on h2d"):
            verify(graph, made)
    verify(graph, made)


@pytest.mark.parametrize("update", Update)
@pytest.mark.parametrize("name", PLANS)
def test_the_order_is_the_closure_of_the_graph_of_the_works(name: str, update: Update) -> None:
    graph, made = in_mode(name, update)
    compare_with_graph(graph, made)


def compare_with_graph(graph: StepGraph, made: Plan) -> None:
    """Compare the order and its faults with those that networkx finds."""
    touches = region_touches(as_run(graph, made.activations, laps_of(made)), made)
    works = Order()
    works.run_steps(works_of(made, touches))
    slow = graph_of(made, touches)
    before = closure(slow)
    numbers = range(len(works.found))
    assert {(i, j) for i, j in itertools.combinations(numbers, 2) if works.found[j].before >> i & 1} == before
    faults = unordered(slow.found, before)
    found = first_conflict(works.found)
    assert (found is None) == (not faults)
    if found is not None:
        assert (works.found.index(found.first), works.found.index(found.second)) in faults


@given(st.one_of(planned_graphs(training=True), mixed_plans()), st.sampled_from(Update), st.data())
def test_random_schedules_have_the_faults_that_the_graph_has(
    planned: tuple[StepGraph, Plan], update: Update, data: st.DataObject
) -> None:
    graph, made = planned
    made = dataclasses.replace(made, update=update)
    check_alone(graph, made)
    actions = list(made.schedules[0].actions)
    for _ in range(data.draw(st.integers(0, 2))):
        action = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
        if data.draw(st.booleans()):
            actions.insert(data.draw(st.integers(0, len(actions))), action)
    compare_with_graph(graph, with_actions(made, actions))


def test_slices_pass_in_order_and_not_without_their_waits() -> None:
    """Two laps of a region in micro-batches: the second fills the slice when it has left, and reads the slice that has
    arrived."""
    made = sliced()
    touches = region_touches(as_run(STEP, made.activations, laps_of(made)), made)
    slow = graph_of(made, touches)
    memories = {cell.memory for work in slow.found for cell in (*work.reads, *work.writes)}
    assert {Memory.LEAVING_SLICE, Memory.ARRIVING_SLICE} <= memories
    compare_with_graph(STEP, made)
    legal: set[str] = set()
    for what, bad in breaks(STEP, made):
        try:
            check_alone(STEP, bad)
        except IllegalSchedule:
            continue
        legal.add(" ".join(what.split()))
    groups = ("h.1.fixed", "h.1.matmul")
    # The laps of a region wait for each slice that arrives, so nothing is left for the wait of the schedule.
    assert {f"without `wait {group}`" for group in groups} <= legal
    assert all("`wait h.1." in what for what in legal)
