"""Lives of the storages of graphs small enough to read."""

from hypothesis import given

from elixir_compile.ir import Op, OpId, Phase, StepGraph, Storage, StorageId
from elixir_compile.ir.kinds import Kind
from elixir_compile.step import liveness
from tests.pure.strategies import Layer, chain, step_graphs


def lives_of(graph: StepGraph) -> dict[str, tuple[int, int]]:
    return {name: (life.first, life.last) for name, life in liveness(graph).lives.items()}


def test_a_two_layer_step() -> None:
    """Forward: 0 mm(x w0)->t0, 1 relu(t0)->s0, 2 mm(s0 w1)->t1, 3 relu(t1)->out. Backward: 4 mm(s0 tangent)->w1.grad,
    5 mm(tangent w1)->d1, 6 mm(x d1)->w0.grad, 7 mm(d1 w0)->d0, 8 update. The last forward op writes the output."""
    graph = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
    assert lives_of(graph) == {
        "x": (0, 8),
        "w0": (0, 8),
        "t0": (0, 1),
        "s0": (1, 4),
        "w1": (0, 8),
        "t1": (2, 3),
        "out": (3, 3),
        "tangent": (0, 8),
        "w1.grad": (4, 8),
        "d1": (5, 7),
        "w0.grad": (6, 8),
        "d0": (7, 7),
    }


def test_outputs_live_through_the_forward_untouched_storages_never() -> None:
    """`early` is written at op 0 and handed to the caller, so it lives until op 2, the last of the forward; `late` is
    written twice; `idle` is touched by nothing; a buffer lives throughout."""
    names = {"early": Kind.TEMP, "late": Kind.TEMP, "idle": Kind.TEMP, "buffer": Kind.BUFFER}
    storages = tuple(Storage(id=StorageId(n), nbytes=1, kind=k, dtype="float32") for n, k in names.items())
    touched = [("early", Phase.FORWARD), ("late", Phase.FORWARD), ("late", Phase.FORWARD), ("buffer", Phase.BACKWARD)]
    ops = tuple(
        Op(id=OpId(f"op{n}"), target="aten.mm", phase=phase, reads=(), writes=(StorageId(name),))
        for n, (name, phase) in enumerate(touched)
    )
    graph = StepGraph(name="g", ops=ops, storages=storages, outputs=(StorageId("early"), StorageId("idle")))
    assert lives_of(graph) == {"early": (0, 2), "late": (1, 2), "buffer": (0, 3)}


@given(step_graphs())
def test_every_op_finds_its_storages_live(graph: StepGraph) -> None:
    lives = liveness(graph).lives
    for index, op in enumerate(graph.ops):
        assert all(lives[name].first <= index <= lives[name].last for name in (*op.reads, *op.writes))
