"""The budget holds from the second step, the plan knew the peak, and what was executed is what was planned.

Each run has a process of its own: a measured peak is that of everything on the device, other tests' tensors included.
"""

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.ir import Tier
from tests.run.processes import apart


class Deep(nn.Module):
    """12.6 MB of parameters in eight layers, and a loss over 2,048 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
        self.out = nn.Linear(512, 2048)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return functional.cross_entropy(self.out(x), y)


@functools.cache
def measured(inner: str, num_steps: int, budget_bytes: int | None = None) -> tuple[elixir.Plan, elixir.Record]:
    """Train for some steps and measure the next, in a new process; once for all tests that ask for the same."""
    return apart(train, inner, num_steps, budget_bytes)


def train(inner: str, num_steps: int, budget_bytes: int | None) -> tuple[elixir.Plan, elixir.Record]:
    torch.manual_seed(0)
    model = Deep()
    options = {"inner": inner, "report": False, "device_memory": budget_bytes}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(128, 512), torch.randint(0, 2048, (128,))

    def step() -> None:
        compiled(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(num_steps):
        step()
    record = elixir.measure_step(step)
    (compilation,) = elixir.compilations(compiled)
    return compilation.plan, record


@pytest.mark.parametrize(
    ("inner", "share"),
    [
        pytest.param("aot_eager", 0.6, marks=pytest.mark.slow),
        ("aot_eager", 0.4),
        pytest.param("inductor", 0.4, marks=pytest.mark.slow),
    ],
)
def test_measured_peaks_are_near_the_planned_peaks_and_under_the_budget(inner: str, share: float) -> None:
    everything, free = measured(inner, 3)
    assert free.host_peak_bytes == 0
    assert free.counts.get("gather", 0) == 0
    expected_bytes = everything.prediction.device_peak_bytes
    assert 0.97 * free.device_peak_bytes <= expected_bytes <= 1.10 * free.device_peak_bytes

    budget_bytes = int(share * free.device_peak_bytes)
    tight, record = measured(inner, 3, budget_bytes)
    assert any(placement.optim is Tier.HOST for placement in tight.placements)
    assert record.device_peak_bytes <= budget_bytes
    planned_bytes = tight.prediction.device_peak_bytes
    assert 0.97 * record.device_peak_bytes <= planned_bytes <= 1.10 * record.device_peak_bytes
    assert record.host_peak_bytes <= tight.prediction.host_peak_bytes * 1.01

    planned = Counter(action.verb.value for action in tight.schedules[0].actions)
    verbs = ("gather", "release", "reduce", "offload", "update")
    assert {verb: record.counts.get(verb, 0) for verb in verbs} == {verb: planned[verb] for verb in verbs}
    if share < 0.5:
        assert all(record.counts[verb] > 0 for verb in verbs)


def test_the_second_step_of_a_plain_model_keeps_the_budget() -> None:
    _, free = measured("aot_eager", 3)
    budget_bytes = int(0.6 * free.device_peak_bytes)
    _, record = measured("aot_eager", 1, budget_bytes)
    assert record.device_peak_bytes <= budget_bytes
