"""Tell and draw the bytes per second between host and device over a step, and tell the seconds, memory and traffic of
each of its phases.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elixir_compile.ir.hardware.cluster import Cluster, Link
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Origin, Record, Span
from elixir_compile.tools.observed import CALLER, Counters, FullStep, Interval, StudyRow, name_of

# ----------------------------------------------------------------------------------------------------------------------
# Tell and draw the bytes per second on the link between host and device over a step, in both directions.
#
#   copies     |--- 64 MB ---|            |- 16 MB -|
#   bins       |  6 GB/s |  6 GB/s |  0  |  2 GB/s |    200 of equal length: a copy counts in each by its seconds there
#
# What the driver counts on the link is more: it holds all traffic of the device. It is drawn as dots beside the bins.


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


# ----------------------------------------------------------------------------------------------------------------------
# Tell for each phase of a step its seconds, its memory, its traffic in both directions, and who waited.
#
# A span that lasts through several phases counts in each by the seconds it spends there, and so do its bytes.


WHOLE = "whole"
PHASES = ("forward", "backward", "update", CALLER, WHOLE)
Stretch = tuple[float, float]
"""A start and an end in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What passed one direction of the link between host and device in a phase."""

    nbytes: int
    busy_s: float
    """Seconds in which at least one copy was on its way."""
    seconds_s: float
    """Seconds of the phase."""
    rated_bytes_per_s: float
    """The rate of the machine's profile."""

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second while busy; None if nothing was copied."""
        return self.nbytes / self.busy_s if self.busy_s else None

    @property
    def share_of_rate(self) -> float | None:
        """The rate while busy over that of the profile."""
        return None if self.bytes_per_s is None else self.bytes_per_s / self.rated_bytes_per_s

    @property
    def idle_share(self) -> float:
        """The share of the phase in which nothing was copied."""
        return 1 - self.busy_s / self.seconds_s if self.seconds_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """One column of the table."""

    phase: str
    seconds_s: float
    share: float
    """Of the period."""
    most_bytes: int | None
    """The most bytes on the device in the phase; None if memory was not recorded."""
    least_bytes: int | None
    unused_bytes: int | None
    """What the phase leaves of the budget at its own peak; None without a budget."""
    up: Traffic
    down: Traffic
    compute_s: float
    """Seconds in which the device computed."""
    waited_s: float
    """Seconds in which the thread of the step was blocked by a wait of ours."""
    host_s: float
    """Seconds in which the host updated parameters."""


def phase_figures(row: StudyRow, cluster: Cluster) -> tuple[PhaseFigures, ...]:
    """Return the figures of each phase of `row` that takes time, and of the whole step; empty if it was not run."""
    if row.full is None:
        return ()
    names = dict.fromkeys(name_of(interval.phase) for interval in row.full.intervals)
    return tuple(_figures(row, row.full, cluster, phase) for phase in PHASES if phase in names or phase == WHOLE)


def _figures(row: StudyRow, full: FullStep, cluster: Cluster, phase: str) -> PhaseFigures:
    own = stretches(full.intervals, phase)
    spans = full.record.spans
    seconds_s = sum(end_s - start_s for start_s, end_s in own)
    period_s = full.summary.period_s
    most, least = _extremes(row.memory, phase)
    traffic = {
        lane: Traffic(
            nbytes=moved_bytes(spans, lane, own),
            busy_s=busy_s(spans, lane, own),
            seconds_s=seconds_s,
            rated_bytes_per_s=_link(cluster, lane).bytes_per_s,
        )
        for lane in (Lane.H2D, Lane.D2H)
    }
    return PhaseFigures(
        phase=phase,
        seconds_s=seconds_s,
        share=seconds_s / period_s if period_s else 0.0,
        most_bytes=most,
        least_bytes=least,
        unused_bytes=None if row.budget_bytes is None or most is None else row.budget_bytes - most,
        up=traffic[Lane.H2D],
        down=traffic[Lane.D2H],
        compute_s=busy_s(spans, Lane.COMPUTE, own),
        waited_s=busy_s(spans, Lane.CALLER, own),
        host_s=busy_s(spans, Lane.HOST, own),
    )


def _link(cluster: Cluster, lane: Lane) -> Link:
    return cluster.h2d if lane is Lane.H2D else cluster.d2h


def stretches(intervals: Sequence[Interval], phase: str) -> tuple[Stretch, ...]:
    """Return when `phase` runs, or the whole step for `WHOLE`."""
    return tuple((each.start_s, each.end_s) for each in intervals if phase in (WHOLE, name_of(each.phase)))


def busy_s(spans: Iterable[Span], lane: Lane, within: Sequence[Stretch]) -> float:
    """Return the seconds of `within` in which at least one span of `lane` runs."""
    own = sorted((span.start_s, span.end_s) for span in spans if span.lane is lane)
    joined: list[Stretch] = []
    for start_s, end_s in own:
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((start_s, end_s))
    return sum(_overlap_s(span, stretch) for span in joined for stretch in within)


def moved_bytes(spans: Iterable[Span], lane: Lane, within: Sequence[Stretch]) -> int:
    """Return the bytes that pass `lane` in `within`; a span counts by the share of its seconds there.

    A span without length counts where it begins.
    """
    total = 0.0
    for span in spans:
        if span.lane is lane and span.nbytes:
            length_s = span.end_s - span.start_s
            if length_s > 0:
                inside_s = sum(_overlap_s((span.start_s, span.end_s), stretch) for stretch in within)
                total += span.nbytes * inside_s / length_s
            elif any(start_s <= span.start_s < end_s for start_s, end_s in within):
                total += span.nbytes
    return round(total)


def _overlap_s(first: Stretch, second: Stretch) -> float:
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))


def _extremes(memory: FullStep | None, phase: str) -> tuple[int | None, int | None]:
    """Return the most and the least bytes on the device in `phase`; None if they were not recorded."""
    if memory is None or memory.live is None:
        return None, None
    live, own = memory.live, stretches(memory.intervals, phase)
    ends_s = [*live.at_s[1:], memory.intervals[-1].end_s if memory.intervals else 0.0]
    seen = [
        total
        for start_s, end_s, total in zip(live.at_s, ends_s, live.totals_bytes, strict=True)
        if any((start_s < last_s and first_s < end_s) or first_s <= start_s < last_s for first_s, last_s in own)
    ]
    return (max(seen), min(seen)) if seen else (None, None)
