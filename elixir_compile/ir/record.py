"""The spans and peaks of a step. Simulated and measured steps have the same type, so `diff` can compare the two."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from elixir_compile.base.codec import LEFT_OUT
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.kinds import Lane


class Origin(StrEnum):
    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An action on a lane, with its start and end in seconds since the step began."""

    lane: Lane
    label: str
    """Made by `ir.schedule.label`: `gather b1`."""
    start_s: float
    end_s: float
    graph: str = field(default="", metadata=LEFT_OUT)
    """The name of the captured graph whose step made the span; empty for an update, which belongs to no graph."""
    nbytes: int = field(default=0, metadata=LEFT_OUT)
    """Bytes that pass the lane: of a copy, of the full buffer of a collective, of a read or a write; else 0."""
    issued_s: float | None = field(default=None, metadata=LEFT_OUT)
    """When Python issued the work, on the clock of `start_s`; None if that is not known."""
    piece: int = field(default=0, metadata=LEFT_OUT)
    """The number of the piece, if an action passes its lane in several spans; 0 for the first or only one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s) and self.start_s <= self.end_s):
            raise InvalidPlan(f"span {self.label} on {self.lane} lasts from {self.start_s} s to {self.end_s} s.")
        if min(self.nbytes, self.piece) < 0 or not math.isfinite(self.issued_s or 0.0):
            raise InvalidPlan(
                f"span {self.label} on {self.lane} has {self.nbytes} bytes, is piece {self.piece} and was issued at "
                f"{self.issued_s} s."
            )


class Tally(NamedTuple):
    """How often an action used a lane, and the bytes of all these times together."""

    times: int
    nbytes: int


def tallies(spans: Iterable[Span]) -> Mapping[tuple[Lane, str], Tally]:
    """Return, by lane and label, how often the actions of `spans` ran, and their bytes.

    The pieces of an action count once. What the calling thread waited for is left out, since no plan says it.
    """
    found: dict[tuple[Lane, str], Tally] = {}
    for span in spans:
        if span.lane is not Lane.CALLER:
            times, nbytes = found.get((span.lane, span.label), Tally(0, 0))
            found[span.lane, span.label] = Tally(times + (span.piece == 0), nbytes + span.nbytes)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A step: its spans, its peaks in bytes, and the number of actions by verb."""

    origin: Origin
    step_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    spans: tuple[Span, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of executed actions by verb: `gather`, `release`, `offload`, `reduce`."""

    @property
    def graphs(self) -> tuple[str, ...]:
        """The names of the captured graphs that ran in the step, in the order of their first spans."""
        return tuple(dict.fromkeys(span.graph for span in self.spans if span.graph))

    def of_graph(self, name: str, buckets: Collection[str] | None = None) -> "Record":
        """Return the record with the spans of the graph `name` alone, and of updates, which belong to no graph.

        If `buckets` are given, only updates of these are included. If other graphs ran in the step, the counts are
        those of the spans that are left; seconds and peaks stay those of the whole step. If no span is of the graph,
        as in a file of format 1 or under another name, the record itself is returned.
        """
        graphs = self.graphs
        if name not in graphs:
            return self

        def is_own(span: Span) -> bool:
            what = span.label.partition(" ")[2].partition(".")[0]
            return span.graph == name or (not span.graph and (buckets is None or what in buckets))

        spans = tuple(span for span in self.spans if is_own(span))
        if len(graphs) == 1:
            return replace(self, spans=spans)
        times: Counter[str] = Counter()
        for (_, label), tally in tallies(spans).items():  # an action that passes two lanes counts once
            times[label] = max(times[label], tally.times)
        counts: Counter[str] = Counter()
        for label, number in times.items():
            counts[label.partition(" ")[0]] += number
        return replace(self, spans=spans, counts=dict(counts))

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step_s) and self.step_s >= 0):
            raise InvalidPlan(f"a record says that the step took {self.step_s} s.")
        if min(self.device_peak_bytes, self.host_peak_bytes, *self.counts.values(), 0) < 0:
            raise InvalidPlan("a record holds a negative count or peak.")
