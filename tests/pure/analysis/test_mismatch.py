"""`step.verify`: a plan for another graph is refused with both models and their first difference."""

import pickle
import re
from dataclasses import replace

import pytest

from elixir_compile.base.errors import PlanMismatch
from elixir_compile.ir import Phase, StepGraph
from elixir_compile.step.verify import require_same_graph
from tests.pure.analysis.test_verify_activations import PLAN
from tests.pure.graph_text import parse_graph
from tests.pure.steps import GELU
from tests.pure.strategies import symbolic


def refusal(graph: StepGraph) -> PlanMismatch:
    with pytest.raises(PlanMismatch) as caught:
        require_same_graph(PLAN, graph)
    return caught.value


def test_the_graph_of_the_plan_is_taken() -> None:
    require_same_graph(PLAN, GELU)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (r"\bw1\b", "w9", "The plan has no parameter w9, which this model reads"),
        (r"(w1 +param +)float32", r"\1bfloat16", "Parameter w1 was float32 and is bfloat16 here"),
        (r"(w1 +param +float32 +)40", r"\g<1>80", "The parameters w0, w1 had 80 B and have 120 B here"),
        (r"grad( +float32 +40) +of w\d", r"temp\1", "Parameter w0 was trained and is frozen here"),
        (
            r"\b(h +saved +float32 +)16",
            r"\g<1>32",
            "The activations acts.h had 16 B and have 32 B here, so the shape or the dtype of the batch differs",
        ),
        (r"fwd\.gelu aten\.gelu", "fwd.silu aten.silu", "This model has no op fwd.gelu, which the plan has"),
        (
            r"(x +input +float32 +)8",
            r"\g<1>24",
            "The parameters and ops that the plan names are all here, so the shape of the batch or the code differs",
        ),
    ],
)
def test_the_first_difference_is_named(old: str, new: str, sentence: str) -> None:
    error = refusal(parse_graph(re.sub(old, new, str(GELU))))
    assert error.difference == sentence
    assert f"{sentence}. Use the model, batch shape, dtypes" in str(error)


def test_a_step_without_backward_is_told_from_a_training_step() -> None:
    ops = tuple(op for op in GELU.ops if op.phase is Phase.FORWARD)
    difference = "The step of the plan has a backward, and this step has no backward"
    assert refusal(replace(GELU, ops=ops)).difference == difference


def test_symbolic_sizes_are_told_from_numbers() -> None:
    difference = "The plan has no symbols, and this graph has the symbols s0 = 3"
    assert refusal(symbolic(GELU)).difference == difference


def test_both_models_are_described() -> None:
    error = refusal(parse_graph(re.sub(r"\bw1\b", "w9", str(replace(GELU, name="Net")))))
    assert (error.expected, error.got) == (PLAN.graph, error.args[2])
    assert error.expected_model == "model chain, 2 parameters with 80 B"
    assert error.got_model == "model Net, 2 parameters with 80 B, inputs with 8 B"
    assert f"it was made for {PLAN.graph} ({error.expected_model}), here is {error.got} (" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
