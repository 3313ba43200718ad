"""Graphs and plans as people read them, and JSON round trips of names and numbers that are awkward to print."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.ir import (
    Action,
    Activations,
    Decision,
    GroupId,
    Op,
    OpId,
    Phase,
    Plan,
    Prediction,
    Saving,
    Schedule,
    StepGraph,
    Storage,
    StorageId,
    Tier,
    Update,
    Verb,
    graph_from_json,
    graph_to_json,
    plan_from_json,
    plan_to_json,
)
from elixir_compile.ir.kinds import Batched, BucketId, Kind, RegionId, word
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, RegionRef
from tests.pure.graph_text import parse_graph
from tests.pure.mixes import mixed_graphs
from tests.pure.plans import bucket_of, make_plan
from tests.pure.strategies import Layer, chain, step_graphs

NAMES = st.text() | st.sampled_from(["", "a b", "#", '"', "\\", "\u2028", "\x85", "\ud800", "é", "@3", "reads", "of"])
SECONDS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(2)]
PLAN = make_plan(GRAPH, BUCKETS, ["host", "device"])


def lines_of(plan: Plan) -> list[str]:
    """Return the lines of the printed plan with single spaces between words."""
    return [" ".join(line.split()) for line in str(plan).split("\n")]


@given(NAMES)
def test_any_name_prints_as_a_single_word(name: str) -> None:
    printed = word(name)
    assert len(printed.splitlines()) == 1
    assert printed == name != "" if not printed.startswith('"') else json.loads(printed) == name
    assert printed.startswith('"') or not {" ", "#"} & set(printed)


@given(step_graphs() | mixed_graphs())
def test_a_printed_graph_holds_all_of_the_graph(graph: StepGraph) -> None:
    assert parse_graph(str(graph)) == graph


def test_a_printed_graph_holds_its_batch() -> None:
    storages = (dataclasses.replace(GRAPH.storages[0], batched=Batched.EACH, consecutive=True), *GRAPH.storages[1:])
    ops = (dataclasses.replace(GRAPH.ops[0], mixes="mean", times=8), *GRAPH.ops[1:])
    graph = dataclasses.replace(GRAPH, storages=storages, ops=ops, batch=8)
    assert parse_graph(str(graph)) == graph
    assert graph_from_json(graph_to_json(graph)) == graph


def test_a_printed_region_has_its_micro_batches() -> None:
    region = dataclasses.replace(PLAN.regions[0], micro_batches=8, buckets=(BucketId("b1"),))
    words = ["fwd.0", "forward", region.first, region.last, "micro-batches", "8", "buckets", "b1"]
    assert str(region).split() == words


@given(st.lists(NAMES, min_size=4, max_size=4, unique=True), NAMES, st.integers(0, 2**63 - 1))
def test_graphs_with_awkward_names_read_back_from_json(names: list[str], text: str, number: int) -> None:
    ids = [StorageId(name) for name in names]
    storages = (
        Storage(id=ids[0], nbytes=number // 2**9, kind=Kind.PARAM, dtype=text),
        Storage(id=ids[1], nbytes=0, kind=Kind.GRAD, dtype="float32", of=ids[0]),
        *(Storage(id=name, nbytes=1, kind=Kind.TEMP, dtype="float32") for name in ids[2:]),
    )
    ops = tuple(
        Op(
            id=OpId(name),
            target=text,
            phase=phase,
            reads=tuple(ids[:2]),
            writes=tuple(ids[2:]),
            flops=number,
            module=text,
            source=text,
        )
        for name, phase in zip(names, [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD], strict=True)
    )
    graph = StepGraph(name=text, ops=ops, storages=storages, outputs=(ids[2],), aliases=((text, ids[3]),))
    assert graph_from_json(graph_to_json(graph)) == graph
    # The graph's name, four headings, four storages, an output, an alias and four ops.
    assert len(str(graph).split("\n")) == len(str(graph).splitlines()) == 15


@given(NAMES, NAMES, SECONDS, st.integers(-(2**40), 2**40), st.none() | SECONDS, st.integers(0, 3))
def test_plans_with_awkward_values_read_back_from_json(
    text: str, other: str, seconds: float, number: int, bound_s: float | None, micro_batch: int
) -> None:
    decision = Decision(
        subject=text, choice=other, because=text, cost_s=seconds, saves_bytes=number, rejected=(other, text)
    )
    targets = (
        RegionRef(RegionId(text)),
        BucketRef(BucketId(other)),
        GradientRef(BucketId(text)),
        GroupRef(GroupId(other)),
    )
    actions = tuple(Action(verb=verb, target=target, micro_batch=micro_batch) for verb in Verb for target in targets)
    storages = tuple(dict.fromkeys((StorageId(text), StorageId(other))))
    groups = (Activations(id=GroupId(text), storages=storages, nbytes=abs(number), saving=saving) for saving in Saving)
    plan = dataclasses.replace(
        PLAN,
        name=text,
        graph=other,
        cluster=text,
        base_bytes=abs(number),
        bound_s=bound_s,
        activations=tuple(groups),
        decisions=(decision, dataclasses.replace(decision, rejected=())),
        schedules=(Schedule(rank=0, actions=actions), Schedule(rank=1, actions=())),
        prediction=Prediction(
            step_s=seconds,
            exposed_s=seconds,
            hidden_share=seconds,
            device_peak_bytes=abs(number),
            device_peak_at=OpId(text),
            host_peak_bytes=0,
        ),
    )
    assert plan_from_json(plan_to_json(plan)) == plan
    assert len(str(plan).split("\n")) == len(str(plan).splitlines())


def test_a_plan_prints_as_people_read_it() -> None:
    lines = lines_of(PLAN)
    assert lines[0] == 'plan chain on "1 x cpu"'
    assert lines[2] == "step 0.2 exposed 0.1 hidden 0.5 # 200 ms, 100 ms exposed, 50.0% of transfers hidden"
    assert "b0 float32 numel 10 bytes 40 state 80 trainable param host optim host shards 10 params w0 # 40 B" in lines
    assert lines[lines.index("schedule rank 0") + 1 :][:3] == ["gather b0", "wait b0", "run fwd.0 @0"]


@pytest.mark.parametrize("update", list(Update))
def test_update_time_and_streamed_buckets_are_printed(update: Update) -> None:
    placements = tuple(dataclasses.replace(own, streamed=own.optim is Tier.HOST) for own in PLAN.placements)
    plan = dataclasses.replace(PLAN, update=update, placements=placements)
    assert plan_from_json(plan_to_json(plan)) == plan
    lines = lines_of(plan)
    assert (f"update {update}" in lines) == (update is not Update.AFTER_BACKWARD)
    assert sum("optim host streamed" in line for line in lines) == 1


def test_the_param_group_of_a_bucket_is_printed_if_it_is_not_the_first() -> None:
    first, *others = PLAN.buckets
    plan = dataclasses.replace(PLAN, buckets=(dataclasses.replace(first, group=2), *others))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "trainable  group 2  param host" in str(plan)
    assert "group" not in str(PLAN)


def test_gradient_sums_of_a_bucket_are_printed_if_there_are_any() -> None:
    first, *others = PLAN.buckets
    plan = dataclasses.replace(PLAN, buckets=(dataclasses.replace(first, sum_nbytes=4000), *others))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "trainable  sums 4000  param host" in str(plan)
    assert "sums" not in str(PLAN)


@pytest.mark.parametrize(
    ("shard_numels", "text"),
    [
        ((10,), "shards 10"),
        ((5, 5), "shards 5 5"),
        ((4, 4, 2), "shards 4 4 2"),
        ((3, 3, 3, 1), "shards 3 x 3 1"),
        ((128,) * 1024, "shards 128 x 1024"),
        ((9, *[8] * 1000, 0, 0, 0), "shards 9 8 x 1000 0 x 3"),
    ],
)
def test_shards_of_many_ranks_take_few_words(shard_numels: tuple[int, ...], text: str) -> None:
    first, *others = PLAN.buckets
    plan = dataclasses.replace(PLAN, buckets=(dataclasses.replace(first, shard_numels=shard_numels), *others))
    assert f"  {text}  params" in str(plan)
    assert plan_from_json(plan_to_json(plan)) == plan
