"""What counts for the fingerprint of a graph, and what does not."""

import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.ir import OpId, StepGraph, StorageId, fingerprint, graph_at, graph_to_json, sizes
from elixir_compile.ir.kinds import Batched, Kernel, Kind
from tests.pure.strategies import Layer, chain, step_graphs, symbolic, symbolic_graphs

GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(3)])


def renamed(graph: StepGraph) -> StepGraph:
    """Return the graph with other names for everything but parameters, and its storages listed backwards."""
    names = {s.id: s.id if s.kind is Kind.PARAM else StorageId(f"other {s.id}") for s in graph.storages}
    return StepGraph(
        name="another name",
        ops=tuple(
            dataclasses.replace(
                op,
                id=op.id if op.id == "update" else OpId(f"other {op.id}"),
                reads=tuple(names[name] for name in op.reads),
                writes=tuple(names[name] for name in op.writes),
                source="elsewhere.py:1",
                flops=0,
            )
            for op in graph.ops
        ),
        storages=tuple(dataclasses.replace(s, id=names[s.id]) for s in reversed(graph.storages)),
        outputs=tuple(names[name] for name in graph.outputs),
    )


@given(step_graphs())
def test_names_do_not_count(graph: StepGraph) -> None:
    assert fingerprint(renamed(graph)) == fingerprint(graph)
    assert len(fingerprint(graph)) == 12
    assert set(fingerprint(graph)) <= set("0123456789abcdef")


def with_storage(index: int, **changes: object) -> StepGraph:
    storages = list(GRAPH.storages)
    storages[index] = dataclasses.replace(storages[index], **changes)
    return dataclasses.replace(GRAPH, storages=tuple(storages))


def with_op(index: int, **changes: object) -> StepGraph:
    ops = list(GRAPH.ops)
    ops[index] = dataclasses.replace(ops[index], **changes)
    return dataclasses.replace(GRAPH, ops=tuple(ops))


@pytest.mark.parametrize(
    "other",
    [
        with_storage(0, nbytes=99),
        with_storage(0, dtype="bfloat16"),
        with_storage(0, kind=Kind.BUFFER),
        with_op(0, target="aten.addmm.default"),
        with_op(0, module="elsewhere"),
        with_op(0, kernel=Kernel.POINTWISE),
        with_op(0, once=True),
        with_op(0, mixes="a mean over the batch"),
        with_storage(0, batched=Batched.EACH),
        with_storage(0, batched=Batched.SUM),
        with_storage(0, consecutive=True),
        dataclasses.replace(GRAPH, batch=8),
        with_op(2, reads=tuple(reversed(GRAPH.ops[2].reads))),
        with_op(2, writes=()),
        dataclasses.replace(GRAPH, ops=GRAPH.ops[:-1]),
        dataclasses.replace(GRAPH, outputs=()),
        chain([Layer(module=f"l{n}", params=((f"v{n}", 10),), frozen=False, act_numel=4) for n in range(3)]),
    ],
)
def test_fingerprints_depend_on_the_computation(other: StepGraph) -> None:
    assert fingerprint(other) != fingerprint(GRAPH)


@given(symbolic_graphs(), st.integers(1, 40))
def test_fingerprints_do_not_depend_on_sizes_or_names_of_symbols(graph: StepGraph, value: int) -> None:
    assert fingerprint(graph_at(graph, {"s0": value})) == fingerprint(graph)
    names = {"s0": "s77", "s1": "s5"}
    storages = tuple(
        dataclasses.replace(s, size=sizes.canonical(s.size, names) if s.size else "") for s in graph.storages
    )
    symbols = tuple((names[name], value) for name, value in graph.symbols)
    assert fingerprint(dataclasses.replace(graph, storages=storages, symbols=symbols)) == fingerprint(graph)


def test_the_expression_of_a_size_counts() -> None:
    graphs = [GRAPH, symbolic(GRAPH), symbolic(GRAPH, "{numel}*s0 + 1"), symbolic(GRAPH, "{numel}*s0**2")]
    assert len({fingerprint(graph) for graph in graphs}) == 4


def test_fingerprints_are_equal_in_every_process() -> None:
    script = "import sys; from elixir_compile.ir import *; print(fingerprint(graph_from_json(sys.stdin.read())))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            [sys.executable, "-c", script],
            input=graph_to_json(GRAPH),
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == fingerprint(GRAPH)
