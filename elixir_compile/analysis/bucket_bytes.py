"""The bytes that a bucket holds from event to event: one table, read by the timeline of a plan and by the search.

```text
  event                 bytes that appear                           bytes that leave                  memory
  the step begins       shard of parameters, fp32 sums              none in this step                 their home
                        shard of the optimizer state                none in this step                 its home
  gather                the flat buffer                             at the release                    device
                        the flat shard, if it comes from the host   at the wait for the gather        device
  wait for the gather   parameters copied out of the flat buffer    the copy, after one op            device
  reduce                the reduced gradient                        at its offload, if there is one   device
                        flat buffer, if packed into shards          at the wait for the reduce        device
                        none                                        unreduced gradients, if packed    device
```

The flat buffer of a gather, from its gather to its release, and the unreduced gradients, which are storages of the
graph, are added by the readers. A streamed update is in `cost.streamed_bytes`. The two buffers of a gather, and those
of a reduce, are there between two ops. They count at one of them: those of a gather at the op after the wait, those of
a reduce at the op before it.

Host memory is the same during the whole step, so `bucket_host_bytes` has a bucket's bytes without events.

State on disk is read and written through a ring of buffers, shared by all buckets of an optimizer:

    buffer   the same elements of each statistic, at least one block of the narrowest:  4 MiB / 2 B * (4 + 4 + 2) B
    ring     `NUM_DISK_STAGING` buffers, each aligned to huge pages, and one huge page to align the first buffer

The narrowest statistic is guessed from the bytes of all statistics of one element: its width is the largest power of
two that divides them, at most 4 bytes. Not counted: tensors held by `state_dict()` or `load_state_dict()`.

`tests/pure/memory_walk.py` counts all this a second time, without this module.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elixir_compile.ir import Bucket, Kind, Placement, Tier
from elixir_compile.units import MIB

NUM_DISK_STAGING = 3
"""Buffers of the ring: one is read, one updated, one written."""
DISK_STAGING_BYTES = 16 * MIB
"""Bytes of a buffer, unless its blocks need more: 4 blocks for 4 threads, or 2 M elements of Adam's two fp32
moments."""
DISK_BLOCK_BYTES = 4 * MIB
"""Bytes of one read or write, and of one checksum. Larger blocks were no faster."""
HUGE_PAGE_BYTES = 2 * MIB
_WIDEST_BYTES = 4


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
        yield Kind.GRAD, bucket.sum_nbytes
    if placement.optim is Tier.DEVICE:
        yield Kind.MOMENT, bucket.shard_state_nbytes(rank)


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


def sum_host_bytes(bucket: Bucket, param: Tier, optim: Tier) -> int:
    """Return the host bytes of fp32 sums of the gradients of `bucket`, beside the buffer of its gradients.

    Parameters on the host: the sums, and a second buffer for gradients that arrive while earlier ones are added up.
    Parameters on the device with their state on the host or disk: staging of the sums on the way to the update.
    If ranks reduce in fp32, the gradients are the sums, and only the second buffer is added.
    """
    if optim is Tier.DEVICE:
        return 0
    if bucket.reduce_dtype is not None:
        return 0 if param is Tier.DEVICE else bucket.shard_grad_nbytes()
    if not bucket.sum_nbytes:
        return 0
    return bucket.sum_nbytes + (0 if param is Tier.DEVICE else bucket.nbytes)


def disk_staging_bytes(buckets: Iterable[Bucket]) -> int:
    """Return the bytes of the ring for `buckets` with their state on disk, or 0 if they have no state."""
    widths = [-(-bucket.state_nbytes // max(bucket.numel, 1)) for bucket in buckets if bucket.state_nbytes]
    if not widths:
        return 0
    least_bytes = max(DISK_BLOCK_BYTES // min(width & -width, _WIDEST_BYTES) * width for width in widths)
    buffer_bytes = -(-max(DISK_STAGING_BYTES, least_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return NUM_DISK_STAGING * buffer_bytes + HUGE_PAGE_BYTES
