"""The emulated link of the benchmarks: steps over it compute the same, wait for its copies, and count their bytes."""

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_compile.runtime import executor
from tests.run.micro_batches.stepping import Rows, batch_of, compiled
from tests.run.micro_batches.stepping import gradients as gradients_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def emulated_link() -> Iterator[Any]:
    """The module; what it replaces in the runtime is put back after the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setattr(executor, "lanes_for", executor.lanes_for)
        yield importlib.import_module("emulated_link")


def test_a_step_over_an_emulated_link_computes_the_same_and_takes_as_long_as_its_copies(emulated_link: Any):
    model, twin, batch = Rows(), Rows(), batch_of(8)
    twin.load_state_dict(model.state_dict())
    bytes_per_s = 1e6
    to_device, to_host = emulated_link.emulate_host_link(bytes_per_s)
    step = compiled(model, 4, planner="zero3_offload")
    step(*batch).backward()
    model.zero_grad()
    before = [to_device.nbytes, to_host.nbytes]
    began_s = time.perf_counter()
    step(*batch).backward()
    took_s = time.perf_counter() - began_s
    moved_bytes = [to_device.nbytes - before[0], to_host.nbytes - before[1]]
    param_bytes = sum(param.nbytes for param in model.parameters())
    assert moved_bytes[0] > param_bytes  # most parameters are read by the forward and again by the backward
    assert moved_bytes[1] == param_bytes
    assert took_s >= max(moved_bytes) / bytes_per_s
    twin(*batch).backward()
    found, wanted = gradients_of(model), gradients_of(twin)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5)
