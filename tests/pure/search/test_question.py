"""`question`: what a plan answers as a file, read back equal, and refused soon if nobody wrote it so."""

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import ElixirError, QuestionFileError
from elixir_compile.base.options import Options
from elixir_compile.ir import Saving, StorageId, Update
from elixir_compile.ir.cost import Measured, Stretch
from elixir_compile.search import Problem, plan
from elixir_compile.search import problem as question
from elixir_compile.search.problem import Question, question_from_bytes, question_of, question_to_bytes
from elixir_compile.step import verify
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.report.explain import explain
from tests.pure.ir.test_codec import few_steps, mutated
from tests.pure.problems import problems, tight_problem
from tests.pure.strategies import symbolic, with_facts

PROBLEM = tight_problem()
PLAN = plan(PROBLEM, "greedy")
OPS = PROBLEM.graph.ops
MEASURED = Measured(
    stretches=(Stretch(first=OPS[0].id, last=OPS[3].id, run_s=0.5),), activations=PLAN.activations, micro_batches=1
)
ASKED = question_of(replace(PROBLEM, measured=MEASURED), Options())
CHOICES: list[Options] = [
    Options(),
    Options(planner="greedy", search_timeout=0.5),
    Options(micro_batches="auto"),
    Options(micro_batches=4),
]


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Return random problems with values in the fields that random problems of a search leave at their defaults."""
    problem = draw(problems())
    params = sorted(problem.params)
    ops = problem.graph.ops
    stretches = (Stretch(first=ops[0].id, last=ops[-1].id, run_s=draw(st.floats(0, 10))),)
    more: dict[str, object] = {
        "name": draw(st.text()),
        "savings": draw(st.frozensets(st.sampled_from(Saving))),
        "update": draw(st.none() | st.sampled_from(Update)),
        "least_alike": draw(st.none() | st.integers(2, 9)),
        "host_base_bytes": draw(st.integers(0, 1 << 40)),
        "accumulates": draw(st.booleans()),
        "disk": draw(st.booleans()),
        "measured": Measured(stretches=draw(st.sampled_from([(), stretches])), micro_batches=draw(st.integers(1, 9))),
        "common_rows": draw(st.none() | st.integers(1, 64)),
    }
    facts: dict[str, Any] = {"group": {name: draw(st.integers(0, 3)) for name in params}}
    if problem.cluster.num_ranks > 1:
        facts["shard_numels"] = {name: (draw(st.integers(5, 9)), 4) for name in params}
        facts["reduce_dtype"] = dict.fromkeys(params, "float32")
    if draw(st.booleans()):
        facts["narrower_nbytes"] = dict.fromkeys(params, (("bfloat16", 8), ("int8", 4)))
        more["narrower_dtype"] = draw(st.sampled_from([None, "bfloat16"]))
    more["params"] = with_facts(problem.params, **facts)
    if draw(st.booleans()):
        found = plan(problem, "greedy")
        more |= {"buckets": found.buckets, "placements": found.placements}
    if draw(st.booleans()):
        more["graph"] = symbolic(problem.graph)
    return question_of(replace(problem, **more), draw(st.sampled_from(CHOICES)))


@given(questions())
@settings(max_examples=30)
def test_a_question_reads_back_equal_from_equal_bytes(asked: Question) -> None:
    content = question_to_bytes(asked)
    again = question_from_bytes(content)
    assert again == asked
    assert question_to_bytes(again) == content


@given(problems(), st.sampled_from([0.6, 1.0]))
@settings(max_examples=15)
def test_a_question_that_was_read_back_has_the_same_plan(problem: Problem, share: float) -> None:
    kept = plan(problem, "keep_all").prediction.device_peak_bytes
    problem = replace(problem, budget_bytes=int(kept * share))
    again = question_from_bytes(question_to_bytes(question_of(problem, Options()))).problem
    with suppress(ElixirError):
        made = plan(problem, "greedy")
        assert plan(again, "greedy") == made


@pytest.mark.parametrize("options", CHOICES)
def test_the_options_of_a_search_are_kept(options: Options) -> None:
    asked = question_from_bytes(question_to_bytes(question_of(PROBLEM, options))).options
    number = 1 if isinstance(options.micro_batches, int) else options.micro_batches
    assert asked == replace(options, micro_batches=number)  # the number is that of the problem


def test_a_number_of_micro_batches_that_a_search_chose_is_open_again() -> None:
    batched = replace(PROBLEM, graph=replace(PROBLEM.graph, batch=8), micro_batches=4)
    assert question_of(batched, Options()).problem.micro_batches == 1
    fixed = question_of(batched, Options(micro_batches=4))
    assert (fixed.problem.micro_batches, fixed.options.micro_batches) == (4, 4)


def fields_of(asked: Question) -> dict[str, Any]:
    return json.loads(gzip.decompress(question_to_bytes(asked)))


def packed(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def test_the_file_is_gzipped_json_with_a_format() -> None:
    data = fields_of(ASKED)
    assert (data["elixir"], data["format"]) == ("question", 3)
    assert data["problem"]["savings"] == ["keep", "offload", "recompute"]
    assert [op["id"] for op in data["problem"]["graph"]["ops"]] == [op.id for op in PROBLEM.graph.ops]


CONTENT = question_to_bytes(ASKED)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "a whole gzip file"),
        (pickle.dumps({"elixir": "question"}), "expected a gzip file"),
        (b"{}", "expected a gzip file"),
        (CONTENT[: len(CONTENT) // 2], "expected a whole gzip file and nothing else, got 'a part of it'"),
        (CONTENT + b"more", "4 bytes behind its end"),
        (CONTENT[:-6] + b"\x00" * 6, "expected a gzip file"),
        (gzip.compress(b"\xff\xfe", mtime=0), "byte 0 that is no UTF-8"),
        (packed("{}"), "elixir: expected 'question', got 'nothing'"),
        (
            packed(json.dumps(fields_of(ASKED) | {"format": 4})),
            "format: expected 3 or 2 or 1 (a later elixir_compile wrote the question; that version reads it), got 4",
        ),
        (packed(json.dumps(fields_of(ASKED) | {"more": 2})), "more: expected no such field"),
        (packed("[" * 100_000), "JSON of a few levels"),
    ],
)
def test_what_is_no_question_file_is_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(QuestionFileError) as caught:
        question_from_bytes(content)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("question file, ")


def test_a_small_file_that_unpacks_to_many_bytes_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "MOST_UNPACKED_BYTES", 1 << 16)
    bomb = gzip.compress(b'{"elixir": "' + b"x" * (1 << 24) + b'"}')
    assert len(bomb) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(QuestionFileError, match="at most 65536 bytes of JSON"):
            question_from_bytes(bomb)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"planner": "best"}, "expected one of milp, greedy"),
        ({"search_timeout_s": 0.0}, "expected a positive number of seconds"),
        ({"micro_batches": "many"}, "expected 'fit', 'auto' or nothing"),
        ({"problem": {"params": {"p0": {"state_nbytes": -1}}}}, "problem.params.state_nbytes holds -1"),
        ({"problem": {"params": {"p0": {"group": -2}}}}, "problem.params.group holds -2"),
        ({"problem": {"params": {"p0": {"sum_nbytes": 1 << 56}}}}, "expected at most 36028797018963968"),
        ({"problem": {"params": {"p0": {"rank": 1}}}}, "problem.params.p0.rank: expected no such field"),
        ({"format": 1, "problem": {"groups": {"p0": "one"}}}, "problem.params.p0.group: expected a whole number"),
        ({"format": 1, "problem": {"groups": [1]}}, "problem.groups: expected no such field"),
        ({"problem": {"base_bytes": (1 << 55) + 1}}, "expected at most 36028797018963968"),
        ({"problem": {"common_rows": 0}}, "a question about 0 micro-batches or rows"),
        ({"problem": {"micro_batches": 3}}, "cannot run in 3 micro-batches"),
        ({"problem": {"savings": ["keep", "keep"]}}, "a list with each item once"),
        ({"problem": {"savings": ["drop"]}}, "one of keep, recompute, offload"),
    ],
)
def test_values_that_no_question_has_are_refused(change: dict[str, Any], sentence: str) -> None:
    data = fields_of(ASKED)
    if "problem" in change:
        change = {**change, "problem": data["problem"] | change["problem"]}
    with pytest.raises(QuestionFileError) as caught:
        question_from_bytes(packed(json.dumps(data | change)))
    assert sentence in str(caught.value)


def with_numels_by_rank(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a question with shards as a list of one number for each rank, as up to format 2."""
    for record in (*data["problem"]["params"].values(), *data["problem"]["buckets"]):
        if "shard_numels" in record:
            record["shard_numels"] = [numel for numel, count in record["shard_numels"]["runs"] for _ in range(count)]
    return data


@given(questions())
@settings(max_examples=20)
def test_a_question_of_format_2_reads_as_one_of_format_3(asked: Question) -> None:
    """It has the elements of each rank in a list, however many ranks have equal ones."""
    data = with_numels_by_rank(fields_of(asked)) | {"format": 2}
    assert question_from_bytes(packed(json.dumps(data))) == asked


def test_a_question_of_format_1_reads_as_one_of_this_format() -> None:
    """It has a mapping for each fact about parameters, of those that have it."""
    facts: dict[str, dict[StorageId, Any]] = {
        "state_nbytes": {StorageId("p0"): 0, StorageId("p1"): 16},
        "state_dtype": {StorageId("p1"): "int8"},
        "sum_nbytes": {StorageId("p0"): 12},
        "reduce_dtype": {StorageId("p0"): "float32"},
        "group": {StorageId("p1"): 2},
        "shard_numels": {StorageId("p2"): [7]},
        "narrower_nbytes": {StorageId("p0"): (("bfloat16", 4),)},
    }
    asked = replace(ASKED, problem=replace(PROBLEM, params=with_facts({}, **facts), narrower_dtype="bfloat16"))
    data = fields_of(asked) | {"format": 1}
    for name in ("params", "narrower_dtype"):
        del data["problem"][name]
    of_format_1 = {"state_dtype": "state_dtypes", "reduce_dtype": "reduce_dtypes", "group": "groups"}
    del facts["narrower_nbytes"]
    data["problem"] |= {of_format_1.get(name, name).replace("shard_numels", "shards"): facts[name] for name in facts}
    data["problem"]["narrower"] = {"dtype": "bfloat16", "nbytes": {"p0": 4}}
    assert question_from_bytes(packed(json.dumps(data))) == asked


def test_the_question_in_the_docs_is_read() -> None:
    content = (Path(__file__).parents[3] / "docs" / "img" / "gpt2-124m.question.json.gz").read_bytes()
    params = question_from_bytes(content).problem.params.values()
    assert len(params) == 148
    assert all(param.is_trained and param.state_nbytes > 0 for param in params)


def read_or_refused(content: bytes) -> Question | None:
    """Return the question in `content`, None if it is refused with an error that a person can read."""
    try:
        return question_from_bytes(content)
    except QuestionFileError as refused:
        told = str(refused)
    assert 0 < len(told) < 5000
    return None


READERS: list[Callable[[Question], object]] = [
    lambda asked: verify(asked.problem.graph, PLAN),
    lambda asked: explain(PLAN, "b2", asked.problem.graph),
    lambda asked: explain(PLAN, PLAN.regions[-1].id, asked.problem.graph),
    lambda asked: simulate(asked.problem.graph, PLAN, asked.problem.cluster, asked.problem.measured),
]


@given(st.data())
@settings(max_examples=80)
def test_a_mutated_question_is_read_or_refused(data: st.DataObject) -> None:
    content = packed(mutated(data, gzip.decompress(CONTENT).decode()))
    with few_steps():
        asked = read_or_refused(content)
        if asked is None:
            return
        assert question_from_bytes(question_to_bytes(asked)) == asked
        for read in READERS:
            with suppress(ElixirError):
                read(asked)
