"""The device of the tests of accelerators, fresh for each test."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from elixir_compile.base.options import Options
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir import Plan, Tier
from elixir_compile.search import Problem, plan
from elixir_compile.session import graph_planner
from tests.gpu.accelerator import DEVICE, IS_EMULATED
from tests.run.training import Run, by_elixir, on_host


@contextmanager
def late_copies() -> Iterator[None]:
    from tests.device import emulated

    with emulated.chosen_policy(), emulated.ordered():
        yield


@pytest.fixture(autouse=True, params=[DEVICE], ids=lambda device: device.type)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Start with an empty compiler and nothing of an earlier test on the device.

    A process has one type of accelerator. One made of host memory runs copies when a wait forces them, and the CUDA
    stand-in sees each access that no wait orders.
    """
    torch._dynamo.reset()
    gc.collect()
    platform_of(DEVICE).empty_cache()
    with late_copies() if IS_EMULATED else nullcontext():
        yield request.param
        torch.accelerator.synchronize(DEVICE)
    torch._dynamo.reset()


@pytest.fixture
def state_on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Return what starts a run with parameters and gradients on the device and all state on the host."""

    def decide(problem: Problem, options: Options) -> Plan:
        kept = plan(problem, planner=options.planner)
        return replace(kept, placements=tuple(replace(placement, optim=Tier.HOST) for placement in kept.placements))

    def start(model: nn.Module, batch: torch.Tensor) -> Run:
        monkeypatch.setattr(graph_planner, "plan_for", decide)
        got = by_elixir(model).train([batch])
        assert not on_host(got)
        return got

    return start
