"""A group of offloaded activations on the lanes, as `runtime.saved` and `runtime.slices` order its copies.

```text
  whole          run fwd.1 | offload h -> wait h frees it | prefetch h -> wait h | run bwd.0 reads it, and frees it
  in slices      run @0 | slice 0 leaves | run @1, behind that copy, into the same memory | slice 1 leaves
                 prefetch h: slice 0 arrives | run @0, beside it slice 1 arrives | run @1
```
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto

from elixir_compile.analysis.lane_works import BEGIN, Cell, Memory, Moment, Works
from elixir_compile.analysis.touches import Touch
from elixir_compile.ir import GroupId, GroupRef, Phase, Plan, RegionId, Saving


class _Pending(Enum):
    NOTHING = auto()
    OFFLOAD = auto()
    PREFETCH = auto()


class GroupLanes:
    """The works of one group, in the order in which the program issues them.

    It has more than 15 attributes: the touches of the regions, the memory of the group, and the moments for which its
    later works wait.
    """

    def __init__(self, works: Works, name: GroupId) -> None:
        self._works = works
        self._name = str(name)
        self.leaves_whole = self.leaves_in_slices = False
        """Whether regions of the forward touch whole storages of the group, and whether they make slices that leave."""
        self.returns_whole = False
        """Whether a region of the backward does."""
        self.arrives_in_slices = False
        self.last_reader: RegionId | None = None
        """The last region of the backward that touches the group."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the copies of the step before; this step has memory of its own."""
        self.whole = Cell(Memory.SAVED, self._name)
        """The whole storages of the group that a region touches now."""
        self._away = Cell(Memory.AWAY, self._name)
        self._slice = Cell(Memory.LEAVING_SLICE, self._name)
        self._pending = _Pending.NOTHING
        self._left = self._slice_left = self._back = BEGIN
        """When the group is on the host, when its last slice is, and when it is on the device again."""
        self._arriving: list[tuple[Cell, Moment]] = []
        """The slices so far that come back, and when each is there."""

    # The forward.

    def send_slice(self) -> None:
        """Fill the slice that leaves, behind the copy of the slice before, and start its copy to the host."""
        works = self._works
        works.wait(works.compute, self._slice_left)
        works.issue(works.compute, writes=(self._slice,))
        works.behind_compute(works.d2h)
        self._slice_left = works.issue(works.d2h, (self._slice,), (self._away,))

    def offload(self) -> None:
        """Start copying the group to the host; slices are on their way already."""
        works = self._works
        works.behind_compute(works.d2h)
        self._left = works.issue(works.d2h, self._leaving, (self._away,))
        self._pending = _Pending.OFFLOAD

    def free_offloaded(self) -> None:
        """Free the memory that the copy to the host has read, in the order of compute."""
        self._works.issue(self._works.compute, frees=self._leaving)

    @property
    def _leaving(self) -> tuple[Cell, ...]:
        """The cells that leave the device: whole storages, and the last slice of others."""
        return (self.whole,) * self.leaves_whole + (self._slice,) * self.leaves_in_slices

    def wait(self) -> None:
        """Let compute wait for the copy under way; a copy to the host leaves its memory on the device free."""
        works, pending, self._pending = self._works, self._pending, _Pending.NOTHING
        if pending is _Pending.PREFETCH:
            works.wait(works.compute, self._back)
        elif pending is _Pending.OFFLOAD:
            works.wait(works.compute, self._left)
            self.free_offloaded()

    # The backward.

    def prefetch(self) -> None:
        """Start copying the group to the device; of storages that arrive in slices, the first slice."""
        self._pending = _Pending.PREFETCH
        if self.returns_whole:
            self.whole = self._start(Memory.BACK)
        if self.arrives_in_slices:
            self._arriving = []
            self._start_slice()
        self._back = self._works.h2d.over

    def _start(self, memory: Memory) -> Cell:
        works, cell = self._works, Cell(memory, self._name)
        works.issue(works.compute, writes=(cell,))
        works.behind_compute(works.h2d, self._left)
        works.issue(works.h2d, (self._away,), (cell,))
        return cell

    def _start_slice(self) -> None:
        cell = self._start(Memory.ARRIVING_SLICE)
        self._arriving.append((cell, self._works.h2d.over))

    def begin_lap(self, lap: int, num_laps: int) -> tuple[Cell, ...]:
        """Start copying the next slice, let compute wait for the slice of `lap`, and return it."""
        if not self._arriving:
            return ()
        if lap + 1 < num_laps:
            self._start_slice()
        cell, arrived = self._arriving[lap]
        self._works.wait(self._works.compute, arrived)
        return (cell,)


def groups_of(works: Works, plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> dict[GroupRef, GroupLanes]:
    """Return the offloaded groups of `plan`; `touches` are those of each of its regions."""
    found = {
        GroupRef(group.id): GroupLanes(works, group.id) for group in plan.activations if group.saving is Saving.OFFLOAD
    }
    for region in plan.regions if found else ():
        for touch in touches[region.id]:
            if not isinstance(touch.target, GroupRef):
                continue
            group = found[touch.target]
            group.arrives_in_slices |= touch.arrives
            if region.phase is Phase.FORWARD:
                group.leaves_whole |= touch.is_whole
                group.leaves_in_slices |= touch.leaves
            else:
                group.returns_whole |= touch.is_whole
                group.last_reader = region.id
    return found
