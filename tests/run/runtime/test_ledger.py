"""Ledgers: counts always, spans while recording."""

import gc
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from elixir_compile.ir.kinds import Lane
from elixir_compile.runtime import recording as recording_module
from elixir_compile.runtime.lanes import Plain, lanes_for
from elixir_compile.runtime.recording import Ledger, StepClock, all_ledgers, ledger_for
from tests.races.checked import Checked


def test_counts_are_kept_by_label_and_by_verb() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    for label in ("gather b0", "gather b1", "gather b1", "run fwd.0"):
        with ledger.span(Lane.H2D, label):
            pass
    assert ledger.times == {"gather b0": 1, "gather b1": 2, "run fwd.0": 1}
    assert ledger.counts == {"gather": 3, "run": 1}


def test_spans_are_kept_only_while_recording() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    with ledger.span(Lane.H2D, "gather b0"):
        pass
    recording = ledger.start_recording()
    assert ledger.is_recording
    with ledger.span(Lane.COMPUTE, "run fwd.0"), ledger.span(Lane.H2D, "gather b1"):
        time.sleep(0.01)
    spans = recording.stop()
    with ledger.span(Lane.COMPUTE, "run fwd.1"):
        pass
    assert [(span.lane, span.label) for span in spans] == [(Lane.COMPUTE, "run fwd.0"), (Lane.H2D, "gather b1")]
    assert all(span.end_s - span.start_s >= 0.01 and span.start_s >= 0 for span in spans)
    assert not ledger.is_recording
    assert recording.stop() == spans


def test_two_recordings_keep_their_own_spans() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    outer = ledger.start_recording()
    with ledger.span(Lane.H2D, "gather b0"):
        pass
    inner = ledger.start_recording()
    with ledger.span(Lane.H2D, "gather b1"):
        pass
    assert [span.label for span in inner.stop()] == ["gather b1"]
    with ledger.span(Lane.H2D, "gather b2"):
        pass
    assert [span.label for span in outer.stop()] == ["gather b0", "gather b1", "gather b2"]
    assert not ledger.is_recording


def test_a_span_that_raises_is_kept_and_the_error_passes() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    recording = ledger.start_recording()
    with pytest.raises(KeyError), ledger.span(Lane.COMPUTE, "run fwd.0"):
        raise KeyError("x")
    assert [span.label for span in recording.stop()] == ["run fwd.0"]


def test_a_span_that_is_open_when_a_recording_stops_is_added_when_it_closes() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    recording = ledger.start_recording()
    is_open, may_close = threading.Event(), threading.Event()

    def work() -> None:
        with ledger.span(Lane.HOST, "update b0"):
            is_open.set()
            may_close.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_open.wait()
    later = ledger.start_recording()
    assert recording.stop() == ()
    assert (recording.num_open, later.num_open) == (1, 0)
    with ledger.span(Lane.HOST, "update b1"):
        pass
    may_close.set()
    thread.join()
    assert [span.label for span in recording.spans()] == ["update b0"]
    assert [span.label for span in later.stop()] == ["update b1"]


def test_a_recording_waits_for_open_spans_as_long_as_it_is_told() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    recording = ledger.start_recording()
    end = ledger.begin(Lane.DISK, "write b0.state", 4096, piece=2)
    assert recording.stop(patience_s=0.01) == ()
    timer = threading.Timer(0.05, end)
    timer.start()
    (span,) = recording.stop(patience_s=60.0)
    timer.join()
    assert (span.lane, span.label, span.nbytes, span.piece, span.graph) == (Lane.DISK, "write b0.state", 4096, 2, "")
    assert span.end_s - span.start_s >= 0.05
    assert ledger.bytes == {(Lane.DISK, "write b0.state"): 4096}
    assert ledger.times == {}, "a read or a write is no action of a schedule"


def test_spans_belong_to_the_graph_that_runs_and_updates_to_none() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    recording = ledger.start_recording()

    def backward(args: list[int]) -> int:
        with ledger.span(Lane.COMPUTE, "run bwd.0"), ledger.span(Lane.COMPUTE, "update b0", graph=""):
            pass
        return args[0]

    def forward(args: list[int]) -> int:
        with ledger.span(Lane.H2D, "gather b0", 40):
            ledger.run("GPT", backward, args)
        raise KeyError(args[0])

    with pytest.raises(KeyError):
        ledger.run("GPT.1", forward, [3])
    with ledger.span(Lane.H2D, "gather b1"):
        pass
    found = {span.label: (span.graph, span.nbytes) for span in recording.stop()}
    assert found == {"gather b0": ("GPT.1", 40), "run bwd.0": ("GPT", 0), "update b0": ("", 0), "gather b1": ("", 0)}


def test_two_ledgers_on_one_clock_have_one_origin() -> None:
    ledgers = [Ledger(lanes_for(torch.device("cpu"))) for _ in range(2)]
    clock = StepClock(ledger.lanes for ledger in ledgers)
    time.sleep(0.02)
    recordings = [ledger.start_recording(clock) for ledger in ledgers]
    for ledger in ledgers:
        with ledger.span(Lane.COMPUTE, "run fwd.0"):
            time.sleep(0.01)
    first, second = (recording.stop()[0] for recording in recordings)
    assert 0.02 <= first.start_s < first.end_s <= second.start_s


def test_allocations_have_a_place_among_the_spans() -> None:
    ledger, flat = Ledger(lanes_for(torch.device("cpu"))), torch.empty(8)
    ledger.takes("gather b0", (flat,))
    recording = ledger.start_recording()
    with ledger.span(Lane.H2D, "gather b0"):
        time.sleep(0.01)
        ledger.takes("gather b0", (flat[4:],))
        time.sleep(0.01)
    recording.clock.end()
    (span,), (block,) = recording.stop(), recording.taken
    assert (block.label, block.address) == ("gather b0", flat.data_ptr())
    assert span.start_s < recording.clock.at_s(block.at_ns) < span.end_s


def test_the_clock_of_allocations_may_be_set_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs twice as fast as that of the spans: 8 s on it are 4 s."""
    now = {"perf_counter": 100.0, "time_ns": 5_000_000_000}
    for name in now:
        monkeypatch.setattr(recording_module.time, name, lambda name=name: now[name])
    clock = StepClock([])
    assert clock.at_s(13_000_000_000) == 8.0
    now |= {"perf_counter": 110.0, "time_ns": 25_000_000_000}
    clock.end()
    assert clock.at_s(13_000_000_000) == 4.0


def test_waits_of_the_calling_thread_are_recorded_and_not_counted() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    with ledger.waits("wait b0"):
        pass
    recording = ledger.start_recording()
    with ledger.waits("wait b1"):
        time.sleep(0.01)
    (span,) = recording.stop()
    assert (span.lane, span.label) == (Lane.CALLER, "wait b1")
    assert span.end_s - span.start_s >= 0.01
    assert ledger.times == {}


def test_counts_from_several_threads_add_up() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))

    def work() -> None:
        for _ in range(1000):
            with ledger.span(Lane.HOST, "update b0"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.counts == {"update": 4000}


def test_all_ledgers_holds_them_weakly() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))
    assert ledger in all_ledgers()
    before = len(all_ledgers())
    del ledger
    gc.collect()
    assert len(all_ledgers()) == before - 1


@pytest.mark.gpu
@pytest.mark.cuda
def test_device_spans_show_when_the_device_worked() -> None:
    ledger = Ledger(lanes_for(torch.device("cuda")))
    matrix = torch.ones(4096, 4096, device="cuda")
    recording = ledger.start_recording()
    with ledger.span(Lane.COMPUTE, "run fwd.0"):
        for _ in range(20):
            matrix @ matrix
    with ledger.span(Lane.HOST, "update b0"):
        time.sleep(0.01)
    by_label = {span.label: span for span in recording.stop()}
    flops = 20 * 2 * 4096**3
    assert by_label["run fwd.0"].end_s - by_label["run fwd.0"].start_s > flops / 2e15
    assert by_label["update b0"].end_s - by_label["update b0"].start_s >= 0.01


@dataclass
class Moment:
    """A moment of the clock of a device."""

    at_ms: float

    def elapsed_time(self, other: "Moment") -> float:
        return other.at_ms - self.at_ms


class Clocked(Plain):
    """Lanes of a device with a clock, and a stream that waits 40 ms for each collective."""

    has_clock = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now_ms = 0.0

    def timed_event(self) -> Moment:
        return Moment(self.now_ms)

    def hold_stream(self) -> None:
        self.now_ms += 40.0


def test_the_span_of_a_collective_ends_when_it_does_and_not_when_it_is_issued() -> None:
    lanes = Clocked()
    ledger = Ledger(lanes)
    assert ledger.started(Lane.GATHER, "gather b0", 64, lambda: lanes) is lanes
    assert lanes.now_ms == 0, "without a recording, nothing waits"
    recording = ledger.start_recording()
    ledger.started(Lane.GATHER, "gather b0", 64, lambda: lanes)
    (span,) = recording.stop()
    assert span.end_s - span.start_s == pytest.approx(0.04)
    assert (ledger.times["gather b0"], ledger.bytes[Lane.GATHER, "gather b0"]) == (2, 128)


def test_each_recording_has_an_origin_of_its_own_on_the_clock_of_the_device() -> None:
    lanes = Clocked()
    ledger = Ledger(lanes)
    first = ledger.start_recording()
    lanes.now_ms = 1e6
    second = ledger.start_recording()
    lanes.now_ms += 2.0
    with ledger.span(Lane.COMPUTE, "run fwd.0"):
        lanes.now_ms += 1.0
    ((early,), (late,)) = first.stop(), second.stop()
    assert (early.start_s, early.end_s) == pytest.approx((1000.002, 1000.003))
    assert (late.start_s, late.end_s) == pytest.approx((0.002, 0.003))
    assert late.issued_s is not None
    assert 0 <= late.issued_s < 1


def test_checked_lanes_time_collectives_to_their_end_too() -> None:
    lanes = Clocked()
    ledger = ledger_for(Checked(lanes))
    recording = ledger.start_recording()
    ledger.started(Lane.GATHER, "gather b0", 64, lambda: lanes)
    (span,) = recording.stop()
    assert span.end_s - span.start_s == pytest.approx(0.04)
    assert (ledger.times["gather b0"], ledger.bytes[Lane.GATHER, "gather b0"]) == (1, 64)
