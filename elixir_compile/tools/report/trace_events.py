"""Recorded steps to the events of a Chrome trace, which https://ui.perfetto.dev opens.

```text
  process  rank 0 measured      phases  compute  gather  reduce  h2d  h2d 2  d2h  host  disk  caller     counters
           rank 0 planned                compute  gather  reduce  h2d         d2h  host  disk
```

Arrows lead from the moment at which Python asks for a copy, if that is known, to the copy, and from there to the work
that waits for it: a wait of the thread, or else the region that the plan runs after the wait.

Perfetto wants the events of one track to be nested or apart. So a span that overlaps another of its lane without being
within it goes to a second track of the lane.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from elixir_compile.ir.kinds import Lane, Verb
from elixir_compile.ir.record import Record, Span
from elixir_compile.ir.schedule import verb_of, what_of
from elixir_compile.tools.observed import Counters, FullStep, Live, name_of

_PHASES_TRACK = 0
_COPYING = (Lane.H2D, Lane.D2H, Lane.GATHER)
_COPIES = (Verb.GATHER, Verb.PREFETCH, Verb.OFFLOAD)
_CLOCK_STEP_S = 1e-6
"""How much earlier than the end of a copy the region that waits may seem to begin: the clock of a device has steps."""
_TRACKS_PER_LANE = 100
"""The number of tracks of the first lane is 100, of the second 200: so tracks keep the order of the lanes."""
Event = dict[str, Any]


def trace_events(
    steps: Iterable[FullStep],
    begins_s: Mapping[tuple[int, int], float],
    planned: Record | None = None,
    waiting: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return the JSON object of a Chrome trace of `steps`.

    `begins_s` are the seconds at which each step begins in the trace, by rank and step; 0 for one that is missing.
    With `planned`, the simulated step of the plan, each rank has a second process that shows it from the same times on.
    `waiting` has, by the label of a copy, the labels of the regions that wait for it, one for each time.
    """
    events: list[Event] = []
    ids = itertools.count(1)
    for full in steps:
        summary = full.summary
        at_s = begins_s.get((summary.rank, summary.step), 0.0)
        pid = 2 * summary.rank
        events += _phases(full, pid, at_s)
        events += _spans(full.record.spans, pid, at_s)
        events += _arrows(full.record.spans, pid, at_s, waiting or {}, ids)
        events += _memory(full.live, pid, at_s)
        events += _counters(full.counters, pid, at_s)
        if planned is not None:
            events += _spans(planned.spans, pid + 1, at_s)
            events += _arrows(planned.spans, pid + 1, at_s, waiting or {}, ids)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {"traceEvents": [*_names(events), *events], "displayTimeUnit": "ms"}


def _phases(full: FullStep, pid: int, at_s: float) -> Iterator[Event]:
    summary = full.summary
    whole = {"plan": ", ".join(summary.plans), **summary.notes}
    yield _x(f"step {summary.step}", pid, _PHASES_TRACK, at_s, (0.0, summary.period_s), whole)
    for interval in full.intervals:
        yield _x(name_of(interval.phase), pid, _PHASES_TRACK, at_s, (interval.start_s, interval.end_s), {})


def _spans(spans: Iterable[Span], pid: int, at_s: float) -> Iterator[Event]:
    for tid, span in _placed(spans):
        args: dict[str, Any] = {"graph": span.graph} if span.graph else {}
        if span.nbytes:
            args["bytes"] = span.nbytes
            took_s = span.end_s - span.start_s
            if took_s > 0 and math.isfinite(rate := span.nbytes / took_s):  # a span of 1e-311 s has no finite rate
                args["bytes_per_s"] = round(rate)
        if span.issued_s is not None:
            args["issued_us"] = _us(at_s, span.issued_s)
        yield _x(span.label, pid, tid, at_s, (span.start_s, span.end_s), args)


def _placed(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the number of its track in its process."""
    by_lane: dict[Lane, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    for place, lane in enumerate(Lane):
        for track, span in _tracks(by_lane.get(lane, ())):
            yield (place + 1) * _TRACKS_PER_LANE + track, span


def _arrows(
    spans: Sequence[Span], pid: int, at_s: float, waiting: Mapping[str, Sequence[str]], ids: Iterator[int]
) -> Iterator[Event]:
    """Yield the arrows to copies, and from each to the work that waits for it, if such a work is known."""
    placed = sorted(_placed(spans), key=lambda found: found[1].start_s)
    by_label: dict[str, list[tuple[int, Span]]] = {}
    for found in placed:
        if found[1].lane in (Lane.COMPUTE, Lane.CALLER):
            by_label.setdefault(found[1].label, []).append(found)
    times: Counter[tuple[Lane, str]] = Counter()
    for tid, copy in placed:
        if copy.lane not in _COPYING or verb_of(copy.label) not in _COPIES:
            continue
        number, times[copy.lane, copy.label] = times[copy.lane, copy.label], times[copy.lane, copy.label] + 1
        regions = waiting.get(copy.label, ())
        region = regions[min(number, len(regions) - 1)] if regions else ""
        waits = by_label.get(f"{Verb.WAIT} {what_of(copy.label)}", ())
        blocked = next((each for each in waits if each[1].end_s >= copy.end_s and each[1].start_s <= copy.end_s), None)
        runs = by_label.get(region, ())
        last = blocked or next((each for each in runs if each[1].start_s >= copy.end_s - _CLOCK_STEP_S), None)
        if last is None:
            continue
        arrow = {"name": copy.label, "cat": "copy", "id": next(ids), "pid": pid}
        is_asked = copy.issued_s is not None and copy.issued_s < copy.start_s
        if is_asked:
            yield arrow | {"ph": "s", "tid": _PHASES_TRACK, "ts": _us(at_s, copy.issued_s or 0.0)}
        yield arrow | {"ph": "t" if is_asked else "s", "tid": tid, "ts": _us(at_s, copy.start_s)}
        yield arrow | {"ph": "f", "bp": "e", "tid": last[0], "ts": _us(at_s, max(last[1].start_s, copy.start_s))}


def _tracks(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the number of its track: the first on which it lies apart from all others, or within one."""
    open_us: list[list[float]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        start_us, end_us = _us(0.0, span.start_s), _us(0.0, span.end_s)
        for ends_us in open_us:
            while ends_us and ends_us[-1] <= start_us:
                ends_us.pop()
        track = next((place for place, ends in enumerate(open_us) if not ends or end_us <= ends[-1]), len(open_us))
        if track == len(open_us):
            open_us.append([])
        open_us[track].append(end_us)
        yield track, span


def _memory(live: Live | None, pid: int, at_s: float) -> Iterator[Event]:
    if live is not None:
        for place, time_s in enumerate(live.at_s):
            values = {kind: nbytes[place] for kind, nbytes in live.by_kind.items()}
            yield _c("memory", pid, _us(at_s, time_s), values)


def _counters(counters: Counters | None, pid: int, at_s: float) -> Iterator[Event]:
    if counters is not None:
        for name, values in counters.values.items():
            for time_s, value in zip(counters.at_s, values, strict=True):
                if value is not None:
                    yield _c(name, pid, _us(at_s, time_s), {name: value})


def _names(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events that name the processes and tracks of `events`."""
    used = sorted({(event["pid"], event.get("tid", _PHASES_TRACK)) for event in events})
    for pid in sorted({pid for pid, _ in used}):
        name = f"rank {pid // 2} {'planned' if pid % 2 else 'measured'}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    lanes = list(Lane)
    for pid, tid in used:
        number = tid % _TRACKS_PER_LANE
        name = "phases" if tid == _PHASES_TRACK else str(lanes[tid // _TRACKS_PER_LANE - 1])
        name += f" {number + 1}" if number else ""
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _x(name: str, pid: int, tid: int, at_s: float, between_s: tuple[float, float], args: Mapping[str, Any]) -> Event:
    start_us, end_us = (_us(at_s, time_s) for time_s in between_s)
    dur_us = round(end_us - start_us, 3)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start_us, "dur": dur_us, "args": dict(args)}


def _c(name: str, pid: int, time_us: float, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": time_us, "args": dict(values)}


def _us(at_s: float, time_s: float) -> float:
    """Return the microseconds of `time_s` in the step that begins at `at_s`, in whole nanoseconds.

    Both are rounded alone, so that what nests within its step nests in the trace.
    """
    return (round(at_s * 1e9) + round(time_s * 1e9)) / 1e3
