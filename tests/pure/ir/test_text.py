"""Values of `ir` as text: sizes, the nouns of plans, and forms that are printed and parsed again."""

import dataclasses
import json
from collections.abc import Callable

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import (
    Action,
    Activations,
    BucketId,
    Decision,
    GroupId,
    Lane,
    Op,
    OpId,
    Origin,
    Phase,
    Placement,
    Plan,
    Prediction,
    Record,
    Saving,
    Schedule,
    Shards,
    Span,
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
    sizes,
)
from elixir_compile.ir.kinds import Batched, Kind, RegionId, word
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, RegionRef
from tests.pure.mixes import mixed_graphs
from tests.pure.plans import bucket_of, make_plan
from tests.pure.steps import parse_graph
from tests.pure.strategies import Layer, chain, step_graphs

# ----------------------------------------------------------------------------------------------------------------------
# Sizes as text: read without running it, evaluated, expanded and solved.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4*s0*(s1 - 1) + 4*s0", (("s0*s1", 4),)),
        ("-(s0 - 3)**2", (("s0**2", -1), ("s0", 6), ("", -9))),
        ("8*s1*s0*s1", (("s0*s1**2", 8),)),
        ("s0 - s0", ()),
        ("12", (("", 12),)),
        ("8*Max(1, s0)", (("(8 * Max(1, s0))", 1),)),
    ],
)
def test_terms(text: str, expected: sizes.Terms) -> None:
    assert sizes.terms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2*s0*s1 + 1", 31),
        ("s0//2", 1),
        ("Max(1, s0 - 7)*Min(s0, s1)", 3),
        ("Mod(s1, s0)", 2),
        ("ceiling(s0/2) + floor(s0/2)", 3),
        ("ModularIndexing(s1, 2, 2)", 0),
        ("-s0 + s1", 2),
    ],
)
def test_evaluate_at_3_and_5(text: str, expected: int) -> None:
    assert sizes.evaluate(text, {"s0": 3, "s1": 5}) == expected


@pytest.mark.parametrize(
    "text",
    ["", "s0 s1", "__import__('os').getcwd()", "s0.real", "1.5*s0", "True", "2**s0", "s0**99", "~s0", "f(s0)", "Max()"],
)
def test_text_other_than_a_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match="the size"):
        sizes.terms(text)


@pytest.mark.parametrize("text", ["s2", "s0/0", "s0/2", "Mod(s0)"])
def test_sizes_without_a_value_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match="the size"):
        sizes.evaluate(text, {"s0": 3})


POLYNOMIALS = st.recursive(
    st.sampled_from(["s0", "s1", "b"]) | st.integers(0, 9).map(str),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner) | inner.map("(-{})**2".format),
    max_leaves=6,
)


@given(POLYNOMIALS)
def test_expansion_equals_sympys(text: str) -> None:
    canonical = sizes.canonical(text)
    assert sizes.canonical(canonical) == canonical
    assert sympy.expand(sympy.sympify(text) - sympy.sympify(canonical)) == 0
    values = {"s0": 3, "s1": 5, "b": 7}
    assert sizes.evaluate(canonical, values) == sizes.evaluate(text, values)
    assert sizes.canonical(str(sympy.sympify(text))) == canonical


def test_symbols_are_matched_as_whole_words() -> None:
    assert sizes.canonical("4*s1*s10", {"s1": "v1", "s10": "v0"}) == "4*v0*v1"
    assert sizes.symbols_of("Max(s1, s0)*s10") == ("s0", "s1", "s10")


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 50), st.integers(0, 10**6))
def test_largest_returns_the_last_value_that_fits(square: int, slope: int, constant: int, limit_bytes: int) -> None:
    text = f"Max({square}*s0**2 + s1, {slope}*s0 + {constant})"
    found = sizes.largest(text, "s0", {"s0": 99, "s1": 4}, limit_bytes)
    assert found is not None
    assert sizes.evaluate(text, {"s0": found + 1, "s1": 4}) > limit_bytes
    assert found == 0 or sizes.evaluate(text, {"s0": found, "s1": 4}) <= limit_bytes


def test_a_size_that_does_not_grow_has_no_largest_value() -> None:
    assert sizes.largest("s1 + 5", "s0", {"s1": 2}, 7) is None
    assert sizes.largest("s1 + 5", "s0", {"s1": 2}, 6) == 0


# ----------------------------------------------------------------------------------------------------------------------
# An instance that exists is valid: each way a noun can contradict itself is an error that says so.


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
        (lambda: dataclasses.replace(BUCKET, shard_numels=Shards.of((21, -1))), "shards 21 -1 have a negative size"),
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
        (lambda: dataclasses.replace(PLAN, format=1), "has format 1; this version makes format 8"),
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


# ----------------------------------------------------------------------------------------------------------------------
# Graphs and plans as people read them, and JSON round trips of names and numbers that are awkward to print.


NAMES = st.text() | st.sampled_from(["", "a b", "#", '"', "\\", "\u2028", "\x85", "\ud800", "é", "@3", "reads", "of"])
SECONDS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(2)]
PRINTED = make_plan(GRAPH, BUCKETS, ["host", "device"])


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
    region = dataclasses.replace(PRINTED.regions[0], micro_batches=8, buckets=(BucketId("b1"),))
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
        PRINTED,
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
    lines = lines_of(PRINTED)
    assert lines[0] == 'plan chain on "1 x cpu"'
    assert lines[2] == "step 0.2 exposed 0.1 hidden 0.5 # 200 ms, 100 ms exposed, 50.0% of transfers hidden"
    assert "b0 float32 numel 10 bytes 40 state 80 trainable param host optim host shards 10 params w0 # 40 B" in lines
    assert lines[lines.index("schedule rank 0") + 1 :][:3] == ["gather b0", "wait b0", "run fwd.0 @0"]


@pytest.mark.parametrize("update", list(Update))
def test_update_time_and_streamed_buckets_are_printed(update: Update) -> None:
    placements = tuple(dataclasses.replace(own, streamed=own.optim is Tier.HOST) for own in PRINTED.placements)
    plan = dataclasses.replace(PRINTED, update=update, placements=placements)
    assert plan_from_json(plan_to_json(plan)) == plan
    lines = lines_of(plan)
    assert (f"update {update}" in lines) == (update is not Update.AFTER_BACKWARD)
    assert sum("optim host streamed" in line for line in lines) == 1


def test_the_param_group_of_a_bucket_is_printed_if_it_is_not_the_first() -> None:
    first, *others = PRINTED.buckets
    plan = dataclasses.replace(PRINTED, buckets=(dataclasses.replace(first, group=2), *others))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "trainable  group 2  param host" in str(plan)
    assert "group" not in str(PRINTED)


def test_gradient_sums_of_a_bucket_are_printed_if_there_are_any() -> None:
    first, *others = PRINTED.buckets
    plan = dataclasses.replace(PRINTED, buckets=(dataclasses.replace(first, sum_nbytes=4000), *others))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "trainable  sums 4000  param host" in str(plan)
    assert "sums" not in str(PRINTED)


@pytest.mark.parametrize(
    ("numels", "text"),
    [
        ((10,), "shards 10"),
        ((5, 5), "shards 5 5"),
        ((4, 4, 2), "shards 4 4 2"),
        ((3, 3, 3, 1), "shards 3 x 3 1"),
        ((128,) * 1024, "shards 128 x 1024"),
        ((9, *[8] * 1000, 0, 0, 0), "shards 9 8 x 1000 0 x 3"),
    ],
)
def test_shards_of_many_ranks_take_few_words(numels: tuple[int, ...], text: str) -> None:
    first, *others = PRINTED.buckets
    plan = dataclasses.replace(PRINTED, buckets=(dataclasses.replace(first, shard_numels=Shards.of(numels)), *others))
    assert f"  {text}  params" in str(plan)
    assert plan_from_json(plan_to_json(plan)) == plan
