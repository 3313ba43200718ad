"""The order of the accesses of a run, as the check of races knows it, beside the order that the rules of a plan claim.

```text
  run     Cell.add(h2d, "writes", ..., "gather b1")   clock {h2d: 7, compute: 12}
  rules   Work(h2d, "gather b1")                      behind works 0, 1, 4
```

Both are grouped by action, actor and step: the accesses of a group have the same place in the schedule. A group is
before another if each of its accesses is before each of the other's.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import pytest

from elixir_compile.ir import Action, BucketRef, GradientRef, Plan, StepGraph, Verb
from elixir_compile.optim.update import BucketUpdate
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.gathers import Gathers
from elixir_compile.runtime.gradients import GradientAccumulator
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.step import as_run
from elixir_compile.step.divide import laps_of
from elixir_compile.step.lane_order import Order, Ordered, region_touches, works_of
from elixir_compile.step.works import COMPUTE, D2H, PROGRAM, BucketWorks, Do, Memory, Walk
from elixir_compile.step.works import UPDATES as THREAD_OF_UPDATES
from tests.races.happens_before import Actor, Cell, Source

THREAD, UPDATES = "the thread 'elixir updates'", "the thread of the updates"
"""The name of the worker in the check of a run, and in the rules."""
NUM_STEPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An access of a run."""

    actor: str
    count: int
    verb: str
    span: tuple[int, int]
    label: str
    moment: int
    clock: dict[str, int]
    cell: Cell

    def is_before(self, other: "Entry") -> bool:
        """Return whether this access is certainly over when `other` begins."""
        return other.clock.get(self.actor, 0) >= self.count

    def conflicts_with(self, other: "Entry") -> bool:
        """Return whether both access the same bytes, and one writes them."""
        is_same = self.cell is other.cell and self.span[0] < other.span[1] and other.span[0] < self.span[1]
        return is_same and not self.verb == other.verb == "reads"


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What an action does on an actor in one of two steps; `index` counts equal actions of the step."""

    label: str
    actor: str
    step: int
    index: int


@dataclass
class Recording:
    """The accesses of a run, in the order of their issue."""

    entries: list[Entry] = field(default_factory=list)

    def groups(self, num_steps: int) -> dict[Key, list[Entry]]:
        """Return the accesses of the last two of `num_steps` equal steps, by what they belong to."""
        by_label: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            if entry.verb != "frees":  # the clock of a free is not counted by its actor
                by_label[label_in_plan(entry.label), entry.actor].append(entry)
        found: dict[Key, list[Entry]] = defaultdict(list)
        for (label, actor), own in by_label.items():
            moments = list(dict.fromkeys(entry.moment for entry in own))
            each, rest = divmod(len(moments), num_steps)
            if rest:
                continue  # not an action of every step
            place = {moment: divmod(at, each) for at, moment in enumerate(moments)}
            for entry in own:
                step, index = place[entry.moment]
                if step >= num_steps - NUM_STEPS:
                    found[Key(label, actor, step - (num_steps - NUM_STEPS), index)].append(entry)
        return dict(found)


def matched(run: dict[Key, list[Any]], rules: dict[Key, list[Any]]) -> Iterator[tuple[Key, list[Any], list[Any]]]:
    """Yield what both know: its key, the accesses of the run, and the works of the rules.

    Actions that the two count differently, as slices, are one group for each step.
    """
    counts = [Counter((key.label, key.actor) for key in keys) for keys in (run, rules)]
    both: tuple[dict[Key, list[Any]], ...] = ({}, {})
    for found, groups in zip(both, (run, rules), strict=True):
        for key, own in groups.items():
            name = key.label, key.actor
            index = key.index if counts[0][name] == counts[1][name] else 0
            found.setdefault(replace(key, index=index), []).extend(own)
    for key in sorted(both[0].keys() & both[1].keys()):
        yield key, both[0][key], both[1][key]


def label_in_plan(label: str) -> str:
    """Return the action of the schedule to which the span `label` of a ledger belongs."""
    verb, _, name = label.partition(" ")
    is_piece = name.endswith(".state") and verb in ("gather", "offload")
    return f"update {name.removesuffix('.state')}" if is_piece else label


def _named(label_of: Callable[..., str], lanes_of: Callable[[Any], Any], method: Callable[..., Any]) -> Any:
    """Return `method` with a name for the accesses outside of the spans of its ledger."""

    @functools.wraps(method)
    def named(self: Any, *args: Any) -> Any:
        with lanes_of(self).announced(label_of(self, *args)):
            return method(self, *args)

    return named


def _work_named(method: Callable[..., Any]) -> Any:
    def work(self: BucketUpdate, arrived: Any) -> Any:
        lanes: Any = self.executor.lanes
        with lanes.announced(self.label):
            run = method(self, arrived)
        label = self.label

        def named() -> Any:
            with lanes.announced(label):
                return run()

        return named

    return work


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the accesses of all checked lanes inside."""
    recording, add = Recording(), Cell.add

    def noted(self: Cell, actor: Actor, verb: str, span: tuple[int, int], source: Source) -> Any:
        found = add(self, actor, verb, span, source)
        clock = {(UPDATES if name == THREAD else name): count for name, count in actor.clock.items()}
        name = UPDATES if actor.name == THREAD else actor.name
        recording.entries.append(Entry(name, clock[name], verb, span, source.action, source.moment, clock, self))
        return found

    def lanes(self: Any) -> Any:
        return self._lanes

    named: Sequence[tuple[Any, str, Any]] = (
        (Gathers, "begin", _named(lambda self, bucket: f"gather {bucket.spec.id}", lanes, Gathers.begin)),
        (
            SavedActivations,
            "prefetch",
            _named(lambda self, _, group, *more: f"prefetch {group}", lanes, SavedActivations.prefetch),
        ),
        (
            GradientAccumulator,
            "reduce",
            _named(lambda self, bucket, *more: f"reduce {bucket.spec.id}", lanes, GradientAccumulator.reduce),
        ),
        (
            Executor,
            "wait",
            _named(lambda self, transfer: f"wait {transfer.label}", lambda self: self.lanes, Executor.wait),
        ),
        (BucketUpdate, "work", _work_named(BucketUpdate.work)),
        (Cell, "add", noted),
    )
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, method in named:
            patch.setattr(owner, name, method)
        yield recording


# The rules.


@dataclass
class Claims:
    """The works of a plan, by what they belong to."""

    works: list[Ordered]
    groups: dict[Key, list[int]]

    def is_before(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Return whether the rules say that all works of `first` are over before any of `second` begins."""
        return all(self.works[b].before >> a & 1 for a in first for b in second)


def claims_of(graph: StepGraph, plan: Plan) -> Claims:
    """Return what the rules say of the second and the third of three steps of `plan`.

    Not of the first, in which no update is queued: the program itself issues all its gathers, in their order. In a run,
    the two steps that are compared follow another, whose updates may be late: then the thread of the updates issues
    some of the gathers, at moments of its own.
    """
    works = Order()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Walk, "_stage", lambda *args: None)
        patch.setattr(Walk, "_update_on_host", _in_one_memory(Walk._update_on_host))
        patch.setattr(Order, "await_update", _await_in_one_memory)
        patch.setattr(BucketWorks, "is_departing", False)  # so no copy reads gradients of the device
        touches = region_touches(as_run(graph, plan.activations, laps_of(plan)), plan)
        works.run_steps(works_of(plan, touches), num_steps=3)
    by_label: dict[tuple[str, str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    names = _names(plan.schedules[0].actions)
    for number, work in enumerate(works.found):
        is_room = not work.reads and any(cell.memory is Memory.ROOM for cell in work.writes)
        if is_room or not (work.reads or work.writes):
            continue  # the span of a ledger has neither frees nor rooms
        label = _label(names[work.at], work)
        by_label[label, work.actor, work.step][work.at].append(number)
    groups = {
        Key(label, actor, step - 1, index): numbers
        for (label, actor, step), places in by_label.items()
        if step > 0
        for index, (_, numbers) in enumerate(sorted(places.items()))
    }
    return Claims(works.found, groups)


@dataclass
class Differences:
    """Where the rules and the run order two groups differently."""

    num_agreeing: int = 0
    """Pairs that both order."""
    claimed: list[tuple[Key, Key]] = field(default_factory=list)
    """Pairs that the rules order, but not the run."""
    missing: list[tuple[Key, Key]] = field(default_factory=list)
    """Pairs with accesses to the same memory that the run orders, but not the rules."""
    more: list[tuple[Key, Key]] = field(default_factory=list)
    """All pairs that the run orders, but not the rules."""


def differences(recording: Recording, num_steps: int, claims: Claims) -> Differences:
    """Compare the last two of `num_steps` steps of `recording` with `claims`.

    The updates of two buckets are not compared: they share the rooms of streamed updates, whose number no plan says.
    """
    found = Differences()
    groups = matched(recording.groups(num_steps), claims.groups)
    for (key, entries, works), (other, others, other_works) in permutations(groups, 2):
        if key.label.startswith("update ") and other.label.startswith("update ") and key.label != other.label:
            continue
        is_claimed = claims.is_before(works, other_works)
        is_before = all(entry.is_before(later) for entry in entries for later in others)
        found.num_agreeing += is_claimed and is_before
        if is_claimed and not is_before:
            found.claimed.append((key, other))
        if is_before and not is_claimed:
            found.more.append((key, other))
            if any(entry.conflicts_with(later) for entry in entries for later in others):
                found.missing.append((key, other))
    return found


def _names(actions: Sequence[Action]) -> list[str]:
    """Return the labels of `actions` in a ledger."""
    found: list[str] = []
    started: dict[object, str] = {}
    for action in actions:
        name = f"{action.verb} {action.target}"
        if action.verb is Verb.WAIT:
            name = f"wait {started[action.target]}"
        elif isinstance(action.target, BucketRef) and action.verb is Verb.REDUCE:
            started[GradientRef(action.target.bucket)] = name
        else:
            started[action.target] = name
        found.append(name)
    return found


def _in_one_memory(update: Callable[..., None]) -> Callable[..., None]:
    """Update parameters on the device by the host as a CPU does, whose device and host are one: without copies.

    The check of a run takes the parameters and their gradient for memory of compute.
    """

    def updated(walk: Walk, bucket: BucketWorks, arrived: tuple[int, ...]) -> None:
        if not bucket.is_staged:
            update(walk, bucket, arrived)
            return
        name, of = bucket.name, ((bucket.updated_by,), (Memory.HOME,))
        if not bucket.is_queued:
            walk._do(COMPUTE, Do.UPDATE, name, (), bucket.returned, *of)
            walk._do(PROGRAM, Do.UPDATE_ON_HOST, name, (D2H,), bucket.done, (), (Memory.STATE,))
            return
        walk._do(COMPUTE, Do.LATE_RETURN, name, (PROGRAM, D2H, THREAD_OF_UPDATES), bucket.returned, *of)
        walk._do(THREAD_OF_UPDATES, Do.UPDATE_ON_HOST, name, (D2H,), bucket.done, (), (Memory.STATE,))

    return updated


def _await_in_one_memory(order: Order, done: int, returned: int) -> None:
    """Wait for an update as on a CPU: its results are work of compute, so further copies to the device need not be
    behind them."""
    order._over[PROGRAM] |= order._over[done]
    order._over[COMPUTE] |= order._over[returned]
    order._over[done] = order._over[returned] = 0


def _label(name: str, work: Ordered) -> str:
    for cell in (*work.reads, *work.writes):
        if cell.memory is Memory.LEAVING_SLICE and work.actor == "d2h":
            return f"offload {cell.name}"
        if cell.memory is Memory.ARRIVING_SLICE and work.actor == "h2d":
            return f"prefetch {cell.name}"
    return name
