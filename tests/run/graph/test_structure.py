"""Models whose parameters are shared, frozen, unused or read behind the compiler's back, and the gathers of all."""

import copy
import logging
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import elixir_compile as elixir
from elixir_compile.graph.capture import rewire
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.graph.ops.gather import GATHER, REDUCE
from elixir_compile.ir import Kind
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.session import backend as front_end
from tests.run.models import WIDTH, Adapted, Block, ShortStack, Stack, Tied, seeded, tokens, vectors
from tests.run.training import (
    assert_offloads,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_elixir_unprepared,
    by_torch,
    loss_of,
    on_host,
    tight_bytes,
)

# ----------------------------------------------------------------------------------------------------------------------
# Models whose parameters are shared, frozen, unused, or read behind the compiler's back.


def test_tied_weights_are_one_parameter_with_summed_gradients() -> None:
    model, batches = seeded(Tied), tokens()
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)
    own = got.model
    assert own._modules["head"]._parameters["weight"] is own._modules["embed"]._parameters["weight"]
    record = elixir.compilations(own)[0]
    params = [name for bucket in record.plan.buckets for name in bucket.params]
    assert params.count("embed.weight") == 1
    assert "head.weight" not in params
    loaded = seeded(Tied)
    loaded.load_state_dict(own.state_dict())
    assert_same_tensors(own.state_dict(), loaded.state_dict())
    assert loaded.head.weight is loaded.embed.weight


def test_frozen_parameters_have_no_gradient_and_no_optimizer_bytes() -> None:
    model = seeded(lambda: nn.Sequential(*(Adapted() for _ in range(4)), Mean()))
    batches = vectors()
    expected = by_torch(model, optimizer=trainable_only).train(batches)
    budget = tight_bytes(model, batches[0], optimizer=hybrid_trainable_only)
    got = by_elixir(model, optimizer=hybrid_trainable_only, device_memory=budget).train(batches)
    assert_offloads(got)
    assert_same(expected, got)
    record = elixir.compilations(got.model)[0]
    frozen = [bucket for bucket in record.plan.buckets if not bucket.trainable]
    assert {name for bucket in frozen for name in bucket.params} == {
        f"{layer}.base.{kind}" for layer in range(4) for kind in ("weight", "bias")
    }
    assert all(bucket.state_nbytes == 0 for bucket in frozen)
    trained = {storage.of for storage in record.graph.storages if storage.kind is Kind.GRAD}
    assert trained == {f"{layer}.{kind}.weight" for layer in range(4) for kind in ("down", "up")}
    assert all(param.grad is None for name, param in got.model.named_parameters() if ".base." in name)


class Mean(nn.Module):
    """Squares and averages: a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def trainable_only(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-2, fused=True)


def hybrid_trainable_only(params: object) -> torch.optim.Optimizer:
    return elixir.HybridAdamW([p for p in params if p.requires_grad], lr=1e-2)


class WithUnused(ShortStack):
    """A stack with a layer that the forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


def test_an_unused_parameter_keeps_no_gradient_and_its_value() -> None:
    model, batches = seeded(WithUnused), vectors()
    seen: list[object] = []

    def step(compiled: Callable, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        seen.append([param.grad is None for param in optimizer.param_groups[0]["params"]])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    expected = by_torch(model).train(batches, step)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches, step)
    assert_offloads(got)
    assert_same(expected, got)
    assert seen[:3] == seen[3:]
    assert seen[0].count(True) == 2


class Twice(ShortStack):
    """A stack that runs its blocks twice."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(super().features(x))


class Checkpointed(ShortStack):
    """A stack whose blocks are recomputed in the backward, as the user asks."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Normalized(nn.Module):
    """Convolutions with batch statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(x.shape[0], 16, -1)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("make", [Twice, Checkpointed, Normalized])
def test_models_of_each_structure_train_as_in_torch(make: type[nn.Module]) -> None:
    model, batches = seeded(make), vectors()
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


class Dropping(ShortStack):
    """A stack with dropout before its head."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3, self.training)
        return self.head(x)


def test_dropout_draws_the_same_numbers() -> None:
    model, batches = seeded(Dropping), vectors()
    budget = tight_bytes(model, batches[0])
    torch.manual_seed(7)
    expected = by_torch(model).train(batches)
    torch.manual_seed(7)
    got = by_elixir(model, device_memory=budget).train(batches)
    assert_offloads(got)
    assert_same(expected, got)
    torch.manual_seed(8)
    assert by_torch(model).train(batches).losses != expected.losses


class Broken(Stack):
    """A stack with a graph break in the middle."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        torch._dynamo.graph_break()  # the break
        return self.head(self.blocks[3](self.blocks[2](x)))


@pytest.mark.parametrize("start", [by_elixir_unprepared, pytest.param(by_elixir, marks=pytest.mark.slow)])
def test_a_graph_break_trains_and_is_logged(start: Callable, caplog: pytest.LogCaptureFixture) -> None:
    model, batches = seeded(Broken), vectors()
    expected = by_torch(model).train(batches)
    budget = tight_bytes(model, batches[0])
    caplog.set_level(logging.INFO, logger="elixir_compile")
    got = start(model, device_memory=budget).train(batches)
    assert_offloads(got)
    assert_same(expected, got)
    assert len(elixir.compilations(got.model)) == 2
    said = [record.getMessage() for record in caplog.records if "graph break" in record.getMessage()]
    with open(__file__, encoding="utf-8") as source:
        line = next(number for number, text in enumerate(source, 1) if "# the break" in text)
    assert any(f"{__file__}:{line}" in message for message in said)


class Recurrent(nn.Module):
    """An LSTM, which reads its weights as one flat list and which Dynamo does not trace, before a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.special = nn.LSTM(16, 16, batch_first=True)
        self.stack = Stack(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(self.special(x.view(x.shape[0], -1, 16))[0])


class Attending(nn.Module):
    """torch's own attention module, whose output layer is read from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.special = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(x.shape[0], -1, 16)
        return self.head(self.special(x, x, x)[0]).square().mean()


class Listed(nn.Module):
    """Parameters in a list that indexes them."""

    def __init__(self) -> None:
        super().__init__()
        self.special = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.special:
            x = torch.tanh(x @ weight)
        return self.head(x).square().mean()


class WeightNormed(nn.Module):
    """A weight computed from two parameters of a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.special = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.special(x))).square().mean()


@pytest.mark.parametrize("make", [Recurrent, Attending, Listed, WeightNormed])
def test_modules_that_read_parameters_directly_train(make: type[nn.Module]) -> None:
    model, batches = seeded(make), vectors()
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)
    whole = model_of(got.model).unmanaged_because
    assert not set(whole) & set(on_host(got))
    assert all(reason for reason in whole.values())
    if make in (Recurrent, Listed):
        assert {name for name, _ in got.model.named_parameters() if "special" in name} == set(whole)


def test_nothing_keeps_a_dropped_model_alive() -> None:
    model, batches = seeded(Stack), vectors(1)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    executor = weakref.ref(executor_of(got.model))
    parameter = weakref.ref(next(got.model.parameters()))
    assert executor() is not None
    del got
    torch._dynamo.reset()
    import gc

    gc.collect()
    assert executor() is None
    assert parameter() is None


def test_one_module_in_two_places_is_prepared_once() -> None:
    shared = seeded(Block)
    model, batches = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared, Mean()), vectors()
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


# ----------------------------------------------------------------------------------------------------------------------
# `graph.capture.rewire.gathers_to_inputs`: AOTAutograd traces no gather, and no output of a step is made from a
# handle.


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


class CheckpointedProduct(_Product):
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
@pytest.mark.parametrize("kind", [Plain, CheckpointedProduct])
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
