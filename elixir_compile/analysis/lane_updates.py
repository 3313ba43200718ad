"""The updates of a bucket on the lanes, as `optim.update` orders them.

```text
  on the device      compute
  streamed           compute, behind the gradient and the last gather of a host bucket; the program waits for it
  by the host        the program or the thread of the updates, behind the gradient and the last gather; parameters on
                     the device take a copy on d2h before it, and a copy on h2d behind it
```
"""

from elixir_compile.analysis.lane_buckets import BucketLanes, Queued
from elixir_compile.analysis.lane_works import BEGIN, Actor, Moment, Works
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
    is_streamed = bucket.placement.streamed
    if is_streamed:
        wait_for_home(works, bucket, arrived)
    works.issue(works.compute, (bucket.updated_by,), (bucket.home, bucket.state))
    if is_streamed:
        works.synchronize(works.compute)


def wait_for_home(works: Works, bucket: BucketLanes, arrived: Moment) -> None:
    """Let the program wait until the gradient of a host bucket has arrived, and its last gather has read its home."""
    if bucket.is_on_host:
        works.wait(works.program, arrived | bucket.home_read)


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
