"""What is never written, and the step without it."""

from dataclasses import replace

from hypothesis import given

from elixir_compile.ir import Kernel, Kind, Op, StepGraph, StorageId
from elixir_compile.step import fused
from elixir_compile.step.as_run import absorbed_storages
from tests.pure.graph_text import parse_graph
from tests.pure.mixes import mixed_graphs
from tests.pure.steps import GELU

SUM = parse_graph("""
graph sum
storages
  x  input  float32  8
  h  temp  float32  16
  g  temp  float32  8
  s  temp  float32  4
outputs
  s
aliases
ops
  fwd.mm  aten.mm forward  reads x  writes h  flops 80  moved 24
  fwd.gelu  aten.gelu forward  reads h  writes g  moved 24  kernel pointwise
  fwd.sum  aten.sum forward  reads g  writes s  moved 12  kernel reduction
""")


def changed(graph: StepGraph, name: str, **changes: object) -> StepGraph:
    """Return `graph` with other fields of one op."""
    return replace(graph, ops=tuple(replace(op, **changes) if op.id == name else op for op in graph.ops))  # pyright: ignore


def test_a_pointwise_result_between_two_kernels_is_never_written() -> None:
    """`g` is computed inside `sum`, which reads the 16 bytes of h and writes the 4 of s; h comes out of an opaque
    kernel, and s goes to the caller."""
    found = fused(SUM)
    assert absorbed_storages(SUM) == {"g"}
    assert [(op.id, op.reads, op.writes, op.moved_bytes) for op in found.ops] == [
        ("fwd.mm", ("x",), ("h",), 24),
        ("fwd.gelu", (), (), 0),
        ("fwd.sum", ("h",), ("s",), 20),
    ]
    assert [storage.id for storage in found.storages] == ["x", "h", "s"]


def test_storages_that_must_be_in_memory() -> None:
    """An opaque reader, the caller, a maker that is no pointwise op, a second writer."""
    assert absorbed_storages(changed(SUM, "fwd.sum", kernel=Kernel.OPAQUE)) == set()
    assert absorbed_storages(replace(SUM, outputs=(StorageId("g"), StorageId("s")))) == set()
    assert absorbed_storages(changed(SUM, "fwd.gelu", kernel=Kernel.REDUCTION)) == set()
    assert absorbed_storages(changed(SUM, "fwd.sum", writes=("g", "s"))) == set()


def test_only_storages_of_a_single_phase_are_fused() -> None:
    """`h` and `g` are saved. `e` is a pointwise op's and of the backward, but a matrix product reads it."""
    assert absorbed_storages(GELU) == set()
    assert fused(GELU) is GELU


def test_the_tangent_stays_when_the_op_it_comes_with_is_fused() -> None:
    """Tangents arrive with the backward's first op. Once that is emptied, they must not look like its result."""
    late = replace(SUM, ops=(SUM.ops[0], replace(SUM.ops[1], writes=(StorageId("x"), StorageId("g"))), SUM.ops[2]))
    storages = tuple(replace(s, kind=Kind.TEMP) if s.id == "x" else s for s in late.storages)
    late = replace(late, storages=storages, ops=(replace(late.ops[0], reads=()), *late.ops[1:]))
    once = fused(late)
    assert once.ops[1].writes == ("x",)
    assert fused(once) == once


def sources(graph: StepGraph, op: Op, absorbed: frozenset[StorageId]) -> set[StorageId]:
    """What `op` reads from memory: its inputs, and where one is never written, what its maker reads."""
    makers = {name: maker for maker in graph.ops for name in maker.writes}
    return {
        source
        for name in op.reads
        for source in (sources(graph, makers[name], absorbed) if name in absorbed else {name})
    }


@given(mixed_graphs())
def test_fused_ops_read_the_sources_of_their_inputs(graph: StepGraph) -> None:
    found, absorbed = fused(graph), absorbed_storages(graph)
    assert {storage.id for storage in graph.storages} - {storage.id for storage in found.storages} == absorbed
    for before, after in zip(graph.ops, found.ops, strict=True):
        is_emptied = not absorbed.isdisjoint(before.writes)
        assert set(after.reads) == (set() if is_emptied else sources(graph, before, absorbed))
        assert set(after.writes) == set(before.writes) - absorbed
    assert fused(found) == found
