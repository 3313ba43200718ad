"""Count the bytes that a bucket holds, by state and op: the table of bytes that timelines, search and reports read.

```text
  function        bytes that appear                                    bytes that leave                    memory
  resting         shard of parameters, sums of gradients               none in this step                   their home
                  shard of the optimizer state                         none in this step                   its home
  gathered_copy   at the gather: the flat buffer                       at the release                      device
                  the flat shard, if it comes from the host            at the wait for the gather          device
                  at the wait: parameters copied out of the buffer     the copy, after one op              device
  step_gradients  when an op writes it: an unreduced gradient          at the reduce, if packed; else at   device
                                                                       the wait, if there is one; else at
                                                                       the end of the backward, if there
                                                                       are sums to which it is added then
                  at the reduce: the reduced gradient, if sharded or   at the wait for its offload, if     device
                  packed                                               there is one
                  the flat buffer, if packed into shards               at the wait for the reduce          device
                  the means, if several ranks have the whole bucket    at once, in place of the gradients  device
  streamed        in the update: optimizer state of the largest        at the end of the update            device
                  streamed bucket; its parameters and gradients,
                  if their home is the host
  bucket_host_bytes   all bytes on the host, the same in the whole step                                    host
```

Several ranks shard and pack buckets. The two buffers of a gather are there between two ops, and count at the op after
the wait. A reduce with buffers is a moment of its own between two ops, at which nothing counts that the op before it is
the last to read: so the indices of ops here are those of ops and reduces in one order, in which a reduce comes right
behind `complete`.

Readers that need the bytes of one state alone take them from the rows with `bytes_at`. `tests/pure/memory_walk.py`
counts all this a second time, without this table.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
    is_averaged: bool = False
    """Whether several ranks average the gradients in a new buffer that is not packed."""

    @property
    def has_moment(self) -> bool:
        """Whether a reduce of the bucket is a moment of its own."""
        return self.is_sharded or self.is_packed or self.is_averaged

    @classmethod
    def of(cls, bucket: Bucket, num_copies: int = 1) -> "Sizes":
        """Return the sizes of `bucket`, of whose shards there are `num_copies`."""
        is_whole = not (bucket.is_sharded or bucket.is_packed)
        return cls(
            flat_bytes=bucket.flat_nbytes,
            shard_bytes=bucket.flat_shard_nbytes,
            flat_grad_bytes=bucket.flat_grad_nbytes,
            reduced_bytes=bucket.reduced_nbytes,
            is_sharded=bucket.is_sharded,
            is_unpacked=bucket.is_unpacked,
            is_packed=bucket.is_packed,
            is_averaged=bucket.trainable and is_whole and len(bucket.shard_numels) * num_copies > 1,
        )


def bytes_at(op: int, rows: Iterable[Held]) -> int:
    """Return the bytes of `rows` that are on the device at `op`."""
    return sum(held.nbytes for held in rows if held.first <= op <= held.last)


def resting(bucket: Bucket, placement: Placement) -> Iterator[tuple[Kind, int]]:
    """Yield the bytes that this rank holds on the device during the whole step, by kind."""
    if placement.param is Tier.DEVICE:
        yield Kind.PARAM, bucket.home_nbytes
        yield Kind.GRAD, bucket.own_sum_nbytes
    if placement.optim is Tier.DEVICE:
        yield Kind.MOMENT, bucket.shard_state_nbytes()


def last_with_gradients(bucket: Bucket, num_run: int, num_ops: int) -> int:
    """Return the index of the last op at which gradients of the step stay on the device if they never leave it.

    It is the last of the `num_ops` ops of the step; if the gradients of several steps are summed, the last of the
    `num_run` ops before the update.
    """
    return num_run - 1 if bucket.sum_nbytes else num_ops - 1


def gathered_copy(sizes: Sizes, gather: int, wait: int, last: int, *, is_sent: bool) -> Iterator[Held]:
    """Yield the bytes of a copy of a bucket from its gather to its release.

    The gather is issued before op `gather`, its wait is before op `wait`, and the release is after op `last`. `is_sent`
    if the parameters come from the host.
    """
    yield Held(Kind.GATHERED, sizes.flat_bytes, gather, last)
    if sizes.is_sharded:
        yield from gather_buffers(sizes, gather, wait, is_sent=is_sent)


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


Births = Iterable[tuple[int, int]]
"""The unreduced gradients of a bucket as pairs: the op that allocates it, and its bytes."""


def step_gradients(
    sizes: Sizes,
    births: Births,
    complete: int,
    wait: int,
    end: int,
    stays: int | None = None,
    *,
    is_away: bool,
) -> Iterator[Held]:
    """Yield the bytes of the gradients of a bucket in one step, unreduced and reduced.

    `complete` is the last op before the reduce: -1 if there is none, `end` if the gradients are not reduced. A reduce
    that is a moment of its own is at `complete + 1`. `wait` is the last op before the wait for the reduce or the
    offload, `end` if there is no wait; `end` is the last op of the step. `stays` is the last op with gradients that
    never leave, see `last_with_gradients`; None for `end`. `is_away` if the home of the gradients is not the device.
    """
    births, stays = tuple(births), end if stays is None else stays
    last = last_unreduced(complete, wait, stays, is_packed=sizes.is_packed)
    for birth, nbytes in births:
        yield Held(Kind.GRAD, nbytes, birth, last)
    if complete < end and sizes.has_moment:
        unreduced_bytes = sum(nbytes for _, nbytes in births)
        leaves = wait if is_away else stays
        yield from reduce_buffers(sizes, complete + 1, wait, leaves, unreduced_bytes)


def last_unreduced(complete: int, wait: int, stays: int, *, is_packed: bool) -> int:
    """Return the last op with the unreduced gradients of a bucket on the device; see `step_gradients` for the ops."""
    return min(complete + 1 if is_packed else wait, stays)


def reduce_buffers(sizes: Sizes, reduce: int, wait: int, end: int, unreduced_bytes: int) -> Iterator[Held]:
    """Yield the bytes of the reduce of a bucket beside its gradients, which have `unreduced_bytes`.

    `reduce` is the moment of the reduce, `wait` the last op before the wait for the gradient, and `end` the last op
    with the reduced gradient.
    """
    if sizes.is_averaged:
        yield Held(Kind.GRAD, unreduced_bytes, reduce, reduce)
    elif sizes.is_packed:
        if sizes.is_sharded:
            # The gradients are freed before the shard is allocated, which may be larger in a wider dtype.
            yield Held(Kind.GRAD, max(0, sizes.reduced_bytes - unreduced_bytes), reduce, reduce)
            yield Held(Kind.GRAD, sizes.flat_grad_bytes, reduce, wait)
        else:
            yield Held(Kind.GRAD, sizes.flat_grad_bytes, reduce, reduce)
        yield Held(Kind.GRAD, sizes.reduced_bytes, reduce + 1, end)
    else:
        yield Held(Kind.GRAD, sizes.reduced_bytes, reduce, end)


def kept_copy_bytes(bucket: Bucket, placement: Placement) -> int:
    """Return the bytes of the gathered copy of `bucket` between the forward and the backward; 0 if it is released."""
    if not (placement.resident and (bucket.is_sharded or placement.param is not Tier.DEVICE)):
        return 0
    rows = gathered_copy(Sizes.of(bucket), gather=0, wait=0, last=2, is_sent=placement.param is not Tier.DEVICE)
    return bytes_at(1, rows)


def kept_grad_bytes(bucket: Bucket, placement: Placement) -> int:
    """Return the bytes of gradients that a backward leaves on the device of rank 0 if each parameter has a gradient.

    They are there until the update. With sums of gradients there are none: the end of the backward adds the gradients
    to the sums, which are in `resting`.
    """
    if bucket.sum_nbytes:
        return 0
    end, is_away = 3, placement.param is not Tier.DEVICE
    wait = 1 if is_away or bucket.is_sharded else end
    return bytes_at(2, step_gradients(Sizes.of(bucket), [(0, bucket.nbytes)], 0, wait, end, is_away=is_away))


def bucket_host_bytes(bucket: Bucket, placement: Placement) -> int:
    """Return the bytes of `bucket` on the host of this rank: parameters, gradients and state, or their staging."""
    both_bytes = bucket.home_nbytes + (bucket.shard_grad_nbytes() if bucket.trainable else 0)
    total = both_bytes if placement.param is Tier.HOST else 0
    if placement.optim is not Tier.DEVICE:
        total += bucket.shard_state_nbytes() if placement.optim is Tier.HOST else 0
        # Staging for gradients from the device and updated parameters back to it.
        total += both_bytes if placement.param is Tier.DEVICE and bucket.trainable else 0
    return total + sum_host_bytes(bucket, placement.param, placement.optim)


def sum_host_bytes(bucket: Bucket, param: Tier, optim: Tier) -> int:
    """Return the host bytes of sums of the gradients of `bucket`, beside the buffer of its gradients.

    Parameters on the host: the sums, and a second buffer for gradients that arrive while earlier ones are added up.
    Parameters on the device with their state on the host or disk: staging of the sums on the way to the update.
    If the sums have the dtype of the gradients, or ranks reduce in fp32, the first buffer holds the sums, and only the
    second buffer is added.
    """
    if optim is Tier.DEVICE:
        return 0
    if bucket.reduce_dtype is not None:
        return 0 if param is Tier.DEVICE else bucket.shard_grad_nbytes()
    if bucket.sum_nbytes <= bucket.nbytes:
        return 0 if param is Tier.DEVICE else bucket.own_sum_nbytes
    return bucket.sum_nbytes + (0 if param is Tier.DEVICE else bucket.nbytes)
