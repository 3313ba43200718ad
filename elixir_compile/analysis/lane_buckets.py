"""A bucket on the lanes: its gathers and its gradient.

Its rules are those of `runtime.gathers`, `runtime.gradients` and `runtime.distributed.sharded`; `lane_updates` has the
rules of updates.
"""

from dataclasses import dataclass

from elixir_compile.analysis.lane_works import BEGIN, Cell, Memory, Moment, Works
from elixir_compile.ir import Bucket, BucketRef, Placement, Tier, Update, Verb


@dataclass(slots=True, kw_only=True)
class Queued:
    """An update for which the program has not waited yet."""

    done: Moment
    """When the thread of the updates is done with it; of a streamed update, when its results are on the host."""
    landed: Moment
    """When its results are on the device; `BEGIN` if they stay on the host."""
    by_thread: bool
    """Whether it is an update of the thread of the updates, which then issues the next gather too."""


class BucketLanes:
    """The works of one bucket, in the order in which the program issues them.

    It has more than 15 attributes: facts of the plan about the bucket, its memory, and the moments for which its later
    works wait.
    """

    def __init__(self, works: Works, bucket: Bucket, placement: Placement, update: Update, closes: Verb | None) -> None:
        """`update` is when the plan updates, and `closes` the verb that closes the gradient in the backward."""
        self._works = works
        self.name = str(bucket.id)
        self.target = BucketRef(bucket.id)
        self.placement = placement
        self.place = 0
        """The index of its `update` in the schedule."""
        self.update_mode = update
        self.is_on_host = placement.param is not Tier.DEVICE
        self.is_queued = placement.update is not Tier.DEVICE and update is not Update.AFTER_BACKWARD
        """Whether the thread of the updates does its updates."""
        self.closes = closes
        self.is_sharded = bucket.is_sharded
        self.is_summed = bucket.sum_nbytes > 0
        """Whether its gradients are added to those of earlier backward passes."""
        self.is_gathered = self.is_on_host or self.is_sharded
        self.is_trained = False
        """Whether a region makes its gradient."""
        self.home = Cell(Memory.HOME, self.name)
        """The parameters in their home, or the shard of this rank."""
        self.state = Cell(Memory.STATE, self.name)
        self.staged = Cell(Memory.STAGED, self.name)
        self.is_read = False
        """Whether a region of this half of the step has read the parameters in their home."""
        self.copy: Cell | None = None
        """The copy of the last gather."""
        self.queued: Queued | None = None
        self.landing = BEGIN
        """When the last streamed update is on the host; the next update waits for it."""
        self.home_read = BEGIN
        """When the last gather has read the parameters on the host."""
        self._sent_shard: Cell | None = None
        self._late: Moment | None = None
        """When a copy is done that the thread of the updates issues; None if the program has waited for it."""
        self._gathered = BEGIN
        self._departing: Cell | None = None
        """The gradient on the device that the queued update of the step before reads."""
        self._begin_gradient()

    def _begin_gradient(self) -> None:
        self.is_made = self.is_updated = False
        """Whether a region has touched the gradient in this step, and whether the bucket was updated."""
        self.is_away = False
        """Whether the gradient of this step is on its way to the host, or there."""
        self.gradient = Cell(Memory.GRADIENT, self.name)
        """The gradient of this step on the device, before ranks reduce it."""
        self._own = Cell(Memory.REDUCED, self.name) if self.is_sharded else self.gradient
        """The gradient of this step on the device that this rank offloads or updates with."""
        self._in_home = Cell(Memory.ARRIVED, self.name) if self.is_on_host else self._own
        self.updated_by = Cell(Memory.SUM, self.name) if self.is_summed else self._in_home
        """The gradient that the update reads, in the memory of the parameters."""
        self._rows = Cell(Memory.ROWS, self.name)
        self._reduced = self._sent = BEGIN

    def begin_step(self) -> None:
        """Free the gradient of the step before if its queued update has read it until now; begin another."""
        departing, self._departing = self._departing, None
        if departing is not None:
            self._works.issue(self._works.compute, frees=(departing,))
        self._begin_gradient()

    # Parameters.

    def await_update(self) -> None:
        """Let the program wait until no update of the bucket is queued, and compute for its results on the device."""
        works, queued, self.queued = self._works, self.queued, None
        if queued is not None:
            works.wait(works.program, queued.done)
            works.wait(works.compute, queued.landed)
            works.wait(works.h2d, queued.landed)  # works of the lane that the program issues from now on are behind it

    def read_home(self) -> None:
        """Let the first region that reads the bucket in its home, in each half of a step, wait for its queued
        update."""
        if not self.is_read:
            self.is_read = True
            self.await_update()

    def gather(self) -> None:
        """Start a gather; behind a queued update, the thread of the updates issues the copy of a whole bucket."""
        if not self.is_gathered:
            return
        self.copy = Cell(Memory.COPY, self.name)
        if self.is_sharded:
            self.await_update()
            self._gather_shards(self.copy)
            return
        works = self._works
        allocated = works.issue(works.compute, writes=(self.copy,))
        if self.queued is None or not self.queued.by_thread:
            self.await_update()
            works.wait(works.h2d, allocated)
            self._gathered = works.issue(works.h2d, (self.home,), (self.copy,))
        else:
            # Issued at any time from now until the wait, by the thread of the updates or by the program.
            after = self.queued.done | self.queued.landed | allocated | works.h2d.over
            self._late = self._gathered = works.apart(works.h2d, after, (self.home,), (self.copy,))
        self.home_read = self._gathered

    def _gather_shards(self, copy: Cell) -> None:
        works, own = self._works, self.home
        if self.is_on_host:
            own = self._sent_shard = Cell(Memory.SENT, self.name)
            works.issue(works.compute, writes=(own, copy))
            works.behind_compute(works.h2d)
            self.home_read = works.issue(works.h2d, (self.home,), (own,))
        else:
            works.issue(works.compute, writes=(copy,))
        works.behind_compute(works.h2d)
        works.wait(works.collectives, works.h2d.over)
        self._gathered = works.issue(works.collectives, (own,), (copy,))

    def wait(self) -> None:
        """Let compute wait for the last gather."""
        works = self._works
        if self._late is not None:
            self.await_update()
            works.wait(works.h2d, self._late)
            self._late = None
        works.wait(works.compute, self._gathered)
        if self.is_sharded and self.copy is not None:
            # The full parameters are copied out of the rows of the ranks.
            sent, self._sent_shard = self._sent_shard, None
            works.issue(works.compute, (self.copy,), frees=() if sent is None else (sent,))

    def release(self) -> None:
        """Free the copy of the last gather, in the order of compute."""
        if self.copy is not None:
            self._works.issue(self._works.compute, frees=(self.copy,))

    # The gradient.

    def reduce(self) -> None:
        """Add up the gradients of the bucket; several ranks start a reduce-scatter of a sharded bucket."""
        works = self._works
        if not self.is_sharded:
            works.issue(works.compute, (self.gradient,), (self.gradient,))
            return
        works.issue(works.compute, (self.gradient,), (self._rows, self._own), (self.gradient,))
        works.wait(works.collectives, works.compute.over)
        self._reduced = works.issue(works.collectives, (self._rows,), (self._own,))

    def offload(self) -> None:
        """Start copying the gradient to the host."""
        works = self._works
        works.behind_compute(works.d2h, self._reduced)
        self._sent = works.issue(works.d2h, (self._own,), (self._in_home,))
        self.is_away = True

    def free_offloaded(self) -> None:
        """Free the memory that the copy of the gradient to the host has read, in the order of compute."""
        self._works.issue(self._works.compute, frees=(self._own, self._rows) if self.is_sharded else (self._own,))

    def wait_for_gradient(self) -> None:
        """Let compute wait for the copy of the gradient to the host, or for the reduce-scatter, and free the memory
        that it read."""
        works = self._works
        if self.is_away:
            works.wait(works.compute, self._sent)
            self.free_offloaded()
        elif self.is_sharded:
            works.wait(works.compute, self._reduced)
            works.issue(works.compute, frees=(self._rows,))

    def add_to_sum(self) -> None:
        """Add the gradient to the sum of earlier backward passes, where it is: on the host or on the device."""
        works, total = self._works, self.updated_by
        if self.is_on_host:
            works.issue(works.program, (self._in_home, total), (total,))
        else:
            works.issue(works.compute, (self._in_home, total), (total,), (self._in_home,))

    def drop_gradient(self) -> None:
        """Free the gradient on the device behind the updates, or in the next step if a queued update reads it."""
        if self.is_on_host or not self.is_trained:
            return
        if self.is_departing:
            self._departing = self.updated_by
        else:
            self._works.issue(self._works.compute, frees=(self.updated_by,))

    @property
    def is_departing(self) -> bool:
        """Whether a queued update reads the gradient on the device, by a copy to the host."""
        return self.is_queued and self.is_updated and self.is_trained and not self.is_on_host
