"""Turn graphs, plans and records into JSON and back, and compute the fingerprint of a graph."""

import hashlib
import json
import re
from typing import Any

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import PlanFileError
from elixir_compile.ir import sizes
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Batched, Kind, Lane, StorageId, Verb
from elixir_compile.ir.plan import PLAN_FORMAT, Plan
from elixir_compile.ir.record import Record

GRAPH_FORMAT = 3
RECORD_FORMAT = 2

_PLAN = Form(what="plan", version=PLAN_FORMAT, error=PlanFileError)
_GRAPH = Form(what="graph", version=GRAPH_FORMAT, error=PlanFileError)


_REGION, _GRADIENT = re.compile(r"\S+"), re.compile(r"offload b\d+")
_FORMER_VERBS = {"all-gather": "gather", "all-reduce": "reduce"}


def _relabel(record: dict[str, Any]) -> None:
    """Give the spans of a record of format 1 the labels of format 2.

    Simulated regions had no verb, collectives had words of their own, and the gradient of a bucket that left the device
    was called after the bucket alone.
    """
    spans = record.get("spans")
    for span in spans if isinstance(spans, list) else ():
        before = span.get("label") if isinstance(span, dict) else None
        if isinstance(before, str):
            verb, space, what = before.partition(" ")
            after = f"{_FORMER_VERBS.get(verb, verb)}{space}{what}"
            if span.get("lane") == Lane.COMPUTE and _REGION.fullmatch(after):
                after = f"{Verb.RUN} {after}"
            elif span.get("lane") == Lane.D2H and _GRADIENT.fullmatch(after):
                after = f"{after}.grad"
            span["label"] = after


_RECORD = Form(what="record", version=RECORD_FORMAT, error=PlanFileError, upgrades={1: _relabel})


def plan_to_json(plan: Plan) -> str:
    """Return `plan` as JSON."""
    return to_json(_PLAN, plan)


def plan_from_json(text: str) -> Plan:
    """Return the plan in `text`. Raises PlanFileError with the wrong field if the text is not a plan."""
    return from_json(_PLAN, Plan, text)


def graph_to_json(graph: StepGraph) -> str:
    """Return `graph` as JSON."""
    return to_json(_GRAPH, graph)


def graph_from_json(text: str) -> StepGraph:
    """Return the graph in `text`. Raises PlanFileError with the wrong field if the text is not a graph."""
    return from_json(_GRAPH, StepGraph, text)


def record_to_json(record: Record) -> str:
    """Return `record` as JSON."""
    return to_json(_RECORD, record)


def record_from_json(text: str) -> Record:
    """Return the record in `text`, of this format or an earlier one.

    Raises PlanFileError with the wrong field if the text is not a record, or is one of a later format.
    """
    return from_json(_RECORD, Record, text)


_NUM_DIGITS = 12


def fingerprint(graph: StepGraph) -> str:
    """Return 12 hex digits of the SHA-256 of `graph`, without the names of its ops, activations and symbols.

    Of the reason why an op mixes the batch, only its existence counts. Bytes count as tracing stated them, so the same
    step has the same fingerprint on machines whose kernels allocate other bytes.
    """
    workspaces = {storage.id for storage in graph.storages if storage.kind is Kind.WORKSPACE}
    numbers: dict[StorageId, int] = {}
    for op in graph.ops:
        for name in (*op.reads, *op.writes):
            if name not in workspaces:
                numbers.setdefault(name, len(numbers))
    ops = [
        [
            op.target,
            op.phase,
            [numbers[name] for name in op.reads],
            [numbers[name] for name in op.writes if name not in workspaces],
            op.module,
            op.kernel,
            op.once,
            *(["mixes"] if op.mixes else []),
            *([] if op.ring is None else ["ring", op.ring.num_ranks, op.ring.passes]),
            *(["launches", op.launches] if op.launches > 1 else []),
        ]
        for op in graph.ops
    ]
    symbols = {name: f"v{number}" for number, (name, _) in enumerate(graph.symbols)}
    texts = {storage.traced or storage.size for storage in graph.storages} - {""}
    expressions = {text: int(text) if text.isdecimal() else sizes.canonical(text, symbols) for text in texts}
    touched: list[tuple[int, list[object]]] = []
    untouched: list[list[object]] = []
    for storage in graph.storages:
        if storage.id in workspaces:
            continue
        name = storage.id if storage.kind is Kind.PARAM else ""
        of = "" if storage.of is None else storage.of
        size = expressions.get(storage.traced or storage.size, storage.nbytes)
        line: list[object] = [storage.kind, size, storage.dtype, name, of]
        line += [] if storage.batched is Batched.SAME else [storage.batched]
        line += ["consecutive"] if storage.consecutive else []
        if storage.id in numbers:
            touched.append((numbers[storage.id], line))
        else:
            untouched.append(line)
    outputs = [numbers.get(name, -1) for name in graph.outputs]
    canonical = [
        ops,
        [line for _, line in sorted(touched, key=lambda item: item[0])],
        sorted(untouched, key=str),
        outputs,
        *([symbols.get(graph.batch_size, graph.batch)] if graph.batch_size or graph.batch > 1 else []),
    ]
    return _digest(canonical)


def kernels_digest(graph: StepGraph) -> str:
    """Return 12 hex digits of the SHA-256 of the bytes that the kernels of `graph` allocate beyond its fingerprint:
    workspaces, and results of other bytes than tracing stated. Empty if there are none."""
    seen = [(own.id, own.nbytes) for own in graph.storages if own.traced or own.kind is Kind.WORKSPACE]
    return _digest(seen) if seen else ""


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_NUM_DIGITS]
