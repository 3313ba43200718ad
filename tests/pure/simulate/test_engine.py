"""`step.seconds` and `step.pipeline`: lanes worked out by hand."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

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
    Verb,
)
from elixir_compile.ir.hardware import profile_for
from elixir_compile.step.pipeline import critical_path, exposed_by_lane, exposed_s, hidden_share
from elixir_compile.step.prices import Prices, prices
from elixir_compile.step.seconds import Drawing, play, simulate
from tests.pure.plans import mixed_plans, planned_graphs, typed

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


def test_without_overlap_everything_adds_up() -> None:
    early = [(G, "b0"), (G, "b1"), (W, "b0"), (R, R0), (W, "b1"), (R, R1)]
    assert step_s(early, SERIAL) == 4 + 6 + 10 + 10


def test_several_ranks_all_gather_and_reduce_scatter() -> None:
    """b0 from the host until 4, the ranks until 6; fwd.0 until 16; its gradient shared out until 18, gone at 21."""
    price = replace(PRICES, gather_s={B0: 2.0, B1: 2.0}, reduce_s={B0: 2.0, B1: 2.0})
    actions = [(G, "b0"), (W, "b0"), (R, R0), (L, "b0"), (Verb.REDUCE, "b0"), (OFF, "b0.grad"), (W, "b0.grad")]
    assert step_s(actions, price) == 21
    # Parameters on the device come from the other ranks only, and the gradient stays.
    device = ((Tier.DEVICE, Tier.DEVICE),) * 2
    assert step_s([*actions[:5], (W, "b0.grad")], price, device) == 2 + 10 + 2


def test_averages_over_copies_run_after_the_reduce_beside_compute() -> None:
    """Shared out 10-12 and averaged 12-15 under fwd.1, 10-20; waited for at once, it is exposed. What each rank has
    whole is waited for where it is reduced."""
    device = ((Tier.DEVICE, Tier.DEVICE),) * 2
    price = replace(PRICES, gather_s={B0: 1.0, B1: 1.0}, reduce_s={B0: 2.0, B1: 2.0}, average_s={B0: 3.0, B1: 3.0})
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (R, R1), (W, "b0.grad")], price, device) == 20
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (W, "b0.grad"), (R, R1)], price, device) == 10 + 2 + 3 + 10
    whole = replace(price, gather_s={B0: 0.0, B1: 0.0})
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (R, R1)], whole, device) == 10 + 2 + 3 + 10
    copied = replace(whole, reduce_s={B0: 0.0, B1: 0.0})
    assert step_s([(R, R0), (Verb.REDUCE, "b0"), (R, R1)], copied, device) == 10 + 3 + 10


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
    assert exposed_by_lane(record) == {Lane.H2D: 4.0}
