"""`graph.capture.rewire.gathers_to_inputs`: AOTAutograd traces no gather, and no output of a step is made from a
handle."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx, nn

import elixir_compile as elixir
from elixir_compile.graph.capture import rewire
from elixir_compile.graph.ops.gather import GATHER, REDUCE
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.session import backend as front_end


class _Product(nn.Module):
    """Two matrices; `first` is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 4))
        self.second = nn.Parameter(torch.randn(4, 3))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first @ self.second @ self.first).square().mean()


class Plain(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.loss(x),)


class HandsOutItself(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(x), self.first


class HandsOutViews(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.loss(x), self.first.t(), self.first.detach()[0]


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weight: torch.Tensor) -> torch.Tensor:
        return weight.view(-1)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad.view(3, 4)


class HandsOutViewOfFunction(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(x), _Flat.apply(self.first)


class HandsOutViewOfCheckpoint(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x @ self.first).sin(), self.first.t()

        hidden, view = torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False)
        return hidden.sum(), view


class Checkpointed(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.utils.checkpoint.checkpoint(self.loss, x, use_reentrant=False),)


class Autocast(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (self.loss(x),)


class ReadsTheShape(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.sin().sum() + torch.zeros_like(self.first).sum(),)


class ReadsForNothing(_Product):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        self.first.sin()
        return (x.sin().sum(),)


def compiled(model: nn.Module, *, is_prepared: bool = False, **options: object) -> Callable:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "report": False, **options}
    return torch.compile(elixir.prepare(model) if is_prepared else model, backend="elixir", options=options)


def assert_steps_equal(model: nn.Module, *, is_prepared: bool) -> None:
    """Two training steps and an evaluation give the bits of torch, without a compiler where that rounds alike."""
    expected = copy.deepcopy(model)
    got_of, expected_of = compiled(model, is_prepared=is_prepared), expected
    if isinstance(model, Autocast):  # eager autocast casts a weight once for several uses, and rounds their sum once
        expected_of = torch.compile(expected, backend="aot_eager")
    for seed in range(2):
        inputs = [torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_() for _ in range(2)]
        got, wanted = got_of(inputs[0]), expected_of(inputs[1])
        got[0].backward()
        wanted[0].backward()
        assert all(map(torch.equal, got, wanted))
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        assert all(map(torch.equal, got_of(inputs[0]), expected_of(inputs[0])))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        HandsOutItself,
        HandsOutViews,
        HandsOutViewOfFunction,
        HandsOutViewOfCheckpoint,
        Autocast,
        ReadsTheShape,
        ReadsForNothing,
    ],
)
def test_steps_with_parameter_inputs_equal_steps_of_torch(kind: type[nn.Module], is_prepared: bool) -> None:
    assert_steps_equal(kind(), is_prepared=is_prepared)


def test_code_without_parameters_is_compiled_for_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[torch.Size, torch.Size]] = []
    lower_plain = RegionCompiler.lower_plain

    def look(self: RegionCompiler, gm: fx.GraphModule, examples: Sequence[torch.Tensor], **options: object) -> object:
        placeholders = gm.graph.find_nodes(op="placeholder")
        shapes.extend(
            (node.meta["val"].shape, example.shape) for node, example in zip(placeholders, examples, strict=True)
        )
        return lower_plain(self, gm, examples, **options)

    monkeypatch.setattr(RegionCompiler, "lower_plain", look)
    x = torch.randn(2, 3)
    with torch.no_grad():
        compiled(ReadsForNothing(), is_prepared=True)(x)
    assert sorted(shapes) == [((1,), (1,)), ((2, 3), (2, 3))]


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("kind", [Plain, Checkpointed])
def test_a_host_parameter_gets_the_gradient_of_each_of_its_reads(kind: type[nn.Module], is_prepared: bool) -> None:
    model, x = kind(), torch.randn(2, 3)
    expected = copy.deepcopy(model)
    with pytest.raises(elixir.NoFeasiblePlan) as refused:
        compiled(copy.deepcopy(model), is_prepared=is_prepared, device_memory=1)(x)
    compiled(model, is_prepared=is_prepared, device_memory=refused.value.needed_bytes)(x)[0].backward()
    expected(x)[0].backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def joints_of(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *, is_prepared: bool) -> list[fx.Graph]:
    """Return the joint graphs that AOTAutograd made of one step of `model`, as they were before they were split."""
    found: list[fx.Graph] = []
    partition = front_end.partition_hidden

    def look(joint: fx.GraphModule, *args: object, **options: object) -> object:
        copied = fx.Graph()
        copied.graph_copy(joint.graph, {})
        found.append(copied)
        return partition(joint, *args, **options)

    monkeypatch.setattr(front_end, "partition_hidden", look)
    compiled(model, is_prepared=is_prepared)(torch.randn(2, 3))
    return found


@pytest.mark.parametrize("is_prepared", [False, True])
def test_no_gather_is_traced(monkeypatch: pytest.MonkeyPatch, is_prepared: bool) -> None:
    (graph,) = joints_of(monkeypatch, Plain(), is_prepared=is_prepared)
    assert not [node for node in graph.nodes if node.target in (GATHER, REDUCE)]


def test_only_parameters_in_memory_of_an_output_stay_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    (graph,) = joints_of(monkeypatch, HandsOutViews(), is_prepared=False)
    sizes = {tuple(node.args[1]) for node in graph.find_nodes(op="call_function", target=GATHER)}
    assert sizes == {(3, 4)}


def test_an_output_that_is_a_view_unseen_in_the_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewire, "storages_of", lambda node: set())
    model = HandsOutViews()
    with pytest.raises(elixir.UnsupportedModel, match=r"first.*view of it"):
        compiled(model)(torch.randn(2, 3))
    assert type(model) is HandsOutViews
