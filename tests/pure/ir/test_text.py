"""`parse(str(x)) == x` for graphs and plans, and errors that name the line."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.errors import PlanFileError
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
    parse_graph,
    parse_plan,
)
from elixir_compile.ir.kinds import Kind
from elixir_compile.ir.words import KEYWORDS, Row, word
from tests.pure.mixes import mixed_graphs
from tests.pure.plans import bucket_of, make_plan, mixed_plans, planned_graphs
from tests.pure.strategies import Layer, chain, step_graphs

NAMES = st.text() | st.sampled_from(
    [*sorted(KEYWORDS), "", "a b", "#", '"', "\\", "\u2028", "\x85", "\ud800", "é", "@3"]
)
SECONDS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(2)]
PLAN = make_plan(GRAPH, BUCKETS, ["host", "device"])


@given(NAMES)
def test_any_text_is_one_word(text: str) -> None:
    row = Row(1, f"  {word(text)}  {word(text)}  # {'#' + word('x')}")
    assert (row.name("a name"), row.name("a name")) == (text, text)
    row.end()


@given(step_graphs() | mixed_graphs())
def test_graphs_parse_back(graph: StepGraph) -> None:
    assert parse_graph(str(graph)) == graph


@given(planned_graphs() | mixed_plans())
def test_plans_parse_back(planned: tuple[StepGraph, Plan]) -> None:
    assert parse_plan(str(planned[1])) == planned[1]


@given(st.lists(NAMES, min_size=4, max_size=4, unique=True), NAMES, st.integers(0, 2**63 - 1))
def test_graphs_with_awkward_names_parse_back(names: list[str], text: str, number: int) -> None:
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
    assert parse_graph(str(graph)) == graph


@given(NAMES, NAMES, SECONDS, st.integers(-(2**40), 2**40), st.none() | SECONDS, st.integers(0, 3))
def test_plans_with_awkward_values_parse_back(
    text: str, other: str, seconds: float, number: int, bound_s: float | None, micro_batch: int
) -> None:
    decision = Decision(
        subject=text, choice=other, because=text, cost_s=seconds, saves_bytes=number, rejected=(other, text)
    )
    actions = tuple(Action(verb=verb, what=what, micro_batch=micro_batch) for verb in Verb for what in (text, other))
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
    assert parse_plan(str(plan)) == plan


def test_a_plan_prints_as_people_read_it() -> None:
    lines = [" ".join(line.split()) for line in str(PLAN).split("\n")]
    assert lines[0] == "plan chain on 1 x cpu".replace("1 x cpu", '"1 x cpu"')
    assert lines[2] == "step 0.2 exposed 0.1 hidden 0.5 # 200 ms, 100 ms exposed, 50.0% of transfers hidden"
    assert "b0 float32 numel 10 bytes 40 state 80 trainable param host optim host shards 10 params w0 # 40 B" in lines
    assert lines[lines.index("schedule rank 0") + 1 :][:3] == ["gather b0", "wait b0", "run fwd.0 @0"]


@pytest.mark.parametrize("update", list(Update))
def test_when_and_where_buckets_are_updated_parses_back(update: Update) -> None:
    placements = tuple(dataclasses.replace(own, streamed=own.optim is Tier.HOST) for own in PLAN.placements)
    plan = dataclasses.replace(PLAN, update=update, placements=placements)
    assert parse_plan(str(plan)) == plan
    lines = [" ".join(line.split()) for line in str(plan).split("\n")]
    assert (f"update {update}" in lines) == (update is not Update.AFTER_BACKWARD)
    assert sum("optim host streamed" in line for line in lines) == 1


def test_the_param_group_of_a_bucket_parses_back() -> None:
    first, *others = PLAN.buckets
    plan = dataclasses.replace(PLAN, buckets=(dataclasses.replace(first, group=2), *others))
    assert parse_plan(str(plan)) == plan
    assert "trainable  group 2  param host" in str(plan)
    assert "group" not in str(PLAN)


def test_the_sums_of_a_bucket_parse_back() -> None:
    first, *others = PLAN.buckets
    plan = dataclasses.replace(PLAN, buckets=(dataclasses.replace(first, sum_nbytes=4000), *others))
    assert parse_plan(str(plan)) == plan
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
    assert parse_plan(str(plan)) == plan


def test_comments_and_blank_lines_do_not_count() -> None:
    text = "# a review\n\n" + str(PLAN).replace("\n", "   # noted\n\n")
    assert parse_plan(text) == PLAN


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("plan chain on", "plan chain at", "line 1: expected `on`, got 'at'"),
        ("format 5", "format 1", "line 2: expected the number 5, got '1'"),
        ("step 0.2", "step nan", "line 3: expected a finite number, got 'nan'"),
        ("step 0.2", "step -1.0", "the prediction: expected values that agree"),
        ("numel 10", "numel ten", "line 7: expected a whole number, got 'ten'"),
        ("numel 10", "numel -10", "line 7: expected a whole number, got '-10'"),
        ("param host", "param moon", "line 7: expected one of device, host, disk, got 'moon'"),
        ("trainable", "trained", "line 7: expected `trainable` or `frozen`, got 'trained'"),
        ("gather    b0", "gather", "expected what to act on, got 'the end of the line'"),
        ("gather    b0", "gather b0 b1", "expected @<whole number>, got 'b1'"),
        ("gather    b0", "grab b0", "expected one of run, gather"),
        ("gather    b0", 'gather "b0', "expected a closing quote"),
        ("because  ", "since ", "expected `because`, got 'since'"),
        ("regions\n", "regoins\n", "expected `regions`, got 'regoins'"),
        ("regions\n", "  regions\n", "expected a bucket, got 'regions'"),
        ("params w0", "params w0 w0", "line 7: expected values that agree"),
        ("shards 10", "shards 10 x", "line 7: expected a whole number, got 'params'"),
        ("shards 10", "shards 10 x 99999999999", "line 7: expected at most 1048576 ranks, got 99999999999"),
        ("shards 10", "shards 10 x 1048576 9", "line 7: expected at most 1048576 ranks, got 1048577"),
    ],
)
def test_errors_name_the_line_and_what_was_expected(old: str, new: str, sentence: str) -> None:
    assert old in str(PLAN)
    with pytest.raises(PlanFileError) as caught:
        parse_plan(str(PLAN).replace(old, new, 1))
    assert sentence in str(caught.value)


@given(st.data())
def test_truncated_text_is_a_plan_file_error_or_a_shorter_plan(data: st.DataObject) -> None:
    lines = str(PLAN).split("\n")
    num_lines = data.draw(st.integers(0, lines.index("decisions")))
    with pytest.raises(PlanFileError, match="line"):
        parse_plan("\n".join(lines[:num_lines]))


def test_graph_errors_name_the_line() -> None:
    with pytest.raises(PlanFileError, match="line 3: expected one of param, grad"):
        parse_graph(str(GRAPH).replace("  x  input", "  x  inbox"))
    with pytest.raises(PlanFileError, match=r"the whole text: expected values that agree.*s9"):
        parse_graph(str(GRAPH).replace("reads s0", "reads s9"))
    with pytest.raises(PlanFileError, match="expected the end of the text"):
        parse_graph(f"{GRAPH}\nmore")
