"""`simulate`: updates that run beside the next step, worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.units import GIB
from elixir_compile.ir import BucketId, Lane, Placement, Plan, RegionId, StepGraph, Tier, Update, Verb
from elixir_compile.ir.cost import StreamedCopies
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.search import plan as search
from elixir_compile.step import plan_timeline
from elixir_compile.step.pipeline import hidden_update_share
from elixir_compile.step.prices import Prices
from elixir_compile.step.seconds import Cycle, Drawing, play, simulate
from tests.pure.memory_walk import walk_memory
from tests.pure.plans import mixed_plans, planned_graphs, typed
from tests.pure.problems import tight_problem
from tests.pure.simulate.test_engine import PRICES, SERIAL

F0, F1, B1, B0 = RegionId("fwd.0"), RegionId("fwd.1"), RegionId("bwd.0"), RegionId("bwd.1")
RUN_S = dict.fromkeys((F0, F1, B1, B0), 10.0)
G, W, R, L, OFF, U = Verb.GATHER, Verb.WAIT, Verb.RUN, Verb.RELEASE, Verb.OFFLOAD, Verb.UPDATE
WHOLE = StreamedCopies(there_s=3.0, first_s=3.0, back_s=2.0, num_pieces=1.0)
PRICE = replace(PRICES, streams={(name, home): WHOLE for name in ("b0", "b1") for home in Tier})
READS = {F0: (BucketId("b0"),), F1: (BucketId("b1"),)}
ON_HOST = [
    *[(G, "b0"), (W, "b0"), (R, F0), (L, "b0"), (G, "b1"), (W, "b1"), (R, F1), (L, "b1")],
    *[(R, B1), (Verb.REDUCE, "b1"), (OFF, "b1.grad"), (R, B0), (W, "b1.grad"), (Verb.REDUCE, "b0"), (OFF, "b0.grad")],
    *[(W, "b0.grad"), (U, "b0"), (U, "b1")],
]
ON_DEVICE = [(R, F0), (R, F1), (R, B1), (Verb.REDUCE, "b1"), (R, B0), (Verb.REDUCE, "b0"), (U, "b0"), (U, "b1")]


def step_s(
    actions: Sequence[tuple[Verb, str]],
    homes: Sequence[tuple[Tier, Tier, bool]],
    cycle: Cycle,
    price: Prices = PRICE,
    drawn: Drawing | None = None,
) -> float:
    placements = {
        BucketId(f"b{i}"): Placement(
            bucket=BucketId(f"b{i}"), param=param, optim=optim, resident=param is Tier.DEVICE, streamed=streamed
        )
        for i, (param, optim, streamed) in enumerate(homes)
    }
    return play(typed(actions), RUN_S, placements, price, drawn, cycle).step_s


ACROSS = Cycle(update=Update.ACROSS_STEPS, reads=READS)
HOST, SPLIT, DEVICE = (Tier.HOST, Tier.HOST, False), (Tier.DEVICE, Tier.HOST, False), (Tier.DEVICE, Tier.DEVICE, False)
STREAMED = (Tier.HOST, Tier.HOST, True)


def test_a_gather_waits_for_the_update_of_its_bucket_only() -> None:
    """Host: b0 0-7, b1 7-15. gather b0 7-11, fwd.0 11-21, gather b1 21-27, fwd.1 27-37, bwd.0 37-47, its gradient
    47-52 under bwd.1 47-57, that of b0 57-60. After the backward instead: 45 and then 15 more."""
    drawn = Drawing()
    assert step_s(ON_HOST, (HOST, HOST), ACROSS, drawn=drawn) == 60
    assert [(s.start_s, s.end_s) for s in drawn.spans if s.lane is Lane.HOST] == [(0, 7), (7, 15)]
    assert step_s(ON_HOST, (HOST, HOST), Cycle()) == 4 + 10 + 6 + 10 + 10 + 10 + 3 + 15


EARLY = [(G, "b0"), (G, "b1"), (W, "b0"), (R, F0), (L, "b0"), (W, "b1"), (R, F1), (L, "b1"), *ON_HOST[8:]]


def test_an_early_gather_waits_for_its_update_and_compute_does_not() -> None:
    """gather b0 7-11, b1, issued at 0 and updated at 15, 15-21: fwd.0 11-21 and fwd.1 21-31, not 27-37."""
    drawn = Drawing()
    assert step_s(EARLY, (HOST, HOST), ACROSS, drawn=drawn) == 31 + 10 + 10 + 3
    copies = {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is Lane.H2D}
    assert copies == {"gather b0": (7, 11), "gather b1": (15, 21)}


def test_a_late_gather_lets_ready_copies_take_the_link() -> None:
    """Updates in the other order: b1 0-8, b0 8-15. The copy of b1 goes first though it is issued second."""
    drawn = Drawing()
    step_s([*EARLY[:-2], (U, "b1"), (U, "b0")], (HOST, HOST), ACROSS, drawn=drawn)
    copies = [(span.label, span.start_s) for span in drawn.spans if span.lane is Lane.H2D]
    assert copies == [("gather b1", 8), ("gather b0", 15)]


def test_a_copy_that_waits_for_compute_holds_up_those_that_are_issued_after_it() -> None:
    """gather b1 is issued at 0, behind fwd.0 0-10, and takes the link 10-16. gather b0 is issued when its update ends,
    at 7, and takes it 16-20, though it could begin at 7: fwd.1 20-30."""
    drawn = Drawing()
    actions = [(G, "b0"), (R, F0), (G, "b1"), (W, "b0"), (R, F1), (U, "b0")]
    assert step_s(actions, (HOST, HOST), Cycle(update=Update.ACROSS_STEPS), drawn=drawn) == 30
    copies = {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is Lane.H2D}
    assert copies == {"gather b0": (16, 20), "gather b1": (10, 16)}


ENDS = [(R, F0), (Verb.REDUCE, "b0"), (OFF, "b0.grad"), (R, B0)]
"""The gradient of b0 leaves 10-13, compute goes on until 20."""


@pytest.mark.parametrize("update", list(Update))
def test_an_update_begins_when_the_copies_have_arrived_though_compute_goes_on(update: Update) -> None:
    """The host updates b0 13-20 beside bwd.1 10-20, and fwd.0 need not wait for it."""
    cycle, drawn = Cycle(update=update, reads={F0: (BucketId("b0"),)}), Drawing()
    assert step_s([*ENDS, (U, "b0")], (HOST, DEVICE), cycle, drawn=drawn) == 20
    assert spans_of(drawn, Lane.HOST) == {"update b0": (13, 20)}


SUMS = replace(PRICE, add_s={(f"b{i}", home): 2.0 + i for i in range(2) for home in Tier})


@pytest.mark.parametrize("update", list(Update))
def test_the_host_adds_gradients_before_compute_is_through(update: Update) -> None:
    """b0 is added 13-15 and updated 15-22. Across steps fwd.0 waits for this update, 2 s of the next step."""
    cycle, drawn = Cycle(update=update, reads={F0: (BucketId("b0"),)}), Drawing()
    assert step_s([*ENDS, (U, "b0")], (HOST, DEVICE), cycle, SUMS, drawn) == 22
    late_s = 0 if update is Update.AFTER_BACKWARD else 2
    seconds = {
        name: (start_s % 22 - late_s, end_s - start_s) for name, (start_s, end_s) in spans_of(drawn, Lane.HOST).items()
    }
    assert seconds == {"add b0.grad": (13, 2), "update b0": (15, 7)}


def test_the_device_adds_behind_the_sums_that_the_host_makes_before() -> None:
    """b0 is added on the host 13-15 and b1, which is reduced behind it, on the device when compute is through, 20-23;
    or 15-18 if compute is through at 10. Then the device updates b1 for 1 s, beside the host's b0."""
    early = [*ENDS[:3], (Verb.REDUCE, "b1"), (R, B0), (U, "b0"), (U, "b1")]
    assert step_s(early, (HOST, DEVICE), Cycle(), SUMS) == 24
    assert step_s([*early[:4], *early[5:]], (HOST, DEVICE), Cycle(), SUMS) == 22


@pytest.mark.parametrize(("homes", "ends_s"), [((HOST, HOST), 28), ((HOST, SPLIT), 25 + 8 + 6), ((HOST, DEVICE), 21)])
def test_after_the_backward_only_copied_buckets_wait_for_compute(
    homes: Sequence[tuple[Tier, Tier, bool]], ends_s: float
) -> None:
    """b0 is updated 13-20, beside bwd.1 until 20. b1 is updated behind it: on the host without a gradient to copy,
    until 28; after its way to the host 20-25, and back for 6 s behind 33; on the device 20-21."""
    assert step_s([*ENDS, (Verb.REDUCE, "b1"), (U, "b0"), (U, "b1")], homes, Cycle()) == ends_s


def test_a_late_copy_to_the_device_holds_the_host_up() -> None:
    """The gather of b1 ends at 26, behind bwd.1: the host, which has the gradient of b0 at 13, updates it 26-33."""
    actions = [*ENDS, (G, "b1"), (W, "b1"), (R, B1), (U, "b0")]
    assert step_s(actions, (HOST, HOST), Cycle()) == 36
    drawn = Drawing()
    step_s(actions, (HOST, HOST), Cycle(), drawn=drawn)
    assert spans_of(drawn, Lane.HOST) == {"update b0": (26, 33)}


def test_across_steps_the_next_gather_comes_when_the_early_update_ends() -> None:
    """b0 is updated 13-28, while compute is through at 20. The copy 28-32, and then fwd.0, begin the next step: 32 - 20
    of it are in the step of 22."""
    slow = replace(PRICE, host_update_s={"b0": 15.0, "b1": 8.0})
    actions = [(G, "b0"), (W, "b0"), *ENDS, (U, "b0")]
    assert step_s(actions, (HOST, DEVICE), ACROSS, slow) == 8 + 4 + 10 + 10
    assert step_s(actions, (HOST, DEVICE), Cycle(), slow) == 4 + 10 + 3 + 15


def test_a_gather_waits_at_its_issue_if_sharded_or_copied_by_compute() -> None:
    """b1 holds compute up from 7 to 15. Two ranks: all-gathers 11-13 and 21-23, fwd.0 15-25. Or compute copies: b0
    7-11, b1 15-21, fwd.0 21-31."""
    shared = replace(PRICE, gather_s=dict.fromkeys(PRICE.gather_s, 2.0), reduce_s=dict.fromkeys(PRICE.reduce_s, 2.0))
    copying = replace(PRICE, lane_of={**PRICE.lane_of, Lane.H2D: Lane.COMPUTE})
    for price, lane, ends_s, starts_s in ((shared, Lane.GATHER, [13, 23], 15), (copying, Lane.H2D, [11, 21], 21)):
        drawn = Drawing()
        step_s(EARLY, (HOST, HOST), ACROSS, price, drawn)
        assert [span.end_s for span in drawn.spans if span.lane is lane] == ends_s
        assert next(span.start_s for span in drawn.spans if span.label == f"run {F0}") == starts_s


def test_compute_is_stalled_by_updates_and_not_by_copies() -> None:
    """At the wait for b0 7 s, of 11; b1 is updated while fwd.0 runs."""
    placements = {
        BucketId(name): Placement(bucket=BucketId(name), param=Tier.HOST, optim=Tier.HOST, resident=False)
        for name in ("b0", "b1")
    }
    assert play(typed(EARLY), RUN_S, placements, PRICE, None, ACROSS).stalled_s == 7


def test_a_region_waits_for_updated_parameters_from_the_host() -> None:
    """b0 leaves 0-3, b1 3-8; host 3-10 and 10-18; back 10-14 and 18-24. fwd.0 14-24, fwd.1 24-34, backward to 54.
    With the state of b0 on the device: update 0-1, b1 leaves 1-6, host 6-14, back 14-20; fwd.0 6-16, fwd.1 20-30."""
    assert step_s(ON_DEVICE, (SPLIT, SPLIT), ACROSS) == 54
    assert step_s(ON_DEVICE, (DEVICE, SPLIT), ACROSS) == 50
    # The other way round: b0 leaves 1-4, host 4-11, back 11-15.
    assert step_s(ON_DEVICE, (SPLIT, DEVICE), ACROSS) == 55


def test_streamed_updates_occupy_compute_and_not_the_host() -> None:
    """b0 is streamed: there 0-3, updated 3-4, back 4-6. The host updates b1 0-8. gather b0 6-10, fwd.0 10-20, gather b1
    20-26, fwd.1 26-36, then 23 as before. Both: 12 s, then 4 + 10 + 6 + 10 + 23. After the backward, one side and then
    the other."""
    assert step_s(ON_HOST, (STREAMED, HOST), ACROSS) == 59
    assert step_s(ON_HOST, (STREAMED, STREAMED), ACROSS) == 12 + 53
    assert step_s(ON_HOST, (HOST, STREAMED), Cycle()) == 53 + 7 + 6


def test_a_gather_waits_for_the_streamed_update_while_other_copies_are_issued() -> None:
    """b1 is streamed 0-6, the host updates b0 0-5. The program waits for b1 at its gather, so the copy of b0, issued at
    5, takes the link first, 6-10, and that of b1 10-16: fwd.0 10-20, fwd.1 20-30, then 23 as before."""
    price, drawn = replace(PRICE, host_update_s={"b0": 5.0, "b1": 8.0}), Drawing()
    assert step_s(EARLY, (HOST, STREAMED), ACROSS, price, drawn) == 53
    copies = spans_of(drawn, Lane.H2D)
    assert (copies["gather b0"], copies["gather b1"]) == ((6, 10), (10, 16))


def test_an_early_update_reads_the_sum() -> None:
    """fwd.0 0-10, b1 is added 10-13 and updated 13-14, bwd.0 14-24."""
    actions = [(R, F0), (Verb.REDUCE, "b1"), (R, B1), (U, "b1")]
    cycle, drawn = Cycle(update=Update.IN_BACKWARD, closing={BucketId("b1"): Verb.REDUCE}), Drawing()
    assert step_s(actions, (DEVICE, DEVICE), cycle, SUMS, drawn) == 24
    spans = spans_of(drawn, Lane.COMPUTE)
    assert (spans["add b1.grad"], spans["update b1"], spans[f"run {B1}"]) == ((10, 13), (13, 14), (14, 24))


def spans_of(drawn: Drawing, lane: Lane) -> dict[str, tuple[float, float]]:
    return {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is lane}


def test_pieces_of_a_streamed_update_leave_beside_those_that_arrive() -> None:
    """Four pieces there 0-8, updated 8-9; back from 0 + 2 + 1/4 on for 6, and not before 9 + 6/4: 2.25-10.5. If they
    take 12 back, the last leaves at 2.25 + 12."""
    for back_s, ends_s in ((6.0, 10.5), (12.0, 14.25)):
        copies = StreamedCopies(there_s=8.0, first_s=2.0, back_s=back_s, num_pieces=4.0)
        drawn = Drawing()
        price = replace(PRICE, streams={("b0", Tier.HOST): copies})
        step_s(ON_HOST, (STREAMED, HOST), ACROSS, price, drawn)
        assert spans_of(drawn, Lane.H2D)["gather b0.state"] == (0, 8)
        assert spans_of(drawn, Lane.D2H)["offload b0.state"] == (2.25, ends_s)
        assert spans_of(drawn, Lane.COMPUTE)["run fwd.0"][0] == ends_s + 4


def test_pieces_of_a_streamed_update_leave_behind_gradients_on_the_busy_link() -> None:
    """b1 leaves 0-5 for the host. b0 is there 0-8 and updated 8-9, its pieces leave 5-11, where the last alone would
    take 9-10.5."""
    copies = StreamedCopies(there_s=8.0, first_s=2.0, back_s=6.0, num_pieces=4.0)
    price, drawn = replace(PRICE, streams={("b0", Tier.HOST): copies}), Drawing()
    actions = [*ON_HOST[:4], (R, F1), (R, B1), (Verb.REDUCE, "b1"), (R, B0), *ON_HOST[13:15], *ON_HOST[15:]]
    step_s(actions, (STREAMED, SPLIT), ACROSS, price, drawn)
    assert spans_of(drawn, Lane.D2H)["offload b1.grad"] == (0, 5)
    assert spans_of(drawn, Lane.D2H)["offload b0.state"] == (5, 11)


def test_parameters_leave_the_device_before_their_gradient_does() -> None:
    """b0: parameters 0-2, gradient 2-5, host 5-12, back 12-16: fwd.0 16-26. b1: 5-7, 7-12, host 12-20, back 20-26."""
    price, drawn = replace(PRICE, leave_s={"b0": 2.0, "b1": 2.0}), Drawing()
    assert step_s(ON_DEVICE, (SPLIT, SPLIT), ACROSS, price, drawn) == 56
    leaving = {"offload b0": (0, 2), "offload b0.grad": (2, 5), "offload b1": (5, 7), "offload b1.grad": (7, 12)}
    assert spans_of(drawn, Lane.D2H) == leaving


def test_an_early_update_begins_when_its_gradient_is_complete() -> None:
    """In its steady cycle 7 s of the host's b0 are left over. gather b0 7-11, fwd.0 11-21, gather b1 21-27, fwd.1
    27-37, bwd.0 37-47, gradient of b1 47-52, host 52-60; bwd.1 47-57, gradient of b0 57-60, host 60-67."""
    cycle = Cycle(update=Update.IN_BACKWARD, reads=READS, closing={BucketId("b0"): OFF, BucketId("b1"): OFF})
    drawn = Drawing()
    assert step_s(ON_HOST, (HOST, HOST), cycle, drawn=drawn) == 60
    host = sorted(
        (span.label, span.start_s % 60, span.end_s - span.start_s) for span in drawn.spans if span.lane is Lane.HOST
    )
    assert host == [("update b0", 0, 7), ("update b1", 52, 8)]


def test_on_shared_cores_update_seconds_add_to_the_step_at_any_time() -> None:
    total_s = 4 + 10 + 6 + 10 + 10 + 5 + 10 + 3 + 7 + 8
    closing = {BucketId("b0"): OFF, BucketId("b1"): OFF}
    for cycle in (Cycle(), ACROSS, Cycle(update=Update.IN_BACKWARD, reads=READS, closing=closing)):
        assert step_s(ON_HOST, (HOST, HOST), cycle, SERIAL) == total_s


@given(planned_graphs() | mixed_plans(), st.sampled_from(list(Update)), st.integers(0, 255))
@settings(max_examples=40)
def test_every_plan_reaches_a_steady_state_in_which_no_lane_does_two_works_or_exceeds_its_rate(
    planned: tuple[StepGraph, Plan], update: Update, streamed: int
) -> None:
    graph, plan = planned
    placements = tuple(
        replace(home, streamed=home.optim is Tier.HOST and bucket.trainable and bool(streamed >> i & 1))
        for i, (home, bucket) in enumerate(zip(plan.placements, plan.buckets, strict=True))
    )
    plan = replace(plan, update=update, placements=placements)
    walk = walk_memory(graph, plan)
    assert walk.live_bytes == plan_timeline(graph, plan).live_bytes
    node = profile_for("cuda", GIB, GIB, "cuda").nodes[0]
    link = replace(node.h2d, latency_s=0.0)
    made = simulate(graph, plan, Cluster(nodes=(replace(node, h2d=link, d2h=link),)))
    copies = [span for span in made.spans if span.lane in (Lane.H2D, Lane.D2H)]
    assert [s for s in copies if s.nbytes > link.bytes_per_s * (s.end_s - s.start_s) * (1 + 1e-6)] == []
    assert 0 <= hidden_update_share(made) <= 1
    for lane in Lane:
        own = [span for span in made.spans if span.lane is lane]
        assert sum(span.end_s - span.start_s for span in own) <= made.step_s * (1 + 1e-9)
        assert len({(span.label, span.start_s, span.end_s) for span in own}) == len(own) or made.step_s == 0
    updates = [span.label for span in made.spans if span.label.startswith("update ")]
    assert sorted(updates) == sorted(f"update {a.target}" for a in plan.schedules[0].actions if a.verb is U)


def test_a_streamed_update_takes_bytes_of_the_largest_bucket() -> None:
    problem = tight_problem()
    made = search(problem, "greedy")
    hosted = [i for i, home in enumerate(made.placements) if home.optim is Tier.HOST]
    placements = tuple(replace(home, streamed=i in hosted) for i, home in enumerate(made.placements))
    before = plan_timeline(problem.graph, made).live_bytes[-1]
    after = plan_timeline(problem.graph, replace(made, placements=placements)).live_bytes[-1]
    rooms = [
        made.buckets[i].state_nbytes + (0 if made.placements[i].param is Tier.DEVICE else 2 * made.buckets[i].nbytes)
        for i in hosted
    ]
    assert after - before == max(rooms)


@pytest.mark.parametrize("update", list(Update))
def test_update_time_does_not_matter_without_host_updates(update: Update) -> None:
    cycle = Cycle(update=update, reads=READS)
    assert step_s(ON_DEVICE, (DEVICE, DEVICE), cycle) == 42
