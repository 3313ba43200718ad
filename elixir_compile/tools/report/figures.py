"""Aggregate a plan and its records for drawing: live bytes over the step, and bars on lanes.

```text
  memory   one value per region: the op of the region with the most live bytes, so that the peak is never lost
  lanes    one bar per action; spans of one lane and verb are merged across small gaps where there are too many
```
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elixir_compile.ir.kinds import Kind, Lane, Update, Verb
from elixir_compile.ir.record import Record, Span
from elixir_compile.ir.schedule import verb_of, what_of
from elixir_compile.tools.report.held import Survey
from elixir_compile.tools.study.observed import OTHER, Live

MOST_BARS = 2000
"""The most bars of the lanes. A step of 7 billion parameters has 960 spans."""
PLANNED, SECOND, MEASURED = "planned", "second plan", "measured"
STEPS = (PLANNED, SECOND, MEASURED)
"""The steps that a page can show: of the plan, of a second plan, and measured."""
_FIRST_GAP = 1 / 1500
"""Share of the step below which a gap between two spans is closed first if there are too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """A stretch of the step, and the live bytes at its op with the most."""

    region: str
    op: str
    module: str
    """The module of the op, empty if it is of none."""
    source: str
    """The line of the user's code that the op came from, as `file.py:line`."""
    start_s: float
    end_s: float
    live_bytes: Mapping[str, int]
    """By kind: a `Kind`, or `other` if it was measured and belongs to none."""

    @property
    def nbytes(self) -> int:
        """The live bytes of all kinds."""
        return sum(self.live_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Spans of one lane and verb without a gap that can be seen."""

    of: str
    """Of which step: one of `STEPS`."""
    lane: Lane
    verb: str
    what: str
    """The target of the first span, and how many follow."""
    start_s: float
    end_s: float
    num_spans: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The step under one device budget."""

    budget_bytes: int
    step_s: float
    """Seconds of the fastest plan found within the budget."""
    planned_s: float
    """Seconds of the plan that a search with the budget chooses: more than `step_s` if it prefers to keep everything
    where it is, or if the search of a smaller budget found a faster plan."""
    bound_s: float | None
    """Proved lower bound on the seconds of every plan within the budget."""
    is_own: bool
    """Whether it is the budget of the plan of the page."""


def memory_rows(survey: Survey, record: Record) -> tuple[MemoryRow, ...]:
    """Return the live bytes over the step of `record`, which simulates the plan of `survey`.

    A region counts until the next begins, and the first one from the begin of the step. The update counts where compute
    has no region: before the first one if it runs across steps, else after the last.

    Raises ValueError if `survey` is without a graph.
    """
    held = survey.held
    if held is None:
        raise ValueError("the memory of a plan is counted from its graph")
    starts = _starts(record)
    found: list[tuple[float, str, range]] = []
    begin_s = 0.0
    for region in survey.plan.regions:
        begin_s = max(starts.get(region.id, 0.0), begin_s)
        found.append((begin_s, region.id, held.ops_of(region)))
    num_ops = len(held.timeline.ops)
    last, end_s = found[-1][2].stop if found else 0, _compute_end_s(record)
    if last < num_ops:
        is_first = survey.plan.update is Update.ACROSS_STEPS
        found.insert(0 if is_first else len(found), (end_s, "update", range(last, num_ops)))
    # Compute may wait before the first region, as for an update by the host.
    found[:1] = [(0.0, region, ops) for _, region, ops in found[:1]]
    ends = [start_s for start_s, _, _ in found[1:]] + [max(record.step_s, end_s)]
    return tuple(_memory_row(survey, *stretch, end) for stretch, end in zip(found, ends, strict=True))


def _starts(record: Record) -> Mapping[str, float]:
    """Return the start of each region in seconds."""
    starts: dict[str, float] = {}
    for span in record.spans:
        if verb_of(span.label) == Verb.RUN:
            starts.setdefault(what_of(span.label), span.start_s)
    return starts


def _compute_end_s(record: Record) -> float:
    runs = [span.end_s for span in record.spans if verb_of(span.label) == Verb.RUN]
    return min(max(runs, default=0.0), record.step_s)


def _memory_row(survey: Survey, start_s: float, region: str, ops: range, end_s: float) -> MemoryRow:
    held = survey.held
    assert held is not None
    timeline = held.timeline
    at = max(ops, key=lambda op: timeline.live_bytes[op])
    op = held.rows.step.ops[at]
    live: dict[str, int] = {kind: live[at] for kind, live in timeline.live_bytes_by_kind.items()}
    return MemoryRow(
        region=region, op=op.id, module=op.module, source=op.source, start_s=start_s, end_s=end_s, live_bytes=live
    )


_MOST_STRETCHES = 300
"""The most stretches of measured memory, which has a value for each allocation of a step."""


def live_rows(live: Live, end_s: float) -> tuple[MemoryRow, ...]:
    """Return measured live bytes as stretches of equal length, each with the bytes at its highest time."""
    stretch_s = end_s / _MOST_STRETCHES
    highest: dict[int, int] = {}
    totals = live.totals_bytes
    last = 0
    for at, start_s in enumerate(live.at_s):
        place = min(int(start_s / stretch_s), _MOST_STRETCHES - 1) if stretch_s else 0
        for between in range(last + 1, place + 1):  # nothing changed: the bytes are those before
            highest.setdefault(between, at - 1)
        highest[place] = max(highest.get(place, at), at, key=totals.__getitem__)
        last = place
    for between in range(last + 1, _MOST_STRETCHES):
        highest.setdefault(between, len(live.at_s) - 1)
    return tuple(
        MemoryRow(
            region="",
            op="",
            module="",
            source="",
            start_s=place * stretch_s,
            end_s=(place + 1) * stretch_s,
            live_bytes={kind: values[at] for kind, values in live.by_kind.items()},
        )
        for place, at in sorted(highest.items())
    )


def lasting(rows: Sequence[MemoryRow]) -> tuple[MemoryRow, ...]:
    """Return `rows` without those of no length, which no axis can show.

    Where such a row has more bytes than the row before it, or than the second if it is the first, it takes the place of
    that row, so that the peak stays.
    """
    found: list[MemoryRow] = []
    for row in rows:
        if row.end_s > row.start_s or not found:
            found.append(row)
        elif row.nbytes > found[-1].nbytes:
            found[-1] = replace(row, start_s=found[-1].start_s, end_s=found[-1].end_s)
    if len(found) > 1 and found[0].end_s <= found[0].start_s:
        first, second = found[:2]
        most = max(first, second, key=lambda row: row.nbytes)
        found[:2] = [replace(most, start_s=second.start_s, end_s=second.end_s)]
    return tuple(found)


def bars(record: Record, of: str = PLANNED, most: int = MOST_BARS) -> tuple[Bar, ...]:
    """Return the spans of `record`, the step called `of`, by lane as at most `most` bars."""
    by_kind: dict[tuple[Lane, str], list[Span]] = {}
    for span in sorted(record.spans, key=lambda span: (span.start_s, span.end_s)):
        if span.end_s > span.start_s:  # else a release of the plan, which takes no time
            by_kind.setdefault((span.lane, verb_of(span.label)), []).append(span)
    gap_s = -1.0
    while True:
        found = [bar for spans in by_kind.values() for bar in _merged(spans, of, gap_s)]
        if len(found) <= most or gap_s > record.step_s:
            return tuple(sorted(found, key=lambda bar: (list(Lane).index(bar.lane), bar.start_s)))
        gap_s = record.step_s * _FIRST_GAP if gap_s < 0 else 2 * gap_s


def _merged(spans: Sequence[Span], of: str, gap_s: float) -> Iterator[Bar]:
    """Yield `spans`, in order, with those less than `gap_s` apart as one bar; none are merged if it is negative."""
    first, end_s, num_spans = spans[0], spans[0].end_s, 1
    for span in spans[1:]:
        if gap_s >= 0 and span.start_s - end_s < gap_s:
            end_s, num_spans = max(end_s, span.end_s), num_spans + 1
        else:
            yield _bar(first, of, end_s, num_spans)
            first, end_s, num_spans = span, span.end_s, 1
    yield _bar(first, of, end_s, num_spans)


def _bar(first: Span, of: str, end_s: float, num_spans: int) -> Bar:
    what = what_of(first.label)
    return Bar(
        of=of,
        lane=first.lane,
        verb=verb_of(first.label),
        what=what if num_spans == 1 else f"{what} and {num_spans - 1} more",
        start_s=first.start_s,
        end_s=end_s,
        num_spans=num_spans,
    )


_DECIMALS = 8
"""Of seconds in data for drawing: 10 ns."""


def columns(rows: Sequence[MemoryRow]) -> dict[str, list[Any]]:
    """Return `rows` as columns by name, with a column of bytes for each kind."""
    found: dict[str, list[Any]] = {
        name: [getattr(row, name) for row in rows] for name in ("region", "op", "module", "source")
    }
    found |= _seconds(rows)
    return found | {str(kind): [row.live_bytes[kind] for row in rows] for kind in kinds_of(rows)}


def bar_columns(found: Sequence[Bar]) -> dict[str, list[Any]]:
    """Return the bars as columns by name."""
    names = ("of", "lane", "verb", "what", "num_spans")
    return {name: [getattr(bar, name) for bar in found] for name in names} | _seconds(found)


def _seconds(stretches: Sequence[MemoryRow | Bar]) -> dict[str, list[Any]]:
    return {
        "start_s": [round(stretch.start_s, _DECIMALS) for stretch in stretches],
        "end_s": [round(stretch.end_s, _DECIMALS) for stretch in stretches],
    }


def kinds_of(rows: Sequence[MemoryRow]) -> tuple[str, ...]:
    """Return the kinds with live bytes, in the order of `Kind`."""
    return tuple(kind for kind in (*Kind, OTHER) if any(row.live_bytes.get(kind) for row in rows))
