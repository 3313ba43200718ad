"""`saved`: a plan for something else is refused, and the error names both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import elixir_compile as elixir
from elixir_compile.base.options import Options
from elixir_compile.base.units import GIB
from elixir_compile.ir import BackwardOrder, Origin, Plan, Record, record_to_json
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.search import plan
from elixir_compile.search.question import question_of
from elixir_compile.session.saved import load_plan_for, load_plan_or_record, load_question, question_path
from tests.pure.analysis.test_lean_bytes import small_pair
from tests.pure.search.test_planner import chain_of, problem_of

GRAPH = chain_of(3)
PROBLEM = problem_of(GRAPH)
PLAN = plan(PROBLEM, "greedy")
ASKED = question_of(PROBLEM, Options())
HERE = profile_for("cuda", GIB, GIB, "cuda")


def pair() -> Cluster:
    """Return two of the same device on one host."""
    return replace(HERE, nodes=(replace(HERE.nodes[0], num_devices=2, peer=HERE.h2d),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    elixir.save_plan(PLAN, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_for_the_same_graph_and_machine_is_read(path: Path) -> None:
    assert load_plan_for(path, GRAPH, HERE) == PLAN


def test_a_plan_for_another_graph_is_refused(path: Path) -> None:
    with pytest.raises(elixir.PlanMismatch, match="another graph") as caught:
        load_plan_for(path, chain_of(2), HERE)
    assert caught.value.expected == PLAN.graph
    assert caught.value.got != PLAN.graph


@pytest.mark.parametrize(
    ("asked", "here"),
    [
        ("h100-80g", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("a100-40g", "NVIDIA A100-SXM4-40GB"),
        ("h100-80g", "h100-80g"),
        ("NVIDIA L4", "NVIDIA L4"),
    ],
)
def test_a_plan_by_the_name_of_a_machine_may_have_other_kernels(asked: str, here: str, tmp_path: Path) -> None:
    """A plan for `h100-80g` may be made on a CPU, whose kernels of attention keep other tensors than those of CUDA."""
    memory_bytes = (24 if "L4" in asked else 40 if "40" in asked else 80) * GIB
    elixir.save_plan(replace(PLAN, cluster=f"1 x {asked}"), tmp_path / "plan.json")
    cluster = profile_for("cuda", memory_bytes, GIB, here)
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], device=replace(cluster.device, name=here)),))
    with pytest.raises(elixir.PlanMismatch, match="another graph") as caught:
        load_plan_for(tmp_path / "plan.json", chain_of(2), cluster)
    assert ("`elixir-compile plan` makes on this machine fits" in str(caught.value)) == (asked != here)


def test_another_machine_names_both(path: Path) -> None:
    with pytest.raises(elixir.PlanMismatch, match="another machine: it was made for 1 x cuda, here is 1 x a100"):
        load_plan_for(path, GRAPH, profile_for("cuda", GIB, GIB, "a100"))


def test_another_number_of_ranks_names_both(path: Path) -> None:
    with pytest.raises(elixir.PlanMismatch, match=r"made for 1 \(1 x cuda\), here is 2 \(2 x cuda\)") as caught:
        load_plan_for(path, GRAPH, pair())
    assert caught.value.what == "number of ranks"


@pytest.mark.parametrize("asked", BackwardOrder)
@pytest.mark.parametrize("made_for", BackwardOrder)
def test_lean_calls_counted_for_one_order_are_no_plan_for_another(
    made_for: BackwardOrder, asked: BackwardOrder, tmp_path: Path
) -> None:
    problem, made = small_pair(made_for)
    elixir.save_plan(made, tmp_path / "plan.json")
    calls = replace(made.calls, backward_order=asked)
    if made_for in (BackwardOrder.ANY, asked):
        assert load_plan_for(tmp_path / "plan.json", problem.graph, problem.cluster, calls=calls) == made
    else:
        with pytest.raises(elixir.PlanMismatch, match="another order of backward passes"):
            load_plan_for(tmp_path / "plan.json", problem.graph, problem.cluster, calls=calls)


def test_a_file_is_read_as_the_kind_that_it_names(path: Path, tmp_path: Path) -> None:
    record = Record(origin=Origin.MEASURED, step_s=1.0, device_peak_bytes=1, host_peak_bytes=1)
    (tmp_path / "record.json").write_text(record_to_json(record))
    assert load_plan_or_record(path) == PLAN
    assert load_plan_or_record(tmp_path / "record.json") == record
    (tmp_path / "other.json").write_text('{"elixir": "machine"}')
    with pytest.raises(elixir.PlanFileError, match="expected 'plan'"):
        load_plan_or_record(tmp_path / "other.json")


def test_a_plan_is_saved_with_its_question_beside_it(tmp_path: Path) -> None:
    for name, beside in (("plan.json", "plan.question.json.gz"), ("other", "other.question.json.gz")):
        assert question_path(tmp_path / name) == tmp_path / beside
        elixir.save_plan(PLAN, tmp_path / name, ASKED)
        assert (tmp_path / beside).is_file()
        assert load_question(tmp_path / name, elixir.load_plan(tmp_path / name)) == ASKED


def test_a_plan_of_before_questions_has_none(path: Path) -> None:
    assert load_question(path, PLAN) is None
    assert load_plan_for(path, GRAPH, HERE) == PLAN


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"graph": chain_of(2)}, f"the question about graph {PLAN.graph}, which plan.json"),
        ({"cluster": pair()}, "the question about machine 1 x cuda, .* got 'machine 2 x cuda'"),
        (
            {"budget_bytes": PLAN.budget_bytes + 1},
            f"about budget of bytes {PLAN.budget_bytes}, .*{PLAN.budget_bytes + 1}",
        ),
        ({"base_bytes": 7}, "about number of bytes beside the plan 0, .* got 'number of bytes beside the plan 7'"),
    ],
)
def test_a_question_that_the_plan_does_not_answer_is_refused(path: Path, change: dict[str, Any], sentence: str) -> None:
    elixir.save_plan(PLAN, path, question_of(replace(PROBLEM, **change), Options()))
    with pytest.raises(elixir.QuestionFileError, match=sentence):
        load_question(path, PLAN)


@pytest.mark.parametrize(
    "other", [plan(problem_of(chain_of(2)), "greedy"), replace(PLAN, budget_bytes=PLAN.budget_bytes + 1)]
)
def test_saving_another_plan_alone_removes_the_question_of_the_one_before(path: Path, other: Plan) -> None:
    elixir.save_plan(PLAN, path, ASKED)
    elixir.save_plan(replace(PLAN, name="renamed"), path)
    assert load_question(path, PLAN) == ASKED  # the same step, so the question still holds
    elixir.save_plan(other, path)
    assert not question_path(path).exists()


def test_what_is_no_question_file_stays_when_a_plan_is_saved_alone(path: Path) -> None:
    question_path(path).write_text("a file of somebody")
    elixir.save_plan(PLAN, path)
    assert question_path(path).read_text() == "a file of somebody"


def test_a_link_at_the_place_of_the_question_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("a file of somebody")
    question_path(path).symlink_to(victim)
    elixir.save_plan(PLAN, path, ASKED)
    assert victim.read_text() == "a file of somebody"
    assert load_question(path, PLAN) == ASKED


def test_a_question_that_cannot_be_read_names_its_file(path: Path) -> None:
    elixir.save_plan(PLAN, path, ASKED)
    question_path(path).write_bytes(question_path(path).read_bytes()[:50])
    with pytest.raises(
        elixir.QuestionFileError, match=r"plan\.question\.json\.gz, the whole file: .*; remove the file"
    ):
        load_question(path, PLAN)
    question_path(path).unlink()
    question_path(path).mkdir()
    elixir.save_plan(PLAN, path)
    with pytest.raises(elixir.QuestionFileError, match=r"plan\.question\.json\.gz: expected a file that can be read"):
        load_question(path, PLAN)
