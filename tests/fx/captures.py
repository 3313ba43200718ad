"""Captured graphs of tiny models: one compiled step, and what it left in its record."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.compat import boxed, compile_with_aot_eager, min_cut_partition
from elixir_compile.session.model import Compilation

GOLDENS = Path(__file__).parents[1] / "goldens"


class Pair(nn.Module):
    """Two linear layers with a ReLU between; returns the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).sum()


class Shared(nn.Module):
    """One weight used as an embedding and as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).square().mean()


def record_of(model: nn.Module, *inputs: torch.Tensor, **options: object) -> Compilation:
    """Compile one training step of `model`, prepared, and return its record."""
    compiled = torch.compile(
        elixir.prepare(model), backend="elixir", options={"inner": "aot_eager", "report": False, **options}
    )
    compiled(*inputs).backward()
    (record,) = elixir.compilations(compiled)
    return record


def tight(model: Callable[[], nn.Module], *inputs: torch.Tensor, **options: object) -> Compilation:
    """Return the record of a step under the smallest budget that has a plan for the whole batch."""
    with torch.random.fork_rng():
        try:
            record_of(model(), *inputs, device_memory=1, micro_batches=1, **options)
        except elixir.NoFeasiblePlan as error:
            needed_bytes = error.needed_bytes
    torch._dynamo.reset()
    return record_of(model(), *inputs, device_memory=needed_bytes, **options)


def halves_of_torch(model: nn.Module, *inputs: torch.Tensor) -> Sequence[torch.fx.GraphModule]:
    """Return the forward and the backward that torch's own partitioner makes of the same step."""
    halves: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, examples: object, **options: object) -> Callable[..., object]:
        halves.append(gm)
        return boxed(lambda args: gm(*args))

    def backend(gm: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., object]:
        return compile_with_aot_eager(gm, examples, min_cut_partition, keep)

    torch.compile(model, backend=backend)(*inputs).backward()
    return halves
