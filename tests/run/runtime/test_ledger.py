"""Ledgers of what ran: counts always, spans while recording, and the labels and bytes of the plan."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.options import Planner
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import InnerVerb, Lane, Plan, Record, Tally, Tier, Update, Verb, tallies, verb_of
from elixir_compile.runtime import recording as recording_module
from elixir_compile.runtime.lanes import Plain, lanes_for
from elixir_compile.runtime.recording import Ledger, StepClock, Taken, all_ledgers, ledger_for
from elixir_compile.step.seconds import Drawing, simulate
from tests.races.checked import Checked
from tests.run.races.combinations import Combination, batches_of, wide
from tests.run.training import hybrid_adamw, loss_of
from tests.run.updating import small_buckets

# ----------------------------------------------------------------------------------------------------------------------
# Ledgers: counts always, spans while recording.


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
    assert ledger._recordings
    with ledger.span(Lane.COMPUTE, "run fwd.0"), ledger.span(Lane.H2D, "gather b1"):
        time.sleep(0.01)
    spans = recording.stop()
    with ledger.span(Lane.COMPUTE, "run fwd.1"):
        pass
    assert [(span.lane, span.label) for span in spans] == [(Lane.COMPUTE, "run fwd.0"), (Lane.H2D, "gather b1")]
    assert all(span.end_s - span.start_s >= 0.01 and span.start_s >= 0 for span in spans)
    assert not ledger._recordings
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
    assert not ledger._recordings


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
    assert (recording._num_open, later._num_open) == (1, 0)
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


# ----------------------------------------------------------------------------------------------------------------------
# The labels of a measured step, and the bytes of each, are those of the simulated step of its plan.


SEARCHES = ("milp", "greedy")


@dataclass(frozen=True, slots=True)
class Case:
    planner: str
    update: Update
    state: str = "placed"
    """`placed` by the planner; `disk`: all on disk; `streamed`: of every second bucket on the host, and streamed."""
    activations: str = "keep"
    micro_batches: int = 1

    def __str__(self) -> str:
        extra = f"-in{self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.planner}-{self.update}-{self.state}-{self.activations}{extra}"

    def decide(self, plan: Plan) -> Plan:
        """Return `plan` with the update mode of the case, and state where it wants it."""
        homes = list(plan.placements)
        for number, home in enumerate(homes):
            if self.state == "disk":
                homes[number] = replace(home, optim=Tier.DISK, streamed=False)
            elif self.state == "streamed" and number % 2 == 0:
                homes[number] = replace(home, optim=Tier.HOST, streamed=True)
        return replace(plan, placements=tuple(homes), update=self.update)


QUICK = (
    Case("milp", Update.ACROSS_STEPS, "streamed"),
    Case("zero3_offload", Update.IN_BACKWARD, "disk"),
    Case("keep_all", Update.AFTER_BACKWARD),
    Case("greedy", Update.IN_BACKWARD, activations="offload", micro_batches=4),
)
ALL = tuple(
    dict.fromkeys(
        (
            *QUICK,
            *(Case(*case) for case in product(get_args(Planner), Update, ("placed", "disk", "streamed"))),
            *(Case("greedy", update, activations=saving) for update in Update for saving in ("offload", "recompute")),
        )
    )
)


@dataclass(frozen=True, slots=True)
class Steps:
    """A step as it is simulated, and as it is measured."""

    simulated: Record
    measured: Record
    taken: tuple[Taken, ...]
    """The blocks of device memory that the measured step took for actions."""


def steps_of(case: Case, folder: Path) -> Steps:
    """Return a step of `case`, simulated and measured."""
    batches = batches_of(Combination(update=case.update), 3)
    model = elixir.prepare(wide())
    torch._dynamo.reset()
    # Another test may have left a note that gradients of this step stay from earlier backward passes.
    options: dict[str, Any] = {
        "inner": "aot_eager", "report": False, "replan": False, "planner": case.planner, "accumulate": False,
        "activations": case.activations, "micro_batches": case.micro_batches,
    }  # fmt: skip
    if case.state == "disk":
        options["disk_path"] = folder
    if case.planner in SEARCHES:
        probe = torch.compile(elixir.prepare(wide()), backend="elixir", options={**options, "device_memory": 1})
        with small_buckets(lambda plan: plan), pytest.raises(elixir.NoFeasiblePlan) as raised:
            probe(batches[0])
        options["device_memory"] = int(1.05 * raised.value.needed_bytes)
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer: Any = hybrid_adamw(model.parameters())

    def step(batch: torch.Tensor) -> None:
        loss_of(compiled, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with small_buckets(case.decide):
        for batch in batches[:2]:
            step(batch)
        optimizer.wait()
        recording = executor_of(model).ledger.start_recording()
        measured = elixir.measure_step(lambda: step(batches[2]))
        recording.end()
    active = model_of(model).graphs[-1].active
    simulated = simulate(active.graph, active.plan, active.problem.cluster)
    return Steps(simulated, measured, tuple(recording.taken))


def graphs_of(record: Record) -> Mapping[tuple[Lane, str], set[str]]:
    """Return the graphs of the spans of each lane and label."""
    found: dict[tuple[Lane, str], set[str]] = {}
    for span in record.spans:
        if span.lane is not Lane.CALLER:
            found.setdefault((span.lane, span.label), set()).add(span.graph)
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL],  # 1 s of CPU time each
    ids=str,
)
def test_a_measured_step_has_the_labels_and_the_bytes_of_its_plan(case: Case, tmp_path: Path) -> None:
    steps = steps_of(case, tmp_path)
    simulated, measured = steps.simulated, steps.measured
    assert dict(tallies(measured.spans)) == dict(tallies(simulated.spans))
    assert graphs_of(measured) == graphs_of(simulated)
    planned = {verb: simulated.counts.get(verb, 0) for verb in ("gather", "release", "reduce", "offload", "prefetch")}
    assert {verb: measured.counts.get(verb, 0) for verb in planned} == planned
    verbs = {verb_of(span.label) for span in measured.spans}
    assert (InnerVerb.WRITE in verbs) == (case.state == "disk")
    assert (Verb.PREFETCH in verbs) == (case.activations == "offload")
    # A copy to the device has memory of its own there, except of state, which passes through rooms for all buckets.
    placed = Counter(block.label for block in steps.taken)
    arriving = {span.label for span in measured.spans if span.lane is Lane.H2D and not span.label.endswith(".state")}
    assert placed.keys() >= arriving
    gathers = {name: num for name, num in placed.items() if name in arriving and verb_of(name) == Verb.GATHER}
    assert gathers == {
        name: tally.times
        for (lane, name), tally in tallies(measured.spans).items()
        if lane is Lane.H2D and name in gathers
    }
    assert case.planner != "zero3_offload" or len(gathers) == 4


@pytest.mark.parametrize("owner", [Ledger, Drawing])
def test_a_span_that_either_side_drops_shows(owner: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the release of one bucket on one side, the two differ."""
    name = "_timed" if owner is Ledger else "add"
    usual = getattr(owner, name)

    def without(self: Any, lane: Any, label: str, *args: Any, **more: Any) -> Any:
        dropped = (label if owner is Ledger else lane.label(label)) == "release b1"
        return (nullcontext() if owner is Ledger else None) if dropped else usual(self, lane, label, *args, **more)

    monkeypatch.setattr(owner, name, without)
    steps = steps_of(Case("zero3_offload", Update.AFTER_BACKWARD), tmp_path)
    found = [tallies(record.spans) for record in (steps.simulated, steps.measured)]
    assert found[0] != found[1]
    assert {*found[0].items()} ^ {*found[1].items()} == {((Lane.COMPUTE, "release b1"), Tally(2, 0))}
