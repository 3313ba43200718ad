"""The order of the works of a schedule: good schedules, each of them broken in each place, and the same order in
seconds and in vector clocks."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.ir import (
    Action,
    BucketRef,
    GradientRef,
    GroupRef,
    Kind,
    Plan,
    RegionId,
    RegionRef,
    Saving,
    StepGraph,
    StorageId,
    Target,
    Tier,
    Update,
    Verb,
)
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search import plan
from elixir_compile.step import as_run, verify
from elixir_compile.step.divide import laps_of
from elixir_compile.step.lane_order import (
    KEPT,
    Cell,
    Order,
    Ordered,
    Touch,
    check_order,
    first_conflict,
    region_touches,
    works_of,
)
from elixir_compile.step.seconds import player_of
from elixir_compile.step.structure import illegal
from elixir_compile.step.works import Do, Memory, Walk, Work
from tests.pure.mixes import group
from tests.pure.plans import Trip, bucket_of, claim_peak, make_plan, mixed_plans, planned_graphs, with_actions
from tests.pure.problems import CLUSTERS, between, problem_of
from tests.pure.step.test_bytes import STEP
from tests.pure.step.test_bytes import offloaded as sliced
from tests.pure.steps import GELU
from tests.pure.strategies import Layer, chain
from tests.races.happens_before import Actor, Source, shown
from tests.races.happens_before import Cell as RaceCell

# ----------------------------------------------------------------------------------------------------------------------
# The order of a plan's works as a graph of networkx: the works are the same, the closure is searched.
#
# `GraphOrder` keeps only the works that are directly before a work, and `closure` finds all others by paths.
# `unordered` compares every two works that touch the same memory.


class Nodes(frozenset[int]):
    """A moment as the works that are directly before it."""

    def __or__(self, other: Any) -> "Nodes":
        return Nodes(frozenset.__or__(self, other or frozenset()))

    __ror__ = __or__


class GraphOrder(Order):
    """An order whose moments are sets of works."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: Any = nx.DiGraph()

    def issue(self, work: Work, step: int, before: Any) -> Any:
        number = len(self.found)
        super().issue(work, step, 0)
        self.graph.add_node(number)
        self.graph.add_edges_from((other, number) for other in before or ())
        return Nodes({number})


def graph_of(plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> GraphOrder:
    """Return the works of two steps of `plan`, and the graph of those that are directly before another."""
    order = GraphOrder()
    order.run_steps(works_of(plan, touches))
    return order


def closure(works: GraphOrder) -> set[tuple[int, int]]:
    """Return the pairs of works of which the first is before the second."""
    return set(nx.transitive_closure_dag(works.graph).edges)


def unordered(works: Sequence[Ordered], before: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs of works with accesses to a cell that are not ordered as they must be.

    A read before the first write is one of them, unless the memory keeps its values from step to step.
    """
    accesses: dict[Cell, list[tuple[int, bool, bool]]] = {}
    for number, work in enumerate(works):
        for cell in dict.fromkeys((*work.reads, *work.writes, *work.frees)):
            is_freed = cell in work.frees
            accesses.setdefault(cell, []).append((number, is_freed or cell in work.writes, is_freed))
    found: list[tuple[int, int]] = []
    for cell, own in accesses.items():
        begin = next((number for number, writes, _ in own if writes), -1)
        found += [(number, begin) for number, _, _ in own if number < begin and cell.memory not in KEPT]
        for (first, writes, frees), (second, writes_too, _) in itertools.combinations(own, 2):
            if (writes or writes_too) and ((first, second) not in before or frees):
                found.append((first, second))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Good schedules whose works are ordered, and each of them broken in each place: both actions are named.


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
    problem = problem_of(graph, CLUSTERS["2 x cuda"], shard_numels=shards)
    return graph, plan(between(problem, share), "greedy")


PLANS = {
    "host and device": on_host_and_device,
    "streamed": streamed,
    "offloaded": offloaded,
    "shards on the host": partial(sharded, 0.0),
    "shards on the device": partial(sharded, 1.0),
}


@cache
def made_of(name: str) -> tuple[StepGraph, Plan]:
    """Return the graph and the plan called `name`: not at import, as every process of tests imports this file."""
    return PLANS[name]()


def in_mode(name: str, update: Update) -> tuple[StepGraph, Plan]:
    graph, made = made_of(name)
    return graph, claim_peak(graph, dataclasses.replace(made, update=update))


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
    graph, made = made_of("host and device")
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
    stream = Walk._stream
    with monkeypatch.context() as patch:
        patch.setattr(Walk, "_stream", lambda walk, buckets, _: stream(walk, buckets, ()))
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


# ----------------------------------------------------------------------------------------------------------------------
# The readers of the works of a schedule agree: what is in order does not overlap in time.


def check_times(graph: StepGraph, plan: Plan, cluster: Cluster) -> int:
    """Compare order and times of a step of `plan`; return the number of ordered pairs.

    Not of what the thread of the updates issues, whose times are known later, nor of what passes in pieces.
    """
    player, order = player_of(graph, plan, cluster), Order()
    player.works_of(plan.schedules[0].pairs)  # all lanes are idle, and the moments are those of the works below
    ends_s: dict[int, float] = {}
    num_pairs = 0
    for work in works_of(plan, region_touches(as_run(graph, plan.activations, laps_of(plan)), plan)):
        order._run(work, 0)
        player.run([work])
        timed = player.price.of_deed.get(work.do)
        if work.do is not Do.RUN and timed is None:
            continue
        number, end_s = len(order.found) - 1, player.over_s[work.actor]
        begin_s = end_s - (player.run_s[work.name] if timed is None else timed[work.name][0])
        before = [other for other in ends_s if order.found[number].before >> other & 1]
        assert all(ends_s[other] <= begin_s + 1e-9 * max(end_s, 1e-9) for other in before), work
        num_pairs += len(before)
        ends_s[number] = end_s
    return num_pairs


@pytest.mark.parametrize("update", Update)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_before_a_work_is_over_when_it_begins(name: str, update: Update) -> None:
    graph, plan = in_mode(name, update)
    assert check_times(graph, plan, CLUSTERS["2 x cuda" if "shards" in name else "cuda"]) > 20


@given(st.one_of(planned_graphs(training=True), mixed_plans()), st.sampled_from(Update))
@settings(max_examples=15)
def test_in_random_plans_too(planned: tuple[StepGraph, Plan], update: Update) -> None:
    graph, plan = planned
    check_times(graph, dataclasses.replace(plan, update=update), CLUSTERS["cuda"])


# ----------------------------------------------------------------------------------------------------------------------
# Vector clocks: which accesses are ordered, and which accesses a cell may forget.


HERE = Source("an action", 1, "file.py", 1)


def test_accesses_of_an_actor_are_ordered() -> None:
    actor, cell = Actor("a"), RaceCell()
    assert cell.add(actor, "writes", (0, 8), HERE) is None
    assert cell.add(actor, "reads", (0, 8), HERE) is None
    assert cell.add(actor, "writes", (0, 8), HERE) is None


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [("reads", "reads", False), ("reads", "writes", True), ("writes", "reads", True), ("writes", "writes", True)],
)
def test_accesses_of_two_actors_have_no_order(first: str, second: str, is_race: bool) -> None:
    one, other, cell = Actor("a"), Actor("b"), RaceCell()
    assert cell.add(one, first, (0, 8), HERE) is None
    assert (cell.add(other, second, (4, 12), HERE) is not None) == is_race
    assert cell.add(other, "writes", (8, 12), HERE) is None  # not the bytes of the first


def test_an_actor_that_learned_a_clock_is_behind_it_and_all_before() -> None:
    one, other, third, cell = Actor("a"), Actor("b"), Actor("c"), RaceCell()
    cell.add(one, "writes", (0, 8), HERE)
    other.learn(one.clock)
    third.learn(other.clock)
    assert cell.add(third, "writes", (0, 8), HERE) is None
    assert cell.add(other, "reads", (0, 8), HERE) is not None


def test_what_an_actor_did_after_its_clock_was_taken_is_not_known() -> None:
    one, other, cell = Actor("a"), Actor("b"), RaceCell()
    taken = dict(one.clock)
    cell.add(one, "writes", (0, 8), HERE)
    other.learn(taken)
    found = cell.add(other, "reads", (0, 8), HERE)
    assert found is not None
    assert [access.actor for access in found] == ["a", "b"]


def test_a_free_is_a_write_of_every_byte() -> None:
    one, other, cell = Actor("a"), Actor("b"), RaceCell()
    cell.add(one, "reads", (4, 8), HERE)
    assert cell.free(other, HERE) is not None
    assert RaceCell().free(other, HERE) is None


def test_reads_of_many_actors_are_all_kept_until_a_write_is_behind_them() -> None:
    one, other, writer, cell = Actor("a"), Actor("b"), Actor("c"), RaceCell()
    cell.add(one, "reads", (0, 8), HERE)
    cell.add(other, "reads", (0, 8), HERE)
    writer.learn(other.clock)
    assert cell.add(writer, "writes", (0, 8), HERE) is not None  # not behind the first


def test_the_schedule_marks_the_actions() -> None:
    cell, one, other = RaceCell(), Actor("a"), Actor("b")
    cell.add(one, "writes", (0, 8), Source("gather b1", 3, "file.py", 1))
    found = cell.add(other, "writes", (0, 8), Source("update b1", 20, "file.py", 2))
    assert found is not None
    lines = shown([(moment, f"action {moment}") for moment in range(1, 25)], found).splitlines()
    assert [line.split()[:2] for line in lines if line.endswith("<-- here")] == [["action", "3"], ["action", "20"]]
    assert "    ..." in lines
    assert len(lines) == 7 + 1 + 9
