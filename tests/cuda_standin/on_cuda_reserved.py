"""What torch's allocator holds is within the budget too, on the genuine allocator over memory with a capacity."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.problem.machine import library_bytes
from tests.cuda_standin import device as standin
from tests.cuda_standin.fragmentation import layers_of_many_widths

DEVICE = torch.device("cuda", 0)
OPTIONS: dict[str, Any] = {"inner": "aot_eager", "plan_cache": False, "report": False}
ROWS = 1 << 16
MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_device() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def started(budget_bytes: int | None) -> tuple[Any, Callable[[], int]]:
    """Return a compiled model, and a function that trains a step and returns the most bytes that the allocator held."""
    model = elixir.prepare(layers_of_many_widths(), device="cuda")
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, "device_memory": budget_bytes})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(ROWS, model[0].in_features, device=DEVICE)

    def step() -> int:
        torch.cuda.reset_peak_memory_stats()
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return int(torch.cuda.max_memory_reserved())

    return model, step


@pytest.fixture(scope="module")
def full_bytes() -> int:
    """The peak of the plan that keeps everything, without the workspaces of libraries."""
    model, step = started(None)
    step()
    return elixir.compilations(model)[-1].plan.prediction.device_peak_bytes - library_bytes(DEVICE)


@pytest.mark.parametrize("share", [0.6, 0.75])
def test_what_the_allocator_holds_keeps_the_budget(
    share: float, full_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    budget_bytes = library_bytes(DEVICE) + int(share * full_bytes)
    _, step = started(budget_bytes)
    held = [step() for _ in range(14)]
    assert max(held[:4]) > budget_bytes, "the budget has room for the gaps of the first plan"
    assert max(held[-4:]) <= budget_bytes
    assert any("It is planned again with" in said and "expandable_segments:True" in said for said in caplog.messages)


def test_a_device_that_is_full_is_planned_for(full_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """The budget is what the device has, and tensors would fit: gaps make the allocator free its cache in each step."""
    budget_bytes = library_bytes(DEVICE) + int(0.7 * full_bytes)
    _, step = started(budget_bytes)
    step()
    torch.cuda.empty_cache()
    with standin.capacity(budget_bytes - torch.cuda.memory_allocated()):
        retries = [torch.cuda.memory_stats()["num_alloc_retries"]]
        for _ in range(14):
            step()
            retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
    assert retries[4] > retries[0], "the device is not full"
    assert retries[-1] == retries[-5]


class Beside(nn.Module):
    """Layers with code between them that runs op by op and needs 48 MiB for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.left_out: Any = torch.compiler.disable(self.scaled)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(12 * MIB, device=x.device).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            x = torch.nn.functional.gelu(layer(x))
        x = self.left_out(x)
        for layer in self.layers[4:]:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def test_workspaces_of_libraries_hide_no_step_above_its_budget() -> None:
    """They have 66 MiB here, more than the code that no plan counts at first."""
    torch.manual_seed(0)
    compiled = torch.compile(elixir.prepare(Beside(), device="cuda"), backend="elixir", options=OPTIONS)
    batch = torch.randn(1 << 14, 64, device=DEVICE)
    for _ in range(2):
        compiled(batch).backward()
    budget_bytes = max(each.plan.prediction.device_peak_bytes for each in elixir.compilations(compiled)) + 24 * MIB
    torch.compiler.reset()
    model = elixir.prepare(Beside(), device="cuda")
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, "device_memory": budget_bytes})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    peaks = []
    for _ in range(8):
        torch.cuda.reset_peak_memory_stats()
        compiled(batch).backward()
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        optimizer.step()
        optimizer.zero_grad()
    assert max(peaks[:3]) > budget_bytes >= max(peaks[-3:])
