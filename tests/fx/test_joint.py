"""`graph.capture.joint`: gathers leave the joint graph before it is partitioned, and come back as markers."""

import torch
from torch import fx, nn

from elixir_compile.graph.capture.convert import ops_of
from elixir_compile.graph.capture.markers import TICKET, gradient, parameter, ticket
from elixir_compile.graph.ops.gather import GATHER, REDUCE
from tests.fx.captures import Pair, Shared, halves_of_torch, record_of


def targets(half: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in ops_of(half.graph)]


def markers(half: fx.GraphModule, marker: object) -> list[fx.Node]:
    return half.graph.find_nodes(op="call_function", target=marker)


def test_forward_and_backward_equal_torch_op_for_op() -> None:
    x = torch.randn(3, 4)
    forward, backward = halves_of_torch(Pair(), x)
    torch.compiler.reset()
    captured = record_of(Pair(), x).active.captured
    assert targets(captured.forward) == targets(forward)
    assert targets(captured.backward) == targets(backward)


def test_no_gather_and_no_reduce_is_left() -> None:
    captured = record_of(Pair(), torch.randn(3, 4)).active.captured
    for half in (captured.forward, captured.backward):
        assert not markers(half, GATHER)
        assert not markers(half, REDUCE)
    assert len(markers(captured.forward, parameter)) == 4
    assert len(markers(captured.backward, gradient)) == 4


def test_no_parameter_and_no_view_of_one_is_saved() -> None:
    captured = record_of(Pair(), torch.randn(3, 4)).active.captured
    saved = captured.forward.graph.output_node().args[0][captured.num_outputs :]
    sources = {id(source) for node in markers(captured.forward, parameter) for source in (node, *node.users)}
    views = [node for node in saved if id(node) in sources and getattr(node.target, "is_view", False)]
    assert views == []
    assert not any(node.target is parameter for node in saved)


def test_the_ticket_is_saved_first_and_names_the_backward_parameters() -> None:
    captured = record_of(Pair(), torch.randn(3, 4)).active.captured
    stamp = captured.forward.graph.output_node().args[0][captured.num_outputs]
    assert stamp.target is ticket
    names = [captured.param_names[key] for key in stamp.args[0]]
    assert names == ["down.weight"]  # the gradient of the input needs it; that of `up` needs only activations
    assert TICKET in [node.target for node in captured.backward.graph.find_nodes(op="placeholder")]


def test_a_tied_weight_is_one_parameter_with_a_gradient_from_each_use() -> None:
    captured = record_of(Shared(), torch.randint(0, 6, (2, 3))).active.captured
    assert list(captured.param_names.values()) == ["embed.weight"]
    assert len(markers(captured.forward, parameter)) == 1
    assert [node.args[1] for node in markers(captured.backward, gradient)] == list(captured.param_names) * 2


class TwoBiases(nn.Module):
    """The gradient of both parameters is one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.a + self.b).sin().sum()


def test_gradients_never_share_memory() -> None:
    model = TwoBiases()
    captured = record_of(model, torch.randn(3)).active.captured
    values = [node.args[0] for node in markers(captured.backward, gradient)]
    assert len(values) == len(set(values)) == 2
    assert torch.equal(model.a.grad, model.b.grad)
    assert model.a.grad.data_ptr() != model.b.grad.data_ptr()
