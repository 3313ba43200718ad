"""A step with larger inputs than were planned for is planned again before it runs, and keeps the budget.

Each run has a process of its own: a measured peak is that of everything on the device, other tests' tensors included.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.ir import StepGraph
from elixir_compile.step import plan_timeline
from tests.run.processes import apart

WIDTH, SMALL, LARGE = 1024, 32, 512


class Wide(nn.Module):
    """50 MB of parameters in twelve layers, and about as much of activations at batch 512."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x.square().mean()


@dataclass
class Seen:
    """What one process saw: plan and graph before and after the first large step, and that step measured."""

    plans: tuple[elixir.Plan, elixir.Plan]
    graphs: tuple[StepGraph, StepGraph]
    large: elixir.Record
    loss: float


def measured(inner: str, budget_bytes: int | None = None) -> Seen:
    return apart(train, inner, budget_bytes)


def train(inner: str, budget_bytes: int | None) -> Seen:
    """Take three steps on small inputs and measure the first on large ones, optimizer state on the move included."""
    torch.manual_seed(0)
    model = elixir.prepare(Wide())
    options = {"inner": inner, "report": False, "device_memory": budget_bytes, "planner": "greedy", "replan": False}
    compiled = torch.compile(model, backend="elixir", options=options, dynamic=True)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-4)
    losses: list[float] = []

    def step(x: torch.Tensor) -> None:
        loss = compiled(x)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(torch.randn(SMALL, WIDTH))
    (compilation,) = elixir.compilations(compiled)
    plan, graph = compilation.plan, compilation.graph
    x = torch.randn(LARGE, WIDTH)
    large = elixir.measure_step(lambda: step(x))
    assert elixir.compilations(compiled) == [compilation]
    return Seen((plan, compilation.plan), (graph, compilation.graph), large, losses[-1])


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_larger_step_is_planned_before_it_runs(inner: str) -> None:
    free = measured(inner)
    budget_bytes = int(0.58 * free.large.device_peak_bytes)
    tight = measured(inner, budget_bytes)
    (small, large), (graph, grown) = tight.plans, tight.graphs
    assert [value for _, value in graph.symbols] == [SMALL]
    assert [value for _, value in grown.symbols] == [LARGE]
    # The plan of the small steps would not have held.
    assert plan_timeline(grown, small).peak.nbytes > budget_bytes
    assert large.placements != small.placements
    assert tight.large.device_peak_bytes <= budget_bytes
    assert large.prediction.device_peak_bytes <= budget_bytes
    if inner == "aot_eager":
        assert tight.loss == free.loss
