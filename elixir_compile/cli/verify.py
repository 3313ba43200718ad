"""`elixir-compile verify plan.json`: check the file of a saved plan, and its legality for a model and a machine."""

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
    """Check the file `plan`, print the result, and return the exit code: 0 if all checks pass, else 1.

    If `request` is None, only the file is checked. Otherwise the model is captured again and the plan is checked for
    its step; if the request names a machine, the machine is compared too.
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
        fields = {"plan": made.name, "graph": made.graph, "cluster": made.cluster, "checked": checked}
        typer.echo(json.dumps(fields, indent=1))
    else:
        typer.echo(f"{plan}: {checked} hold. {made.name} on {made.cluster}, graph {made.graph}")
        if request is None:
            typer.echo("Add --model to check its actions too: they are legal for some graphs only.")
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
        graph = request.capture(dynamic=True).graph  # with a symbolic batch, as for --largest-batch
    if plan.graph != fingerprint(graph):
        raise PlanMismatch("graph", plan.graph, fingerprint(graph))
    verify(graph, plan_at(graph, plan))
