"""Draw memory over the step and the lanes: Vega-Lite specifications made with Altair, and pictures of them as SVG.

The charts need the extra `report`, Altair and vl-convert. Colours are CSS variables with a value for files without a
style sheet, so that a page may have a dark theme.
"""

import importlib
import importlib.util
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elixir_compile.ir.kinds import Lane
from elixir_compile.report.figures import STEPS, Bar, CurvePoint, MemoryRow, bar_columns, columns, kinds_of
from elixir_compile.units import GIB

EXTRA = "pip install 'elixir-compile[report]'"
"""The command that installs the libraries of the charts."""
_COLOURS = {
    "param": "#0072B2", "master": "#56B4E9", "moment": "#009E73", "grad": "#D55E00", "gathered": "#CC79A7",
    "saved": "#E69F00", "temp": "#F0E442", "input": "#8C8C8C", "buffer": "#B8B8B8",
    "run": "#56B4E9", "update": "#009E73", "gather": "#CC79A7", "prefetch": "#E69F00", "offload": "#0072B2",
    "reduce": "#D55E00", "step": "#0072B2", "bound": "#8C8C8C",
}  # fmt: skip
"""Colours of Okabe and Ito, which colour-blind people can tell apart, and greys."""
_INK, _RULE = "var(--ink, #222222)", "var(--rule, #d9d9d9)"
_WIDTH, _HEIGHT, _LANE_HEIGHT = 1040, 280, 26
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
    *,
    is_static: bool = False,
) -> dict[str, Any]:
    """Return the Vega-Lite specification of memory over the step with the lanes below, on one axis of seconds.

    All live bytes of a `second` plan are drawn as a line. Unless it `is_static`, both charts zoom together, and a
    tooltip shows the stretch under the pointer.
    """
    alt = _library("altair")
    memory = _memory(rows, budget_bytes, second, is_static=is_static)
    both = alt.vconcat(memory, _lanes(found, is_static=is_static), spacing=8)
    spec = _finished(both.resolve_scale(x="shared", color="independent"))
    if not is_static:
        # One zoom for both charts. Altair would name it in each, and warn of the repetition.
        interval = {"type": "interval", "encodings": ["x"]}
        spec["params"] = [{"name": "zoom", "select": interval, "bind": "scales", "views": ["hover", "lanes"]}]
    return spec


def memory_chart(rows: Sequence[MemoryRow], budget_bytes: int, second: Sequence[MemoryRow] = ()) -> dict[str, Any]:
    """Return the specification of memory over the step alone, for a picture."""
    return _finished(_memory(rows, budget_bytes, second, is_static=True))


def lanes_chart(found: Sequence[Bar]) -> dict[str, Any]:
    """Return the specification of the lanes alone, for a picture."""
    return _finished(_lanes(found, is_static=True))


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
    rows, second = _drawn(rows), _drawn(second)
    kinds = [str(kind) for kind in kinds_of(rows)]
    table = columns(rows)
    table |= {kind: [round(nbytes / GIB, 4) for nbytes in table[kind]] for kind in kinds}
    table["total"] = [round(row.nbytes / GIB, 4) for row in rows]
    peak = max(rows, key=lambda row: row.nbytes)
    end_s = max(row.end_s for row in (*rows, *second))
    most_gib = 1.08 * max(budget_bytes, *(row.nbytes for row in (*rows, *second))) / GIB
    # An area of steps ends at its last point, which repeats the last value.
    ends = {"start_s": [*table["start_s"], rows[-1].end_s]} | {kind: [*table[kind], table[kind][-1]] for kind in kinds}
    x = alt.X("start_s:Q", title="seconds", axis=alt.Axis(grid=False), scale=alt.Scale(domain=[0, end_s], nice=False))
    areas = (
        _chart(alt, ends)
        .transform_fold(kinds, as_=["kind", "GiB"])
        .transform_calculate(order=f"indexof({kinds!r}, datum.kind)")
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
    layers = [areas, *_line(alt, second), limit.encode(y="budget:Q"), marks.encode(x="s:Q", y="GiB:Q")]
    if not is_static:
        shown = [alt.Tooltip(f"{name}:N") for name in ("region", "op", "module", "source")]
        shown += [alt.Tooltip(f"{name}:Q", format=".3f", title=f"{name}, GiB") for name in ("total", *kinds)]
        hover = _chart(alt, table).mark_rect(opacity=0.001, aria=False)
        edges = {"x": x, "x2": "end_s:Q", "y": alt.value(0), "y2": alt.value(_HEIGHT)}
        layers.append(hover.encode(**edges, tooltip=shown).properties(name="hover"))
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def _line(alt: Any, rows: Sequence[MemoryRow]) -> Iterator[Any]:
    """Yield the line of all live bytes of a second plan, if there are `rows`."""
    if rows:
        total = [round(row.nbytes / GIB, 4) for row in rows]
        ends = {"start_s": [*(row.start_s for row in rows), rows[-1].end_s], "GiB": [*total, total[-1]]}
        line = _chart(alt, ends).mark_line(interpolate="step-after", color=_INK, strokeWidth=1.5, aria=False)
        yield line.encode(x="start_s:Q", y="GiB:Q")


def _drawn(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Return `rows` without those of no length, which no axis can show: the row before takes their place if it has
    fewer bytes."""
    found: list[MemoryRow] = []
    for row in rows:
        if row.end_s > row.start_s or not found:
            found.append(row)
        elif row.nbytes > found[-1].nbytes:
            found[-1] = replace(row, start_s=found[-1].start_s, end_s=found[-1].end_s)
    if len(found) > 1 and found[0].end_s <= found[0].start_s:
        first, second = found[:2]
        found[:2] = [
            replace(max(first, second, key=lambda row: row.nbytes), start_s=second.start_s, end_s=second.end_s)
        ]
    return found


def _chart(alt: Any, table: Mapping[str, Sequence[Any]]) -> Any:
    """Return a chart of the columns of `table`: a row for each value would repeat the names of the columns."""
    return alt.Chart(alt.Data(values=[dict(table)])).transform_flatten(list(table))


def _colours(alt: Any, field: str, names: Sequence[str]) -> Any:
    """Return the encoding of `field` by the colours of `names`."""
    scale = alt.Scale(domain=list(names), range=[colour(name) for name in names])
    return alt.Color(field, scale=scale, legend=alt.Legend(title=None))


def _lanes(found: Sequence[Bar], *, is_static: bool) -> Any:
    alt = _library("altair")
    table = bar_columns(found)
    is_single = len({bar.of for bar in found}) == 1
    named = [f"{bar.lane}" if is_single else f"{bar.lane}, {bar.of}" for bar in found]
    order = {name: (list(Lane).index(bar.lane), STEPS.index(bar.of)) for name, bar in zip(named, found, strict=True)}
    rows = sorted(order, key=order.__getitem__)
    data = {"row": named} | {name: table[name] for name in ("verb", "what", "start_s", "end_s")}
    data["ms"] = [round(1e3 * (bar.end_s - bar.start_s), 3) for bar in found]
    shown = [*(alt.Tooltip(f"{name}:N") for name in ("row", "verb", "what")), alt.Tooltip("ms:Q", format=".3f")]
    chart = (
        _chart(alt, data)
        .mark_bar(aria=False)
        .encode(
            x=alt.X("start_s:Q", title="seconds", axis=alt.Axis(grid=False)),
            x2="end_s:Q",
            y=alt.Y("row:N", sort=rows, title=None, scale=alt.Scale(domain=rows)),
            color=_colours(alt, "verb:N", list(dict.fromkeys(table["verb"]))),
            **({} if is_static else {"tooltip": shown}),
        )
    )
    return chart.properties(width=_WIDTH, height=_LANE_HEIGHT * len(rows), name="lanes")


def _finished(chart: Any) -> dict[str, Any]:
    """Return the specification of `chart` with the colours of text and lines, and without a background."""
    text = {"labelColor": _INK, "titleColor": _INK}
    return (
        chart.configure(background="transparent", font="sans-serif")
        .configure_axis(**text, gridColor=_RULE, domainColor=_RULE, tickColor=_RULE)
        .configure_legend(**text)
        .configure_view(stroke=None)
        .to_dict()
    )


_CLIP = re.compile(r"clip\d+")
_DIGITS = re.compile(r"(\.\d\d)\d+")
"""A number with more than two decimals: a hundredth of a pixel cannot be seen."""


def svg(spec: Mapping[str, Any]) -> str:
    """Return the picture of `spec` as SVG; equal specifications give equal text."""
    drawn = _library("vl_convert").vegalite_to_svg(dict(spec))
    names: dict[str, str] = {}
    numbers = itertools.count()
    # The library numbers clip paths over all pictures of a process.
    drawn = _CLIP.sub(lambda found: names.setdefault(found[0], f"clip-{next(numbers)}"), drawn)
    return _DIGITS.sub(r"\1", drawn)


def library() -> str:
    """Return the JavaScript of Vega, Vega-Lite and vegaEmbed for a page, which then fetches nothing."""
    return _library("vl_convert").javascript_bundle().replace("</script", "<\\/script")
