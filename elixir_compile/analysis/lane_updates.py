"""The updates of a bucket on the lanes, as `optim.update` orders them.

```text
  on the device      compute
  streamed           a copy on h2d, behind the gradient of a host bucket; compute; a copy on d2h. The program waits
                     if all updates run in `step()`, else the next reader of a host bucket does
  by the host        the program or the thread of the updates, behind the gradient and the last gather; parameters on
                     the device take a copy on d2h before it, and a copy on h2d behind it
```
"""

from elixir_compile.analysis.lane_buckets import BucketLanes, Queued
from elixir_compile.analysis.lane_works import BEGIN, Actor, Cell, Memory, Moment, Works
from elixir_compile.ir import Tier


def update(works: Works, bucket: BucketLanes, arrived: Moment = BEGIN) -> None:
    """Update `bucket`, or queue its update; `arrived` is when its gradient is in memory."""
    if bucket.is_updated:
        return
    bucket.is_updated = True
    bucket.await_update()
    if not bucket.is_trained:
        return
    if bucket.placement.update is Tier.DEVICE:
        _on_device(works, bucket, arrived)
    elif bucket.is_on_host:
        _in_place(works, bucket, arrived)
    else:
        _by_copies(works, bucket)


def _on_device(works: Works, bucket: BucketLanes, arrived: Moment) -> None:
    if bucket.placement.streamed:
        _streamed(works, bucket, before_streamed(bucket, arrived))
    else:
        works.issue(works.compute, (bucket.updated_by,), (bucket.home, bucket.state))


def before_streamed(bucket: BucketLanes, arrived: Moment) -> Moment:
    """Return what the copies of a streamed update to the device are behind: the gradient of a host bucket."""
    return arrived if bucket.is_on_host else BEGIN


def _streamed(works: Works, bucket: BucketLanes, after: Moment) -> None:
    """Copy what is on the host to the device, after `after`, update it there, and copy it back."""
    room = Cell(Memory.ROOM, str(bucket.target.bucket))
    away = (bucket.home,) if bucket.is_on_host else ()
    works.wait(works.h2d, after | works.issue(works.compute, writes=(room,)))
    read = (bucket.home, bucket.updated_by) if bucket.is_on_host else ()
    works.wait(works.compute, works.issue(works.h2d, (bucket.state, *read), (room,)))
    if bucket.is_on_host:
        works.issue(works.compute, (), (room,))
    else:
        works.issue(works.compute, (bucket.updated_by,), (room, bucket.home))
    works.behind_compute(works.d2h)
    landed = works.issue(works.d2h, (room,), (bucket.state, *away))
    works.wait(works.compute, landed)
    works.issue(works.compute, frees=(room,))
    if not bucket.lands_later:
        works.wait(works.program, landed)
    elif bucket.is_on_host:
        bucket.queued = Queued(done=landed, landed=BEGIN)


def _begin_thread(works: Works, bucket: BucketLanes, arrived: Moment) -> Actor:
    """Return the thread that updates `bucket`, from now on behind what the program has done and behind `arrived`."""
    thread = works.updates if bucket.is_queued else works.program
    works.wait(thread, works.program.over | arrived)
    return thread


def _in_place(works: Works, bucket: BucketLanes, arrived: Moment) -> None:
    thread = _begin_thread(works, bucket, arrived | bucket.home_read)
    done = works.issue(thread, (bucket.updated_by,), (bucket.home, bucket.state))
    if bucket.is_queued:
        bucket.queued = Queued(done=done, landed=BEGIN)


def _by_copies(works: Works, bucket: BucketLanes) -> None:
    """Copy the parameters and their gradient to the host, update them there, and copy the parameters back."""
    staged = (bucket.staged,)
    works.behind_compute(works.d2h)
    arrived = works.issue(works.d2h, (bucket.home, bucket.updated_by), staged)
    thread, before = _begin_thread(works, bucket, arrived), works.h2d.over
    done = works.issue(thread, staged, (bucket.staged, bucket.state))
    if not bucket.is_queued:
        works.wait(works.compute, works.issue(works.h2d, staged, (bucket.home,)))
    else:
        # Issued by the thread of the updates, between any two works that the program issues on the lane.
        landed = works.apart(works.h2d, done | before, staged, (bucket.home,))
        bucket.queued = Queued(done=done, landed=landed)
