"""`absent`: a parameter of other ranks is in the step as if this one read it, with a gradient of zeros."""

import torch
from torch import fx, nn

from elixir_compile.graph.capture.additions import trained_keys, with_absent
from elixir_compile.graph.capture.convert import Captured, step_graph
from elixir_compile.graph.ops.registry import Slot, slot_by_key
from elixir_compile.ir import Kind, Phase, StepGraph
from tests.fx.captures import Pair, record_of


class WithUnused(Pair):
    """A pair of layers, and two that its forward leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 2)
        self.unread = nn.Linear(3, 2)


def captured_and_slots() -> tuple[Captured, dict[str, Slot]]:
    captured = record_of(WithUnused(), torch.randn(3, 4)).active.captured
    executor = slot_by_key(next(iter(captured.param_names))).sink
    return captured, executor.slots


def joined() -> tuple[Captured, Captured, StepGraph, StepGraph]:
    """The capture before and after `read` was put in, its weight trained, and the steps of both."""
    captured, slots = captured_and_slots()
    read, trained = [slots["read.weight"], slots["read.bias"], slots["up.weight"]], [slots["read.weight"]]
    joint = with_absent(captured, read, trained)
    return captured, joint, step_graph(captured, {}), step_graph(joint, {})


def nodes_of(half: fx.GraphModule) -> list[str]:
    return [node.format_node() for node in half.graph.nodes]


def test_parameters_of_other_ranks_are_in_the_step() -> None:
    _, _, before, after = joined()
    params = {storage.id: storage.nbytes for storage in after.storages if storage.kind is Kind.PARAM}
    own = {storage.id: storage.nbytes for storage in before.storages if storage.kind is Kind.PARAM}
    assert params == {**own, "read.weight": 32, "read.bias": 8}


def test_zero_gradients_are_added_behind_all_other_ops() -> None:
    _, _, before, after = joined()
    forward, backward = ([op.id for op in before.ops if op.phase is phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert [op.id for op in after.ops if op.phase is Phase.FORWARD] == forward
    *others, zeros = [op for op in after.ops if op.phase is Phase.BACKWARD]
    assert [op.id for op in others] == backward
    assert (zeros.reads, len(zeros.writes)) == ((), 1)
    made = next(storage for storage in after.storages if storage.id == zeros.writes[0])
    assert (made.kind, made.of, made.nbytes) == (Kind.GRAD, "read.weight", 32)


def test_zero_gradients_have_the_full_shape_of_the_parameter() -> None:
    _, joint, _, _ = joined()
    (node,) = joint.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)[-1:]
    made = node.target(*node.args, **node.kwargs)
    assert torch.equal(made, torch.zeros(2, 4))
    assert (node.meta["val"].shape, node.meta["val"].dtype) == (made.shape, made.dtype)


def test_the_capture_stays_as_it_was() -> None:
    captured, slots = captured_and_slots()
    before = [nodes_of(captured.forward), nodes_of(captured.backward), dict(captured.param_names)]
    joint = with_absent(captured, [slots["read.weight"]], [slots["read.weight"], slots["up.weight"]])
    assert [nodes_of(captured.forward), nodes_of(captured.backward), dict(captured.param_names)] == before
    assert trained_keys(joint) - trained_keys(captured) == {slots["read.weight"].key}


def test_a_capture_without_absent_parameters_is_unchanged() -> None:
    captured, slots = captured_and_slots()
    own = [slots[name] for name in captured.param_names.values()]
    joint = with_absent(captured, own, own)
    assert nodes_of(joint.forward) == nodes_of(captured.forward)
    assert nodes_of(joint.backward) == nodes_of(captured.backward)
    assert joint.param_names == captured.param_names
