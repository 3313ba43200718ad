"""Live bytes at each op: two steps worked out by hand, and a second count by brute force."""

import dataclasses
import time

from hypothesis import given

from elixir_compile.ir import Kind, Phase, Plan, Saving, StepGraph, StorageId, Tier, Verb
from elixir_compile.ir.schedule import GradientRef, RegionRef
from elixir_compile.step import fused, keep_everything_timeline, plan_timeline
from tests.pure.mixes import group, mixed_graphs
from tests.pure.plans import Trip, bucket_of, make_plan, planned_graphs
from tests.pure.steps import GELU
from tests.pure.strategies import Layer, chain

GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=1) for n in range(2)])
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(2)]


def test_everything_kept() -> None:
    """Two parameters of 40 bytes with 80 of state each; activations of 4 bytes. The ops and lives are those of
    `test_liveness.test_a_two_layer_step`: t0 at 0-1, t1 at 2-3, out at 3, d1 at 5-7, d0 at 7; s0 is saved at 1-4."""
    timeline = keep_everything_timeline(GRAPH, {StorageId("w0"): 80, StorageId("w1"): 80})
    assert timeline.ops == tuple(op.id for op in GRAPH.ops)
    assert timeline.live_bytes_by_kind == {
        Kind.PARAM: (80,) * 9,
        Kind.GRAD: (0, 0, 0, 0, 40, 40, 80, 80, 80),
        Kind.MOMENT: (160,) * 9,
        Kind.SAVED: (0, 4, 4, 4, 4, 0, 0, 0, 0),
        Kind.TEMP: (4, 4, 4, 8, 0, 4, 4, 8, 0),
        Kind.INPUT: (8,) * 9,
    }
    assert timeline.live_bytes == (252, 256, 256, 260, 292, 292, 332, 336, 328)
    assert (timeline.peak.op, timeline.peak.nbytes, timeline.host_bytes) == ("bwd.mm_7", 336, 0)
    assert timeline.peak.by_kind == {Kind.PARAM: 80, Kind.GRAD: 80, Kind.MOMENT: 160, Kind.TEMP: 8, Kind.INPUT: 8}


def test_timeline_with_a_bucket_on_the_host() -> None:
    """b0 (w0) lives on the host: its copy is there for op 0 and op 7, its gradient from op 6 to op 7, after which its
    offload is waited for. Host: 40 of parameters, 40 of gradient, 80 of state."""
    timeline = plan_timeline(GRAPH, make_plan(GRAPH, BUCKETS, ["host", "device"]))
    assert timeline.live_bytes_by_kind[Kind.PARAM] == (40,) * 9
    assert timeline.live_bytes_by_kind[Kind.GATHERED] == (40, 0, 0, 0, 0, 0, 0, 40, 0)
    assert timeline.live_bytes_by_kind[Kind.GRAD] == (0, 0, 0, 0, 40, 40, 80, 80, 40)
    assert timeline.live_bytes_by_kind[Kind.MOMENT] == (80,) * 9
    assert timeline.host_bytes == 160


def test_a_resident_copy_stays_from_first_to_last_use() -> None:
    timeline = plan_timeline(GRAPH, make_plan(GRAPH, BUCKETS, ["device", "resident"]))
    assert timeline.live_bytes_by_kind[Kind.GATHERED] == (0, 0, 40, 40, 40, 40, 0, 0, 0)


def test_external_usage_counts_at_every_op() -> None:
    plan = make_plan(GRAPH, BUCKETS, ["host", "device"])
    alone, held = plan_timeline(GRAPH, plan), plan_timeline(GRAPH, dataclasses.replace(plan, base_bytes=1000))
    assert [after - before for before, after in zip(alone.live_bytes, held.live_bytes, strict=True)] == [1000] * 9
    assert held.peak.by_kind[Kind.BUFFER] == 1000
    assert held.host_bytes == alone.host_bytes


def test_host_bytes_by_placement() -> None:
    """State on the host alone: 80 of state and 2 x 40 of staging; a frozen bucket on the host: its 40 bytes."""
    assert plan_timeline(GRAPH, make_plan(GRAPH, BUCKETS, ["split", "device"])).host_bytes == 160
    frozen = chain([Layer(module="l", params=(("w", 10),), frozen=True, act_numel=1)])
    bucket = bucket_of(frozen, "b0", [s for s in frozen.storages if s.id == "w"])
    assert plan_timeline(frozen, make_plan(frozen, [bucket], ["host"])).host_bytes == 40


GELU_BUCKETS = [bucket_of(GELU, "b0", [storage for storage in GELU.storages if storage.kind is Kind.PARAM])]


def test_offloaded_activations_are_away_between_two_ops() -> None:
    """`h` has 16 bytes and is there for ops 0 to 5, `g` 16 for ops 1 to 3. Offloaded after op 1 and gone after op 2,
    `h` comes back before op 5, which reads it; gone at once and prefetched before op 4, it is away for two ops again.
    The host holds its slab."""
    away = (group(GELU, "acts", Saving.OFFLOAD, "h"),)
    late = Trip(leave=2, gone=3, back=5, need=5)
    timeline = plan_timeline(GELU, make_plan(GELU, GELU_BUCKETS, ["device"], away, {away[0].id: late}))
    assert timeline.live_bytes_by_kind[Kind.SAVED] == (16, 32, 32, 16, 0, 16, 0, 0)
    assert timeline.host_bytes == 16
    early = Trip(leave=2, gone=2, back=4, need=5)
    timeline = plan_timeline(GELU, make_plan(GELU, GELU_BUCKETS, ["device"], away, {away[0].id: early}))
    assert timeline.live_bytes_by_kind[Kind.SAVED] == (16, 32, 16, 16, 16, 16, 0, 0)


def test_recomputed_activations_are_live_from_their_repeated_op() -> None:
    """`h` and `g` go after ops 1 and 2. `re_mm` and `re_gelu` are ops 3 and 4: h is there again at 3 to 7, g at 4 and
    5. Beside them the output has 4 bytes at op 2, the tangent 4 at 5 and 6, `d` 16 at 6 and 7, `e` 16 at 7 and 8."""
    again = (group(GELU, "acts", Saving.RECOMPUTE, "h", "g"),)
    timeline = plan_timeline(GELU, make_plan(GELU, GELU_BUCKETS, ["device"], again))
    assert timeline.ops[3:5] == ("bwd.re_mm", "bwd.re_gelu")
    assert Kind.SAVED not in timeline.live_bytes_by_kind
    assert timeline.live_bytes_by_kind[Kind.TEMP] == (16, 32, 20, 16, 32, 36, 36, 48, 16, 0)
    assert timeline.host_bytes == 0


@given(mixed_graphs())
def test_with_everything_kept_the_fused_step_is_live(graph: StepGraph) -> None:
    assert keep_everything_timeline(graph, {}) == keep_everything_timeline(fused(graph), {})
    total = sum(storage.nbytes for storage in fused(graph).storages)
    assert max(keep_everything_timeline(graph, {}).live_bytes) <= total


def count_by_hand(graph: StepGraph, plan: Plan) -> list[int]:
    """Live bytes per op, by walking the schedule and asking of each storage at each op whether it is there."""
    index = {op.id: at for at, op in enumerate(graph.ops)}
    owner = {param: bucket for bucket in plan.buckets for param in bucket.params}
    homes = {p.bucket: p for p in plan.placements}
    state = sum(b.state_nbytes for b in plan.buckets if homes[b.id].optim is Tier.DEVICE)
    last_forward = max(at for at, op in enumerate(graph.ops) if op.phase is Phase.FORWARD)
    regions = {region.id: range(index[region.first], index[region.last] + 1) for region in plan.regions}
    runs: list[tuple[range, set[str], set[str]]] = []
    gathered: set[str] = set()
    gone: set[str] = set()
    for action in plan.schedules[0].actions:
        if isinstance(action.target, RegionRef):
            runs.append((regions[action.target.region], set(gathered), set(gone)))
        elif action.verb is Verb.GATHER:
            gathered.add(str(action.target))
        elif action.verb is Verb.RELEASE:
            gathered.remove(str(action.target))
        elif action.verb is Verb.WAIT and isinstance(action.target, GradientRef):
            gone.add(action.target.bucket)
    runs.append((range(runs[-1][0][-1] + 1, len(graph.ops)), set(gathered), set(gone)))
    counted: list[int] = []
    for ops, copies, offloaded in runs:
        for at in ops:
            total = state + sum(bucket.nbytes for bucket in plan.buckets if bucket.id in copies)
            for storage in graph.storages:
                touches = [n for n, op in enumerate(graph.ops) if storage.id in (*op.reads, *op.writes)]
                until = max([*touches, last_forward] if storage.id in graph.outputs else touches, default=-1)
                home = owner.get(storage.of or storage.id)
                if storage.kind is Kind.PARAM:
                    is_live = home is None or homes[home.id].param is Tier.DEVICE
                elif storage.kind in (Kind.INPUT, Kind.BUFFER):
                    is_live = True
                elif storage.kind is Kind.GRAD:
                    is_live = touches[0] <= at and (home is None or home.id not in offloaded)
                else:
                    is_live = bool(touches) and touches[0] <= at <= until
                total += storage.nbytes if is_live else 0
            counted.append(total)
    return counted


@given(planned_graphs())
def test_two_counts_agree(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    assert list(plan_timeline(graph, plan).live_bytes) == count_by_hand(graph, plan)


@given(planned_graphs())
def test_a_plan_with_everything_on_the_device_keeps_everything(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    kept = plan_timeline(graph, make_plan(graph, plan.buckets, ["device"] * len(plan.buckets)))
    state = {bucket.params[0]: bucket.state_nbytes for bucket in plan.buckets}
    assert kept == keep_everything_timeline(graph, state)
    assert plan_timeline(graph, plan).peak.nbytes <= kept.peak.nbytes + sum(b.nbytes for b in plan.buckets)


def test_a_large_step_is_counted_quickly() -> None:
    """1,250 layers with a parameter each: 5,000 ops, four layers to a bucket. 50 ms is the promise, of which a slow
    machine gets tenfold; counting each bucket at each op would take seconds."""
    layers = [Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=1) for n in range(1250)]
    graph = chain(layers)
    assert len(graph.ops) == 5001
    params = [storage for storage in graph.storages if storage.kind is Kind.PARAM]
    buckets = [bucket_of(graph, f"b{n}", params[n : n + 4]) for n in range(0, 1250, 4)]
    plan = make_plan(graph, buckets, ["host"] * len(buckets))
    start_s = time.process_time()
    plan_timeline(graph, plan)
    assert time.process_time() - start_s < 0.5
