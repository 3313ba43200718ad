"""Find two accesses to the same memory that no wait orders: vector clocks over threads and streams.

```text
  actor        its clock: the last access of each actor that is certainly over   access       checked against
  h2d          {h2d: 3}                                                          gather b1    read of slab 7
  compute      {compute: 9, h2d: 2}
  worker       {worker: 4}                                                       update b1    write to slab 7: not
                                                                                              in {worker: 4} -> Race
```

Every actor, a thread or a stream, counts its accesses, and knows how far it is behind the others: a wait, a queue or
an event lets one actor learn the clock of another. Two accesses are ordered if the actor of the later one knew the
count of the earlier one. Which of them happened first in this run does not matter, so one run finds what a thousand
runs of other timing would show. The algorithm is that of DJIT+ (Pozniansky and Schuster, PPoPP 2003).
"""

from collections.abc import Iterable
from dataclasses import dataclass

Clock = dict[str, int]
"""By the name of an actor, how many of its accesses are certainly over."""


class Actor:
    """A thread or a stream: its accesses happen one after another."""

    __slots__ = ("clock", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {name: 0}

    def learn(self, clock: Clock) -> None:
        """Note that everything in `clock` is over before the actor goes on."""
        own = self.clock
        for name, count in clock.items():
            if count > own.get(name, 0):
                own[name] = count

    def knows(self, access: "Access") -> bool:
        """Return whether `access` is certainly over before the actor goes on."""
        return self.clock.get(access.actor, 0) >= access.count


@dataclass(frozen=True, slots=True)
class Source:
    """Where an access comes from."""

    action: str
    """The action of the schedule, `gather b1`."""
    moment: int
    """The position of the action in the history."""
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Access:
    """A read or write of the bytes from `start` to `end` of a cell."""

    actor: str
    count: int
    verb: str
    """`reads`, `writes` or `frees`."""
    start: int
    end: int
    source: Source

    @property
    def is_write(self) -> bool:
        return self.verb != "reads"


class Cell:
    """One allocation, from its first access until it is freed, with the accesses that later ones must be behind."""

    __slots__ = ("_accesses",)

    def __init__(self) -> None:
        self._accesses: list[Access] = []

    def add(self, actor: Actor, verb: str, span: tuple[int, int], source: Source) -> tuple[Access, Access] | None:
        """Note that `actor` accesses the bytes of `span`; return an earlier access without order, and this one."""
        actor.clock[actor.name] += 1
        new = Access(actor.name, actor.clock[actor.name], verb, *span, source)
        conflict: Access | None = None
        kept: list[Access] = []
        for old in self._accesses:
            if old.start < new.end and new.start < old.end:
                if (old.is_write or new.is_write) and not actor.knows(old):
                    conflict = old
                # Whoever is behind `new` is behind `old` too.
                is_covered = new.start <= old.start and old.end <= new.end
                if is_covered and (new.is_write or (not old.is_write and old.actor == new.actor)):
                    continue
            kept.append(old)
        kept.append(new)
        self._accesses = kept
        return None if conflict is None else (conflict, new)

    def free(self, actor: Actor, source: Source) -> tuple[Access, Access] | None:
        """Note that `actor` frees the memory; return an access that may still run, and the free, if there is one."""
        end = max((access.end for access in self._accesses), default=0)
        return self.add(actor, "frees", (0, end), source)


def shown(history: Iterable[tuple[int, str]], accesses: Iterable[Access]) -> str:
    """Return the actions of `history` around `accesses`, a line each, with `<-- here` at those of `accesses`."""
    moments = {access.source.moment for access in accesses}
    lines: list[str] = []
    for moment, action in history:
        near = any(abs(moment - other) <= _AROUND for other in moments)
        if near:
            lines.append(f"    {action:28}{'<-- here' if moment in moments else ''}".rstrip())
        elif lines and lines[-1] != "    ...":
            lines.append("    ...")
    return "\n".join(lines)


_AROUND = 4
