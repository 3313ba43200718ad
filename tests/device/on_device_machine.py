"""What Elixir asks a device that is neither CPU nor CUDA, inside and outside of a capture."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from elixir_compile.errors import UnsupportedDevice
from elixir_compile.measure import regions
from elixir_compile.measure.op_workspace import op_workspace_bytes
from elixir_compile.platforms.accelerator import AcceleratorPlatform
from elixir_compile.problem import workspaces
from elixir_compile.problem.machine import library_bytes
from elixir_compile.runtime.lanes import lanes_for
from tests.device import fakegpu

DEVICE = torch.device(fakegpu.NAME, 0)


def test_the_workspaces_of_libraries_are_measured_with_real_tensors_inside_a_capture() -> None:
    with FakeTensorMode():
        inside_bytes = library_bytes.__wrapped__(DEVICE)
    assert inside_bytes == library_bytes.__wrapped__(DEVICE) == 0


def test_a_workspace_that_a_product_leaves_is_counted_for_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = AcceleratorPlatform.allocated_bytes

    def allocated_bytes(platform: AcceleratorPlatform, device: torch.device) -> int:
        """Return the bytes; a library allocates its workspace of 8 MiB between the first call and the second."""
        before_bytes = real(platform, device)
        kept.append(torch.empty(8 << 20, dtype=torch.uint8, device=device))
        return before_bytes

    monkeypatch.setattr(AcceleratorPlatform, "allocated_bytes", allocated_bytes)
    with FakeTensorMode():
        assert library_bytes.__wrapped__(DEVICE) == 2 * (8 << 20)


def test_runs_of_a_region_are_queued_and_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    num_waits: list[torch.device] = []
    real = AcceleratorPlatform.synchronize

    def synchronize(platform: AcceleratorPlatform, device: torch.device) -> None:
        num_waits.append(device)
        real(platform, device)

    monkeypatch.setattr(AcceleratorPlatform, "synchronize", synchronize)
    monkeypatch.setattr(regions, "_ENOUGH_S", 0.01)
    num_runs: list[Any] = []
    region: Any = SimpleNamespace(inputs=[])
    compiled: Any = SimpleNamespace(run=lambda box: num_runs.append(torch.ones(8, device=DEVICE) + 1))
    found = regions.measure_region(region, compiled, DEVICE, {})
    assert found.run_s > 0
    assert len(num_waits) < len(num_runs)


@pytest.mark.parametrize("name", ["memory_allocated", "max_memory_allocated"])
def test_a_device_without_figures_of_its_memory_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(getattr(torch, fakegpu.NAME), name)
    with pytest.raises(UnsupportedDevice, match=rf"fakegpu: .* lacks torch\.fakegpu\.{name}\. Elixir") as raised:
        lanes_for(DEVICE)
    assert raised.value.missing == (f"torch.fakegpu.{name}",)


def test_a_device_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_guard(device: torch.device) -> torch.Stream:
        raise RuntimeError("Backend doesn't support create a new Stream\nException raised from ...")

    monkeypatch.setattr(torch, "Stream", no_guard)
    with pytest.raises(UnsupportedDevice, match=r"lacks streams and events \(Backend doesn't support.*Stream\)\. E"):
        lanes_for(DEVICE)


WORKSPACE_BYTES = 3 << 20


@torch.library.custom_op("elixir_tests::wasteful", mutates_args=())
def wasteful(values: torch.Tensor, times: int) -> torch.Tensor:
    """Return a copy, and allocate a workspace meanwhile, as libraries do."""
    assert values.device == DEVICE
    held = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    made = values * times
    del held
    return made


@wasteful.register_fake
def _(values: torch.Tensor, times: int) -> torch.Tensor:
    return torch.empty_like(values)


def test_an_op_without_a_formula_is_run_once_for_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, op = torch.fx.Graph(), torch.ops.elixir_tests.wasteful.default
    given = graph.placeholder("values")
    nodes = [graph.call_function(op, (given, 2)) for _ in range(3)]
    before = torch.accelerator.memory_allocated(DEVICE)
    with FakeTensorMode():
        given.meta["val"] = torch.empty(64, 32, device=DEVICE)
        assert op_workspace_bytes(nodes[0], {}) == WORKSPACE_BYTES
    assert torch.accelerator.memory_allocated(DEVICE) == before
    measured: list[Any] = []
    monkeypatch.setattr(workspaces, "_WITHOUT_FORMULA", {op})
    monkeypatch.setattr(workspaces, "op_workspace_bytes", lambda node, sizes: measured.append(node) or 7)
    captured: Any = SimpleNamespace(forward=SimpleNamespace(graph=graph), backward=None)
    assert workspaces.workspace_bytes(captured, {}, None) == 7
    assert len(measured) == 1, "equal ops run once"


def test_an_op_that_does_not_fit_has_no_known_workspace() -> None:
    graph = torch.fx.Graph()
    given = graph.placeholder("values")
    node = graph.call_function(torch.ops.aten.mul.Tensor, (given, 2))
    with FakeTensorMode():
        given.meta["val"] = torch.empty(1 << 20, device=DEVICE)
    with fakegpu.capacity(torch.accelerator.memory_allocated(DEVICE) + (1 << 20)):
        assert op_workspace_bytes(node, {}) == 0
