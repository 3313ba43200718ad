"""Graphs with symbolic sizes: read back, evaluated elsewhere, and refused when text and number disagree."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, PlanFileError
from elixir_compile.ir import Ring, StepGraph, fingerprint, graph_at, graph_from_json, graph_to_json, sizes
from elixir_compile.tools.preview.few_layers import graph_of_line, line_of
from tests.pure.strategies import Layer, chain, symbolic, symbolic_graphs

STATIC = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
GRAPH = symbolic(STATIC)


@given(symbolic_graphs())
def test_dynamic_graphs_read_back_from_json(graph: StepGraph) -> None:
    assert graph_from_json(graph_to_json(graph)) == graph


@given(symbolic_graphs(), st.integers(1, 40))
def test_sizes_elsewhere(graph: StepGraph, value: int) -> None:
    there = graph_at(graph, {"s1": value})
    values = dict(graph.symbols) | {"s1": value}
    assert dict(there.symbols) == values
    for before, after in zip(graph.storages, there.storages, strict=True):
        assert after.nbytes == (sizes.evaluate(before.size, values) if before.size else before.nbytes)
    assert graph_at(there, {}) == there


def test_moved_bytes_grow_with_the_storages_and_flops_by_their_own_text() -> None:
    """The first op reads x (16 bytes per s0) and w0, and writes t0; three times s0 is 9."""
    graph = dataclasses.replace(
        GRAPH,
        ops=(
            dataclasses.replace(GRAPH.ops[0], flops=60, flops_size="20*s0", moved_bytes=40 + 2 * 48),
            *GRAPH.ops[1:],
        ),
    )
    op = graph_at(graph, {"s0": 9}).ops[0]
    assert (op.flops, op.moved_bytes) == (180, 40 + 2 * 144)
    assert graph_at(graph_at(graph, {"s0": 9}), {"s0": 3}).ops[0] == graph.ops[0]


def test_a_collective_grows_with_its_tensor_and_reads_back() -> None:
    ring = Ring(num_ranks=2, nbytes=48, passes=2, size="16*s0")
    graph = dataclasses.replace(GRAPH, ops=(dataclasses.replace(GRAPH.ops[0], ring=ring), *GRAPH.ops[1:]))
    found = graph_at(graph, {"s0": 9}).ops[0].ring
    assert found is not None
    assert found.nbytes == 144
    assert graph_from_json(graph_to_json(graph)) == graph
    assert graph_of_line(line_of(graph)).ops[0].ring == ring
    assert fingerprint(graph) != fingerprint(GRAPH)
    assert "sends 48 16*s0 x 2 round 2 ranks" in str(graph.ops[0])
    with pytest.raises(InvalidPlan, match=r"says that 16\*s0 is 40"):
        dataclasses.replace(graph, ops=(dataclasses.replace(GRAPH.ops[0], ring=dataclasses.replace(ring, nbytes=40)),))
    with pytest.raises(InvalidPlan, match="expected 0 bytes or more"):
        Ring(num_ranks=0, nbytes=1, passes=1)


def test_an_unknown_symbol_is_named() -> None:
    with pytest.raises(InvalidPlan, match="has no symbol s7; its symbols are: s0"):
        graph_at(GRAPH, {"s7": 2})
    with pytest.raises(InvalidPlan, match="its symbols are: none"):
        graph_at(STATIC, {"s0": 2})


def test_text_and_number_must_agree() -> None:
    with pytest.raises(InvalidPlan, match=r"says that 16\*s0 is 48 at {'s0': 4}; it is 64"):
        dataclasses.replace(GRAPH, symbols=(("s0", 4),))
    with pytest.raises(InvalidPlan, match="has no value"):
        dataclasses.replace(GRAPH, symbols=())
    with pytest.raises(InvalidPlan, match="each once"):
        dataclasses.replace(GRAPH, symbols=(("s0", 3), ("s0", 3)))


def test_a_file_cannot_run_code() -> None:
    text = graph_to_json(GRAPH).replace('"16*s0"', "\"__import__('os').getpid()*s0\"")
    with pytest.raises(PlanFileError, match="getpid"):
        graph_from_json(text)
