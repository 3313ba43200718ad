"""Functions of torch whose graphs are kept apart from the graph that calls them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elixir_compile as elixir
from tests.run import calling_models
from tests.run.habits.habit import habit
from tests.run.habits.same import BUDGETS, assert_trains_as_eager, compiled, eager
from tests.run.habits.stories import BATCHES, WIDTH
from tests.run.training import Run, assert_same, by_elixir, fused_adamw

region = torch.compiler.nested_compile_region


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Layers(nn.Module):
    """Calls `layer(block, i, x)` for each of `num_blocks` blocks of two linear layers; returns the loss."""

    def __init__(self, layer: Callable[..., torch.Tensor], num_blocks: int = 3) -> None:
        super().__init__()
        self.layer = layer
        self.blocks = nn.ModuleList(two_layers() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = self.layer(block, index, x)
        return x.square().mean()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def step(run: Run, batch: torch.Tensor) -> torch.Tensor:
    loss = run.compiled(batch)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


@region
def residual(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + block(x)


@region
def dropped(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + functional.dropout(block(x), 0.5)


@region
def outer(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return residual(block, x) * 0.5


@region
def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + checkpoint(block, x, use_reentrant=False)


@region
def two_results(block: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
    y = block(x)
    return y, None, y.sum(1, keepdim=True)


@region
def branching(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda t: t + block(t), lambda t: t - block(t), (x,))


@region
def in_place(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x).add_(x)


def taking_both(block: nn.Module, index: int, x: torch.Tensor) -> torch.Tensor:
    y, _, total = two_results(block, x)
    return x + y * total


def without_gradients(block: nn.Module, index: int, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = residual(block, x)
    return x + 0.1 * scale * residual(block, x)


def broken(block: nn.Module, index: int, x: torch.Tensor) -> torch.Tensor:
    x = residual(block, x)
    torch._dynamo.graph_break()
    return x


def shared_first(block: nn.Module, index: int, x: torch.Tensor) -> torch.Tensor:
    return residual(block, residual(block, x))


REGIONS: dict[str, Callable[..., torch.Tensor]] = {
    "a free function": lambda block, index, x: residual(block, x),
    "one block twice": shared_first,
    "dropout": lambda block, index, x: dropped(block, x),
    "a region in a region": lambda block, index, x: outer(block, x),
    "in a checkpoint": lambda block, index, x: checkpoint(residual, block, x, use_reentrant=False),
    "around a checkpoint": lambda block, index, x: checkpointed(block, x),
    "several results": taking_both,
    "around a branch": lambda block, index, x: branching(block, x),
    "a result written in place": lambda block, index, x: in_place(block, x),
    "without gradients, then with": without_gradients,
    "graph breaks between": broken,
}


@habit("Layers under `torch.compiler.nested_compile_region`: functions, in each other, in a checkpoint", area="Modules")
@pytest.mark.parametrize("name", REGIONS)
def test_nested_regions(name: str) -> None:
    assert_trains_as_eager(seeded(lambda: Layers(REGIONS[name])), step, BATCHES[:2], budget="offload")


class Marked(nn.Module):
    """Two linear layers whose forward is a nested region."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = two_layers()

    @region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


class Deep(nn.Module):
    """Ten marked layers, more than Dynamo keeps graphs of; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Marked() for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@habit("`nested_compile_region` on the forward of ten layers, batches of other lengths", area="Modules")
@pytest.mark.parametrize("budget", BUDGETS)
def test_many_marked_layers(budget: str) -> None:
    batches = [BATCHES[0], BATCHES[1], torch.cat(BATCHES[2:4]), torch.cat(BATCHES[3:6])]
    assert_trains_as_eager(seeded(Deep), step, batches, budget=budget)


def test_ops_of_marked_layers_belong_to_their_layers() -> None:
    """Dynamo traces two of the layers, and lets the others run the graph of the second."""
    run = compiled(seeded(Deep), BUDGETS["free"])
    run.compiled(BATCHES[0])
    (record,) = elixir.compilations(run.model)
    modules = {op.module for op in record.graph.ops if op.target == "aten.gelu.default"}
    assert modules == {f"layers.{index}.inside.1" for index in range(10)}


CALLS = (
    calling_models.branch,
    calling_models.branch_not_taken,
    calling_models.branches_in_turn,
    pytest.param(calling_models.branch_not_taken_in_scan, marks=pytest.mark.slow),
    calling_models.scan_of_weights,
    calling_models.branch_in_scan,
    calling_models.loop,
    calling_models.associative,
)


def eager_every_second_step(run: Run, batch: torch.Tensor) -> torch.Tensor:
    """Train a step, of which the odd ones call the model itself, as code after a graph break does."""
    is_compiled = len(run.losses) % 2 == 0
    loss = (run.compiled if is_compiled else run.model)(batch)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


@habit("`torch.cond`, `map`, `scan`, `while_loop`, `associative_scan`, compiled and in eager code", area="Modules")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_functions_that_run_graphs(call: Callable[..., torch.Tensor]) -> None:
    batches = [calling_models.batch(seed) for seed in range(2)]
    assert_trains_as_eager(calling_models.seeded(call), eager_every_second_step, batches, budget="offload")


def test_rows_of_an_eager_map() -> None:
    """The gradient of a prepared model is added up row by row, and otherwise over all rows: their rounding differs."""
    expected, got = calling_models.seeded(calling_models.each_row), calling_models.seeded(calling_models.each_row)
    for model in (expected, elixir.prepare(got)):
        model(calling_models.batch()).backward()
    for one, other in zip(expected.parameters(), got.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7)


class Inside(nn.Module):
    """A model whose parameters are all read inside of the graphs that `call` runs; returns the loss."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner = calling_models.seeded(call)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.call(self.inner, x).square().mean()


ALL_INSIDE = (
    calling_models.branch,
    calling_models.branch_not_taken,
    calling_models.branch_in_branch,
    calling_models.scan_of_weights,
    calling_models.branch_in_scan,
)


@habit(
    "A prepared model whose parameters are read by branches and loops alone, also by those not taken", area="Modules"
)
@pytest.mark.parametrize(
    "call", [*ALL_INSIDE[:2], *(pytest.param(call, marks=pytest.mark.slow) for call in ALL_INSIDE[2:])]
)
def test_parameters_of_bodies_alone(call: Callable[..., torch.Tensor]) -> None:
    batches = [calling_models.batch(seed) for seed in range(2)]
    model = Inside(call)
    expected, got = eager(model), by_elixir(model, optimizer=fused_adamw, **BUDGETS["offload"])
    for run in (expected, got):
        run.losses += [step(run, batch).detach().clone() for batch in batches]
    assert_same(expected, got)
    (record,) = elixir.compilations(got.model)
    assert record.plan is not None
    assert any("inner.up.weight" in bucket.params for bucket in record.plan.buckets)
