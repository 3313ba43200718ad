"""`elixir-compile verify plan.json`: whether a saved plan is whole, and legal for a model and a machine."""

import json
from dataclasses import replace
from pathlib import Path

import typer

from elixir_compile.analysis import plan_at, verify
from elixir_compile.cli.failure import fail
from elixir_compile.cli.request import Request
from elixir_compile.errors import ElixirError, InvalidPlan, PlanMismatch
from elixir_compile.ir import Plan, fingerprint, plan_from_json, plan_to_json
from elixir_compile.managed.saved import load_plan, require_same_machine
from elixir_compile.units import format_bytes


def run_verify(plan: Path, request: Request | None, *, as_json: bool) -> int:
    """Print what holds of the plan, and return the exit code: 0 when all that was asked does, else 1.

    Without a `request` only the file is checked; with one, the model is captured again, and the machine is compared
    where the request names one.
    """
    try:
        made = load_plan(plan)
        _require_consistent(made)
        if request is not None:
            _require_legal(made, request)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    checked = "file" if request is None else "file and graph"
    if as_json:
        told = {"plan": made.name, "graph": made.graph, "cluster": made.cluster, "checked": checked}
        typer.echo(json.dumps(told, indent=1))
    else:
        typer.echo(f"{plan}: {checked} hold. {made.name} on {made.cluster}, graph {made.graph}")
        if request is None:
            typer.echo("Whether its actions are legal depends on the graph: add --model.")
    return 0


def _require_consistent(plan: Plan) -> None:
    made = plan.prediction
    if made.device_peak_bytes > plan.budget_bytes:
        peak, budget = format_bytes(made.device_peak_bytes), format_bytes(plan.budget_bytes)
        raise InvalidPlan(f"plan {plan.name} expects a peak of {peak}, over its budget of {budget}.")
    if plan_from_json(plan_to_json(plan)) != plan:
        raise InvalidPlan(f"plan {plan.name} does not read back from its own JSON.")


def _require_legal(plan: Plan, request: Request) -> None:
    cluster = request.cluster()
    if cluster is not None:
        require_same_machine(plan, cluster)
    capture = request.capture()
    if plan.loss_chunks > 1 and capture.chunks is not None:
        capture = request.capture(chunks=replace(capture.chunks, num_chunks=plan.loss_chunks))
    graph = capture.graph
    if plan.graph != fingerprint(graph) and plan.symbols:
        graph = request.capture(dynamic=True).graph  # as --largest-batch captures it
    if plan.graph != fingerprint(graph):
        raise PlanMismatch("graph", plan.graph, fingerprint(graph))
    verify(graph, plan_at(graph, plan))
