"""Groups of saved activations, worked out for two small layers, and what every step's groups have in common."""

from dataclasses import replace

from hypothesis import given

from elixir_compile.ir import Activations, Kind, Op, OpId, Phase, StepGraph, Storage, StorageId
from elixir_compile.step import Depth, activation_groups, as_run
from elixir_compile.step.as_run import given_storages, saved_storages
from tests.pure.mixes import layers_of, mixed_graphs
from tests.pure.steps import GELU, LAYERS


def test_classes_of_two_layers() -> None:
    """h.0: a0 is a matrix product of the input, g0 pointwise from a0. h.1: a1 is a matrix product of r0, which the
    backward of h.1 reads first; g1 is pointwise, t1 an attention kernel, m1 random. r0 is made of h.0's g0, and with
    all of h.0 gone from n0 (8 bytes for 16), so that n0 is what to keep where h.1 is recomputed whole."""
    found = {group.id: group for group in activation_groups(LAYERS)}
    assert [(group.id, group.storages, group.nbytes) for group in found.values()] == [
        ("h.0.matmul", ("a0",), 64),
        ("h.0.pointwise", ("g0",), 32),
        ("h.1.input", ("n0",), 8),
        ("h.1.fixed", ("r0",), 16),
        ("h.1.matmul", ("a1",), 64),
        ("h.1.pointwise", ("g1",), 32),
        ("h.1.attention", ("t1",), 16),
        ("h.1.kept", ("m1",), 4),
    ]
    assert [group.depth for group in found.values()] == [
        Depth.MATMUL,
        Depth.POINTWISE,
        Depth.KEPT,
        Depth.FIXED,
        Depth.MATMUL,
        Depth.POINTWISE,
        Depth.ATTENTION,
        Depth.KEPT,
    ]
    assert [group.layer for group in found.values()] == ["h.0"] * 2 + ["h.1"] * 6
    assert [group.id for group in found.values() if group.is_input] == ["h.1.input"]


def test_inputs_as_large_as_the_activations_are_no_group() -> None:
    """n0 as large as r0: to keep the one for the other saves no bytes, so r0 is never made again."""
    storages = tuple(replace(s, nbytes=16) if s.id == "n0" else s for s in LAYERS.storages)
    found = {group.id: group for group in activation_groups(replace(LAYERS, storages=storages))}
    assert "h.1.input" not in found
    assert "h.1.fixed" not in found
    assert set(found["h.1.kept"].storages) == {"r0", "m1"}


def test_a_buffer_overwritten_by_a_layer_is_not_an_input_group() -> None:
    """h.0 counts in `b`, 4 bytes that are there during the whole step, and r0 is made of n0 and `b`: n0 is what to
    keep where h.1 is recomputed whole."""
    counter = Storage(id=StorageId("b"), nbytes=4, kind=Kind.BUFFER, dtype="float32")
    count = Op(
        id=OpId("fwd.count_0"), target="aten.add_", phase=Phase.FORWARD, reads=(counter.id,), writes=(counter.id,),
        module="h.0", once=True,
    )  # fmt: skip
    ops = [replace(op, reads=(*op.reads, counter.id)) if op.id == "fwd.add_0" else op for op in LAYERS.ops]
    graph = replace(LAYERS, ops=(count, *ops), storages=(*LAYERS.storages, counter))
    assert [group.storages for group in activation_groups(graph) if group.is_input] == [("n0",)]


def test_a_model_without_layers_is_a_single_layer() -> None:
    assert [(group.id, group.storages) for group in activation_groups(GELU)] == [
        ("step.matmul", ("h",)),
        ("step.pointwise", ("g",)),
    ]


@given(mixed_graphs())
def test_every_saved_storage_is_in_a_single_group(graph: StepGraph) -> None:
    groups = activation_groups(graph)
    listed = [name for group in groups if not group.is_input for name in group.storages]
    assert len(listed) == len(set(listed))
    assert set(listed) == saved_storages(graph) - set(graph.outputs)
    assert len({group.id for group in groups}) == len(groups)
    extra = {name for group in groups if group.is_input for name in group.storages}
    made = {name for op in graph.ops if op.phase is Phase.FORWARD for name in op.writes}
    assert extra <= made - saved_storages(graph) - given_storages(graph) - set(graph.outputs)


@given(mixed_graphs().flatmap(lambda graph: layers_of(graph).map(lambda found: (graph, found))))
def test_every_layer_can_be_recomputed_to_every_depth(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    graph, activations = found
    assert len(as_run(graph, activations).ops) >= len(graph.ops)
