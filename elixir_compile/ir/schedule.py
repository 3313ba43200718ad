"""Schedules: the regions of a step, and the actions of each rank in order."""

from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan
from elixir_compile.ir.kinds import BucketId, OpId, Phase, RegionId, Verb
from elixir_compile.ir.words import word, words


def grad_of(bucket: BucketId) -> str:
    """Return the name of the gradient of `bucket` in a schedule."""
    return f"{bucket}.grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Consecutive ops of one phase, from `first` to `last`, compiled and run as a unit."""

    id: RegionId
    """`fwd.0`, `bwd.3`."""
    phase: Phase
    first: OpId
    last: OpId
    buckets: tuple[BucketId, ...]
    """Buckets whose parameters the region reads."""

    def __str__(self) -> str:
        line = f"{word(self.id):<10}  {self.phase:<8}  {word(self.first)} {word(self.last)}"
        return f"{line}  buckets {words(*self.buckets)}" if self.buckets else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A line of a schedule.

    `what` is a region for `run`, and a bucket for `gather` and its `wait`, `release`, `reduce` and `update`. For
    `offload`, `prefetch` and their `wait` it is a group of activations or the gradient of a bucket, as `b1.grad`.
    """

    verb: Verb
    what: str
    micro_batch: int = 0

    def __post_init__(self) -> None:
        if self.micro_batch < 0:
            raise InvalidPlan(f"`{self.verb} {self.what}` has micro-batch {self.micro_batch}; expected 0 or more.")

    def __str__(self) -> str:
        line = f"{self.verb:<8}  {word(self.what)}"
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
