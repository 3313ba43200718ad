"""The Chrome trace of recorded steps: events of a track nest, times are in order, everything has a name."""

import json
from collections import defaultdict
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from elixir_compile.ir import Lane, Origin, Phase, Record, Span
from elixir_compile.tools.observed import Counters, FullStep, Interval, Live, StepSummary
from elixir_compile.tools.report.runs import trace_events

TIMES = st.floats(0, 2, allow_nan=False)
SPANS = st.lists(
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


@given(SPANS, SPANS)
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
