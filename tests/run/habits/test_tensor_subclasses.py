"""Tensor subclasses that torch takes apart: as inputs, weights, buffers and within a forward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import elixir_compile as elixir
from tests.run.habits.habit import habit
from tests.run.models import seeded
from tests.run.processes import spawn
from tests.run.training import assert_same, by_elixir_unprepared, by_torch

WIDTH = 16
aten: Any = torch.ops.aten
OFFLOAD: dict[str, Any] = {"plan_cache": False, "planner": "zero3_offload"}


class Measured(torch.Tensor):
    """Two tensors, values and a scale of each row, that stand for their product."""

    values: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> "Measured":
        return Measured(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (aten.detach.default, aten.clone.default, aten.alias.default):
            return Measured(op(args[0].values), op(args[0].scale))
        plain = [tree_map(lambda leaf: leaf.values * leaf.scale if isinstance(leaf, Measured) else leaf, own)
                 for own in (args, kwargs or {})]  # fmt: skip
        return op(*plain[0], **plain[1])


def measured(*shape: int) -> Measured:
    return Measured(torch.randn(shape), torch.rand(shape[0], 1))


class Net(nn.Module):
    """Two layers; `forward` is that of the kind called `name`, which also says what is a subclass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("turn", measured(WIDTH, WIDTH) if name == "buffer" else torch.eye(WIDTH))
        if name in ("weight", "frozen weight"):
            self.wide.weight = nn.Parameter(measured(4 * WIDTH, WIDTH), requires_grad=name == "weight")
        self.forward_of = name

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(functional.gelu(self.wide(x))).square().mean()

    def forward(self, *given: torch.Tensor) -> Any:
        return FORWARDS.get(self.forward_of, Net.layers)(self, *given)


def made_inside(model: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = Measured(model.wide(x), torch.full_like(x[:, :1], 0.5))
    return model.narrow(hidden.sin()).square().mean()


def attention(model: Net, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    heads = model.wide(x).view(1, 4, -1, WIDTH)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    return model.narrow(mixed.reshape(-1, 4 * WIDTH)).square().mean()


FORWARDS: dict[str, Callable[..., Any]] = {
    "input returned": lambda model, x: (model.layers(x), x.detach()),
    "buffer": lambda model, x: model.layers(x @ model.turn),
    "inside": made_inside,
    "causal bias": attention,
}


def batch_of(name: str, rows: int) -> tuple[Any, ...]:
    if name == "causal bias":
        return torch.randn(rows, WIDTH), causal_lower_right(rows, rows)
    is_input = name in ("input", "input returned", "input that needs a gradient")
    x = measured(rows, WIDTH) if is_input else torch.randn(rows, WIDTH)
    return (x.requires_grad_(name == "input that needs a gradient"),)


def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    result = compiled(*batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum((given.grad.sum() for given in batch if given.requires_grad), loss.detach())


IS_OLD = torch.__version__ < (2, 13)
OPAQUE = pytest.mark.filterwarnings("ignore:the captured graph reads no floating-point parameter") if IS_OLD else ()
"""Of a subclass that is no input, Dynamo of torch 2.11 leaves the constructor out of graphs."""
KINDS = [
    "input",
    pytest.param("input returned", marks=pytest.mark.skipif(IS_OLD, reason="Dynamo of torch 2.11 cannot trace it")),
    "input that needs a gradient",
    pytest.param("buffer", marks=OPAQUE),
    pytest.param("frozen weight", marks=OPAQUE),
    "inside",
]


@habit("Tensor subclasses with `__tensor_flatten__`: inputs, frozen weights, buffers, attention biases", area="Modules")
@pytest.mark.parametrize("name", [*KINDS, pytest.param("causal bias", marks=pytest.mark.slow)])
def test_a_tensor_subclass_trains_as_by_torch(name: str) -> None:
    model = seeded(Net, name)
    runs = [by_torch(model, backend="aot_eager"), by_elixir_unprepared(model, **OFFLOAD)]
    for run in runs:
        torch._dynamo.reset()
        torch.manual_seed(0)
        run.train([batch_of(name, rows) for rows in (8, 8, 12)], step)
    assert_same(*runs)


@habit(
    "Tensor subclasses for which torch makes the gradient of a weight a subclass too",
    area="Modules",
    refused=elixir.UnsupportedModel,
    says="its gradient is a tensor subclass",
)
def test_a_gradient_that_is_a_subclass() -> None:
    run = by_elixir_unprepared(seeded(Net, "plain"), **OFFLOAD)
    run.compiled(TwoTensor(torch.ones(4, WIDTH), torch.ones(4, WIDTH)))


class Sharded(Net):
    """A layer between two, or the loss, on a DTensor."""

    def forward(self, *given: torch.Tensor) -> Any:
        mesh, hidden = given[0].device_mesh, self.wide(given[0].to_local() * 2)
        between = DTensor.from_local(functional.gelu(hidden), mesh, [Replicate()]).sin().to_local()
        return DTensor.from_local(self.narrow(between), mesh, [Shard(0)]).square().mean().full_tensor()


def losses_on_a_dtensor(rank: int, world_size: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = seeded(Sharded, "plain")
    runs = [by_torch(model, backend="aot_eager"), by_elixir_unprepared(model, **OFFLOAD)]
    for run in runs:
        torch._dynamo.reset()
        torch.manual_seed(0)
        run.train([(DTensor.from_local(torch.randn(rows, WIDTH), mesh, [Shard(0)]),) for rows in (8, 8, 12)], step)
    assert_same(*runs)
    return [[loss.item() for loss in run.losses] for run in runs]


@pytest.mark.slow
def test_dtensors_as_activations_train_as_by_torch(tmp_path: Path) -> None:
    ((expected, got),) = spawn(losses_on_a_dtensor, 1, folder=tmp_path)
    assert expected == got
