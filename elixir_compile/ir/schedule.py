"""Schedules: the regions of a step, and the actions of each rank in order."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from elixir_compile.base.codec import LEFT_OUT
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.kinds import BucketId, GroupId, InnerVerb, OpId, Phase, RegionId, Verb
from elixir_compile.ir.words import word, words


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

    def __str__(self) -> str:
        return "\n".join([f"schedule rank {self.rank}", *(f"  {action}" for action in self.actions)])
