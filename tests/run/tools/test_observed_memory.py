"""The bytes of observed steps by kind, by hand and against the allocator, and counters of the machine."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.compat.platforms import PeakRecord, Platform
from elixir_compile.compat.platforms import platform as blocks
from elixir_compile.compat.platforms.platform import block_events, live_blocks, record_blocks
from elixir_compile.ir import Kind, Lane, Phase, Span
from elixir_compile.runtime.recording import Anchor, Taken
from elixir_compile.tools.measure.memory import (
    DeviceMemory,
    GpuCounters,
    StepTimes,
    drawn_by_device,
    gpu_counters,
    live_by_kind,
)
from elixir_compile.tools.measure.observation import CounterThread, HostCounters
from elixir_compile.tools.observed import FullStep, Interval, Live
from tests.run.models import Stack, seeded, vectors

# ----------------------------------------------------------------------------------------------------------------------
# The bytes by kind of a made-up step on an accelerator, whose allocator's history is written by hand.


MS = 1e-3
DEVICE = torch.device("cuda", 1)
BEGAN_NS = 1_000_000_000_000
TIMES = StepTimes(
    began_s=50.0,
    # The host asks for all in 6 ms, and the device takes 40 ms.
    intervals=(
        Interval(phase=Phase.FORWARD, start_s=0, end_s=10 * MS),
        Interval(phase=Phase.BACKWARD, start_s=10 * MS, end_s=30 * MS),
        Interval(phase=Phase.UPDATE, start_s=30 * MS, end_s=40 * MS),
    ),
    asked=(
        Interval(phase=Phase.FORWARD, start_s=0, end_s=2 * MS),
        Interval(phase=Phase.BACKWARD, start_s=2 * MS, end_s=5 * MS),
        Interval(phase=Phase.UPDATE, start_s=5 * MS, end_s=6 * MS),
    ),
    moments=((0, 0), (2 * MS, 10 * MS), (5 * MS, 30 * MS), (6 * MS, 40 * MS)),
)


def entry(action: str, at_ms: float, address: int = 0, nbytes: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": nbytes, "time_us": (BEGAN_NS + round(at_ms * 1e6)) // 1000}


def snapshot(blocks: Mapping[int, int], *entries: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot of a device 1 with `blocks`; on device 0 there is another block."""
    listed = [
        {"address": address, "requested_size": size, "state": "active_allocated"} for address, size in blocks.items()
    ]
    listed.append({"address": 900, "requested_size": 1 << 30, "state": "inactive"})
    return {
        "segments": [
            {"device": 0, "blocks": [{"address": 64, "requested_size": 7, "state": "active_allocated"}]},
            {"device": 1, "blocks": listed},
        ],
        "device_traces": [[entry("alloc", 1, 64, 7)], list(entries)],
    }


class Allocator:
    """Stands for torch's allocator: its snapshots, one after another."""

    def __init__(self, *snapshots: dict[str, Any]) -> None:
        self.snapshots = list(snapshots)
        self.is_on = False

    def start(self, device_type: str, most_entries: int) -> bool:
        was_on, self.is_on = self.is_on, True
        return not was_on

    def snapshot(self, device_type: str) -> dict[str, Any]:
        return self.snapshots.pop(0)

    def stop(self, device_type: str) -> None:
        self.is_on = False

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> "Allocator":
        monkeypatch.setattr(compat, "start_allocator_history", self.start)
        monkeypatch.setattr(compat, "allocator_snapshot", self.snapshot)
        monkeypatch.setattr(compat, "stop_allocator_history", self.stop)
        return self


@pytest.fixture
def live_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Live | None]:
    """Return what tells the bytes of a step from a history, kinds of blocks before the step, and what was recorded."""

    def live(
        entries: list[dict[str, Any]],
        resident: Mapping[int, int] = {},
        kinds: Mapping[int, str] = {},
        spans: tuple[Span, ...] = (),
        taken: tuple[Taken, ...] = (),
    ) -> Live | None:
        allocator = Allocator(snapshot(resident), snapshot({}, *entries)).installed(monkeypatch)
        monkeypatch.setattr("elixir_compile.tools.measure.memory.anchor", lambda: Anchor(TIMES.began_s, BEGAN_NS))
        blocks = record_blocks(DEVICE)
        assert blocks is not None
        memory = DeviceMemory(blocks, dict(kinds))
        memory.start()
        memory.stop()
        assert not allocator.is_on
        return memory.live(TIMES, spans, taken)

    return live


def test_blocks_are_those_of_the_device_at_the_bytes_that_were_asked_for() -> None:
    assert live_blocks(snapshot({1: 10, 2: 20}), 1) == {1: 10, 2: 20}
    assert live_blocks(snapshot({}), 0) == {64: 7}


def test_events_before_the_snapshot_and_requests_to_free_do_not_count() -> None:
    entries = (
        entry("alloc", 0, 1, 10),
        entry("snapshot", 0),
        entry("segment_alloc", 1, 5, 4096),
        entry("alloc", 1, 2, 20),
        entry("free_requested", 2, 1, 10),
        entry("free_completed", 3, 1, 10),
        entry("snapshot", 4),
    )
    assert block_events(snapshot({}, *entries), 1, most_entries=8) == [
        (BEGAN_NS + 1_000_000, 2, 20),
        (BEGAN_NS + 3_000_000, 1, -10),
    ]
    assert block_events(snapshot({}, *entries), 1, most_entries=7) is None


def test_kinds_are_told_by_when_the_host_asked(live_of: Callable[..., Live | None]) -> None:
    """By the clock of the device, the activation would be gone within the forward, and the moment made in it."""
    live = live_of(
        [
            entry("alloc", 1.0, 11, 100),  # an activation
            entry("alloc", 1.2, 12, 7),
            entry("free_completed", 1.4, 12, 7),  # a temporary of the forward
            entry("free_completed", 3.0, 11, 100),
            entry("alloc", 5.5, 13, 1000),  # a moment
        ],
        resident={1: 5000, 2: 3},
        kinds={1: Kind.PARAM},
    )
    assert live is not None
    assert live.at_peak() == {Kind.PARAM: 5000, "other": 3, Kind.SAVED: 0, Kind.TEMP: 0, Kind.MOMENT: 1000}
    assert max(live.by_kind[Kind.SAVED]) == 100
    assert max(live.by_kind[Kind.TEMP]) == 7
    assert live.peak_bytes == 6003
    # 1 of the 2 ms in which the host asked for the forward is 5 of the 10 ms in which the device ran it.
    assert live.at_s == pytest.approx([0, 5 * MS, 6 * MS, 7 * MS, (10 + 20 / 3) * MS, 35 * MS])


def test_a_copy_that_is_asked_for_has_its_memory_by_its_address(live_of: Callable[..., Live | None]) -> None:
    block = Taken("gather b0", BEGAN_NS + 501_000, 11)
    entries = [entry("alloc", 0.5, 11, 100), entry("free_completed", 1.5, 11, 100)]
    # On the device, the gather runs at another time than that at which the host took memory for it.
    gather = Span(lane=Lane.H2D, label="gather b0", start_s=6 * MS, end_s=8 * MS, issued_s=0.6 * MS)
    found = [live_of(entries, spans=(gather,), taken=taken) for taken in ((block,), ())]
    assert [live.at_peak() for live in found if live is not None] == [{Kind.GATHERED: 100}, {Kind.TEMP: 100}]


def test_a_gradient_that_leaves_late_is_told_by_its_address(live_of: Callable[..., Live | None]) -> None:
    """Its copy to the host is over long after the next region was asked for."""
    entries = [
        entry("alloc", 2.5, 11, 100),
        entry("alloc", 2.5, 12, 10),
        entry("free_completed", 4.5, 11, 100),
        entry("free_completed", 4.5, 12, 10),
    ]
    spans = (
        Span(lane=Lane.D2H, label="offload b0.grad", start_s=20 * MS, end_s=25 * MS, issued_s=3 * MS),
        Span(lane=Lane.COMPUTE, label="run bwd.1", start_s=20 * MS, end_s=25 * MS, issued_s=3.5 * MS),
    )
    live = live_of(entries, spans=spans, taken=(Taken("reduce", BEGAN_NS + 2_900_000, 11),))
    assert live is not None
    assert live.at_peak() == {Kind.GRAD: 100, Kind.TEMP: 10}


def test_a_step_whose_first_events_are_lost_has_no_memory(
    live_of: Callable[..., Live | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elixir_compile.compat.platforms.platform.MOST_ENTRIES", 2)
    assert live_of([entry("alloc", 1, 11, 1)]) is not None
    assert live_of([entry("alloc", 1, 11, 1), entry("alloc", 2, 12, 1)]) is None


def test_records_share_a_history_which_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        entry("snapshot", 0),
        entry("alloc", 1, 11, 100),
        entry("snapshot", 2),
        entry("alloc", 3, 12, 20),
        entry("snapshot", 4),
        entry("free_completed", 5, 12, 20),
    ]
    seen = [
        snapshot({}, *entries[:1]),
        snapshot({11: 100}, *entries[:3]),
        snapshot({}, *entries[:5]),
        snapshot({}, *entries),
    ]
    allocator = Allocator(*seen).installed(monkeypatch)
    outer, inner = record_blocks(DEVICE), record_blocks(DEVICE)
    assert outer is not None
    assert inner is not None
    assert inner.nbytes_at == {11: 100}
    assert [nbytes for *_, nbytes in inner.stop() or ()] == [20]
    assert allocator.is_on
    assert [nbytes for *_, nbytes in outer.stop() or ()] == [100, 20, -20]
    assert not allocator.is_on


def test_a_record_whose_owner_is_gone_ends_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(snapshot({}), snapshot({})).installed(monkeypatch)
    record = record_blocks(DEVICE)
    assert allocator.is_on
    del record
    assert not allocator.is_on


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_history_that_somebody_else_began_meanwhile_goes_on(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_stacks = {**entry("alloc", 1, 11, 100), "frames": [{"filename": "user.py", "line": 1, "name": "step"}]}
    allocator = Allocator(snapshot({}), snapshot({}, with_stacks)).installed(monkeypatch)
    record = record_blocks(DEVICE)
    assert record is not None
    if is_stopped:
        assert [nbytes for *_, nbytes in record.stop() or ()] == [100]
    del record
    assert allocator.is_on
    assert not allocator.snapshots


def test_a_history_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator().installed(monkeypatch)
    allocator.is_on = True
    assert record_blocks(DEVICE) is None
    assert allocator.is_on


def test_a_history_that_began_after_a_record_tells_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [entry("snapshot", at) for at in range(3)]
    Allocator(snapshot({}, *marks), snapshot({}, marks[0])).installed(monkeypatch)
    record = record_blocks(DEVICE)
    assert record is not None
    assert record.stop() is None


@dataclass
class Statistics:
    """Stands for a platform whose peak is read: as it is at the begin, and as it is at the end."""

    peaks_bytes: list[int]

    def peak_bytes(self, device: torch.device) -> int:
        return self.peaks_bytes.pop(0)


def test_a_peak_is_the_most_of_the_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [entry("alloc", 1, 11, 100), entry("alloc", 2, 12, 50), entry("free_completed", 3, 11, 100)]
    Allocator(snapshot({10: 7}), snapshot({}, *history)).installed(monkeypatch)
    with PeakRecord(cast(Platform, Statistics([900])), DEVICE) as record:
        pass
    assert record.peak_bytes == 157


@pytest.mark.parametrize(("later_bytes", "known_bytes"), [(901, 901), (900, None)])
def test_without_a_history_a_peak_is_known_if_the_statistic_rose(
    later_bytes: int, known_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Allocator().installed(monkeypatch).is_on = True
    assert PeakRecord(cast(Platform, Statistics([900, later_bytes])), DEVICE).stop() == known_bytes


@pytest.mark.parametrize("broken", ["start_allocator_history", "allocator_snapshot", "stop_allocator_history"])
def test_a_history_that_torch_changed_leaves_the_statistic(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object) -> None:
        raise TypeError("unexpected keyword argument")

    Allocator(snapshot({}), snapshot({})).installed(monkeypatch)
    monkeypatch.setattr(compat, broken, gone)
    with caplog.at_level("WARNING", logger="elixir_compile"):
        assert PeakRecord(cast(Platform, Statistics([900, 901])), DEVICE).stop() == 901
    assert "unexpected keyword argument" in caplog.text
    monkeypatch.undo()
    assert not blocks._running[DEVICE.type]


def test_a_region_that_starts_late_draws_the_blocks_after_it() -> None:
    live = Live(at_s=(0.0, 1.5 * MS, 6 * MS, 9 * MS), by_kind={"temp": (0, 1, 2, 3)})
    late = Span(lane=Lane.COMPUTE, label="run fwd.0", start_s=8 * MS, end_s=9 * MS, issued_s=1 * MS)
    drawn = drawn_by_device(live, TIMES, (late,))
    assert drawn.at_s == pytest.approx((0, 9 * MS, 40 * MS, 40 * MS))
    assert drawn.by_kind == live.by_kind


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of a step by kind over time: of hand-made events, and of real steps against the allocator and the plan.


PHASES = (
    Interval(phase=Phase.FORWARD, start_s=0, end_s=10 * MS),
    Interval(phase=Phase.BACKWARD, start_s=10 * MS, end_s=20 * MS),
    Interval(phase=None, start_s=20 * MS, end_s=25 * MS),
    Interval(phase=Phase.UPDATE, start_s=25 * MS, end_s=30 * MS),
)


def span(label: str, start: float, end: float, lane: Lane = Lane.COMPUTE) -> Span:
    return Span(lane=lane, label=label, start_s=start * MS, end_s=end * MS)


SPANS = (
    span("gather b0", 1, 2, Lane.H2D),
    span("run fwd.0", 3, 9),
    span("prefetch g0", 11, 12, Lane.H2D),
    span("run bwd.0", 13, 16),
    span("offload b0.grad", 17, 18, Lane.D2H),
    span("run bwd.1", 18.5, 19),
)


@pytest.mark.parametrize(
    ("born", "died", "kind"),
    [
        (1.5, 9.5, Kind.GATHERED),
        (4, 5, Kind.TEMP),
        (4, 14, Kind.SAVED),
        (4, None, Kind.SAVED),
        (11.5, 14, Kind.SAVED),
        (14, 15, Kind.TEMP),
        (14, 19.5, Kind.TEMP),
        (14, 18.2, Kind.TEMP),
        (14, 26, Kind.GRAD),
        (14, None, Kind.GRAD),
        (22, 23, "other"),
        (22, None, "other"),
        (26, 27, Kind.TEMP),
        (26, None, Kind.MOMENT),
    ],
)
def test_phase_lifetime_and_label_tell_the_kind(born: float, died: float | None, kind: str) -> None:
    events = [(born * MS, 64, 100)] + ([] if died is None else [(died * MS, 64, -100)])
    live = live_by_kind({}, events, PHASES, SPANS)
    assert live.at_peak() == {kind: 100}


@pytest.mark.parametrize(("action", "kind"), [("gather b0", Kind.GATHERED), ("prefetch g0", Kind.SAVED)])
def test_memory_for_a_copy_is_taken_before_its_span(action: str, kind: Kind) -> None:
    """An activation that follows at once, in the same microsecond, is not taken for the copy."""
    events = [(0.5 * MS, 64, 100), (0.5 * MS, 32, 10), (9 * MS, 32, -10), (9 * MS, 64, -100)]
    taken = [(0.501 * MS, 64, action)]
    assert live_by_kind({}, events, PHASES, SPANS, taken).at_peak() == {kind: 100, Kind.TEMP: 10}
    assert live_by_kind({}, events, PHASES, SPANS).at_peak() == {Kind.TEMP: 110}


def test_a_block_that_became_a_gradient_is_one_whenever_it_is_freed() -> None:
    """The second block at the address did not, nor did the activation."""
    events = [(14 * MS, 64, 100), (19.5 * MS, 64, -100), (19.8 * MS, 64, 10), (19.9 * MS, 64, -10)]
    taken = [(15 * MS, 64, "reduce"), (15 * MS, 32, "reduce")]
    live = live_by_kind({}, [(4 * MS, 32, 1), *events], PHASES, SPANS, taken)
    assert {kind: max(values) for kind, values in live.by_kind.items()} == {
        Kind.GRAD: 100,
        Kind.TEMP: 10,
        Kind.SAVED: 1,
    }
    late = live_by_kind({}, events, PHASES, SPANS, taken=[(12 * MS, 64, "reduce")])
    assert Kind.GRAD not in late.by_kind


def test_a_block_ends_where_another_takes_its_address() -> None:
    resident = {1: (10, "param"), 2: (20, "buffer")}
    events = [(1 * MS, 3, 5), (2 * MS, 1, 7), (3 * MS, 1, 0), (4 * MS, 9, -4), (5 * MS, 2, 0), (6 * MS, 3, -5)]
    live = live_by_kind(resident, events, PHASES, ())
    # The late news that the block at 1 is gone, and the end of a block that nobody knows, change nothing.
    assert live.at_s == (0.0, 1 * MS, 2 * MS, 5 * MS, 6 * MS)
    assert live.totals_bytes == [30, 35, 32, 12, 7]
    assert live.by_kind["param"] == (10, 10, 0, 0, 0)


def recorded(planner: str, num_steps: int = 4) -> tuple[FullStep, torch.nn.Module, torch.Tensor, elixir.HybridAdamW]:
    model = seeded(Stack, 64, 2)
    options = {"inner": "aot_eager", "report": False, "replan": False, "planner": planner, "update": "after_backward"}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    batch = vectors(1, rows=256)[0]
    with elixir.observe(compiled, full=(num_steps - 2,), memory_events=True, counters_hz=0) as study:
        for _ in range(num_steps):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    record = elixir.measure_step(lambda: (compiled(batch).backward(), optimizer.step(), optimizer.zero_grad()))
    (full,) = study.full_steps
    assert full.live is not None
    assert full.record.device_peak_bytes == full.live.peak_bytes == record.device_peak_bytes
    return full, model, batch, optimizer


KINDS = (Kind.PARAM, Kind.GRAD, Kind.MOMENT, Kind.SAVED, Kind.GATHERED)
MOST_APART_BYTES = 512
"""Scalars that plans leave out: the step counts of the optimizer, the loss, numbers of random generators."""


def assert_most_as_planned(full: FullStep, model: torch.nn.Module, kinds: tuple[Kind, ...]) -> None:
    """Fail unless the most bytes of each of `kinds` over the step are those of the plan."""
    planned = elixir.compilations(model)[0].timeline.live_bytes_by_kind
    assert full.live is not None
    for kind in kinds:
        most_bytes = max(full.live.by_kind.get(kind, (0,)))
        assert most_bytes == pytest.approx(max(planned.get(kind, (0,))), abs=MOST_APART_BYTES), kind


@pytest.mark.parametrize("planner", ["keep_all", "zero3_offload", pytest.param("zero_offload", marks=pytest.mark.slow)])
def test_the_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan(planner: str) -> None:
    full, model, _, _ = recorded(planner)
    assert_most_as_planned(full, model, KINDS)
    if planner == "zero3_offload":  # the plan's peak is elsewhere: it counts temporaries that a CPU does not have
        return
    planned = elixir.compilations(model)[0].timeline.peak.by_kind
    assert full.live is not None
    found = full.live.at_peak()
    assert all(found.get(kind, 0) == pytest.approx(planned.get(kind, 0), abs=MOST_APART_BYTES) for kind in KINDS)


# ----------------------------------------------------------------------------------------------------------------------
# Counters of the machine: what the host tells, and a made-up NVML with wraps, missing figures and errors.


UUID = "GPU-8f6e"
UINT, ULONGLONG = 1, 3
NEVER = ("nvmlDeviceGetPcieThroughput", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


class NvmlError(Exception):
    """An error of the made-up NVML."""


class Nvml:
    """A made-up `pynvml` with one GPU, whose link has moved `tx` and `rx` bytes."""

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    nvmlMemory_v2 = 2  # noqa: N815 - the name of NVML

    def __init__(self, *, kind: int = ULONGLONG) -> None:
        self.tx, self.rx, self.kind = 0, 0, kind
        self.energy_mj = 5000
        self.fails: dict[str, str] = {}
        self.field_error = 0
        self.asked: list[str] = []
        self.is_open = False
        self.has_gpm = False
        self.num_samples = 0
        """GPM samples that were made and not freed."""
        self.clock = 0

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802 - the name of NVML
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)])

    def __getattr__(self, name: str) -> Any:
        """Answer each function of NVML, and note that it was called."""
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*arguments: Any, **_: Any) -> Any:
            self.asked.append(name)
            if name in self.fails:
                raise NvmlError(self.fails[name])
            return self._answer(name, arguments)

        return answer

    def _answer(self, name: str, arguments: Any) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            self.is_open = name == "nvmlInit"
            return None
        if name == "nvmlDeviceGetHandleByUUID":
            if arguments[0] != UUID:
                raise NvmlError("Not Found")
            return "handle"
        if name.startswith("nvmlGpm"):
            return self._gpm(name, arguments)
        if name == "nvmlDeviceGetFieldValues":
            return [self._field(number) for number in arguments[1]]
        return {
            "nvmlDeviceGetCurrPcieLinkGeneration": 4,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetTotalEnergyConsumption": self.energy_mj,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7 << 30),
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
        }[name]

    def _gpm(self, name: str, arguments: Any) -> Any:
        """Answer with percentages that are the time between the samples, plus the number of the metric."""
        self.clock += name == "nvmlGpmSampleGet"
        if name == "nvmlGpmQueryDeviceSupport":
            return SimpleNamespace(isSupportedDevice=int(self.has_gpm))
        if name == "nvmlGpmSampleAlloc":
            self.num_samples += 1
            return SimpleNamespace(at=None)
        if name == "nvmlGpmSampleGet":
            arguments[1].at = self.clock
        elif name == "nvmlGpmSampleFree":
            self.num_samples -= 1
        else:
            asked = arguments[0]
            for metric in asked.metrics[: asked.numMetrics]:
                metric.value = float(asked.sample2.at - asked.sample1.at + metric.metricId)
                metric.nvmlReturn = 3 if metric.metricId == 5 else 0
        return None

    def _field(self, number: int) -> Any:
        value = {186: 350_000, 197: self.tx, 198: self.rx}[number]
        kind = UINT if number == 186 else self.kind
        held = SimpleNamespace(uiVal=value % (1 << 32) if kind == UINT else -1, ullVal=value)
        return SimpleNamespace(
            nvmlReturn=self.field_error if number != 186 else 0, valueType=kind, value=held, fieldId=number
        )


def test_figures_have_units_and_rates_are_of_two_readings() -> None:
    nvml = Nvml()
    gpu = GpuCounters(nvml, UUID)
    first = gpu.read(10.0)
    assert first["link_tx_bytes_per_s"] is None
    nvml.tx, nvml.rx, nvml.energy_mj = 20 << 30, 1 << 30, 6000
    later = gpu.read(10.5)
    assert later == {
        "device_used_bytes": 7 << 30, "device_busy_share": 0.75, "device_power_w": 350.0, "device_energy_j": 6.0,
        "device_clock_reasons": 4, "link_generation": 4, "link_width": 8, "link_most_width": 16,
        "device_sm_share": None, "device_tensor_share": None, "device_dram_share": None,
        "link_tx_bytes_per_s": 40 << 30, "link_rx_bytes_per_s": 2 << 30,
    }  # fmt: skip
    gpu.close()
    assert not nvml.is_open
    assert not set(NEVER) & set(nvml.asked)
    assert nvml.asked.count("nvmlDeviceGetMaxPcieLinkWidth") == 1, "the slot stays what it is"


def test_exact_shares_are_means_between_two_readings_until_the_driver_stops_to_tell_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    nvml = Nvml()
    nvml.has_gpm = True
    gpu = GpuCounters(nvml, UUID)

    def shares(now_s: float) -> list[float | None]:
        found = gpu.read(now_s)
        return [found[name] for name in ("device_sm_share", "device_tensor_share", "device_dram_share")]

    assert shares(0.0) == [None] * 3, "a mean needs two samples"
    for second in (1.0, 2.0):
        assert shares(second) == [0.03, None, 0.11]
    nvml.fails = {"nvmlGpmSampleGet": "Unknown Error"}
    assert shares(3.0) == [None] * 3
    assert [line for line in caplog.messages if "GPM" in line] == [
        "NVML tells no GPM figures of this GPU: Unknown Error"
    ]
    gpu.read(4.0)
    gpu.close()
    assert (nvml.num_samples, nvml.is_open) == (0, False)


def test_a_counter_of_32_bits_may_wrap_once_and_is_unknown_if_it_may_wrap_twice() -> None:
    nvml = Nvml(kind=UINT)
    nvml.tx = (1 << 32) - 1000
    gpu = GpuCounters(nvml, UUID)
    gpu.read(0.0)
    nvml.tx += 3000
    # 8 lanes of generation 4 move at most 15.8 GB/s: 2^32 bytes in 0.273 s.
    assert gpu.read(0.1)["link_tx_bytes_per_s"] == pytest.approx(3000 / 0.1)
    nvml.tx += 3000
    assert gpu.read(0.4)["link_tx_bytes_per_s"] is None
    nvml.tx += 3000
    assert gpu.read(0.5)["link_tx_bytes_per_s"] == pytest.approx(3000 / 0.1), "the next reading is known again"


def test_what_is_not_supported_is_none_with_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    nvml = Nvml()
    nvml.fails = {"nvmlDeviceGetTotalEnergyConsumption": "Not Supported"}
    nvml.field_error = 3
    gpu = GpuCounters(nvml, UUID)
    for second in range(3):
        found = gpu.read(float(second))
        assert found["device_energy_j"] is found["link_tx_bytes_per_s"] is found["link_rx_bytes_per_s"] is None
        assert found["device_power_w"] == 350.0
    assert nvml.asked.count("nvmlDeviceGetTotalEnergyConsumption") == 1, "what failed once is not asked again"
    assert sum("device_energy_j" in line for line in caplog.messages) == 1
    assert sum("link_tx" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("fault", ["no library", "no driver", "no such device"])
def test_without_nvml_there_is_one_line_and_no_figure(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    nvml = Nvml()
    if fault == "no driver":
        nvml.fails = {"nvmlInit": "Driver Not Loaded"}
    monkeypatch.setitem(sys.modules, "pynvml", None if fault == "no library" else nvml)
    assert gpu_counters("GPU-other" if fault == "no such device" else UUID) is None
    assert len(caplog.messages) == 1
    assert "no counters of the device" in caplog.messages[0]


def test_the_thread_samples_until_it_is_stopped_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    known: list[str] = []
    before = threading.active_count()
    began_s = time.perf_counter()
    thread = CounterThread(200.0, lambda: known[0] if known else None)
    while not thread.between(began_s, time.perf_counter()):
        time.sleep(0.005)
    known.append(UUID)  # the device of the model is known once it has run
    while thread.mean("device_busy_share", began_s, time.perf_counter()) is None:
        time.sleep(0.005)
    time.sleep(0.03)
    nvml.energy_mj += 4000
    time.sleep(0.05)
    thread.stop()
    assert threading.active_count() == before
    assert not nvml.is_open
    counters = thread.between(began_s, time.perf_counter())
    assert counters is not None
    assert counters.values["device_busy_share"][0] is None
    assert counters.values["device_busy_share"][-1] == 0.75
    assert counters.values["process_rss_bytes"][-1]
    assert thread.mean("device_busy_share", began_s, time.perf_counter()) == 0.75
    energies_j = zip(counters.at_s, counters.values["device_energy_j"], strict=True)
    known_s = [began_s + at_s for at_s, energy_j in energies_j if energy_j is not None]
    assert thread.difference("device_energy_j", known_s[1], known_s[-1]) == pytest.approx(4.0)
    assert thread.difference("device_energy_j", known_s[1], time.perf_counter()) is None, "no sample is later"


def test_an_error_in_the_thread_ends_the_counters_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: HostCounters) -> Any:
        raise KeyError("mine")

    monkeypatch.setattr(HostCounters, "read", fail)
    thread = CounterThread(5.0, lambda: None)
    thread.stop()
    assert thread.between(0.0, time.perf_counter()) is None
    assert any("no more counters" in line for line in caplog.messages)


def test_the_host_tells_bytes_and_seconds() -> None:
    found = HostCounters().read()
    assert found["process_rss_bytes"] > 1 << 20
    assert found["process_cpu_s"] > 0
    assert found["host_slab_bytes"] is not None
