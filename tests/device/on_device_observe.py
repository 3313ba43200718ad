"""Observation on a second device: bytes by kind from the allocator's history, and the peak of a step of two graphs."""

import pytest
import torch
from torch import nn

from elixir_compile.base.units import parse_bytes
from elixir_compile.session.machine import library_bytes
from tests.device import emulated
from tests.gpu import test_accelerator_memory
from tests.run.training import by_elixir, plain_step

DEVICE = torch.device(emulated.NAME, 0)


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan() -> None:
    test_accelerator_memory.test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan("zero3_offload")


def test_the_first_graph_of_a_step_reads_its_peak(caplog: pytest.LogCaptureFixture) -> None:
    library_bytes(DEVICE)  # takes the workspaces of libraries
    most_bytes = torch.accelerator.memory_allocated(DEVICE) + (32 << 20)
    before = torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
    del before
    peak_bytes = torch.accelerator.max_memory_allocated(DEVICE)
    caplog.set_level("INFO", logger="elixir_compile")
    run = by_elixir(Broken().to(DEVICE), report=True, planner="greedy", plan_cache=False)
    for _ in range(9):
        plain_step(run.compiled, run.optimizer, torch.ones(8, 64, device=DEVICE))
    first, second = [line for line in caplog.messages if line.startswith("measured  peak")]
    assert (first.split()[-1], second.split()[-1]) == ("Broken", "Broken.1")
    assert parse_bytes("".join(first.split()[2:4])) < most_bytes
    assert "peak: see elixir_compile.measure_step" in second
    assert torch.accelerator.max_memory_allocated(DEVICE) == peak_bytes
