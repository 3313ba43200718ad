"""Function transforms of torch, and functions whose graphs are kept apart from the graph that calls them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elixir_compile as elixir
from elixir_compile.compat import unwrapped
from tests.run import models
from tests.run.habits.habit import habit
from tests.run.habits.stories import BATCHES, BUDGETS, WIDTH, assert_trains_as_eager, compiled, eager
from tests.run.training import Run, assert_same, by_elixir, fused_adamw

# ----------------------------------------------------------------------------------------------------------------------
# Function transforms of torch inside of a compiled forward: `vmap`, `grad`, `jvp`, `vjp`, `jacrev`, and more.


OPTIONS: dict[str, Any] = {"inner": "aot_eager", "report": False, "plan_cache": False, "planner": "zero3_offload"}
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def jvp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return func.jvp(lambda z: model.layer(z).sin(), (x,), (torch.ones_like(x),))[1].square().mean()


def vjp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result, pull = func.vjp(lambda z: model.layer(z).sin(), x)
    return pull(result)[0].square().mean()


FORWARDS: dict[str, Forward] = {
    "vmap": lambda model, x: torch.vmap(lambda row: model.layer(row).sin())(x).square().mean(),
    "vmap in vmap": lambda model, x: torch.vmap(torch.vmap(lambda row: model.layer(row).sin()))(x[None]).mean(),
    "ensemble": lambda model, x: torch.vmap(lambda w: torch.tanh(x @ w))(model.stack).square().mean(),
    "grad": lambda model, x: func.vmap(func.grad(lambda row: model.layer(row).sin().sum()))(x).square().mean(),
    "jvp": jvp,
    "vjp": vjp,
    "jacrev": lambda model, x: func.vmap(func.jacrev(lambda row: model.layer(row).sin()))(x).square().mean(),
    "jacfwd": lambda model, x: func.vmap(func.jacfwd(lambda row: model.layer(row).sin()))(x).square().mean(),
    "hessian": lambda model, x: func.hessian(lambda row: model.layer(row).sin().sum())(x[0]).square().mean(),
}


class Transformed(nn.Module):
    """A linear layer and a stack of matrices, read by the forward called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.stack = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)
        self.forward_of = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORWARDS[self.forward_of](self, x) + self.layer(x).mean() + self.stack.mean()


@habit("`vmap`, `torch.func.grad`, `jvp`, `vjp`, `jacrev`, `jacfwd`, `hessian` in a forward; ensembles", area="Modules")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # by forward mode of torch itself
@pytest.mark.parametrize("name", FORWARDS)
def test_a_function_transform_trains_as_by_torch(name: str) -> None:
    torch.manual_seed(0)
    models = [Transformed(name)]
    models.append(copy.deepcopy(models[0]))
    losses = []
    for model, backend, given in zip(models, ("aot_eager", "elixir"), (None, OPTIONS), strict=True):
        torch._dynamo.reset()
        step, optimizer = torch.compile(model, backend=backend, options=given), torch.optim.SGD(model.parameters(), 0.1)
        for seed in range(2):
            loss = step(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own.cpu(), other.cpu())


class Counting(nn.Module):
    """Writes a parameter within `vmap`, or reads it there after a write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def row(weight: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.seen.add_(1)
            return weight.sin() * self.seen

        return torch.vmap(row)(self.layer(x)).square().mean()


def test_a_parameter_that_a_transform_writes_is_written() -> None:
    torch.manual_seed(0)
    models = [Counting()]
    models.append(copy.deepcopy(models[0]))
    losses = []
    for model, backend, given in zip(models, ("aot_eager", "elixir"), (None, OPTIONS), strict=True):
        torch._dynamo.reset()
        step = torch.compile(model, backend=backend, options=given)
        for _ in range(2):
            losses.append(step(torch.ones(4, WIDTH)))
            losses[-1].backward()
    assert losses[:2] == losses[2:]
    assert models[0].seen[0] == models[1].seen[0] == 2


def test_wrappers_of_all_levels_come_off() -> None:
    x, seen = torch.randn(3, 4, 5), []

    def note(inner: torch.Tensor) -> torch.Tensor:
        seen.append(unwrapped(inner))
        return inner.sum()

    torch.vmap(torch.vmap(func.grad(note)))(x)
    assert seen[0].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert unwrapped(x) is x
    assert unwrapped("x") == "x"


# ----------------------------------------------------------------------------------------------------------------------
# Functions of torch whose graphs are kept apart from the graph that calls them.


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
@pytest.mark.parametrize("budget", [pytest.param("free", marks=pytest.mark.slow), "offload"])
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
    # `test_parameters_of_bodies_alone` has the first two, each alone in a model; the third has a branch that some steps
    # take beside one with parameters both ways.
    pytest.param(models.branch, marks=pytest.mark.slow),
    pytest.param(models.branch_not_taken, marks=pytest.mark.slow),
    models.branches_in_turn,
    pytest.param(models.branch_not_taken_in_scan, marks=pytest.mark.slow),
    models.scan_of_weights,
    pytest.param(models.branch_in_scan, marks=pytest.mark.slow),
    models.loop,
    models.associative,
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
    batches = [models.batch(seed) for seed in range(2)]
    assert_trains_as_eager(models.seeded_call(call), eager_every_second_step, batches, budget="offload")


def test_rows_of_an_eager_map() -> None:
    """The gradient of a prepared model is added up row by row, and otherwise over all rows: their rounding differs."""
    expected, got = models.seeded_call(models.each_row), models.seeded_call(models.each_row)
    for model in (expected, elixir.prepare(got)):
        model(models.batch()).backward()
    for one, other in zip(expected.parameters(), got.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7)


class Inside(nn.Module):
    """A model whose parameters are all read inside of the graphs that `call` runs; returns the loss."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner = models.seeded_call(call)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.call(self.inner, x).square().mean()


ALL_INSIDE = (
    models.branch,
    models.branch_not_taken,
    models.branch_in_branch,
    models.scan_of_weights,
    models.branch_in_scan,
)


@habit(
    "A prepared model whose parameters are read by branches and loops alone, also by those not taken", area="Modules"
)
@pytest.mark.parametrize(
    "call", [*ALL_INSIDE[:2], *(pytest.param(call, marks=pytest.mark.slow) for call in ALL_INSIDE[2:])]
)
def test_parameters_of_bodies_alone(call: Callable[..., torch.Tensor]) -> None:
    batches = [models.batch(seed) for seed in range(2)]
    model = Inside(call)
    expected, got = eager(model), by_elixir(model, optimizer=fused_adamw, **BUDGETS["offload"])
    for run in (expected, got):
        run.losses += [step(run, batch).detach().clone() for batch in batches]
    assert_same(expected, got)
    (record,) = elixir.compilations(got.model)
    assert record.plan is not None
    assert any("inner.up.weight" in bucket.params for bucket in record.plan.buckets)
