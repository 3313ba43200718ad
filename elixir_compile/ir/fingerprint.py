"""A short name for what a graph computes, the same in every process and on every rank.

Storages are numbered by first use, so the names that tracing happened to give to values do not count; parameters keep
theirs, because a plan's buckets name them. Ops count by target, phase, storages and module. The graph's own name, op
ids, source lines and cost figures do not count. A size that depends on symbols counts as its expression, the symbols
numbered in the order of the graph, and not as bytes: a graph is the same at another batch.
"""

import hashlib
import json

from elixir_compile.ir import sizes
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Kind, StorageId

_NUM_DIGITS = 12


def fingerprint(graph: StepGraph) -> str:
    """Return 12 hex digits of the SHA-256 of the graph's canonical form."""
    numbers: dict[StorageId, int] = {}
    for op in graph.ops:
        for name in (*op.reads, *op.writes):
            numbers.setdefault(name, len(numbers))
    ops = [
        [
            op.target,
            op.phase,
            [numbers[name] for name in op.reads],
            [numbers[name] for name in op.writes],
            op.module,
            op.kernel,
            op.once,
        ]
        for op in graph.ops
    ]
    symbols = {name: f"v{number}" for number, (name, _) in enumerate(graph.symbols)}
    texts = {storage.size for storage in graph.storages if storage.size}
    expressions = {text: sizes.canonical(text, symbols) for text in texts}
    touched: list[tuple[int, list[object]]] = []
    untouched: list[list[object]] = []
    for storage in graph.storages:
        name = storage.id if storage.kind is Kind.PARAM else ""
        of = "" if storage.of is None else storage.of
        line: list[object] = [storage.kind, expressions.get(storage.size, storage.nbytes), storage.dtype, name, of]
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
    ]
    return hashlib.sha256(json.dumps(canonical).encode()).hexdigest()[:_NUM_DIGITS]
