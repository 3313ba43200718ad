"""What Elixir asks a device that is neither CPU nor CUDA, inside and outside of a capture."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses import FakeTensorMode

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedDevice
from elixir_compile.base.options import parse_options
from elixir_compile.compat.platforms import lane_stream
from elixir_compile.compat.platforms import platform as blocks
from elixir_compile.compat.platforms.platform import AcceleratorPlatform
from elixir_compile.graph.capture.kernel_bytes import KernelBytes, KernelCall, may_differ
from elixir_compile.ir.hardware import preset
from elixir_compile.runtime import measure as regions
from elixir_compile.runtime.lanes import Accelerator, lanes_for
from elixir_compile.runtime.measure import measured_bytes
from elixir_compile.session import machine as machine_module
from elixir_compile.session.machine import device_budget_bytes, library_bytes
from tests.device import fakegpu

DEVICE = torch.device(fakegpu.NAME, 0)


def test_the_workspaces_of_libraries_are_measured_with_real_tensors_inside_a_capture() -> None:
    with FakeTensorMode():
        inside_bytes = library_bytes.__wrapped__(DEVICE)
    assert inside_bytes == library_bytes.__wrapped__(DEVICE) == 0


class Libraries:
    """Stand for cuBLAS and cuBLASLt: each keeps a workspace from its first product of a kind until it is dropped."""

    NBYTES: ClassVar = {
        ("mm", torch.float32): 8 << 20,
        ("addmm", torch.float32): 3 << 20,
        ("addmm", torch.bfloat16): 1 << 20,
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspaces: dict[object, torch.Tensor] = {}
        for name in ("mm", "addmm"):
            monkeypatch.setattr(torch, name, functools.partial(self._product, name, getattr(torch, name)))
        monkeypatch.setattr(AcceleratorPlatform, "drop_workspaces", lambda platform: self.workspaces.clear())

    def _product(self, name: str, run: Callable[..., torch.Tensor], *factors: torch.Tensor) -> torch.Tensor:
        kind = name, factors[0].dtype
        if kind in self.NBYTES and kind not in self.workspaces:
            self.workspaces[kind] = torch.empty(self.NBYTES[kind], dtype=torch.uint8, device=factors[0].device)
        return run(*factors)


def test_workspaces_that_products_leave_are_counted_for_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = Libraries(monkeypatch)
    with FakeTensorMode():
        assert library_bytes.__wrapped__(DEVICE) == 2 * (12 << 20)
    assert len(libraries.workspaces) == 3
    with FakeTensorMode():
        assert library_bytes.__wrapped__(DEVICE) == 2 * (12 << 20), "measured again, from none"


def test_a_device_without_products_in_bfloat16_has_the_workspaces_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Libraries(monkeypatch)
    multiply = machine_module._multiply

    def only_float32(dtype: torch.dtype, device: torch.device) -> None:
        if dtype != torch.float32:
            raise RuntimeError("CUBLAS_STATUS_ARCH_MISMATCH")
        multiply(dtype, device)

    monkeypatch.setattr(machine_module, "_multiply", only_float32)
    caplog.set_level("INFO", logger="elixir_compile")
    assert library_bytes.__wrapped__(DEVICE) == 2 * (11 << 20)
    assert "CUBLAS_STATUS_ARCH_MISMATCH" in caplog.text


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_workspaces_that_are_there_do_not_lower_the_default_budget(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan has `library_bytes` for them already."""
    libraries, cluster = Libraries(monkeypatch), preset("a100-40g")
    before_bytes = device_budget_bytes(parse_options({}), cluster, DEVICE, 0)
    for thread in range(num_threads):
        library_bytes.__wrapped__(DEVICE)
        libraries.workspaces = {(thread, kind): workspace for kind, workspace in libraries.workspaces.items()}
    assert device_budget_bytes(parse_options({}), cluster, DEVICE, 0) == before_bytes


def test_lanes_of_a_device_share_one_stream_each() -> None:
    """torch deals out 32 streams for each device, and then the same again."""
    made = [lanes_for(DEVICE) for _ in range(40)]
    assert all(isinstance(lanes, Accelerator) for lanes in made)
    streams = {lane._stream for lanes in made for lane in (lanes.h2d, lanes.d2h, lanes.collectives)}
    assert len(streams) == 3
    assert streams.isdisjoint(lane._stream for lane in (lanes_for(torch.device(fakegpu.NAME, 1)).h2d,))


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


@pytest.mark.parametrize("name", AcceleratorPlatform.needed)
def test_a_device_without_figures_of_its_memory_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(getattr(torch, fakegpu.NAME), name)
    with pytest.raises(UnsupportedDevice, match=rf"fakegpu: .* lacks torch\.fakegpu\.{name}\. Elixir") as raised:
        lanes_for(DEVICE)
    assert raised.value.missing == (f"torch.fakegpu.{name}",)


def test_a_device_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_guard(device: torch.device) -> torch.Stream:
        raise RuntimeError("Backend doesn't support create a new Stream\nException raised from ...")

    lane_stream.cache_clear()
    monkeypatch.setattr(torch, "Stream", no_guard)
    with pytest.raises(UnsupportedDevice, match=r"lacks streams and events \(Backend doesn't support.*Stream\)\. E"):
        lanes_for(DEVICE)


@pytest.mark.parametrize("ask", [AcceleratorPlatform.peak_bytes, AcceleratorPlatform.tensor_bytes])
def test_a_figure_that_torch_calls_by_another_name_is_no_peak_of_0(
    ask: Callable[[AcceleratorPlatform, torch.device], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(torch, fakegpu.NAME), "memory_stats", lambda device: {"requested.peak": 1})
    with pytest.raises(KeyError, match="requested_bytes"):
        ask(AcceleratorPlatform(fakegpu.NAME), DEVICE)


def test_an_allocator_that_counts_no_requests_tells_what_it_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"requested_bytes.all.peak": 0, "allocated_bytes.all.peak": 512}
    monkeypatch.setattr(getattr(torch, fakegpu.NAME), "memory_stats", lambda device: found)
    assert AcceleratorPlatform(fakegpu.NAME).peak_bytes(DEVICE) == 512


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


def called(op: Any, *shape: int, more: tuple[object, ...] = ()) -> KernelCall:
    """Return a call of `op` on a tensor of `shape` on the device, with a result of the same shape."""
    graph = torch.fx.Graph()
    given = graph.placeholder("values")
    node = graph.call_function(op, (given, *more))
    with FakeTensorMode():
        given.meta["val"], node.meta["val"] = torch.empty(shape, device=DEVICE), torch.empty(shape, device=DEVICE)
    return KernelCall(node=node, sizes={})


def test_an_op_is_run_for_its_workspace_and_its_result() -> None:
    before = torch.accelerator.memory_allocated(DEVICE)
    with FakeTensorMode():
        seen = measured_bytes(called(torch.ops.elixir_tests.wasteful.default, 64, 32, more=(2,)))
    assert seen == KernelBytes(results_bytes=(64 * 32 * 4,), workspace_bytes=WORKSPACE_BYTES)
    assert torch.accelerator.memory_allocated(DEVICE) == before


def test_an_op_that_does_not_fit_has_no_known_workspace() -> None:
    call = called(torch.ops.aten.mul.Tensor, 1 << 20, more=(2,))
    with fakegpu.capacity(torch.accelerator.memory_allocated(DEVICE) + (1 << 20)):
        assert measured_bytes(call) is None


class LibraryError(Exception):
    """An error that is no RuntimeError."""


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError, KeyError, LibraryError])
def test_an_op_that_fails_has_no_known_workspace(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def fails(values: torch.Tensor) -> torch.Tensor:
        raise error("no kernel for this shape\nsecond line")

    caplog.set_level("INFO", logger="elixir_compile")
    assert measured_bytes(called(fails, 4)) is None
    (line,) = caplog.messages
    assert "no kernel for this shape" in line
    assert not blocks._running[fakegpu.NAME]


def test_a_workspace_is_not_known_while_somebody_else_reads_the_history(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
    monkeypatch.setattr(compat, "start_allocator_history", lambda device_type, most_entries: False)
    caplog.set_level("INFO", logger="elixir_compile")
    assert measured_bytes(called(torch.ops.elixir_tests.wasteful.default, 4, more=(2,))) is None
    assert "somebody else reads the history" in caplog.text


@pytest.mark.parametrize(
    ("op", "fused", "expected"),
    [
        (torch.ops.aten.convolution.default, True, True),
        (torch.ops.aten._fft_c2c.default, True, True),
        (torch.ops.aten._cudnn_rnn.default, True, True),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, True, True),
        (torch.ops.aten.embedding.default, True, False),
        (torch.ops.aten.sum.dim_IntList, True, False),
        (torch.ops.aten.sum.dim_IntList, False, True),
        (torch.ops.aten.native_layer_norm_backward.default, False, True),
        (torch.ops.aten.mul.Tensor, False, False),
        (torch.ops.elixir_tests.wasteful.default, False, False),
    ],
)
def test_ops_that_choose_their_memory_are_run_on_a_device_and_no_others(
    op: Any, *, fused: bool, expected: bool
) -> None:
    assert may_differ(called(op, 4).node, fused=fused) is expected
