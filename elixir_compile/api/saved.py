"""Plans on disk: JSON, never pickle."""

from pathlib import Path

from elixir_compile.analysis import verify
from elixir_compile.errors import PlanFileError, PlanMismatch
from elixir_compile.ir import Plan, StepGraph, fingerprint, plan_from_json, plan_to_json


def save_plan(plan: Plan, path: "str | Path") -> None:
    """Write `plan` as JSON to `path`."""
    Path(path).write_text(plan_to_json(plan), encoding="utf-8")


def load_plan(path: "str | Path") -> Plan:
    """Read a plan that `save_plan` wrote; PlanFileError names the field that is wrong, or the missing file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanFileError(str(path), "a file that can be read", error.strerror) from error
    return plan_from_json(text)


def load_plan_for(path: "str | Path", graph: StepGraph, cluster: str) -> Plan:
    """Read a plan for `graph` on `cluster`; PlanMismatch with both fingerprints when it is for another."""
    plan = load_plan(path)
    if plan.graph != fingerprint(graph):
        raise PlanMismatch("graph", fingerprint(graph), plan.graph)
    if plan.cluster != cluster:
        raise PlanMismatch("machine", cluster, plan.cluster)
    verify(graph, plan)
    return plan
