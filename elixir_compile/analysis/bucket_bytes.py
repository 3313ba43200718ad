"""The bytes that a bucket holds from event to event: one table, read by the timeline of a plan and by the search.

```text
  event                 bytes that appear                           bytes that leave                  memory
  the step begins       shard of parameters, sums of gradients      none in this step                 their home
                        shard of the optimizer state                none in this step                 its home
  gather                the flat buffer                             at the release                    device
                        the flat shard, if it comes from the host   at the wait for the gather        device
  wait for the gather   parameters copied out of the flat buffer    the copy, after one op            device
  reduce                the reduced gradient                        at its offload, if there is one   device
                        flat buffer, if packed into shards          at the wait for the reduce        device
                        none                                        unreduced gradients, if packed    device
```

The flat buffer of a gather, from its gather to its release, and the unreduced gradients, which are storages of the
graph, are added by the readers. If gradients accumulate, their sums are there when the step begins, and the gradients
of the step leave at the end of the backward, when they are added to the sums. A streamed update is in
`cost.streamed_bytes`. The two buffers of a gather, and those of a reduce, are there between two ops. They count at one
of them: those of a gather at the op after the wait, those of a reduce at the op before it.

Host memory is the same during the whole step, so `bucket_host_bytes` has a bucket's bytes without events.
`tests/pure/memory_walk.py` counts all this a second time, without this table.
"""

from collections.abc import Iterator
from typing import NamedTuple

from elixir_compile.analysis.staging import sum_host_bytes
from elixir_compile.ir import Bucket, Kind, Placement, Tier


class Held(NamedTuple):
    """Bytes on the device from op `first` to op `last`, both included; none if `last` is before `first`."""

    kind: Kind
    nbytes: int
    first: int
    last: int


class Sizes(NamedTuple):
    """Sizes of a bucket, computed once: a bucket of many ranks sums them up at each access."""

    flat_bytes: int
    shard_bytes: int
    flat_grad_bytes: int
    reduced_bytes: int
    is_sharded: bool
    is_unpacked: bool
    is_packed: bool

    @classmethod
    def of(cls, bucket: Bucket) -> "Sizes":
        return cls(
            flat_bytes=bucket.flat_nbytes,
            shard_bytes=bucket.flat_shard_nbytes,
            flat_grad_bytes=bucket.flat_grad_nbytes,
            reduced_bytes=bucket.reduced_nbytes,
            is_sharded=bucket.is_sharded,
            is_unpacked=bucket.is_unpacked,
            is_packed=bucket.is_packed,
        )


def resting(bucket: Bucket, placement: Placement, rank: int = 0) -> Iterator[tuple[Kind, int]]:
    """Yield the bytes that `rank` holds on the device during the whole step, by kind."""
    if placement.param is Tier.DEVICE:
        yield Kind.PARAM, bucket.shard_nbytes(rank)
        yield Kind.GRAD, bucket.own_sum_nbytes
    if placement.optim is Tier.DEVICE:
        yield Kind.MOMENT, bucket.shard_state_nbytes(rank)


def last_with_gradients(bucket: Bucket, num_run: int, num_ops: int) -> int:
    """Return the index of the last op at which gradients of the step stay on the device if they never leave it.

    It is the last of the `num_ops` ops of the step; if the gradients of several steps are summed, the last of the
    `num_run` ops before the update.
    """
    return num_run - 1 if bucket.sum_nbytes else num_ops - 1


def gather_buffers(sizes: Sizes, gather: int, wait: int, *, is_sent: bool) -> Iterator[Held]:
    """Yield the bytes of a sharded bucket beside the flat buffer of a gather.

    The gather is issued before op `gather`, and its wait is before op `wait`. `is_sent` if the shard comes from the
    host.
    """
    if sizes.is_unpacked:
        yield Held(Kind.GATHERED, sizes.flat_bytes, wait, wait)
    if is_sent:
        # The shard is freed at the wait, between two ops. It counts at the second too, unless the copied-out
        # parameters, which are more, count there.
        yield Held(Kind.GATHERED, sizes.shard_bytes, gather, wait - 1 if sizes.is_unpacked else wait)


def reduce_buffers(
    sizes: Sizes, complete: int, wait: int, end: int, unreduced_bytes: int, *, is_replaced: bool
) -> Iterator[Held]:
    """Yield the bytes of a reduce of a bucket that is sharded or packed.

    `complete` is the last op before the reduce, -1 if there is none, `wait` the last op before the wait for the
    gradient, and `end` the last op with the reduced gradient. `unreduced_bytes` are the bytes of the bucket's
    gradients. `is_replaced` if a gathered copy is released just before the reduce, which makes space for its buffers.
    """
    yield Held(Kind.GRAD, sizes.reduced_bytes, complete + 1, end)
    if sizes.is_sharded and sizes.is_packed:
        yield Held(Kind.GRAD, sizes.flat_grad_bytes, complete + 1, wait)
    if complete < 0:
        return
    new_bytes = at_once_bytes = sizes.reduced_bytes if wait <= complete else 0
    if sizes.is_packed:
        # The gradients are freed before the shard is allocated, which may be larger in a wider dtype.
        more_bytes = max(0, at_once_bytes - unreduced_bytes) if sizes.is_sharded else 0
        new_bytes = sizes.flat_grad_bytes + more_bytes
    gone_bytes = sizes.flat_bytes if is_replaced else 0
    yield Held(Kind.GRAD, max(0, new_bytes - gone_bytes), complete, complete)


def bucket_host_bytes(bucket: Bucket, placement: Placement, rank: int = 0) -> int:
    """Return the bytes of `bucket` on the host for `rank`: parameters, gradients and state, or their staging."""
    nbytes = bucket.shard_nbytes(rank)
    both_bytes = nbytes + (bucket.shard_grad_nbytes(rank) if bucket.trainable else 0)
    total = both_bytes if placement.param is Tier.HOST else 0
    if placement.optim is not Tier.DEVICE:
        total += bucket.shard_state_nbytes(rank) if placement.optim is Tier.HOST else 0
        # Staging for gradients from the device and updated parameters back to it.
        total += both_bytes if placement.param is Tier.DEVICE and bucket.trainable else 0
    return total + sum_host_bytes(bucket, placement.param, placement.optim)
