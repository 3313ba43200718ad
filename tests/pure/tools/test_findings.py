"""Observed runs: values and files, findings, and events for a trace viewer."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, TraceFileError
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir import Lane, Origin, Phase, Record, Span
from elixir_compile.tools.observed import (
    Counters,
    FullStep,
    Interval,
    Live,
    StepSummary,
    StudyRow,
    full_step_from_json,
    full_step_to_json,
    seconds_by_phase,
    summaries_from_lines,
    summary_from_json,
    summary_to_json,
)
from elixir_compile.tools.report import findings
from elixir_compile.tools.report.findings import WHOLE, Finding, Observed, observed_row, phase_figures
from elixir_compile.tools.report.runs import finding_lines, trace_events
from tests.pure.problems import tight_problem
from tests.pure.tools.pages import tight

# ----------------------------------------------------------------------------------------------------------------------
# Findings and the table of phases: each figure computed a second way, and silence just within each limit.


PERIOD_S = 100
CLUSTER = tight_problem().cluster
INTERVALS = (
    Interval(phase=Phase.FORWARD, start_s=0, end_s=30),
    Interval(phase=Phase.BACKWARD, start_s=30, end_s=70),
    Interval(phase=None, start_s=70, end_s=75),
    Interval(phase=Phase.UPDATE, start_s=75, end_s=100),
)


def summary(**figures: object) -> StepSummary:
    seconds_s = {"forward": 30.0, "backward": 40.0, "caller": 5.0, "update": 25.0}
    given = {"step": 0, "rank": 0, "plans": (), "period_s": float(PERIOD_S), "seconds_s": seconds_s} | figures
    return StepSummary(**given)  # pyright: ignore[reportArgumentType]


def row(spans: list[Span], **figures: object) -> StudyRow:
    """Return a row whose step of 100 s has `spans`."""
    record = Record(origin=Origin.MEASURED, step_s=PERIOD_S, device_peak_bytes=0, host_peak_bytes=0, spans=tuple(spans))
    full = FullStep(summary=summary(), intervals=INTERVALS, record=record)
    fields = {"name": "row", "what": "", "budget_bytes": GIB, "full": full, "timed": (summary(),)} | figures
    return StudyRow(**fields)  # pyright: ignore[reportArgumentType]


def seen(spans: list[Span], **figures: object) -> Observed:
    found = observed_row(row(spans, **figures), CLUSTER)
    assert found is not None
    return found


def span(lane: Lane, label: str, start_s: float, end_s: float, nbytes: int = 0, issued_s: float | None = None) -> Span:
    return Span(lane=lane, label=label, start_s=start_s, end_s=end_s, nbytes=nbytes, issued_s=issued_s)


seconds = st.integers(0, PERIOD_S)
some_spans = st.lists(
    st.tuples(st.sampled_from([Lane.H2D, Lane.D2H, Lane.COMPUTE, Lane.CALLER, Lane.HOST]), seconds, seconds).map(
        lambda drawn: span(drawn[0], "gather b0", min(drawn[1:]), max(drawn[1:]), 1000 * (abs(drawn[1] - drawn[2])))
    ),
    max_size=12,
)


@given(some_spans)
def test_the_table_of_phases_is_that_of_a_count_second_by_second(spans: list[Span]) -> None:
    """Spans begin and end at whole seconds, so an array with a place for each second tells the same figures."""
    phase_of = np.empty(PERIOD_S, dtype=object)
    for interval in INTERVALS:
        phase_of[int(interval.start_s) : int(interval.end_s)] = "caller" if interval.phase is None else interval.phase
    for figures in phase_figures(row(spans), CLUSTER):
        within = np.ones(PERIOD_S, bool) if figures.phase == WHOLE else phase_of == figures.phase
        assert figures.seconds_s == within.sum()
        for lane, busy in (
            (Lane.COMPUTE, figures.compute_s),
            (Lane.CALLER, figures.waited_s),
            (Lane.HOST, figures.host_s),
        ):
            assert busy == pytest.approx(_places(spans, lane)[within].any(axis=1).sum())
        for lane, traffic in ((Lane.H2D, figures.up), (Lane.D2H, figures.down)):
            busy = _places(spans, lane)[within]
            assert traffic.busy_s == pytest.approx(busy.any(axis=1).sum())
            # Each span moves 1,000 bytes in each of its seconds.
            assert traffic.nbytes == 1000 * busy.sum()


def _places(spans: list[Span], lane: Lane) -> np.ndarray:
    """Return bool[second, span], whether the span of `lane` runs in the second."""
    own = [each for each in spans if each.lane is lane]
    second = np.arange(PERIOD_S)[:, None]
    starts, ends = (np.array([getattr(each, name) for each in own]) for name in ("start_s", "end_s"))
    return (second >= starts) & (second < ends) if own else np.zeros((PERIOD_S, 1), bool)


def test_memory_of_a_phase_is_the_most_and_the_least_within_it() -> None:
    live = Live(at_s=(0.0, 10.0, 40.0, 80.0), by_kind={"param": (5, 5, 5, 5), "temp": (1, 7, 9, 0)})
    made = row([])
    assert made.full is not None
    figures = {each.phase: each for each in phase_figures(replace(made, memory=replace(made.full, live=live)), CLUSTER)}
    assert (figures["forward"].most_bytes, figures["forward"].least_bytes) == (12, 6)
    assert (figures["backward"].most_bytes, figures["backward"].least_bytes) == (14, 12)
    assert (figures["update"].most_bytes, figures["update"].least_bytes) == (14, 5)
    assert figures["update"].unused_bytes == GIB - 14
    assert figures[WHOLE].most_bytes == live.peak_bytes


def test_f1_the_link_is_idle() -> None:
    found = findings.idle_link(
        seen([span(Lane.H2D, "gather b0", 0, 30, MIB), span(Lane.H2D, "gather b1", 20, 40, MIB)])
    )
    assert found == Finding(
        code="F1",
        text="the link to the device is idle 60% of the step; 2.0 MiB pass it",
        value=0.6,
        unit="share of the step",
        limit=0.5,
        evidence=("gather b0", "gather b1"),
    )
    assert findings.idle_link(seen([span(Lane.H2D, "gather b0", 0, 50, MIB)])) is None
    assert findings.idle_link(seen([])) is None  # a plan that moves nothing needs no link


def test_f2_the_update_is_bound_by_memory_or_by_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = tight()
    nbytes = findings.host_update_bytes(made)
    assert nbytes > 0
    updates = [span(Lane.HOST, "update b0", 0, 20), span(Lane.HOST, "update b1", 30, 31)]
    for share, bound in ((0.74, "the cores"), (0.76, "memory, so more threads do not help")):
        monkeypatch.setattr(findings, "host_memory_bytes_per_s", lambda _, share=share: nbytes / 21 / share)
        found = findings.bound_update(seen(updates, plan=made))
        assert found is not None
        assert found.value == pytest.approx(0.21)
        assert found.text.endswith(f"{share:.0%} of what host memory carries: they are bound by {bound}")
    assert findings.bound_update(seen(updates[:1], plan=made)) is None


def test_f3_memory_is_unused_in_the_update() -> None:
    made = row([])
    assert made.full is not None

    def unused(nbytes: int) -> Finding | None:
        live = Live(at_s=(0.0,), by_kind={"temp": (GIB - nbytes,)})
        return findings.unused_memory(seen([], memory=replace(made.full, live=live)))

    found = unused(GIB // 2)
    assert found is not None
    assert (found.value, found.text) == (0.5, "in the update 512.0 MiB of 1.0 GiB of the device are unused")
    assert unused(GIB // 4) is None


def test_f4_the_step_waits() -> None:
    waits = [span(Lane.CALLER, "wait b2", 10, 12), span(Lane.CALLER, "wait b5", 40, 42)]
    late = findings.late_copies(seen(waits))
    assert late is not None
    assert (late.value, late.text) == (
        0.04,
        "the step waits 4 s (b2 to b5): copies or updates begin too late for it",
    )
    full = findings.late_copies(seen([*waits, span(Lane.H2D, "gather b0", 0, 95)]))
    assert full is not None
    assert full.text.endswith("the link is full")
    assert findings.late_copies(seen([span(Lane.CALLER, "wait b2", 10, 13)])) is None


def test_f5_copies_are_slow() -> None:
    rate = CLUSTER.d2h.bytes_per_s
    slow = [span(Lane.D2H, "offload b0", 0, 10, int(5 * rate)), span(Lane.D2H, "offload b1", 20, 30, 100)]
    found = findings.slow_copies(seen(slow))
    assert found is not None
    assert found.value == pytest.approx(0.25)
    assert "copies from the device run at 25%" in found.text
    assert "1 of 2 are below 4.0 MiB" in found.text
    assert findings.slow_copies(seen([span(Lane.D2H, "offload b0", 0, 10, int(7.01 * rate))])) is None


def test_f6_the_device_waits_for_python() -> None:
    def regions(issued_s: float) -> list[Span]:
        return [
            span(Lane.COMPUTE, "run fwd.0", 0, 10, issued_s=0),
            span(Lane.COMPUTE, "run fwd.1", issued_s, 40, issued_s=issued_s),
            span(Lane.COMPUTE, "run fwd.2", 42, 50, issued_s=30),  # was issued in time, and waited for something else
        ]

    found = findings.waiting_device(seen(regions(16)))
    assert found is not None
    assert (found.value, found.evidence) == (0.06, ("run fwd.1",))
    assert findings.waiting_device(seen(regions(15))) is None


def test_f7_the_own_code_is_long() -> None:
    within = seen([])
    assert findings.long_caller(within) is None
    caller = replace(within.phases["caller"], share=0.11)
    found = findings.long_caller(replace(within, phases={**within.phases, "caller": caller}))
    assert found is not None
    assert found.text.startswith("your own code takes 11% of the step")
    edge = replace(within, phases={**within.phases, "caller": replace(caller, share=0.1)})
    assert findings.long_caller(edge) is None


def test_f8_the_plan_is_wrong() -> None:
    made, _ = tight()
    planned = made.prediction

    def measured(factor: float) -> Finding | None:
        own = seen([], plan=made, peak_bytes=planned.device_peak_bytes)
        record = replace(own.full.record, host_peak_bytes=planned.host_peak_bytes, counts=_counts(made))
        own = replace(own, full=replace(own.full, record=record), step_s=factor * planned.step_s)
        return findings.wrong_plan(own)

    found = measured(1.5)
    assert found is not None
    assert (found.value, found.evidence) == (pytest.approx(1.5), ("step_s",))
    assert measured(1.09) is None


def _counts(made: object) -> dict[str, int]:
    from elixir_compile.tools.report.explain import plan_answer

    return dict(plan_answer(made).counts)  # pyright: ignore[reportArgumentType]


def test_f9_memory_is_scattered() -> None:
    assert findings.scattered_memory(seen([], timed=(summary(alloc_retries=0),))) is None
    found = findings.scattered_memory(seen([], timed=(summary(alloc_retries=2), summary(alloc_retries=1))))
    assert found is not None
    assert (found.value, found.unit) == (3.0, "times")
    reserved = summary(device_reserved_bytes=GIB, device_peak_bytes=GIB - GIB // 5)
    found = findings.scattered_memory(seen([], timed=(reserved,)))
    assert found is not None
    assert found.value == pytest.approx(0.2)
    edge = replace(reserved, device_peak_bytes=GIB - GIB // 10)
    assert findings.scattered_memory(seen([], timed=(edge,))) is None


@pytest.mark.parametrize(("reasons", "said"), [((0x04, 0, None), "power"), ((0x20, 0x40, 0), "heat"), ((0x01, 0), "")])
def test_f10_clocks_are_capped(reasons: tuple[int | None, ...], said: str) -> None:
    own = seen([])
    counters = Counters(at_s=tuple(map(float, range(len(reasons)))), values={"device_clock_reasons": reasons})
    found = findings.capped_clocks(replace(own, full=replace(own.full, counters=counters)))
    assert (found is None) == (not said)
    if found is not None:
        known = [reason for reason in reasons if reason is not None]
        assert found.text == f"{said} lowered the clocks in {sum(map(bool, known))} of {len(known)} samples"


@pytest.mark.parametrize(("widths", "said"), [((8, None), "the link runs at x8 of x16"), ((8, 16), ""), ((None,), "")])
def test_f10_the_link_is_narrow(widths: tuple[int | None, ...], said: str) -> None:
    own = seen([])
    values = {"link_width": widths, "link_most_width": (16,) * len(widths)}
    counters = Counters(at_s=tuple(map(float, range(len(widths)))), values=values)
    found = findings.capped_clocks(replace(own, full=replace(own.full, counters=counters)))
    assert ("" if found is None else found.text) == said
    if found is not None:
        assert (found.value, found.limit, found.evidence) == (0.5, 1.0, ("link_width",))


def test_f11_a_rank_is_slow() -> None:
    def ranks(busy_s: float) -> Finding | None:
        # All periods are equal, because the other ranks wait for the slow one.
        slow = summary(waited_s=PERIOD_S - busy_s, seconds_s={"forward": 30.0, "update": busy_s - 30})
        others = summary(waited_s=50.0, seconds_s={"forward": 30.0, "update": 20.0})
        return findings.slow_rank(replace(seen([]), ranks={0: (others,), 1: (others,), 2: (slow,)}))

    found = ranks(55)
    assert found is not None
    assert (found.value, found.text) == (
        pytest.approx(0.1),
        "rank 2 works 10% longer than the median rank, most in its update",
    )
    assert ranks(52.4) is None
    assert findings.slow_rank(seen([])) is None


def test_a_finding_is_a_line_with_its_evidence() -> None:
    found = findings.find(seen([span(Lane.H2D, "gather b0", 0, 30, MIB)]))
    assert [each.code for each in found][:1] == ["F1"]
    assert next(finding_lines(found)).endswith("[gather b0]")


# ----------------------------------------------------------------------------------------------------------------------
# Observed steps as values: every one reads back from its JSON, wrong ones are refused, scalars are finite.


SECONDS = st.floats(0, 1e6, allow_nan=False)
BYTES = st.integers(0, 1 << 50)
NAMES = st.sampled_from(["forward", "backward", "update", "caller"])
PHASES = st.sampled_from([None, *Phase])
ANY = st.floats(allow_nan=False, allow_infinity=False)
SUMMARIES = st.builds(
    StepSummary,
    step=st.integers(0, 1 << 40),
    rank=st.integers(0, 4096),
    plans=st.lists(st.text(max_size=12), max_size=3).map(tuple),
    period_s=SECONDS,
    seconds_s=st.dictionaries(NAMES, SECONDS),
    moved_bytes=st.dictionaries(st.sampled_from([str(lane) for lane in Lane]), st.dictionaries(NAMES, BYTES)),
    host_update_s=st.none() | SECONDS,
    waited_s=st.none() | SECONDS,
    device_peak_bytes=st.none() | BYTES,
    alloc_retries=st.none() | st.integers(0, 100),
    host_slab_bytes=BYTES,
    energy_j=st.none() | SECONDS,
    device_busy_share=st.none() | st.floats(0, 1),
    notes=st.dictionaries(st.text(max_size=8), ANY),
)
ANY_INTERVALS = st.lists(st.tuples(PHASES, SECONDS, SECONDS), max_size=5).map(
    lambda found: tuple(Interval(phase=phase, start_s=min(a, b), end_s=max(a, b)) for phase, a, b in found)
)
SPANS = st.lists(st.tuples(st.sampled_from(list(Lane)), SECONDS, SECONDS, BYTES), max_size=5).map(
    lambda found: tuple(
        Span(lane=lane, label="run fwd.0", start_s=min(a, b), end_s=max(a, b), nbytes=nbytes)
        for lane, a, b, nbytes in found
    )
)


@st.composite
def full_steps(draw: st.DrawFn) -> FullStep:
    times = tuple(sorted(draw(st.lists(SECONDS, max_size=4))))
    columns = st.lists(BYTES, min_size=len(times), max_size=len(times)).map(tuple)
    values = st.lists(st.none() | ANY, min_size=len(times), max_size=len(times)).map(tuple)
    record = Record(
        origin=Origin.MEASURED,
        step_s=draw(SECONDS),
        device_peak_bytes=draw(BYTES),
        host_peak_bytes=draw(BYTES),
        spans=draw(SPANS),
        counts=draw(st.dictionaries(st.sampled_from(["run", "gather"]), st.integers(0, 9))),
    )
    return FullStep(
        summary=draw(SUMMARIES),
        intervals=draw(ANY_INTERVALS),
        record=record,
        live=draw(st.none() | st.dictionaries(NAMES, columns).map(lambda found: Live(at_s=times, by_kind=found))),
        counters=draw(st.none() | st.dictionaries(NAMES, values).map(lambda found: Counters(at_s=times, values=found))),
    )


@given(SUMMARIES)
def test_a_summary_reads_back_from_one_line(summary: StepSummary) -> None:
    line = summary_to_json(summary)
    assert "\n" not in line
    assert summary_from_json(line) == summary


@settings(max_examples=30)
@given(full_steps())
def test_a_full_step_reads_back(full: FullStep) -> None:
    assert full_step_from_json(full_step_to_json(full)) == full


@settings(max_examples=30)
@given(st.lists(SUMMARIES, max_size=4), st.integers(0, 200))
def test_lines_that_end_in_the_middle_give_the_whole_ones(summaries: list[StepSummary], kept: int) -> None:
    text = "".join(summary_to_json(summary) + "\n" for summary in summaries)
    assert summaries_from_lines(text) == summaries
    assert summaries_from_lines(text[:kept]) == summaries[: text[:kept].count("\n")]


@given(SUMMARIES)
def test_scalars_are_finite_floats_under_one_prefix(summary: StepSummary) -> None:
    scalars = summary.scalars()
    assert all(name.startswith("elixir/") and type(value) is float for name, value in scalars.items())
    assert all(map(math.isfinite, scalars.values()))
    assert ("elixir/energy_j" in scalars) == (summary.energy_j is not None)


def plain_summary(**changes: object) -> StepSummary:
    fields: Mapping[str, object] = {"step": 1, "rank": 0, "plans": (), "period_s": 1.0, "seconds_s": {}} | changes
    return StepSummary(**fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain_summary(period_s=math.nan),
        lambda: plain_summary(seconds_s={"forward": -1.0}),
        lambda: plain_summary(moved_bytes={"h2d": {"forward": -1}}),
        lambda: Interval(phase=None, start_s=2.0, end_s=1.0),
        lambda: Counters(at_s=(1.0,), values={"device_power_w": ()}),
        lambda: Live(at_s=(1.0,), by_kind={"param": ()}),
        lambda: Live(at_s=(1.0,), by_kind={"param": (-1,)}),
    ],
)
def test_contradictions_are_refused(make) -> None:
    with pytest.raises(InvalidPlan):
        make()


def test_another_file_is_refused_with_its_field() -> None:
    with pytest.raises(TraceFileError, match="elixir: expected 'step', got 'full step'"):
        summary_from_json(summary_to_json(plain_summary()).replace('"step"', '"full step"', 1))


def test_seconds_by_phase_are_the_sums_of_its_intervals() -> None:
    parts = [(Phase.FORWARD, 0.0, 1.0), (None, 1.0, 1.5), (Phase.FORWARD, 1.5, 3.5)]
    found = seconds_by_phase(Interval(phase=phase, start_s=start, end_s=end) for phase, start, end in parts)
    assert found == {"forward": 3.0, "caller": 0.5}


def test_live_bytes_tell_their_peak_and_its_kinds() -> None:
    live = Live(at_s=(0.0, 1.0, 2.0), by_kind={"param": (4, 4, 4), "temp": (0, 9, 2)})
    assert (live.totals_bytes, live.peak_bytes, live.at_peak()) == ([4, 13, 6], 13, {"param": 4, "temp": 9})
    assert Live(at_s=(), by_kind={}).at_peak() == {}


# ----------------------------------------------------------------------------------------------------------------------
# The Chrome trace of recorded steps: events of a track nest, times are in order, everything has a name.


TIMES = st.floats(0, 2, allow_nan=False)
TRACED_SPANS = st.lists(
    st.tuples(st.sampled_from(list(Lane)), TIMES, TIMES, st.integers(0, 1 << 40)).map(
        lambda found: Span(
            lane=found[0], label="run fwd.0", start_s=min(found[1:3]), end_s=max(found[1:3]), nbytes=found[3]
        )
    ),
    max_size=30,
)


def full_step(spans: list[Span], *, step: int = 8, rank: int = 0) -> FullStep:
    seconds_s = {"forward": 0.5, "caller": 1.5}
    return FullStep(
        summary=StepSummary(step=step, rank=rank, plans=("a",), period_s=2.0, seconds_s=seconds_s, notes={"loss": 1.0}),
        intervals=(
            Interval(phase=Phase.FORWARD, start_s=0.0, end_s=0.5),
            Interval(phase=None, start_s=0.5, end_s=2.0),
        ),
        record=Record(
            origin=Origin.MEASURED, step_s=2.0, device_peak_bytes=1, host_peak_bytes=0, spans=tuple(spans), counts={}
        ),
        live=Live(at_s=(0.0, 0.1), by_kind={"param": (1, 1), "temp": (0, 5)}),
        counters=Counters(at_s=(0.2, 0.4), values={"device_power_w": (None, 300.0)}),
    )


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Fail unless the events of each track are nested or apart, in whole nanoseconds."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for track in tracks.values():
        open_ends: list[int] = []
        for start, end in sorted(track, key=lambda both: (both[0], -both[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


SHORTEST = Span(lane=Lane.COMPUTE, label="run fwd.0", start_s=0.0, end_s=2.3e-311, nbytes=1)
"""A span so short that its bytes per second are more than the largest float."""


@given(TRACED_SPANS, TRACED_SPANS)
@example([], [SHORTEST])
def test_events_of_a_track_nest_and_all_spans_are_there(spans: list[Span], others: list[Span]) -> None:
    planned = full_step(others).record
    steps = [full_step(spans), full_step(spans, step=9), full_step(others, rank=1)]
    trace = json.loads(json.dumps(trace_events(steps, {(0, 9): 2.0 + 1 / 3}, planned), allow_nan=False))
    events = trace["traceEvents"]
    assert_nested(events)
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    shown = [event for event in timed if event["ph"] == "X" and event["name"] == "run fwd.0"]
    assert len(shown) == 2 * len(spans) + len(others) + 3 * len(others)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in timed if event["ph"] == "X"} <= named


def test_copies_at_the_same_time_get_a_second_track_and_rates() -> None:
    spans = [
        Span(lane=Lane.H2D, label="gather b0", start_s=0.0, end_s=1.0, nbytes=4_000_000, graph="GPT2", issued_s=0.0),
        Span(lane=Lane.H2D, label="gather b1", start_s=0.5, end_s=1.5),
        Span(lane=Lane.H2D, label="gather b2", start_s=0.6, end_s=0.7),
    ]
    events = trace_events([full_step(spans)], {(0, 8): 10.0})["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = {event["name"]: names[event["pid"], event["tid"]] for event in events if event["name"].startswith("gath")}
    assert tracks == {"gather b0": "h2d", "gather b1": "h2d 2", "gather b2": "h2d"}
    first = next(event for event in events if event["name"] == "gather b0")
    assert (first["ts"], first["dur"]) == (10e6, 1e6)
    assert first["args"] == {"graph": "GPT2", "bytes": 4_000_000, "bytes_per_s": 4_000_000, "issued_us": 10e6}
    memory = [event for event in events if event["name"] == "memory"]
    assert [event["args"] for event in memory] == [{"param": 1, "temp": 0}, {"param": 1, "temp": 5}]
    power = [event for event in events if event["name"] == "device_power_w"]
    assert [(event["ts"], event["args"]) for event in power] == [(10.4e6, {"device_power_w": 300.0})]
    step = next(event for event in events if event["name"] == "step 8")
    assert step["args"] == {"plan": "a", "loss": 1.0}
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["rank 0 measured"]


def test_arrows_lead_from_the_request_to_the_copy_and_to_what_waits_for_it() -> None:
    spans = [
        Span(lane=Lane.H2D, label="gather b0", start_s=0.2, end_s=0.4, issued_s=0.1),
        Span(lane=Lane.H2D, label="gather b0", start_s=0.6, end_s=0.7, issued_s=0.6),
        Span(lane=Lane.H2D, label="gather b1", start_s=0.1, end_s=0.2),
        Span(lane=Lane.H2D, label="gather b2", start_s=0.1, end_s=0.2),
        Span(lane=Lane.CALLER, label="wait b1", start_s=0.15, end_s=0.25),
        Span(lane=Lane.COMPUTE, label="run fwd.0", start_s=0.0, end_s=0.1),
        Span(lane=Lane.COMPUTE, label="run fwd.1", start_s=0.45, end_s=0.5),
        Span(lane=Lane.COMPUTE, label="run bwd.0", start_s=0.8, end_s=0.9),
    ]
    waiting = {"gather b0": ("run fwd.1", "run bwd.0"), "gather b2": ("run fwd.0",)}
    events = trace_events([full_step(spans)], {}, waiting=waiting)["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    arrows: dict[int, list[tuple[str, str, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append((event["ph"], names[event["pid"], event["tid"]], event["ts"] / 1e6))
    assert sorted(map(tuple, arrows.values())) == [
        (("s", "h2d", 0.1), ("f", "caller", 0.15)),
        (("s", "h2d", 0.6), ("f", "compute", 0.8)),
        (("s", "phases", 0.1), ("t", "h2d", 0.2), ("f", "compute", 0.45)),
    ]
    ends = [event for event in events if event["ph"] == "f"]
    assert all(event["bp"] == "e" for event in ends)
