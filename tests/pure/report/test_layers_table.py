"""`layers_table`: every byte of training state and every second of compute is in one row."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from elixir_compile.ir import Kind, Plan, StepGraph, Tier
from elixir_compile.search import Problem, plan
from elixir_compile.step.divide import laps_of
from elixir_compile.step.prices import OpSeconds
from elixir_compile.tools.report.tables import Survey, layer_of_param, layer_rows
from tests.pure.plans import mixed_plans
from tests.pure.report.pages import param_bytes, tight
from tests.pure.search.test_planner import problems


@given(problems(training=True))
@settings(max_examples=30)
def test_every_byte_and_every_second_is_in_one_row(problem: Problem) -> None:
    ops = problem.graph.ops
    graph = replace(problem.graph, ops=(replace(ops[0], module=""), *ops[1:]))
    problem = replace(problem, graph=graph)
    made = plan(problem, "greedy")
    seconds = OpSeconds(graph, problem.cluster).of(made.activations, laps_of(made))
    rows = layer_rows(Survey(made, graph), seconds)
    held = {param for bucket in made.buckets for param in bucket.params}
    nbytes = sum(s.nbytes for s in graph.storages if s.kind is Kind.PARAM and s.id in held)
    assert sum(sum(row.param_bytes.values()) for row in rows) == nbytes
    state_bytes = sum(bucket.state_nbytes for bucket in made.buckets)
    assert abs(sum(sum(row.state_bytes.values()) for row in rows) - state_bytes) <= len(held)
    assert sum(row.compute_s for row in rows) == pytest.approx(sum(seconds))


@given(mixed_plans())
@settings(max_examples=30)
def test_activations_are_summed_by_layer_and_treatment(planned: tuple[StepGraph, Plan]) -> None:
    graph, made = planned
    survey = Survey(made, graph)
    assert survey.held is not None
    rows = layer_rows(survey, [0.0] * len(survey.held.timeline.ops))
    assert sum(sum(row.saved_bytes.values()) for row in rows) == sum(group.nbytes for group in made.activations)


def test_a_row_says_where_a_layer_is_and_why() -> None:
    made, problem = tight()
    seconds = OpSeconds(problem.graph, problem.cluster).of(made.activations, laps_of(made))
    rows = {row.layer: row for row in layer_rows(Survey(made, problem.graph), seconds)}
    moved = [row for row in rows.values() if row.param_bytes.get(Tier.HOST)]
    assert moved
    assert all(row.num_gathers and row.decisions for row in moved)
    subjects = {decision.subject for row in rows.values() for decision in row.decisions}
    assert subjects <= {decision.subject for decision in made.decisions}
    assert sum(sum(row.param_bytes.values()) for row in rows.values()) == param_bytes(problem.graph)


@pytest.mark.parametrize(
    ("param", "layer"),
    [("model.layers.3.mlp.up.weight", "model.layers.3"), ("lm_head.weight", "lm_head"), ("scale", "scale")],
)
def test_a_parameter_outside_of_layers_has_the_row_of_its_module(param: str, layer: str) -> None:
    assert layer_of_param(param) == layer
