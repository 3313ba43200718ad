"""Check that every access of a plan's schedule is behind the writes that it needs, on the lanes and threads of the
runtime.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from elixir_compile.base.process import collector_off
from elixir_compile.ir import (
    BucketId,
    GradientRef,
    GroupId,
    GroupRef,
    Phase,
    Plan,
    Region,
    RegionId,
    Saving,
    StepGraph,
    StorageId,
    Target,
    Update,
)
from elixir_compile.step.divide import arrived_name, leaving_name, offloaded_names
from elixir_compile.step.liveness import closing_verbs, last_forward
from elixir_compile.step.structure import illegal_action
from elixir_compile.step.works import (
    COLLECTIVES,
    COMPUTE,
    D2H,
    H2D,
    PROGRAM,
    UPDATES,
    Access,
    BucketWorks,
    Do,
    GroupWorks,
    Instant,
    Memory,
    RegionWorks,
    Walk,
    Work,
    plan_on_lanes,
)

# ----------------------------------------------------------------------------------------------------------------------
# Find the gradients and the offloaded activations that each region of a plan touches.


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """An access of a region to the gradient of a bucket, or to a group of offloaded activations."""

    target: Target
    is_written: bool
    """Whether an op of the region writes a whole storage of the target."""
    is_last: bool
    """Whether no later region writes the gradient, and no later region of the forward touches the activations."""
    is_whole: bool
    """Whether the region touches whole storages of the target, and not only slices."""
    leaves: bool = False
    """Whether the region makes storages of the group that leave the device in slices."""
    arrives: bool = False
    """Whether the region reads storages of the group that arrive on the device in slices."""


def region_touches(step: StepGraph, plan: Plan) -> Mapping[RegionId, tuple[Touch, ...]]:
    """Return the gradients and the offloaded activations touched by the ops of each region.

    A region completes a gradient if no later region writes it, and activations if no later region of the forward
    touches them.
    """
    of_param = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
    owners: dict[StorageId, Target] = {
        s.id: GradientRef(of_param[s.of]) for s in step.storages if s.of is not None and s.of in of_param
    }
    owners |= {name: GroupRef(group) for name, group in offloaded_names(plan.activations).items()}
    away = [name for group in plan.activations if group.saving is Saving.OFFLOAD for name in group.storages]
    leaving, arriving = frozenset(map(leaving_name, away)), frozenset(map(arrived_name, away))
    index = {op.id: number for number, op in enumerate(step.ops)}
    touched: dict[RegionId, dict[Target, set[StorageId]]] = {}
    written: dict[RegionId, set[Target]] = {}
    completed_by: dict[Target, RegionId] = {}
    for region in plan.regions:
        ops = step.ops[index[region.first] : index[region.last] + 1]
        found = touched[region.id] = {}
        for op in ops:
            for name in (*op.reads, *op.writes):
                if name in owners:
                    found.setdefault(owners[name], set()).add(name)
        written[region.id] = {owners[name] for op in ops for name in op.writes if name in owners}
        completed_by |= {target: region.id for target in written[region.id] if isinstance(target, GradientRef)}
        if region.phase is Phase.FORWARD:
            completed_by |= {target: region.id for target in found if isinstance(target, GroupRef)}
    return {
        region: tuple(
            Touch(
                target=target,
                is_written=target in written[region],
                is_last=completed_by.get(target) == region,
                is_whole=not names <= leaving | arriving,
                leaves=not names.isdisjoint(leaving),
                arrives=not names.isdisjoint(arriving),
            )
            for target, names in found.items()
        )
        for region, found in touched.items()
    }


# ----------------------------------------------------------------------------------------------------------------------
# Find two accesses to the same memory that the waits of a schedule leave unordered, before anything runs.
#
#   gather b1     h2d writes the copy
#   run fwd.1     compute reads it; `wait b1` must let compute wait for h2d before
#
# Of two accesses to one cell, one of which writes or frees it, one must be behind the other by the works of two
# consecutive steps (see `works`). Every access must be before the free, and every read behind a write, unless the
# memory keeps its values from step to step. The check of a run compares accesses by the same rule: see
# `tests/races/happens_before.py`.
#
#   work                       behind       before it (bits)     memory
#   0  gather b1, compute                   0000                 allocates the copy
#   1  gather b1, h2d          0            0001                 writes the copy
#   2  run fwd.1, compute      0, and 1     0011                 reads the copy; without `wait b1` it is behind 0 alone
#
# An instant is a number with a bit for each work that is over by then, so the instants of all works are the transitive
# closure of their order.


NUM_STEPS = 2
"""The steps that are checked: one without queued updates, as the first of a run, and one behind queued updates, which
shows what the first leaves under way, and memory that is used again."""
_ACTORS = {
    COMPUTE: "compute",
    H2D: "h2d",
    D2H: "d2h",
    COLLECTIVES: "the stream of the ranks",
    UPDATES: "the thread of the updates",
    PROGRAM: "the program",
}
KEPT = frozenset({Memory.HOME, Memory.STATE})
"""Memory that has its values from step to step."""
_COPIES = frozenset({Memory.COPY, Memory.SENT})
"""Memory that is there only from a gather on."""
_FROM_STEP_TO_STEP = KEPT | _COPIES | {Memory.ROOM, Memory.STAGED}
"""Memory that is not new in each step."""
_SPECIAL = frozenset({Do.WAIT, Do.SYNCHRONIZE, Do.AWAIT, Do.WAIT_LATE, Do.NEW_STEP, Do.LATE_RETURN, Do.LATE_GATHER})
"""Works that are only waits, or that are issued late."""
Bits = int
"""The works that are over: bit i is set if work i is."""


@dataclass(slots=True, eq=False)
class Cell:
    """One piece of memory from its allocation to its end; memory that is allocated again is another cell.

    Not frozen, because a frozen dataclass takes twice as long to make.
    """

    memory: str
    """See `Memory`."""
    name: str

    def __str__(self) -> str:
        return self.memory.format(name=self.name)


class Ordered(NamedTuple):
    """A work with what is before it; its number is its index in the order of issue."""

    actor: str
    at: int
    """The index in the schedule of the action to which it belongs."""
    step: int
    """0 in the first of two consecutive steps, 1 in the second."""
    before: Bits
    """The works that are over when it begins."""
    reads: Sequence[Cell]
    writes: Sequence[Cell]
    frees: Sequence[Cell]


class Fault(StrEnum):
    """Why two accesses to the same memory are illegal."""

    UNORDERED = "no wait orders the two"
    FREED = "the memory is free by then"
    UNWRITTEN = "it is read before anything is in it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two works, `first` issued before `second`, with accesses to `cell` that are not ordered as they must be."""

    cell: Cell
    first: Ordered
    second: Ordered
    fault: Fault


def check_order(plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> None:
    """Raise IllegalSchedule if the schedule of all ranks leaves two accesses to the same memory unordered.

    `touches` are the gradients and the offloaded activations that the regions touch. A plan with sums of gradients is
    checked twice, because it also runs steps that find no earlier gradient, and their updates may come earlier: behind
    `zero_grad()`, or if a remembered accumulation does not come.
    """
    conflict = _first_conflict_of(plan, touches)
    if conflict is None and any(bucket.sum_nbytes for bucket in plan.buckets):
        without_sums = tuple(replace(bucket, sum_nbytes=0) for bucket in plan.buckets)
        conflict = _first_conflict_of(replace(plan, buckets=without_sums), touches)
    if conflict is None:
        return
    clauses: list[str] = []
    for work in (conflict.first, conflict.second):
        action = plan.schedules[0].actions[work.at]
        verb = "frees" if conflict.cell in work.frees else "writes" if conflict.cell in work.writes else "reads"
        clauses.append(f"`{action.verb} {action.target}`, on {work.actor}, {verb}")
    one, other = clauses
    if conflict.second.step > conflict.first.step:
        other = f"in the next step {other}"
    sentence = f"{one} {conflict.cell}, and {other} it: {conflict.fault}."
    raise illegal_action(sentence, plan, 0, conflict.first.at, conflict.second.at)


def _first_conflict_of(plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> Conflict | None:
    with collector_off():
        order = Order()
        order.run_steps(works_of(plan, touches))
        return first_conflict(order.found)


def first_conflict(works: Sequence[Ordered]) -> Conflict | None:
    """Return the first work, in the order of issue, with an access that is not ordered with an earlier one; None if all
    are ordered."""
    last_write: dict[Cell, int] = {}
    reads: dict[Cell, list[int]] = {}
    """By cell, the reads since the last write: what is behind all of them is behind the write too."""
    freed: set[Cell] = set()
    for number, work in enumerate(works):
        before = work.before
        for cell in work.reads:
            other = last_write.get(cell)
            if other is not None and (not before >> other & 1 or cell in freed):
                return _conflict(works, cell, other, number)
            reads.setdefault(cell, []).append(number)
        for cell in (*work.writes, *work.frees):
            other = last_write.get(cell)
            if other is not None and other != number and (not before >> other & 1 or cell in freed):
                return _conflict(works, cell, other, number)
            for earlier in reads.pop(cell, ()):
                is_early = other is None and cell.memory not in KEPT
                if earlier != number and (is_early or not before >> earlier & 1):
                    return _conflict(works, cell, earlier, number)
            last_write[cell] = number
        freed.update(work.frees)
    return None


def _conflict(works: Sequence[Ordered], cell: Cell, first: int, second: int) -> Conflict:
    is_ordered = works[second].before >> first & 1
    fault = Fault.UNORDERED if not is_ordered else Fault.FREED if cell in works[first].frees else Fault.UNWRITTEN
    return Conflict(cell=cell, first=works[first], second=works[second], fault=fault)


_new = tuple.__new__
"""Makes a named tuple of a tuple in a third of the time of its own constructor."""


class Order:
    """Puts the works of consecutive steps in order."""

    def __init__(self) -> None:
        self.found: list[Ordered] = []
        self._over: defaultdict[Instant, Bits] = defaultdict(int)
        self._late: set[Instant] = set()
        """When the copies are over that the thread of the updates issues, and for which nobody has waited."""
        self._cells: defaultdict[str, dict[Access, Cell]] = defaultdict(dict)
        """By bucket or group, the cell of each memory that is there."""

    def run_steps(self, works: Sequence[Work], num_steps: int = NUM_STEPS) -> None:
        """Put `num_steps` steps in order. No update is queued when the first begins."""
        for step in range(num_steps):
            for work in works:
                self._run(work, step)

    def _run(self, work: Work, step: int) -> None:
        if work.do in _SPECIAL:
            self._do_other(work, step)
            return
        over, actor = self._over, work.actor
        before = over[actor] | over[PROGRAM]
        for instant in work.after:
            before |= over[instant]
        over[actor] = over[work.over] = self.issue(work, step, before)

    def _do_other(self, work: Work, step: int) -> None:
        over, actor, do, after = self._over, work.actor, work.do, work.after
        if do is Do.WAIT or do is Do.SYNCHRONIZE:
            over[actor] |= over[after[0]]
        elif do is Do.AWAIT:
            self.await_update(*after)
        elif do is Do.WAIT_LATE:
            copied, done, returned = after
            self.await_update(done, returned)
            if copied in self._late:
                over[H2D] |= over[copied]
                self._late.remove(copied)
            over[COMPUTE] |= over[copied]
        elif do is Do.NEW_STEP:
            for own in self._cells.values():
                for key in [key for key, cell in own.items() if cell.memory not in _FROM_STEP_TO_STEP]:
                    del own[key]
        else:
            before = over[actor]
            for instant in after:
                before |= over[instant]
            if do is Do.LATE_RETURN or over[after[0]]:
                # Issued at any time from now on, so later works of the lane are not behind it.
                over[work.over] = self.issue(work, step, before)
                if do is Do.LATE_GATHER:
                    self._late.add(work.over)
            else:
                over[actor] = over[work.over] = self.issue(work, step, before | over[PROGRAM])

    def issue(self, work: Work, step: int, before: Bits) -> Bits:
        """Issue a work that is behind `before`, and return the instant when it is over."""
        actor, _, name, _, _, at, reads, writes, frees, allocates = work
        found = self.found
        if allocates:
            self._cells_of(writes, name, are_new=True)
        read = self._cells_of(reads, name) if reads else ()
        written = self._cells_of(writes, name) if writes else ()
        freed: Sequence[Cell] = ()
        if frees:
            freed = self._cells_of(frees, name)
            if Memory.SENT in frees:
                self._cells[name].pop(Memory.SENT, None)
        found.append(_new(Ordered, (_ACTORS[actor], at, step, before, read, written, freed)))
        return before | 1 << (len(found) - 1)

    def _cells_of(self, accesses: Sequence[Access], name: str, *, are_new: bool = False) -> Sequence[Cell]:
        """Return the cells of `accesses`, new ones if they `are_new`; none for copies that were never gathered."""
        found: list[Cell] = []
        cells, mine = self._cells, self._cells[name]
        for each in accesses:
            if isinstance(each, str):
                own, memory, of, key = mine, each, name, each
            else:
                memory, of = each[:2]
                own, key = cells[of], memory if len(each) == 2 else each
            cell = None if are_new else own.get(key)
            if cell is None and (are_new or memory not in _COPIES):
                cell = own[key] = Cell(memory, of)
            if cell is not None:
                found.append(cell)
        return found

    def await_update(self, done: Instant, returned: Instant) -> None:
        """Let the program wait for an update, and compute for its results on the device."""
        over = self._over
        over[PROGRAM] |= over[done]
        over[COMPUTE] |= over[returned]
        over[H2D] |= over[returned]  # works of the lane that the program issues from now on are behind it
        over[done] = over[returned] = 0


def works_of(plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> list[Work]:
    """Return the works of the schedule of all ranks, with the memory that they touch.

    `touches` are the gradients and the offloaded activations that the regions touch.
    """
    actions = plan.schedules[0].pairs
    closing = closing_verbs(plan) if plan.update is Update.IN_BACKWARD else {}
    buckets, groups = plan_on_lanes(plan, plan.update, closing)
    regions = {region.id: _region_works(region, touches[region.id], buckets, groups) for region in plan.regions}
    walk = Walk(
        buckets,
        groups,
        regions,
        plan.update,
        last_forward=last_forward(plan.regions, actions),
        has_backward=any(region.phase is Phase.BACKWARD for region in plan.regions),
    )
    return walk.step(actions)


def _region_works(
    region: Region,
    touches: Sequence[Touch],
    buckets: Mapping[BucketId, BucketWorks],
    groups: Mapping[GroupId, GroupWorks],
) -> RegionWorks:
    own = [buckets[name] for name in region.buckets]
    gradients = [(buckets[t.target.bucket], t.is_written) for t in touches if isinstance(t.target, GradientRef)]
    for bucket, _ in gradients:
        bucket.is_trained = True
    touched = [(touch, groups[touch.target.group]) for touch in touches if isinstance(touch.target, GroupRef)]
    for touch, group in touched:
        group.arrives_in_slices |= touch.arrives
        if region.phase is Phase.FORWARD:
            group.leaves_whole |= touch.is_whole
            group.leaves_in_slices |= touch.leaves
        else:
            group.returns_whole |= touch.is_whole
            group.last_reader = region.id
    return RegionWorks(
        at_home=[bucket for bucket in own if not bucket.is_gathered],
        gathered=[bucket for bucket in own if bucket.is_gathered],
        gradients=gradients,
        wholes=[(group, touch.is_written) for touch, group in touched if touch.is_whole],
        leaving=[group for touch, group in touched if touch.leaves],
        arriving=[group for touch, group in touched if touch.arrives],
    )
