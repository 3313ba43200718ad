"""The bytes by kind of a made-up step on an accelerator, whose allocator's history is written by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from elixir_compile import compat
from elixir_compile.compat.platforms import PeakRecord, Platform
from elixir_compile.compat.platforms import platform as blocks
from elixir_compile.compat.platforms.platform import block_events, live_blocks, record_blocks
from elixir_compile.ir import Kind, Lane, Phase, Span
from elixir_compile.runtime.recording import Anchor, Taken
from elixir_compile.tools.measure.memory import DeviceMemory, StepTimes, drawn_by_device
from elixir_compile.tools.observed import Interval, Live

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
