"""The second device behaves as a GPU does, and what Elixir and its doctor ask of a device that is not CUDA."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedDevice
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import MIB
from elixir_compile.compat.platforms import lane_stream
from elixir_compile.compat.platforms import platform as blocks
from elixir_compile.compat.platforms.platform import AcceleratorPlatform
from elixir_compile.graph.capture.captured import KernelBytes, KernelCall, may_differ
from elixir_compile.ir.hardware import preset
from elixir_compile.runtime import measure as regions
from elixir_compile.runtime.lanes import Accelerator, lanes_for
from elixir_compile.runtime.measure import measured_bytes
from elixir_compile.session import machine as machine_module
from elixir_compile.session.machine import device_budget_bytes, library_bytes
from elixir_compile.tools.doctor import Diagnosis, Verdict, diagnose, this_system, trials
from tests.device import fakegpu

# ----------------------------------------------------------------------------------------------------------------------
# The device of these tests behaves as a GPU does: late copies, events, freed memory, threads, autograd, capture.


DEVICE = torch.device(fakegpu.NAME, 0)
OTHER = torch.device(fakegpu.NAME, 1)


def test_ops_and_views_give_what_the_cpu_gives() -> None:
    values = torch.randn(6, 4)
    there = values.to(DEVICE)
    assert torch.equal((there @ there.t()).cpu(), values @ values.t())
    there[1:3].add_(1)
    values[1:3].add_(1)
    assert torch.equal(there.cpu(), values)
    assert there.unfold(0, 2, 2).untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    assert (there.sum().item(), there.device) == (values.sum().item(), DEVICE)
    out = torch.empty(0, device=DEVICE)
    assert torch.equal(torch.add(there, 1, out=out).cpu(), values + 1)
    assert torch.arange(3, device=OTHER).device == OTHER


@pytest.mark.parametrize("kind", [fakegpu.LATE, fakegpu.EARLY])
def test_a_copy_from_pinned_memory_is_late_and_an_event_orders_it(kind: int) -> None:
    source = torch.ones(64).pin_memory()
    target = torch.zeros(64, device=DEVICE)
    stream = torch.Stream(DEVICE)
    with fakegpu.policy(kind):
        with stream:
            target.copy_(source, non_blocking=True)
        assert target.sum().item() == (0 if kind == fakegpu.LATE else 64)
        done = stream.record_event()
        torch.accelerator.current_stream(DEVICE).wait_event(done)
        assert (target.sum().item(), fakegpu.num_pending()) == (64, 0)


def test_a_copy_from_pageable_memory_is_not_late() -> None:
    target = torch.zeros(64, device=DEVICE)
    with fakegpu.policy(fakegpu.LATE):
        target.copy_(torch.ones(64), non_blocking=True)
        assert fakegpu.num_pending() == 0


def test_a_late_copy_reads_and_writes_what_is_there_when_it_runs() -> None:
    source, stream = torch.ones(4096, device=DEVICE), torch.Stream(DEVICE)
    target = torch.zeros(4096).pin_memory()
    with fakegpu.policy(fakegpu.LATE):
        with stream:
            target.copy_(source, non_blocking=True)
        del source  # without `record_stream`: the memory is free for the stream that allocated it
        stream.synchronize()
    assert target.isnan().all()


def test_record_stream_keeps_memory_until_the_stream_is_through() -> None:
    source, stream = torch.ones(4096, device=DEVICE), torch.Stream(DEVICE)
    target = torch.zeros(4096).pin_memory()
    with fakegpu.policy(fakegpu.LATE):
        with stream:
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)
        del source
        stream.synchronize()
    assert target.eq(1).all()


def test_fresh_memory_is_poison_and_memory_runs_out() -> None:
    assert torch.empty(100, device=DEVICE).isnan().all()
    held = torch.accelerator.memory_allocated(DEVICE)
    with fakegpu.capacity(held + 1024), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(2048, device=DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    values = torch.empty(1 << 20, device=DEVICE)
    del values
    assert torch.accelerator.max_memory_allocated(DEVICE) == held + (4 << 20)
    assert torch.accelerator.memory_allocated(DEVICE) == held


def test_an_event_of_one_device_is_not_recorded_on_another() -> None:
    event = torch.Event(DEVICE)
    event.record(torch.Stream(DEVICE))
    with pytest.raises(RuntimeError, match="event of another device"):
        event.record(torch.Stream(OTHER))


def test_a_storage_is_emptied_and_filled_again() -> None:
    tensor = torch.ones(1000, device=DEVICE)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4000)
    assert tensor.isnan().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_with_dropout_and_attention(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    head = nn.Linear(16, 3)
    losses = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), nn.Linear(16, 3))
        model[0].load_state_dict(layer.state_dict())
        model[1].load_state_dict(head.state_dict())
        model = model.to(device)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(device)
        torch.manual_seed(3)
        for _ in range(3):
            loss = run(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().cpu())  # a tensor, because the tolerance of a Python number is that of fp64
    torch.testing.assert_close(losses[0], losses[1])
    torch._dynamo.reset()


# ----------------------------------------------------------------------------------------------------------------------
# What Elixir asks a device that is neither CPU nor CUDA, inside and outside of a capture.


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


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile doctor` on an accelerator that is neither CPU nor CUDA.


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Diagnosis]]:
    """Return the findings by the code of their check."""
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trials, "FIRST_PINNED_BYTES", 4 * MIB)
    monkeypatch.setattr(trials, "COPY_BYTES", MIB)
    monkeypatch.setattr(trials, "_PINNING_S", 0.0)
    monkeypatch.setattr(trials, "_COPYING_S", 0.01)
    by_code: dict[str, list[Diagnosis]] = {}
    for finding in diagnose(this_system()):
        by_code.setdefault(finding.code, []).append(finding)
    return by_code


def test_the_accelerator_is_seen_pinned_to_and_copied_to(found: dict[str, list[Diagnosis]]) -> None:
    (seen,), (pinned,), (copied,) = (found[code] for code in ("D02", "D06", "D11"))
    assert seen.found == f"torch sees {fakegpu.NUM_DEVICES} x {fakegpu.NAME}"
    assert (pinned.verdict, pinned.found) == (Verdict.OK, "4.0 MiB of host memory were pinned")
    assert (copied.verdict, copied.fix) == (Verdict.UNKNOWN, "elixir-compile measure")
    assert "GB/s to the device" in copied.found


def test_nvml_is_not_asked_about_a_device_without_a_pci_address(found: dict[str, list[Diagnosis]]) -> None:
    (state,) = found["D10"]
    assert state.verdict is Verdict.UNKNOWN
    assert state.found.endswith("torch does not tell its PCI address")
