"""Graphs, plans and records as JSON and back.

```text
  {"elixir": "plan", "format": 5, "name": ..., "placements": [{"bucket": "b0", "param": "host", ...}], ...}
```

Reading is strict, see `elixir_compile.codec`: a PlanFileError names the field that is wrong, `placements[3].param`.
"""

from elixir_compile.codec import Form, from_json, to_json
from elixir_compile.errors import PlanFileError
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.plan import PLAN_FORMAT, Plan
from elixir_compile.ir.record import Record

GRAPH_FORMAT = 3
RECORD_FORMAT = 1

_PLAN = Form(what="plan", version=PLAN_FORMAT, error=PlanFileError)
_GRAPH = Form(what="graph", version=GRAPH_FORMAT, error=PlanFileError)
_RECORD = Form(what="record", version=RECORD_FORMAT, error=PlanFileError)


def plan_to_json(plan: Plan) -> str:
    """Return `plan` as JSON."""
    return to_json(_PLAN, plan)


def plan_from_json(text: str) -> Plan:
    """Return the plan in `text`; PlanFileError names the field that is not right."""
    return from_json(_PLAN, Plan, text)


def graph_to_json(graph: StepGraph) -> str:
    """Return `graph` as JSON."""
    return to_json(_GRAPH, graph)


def graph_from_json(text: str) -> StepGraph:
    """Return the graph in `text`; PlanFileError names the field that is not right."""
    return from_json(_GRAPH, StepGraph, text)


def record_to_json(record: Record) -> str:
    """Return `record` as JSON."""
    return to_json(_RECORD, record)


def record_from_json(text: str) -> Record:
    """Return the record in `text`; PlanFileError names the field that is not right."""
    return from_json(_RECORD, Record, text)
