"""Train one model by torch alone on the whole batch and on several ranks in turn, and say how far they are apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from tests.run.ranks_models import MODELS

Make = Callable[[Any], torch.optim.Optimizer]
CLIP = 0.5


@dataclass(kw_only=True)
class Pair:
    """A model on this rank and its double, which torch trains alone on the whole batch."""

    model: nn.Module
    compiled: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    double: nn.Module
    double_optimizer: torch.optim.Optimizer

    def step(self, batch: torch.Tensor, *, num_micro_batches: int = 1) -> dict[str, float]:
        """Train both for one step, and return how far losses and clip norms are apart."""
        loss, norm = self.own_step(batch, num_micro_batches)
        expected_loss, expected_norm = self.double_step(batch, num_micro_batches)
        return {"loss": abs(loss - expected_loss), "norm": abs(norm - expected_norm)}

    def own_step(self, batch: torch.Tensor, num_micro_batches: int = 1) -> tuple[float, float]:
        """Train this rank's rows, and return the loss of all ranks and the clip norm."""
        total = self.own_backward(batch, num_micro_batches)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, full(norm).item()

    def own_backward(self, batch: torch.Tensor, num_micro_batches: int = 1) -> float:
        """Run this rank's rows forward and backward, and return the loss of all ranks."""
        total = 0.0
        for ids in batch.chunk(num_micro_batches):
            loss = self.compiled(own_rows(ids)) / num_micro_batches
            loss.backward()
            total += mean_over_ranks(loss)
        return total

    def double_step(self, batch: torch.Tensor, num_micro_batches: int = 1) -> tuple[float, float]:
        """Train the whole batch; the loss is the mean of that of each rank's rows, which a model may mix."""
        total = self.double_backward(batch, num_micro_batches)
        norm = nn.utils.clip_grad_norm_(self.double.parameters(), CLIP)
        self.double_optimizer.step()
        self.double_optimizer.zero_grad()
        return total, norm.item()

    def double_backward(self, batch: torch.Tensor, num_micro_batches: int = 1) -> float:
        """Run the whole batch forward and backward, and return the loss."""
        total = 0.0
        for ids in batch.chunk(num_micro_batches):
            rows = ids.chunk(distributed.get_world_size())
            loss = torch.stack([self.double(own) for own in rows]).mean() / num_micro_batches
            loss.backward()
            total += loss.item()
        return total

    @torch.no_grad()
    def apart(self) -> float:
        """Return the largest difference between a weight and its double's."""
        own, other = self.model.state_dict(), self.double.state_dict()
        assert list(own) == list(other)
        return max((full(value) - other[name]).abs().max().item() for name, value in own.items())


def own_rows(batch: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of `batch`."""
    return batch.chunk(distributed.get_world_size())[distributed.get_rank()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a plain one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of the ranks' losses."""
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    return mean.item() / distributed.get_world_size()


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh of CPUs."""
    return init_device_mesh("cpu", tuple(shape))


def hybrid(params: Any) -> torch.optim.Optimizer:
    """Return Elixir's AdamW. With so large an eps an update is smooth in its gradient: rounding stays rounding."""
    return elixir.HybridAdamW(params, lr=1e-3, eps=1e-3)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-3)


def compiled_with(model: nn.Module, **options: object) -> Callable[..., Any]:
    """Return `model` compiled by Elixir, op by op."""
    torch._dynamo.reset()
    quick = {"search_timeout": 1.0}  # the first rank searches while the others wait; a plan that is good enough will do
    options = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, **quick, **options}
    return torch.compile(model, backend="elixir", options=options)


def pair_of(
    name: str, shape: Sequence[int], *, dtype: torch.dtype = torch.float64, make: Make = hybrid, **options: object
) -> Pair:
    """Return the model called `name` on a mesh of `shape`, and its double."""
    double = MODELS[name]().to(dtype)
    model = elixir.prepare(MODELS[name]().to(dtype), mesh=mesh_of(shape))
    return Pair(
        model=model,
        compiled=compiled_with(model, **options),
        optimizer=make(model.parameters()),
        double=double,
        double_optimizer=adamw(double.parameters()),
    )


def least_bytes(
    name: str, batch: torch.Tensor, shape: Sequence[int], *, dtype: torch.dtype = torch.float64, **options: object
) -> int:
    """Return the smallest budget under which a step of the model called `name` trains its whole batch, as the error
    names it."""
    pair = pair_of(name, shape, dtype=dtype, **{**options, "device_memory": 1, "micro_batches": 1})
    try:
        pair.compiled(own_rows(batch))
    except elixir.NoFeasiblePlan as error:
        return error.needed_bytes
    raise AssertionError("a budget of one byte was enough")


def homes(model: nn.Module) -> dict[str, list[str]]:
    """Return on which sides parameters and optimizer state are, of buckets that are cut over the ranks."""
    placed = executor_of(model).buckets.in_force(for_training=True)
    own = [placement for bucket, placement in placed if bucket.is_sharded]
    return {
        "param": sorted({placement.param.value for placement in own}),
        "optim": sorted({placement.optim.value for placement in own}),
    }
