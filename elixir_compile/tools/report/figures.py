"""Draw the memory of a step and its lanes: values of a plan and its records, and the charts made of them as Vega-Lite
specifications or SVG.
"""

import base64
import gzip
import importlib
import importlib.util
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elixir_compile.base.units import GIB
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.kinds import Kind, Lane, Update, Verb
from elixir_compile.ir.schedule import Record, Span, verb_of, what_of
from elixir_compile.tools.observed import OTHER, Counters, Live
from elixir_compile.tools.report.tables import Survey

# ----------------------------------------------------------------------------------------------------------------------
# Aggregate a plan and its records for drawing: live bytes over the step, and bars on lanes.
#
#   memory   one value per region: the op of the region with the most live bytes, so that the peak is never lost
#   lanes    one bar per action; spans of one lane and verb are merged across small gaps where there are too many


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
    runs = [span for span in record.spans if verb_of(span.label) == Verb.RUN]
    starts: dict[str, float] = {}
    for span in runs:
        starts.setdefault(what_of(span.label), span.start_s)
    found: list[tuple[float, str, range]] = []
    begin_s = 0.0
    for region in survey.plan.regions:
        begin_s = max(starts.get(region.id, 0.0), begin_s)
        found.append((begin_s, region.id, held.ops_of(region)))
    num_ops = len(held.timeline.ops)
    last = found[-1][2].stop if found else 0
    end_s = min(max((span.end_s for span in runs), default=0.0), record.step_s)
    if last < num_ops:
        is_first = survey.plan.update is Update.ACROSS_STEPS
        found.insert(0 if is_first else len(found), (end_s, "update", range(last, num_ops)))
    # Compute may wait before the first region, as for an update by the host.
    found[:1] = [(0.0, region, ops) for _, region, ops in found[:1]]
    ends = [start_s for start_s, _, _ in found[1:]] + [max(record.step_s, end_s)]
    rows: list[MemoryRow] = []
    for (start_s, name, ops), stop_s in zip(found, ends, strict=True):
        at = max(ops, key=held.timeline.live_bytes.__getitem__)
        op = held.rows.step.ops[at]
        live: dict[str, int] = {kind: own[at] for kind, own in held.timeline.live_bytes_by_kind.items()}
        row = MemoryRow(
            region=name, op=op.id, module=op.module, source=op.source, start_s=start_s, end_s=stop_s, live_bytes=live
        )
        rows.append(row)
    return tuple(rows)


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
    gap_s = -1.0  # of spans that are merged; none are if it is negative
    while True:
        found: list[Bar] = []
        for (lane, verb), spans in by_kind.items():
            groups: list[tuple[Span, float, int]] = []  # the first span, the end of all, and their number
            for span in spans:
                first, end_s, number = groups[-1] if groups else (span, math.inf, 0)
                if gap_s >= 0 and number and span.start_s - end_s < gap_s:
                    groups[-1] = first, max(end_s, span.end_s), number + 1
                else:
                    groups.append((span, span.end_s, 1))
            for first, end_s, number in groups:
                what = what_of(first.label) + (f" and {number - 1} more" if number > 1 else "")
                bar = Bar(of=of, lane=lane, verb=verb, what=what, start_s=first.start_s, end_s=end_s, num_spans=number)
                found.append(bar)
        if len(found) <= most or gap_s > record.step_s:
            return tuple(sorted(found, key=lambda bar: (list(Lane).index(bar.lane), bar.start_s)))
        gap_s = record.step_s * _FIRST_GAP if gap_s < 0 else 2 * gap_s


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


# ----------------------------------------------------------------------------------------------------------------------
# Tell and draw the bytes per second on the link between host and device over a step, in both directions.
#
#   copies     |--- 64 MB ---|            |- 16 MB -|
#   bins       |  6 GB/s |  6 GB/s |  0  |  2 GB/s |    200 of equal length: a copy counts in each by its seconds there
#
# What the driver counts on the link is more: it holds all traffic of the device. It is drawn as dots beside the bins.


NUM_BINS = 200
_GB = 1e9
_COUNTERS = {Lane.H2D: "link_rx_bytes_per_s", Lane.D2H: "link_tx_bytes_per_s"}
"""The counters of the device, which receives what goes to it."""
_COLOUR_OF = {Lane.H2D: "gather", Lane.D2H: "offload"}
_DASHES = {PLANNED: [1, 0], SECOND: [2, 2], MEASURED: [6, 3]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """The mean rate of one direction of the link in each of `NUM_BINS` parts of a step."""

    of: str
    """Of which step: one of `STEPS`."""
    lane: Lane
    """`H2D` or `D2H`."""
    step_s: float
    bytes_per_s: tuple[float, ...]
    rated_bytes_per_s: float
    """The rate of the machine's profile."""
    counted: tuple[tuple[float, float], ...] = ()
    """(seconds since the step began, bytes per second) as the driver counted; empty if nothing was counted."""

    @property
    def nbytes(self) -> float:
        """The bytes of the step in this direction."""
        return sum(self.bytes_per_s) * self.step_s / NUM_BINS


def link_rates(record: Record, of: str, cluster: Cluster, counters: Counters | None = None) -> tuple[LinkRates, ...]:
    """Return the rates of both directions over `record`, the step called `of`; empty if no copy of it has bytes.

    A copy that took no time counts in the bin of its moment.
    """
    step_s = max([record.step_s, *(span.end_s for span in record.spans if span.nbytes)])
    if step_s <= 0:
        return ()
    bin_s = step_s / NUM_BINS
    found: list[LinkRates] = []
    for lane, link in ((Lane.H2D, cluster.h2d), (Lane.D2H, cluster.d2h)):
        nbytes = [0.0] * NUM_BINS
        for span in record.spans:
            if span.lane is not lane or not span.nbytes:
                continue
            first, last = (min(max(int(at_s / bin_s), 0), NUM_BINS - 1) for at_s in (span.start_s, span.end_s))
            length_s = span.end_s - span.start_s
            for place in range(first, last + 1):
                within_s = min(span.end_s, (place + 1) * bin_s) - max(span.start_s, place * bin_s)
                is_only = first == last or not length_s
                nbytes[place] += span.nbytes if is_only else span.nbytes * max(within_s, 0.0) / length_s
        values = () if counters is None else counters.values.get(_COUNTERS[lane], ())
        samples = zip(() if counters is None else counters.at_s, values, strict=False)
        rates = LinkRates(
            of=of,
            lane=lane,
            step_s=step_s,
            bytes_per_s=tuple(each / bin_s for each in nbytes),
            rated_bytes_per_s=link.bytes_per_s,
            counted=tuple((at_s, value) for at_s, value in samples if value is not None),
        )
        found.append(rates)
    return tuple(found) if any(any(each.bytes_per_s) for each in found) else ()


def rate_columns(found: Sequence[LinkRates]) -> dict[str, list[Any]]:
    """Return the rates as columns by name, with a row where a rate changes and one at the end of each step.

    The seconds have the name that they have in the tables of memory and lanes: charts zoom as one only by one name.
    """
    table: dict[str, list[Any]] = {"of": [], "link": [], "start_s": [], "gb_per_s": []}
    for each in found:
        before = None
        for place, rate in enumerate((*each.bytes_per_s, 0.0)):
            rate = float(f"{rate / _GB:.4g}")
            if rate != before or place == NUM_BINS:
                row = (each.of, each.lane.value, round(place * each.step_s / NUM_BINS, 8), rate)
                for column, value in zip(table.values(), row, strict=True):
                    column.append(value)
            before = rate
    return table


# ----------------------------------------------------------------------------------------------------------------------
# Draw memory over the step and the lanes: Vega-Lite specifications made with Altair, and pictures of them as SVG.
#
# The charts need the extra `report`, Altair and vl-convert. Colours are CSS variables with a value for files without a
# style sheet, so that a page may have a dark theme. Memory and lanes are drawn from named tables, which stand under
# `datasets` of a specification: `page.js` fills them from the data of the page, which then holds each number once.


EXTRA = "pip install 'elixir-compile[report]'"
"""The command that installs the libraries of the charts."""
_COLOURS = {
    "param": "#0072B2", "master": "#56B4E9", "moment": "#009E73", "grad": "#D55E00", "gathered": "#CC79A7",
    "saved": "#E69F00", "temp": "#F0E442", "workspace": "#999933", "input": "#8C8C8C", "buffer": "#B8B8B8",
    "run": "#56B4E9", "update": "#009E73", "gather": "#CC79A7", "prefetch": "#E69F00", "offload": "#0072B2",
    "reduce": "#D55E00", "average": "#D55E00", "add": "#D55E00", "release": "#8C8C8C", "wait": "#B8B8B8",
    "read": "#E69F00", "write": "#0072B2", "step": "#0072B2", "bound": "#8C8C8C",
    "forward": "#56B4E9", "backward": "#0072B2", "caller": "#8C8C8C", "other": "#444444",
}  # fmt: skip
"""Colours of Okabe and Ito, which colour-blind people can tell apart, and greys."""
_DARK = {
    "ink": "#ececec", "rule": "#4a4a4a", "param": "#4a9fd4", "moment": "#2fc79a", "grad": "#ee8245",
    "offload": "#4a9fd4", "update": "#2fc79a", "reduce": "#ee8245", "step": "#4a9fd4",
}  # fmt: skip
"""Colours on a dark ground, where they differ."""
_INK, _RULE = "var(--ink, #222222)", "var(--rule, #d9d9d9)"
_HOVER = "hover"
"""The name of the layer that shows tooltips and zooms. It is set in the specification: Altair 6 calls a layer that was
named `hover` `hover_0`."""
_WIDTH, _HEIGHT, _LANE_HEIGHT, _RATES_HEIGHT = 1040, 280, 26, 110
"""Pixels."""


def can_draw() -> bool:
    """Return whether the libraries of the charts are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("altair", "vl_convert"))


def _library(name: str) -> Any:
    """Return a library of the extra `report`, which is loaded only to draw."""
    return importlib.import_module(name)


def colour(name: str) -> str:
    """Return the colour of a kind of bytes or of a verb, as a CSS variable with a value."""
    return f"var(--{name}, {_COLOURS.get(name, '#999999')})"


def step_chart(
    rows: Sequence[MemoryRow],
    found: Sequence[Bar],
    budget_bytes: int,
    second: Sequence[MemoryRow] = (),
    rates: Sequence[LinkRates] = (),
    *,
    is_static: bool = False,
) -> dict[str, Any]:
    """Return the Vega-Lite specification of memory over the step with lanes and rates below, on one axis of seconds.

    All live bytes of a `second` plan are drawn as a line. Unless it `is_static`, the charts zoom together, and a
    tooltip shows the stretch under the pointer.
    """
    alt = _library("altair")
    memory = _memory(rows, budget_bytes, second, is_static=is_static)
    views = [memory, _lanes(found, is_static=is_static), *([_rates(alt, rates)] if rates else [])]
    spec = _finished(_stacked(alt, views), tables(rows, found, second, rates))
    if not is_static:
        # One zoom for all charts. Altair would name it in each, and warn of the repetition.
        spec["vconcat"][0]["layer"][-1]["name"] = _HOVER
        for view in spec["vconcat"][2:]:
            view["layer"][0]["name"] = "rates"
        interval = {"type": "interval", "encodings": ["x"]}
        spec["params"] = [
            {
                "name": "zoom",
                "select": interval,
                "bind": "scales",
                "views": [_HOVER, "lanes", *(["rates"] if rates else [])],
            }
        ]
    return spec


def memory_chart(rows: Sequence[MemoryRow], budget_bytes: int, second: Sequence[MemoryRow] = ()) -> dict[str, Any]:
    """Return the specification of memory over the step alone, for a picture."""
    return _finished(_memory(rows, budget_bytes, second, is_static=True), tables(rows, (), second))


def small_memory_chart(rows: Sequence[MemoryRow], most_bytes: int) -> dict[str, Any]:
    """Return the specification of memory over a step up to `most_bytes`, which all charts of a study share."""
    drawn = _memory(rows, most_bytes, (), is_static=True).properties(width=_WIDTH // 2, height=_HEIGHT // 2)
    return _finished(drawn, tables(rows, ()))


def phases_chart(names: Sequence[str], seconds_s: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the specification of a bar for each row of a study, of the seconds of its phases by name."""
    alt = _library("altair")
    phases = list(dict.fromkeys(phase for row in seconds_s for phase in row))
    table = {
        "row": [name for name, row in zip(names, seconds_s, strict=True) for _ in row],
        "phase": [phase for row in seconds_s for phase in row],
        "seconds": [value for row in seconds_s for value in row.values()],
        "order": [phases.index(phase) for row in seconds_s for phase in row],
    }
    chart = _chart(alt, table).mark_bar(aria=False)
    drawn = chart.encode(
        x=alt.X("seconds:Q", title="seconds of a step", axis=alt.Axis(grid=False)),
        y=alt.Y("row:N", sort=list(names), title=None),
        color=_colours(alt, "phase:N", phases),
        order="order:Q",
    )
    return _finished(drawn.properties(width=_WIDTH // 2, height=_LANE_HEIGHT * len(names)))


def lines_chart(lines: Mapping[str, Sequence[tuple[int, float]]], what: str) -> dict[str, Any]:
    """Return the specification of a line for each of `lines`, of (step, value) pairs by name; `what` names the
    values."""
    alt = _library("altair")
    table = {
        "row": [name for name, points in lines.items() for _ in points],
        "step": [step for points in lines.values() for step, _ in points],
        "value": [value for points in lines.values() for _, value in points],
    }
    drawn = _chart(alt, table).mark_line(aria=False).encode(
        x=alt.X("step:Q", axis=alt.Axis(grid=False)),
        y=alt.Y("value:Q", title=what, scale=alt.Scale(zero=False)),
        color=alt.Color("row:N", legend=alt.Legend(title=None)),
    )  # fmt: skip
    return _finished(drawn.properties(width=_WIDTH // 2, height=_HEIGHT))


def lanes_chart(found: Sequence[Bar], rates: Sequence[LinkRates] = ()) -> dict[str, Any]:
    """Return the specification of the lanes, with the rates of the link below, for a picture."""
    alt = _library("altair")
    lanes = _lanes(found, is_static=True)
    drawn = _stacked(alt, [lanes, _rates(alt, rates)]) if rates else lanes
    return _finished(drawn, tables((), found, (), rates))


def _stacked(alt: Any, views: Sequence[Any]) -> Any:
    return alt.vconcat(*views, spacing=8).resolve_scale(x="shared", color="independent", strokeDash="independent")


def tables(
    rows: Sequence[MemoryRow],
    found: Sequence[Bar],
    second: Sequence[MemoryRow] = (),
    rates: Sequence[LinkRates] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the charts of memory, lanes and rates by name, each as one row of columns.

    Memory gets a last row that repeats the one before at its end, because an area of steps ends at its last point.
    """
    made: dict[str, dict[str, list[Any]]] = {}
    for name, drawn in (("memory", rows), ("second", second)):
        if drawn:
            table = columns(drawn)
            last = {key: column[-1] for key, column in table.items()} | {"start_s": table["end_s"][-1]}
            made[name] = {key: [*column, last[key]] for key, column in table.items()}
    made |= {"lanes": bar_columns(found)} if found else {}
    made |= {"rates": rate_columns(rates)} if rates else {}
    return {name: [table] for name, table in made.items()}


def curve_chart(points: Sequence[CurvePoint]) -> dict[str, Any]:
    """Return the specification of the seconds of a step over the device budget, with the bound below."""
    alt = _library("altair")
    table = {
        "GiB": [round(point.budget_bytes / GIB, 4) for point in points],
        "step": [point.step_s for point in points],
        "bound": [point.bound_s for point in points],
    }
    lines = [name for name in ("step", "bound") if None not in table[name]]
    seconds = [value for name in lines for value in table[name]]
    low, high = min(seconds), max(seconds)
    scale = alt.Scale(domain=[low - 0.05 * (high - low or low), high + 0.05 * (high - low or high)], nice=False)
    base = _chart(alt, {name: table[name] for name in ("GiB", *lines)}).transform_fold(lines, as_=["of", "seconds"])
    axes = {
        "x": alt.X("GiB:Q", title="GiB of device budget", scale=alt.Scale(zero=False), axis=alt.Axis(grid=False)),
        "y": alt.Y("seconds:Q", title="seconds of a step", scale=scale, axis=alt.Axis(format="~g")),
        "color": _colours(alt, "of:N", lines),
    }
    layers = [base.mark_line(point=True, aria=False).encode(**axes)]
    own = [point.budget_bytes / GIB for point in points if point.is_own]
    if own:
        rule = _chart(alt, {"own": own}).mark_rule(strokeDash=[6, 4], color=_INK, aria=False)
        layers.append(rule.encode(x="own:Q"))
    return _finished(alt.layer(*layers).properties(width=_WIDTH // 2, height=_HEIGHT))


def _memory(rows: Sequence[MemoryRow], budget_bytes: int, second: Sequence[MemoryRow], *, is_static: bool) -> Any:
    alt = _library("altair")
    kinds = [str(kind) for kind in kinds_of(rows)]
    peak = max(rows, key=lambda row: row.nbytes)
    end_s = max(row.end_s for row in (*rows, *second))
    most_gib = 1.08 * max(budget_bytes, *(row.nbytes for row in (*rows, *second))) / GIB
    x = alt.X("start_s:Q", title="seconds", axis=alt.Axis(grid=False), scale=alt.Scale(domain=[0, end_s], nice=False))
    areas = (
        _named(alt, "memory", rows)
        .transform_fold(kinds, as_=["kind", "nbytes"])
        .transform_calculate(order=f"indexof({kinds!r}, datum.kind)", GiB=f"datum.nbytes / {GIB}")
        .mark_area(interpolate="step-after", aria=False)
        .encode(
            x=x,
            y=alt.Y(
                "GiB:Q", stack="zero", title="GiB on the device", scale=alt.Scale(domain=[0, most_gib], nice=False)
            ),
            order="order:Q",
            color=_colours(alt, "kind:N", kinds),
        )
    )
    limit = _chart(alt, {"budget": [budget_bytes / GIB]}).mark_rule(strokeDash=[6, 4], color=_INK, aria=False)
    highest = {"s": [(peak.start_s + peak.end_s) / 2], "GiB": [peak.nbytes / GIB]}
    marks = _chart(alt, highest).mark_point(
        shape="triangle-down", filled=True, size=70, color=_INK, yOffset=-6, aria=False
    )
    layers = [areas, limit.encode(y="budget:Q"), marks.encode(x="s:Q", y="GiB:Q")]
    if second:
        total = _named(alt, "second", second).transform_calculate(GiB=_total_gib(list(map(str, kinds_of(second)))))
        line = total.mark_line(interpolate="step-after", color=_INK, strokeWidth=1.5, aria=False)
        layers.insert(1, line.encode(x="start_s:Q", y="GiB:Q"))
    if not is_static:
        in_gib = {f"{kind}_gib": f"datum['{kind}'] / {GIB}" for kind in kinds}
        hover = _named(alt, "memory", rows).transform_calculate(**in_gib, total_gib=_total_gib(kinds))
        shown = [alt.Tooltip(f"{name}:N") for name in ("region", "op", "module", "source")]
        shown += [alt.Tooltip(f"{of}_gib:Q", format=".3f", title=f"{of}, GiB") for of in ("total", *kinds)]
        edges = {"x": x, "x2": "end_s:Q", "y": alt.value(0), "y2": alt.value(_HEIGHT)}
        layers.append(hover.mark_rect(opacity=0.001, aria=False).encode(**edges, tooltip=shown))
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def _total_gib(kinds: Sequence[str]) -> str:
    """Return the expression of the live bytes of all kinds in GiB."""
    total = " + ".join(f"datum['{kind}']" for kind in kinds)
    return f"({total}) / {GIB}"


def _named(alt: Any, name: str, rows: Sequence[MemoryRow]) -> Any:
    """Return a chart of the rows of memory in the table called `name`, see `tables`."""
    return alt.Chart(alt.NamedData(name)).transform_flatten(list(columns(rows)))


def _chart(alt: Any, table: Mapping[str, Sequence[Any]]) -> Any:
    """Return a chart of the columns of `table`: a row for each value would repeat the names of the columns."""
    return alt.Chart(alt.Data(values=[dict(table)])).transform_flatten(list(table))


def _colours(alt: Any, field: str, names: Sequence[str]) -> Any:
    """Return the encoding of `field` by the colours of `names`."""
    scale = alt.Scale(domain=list(names), range=[colour(name) for name in names])
    return alt.Color(field, scale=scale, legend=alt.Legend(title=None))


def _lanes(found: Sequence[Bar], *, is_static: bool) -> Any:
    alt = _library("altair")
    is_single = len({bar.of for bar in found}) == 1
    named = [f"{bar.lane}" if is_single else f"{bar.lane}, {bar.of}" for bar in found]
    order = {name: (list(Lane).index(bar.lane), STEPS.index(bar.of)) for name, bar in zip(named, found, strict=True)}
    rows = sorted(order, key=order.__getitem__)
    row = "datum.lane" if is_single else "datum.lane + ', ' + datum.of"
    shown = [*(alt.Tooltip(f"{name}:N") for name in ("row", "verb", "what")), alt.Tooltip("ms:Q", format=".3f")]
    chart = (
        alt.Chart(alt.NamedData("lanes"))
        .transform_flatten(list(bar_columns(found)))
        .transform_calculate(row=row, ms="1e3 * (datum.end_s - datum.start_s)")
        .mark_bar(aria=False)
        .encode(
            x=alt.X("start_s:Q", title="seconds", axis=alt.Axis(grid=False)),
            x2="end_s:Q",
            y=alt.Y("row:N", sort=rows, title=None, scale=alt.Scale(domain=rows)),
            color=_colours(alt, "verb:N", list(dict.fromkeys(bar.verb for bar in found))),
            **({} if is_static else {"tooltip": shown}),
        )
    )
    return chart.properties(width=_WIDTH, height=_LANE_HEIGHT * len(rows), name="lanes")


def _rates(alt: Any, found: Sequence[LinkRates]) -> Any:
    """Return the chart of the rates of the link, whose columns are the table called `rates`.

    The dashed rules are the rates of the machine's profile.
    """
    most = max(max(*each.bytes_per_s, each.rated_bytes_per_s, *(rate for _, rate in each.counted)) for each in found)
    lanes = [lane.value for lane in _COLOUR_OF]
    scale = alt.Scale(domain=lanes, range=[colour(verb) for verb in _COLOUR_OF.values()])
    axes = {
        "y": alt.Y("gb_per_s:Q", title="GB/s", scale=alt.Scale(domain=[0, 1.05 * most / _GB], nice=False)),
        "color": alt.Color("link:N", scale=scale, legend=alt.Legend(title=None)),
    }
    steps = list(dict.fromkeys(each.of for each in found))
    dashes = alt.Scale(domain=steps, range=[_DASHES[of] for of in steps])
    line = (
        alt.Chart(alt.NamedData("rates"))
        .transform_flatten(list(rate_columns(found)))
        .mark_line(interpolate="step-after", strokeWidth=1.2, aria=False)
        .encode(
            x=alt.X("start_s:Q", title="seconds", axis=alt.Axis(grid=False)),
            strokeDash=alt.StrokeDash("of:N", scale=dashes, legend=alt.Legend(title=None) if len(steps) > 1 else None),
            **axes,
        )
    )
    rated = {each.lane.value: each.rated_bytes_per_s / _GB for each in found}
    rule = _chart(alt, {"link": list(rated), "gb_per_s": list(rated.values())})
    layers = [line, rule.mark_rule(strokeDash=[2, 3], aria=False).encode(**axes)]
    dots = [(each.lane.value, at_s, rate / _GB) for each in found for at_s, rate in each.counted]
    if dots:
        links, times_s, rates = (list(column) for column in zip(*dots, strict=True))
        table = {"link": links, "start_s": times_s, "gb_per_s": rates}
        layers.append(_chart(alt, table).mark_point(filled=True, size=20, aria=False).encode(x="start_s:Q", **axes))
    return alt.layer(*layers).properties(width=_WIDTH, height=_RATES_HEIGHT)


def _finished(chart: Any, datasets: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the specification of `chart` with its tables, with the colours of text and lines, and without a
    background."""
    text = {"labelColor": _INK, "titleColor": _INK}
    spec = (
        chart.configure(background="transparent", font="sans-serif")
        .configure_axis(**text, gridColor=_RULE, domainColor=_RULE, tickColor=_RULE)
        .configure_legend(**text)
        .configure_view(stroke=None)
        .to_dict()
    )
    return spec if datasets is None else spec | {"datasets": dict(datasets)}


def dark_style() -> str:
    """Return the style sheet that gives the charts of a page the colours of a dark theme."""
    variables = " ".join(f"--{name}: {value};" for name, value in _DARK.items())
    return f"@media (prefers-color-scheme: dark) {{ :root {{ {variables} }} }}"


_CLIP = re.compile(r"clip\d+")
_VARIABLE = re.compile(r"var\(--([a-z]+), (#[0-9a-f]+)\)", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")
_DIGITS = re.compile(r"(\.\d\d)\d+")
"""A number with more than two decimals: a hundredth of a pixel cannot be seen."""
_REPEATED = re.compile(r"(L[^LMZ\"]+)\1+")
"""A point of a path more than once in succession, as where the bytes of a kind stay equal."""


def svg(spec: Mapping[str, Any]) -> str:
    """Return the picture of `spec` as SVG; equal specifications give equal text."""
    drawn = _library("vl_convert").vegalite_to_svg(dict(spec))
    names: dict[str, str] = {}
    numbers = itertools.count()
    # The library numbers clip paths over all pictures of a process.
    drawn = _CLIP.sub(lambda found: names.setdefault(found[0], f"clip-{next(numbers)}"), drawn)
    # Text between tags stays: the labels of an axis of a small model are 0.0001, 0.0002, and more.
    drawn = _TAG.sub(lambda found: _DIGITS.sub(r"\1", found[0]), drawn)
    return _REPEATED.sub(r"\1", drawn)


def picture(spec: Mapping[str, Any], *, is_dark: bool = False) -> str:
    """Return `spec` as SVG for a file of its own, with the colours of the light or of the dark theme."""

    def literal(variable: re.Match[str]) -> str:
        return _DARK.get(variable[1], variable[2]) if is_dark else variable[2]

    return _VARIABLE.sub(literal, svg(spec))


def packed_library() -> str:
    """Return the JavaScript of Vega, Vega-Lite and vegaEmbed for a page, which then fetches nothing.

    It is packed by gzip and written in base64: 0.4 MB in the place of 0.9 MB, and a browser that paints the page has
    not to read a program first.
    """
    packed = gzip.compress(_library("vl_convert").javascript_bundle().encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode()
