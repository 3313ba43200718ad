"""The steps of `benchmarks/first_gpu.py` that need no CUDA answer on a second device type."""

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.device import fakegpu

DEVICE = torch.device(fakegpu.NAME, 0)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the steps, which trains a small GPT-2 op by op. Its models are freed at the end."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("first_gpu")
    monkeypatch.setattr(module, "INNER", "aot_eager")
    yield module
    torch._dynamo.reset()
    gc.collect()


def test_budgets_hold(steps: ModuleType) -> None:
    free: dict[str, Any] = steps.budgets(DEVICE, ["1.0", "0"])
    tight: dict[str, Any] = steps.budgets(DEVICE, ["0.7", str(free["planned_bytes"])])
    assert tight["planned_bytes"] <= tight["budget_bytes"] < free["planned_bytes"]


@pytest.mark.slow
def test_late_compute_changes_no_weight(steps: ModuleType) -> None:
    with fakegpu.policy(fakegpu.LATE):
        same = steps.slow_compute(DEVICE)["same_weights"]
    assert len(same) == 6
    assert all(same.values())


@pytest.mark.slow
def test_dropout_in_the_attention_trains(steps: ModuleType) -> None:
    figures = steps.attention_dropout(DEVICE)
    assert all(len(losses) == 4 and all(loss == loss for loss in losses) for losses in figures.values())


@pytest.mark.slow
def test_workspaces_are_found_outside_and_inside_of_a_capture(steps: ModuleType) -> None:
    found = steps.workspaces(DEVICE)
    assert found["outside_bytes"] == found["inside_bytes"]
