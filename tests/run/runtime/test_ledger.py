"""Ledgers: counts always, spans while recording."""

import gc
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from elixir_compile.ir.kinds import Lane
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.lanes.checked import Checked
from elixir_compile.runtime.lanes.plain import Plain
from elixir_compile.runtime.ledger import Ledger, all_ledgers, ledger_for


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


def test_checked_lanes_time_collectives_to_their_end_too() -> None:
    lanes = Clocked()
    ledger = ledger_for(Checked(lanes))
    recording = ledger.start_recording()
    ledger.started(Lane.GATHER, "gather b0", 64, lambda: lanes)
    (span,) = recording.stop()
    assert span.end_s - span.start_s == pytest.approx(0.04)
    assert (ledger.times["gather b0"], ledger.bytes[Lane.GATHER, "gather b0"]) == (1, 64)
