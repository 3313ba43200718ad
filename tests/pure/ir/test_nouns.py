"""An instance that exists is valid: each way a noun can contradict itself is an error that says so."""

import dataclasses
from collections.abc import Callable

import pytest

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import (
    Action,
    BucketId,
    Lane,
    Op,
    OpId,
    Origin,
    Phase,
    Placement,
    Record,
    Schedule,
    Span,
    StepGraph,
    Storage,
    StorageId,
    Tier,
    Verb,
)
from elixir_compile.ir.kinds import Kind, RegionId
from elixir_compile.ir.schedule import RegionRef
from tests.pure.plans import bucket_of, make_plan
from tests.pure.strategies import Layer, chain

GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
BUCKET = bucket_of(GRAPH, "b0", [storage for storage in GRAPH.storages if storage.kind is Kind.PARAM])
PLAN = make_plan(GRAPH, [BUCKET], ["host"])
TEMP = Storage(id=StorageId("t"), nbytes=1, kind=Kind.TEMP, dtype="float32")


def op(name: str, phase: Phase = Phase.FORWARD, reads: tuple[str, ...] = ()) -> Op:
    return Op(id=OpId(name), target="aten.mm", phase=phase, reads=tuple(map(StorageId, reads)), writes=())


def graph(*ops: Op, storages: tuple[Storage, ...] = (TEMP,), outputs: tuple[str, ...] = ()) -> StepGraph:
    return StepGraph(name="g", ops=ops, storages=storages, outputs=tuple(map(StorageId, outputs)))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dataclasses.replace(TEMP, nbytes=-1), "storage t has -1 bytes"),
        (lambda: dataclasses.replace(TEMP, of=StorageId("w0")), "only a gradient is `of` a parameter"),
        (lambda: dataclasses.replace(op("a"), flops=-1), "op a has -1 flops"),
        (lambda: dataclasses.replace(op("a"), times=0), "op a launches 1 kernels 0 times; expected 1 or more"),
        (lambda: dataclasses.replace(GRAPH, batch=0), "has a batch of 0 rows; expected 1 or more"),
        (lambda: dataclasses.replace(PLAN.regions[0], micro_batches=0), "runs in 0 micro-batches; expected 1 or more"),
        (lambda: graph(storages=(TEMP, TEMP)), "two storages of the same name: t"),
        (lambda: graph(op("a"), op("b"), op("a")), "two ops of the same name: a"),
        (lambda: graph(op("a", reads=("x",))), "op a names the storage x"),
        (lambda: graph(op("a"), outputs=("x",)), "names the storage x"),
        (lambda: graph(op("a", Phase.BACKWARD), op("b")), "op b of the forward comes after the backward began"),
        (lambda: graph(op("a", Phase.UPDATE)), "expected at most one, named `update`"),
        (lambda: dataclasses.replace(BUCKET, numel=-1), "bucket b0 has a negative size"),
        (lambda: dataclasses.replace(BUCKET, shard_numels=(21, -1)), "bucket b0 has a negative size"),
        (lambda: dataclasses.replace(BUCKET, params=BUCKET.params * 2), "lists a parameter twice"),
        (lambda: dataclasses.replace(BUCKET, trainable=False), "is frozen, yet has 160 bytes of optimizer state"),
        (
            lambda: dataclasses.replace(BUCKET, state_dtype="float8"),
            "moments in float8 and 160 bytes of optimizer state; expected bfloat16, int8",
        ),
        (
            lambda: dataclasses.replace(BUCKET, reduce_dtype="int8"),
            "gradients of float32 in int8; expected float32, for",
        ),
        (
            lambda: dataclasses.replace(BUCKET, reduce_dtype="float32"),
            "in float32; expected float32, for gradients of a narrower dtype",
        ),
        (lambda: Action(verb=Verb.RUN, target=RegionRef(RegionId("fwd.0")), micro_batch=-1), "has micro-batch -1"),
        (lambda: Schedule(rank=-1, actions=()), "a schedule is for rank -1"),
        (lambda: dataclasses.replace(PLAN.prediction, step_s=float("nan")), "step_s = nan"),
        (lambda: dataclasses.replace(PLAN.prediction, device_peak_bytes=-1), "a negative peak"),
        (lambda: dataclasses.replace(PLAN.decisions[0], cost_s=float("inf")), "costs inf s"),
        (lambda: dataclasses.replace(PLAN, format=1), "has format 1; this version makes format 7"),
        (
            lambda: Placement(
                bucket=BucketId("b0"), param=Tier.DEVICE, optim=Tier.DEVICE, streamed=True, resident=True
            ),
            "bucket b0 has its optimizer state on the device, so it cannot be streamed",
        ),
        (lambda: dataclasses.replace(PLAN, base_bytes=-1), "a base of -1 bytes"),
        (lambda: dataclasses.replace(PLAN, budget_bytes=-1), "a budget of -1"),
        (lambda: dataclasses.replace(PLAN, placements=()), "one placement per bucket"),
        (lambda: dataclasses.replace(PLAN, bound_s=float("nan")), "a bound of nan s"),
        (lambda: Span(lane=Lane.H2D, label="x", start_s=2.0, end_s=1.0), "span x on h2d lasts from 2.0 s to 1.0 s"),
        (lambda: Span(lane=Lane.H2D, label="x", start_s=0.0, end_s=1.0, nbytes=-1), "span x on h2d has -1 bytes"),
        (lambda: Span(lane=Lane.H2D, label="x", start_s=0.0, end_s=1.0, piece=-1), "is piece -1"),
        (
            lambda: Record(origin=Origin.MEASURED, step_s=-1.0, device_peak_bytes=0, host_peak_bytes=0),
            r"the step took -1\.0 s",
        ),
        (
            lambda: Record(origin=Origin.MEASURED, step_s=1.0, device_peak_bytes=-1, host_peak_bytes=0),
            "a negative count or peak",
        ),
    ],
)
def test_contradictions_are_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidPlan, match=sentence):
        make()


@pytest.mark.parametrize(
    ("optim", "update"), [(Tier.DEVICE, Tier.DEVICE), (Tier.HOST, Tier.HOST), (Tier.DISK, Tier.HOST)]
)
def test_a_bucket_is_updated_beside_its_state_unless_it_is_streamed(optim: Tier, update: Tier) -> None:
    usual = Placement(bucket=BucketId("b0"), param=Tier.DEVICE, optim=optim, resident=True)
    assert usual.update is update
    if optim is not Tier.DEVICE:
        assert dataclasses.replace(usual, streamed=True).update is Tier.DEVICE


def test_a_plan_finds_the_placement_of_a_bucket() -> None:
    assert PLAN.placement(BucketId("b0")) is PLAN.placements[0]
    with pytest.raises(KeyError, match="b9"):
        PLAN.placement(BucketId("b9"))
