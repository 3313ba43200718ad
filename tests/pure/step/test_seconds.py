"""The seconds of the works of a schedule, worked out by hand: lanes, updates beside the next step, and ranks that
meet."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import GIB
from elixir_compile.ir import (
    BucketId,
    Lane,
    Origin,
    Placement,
    Plan,
    Record,
    RegionId,
    Saving,
    Span,
    StepGraph,
    Tier,
    Update,
    Verb,
)
from elixir_compile.ir.cost import Measured, StreamedCopies, Stretch
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search import plan as search
from elixir_compile.search.reasons import write_out
from elixir_compile.step import plan_timeline
from elixir_compile.step.prices import Prices, prices
from elixir_compile.step.seconds import (
    Cycle,
    Drawing,
    RankStep,
    busy_share,
    critical_path,
    exposed_s,
    hidden_share,
    hidden_update_share,
    play,
    simulate,
    simulate_ranks,
)
from tests.pure.memory_walk import walk_memory
from tests.pure.plans import mixed_plans, planned_graphs, typed
from tests.pure.problems import CLUSTERS, chain_of, problem_of, tight_problem
from tests.pure.search.test_ranks_of_a_search import drawn, shared_problems

# ----------------------------------------------------------------------------------------------------------------------
# `step.seconds`: lanes worked out by hand.


R0, R1, B0, B1 = RegionId("fwd.0"), RegionId("fwd.1"), BucketId("b0"), BucketId("b1")
RUN_S = {R0: 10.0, R1: 10.0}
GROUPS = ("h.0.matmul", "odd.grad")
PRICES = Prices(
    before_s=(0.0,),
    h2d_s={B0: 4.0, B1: 6.0, "h.0.matmul": 7.0, "odd.grad": 1.0},
    d2h_s={B0: 3.0, B1: 5.0, "h.0.matmul": 8.0, "odd.grad": 2.0},
    leave_s={B0: 0.0, B1: 0.0},
    gather_s={B0: 0.0, B1: 0.0},
    reduce_s={B0: 0.0, B1: 0.0},
    device_update_s={B0: 1.0, B1: 1.0},
    host_update_s={B0: 7.0, B1: 8.0},
    lane_of={lane: lane for lane in Lane},
)
SHARDED = replace(PRICES, sharded=frozenset((B0, B1)))
SERIAL = replace(PRICES, lane_of=dict.fromkeys(Lane, Lane.COMPUTE))
G, W, R, L, OFF, U = Verb.GATHER, Verb.WAIT, Verb.RUN, Verb.RELEASE, Verb.OFFLOAD, Verb.UPDATE
P = Verb.PREFETCH


def step_s(
    actions: Sequence[tuple[Verb, str]],
    price: Prices = PRICES,
    homes: Sequence[tuple[Tier, Tier]] = ((Tier.HOST, Tier.HOST),) * 2,
) -> float:
    placements = {
        bucket: Placement(bucket=bucket, param=param, optim=optim, resident=param is Tier.DEVICE)
        for bucket, (param, optim) in zip((B0, B1), homes, strict=False)
    }
    return play(typed(actions, GROUPS), RUN_S, placements, price).step_s


def test_a_gather_at_its_wait_is_exposed_and_an_earlier_one_hidden() -> None:
    """At its wait: 4 + 10 + 6 + 10. Ahead of fwd.0: b0 ends at 4, b1 at 10, fwd.0 at 14, so only b0 is waited for."""
    late = [(G, "b0"), (W, "b0"), (R, R0), (L, "b0"), (G, "b1"), (W, "b1"), (R, R1), (L, "b1")]
    early = [(G, "b0"), (G, "b1"), (W, "b0"), (R, R0), (L, "b0"), (W, "b1"), (R, R1), (L, "b1")]
    assert step_s(late) == 30
    assert step_s(early) == 24


ON_DISK = (Tier.DISK, Tier.DISK)


def test_a_gather_from_the_disk_copies_pieces_as_they_are_read() -> None:
    """Two pieces of 4 s each, read and then copied in 2 s each: 0-4, 4-8, and 4-6, 8-10; fwd.0 10-20."""
    price = replace(PRICES, reads={B0: (8.0, 2)})
    assert step_s([(G, "b0"), (W, "b0"), (R, R0)], price, [ON_DISK, ON_DISK]) == 20


def test_the_disk_reads_as_far_ahead_as_the_ring_has_buffers() -> None:
    """Eight pieces of 1 s, copied in 0.5 s each behind fwd.0, 0-10. Four are read until 4, the fifth when the first has
    left: 10.5-11.5, then one each second until 14.5. The last is copied until 15; fwd.1 15-25."""
    price = replace(PRICES, reads={B0: (8.0, 8)})
    assert step_s([(R, R0), (G, "b0"), (W, "b0"), (R, R1)], price, [ON_DISK, ON_DISK]) == 25


def test_reads_of_gathers_and_updates_on_disk_are_one_lane() -> None:
    """A step of 18 s: the disk has the state of b1 8-14 and b0 14-22, of which the last 4 s are in the next step; there
    b0 is copied 4-8, and fwd.0 is 8-18. With two lanes of the disk fwd.0 were 4-14."""
    price = replace(PRICES, reads={B0: (8.0, 1)}, disk_s={B1: 6.0})
    homes = {B0: ON_DISK, B1: (Tier.HOST, Tier.DISK)}
    placements = {
        name: Placement(bucket=name, param=param, optim=optim, resident=False) for name, (param, optim) in homes.items()
    }
    drawn = Drawing()
    actions = typed([(G, "b0"), (W, "b0"), (R, R0), (U, "b1")], GROUPS)
    across = Cycle(update=Update.ACROSS_STEPS)
    assert play(actions, RUN_S, placements, price, drawn, across).step_s == 18
    spans = {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is Lane.DISK}
    assert spans == {"read b1.state": (8, 11), "write b1.state": (11, 14), "read b0": (14, 22)}


@pytest.mark.parametrize("update", [Update.AFTER_BACKWARD, Update.ACROSS_STEPS])
def test_trained_parameters_on_disk_are_read_behind_their_update(update: Update) -> None:
    """A gather of 8 s of the disk and 4 s of copies, fwd.0 of 10 s, a gradient that leaves in 3 s, and an update whose
    state takes the disk 6 s and whose parameters take it 5 s: each waits for the one before."""
    price = replace(PRICES, reads={B0: (8.0, 1)}, disk_s={B0: 6.0}, param_disk_s={B0: 5.0})
    home = {B0: Placement(bucket=B0, param=Tier.DISK, optim=Tier.DISK, resident=False)}
    drawn, step_s = Drawing(), 8 + 4 + 10 + 3 + 11
    actions = typed([(G, "b0"), (W, "b0"), (R, R0), (OFF, "b0.grad"), (W, "b0.grad"), (U, "b0")], GROUPS)
    assert play(actions, RUN_S, home, price, drawn, Cycle(update=update)).step_s == step_s
    spans = {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is Lane.DISK}
    read_s, _ = spans["read b0"]
    assert spans == {
        "read b0": (read_s, read_s + 8),
        "read b0.state": ((read_s + 25) % step_s, (read_s + 25) % step_s + 5.5),
        "write b0.state": ((read_s + 25) % step_s + 5.5, (read_s + 25) % step_s + 11),
    }


@pytest.mark.parametrize("read_s", [5.0, 10.0, 20.0])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_chain_of_frozen_layers_takes_the_seconds_of_the_disk_or_of_compute(read_s: float, is_sharded: bool) -> None:
    """Sixteen layers, each gathered one ahead in the forward and in the backward: 10 s of compute, 3 s of copies, and
    2 s of collectives of several ranks, for which the program waits for what it reads."""
    names = [BucketId(f"b{n}") for n in range(16)]
    run_s = {RegionId(f"{phase}.{n}"): 10.0 for phase in ("fwd", "bwd") for n in range(16)}
    none_s = dict.fromkeys(names, 0.0)
    price = replace(
        PRICES,
        **dict.fromkeys(("d2h_s", "leave_s", "gather_s", "reduce_s", "device_update_s", "host_update_s"), none_s),
        h2d_s=dict.fromkeys(names, 3.0),
        reads=dict.fromkeys(names, (read_s, 4)),
    )
    if is_sharded:
        price = replace(price, gather_s=dict.fromkeys(names, 2.0), sharded=frozenset(names))
    layers = [*zip(names, run_s, strict=False), *zip(reversed(names), [*run_s][16:], strict=True)]
    actions: list[tuple[Verb, str]] = [(G, layers[0][0])]
    for (name, region), (later, _) in zip(layers, [*layers[1:], (None, None)], strict=True):
        actions += [(G, later)] if later is not None else []
        actions += [(W, name), (R, region), (L, name)]
    home = {name: Placement(bucket=name, param=Tier.DISK, optim=Tier.DISK, resident=False) for name in names}
    least_s = max(32 * read_s, 320.0)
    assert least_s <= play(typed(actions, GROUPS), run_s, home, price).step_s <= 1.1 * least_s


def test_without_overlap_everything_adds_up() -> None:
    early = [(G, "b0"), (G, "b1"), (W, "b0"), (R, R0), (W, "b1"), (R, R1)]
    assert step_s(early, SERIAL) == 4 + 6 + 10 + 10


def test_several_ranks_all_gather_and_reduce_scatter() -> None:
    """b0 from the host until 4, the ranks until 6; fwd.0 until 16; its gradient shared out until 18, gone at 21."""
    price = replace(SHARDED, gather_s={B0: 2.0, B1: 2.0}, reduce_s={B0: 2.0, B1: 2.0})
    actions = [(G, "b0"), (W, "b0"), (R, R0), (L, "b0"), (Verb.REDUCE, "b0"), (OFF, "b0.grad"), (W, "b0.grad")]
    assert step_s(actions, price) == 21
    # Parameters on the device come from the other ranks only, and the gradient stays.
    device = ((Tier.DEVICE, Tier.DEVICE),) * 2
    assert step_s([*actions[:5], (W, "b0.grad")], price, device) == 2 + 10 + 2


def test_averages_over_copies_run_after_the_reduce_beside_compute() -> None:
    """Shared out 10-12 and averaged 12-15 under fwd.1, 10-20; waited for at once, it is exposed. What each rank has
    whole is waited for where it is reduced."""
    device = ((Tier.DEVICE, Tier.DEVICE),) * 2
    seconds = {name: {B0: s, B1: s} for name, s in (("gather_s", 1.0), ("reduce_s", 2.0), ("average_s", 3.0))}
    price = replace(SHARDED, **seconds)
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (R, R1), (W, "b0.grad")], price, device) == 20
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (W, "b0.grad"), (R, R1)], price, device) == 10 + 2 + 3 + 10
    whole = replace(price, gather_s={B0: 0.0, B1: 0.0}, sharded=frozenset())
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (R, R1)], whole, device) == 10 + 2 + 3 + 10
    copied = replace(whole, reduce_s={B0: 0.0, B1: 0.0})
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (R, R1)], copied, device) == 10 + 3 + 10


def test_gathers_and_reduces_are_one_queue_and_averages_another() -> None:
    """The gather of b1, which is asked for behind the reduce of b0, 10-15, ends at 17, and then fwd.1 runs; asked for
    first, it ends at 2. The average of b0, 5-8, is behind its reduce, 2-5, and beside that of b1, 5-8, whose own is
    8-11."""
    device = ((Tier.DEVICE, Tier.DEVICE),) * 2
    sharded = replace(SHARDED, gather_s={B0: 2.0, B1: 2.0})
    price = replace(sharded, reduce_s={B0: 5.0, B1: 5.0})
    reduce, gather = (Verb.REDUCE, "b0"), (G, "b1")
    assert step_s([(R, R0), reduce, gather, (W, "b1"), (R, R1), (W, "b0.grad")], price, device) == 10 + 5 + 2 + 10
    assert step_s([gather, (R, R0), reduce, (W, "b1"), (R, R1), (W, "b0.grad")], price, device) == 10 + 10
    price = replace(sharded, reduce_s={B0: 3.0, B1: 3.0}, average_s={B0: 3.0, B1: 3.0})
    reduces = [(Verb.REDUCE, "b0"), (Verb.REDUCE, "b1"), (W, "b0.grad"), (W, "b1.grad")]
    assert step_s([gather, *reduces], price, device) == 2 + 3 + 3 + 3


def test_a_lane_takes_its_transfers_in_order() -> None:
    """Both gradients leave at 10: b0 until 13, b1 until 18, while fwd.1 runs until 20."""
    actions = [(R, R0), (OFF, "b0.grad"), (OFF, "b1.grad"), (R, R1), (W, "b0.grad"), (W, "b1.grad")]
    assert step_s(actions) == 20
    assert step_s([*actions[:3], *actions[4:], (R, R1)]) == 28


def test_activations_are_offloaded_and_prefetched_beside_compute() -> None:
    """Offload 10-18 under fwd.1, 10-20. Prefetch 20-27 is waited for; issued before another fwd.0 it is hidden."""
    acts = "h.0.matmul"
    away = [(R, R0), (OFF, acts), (R, R1), (W, acts)]
    assert step_s(away) == 20
    assert step_s([*away, (P, acts), (W, acts), (R, R0)]) == 37
    assert step_s([*away, (P, acts), (R, R0), (W, acts)]) == 30
    assert step_s([*away, (P, acts), (R, R0), (W, acts)], SERIAL) == 10 + 8 + 10 + 7 + 10


def test_a_prefetch_queues_behind_gathers_and_its_own_offload() -> None:
    """H2D: gather of b0 10-14, prefetch 18-25, since the offload ends at 18; a group may be named like a gradient."""
    acts = "h.0.matmul"
    assert step_s([(R, R0), (OFF, acts), (G, "b0"), (P, acts), (W, acts)]) == 25
    assert step_s([(R, R0), (OFF, acts), (W, acts), (G, "b1"), (P, acts), (W, acts)]) == 18 + 6 + 7
    assert step_s([(R, R0), (OFF, "odd.grad"), (W, "odd.grad"), (P, "odd.grad")]) == 13


def test_the_step_ends_with_its_last_transfer() -> None:
    assert step_s([(R, R0), (OFF, "b1.grad")]) == 15


def test_device_and_host_updates_run_at_once() -> None:
    """The gradient of b0 leaves 10-13, the host updates b0 until 20 and the device b1 from 10 to 11; on one set of
    cores they add up."""
    actions = [(R, R0), (Verb.OFFLOAD, "b0.grad"), (U, "b0"), (U, "b1")]
    homes = [(Tier.HOST, Tier.HOST), (Tier.DEVICE, Tier.DEVICE)]
    assert step_s(actions, homes=homes) == 20
    assert step_s(actions, SERIAL, homes) == 21


def test_gradients_and_parameters_are_copied_if_state_is_on_the_host() -> None:
    """b0: 10 + 3 + 7 + 4. b1 follows one lane later: offload 13-18, update 20-28, gather 28-34."""
    homes = [(Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.HOST)]
    assert step_s([(R, R0), (U, "b0")], homes=homes) == 24
    assert step_s([(R, R0), (U, "b0"), (U, "b1")], homes=homes) == 34


def record(*spans: tuple[Lane, float, float]) -> Record:
    return Record(
        origin=Origin.SIMULATED,
        step_s=max((end_s for _, _, end_s in spans), default=0.0),
        device_peak_bytes=0,
        host_peak_bytes=0,
        spans=tuple(Span(lane=lane, label="x", start_s=start_s, end_s=end_s) for lane, start_s, end_s in spans),
    )


def test_exposed_seconds_are_transfers_without_compute() -> None:
    """H2D 0-6 under compute 2-4 and 5-9: 1 + 2 s covered of 6; D2H 8-10: 1 s of 2. Host work is no transfer."""
    made = record((Lane.COMPUTE, 2, 4), (Lane.H2D, 0, 6), (Lane.COMPUTE, 5, 9), (Lane.D2H, 8, 10), (Lane.HOST, 0, 50))
    assert exposed_s(made) == 4
    assert hidden_share(made) == 0.5


def test_no_rounding_makes_exposed_seconds_negative() -> None:
    """0.3 and 0.9 - 0.3 are more than 0.9."""
    assert exposed_s(record((Lane.COMPUTE, 0.0, 0.3), (Lane.COMPUTE, 0.3, 0.9), (Lane.H2D, 0.0, 0.9))) == 0


def test_nothing_transferred_is_all_hidden() -> None:
    made = record((Lane.COMPUTE, 0, 4))
    assert (exposed_s(made), hidden_share(made)) == (0, 1)


@given(planned_graphs() | mixed_plans())
@settings(max_examples=40)
def test_simulated_records_obey_lanes_and_bounds(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    for device_type in ("cpu", "cuda"):
        cluster = profile_for(device_type, GIB, GIB, device_type)
        made = simulate(graph, plan, cluster)
        runs = [span for span in made.spans if span.label in {f"run {region.id}" for region in plan.regions}]
        assert [span.lane for span in runs] == [Lane.COMPUTE] * len(plan.regions)
        away = [group.id for group in plan.activations if group.saving is Saving.OFFLOAD]
        carried = Counter((span.lane, span.label) for span in made.spans)
        assert all(carried[Lane.D2H, f"offload {name}"] == carried[Lane.H2D, f"prefetch {name}"] == 1 for name in away)
        assert made.counts.get("gather", 0) == sum(action.verb is G for action in plan.schedules[0].actions)
        assert made.step_s == pytest.approx(max((span.end_s for span in made.spans), default=0.0))
        assert made.step_s >= prices(graph, plan.buckets, cluster, activations=plan.activations).before_s[-1] * (
            1 - 1e-9
        )
        assert 0 <= hidden_share(made) <= 1
        # One set of cores does one thing at a time; otherwise each lane does.
        for lanes in [list(Lane)] if device_type == "cpu" else [[lane] for lane in Lane]:
            spans = sorted((span.start_s, span.end_s) for span in made.spans if span.lane in lanes)
            assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(spans))


def test_the_critical_path_has_no_gaps_and_ends_the_step() -> None:
    """A gather of 4 s is waited for, then 10 s of compute, then nothing: what is hidden is not on the path."""
    drawn = Drawing()
    homes = {b: Placement(bucket=b, param=Tier.HOST, optim=Tier.HOST, resident=False) for b in (B0, B1)}
    actions = [(G, "b0"), (G, "b1"), (W, "b0"), (R, R0), (W, "b1")]
    step_s = play(typed(actions, GROUPS), RUN_S, homes, PRICES, drawn).step_s
    record = Record(
        origin=Origin.SIMULATED, step_s=step_s, device_peak_bytes=0, host_peak_bytes=0, spans=tuple(drawn.spans)
    )
    path = critical_path(record)
    assert [span.label for span in path] == ["gather b0", "run fwd.0"]
    assert sum(span.end_s - span.start_s for span in path) == step_s == 14
    assert exposed_s(record) == 4.0


# ----------------------------------------------------------------------------------------------------------------------
# `simulate`: updates that run beside the next step, worked out by hand.


FWD0, FWD1, BWD1, BWD0 = RegionId("fwd.0"), RegionId("fwd.1"), RegionId("bwd.0"), RegionId("bwd.1")
CYCLE_RUN_S = dict.fromkeys((FWD0, FWD1, BWD1, BWD0), 10.0)
WHOLE = StreamedCopies(there_s=3.0, first_s=3.0, back_s=2.0, num_pieces=1.0)
PRICE = replace(PRICES, streams={(name, home): WHOLE for name in ("b0", "b1") for home in Tier})
READS = {FWD0: (BucketId("b0"),), FWD1: (BucketId("b1"),)}
ON_HOST = [
    *[(G, "b0"), (W, "b0"), (R, FWD0), (L, "b0"), (G, "b1"), (W, "b1"), (R, FWD1), (L, "b1")],
    *[(R, BWD1), (Verb.REDUCE, "b1"), (OFF, "b1.grad"), (R, BWD0), (W, "b1.grad"), (Verb.REDUCE, "b0")],
    *[(OFF, "b0.grad"), (W, "b0.grad"), (U, "b0"), (U, "b1")],
]
ON_DEVICE = [(R, FWD0), (R, FWD1), (R, BWD1), (Verb.REDUCE, "b1"), (R, BWD0), (Verb.REDUCE, "b0"), (U, "b0"), (U, "b1")]


def cycle_step_s(
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
    return play(typed(actions), CYCLE_RUN_S, placements, price, drawn, cycle).step_s


ACROSS = Cycle(update=Update.ACROSS_STEPS, reads=READS)
HOST, SPLIT, DEVICE = (Tier.HOST, Tier.HOST, False), (Tier.DEVICE, Tier.HOST, False), (Tier.DEVICE, Tier.DEVICE, False)
STREAMED = (Tier.HOST, Tier.HOST, True)


def test_a_gather_waits_for_the_update_of_its_bucket_only() -> None:
    """Host: b0 0-7, b1 7-15. gather b0 7-11, fwd.0 11-21, gather b1 21-27, fwd.1 27-37, bwd.0 37-47, its gradient
    47-52 under bwd.1 47-57, that of b0 57-60. After the backward instead: 45 and then 15 more."""
    drawn = Drawing()
    assert cycle_step_s(ON_HOST, (HOST, HOST), ACROSS, drawn=drawn) == 60
    assert [(s.start_s, s.end_s) for s in drawn.spans if s.lane is Lane.HOST] == [(0, 7), (7, 15)]
    assert cycle_step_s(ON_HOST, (HOST, HOST), Cycle()) == 4 + 10 + 6 + 10 + 10 + 10 + 3 + 15


EARLY = [(G, "b0"), (G, "b1"), (W, "b0"), (R, FWD0), (L, "b0"), (W, "b1"), (R, FWD1), (L, "b1"), *ON_HOST[8:]]


def test_an_early_gather_waits_for_its_update_and_compute_does_not() -> None:
    """gather b0 7-11, b1, issued at 0 and updated at 15, 15-21: fwd.0 11-21 and fwd.1 21-31, not 27-37."""
    drawn = Drawing()
    assert cycle_step_s(EARLY, (HOST, HOST), ACROSS, drawn=drawn) == 31 + 10 + 10 + 3
    copies = {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is Lane.H2D}
    assert copies == {"gather b0": (7, 11), "gather b1": (15, 21)}


def test_a_late_gather_lets_ready_copies_take_the_link() -> None:
    """Updates in the other order: b1 0-8, b0 8-15. The copy of b1 goes first though it is issued second."""
    drawn = Drawing()
    cycle_step_s([*EARLY[:-2], (U, "b1"), (U, "b0")], (HOST, HOST), ACROSS, drawn=drawn)
    copies = [(span.label, span.start_s) for span in drawn.spans if span.lane is Lane.H2D]
    assert copies == [("gather b1", 8), ("gather b0", 15)]


def test_a_copy_that_waits_for_compute_holds_up_those_that_are_issued_after_it() -> None:
    """gather b1 is issued at 0, behind fwd.0 0-10, and takes the link 10-16. gather b0 is issued when its update ends,
    at 7, and takes it 16-20, though it could begin at 7: fwd.1 20-30."""
    drawn = Drawing()
    actions = [(G, "b0"), (R, FWD0), (G, "b1"), (W, "b0"), (R, FWD1), (U, "b0")]
    assert cycle_step_s(actions, (HOST, HOST), Cycle(update=Update.ACROSS_STEPS), drawn=drawn) == 30
    copies = {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is Lane.H2D}
    assert copies == {"gather b0": (16, 20), "gather b1": (10, 16)}


ENDS = [(R, FWD0), (Verb.REDUCE, "b0"), (OFF, "b0.grad"), (R, BWD0)]
"""The gradient of b0 leaves 10-13, compute goes on until 20."""


@pytest.mark.parametrize("update", list(Update))
def test_an_update_begins_when_the_copies_have_arrived_though_compute_goes_on(update: Update) -> None:
    """The host updates b0 13-20 beside bwd.1 10-20, and fwd.0 need not wait for it."""
    cycle, drawn = Cycle(update=update, reads={FWD0: (BucketId("b0"),)}), Drawing()
    assert cycle_step_s([*ENDS, (U, "b0")], (HOST, DEVICE), cycle, drawn=drawn) == 20
    assert spans_of(drawn, Lane.HOST) == {"update b0": (13, 20)}


SUMS = replace(
    PRICE,
    add_s={(f"b{i}", home): 2.0 + i for i in range(2) for home in Tier},
    summed=frozenset(("b0", "b1")),
)


@pytest.mark.parametrize("update", list(Update))
def test_the_host_adds_gradients_before_compute_is_through(update: Update) -> None:
    """b0 is added 13-15 and updated 15-22. Across steps fwd.0 waits for this update, 2 s of the next step."""
    cycle, drawn = Cycle(update=update, reads={FWD0: (BucketId("b0"),)}), Drawing()
    assert cycle_step_s([*ENDS, (U, "b0")], (HOST, DEVICE), cycle, SUMS, drawn) == 22
    late_s = 0 if update is Update.AFTER_BACKWARD else 2
    seconds = {
        name: (start_s % 22 - late_s, end_s - start_s) for name, (start_s, end_s) in spans_of(drawn, Lane.HOST).items()
    }
    assert seconds == {"add b0.grad": (13, 2), "update b0": (15, 7)}


def test_the_device_adds_behind_the_sums_that_the_host_makes_before() -> None:
    """b0 is added on the host 13-15 and b1, which is reduced behind it, on the device when compute is through, 20-23;
    or 15-18 if compute is through at 10. Then the device updates b1 for 1 s, beside the host's b0."""
    early = [*ENDS[:3], (Verb.REDUCE, "b1"), (R, BWD0), (U, "b0"), (U, "b1")]
    assert cycle_step_s(early, (HOST, DEVICE), Cycle(), SUMS) == 24
    assert cycle_step_s([*early[:4], *early[5:]], (HOST, DEVICE), Cycle(), SUMS) == 22


@pytest.mark.parametrize(("homes", "ends_s"), [((HOST, HOST), 28), ((HOST, SPLIT), 25 + 8 + 6), ((HOST, DEVICE), 21)])
def test_after_the_backward_only_copied_buckets_wait_for_compute(
    homes: Sequence[tuple[Tier, Tier, bool]], ends_s: float
) -> None:
    """b0 is updated 13-20, beside bwd.1 until 20. b1 is updated behind it: on the host without a gradient to copy,
    until 28; after its way to the host 20-25, and back for 6 s behind 33; on the device 20-21."""
    assert cycle_step_s([*ENDS, (Verb.REDUCE, "b1"), (U, "b0"), (U, "b1")], homes, Cycle()) == ends_s


def test_a_late_copy_to_the_device_holds_the_host_up() -> None:
    """The gather of b1 ends at 26, behind bwd.1: the host, which has the gradient of b0 at 13, updates it 26-33."""
    actions = [*ENDS, (G, "b1"), (W, "b1"), (R, BWD1), (U, "b0")]
    assert cycle_step_s(actions, (HOST, HOST), Cycle()) == 36
    drawn = Drawing()
    cycle_step_s(actions, (HOST, HOST), Cycle(), drawn=drawn)
    assert spans_of(drawn, Lane.HOST) == {"update b0": (26, 33)}


def test_across_steps_the_next_gather_comes_when_the_early_update_ends() -> None:
    """b0 is updated 13-28, while compute is through at 20. The copy 28-32, and then fwd.0, begin the next step: 32 - 20
    of it are in the step of 22."""
    slow = replace(PRICE, host_update_s={"b0": 15.0, "b1": 8.0})
    actions = [(G, "b0"), (W, "b0"), *ENDS, (U, "b0")]
    assert cycle_step_s(actions, (HOST, DEVICE), ACROSS, slow) == 8 + 4 + 10 + 10
    assert cycle_step_s(actions, (HOST, DEVICE), Cycle(), slow) == 4 + 10 + 3 + 15


def test_a_gather_waits_at_its_issue_if_sharded_or_copied_by_compute() -> None:
    """b1 holds compute up from 7 to 15. Two ranks: all-gathers 11-13 and 21-23, fwd.0 15-25. Or compute copies: b0
    7-11, b1 15-21, fwd.0 21-31."""
    both_s = dict.fromkeys(PRICE.gather_s, 2.0)
    shared = replace(PRICE, gather_s=both_s, reduce_s=both_s, sharded=frozenset(both_s))
    copying = replace(PRICE, lane_of={**PRICE.lane_of, Lane.H2D: Lane.COMPUTE})
    for price, lane, ends_s, starts_s in ((shared, Lane.GATHER, [13, 23], 15), (copying, Lane.H2D, [11, 21], 21)):
        drawn = Drawing()
        cycle_step_s(EARLY, (HOST, HOST), ACROSS, price, drawn)
        assert [span.end_s for span in drawn.spans if span.lane is lane] == ends_s
        assert next(span.start_s for span in drawn.spans if span.label == f"run {FWD0}") == starts_s


def test_compute_is_stalled_by_updates_and_not_by_copies() -> None:
    """At the wait for b0 7 s, of 11; b1 is updated while fwd.0 runs."""
    placements = {
        BucketId(name): Placement(bucket=BucketId(name), param=Tier.HOST, optim=Tier.HOST, resident=False)
        for name in ("b0", "b1")
    }
    assert play(typed(EARLY), CYCLE_RUN_S, placements, PRICE, None, ACROSS).stalled_s == 7


def test_a_region_waits_for_updated_parameters_from_the_host() -> None:
    """b0 leaves 0-3, b1 3-8; host 3-10 and 10-18; back 10-14 and 18-24. fwd.0 14-24, fwd.1 24-34, backward to 54.
    With the state of b0 on the device: update 0-1, b1 leaves 1-6, host 6-14, back 14-20; fwd.0 6-16, fwd.1 20-30."""
    assert cycle_step_s(ON_DEVICE, (SPLIT, SPLIT), ACROSS) == 54
    assert cycle_step_s(ON_DEVICE, (DEVICE, SPLIT), ACROSS) == 50
    # The other way round: b0 leaves 1-4, host 4-11, back 11-15.
    assert cycle_step_s(ON_DEVICE, (SPLIT, DEVICE), ACROSS) == 55


def test_streamed_updates_occupy_compute_and_not_the_host() -> None:
    """b0 is streamed: there 0-3, updated 3-4, back 4-6. The host updates b1 0-8. gather b0 6-10, fwd.0 10-20, gather b1
    20-26, fwd.1 26-36, then 23 as before. Both: 12 s, then 4 + 10 + 6 + 10 + 23. After the backward, one side and then
    the other."""
    assert cycle_step_s(ON_HOST, (STREAMED, HOST), ACROSS) == 59
    assert cycle_step_s(ON_HOST, (STREAMED, STREAMED), ACROSS) == 12 + 53
    assert cycle_step_s(ON_HOST, (HOST, STREAMED), Cycle()) == 53 + 7 + 6


def test_a_gather_waits_for_the_streamed_update_while_other_copies_are_issued() -> None:
    """b1 is streamed 0-6, the host updates b0 0-5. The program waits for b1 at its gather, so the copy of b0, issued at
    5, takes the link first, 6-10, and that of b1 10-16: fwd.0 10-20, fwd.1 20-30, then 23 as before."""
    price, drawn = replace(PRICE, host_update_s={"b0": 5.0, "b1": 8.0}), Drawing()
    assert cycle_step_s(EARLY, (HOST, STREAMED), ACROSS, price, drawn) == 53
    copies = spans_of(drawn, Lane.H2D)
    assert (copies["gather b0"], copies["gather b1"]) == ((6, 10), (10, 16))


def test_an_early_update_reads_the_sum() -> None:
    """fwd.0 0-10, b1 is added 10-13 and updated 13-14, bwd.0 14-24."""
    actions = [(R, FWD0), (Verb.REDUCE, "b1"), (R, BWD1), (U, "b1")]
    cycle, drawn = Cycle(update=Update.IN_BACKWARD, closing={BucketId("b1"): Verb.REDUCE}), Drawing()
    assert cycle_step_s(actions, (DEVICE, DEVICE), cycle, SUMS, drawn) == 24
    spans = spans_of(drawn, Lane.COMPUTE)
    assert (spans["add b1.grad"], spans["update b1"], spans[f"run {BWD1}"]) == ((10, 13), (13, 14), (14, 24))


def spans_of(drawn: Drawing, lane: Lane) -> dict[str, tuple[float, float]]:
    return {span.label: (span.start_s, span.end_s) for span in drawn.spans if span.lane is lane}


def test_pieces_of_a_streamed_update_leave_beside_those_that_arrive() -> None:
    """Four pieces there 0-8, updated 8-9; back from 0 + 2 + 1/4 on for 6, and not before 9 + 6/4: 2.25-10.5. If they
    take 12 back, the last leaves at 2.25 + 12."""
    for back_s, ends_s in ((6.0, 10.5), (12.0, 14.25)):
        copies = StreamedCopies(there_s=8.0, first_s=2.0, back_s=back_s, num_pieces=4.0)
        drawn = Drawing()
        price = replace(PRICE, streams={("b0", Tier.HOST): copies})
        cycle_step_s(ON_HOST, (STREAMED, HOST), ACROSS, price, drawn)
        assert spans_of(drawn, Lane.H2D)["gather b0.state"] == (0, 8)
        assert spans_of(drawn, Lane.D2H)["offload b0.state"] == (2.25, ends_s)
        assert spans_of(drawn, Lane.COMPUTE)["run fwd.0"][0] == ends_s + 4


def test_pieces_of_a_streamed_update_leave_behind_gradients_on_the_busy_link() -> None:
    """b1 leaves 0-5 for the host. b0 is there 0-8 and updated 8-9, its pieces leave 5-11, where the last alone would
    take 9-10.5."""
    copies = StreamedCopies(there_s=8.0, first_s=2.0, back_s=6.0, num_pieces=4.0)
    price, drawn = replace(PRICE, streams={("b0", Tier.HOST): copies}), Drawing()
    actions = [*ON_HOST[:4], (R, FWD1), (R, BWD1), (Verb.REDUCE, "b1"), (R, BWD0), *ON_HOST[13:15], *ON_HOST[15:]]
    cycle_step_s(actions, (STREAMED, SPLIT), ACROSS, price, drawn)
    assert spans_of(drawn, Lane.D2H)["offload b1.grad"] == (0, 5)
    assert spans_of(drawn, Lane.D2H)["offload b0.state"] == (5, 11)


def test_parameters_leave_the_device_before_their_gradient_does() -> None:
    """b0: parameters 0-2, gradient 2-5, host 5-12, back 12-16: fwd.0 16-26. b1: 5-7, 7-12, host 12-20, back 20-26."""
    price, drawn = replace(PRICE, leave_s={"b0": 2.0, "b1": 2.0}), Drawing()
    assert cycle_step_s(ON_DEVICE, (SPLIT, SPLIT), ACROSS, price, drawn) == 56
    leaving = {"offload b0": (0, 2), "offload b0.grad": (2, 5), "offload b1": (5, 7), "offload b1.grad": (7, 12)}
    assert spans_of(drawn, Lane.D2H) == leaving


def test_an_early_update_begins_when_its_gradient_is_complete() -> None:
    """In its steady cycle 7 s of the host's b0 are left over. gather b0 7-11, fwd.0 11-21, gather b1 21-27, fwd.1
    27-37, bwd.0 37-47, gradient of b1 47-52, host 52-60; bwd.1 47-57, gradient of b0 57-60, host 60-67."""
    cycle = Cycle(update=Update.IN_BACKWARD, reads=READS, closing={BucketId("b0"): OFF, BucketId("b1"): OFF})
    drawn = Drawing()
    assert cycle_step_s(ON_HOST, (HOST, HOST), cycle, drawn=drawn) == 60
    host = sorted(
        (span.label, span.start_s % 60, span.end_s - span.start_s) for span in drawn.spans if span.lane is Lane.HOST
    )
    assert host == [("update b0", 0, 7), ("update b1", 52, 8)]


def test_on_shared_cores_update_seconds_add_to_the_step_at_any_time() -> None:
    total_s = 4 + 10 + 6 + 10 + 10 + 5 + 10 + 3 + 7 + 8
    closing = {BucketId("b0"): OFF, BucketId("b1"): OFF}
    for cycle in (Cycle(), ACROSS, Cycle(update=Update.IN_BACKWARD, reads=READS, closing=closing)):
        assert cycle_step_s(ON_HOST, (HOST, HOST), cycle, SERIAL) == total_s


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
    assert cycle_step_s(ON_DEVICE, (DEVICE, DEVICE), cycle) == 42


# ----------------------------------------------------------------------------------------------------------------------
# `simulate_ranks`: ranks that differ, each on lanes of its own, meet at their collectives.


PROBLEM = problem_of(chain_of(6), CLUSTERS["2 x cuda"])


def step_of(problem: Problem, made: Plan, measured: Measured | None = None) -> RankStep:
    return RankStep(graph=problem.graph, plan=made, cluster=problem.cluster, measured=measured or problem.measured)


def ends_s(record: Record) -> dict[str, float]:
    """The end of the last span of each label on each lane."""
    return {f"{span.lane} {span.label}": span.end_s for span in record.spans}


@given(shared_problems(fewest=2), st.integers(0, 2**32), st.booleans(), st.sampled_from(Update))
@settings(max_examples=15)
def test_equal_ranks_play_as_one_does_to_the_bit(problem: Problem, seed: int, is_spread: bool, update: Update) -> None:
    evaluator, draft = drawn(problem, seed, is_spread=is_spread)
    made = replace(write_out(evaluator, draft), update=update)
    alone = simulate(problem.graph, made, problem.cluster, problem.measured)
    step = step_of(problem, made)
    for record in simulate_ranks([step, step, step]):
        if update is Update.IN_BACKWARD:
            assert record.step_s == pytest.approx(alone.step_s, rel=1e-6)
        else:
            assert record == alone


def slow_in(made: Plan, region_id: str, times: float) -> Measured:
    """One region takes `times` as long as all ops of the step together."""
    region = next(region for region in made.regions if region.id == region_id)
    step_s = made.prediction.step_s
    return Measured(stretches=(Stretch(first=region.first, last=region.last, run_s=times * step_s),))


def test_a_rank_that_is_slow_in_one_lap_delays_only_what_waits_for_it() -> None:
    made = plan(PROBLEM, "fsdp_offload")
    regions = [region.id for region in made.regions]
    middle = regions[len(regions) // 2]
    slow = step_of(PROBLEM, made, slow_in(made, middle, 3.0))
    fast = step_of(PROBLEM, made)
    alone = simulate(PROBLEM.graph, made, PROBLEM.cluster)
    quick, late = simulate_ranks([fast, slow])
    assert quick.step_s == late.step_s > 3 * alone.step_s
    before, own = ends_s(alone), ends_s(quick)
    at = before[f"{Lane.COMPUTE} run {middle}"]
    for name, end_s in before.items():
        if end_s < at:
            assert own[name] == end_s
    collectives = [span for span in quick.spans if span.lane in (Lane.GATHER, Lane.REDUCE)]
    others = [span for span in late.spans if span.lane in (Lane.GATHER, Lane.REDUCE)]
    assert [(span.label, span.end_s) for span in collectives] == [(span.label, span.end_s) for span in others]
    assert busy_share(quick) < busy_share(late) <= 1.0


def test_plans_with_other_collectives_are_refused() -> None:
    ours = plan(PROBLEM, "fsdp_offload")
    theirs = plan(PROBLEM, "keep_all")
    with pytest.raises(InvalidPlan, match="ranks issue other collectives"):
        simulate_ranks([step_of(PROBLEM, ours), step_of(PROBLEM, theirs)])
