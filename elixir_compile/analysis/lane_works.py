"""The works of a schedule: those of each lane and each thread, their memory, and the works that each is behind.

```text
  work                       behind       before it (bits)     memory
  0  gather b1, compute                   0000                 allocates the copy
  1  gather b1, h2d          0            0001                 writes the copy
  2  run fwd.1, compute      0, and 1     0011                 reads the copy; without `wait b1` it is behind 0 alone
```

A work is behind the work before it on its actor, behind all works that its thread knows to be over when it issues the
work, and behind the works that its actor waits for. A moment is a number with a bit for each work that is over by then,
so the moments of all works are the transitive closure of their order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Memory(StrEnum):
    """The content of a cell; `{name}` is a bucket, or a group of activations."""

    HOME = "the parameters of {name} in their home"
    COPY = "the gathered copy of {name}"
    SENT = "the shard of {name} on its way to the other ranks"
    STATE = "the optimizer state of {name}"
    ROOM = "the room on the device for the streamed update of {name}"
    STAGED = "the copies of {name} and its gradient for the host"
    GRADIENT = "the gradient of {name} on the device"
    ROWS = "the gradient of {name} on its way to the other ranks"
    REDUCED = "the reduced gradient of {name} on the device"
    ARRIVED = "the gradient of {name} on the host"
    SUM = "the sum of the gradients of {name}"
    SAVED = "{name} on the device"
    AWAY = "{name} on the host"
    BACK = "{name}, back on the device"
    LEAVING_SLICE = "the slice of {name} that leaves the device"
    ARRIVING_SLICE = "a slice of {name} that arrives on the device"


KEPT = frozenset({Memory.HOME, Memory.STATE})
"""Memory that has its values from step to step."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One piece of memory from its allocation to its end; memory that is allocated again is another cell."""

    memory: Memory
    name: str

    def __str__(self) -> str:
        return self.memory.format(name=self.name)


class Place(NamedTuple):
    """The action to which a work belongs."""

    at: int
    """The index of the action in the schedule."""
    step: int
    """0 for the first of two consecutive steps, 1 for the second."""


Moment = int
"""A moment: bit i is set if work i is over by then."""
BEGIN: Moment = 0
"""Before all works."""


@dataclass(slots=True, eq=False)
class Actor:
    """A lane or a thread: its works run one after another."""

    name: str
    over: Moment = BEGIN
    """When its next work may begin."""


class Work(NamedTuple):
    """The work of an actor for an action; its number is its index in the order of issue."""

    actor: str
    place: Place
    before: Moment
    """The works that are over when it begins."""
    reads: Sequence[Cell]
    writes: Sequence[Cell]
    frees: Sequence[Cell]


class Works:
    """The works of a schedule while they are issued, in the order in which the program issues them."""

    def __init__(self) -> None:
        self.found: list[Work] = []
        self.place = Place(0, 0)
        """The action that is issued now."""
        self.compute = Actor("compute")
        self.h2d = Actor("h2d")
        self.d2h = Actor("d2h")
        self.collectives = Actor("the stream of the ranks")
        self.program = Actor("the program")
        """The thread that trains; the thread of autograd goes on where it stops."""
        self.updates = Actor("the thread of the updates")

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Let the works of the block belong to the action number `place` of this step."""
        before, self.place = self.place, Place(place, self.place.step)
        yield
        self.place = before

    def wait(self, actor: Actor, moment: Moment) -> None:
        """Let all further works of `actor` be behind `moment`."""
        actor.over |= moment

    def issue(
        self,
        actor: Actor,
        reads: Sequence[Cell] = (),
        writes: Sequence[Cell] = (),
        frees: Sequence[Cell] = (),
    ) -> Moment:
        """Let the program issue a work of `actor`, and return the moment when all work of `actor` so far is over."""
        moment = actor.over = self.apart(actor, actor.over | self.program.over, reads, writes, frees)
        return moment

    def apart(
        self,
        actor: Actor,
        after: Moment,
        reads: Sequence[Cell] = (),
        writes: Sequence[Cell] = (),
        frees: Sequence[Cell] = (),
    ) -> Moment:
        """Issue a work of `actor` that is behind `after`, and return the moment when it is over.

        Later works of the actor are not behind it: the thread of the updates issues works of h2d between works that the
        program issues there, and their order is not known.
        """
        found = self.found
        found.append(Work(actor.name, self.place, after, reads, writes, frees))
        return after | 1 << (len(found) - 1)

    def behind_compute(self, lane: Actor, moment: Moment = BEGIN) -> None:
        """Let further works of `lane` be behind the compute issued so far and behind `moment`."""
        self.wait(lane, self.compute.over | moment)

    def synchronize(self, lane: Actor) -> None:
        """Let the program go on when all work of `lane` so far is over."""
        self.wait(self.program, lane.over)
