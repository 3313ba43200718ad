"""The updates of a bucket on the lanes, as `optim.update` orders them.

```text
  on the device      compute
  streamed           h2d, compute and d2h, behind the gradient; compute waits for the last copy of all streamed updates,
                     and so does the program, now or before it uses the bucket again
  by the host        the program or the thread of the updates, behind the gradient and the last gather; parameters on
                     the device take a copy on d2h before it, for all buckets of the program before its first update,
                     and a copy on h2d behind it
```
"""

from collections.abc import Sequence

from elixir_compile.analysis.lane_buckets import BucketLanes, Queued
from elixir_compile.analysis.lane_works import BEGIN, Actor, Cell, Memory, Moment, Works
from elixir_compile.ir import Tier, Update


def update(works: Works, buckets: Sequence[BucketLanes], arrived: Moment = BEGIN) -> None:
    """Update `buckets` that no earlier call has updated, or queue their updates, in the order of `optimizer.step()`.

    `arrived` is when their gradients are in memory.
    """
    left = [bucket for bucket in buckets if not bucket.is_updated]
    for bucket in left:
        bucket.is_updated = True
        bucket.await_update()
        works.wait(works.program, bucket.landing)
    left = [bucket for bucket in left if bucket.is_trained]
    streamed = [bucket for bucket in left if bucket.placement.streamed]
    on_device = [bucket for bucket in left if bucket.placement.update is Tier.DEVICE and bucket not in streamed]
    for bucket in on_device:
        with works.at(bucket.place):
            works.issue(works.compute, (bucket.updated_by,), (bucket.home, bucket.state))
    on_host = [bucket for bucket in left if bucket.placement.update is not Tier.DEVICE]
    for bucket in on_host:
        if bucket.is_queued:
            _by_host(works, [bucket], arrived)
    _by_host(works, [bucket for bucket in on_host if not bucket.is_queued], arrived)
    if streamed:
        _stream(works, streamed, arrived)


def _by_host(works: Works, buckets: Sequence[BucketLanes], arrived: Moment) -> None:
    """Update `buckets` on the host, one after the other; all copies of them to the host start first."""
    copied = {bucket: _copy_out(works, bucket) for bucket in buckets if not bucket.is_on_host}
    for bucket in buckets:
        with works.at(bucket.place):
            if bucket.is_on_host:
                _in_place(works, bucket, arrived)
            else:
                _by_copies(works, bucket, copied[bucket])


def _stream(works: Works, buckets: Sequence[BucketLanes], arrived: Moment) -> None:
    """Pass the state of `buckets` through the device, and parameters and gradients too if their home is the host."""
    rooms = [Cell(Memory.ROOM, bucket.name) for bucket in buckets]
    with works.at(buckets[0].place):
        allocated = works.issue(works.compute, writes=rooms)
    wait_for_gradients(works, arrived)
    for bucket, room in zip(buckets, rooms, strict=True):
        with works.at(bucket.place):
            _pass(works, bucket, room, allocated)
    landed = works.d2h.over
    works.wait(works.compute, landed)
    with works.at(buckets[-1].place):
        works.issue(works.compute, frees=rooms)
    for bucket in buckets:
        if bucket.update_mode is Update.AFTER_BACKWARD:
            works.wait(works.program, landed)
        else:
            bucket.landing = landed
            bucket.queued = Queued(done=landed, landed=BEGIN, by_thread=False) if bucket.is_on_host else None


def wait_for_gradients(works: Works, arrived: Moment) -> None:
    """Let the copies of streamed updates be behind the arrival of their gradients."""
    works.wait(works.h2d, arrived)


def _pass(works: Works, bucket: BucketLanes, room: Cell, allocated: Moment) -> None:
    """Copy in, update and copy out; a real update does so in pieces, which share no memory but the rooms."""
    here, there = (bucket.home, bucket.state) if bucket.is_on_host else (bucket.state,), (room,)
    gradient = (bucket.updated_by,)
    works.wait(works.h2d, allocated)
    copied = works.issue(works.h2d, (*here, *gradient) if bucket.is_on_host else here, there)
    works.wait(works.compute, copied)
    if bucket.is_on_host:
        works.issue(works.compute, there, there)
    else:
        works.issue(works.compute, (*gradient, *there), (bucket.home, *there))
    works.behind_compute(works.d2h)
    works.issue(works.d2h, there, here)


def _begin_thread(works: Works, bucket: BucketLanes, arrived: Moment) -> Actor:
    """Return the thread that updates `bucket`, from now on behind what the program has done and behind `arrived`."""
    thread = works.updates if bucket.is_queued else works.program
    works.wait(thread, works.program.over | arrived)
    return thread


def _in_place(works: Works, bucket: BucketLanes, arrived: Moment) -> None:
    thread = _begin_thread(works, bucket, arrived | bucket.home_read)
    done = works.issue(thread, (bucket.updated_by,), (bucket.home, bucket.state))
    if bucket.is_queued:
        bucket.queued = Queued(done=done, landed=BEGIN, by_thread=True)


def _copy_out(works: Works, bucket: BucketLanes) -> Moment:
    """Copy the parameters and their gradient to the host; return when they are there."""
    with works.at(bucket.place):
        works.behind_compute(works.d2h)
        return works.issue(works.d2h, (bucket.home, bucket.updated_by), (bucket.staged,))


def _by_copies(works: Works, bucket: BucketLanes, arrived: Moment) -> None:
    """Update on the host, after `arrived`, what was copied there, and copy the parameters back."""
    staged = (bucket.staged,)
    thread, before = _begin_thread(works, bucket, arrived), works.h2d.over
    done = works.issue(thread, staged, (bucket.staged, bucket.state))
    if not bucket.is_queued:
        works.wait(works.compute, works.issue(works.h2d, staged, (bucket.home,)))
    else:
        # Issued by the thread of the updates, between any two works that the program issues on the lane.
        landed = works.apart(works.h2d, done | before, staged, (bucket.home,))
        bucket.queued = Queued(done=done, landed=landed, by_thread=True)
