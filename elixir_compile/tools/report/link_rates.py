"""Tell and draw the bytes per second on the link between host and device over a step, in both directions.

```text
  copies     |--- 64 MB ---|            |- 16 MB -|
  bins       |  6 GB/s |  6 GB/s |  0  |  2 GB/s |    200 of equal length: a copy counts in each by its seconds there
```

What the driver counts on the link is more: it holds all traffic of the device. It is drawn as dots beside the bins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Origin, Record
from elixir_compile.tools.study.observed import Counters, FullStep

NUM_BINS = 200
_GB = 1e9
_WIDTH, _HEIGHT = 1040, 110
"""Pixels."""
_COUNTERS = {Lane.H2D: "link_rx_bytes_per_s", Lane.D2H: "link_tx_bytes_per_s"}
"""The counters of the device, which receives what goes to it."""
_COLOUR_OF = {Lane.H2D: "gather", Lane.D2H: "offload"}
_DASHES = {"planned": [1, 0], "second plan": [2, 2], "measured": [6, 3]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """The mean rate of one direction of the link in each of `NUM_BINS` parts of a step."""

    of: str
    """Of which step, see `figures.STEPS`."""
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
    """Return the rates of both directions over `record`, the step called `of`; empty if no copy of it has bytes."""
    step_s = max([record.step_s, *(span.end_s for span in record.spans if span.nbytes)])
    rates = {Lane.H2D: cluster.h2d, Lane.D2H: cluster.d2h}
    found = [
        LinkRates(
            of=of,
            lane=lane,
            step_s=step_s,
            bytes_per_s=_binned(record, lane, step_s),
            rated_bytes_per_s=link.bytes_per_s,
            counted=_counted(lane, counters),
        )
        for lane, link in rates.items()
        if step_s > 0
    ]
    return tuple(found) if any(any(each.bytes_per_s) for each in found) else ()


LANES_CAPTION = "Lanes over {}. Below, if bytes were copied: the rate of the link, with dashed lines at its profile."
"""Of the step with the name that is filled in."""


def row_rates(full: FullStep, cluster: Cluster) -> tuple[LinkRates, ...]:
    """Return the rates of the link over a recorded or a simulated step, with those that the driver counted."""
    of = "planned" if full.record.origin is Origin.SIMULATED else "measured"
    return link_rates(full.record, of, cluster, full.counters)


def _binned(record: Record, lane: Lane, step_s: float) -> tuple[float, ...]:
    """Return the rate of `lane` in each bin. A copy that took no time counts in the bin of its moment."""
    bin_s = step_s / NUM_BINS
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
    return tuple(each / bin_s for each in nbytes)


def _counted(lane: Lane, counters: Counters | None) -> tuple[tuple[float, float], ...]:
    values = () if counters is None else counters.values.get(_COUNTERS[lane], ())
    times_s = () if counters is None else counters.at_s
    return tuple((at_s, value) for at_s, value in zip(times_s, values, strict=False) if value is not None)


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


def rates_view(alt: Any, found: Sequence[LinkRates], colour: Callable[[str], str]) -> Any:
    """Return the chart of `found`, whose columns are the table called `rates`.

    The dashed rules are the rates of the machine's profile. `colour` returns the colour of a verb.
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
    rule = _flat(alt, {"link": list(rated), "gb_per_s": list(rated.values())})
    layers = [line, rule.mark_rule(strokeDash=[2, 3], aria=False).encode(**axes)]
    dots = [(each.lane.value, at_s, rate / _GB) for each in found for at_s, rate in each.counted]
    if dots:
        links, times_s, rates = (list(column) for column in zip(*dots, strict=True))
        table = {"link": links, "start_s": times_s, "gb_per_s": rates}
        layers.append(_flat(alt, table).mark_point(filled=True, size=20, aria=False).encode(x="start_s:Q", **axes))
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def _flat(alt: Any, table: dict[str, list[Any]]) -> Any:
    return alt.Chart(alt.Data(values=[table])).transform_flatten(list(table))
