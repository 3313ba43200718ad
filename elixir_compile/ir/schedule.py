"""Schedules: the regions of a step and the actions of each rank in order, how often a step calls its model, the rows of
each micro-batch, and the record of a step, its spans and peaks.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, NamedTuple

from elixir_compile.base.codec import LEFT_OUT
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.kinds import (
    BucketId,
    GroupId,
    InnerVerb,
    Lane,
    OpId,
    Phase,
    RegionId,
    StorageId,
    Verb,
    word,
    words,
)

# ----------------------------------------------------------------------------------------------------------------------
# Schedules: the regions of a step, and the actions of each rank in order.


@dataclass(frozen=True, slots=True)
class RegionRef:
    """The target of a `run`."""

    kind: ClassVar[str] = "region"
    region: RegionId

    def __str__(self) -> str:
        return self.region


@dataclass(frozen=True, slots=True)
class BucketRef:
    """The target of a `gather` of the parameters of a bucket, its `wait`, a `release`, a `reduce` and an `update`."""

    kind: ClassVar[str] = "bucket"
    bucket: BucketId

    def __str__(self) -> str:
        return self.bucket


@dataclass(frozen=True, slots=True)
class GradientRef:
    """The target of an `offload` of the reduced gradient of a bucket, and of the `wait` for it or for the reduce."""

    kind: ClassVar[str] = "gradient"
    bucket: BucketId

    def __str__(self) -> str:
        return f"{self.bucket}.grad"


@dataclass(frozen=True, slots=True)
class GroupRef:
    """The target of an `offload` or a `prefetch` of a group of activations, and of its `wait`."""

    kind: ClassVar[str] = "group"
    group: GroupId

    def __str__(self) -> str:
        return self.group


Target = RegionRef | BucketRef | GradientRef | GroupRef
"""On what an action acts. Printed as a name: `fwd.0`, `b1`, `b1.grad`, `h.1.matmul`; in JSON an object that states its
`kind`."""


@dataclass(frozen=True, slots=True)
class StateRef:
    """The optimizer state of a bucket on its way through a lane, which no action of a schedule names."""

    bucket: BucketId

    def __str__(self) -> str:
        return f"{self.bucket}.state"


class Kept(StrEnum):
    """What the runtime moves or waits for beside the actions of a schedule."""

    OUTSTANDING = "outstanding"
    """The activations of an outstanding forward that leave the device to make room, and come back."""
    GRADIENTS = "gradients"
    """The gradients of a backward on their way to the host, and those of parameters in no bucket."""
    PARAMETERS = "parameters"
    """The parameters that copies of a forward still read on the host."""
    UPDATES = "updates"
    """The results of streamed updates on their way to the host."""


def label(verb: Verb | InnerVerb, what: Target | StateRef | Kept) -> str:
    """Return the name of work on a lane, the same for a planned and a measured span: `gather b1`, `run fwd.0`.

    The same label on two lanes is two parts of one action, such as the copy and the all-gather of `gather b1`.
    """
    return f"{verb} {what}"


def verb_of(name: str) -> str:
    """Return the verb of `name`, which `label` made."""
    return name.partition(" ")[0]


def what_of(name: str) -> str:
    """Return the target in `name`, which `label` made."""
    return name.partition(" ")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Consecutive ops of one phase, from `first` to `last`, compiled and run as a unit, once per micro-batch."""

    id: RegionId
    """`fwd.0`, `bwd.3`."""
    phase: Phase
    first: OpId
    last: OpId
    buckets: tuple[BucketId, ...]
    """Buckets whose parameters the region reads."""
    micro_batches: int = field(default=1, metadata=LEFT_OUT)
    """The number of slices of the batch, of equal size, in which the region runs one after another."""

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise InvalidPlan(f"region {self.id} runs in {self.micro_batches} micro-batches; expected 1 or more.")

    def __str__(self) -> str:
        line = f"{word(self.id):<10}  {self.phase:<8}  {word(self.first)} {word(self.last)}"
        line += f"  micro-batches {self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{line}  buckets {words(*self.buckets)}" if self.buckets else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A line of a schedule: a verb, its target, and the micro-batch."""

    verb: Verb
    target: Target
    micro_batch: int = 0

    def __post_init__(self) -> None:
        if self.micro_batch < 0:
            raise InvalidPlan(f"`{self.verb} {self.target}` has micro-batch {self.micro_batch}; expected 0 or more.")

    def __str__(self) -> str:
        line = f"{self.verb:<8}  {word(str(self.target))}"
        return f"{line:<28}  @{self.micro_batch}" if self.verb is Verb.RUN or self.micro_batch else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of a rank in the order of its program.

    A transfer starts at its action or later, and has ended after its `wait`.
    """

    rank: int
    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise InvalidPlan(f"a schedule is for rank {self.rank}; expected 0 or more.")

    @property
    def pairs(self) -> tuple[tuple[Verb, Target], ...]:
        """The verb and the target of each action."""
        return tuple((action.verb, action.target) for action in self.actions)

    def __str__(self) -> str:
        return "\n".join([f"schedule rank {self.rank}", *(f"  {action}" for action in self.actions)])


# ----------------------------------------------------------------------------------------------------------------------
# How often each step calls a model, and how many of its forwards wait for their backward at once.
#
#   calls 4, outstanding 4     F F F F B B B B          all forwards first: GPipe, breadth-first loops
#   calls 4, outstanding 2     F F B F B F B B          one forward, one backward: 1F1B
#
# A plain step calls its model once. A stage of a pipeline is called once per micro-batch of the pipeline. In such a
# step a bucket is gathered in the first forward and released in the last one, and so in the backward; the gradients of
# all calls are summed before they are reduced, in the last backward.


class BackwardOrder(StrEnum):
    """Of which outstanding forward the next backward is. Plans of steps in a known order count no other order."""

    ANY = "any"
    FIRST_FIRST = "first-first"
    """The earliest. After `outstanding` forwards, a backward and a forward take turns."""
    LAST_FIRST = "last-first"
    """The latest. After `outstanding` forwards, a backward and a forward take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of a step, and the tensors of earlier and later calls that the caller holds meanwhile."""

    num: int = 1
    """Forwards of a step; as many backward passes follow."""
    outstanding: int = 1
    """The most forwards that wait for their backward at once."""
    more_outputs: int = 0
    """The most outputs that the caller still holds after the backward of their call."""
    output_grads: int = 1
    """The most gradients of outputs, inputs of the backward, that the caller holds at once."""
    input_grads: int = 1
    """The most gradients of inputs, outputs of the backward, that the caller holds at once."""
    has_loss: bool = False
    """Whether the caller computes a loss of the outputs, which keeps as many bytes as them until the backward."""
    is_scaled: bool = False
    """Whether the caller divides the gradients after the last backward."""
    sums_in_fp32: bool = False
    """Whether the gradients of the calls are summed in fp32 where parameters are narrower."""

    sums_stay: bool = False
    """Whether gradients of earlier steps stay beside the sums over the calls of a step."""

    shared: tuple[StorageId, ...] = ()
    """Inputs that are parts of one tensor in all calls, which counts once."""
    backward_order: BackwardOrder = field(default=BackwardOrder.ANY, metadata=LEFT_OUT)
    """Of which outstanding forward the next backward is."""

    @classmethod
    def of_stage(cls, num: int, outstanding: int, *, is_first: bool, is_last: bool, num_sent: int) -> "Calls":
        """Return the calls of a stage of a pipeline, with the tensors that a schedule of torch holds for it.

        `is_first` and `is_last` say that the stage is the first or the last of the pipeline. Of sent outputs, and of
        sent gradients of inputs, the schedule holds `num_sent`; for gradients of outputs it has a buffer per call.
        """
        return cls(
            num=num,
            outstanding=outstanding,
            more_outputs=num - 1 if is_last else min(num_sent, num - 1),
            output_grads=1 if is_last else num,
            input_grads=1 if is_first else min(num_sent + 1, num),
        )

    def __post_init__(self) -> None:
        if not 1 <= self.outstanding <= self.num:
            raise InvalidPlan(
                f"{self.outstanding} outstanding forwards in a step of {self.num} calls; expected 1 to {self.num}."
            )
        if min(self.output_grads, self.input_grads) < 1 or self.more_outputs < 0:
            raise InvalidPlan(f"the caller of {self} holds less than one tensor of a call.")

    @property
    def alternate(self) -> bool:
        """Whether a backward runs before the last forward: buckets then stay gathered from the first forward to the
        last backward."""
        return self.outstanding < self.num

    def __str__(self) -> str:
        return f"{self.num} call{'' if self.num == 1 else 's'}, {self.outstanding} outstanding"


ONCE = Calls()
"""The calls of a plain step."""


# ----------------------------------------------------------------------------------------------------------------------
# The rows of each micro-batch of a batch whose number of rows is known only when a step runs.
#
# The number of micro-batches that a plan states is then an upper limit, as a micro-batch has at least `LEAST_ROWS`.
#
#   rows       16         7        6        3       in at most 4 micro-batches
#   each       4 4 4 4    3 2 2    2 2 2    3


LEAST_ROWS = 2
"""The fewest rows of a micro-batch of a dynamic number of rows, and of a rank: torch traces a single row in another
way, so its graph would differ from that of more rows. A rank without rows runs as many, and they count 0."""


def rows_of_micro_batches(rows: int, most: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch of a batch of `rows`, in at most `most` micro-batches, the largest first."""
    num = max(1, min(most, rows // LEAST_ROWS))
    return tuple(rows // num + (place < rows % num) for place in range(num))


def most_rows(rows: int, most: int) -> int:
    """Return the most rows of a micro-batch of any batch of up to `rows`, in at most `most` micro-batches.

    A batch of 7 rows in at most 4 has a micro-batch of 3, but a batch of 8 has only micro-batches of 2.
    """
    return max(-(-rows // most), min(rows, 2 * LEAST_ROWS - 1))


# ----------------------------------------------------------------------------------------------------------------------
# The spans and peaks of a step. Simulated and measured steps have the same type, so `diff` can compare the two.


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
