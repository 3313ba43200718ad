"""Count the bytes that a bucket holds, by state and op, and those of other calls of the step: the table of bytes that
timelines, search and reports read.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Bucket, Calls, Kind, Phase, Placement, StepGraph, Storage, StorageId, Tier
from elixir_compile.step.divide import tangents_of_step
from elixir_compile.step.liveness import Life


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
    def has_position(self) -> bool:
        """Whether a reduce of the bucket has a position of its own among the ops: it holds more than the op before
        it."""
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
    if complete >= end or not sizes.has_position:
        return
    reduce, unreduced_bytes = complete + 1, sum(nbytes for _, nbytes in births)
    leaves = wait if is_away else stays
    if sizes.is_averaged:
        yield Held(Kind.GRAD, unreduced_bytes, reduce, reduce)
    elif sizes.is_packed:
        if sizes.is_sharded:
            # The gradients are freed before the shard is allocated, which may be larger in a wider dtype.
            yield Held(Kind.GRAD, max(0, sizes.reduced_bytes - unreduced_bytes), reduce, reduce)
            yield Held(Kind.GRAD, sizes.flat_grad_bytes, reduce, wait)
        else:
            yield Held(Kind.GRAD, sizes.flat_grad_bytes, reduce, reduce)
        yield Held(Kind.GRAD, sizes.reduced_bytes, reduce + 1, leaves)
    else:
        yield Held(Kind.GRAD, sizes.reduced_bytes, reduce, leaves)


def last_unreduced(complete: int, wait: int, stays: int, *, is_packed: bool) -> int:
    """Return the last op with the unreduced gradients of a bucket on the device; see `step_gradients` for the ops."""
    return min(complete + 1 if is_packed else wait, stays)


def kept_copy_bytes(bucket: Bucket, placement: Placement) -> int:
    """Return the bytes of the gathered copy of `bucket` between the forward and the backward; 0 if it is released."""
    if not (placement.resident and bucket.is_gathered_from(placement.param)):
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
    """Return the bytes of `bucket` on the host of this rank: parameters, gradients and state, or their staging.

    Parameters on the disk take none: whoever reads them outside of a step reads a mapping of their file. Their
    gradients are on the host.
    """
    grad_bytes = bucket.shard_grad_nbytes() if bucket.trainable else 0
    both_bytes = bucket.home_nbytes + grad_bytes
    total = {Tier.DEVICE: 0, Tier.HOST: both_bytes, Tier.DISK: grad_bytes}[placement.param]
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


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of one call in a step of several calls: its own, and those of the other calls meanwhile.
#
#                       F1 F2 F3 F4 B1 B2 B3 B4       4 calls, 4 outstanding
#   outstanding         0  1  2  3  3  2  1  0        forwards beside the call
#   bucket b1           g--------r  g--------r        gathered in the first, released in the last
#   gradients                       +--+--+--r        summed over the calls, reduced in the last
#
# Which forwards are beside which half: see `step.plan_rows`.


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """A kind of calls: the call of a step that is first, last, both, or between; and what is beside one of its halves,
    its forward or its backward."""

    is_first: bool = True
    is_last: bool = True
    alternate: bool = False
    """Whether forwards and backward passes of the step alternate."""
    beside: int = 0
    """Outstanding forwards beside the half."""
    others_beside: int = 0
    """How many of them run the other program of a plan with lean calls."""
    num_done: int = 0
    """Backward passes that have ended before the half, after which the caller may still hold outputs and gradients."""


ONLY = CallKind()
"""The only call of a step."""
ACTIVATIONS = (Kind.SAVED, Kind.TEMP)
"""The kinds of activations."""


class Ops(NamedTuple):
    """How many ops a step has: in its forward, in forward and backward together, and with the update.

    Or how many positions, if the axis of a step has more than its ops.
    """

    num_forward: int
    num_run: int
    num: int

    @classmethod
    def of(cls, step: StepGraph) -> "Ops":
        num_forward = sum(op.phase is Phase.FORWARD for op in step.ops)
        num_run = sum(op.phase is not Phase.UPDATE for op in step.ops)
        return cls(num_forward, num_run, len(step.ops))


def copy_of_call(
    call: CallKind, ops: Ops, sizes: Sizes, gather: int, wait: int, last: int, *, is_sent: bool
) -> Iterator[Held]:
    """Yield the bytes of a copy of a bucket in `call`: its gather is before op `gather`, its wait before op `wait`, and
    its release after op `last`. `is_sent` if the parameters come from the host."""
    end = last
    if not call.is_last:
        end = max(last, ops.num_run - 1 if call.alternate or last >= ops.num_forward else ops.num_forward - 1)
    if call.is_first:
        yield from gathered_copy(sizes, gather, wait, end, is_sent=is_sent)
        return
    start = 0 if call.alternate or gather < ops.num_forward else ops.num_forward
    yield Held(Kind.GATHERED, sizes.flat_bytes, start, end)


def sum_nbytes(bucket: Bucket, births: Births, calls: Calls, *, is_away: bool) -> int:
    """Return the device bytes of the sums of the unreduced gradients `births` of `bucket` over the calls of a step.

    `is_away` if the home of the gradients is not the device. 0 if `resting` counts these sums already: in fp32 on one
    rank, where they become the sums over steps.
    """
    is_resting = bucket.sum_nbytes > 0 and not (is_away or bucket.is_sharded or calls.sums_stay)
    if is_resting and calls.sums_in_fp32:
        return 0
    own_bytes = sum(nbytes for _, nbytes in births)
    itemsize = bucket.nbytes // max(bucket.numel, 1)
    return 4 * own_bytes // itemsize if calls.sums_in_fp32 and 0 < itemsize < 4 else own_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGradients:
    """The gradients of a bucket in any call of a step, and their sums over the calls.

    The ops are those of `step_gradients`, which counts a step of a single call.
    """

    sizes: Sizes
    births: Births
    sum_bytes: int
    """Device bytes of the sums over the calls: see `sum_nbytes`."""
    complete: int
    wait: int
    stays: int
    is_away: bool

    def in_last_call(self, ops: Ops, births: Births) -> Iterator[Held]:
        """Yield the bytes of the gradients in the call that reduces them; `births` are the gradients to reduce."""
        places = (self.complete, self.wait, ops.num - 1, self.stays)
        return step_gradients(self.sizes, births, *places, is_away=self.is_away)


def gradients_of_call(call: CallKind, ops: Ops, grads: BucketGradients) -> Iterator[Held]:
    """Yield the bytes of the gradients `grads` of a bucket in `call`."""
    births, sum_bytes = tuple(grads.births), grads.sum_bytes
    if call.is_first and call.is_last:
        yield from grads.in_last_call(ops, births)
        return
    added = min(grads.complete, ops.num_run - 1)
    is_kept = call.is_first and sum_bytes == sum(nbytes for _, nbytes in births)
    for birth, nbytes in births:  # the first gradients become the sums, later ones are added to them
        yield Held(Kind.GRAD, nbytes, birth, ops.num_run - 1 if is_kept else added)
    start = 0 if call.alternate else ops.num_forward
    if call.is_first and not is_kept:
        yield Held(Kind.GRAD, sum_bytes, added, ops.num_run - 1)
    if not call.is_first and not call.is_last:
        yield Held(Kind.GRAD, sum_bytes, start, ops.num_run - 1)
    if call.is_last:
        yield from grads.in_last_call(ops, [(start, sum_bytes)] if births else [])


def crosses(life: Life, num_forward: int) -> bool:
    """Return whether a storage with this `life` is there between the forward and the backward."""
    return life.first < num_forward <= life.last


def call_at_most(calls: Calls) -> CallKind:
    """Return a kind of calls that holds at least as much as any call of a step: no bucket is released and no sum
    reduced in it, beside as many outstanding forwards as there ever are. `ONLY` if the step has one call."""
    if calls.num == 1:
        return ONLY
    return CallKind(
        is_first=False,
        is_last=False,
        alternate=calls.alternate,
        beside=calls.outstanding - 1,
        num_done=calls.num - 1,
    )


def copy_at_most(
    call: CallKind, ops: Ops, sizes: Sizes, residency: tuple[int, int, int], *, is_sent: bool
) -> Iterator[Held]:
    """Yield at least the bytes of a copy in any call, for `call` of `call_at_most`; `residency` has the ops of its
    gather, its wait and its release."""
    gather, wait, last = residency
    yield from copy_of_call(call, ops, sizes, gather, wait, last, is_sent=is_sent)
    if call is not ONLY and sizes.is_sharded:
        yield from gather_buffers(sizes, gather, wait, is_sent=is_sent)


def gradients_at_most(call: CallKind, ops: Ops, grads: BucketGradients) -> Iterator[Held]:
    """Yield at least the bytes of the gradients `grads` of a bucket in any call, for `call` of `call_at_most`."""
    if call is ONLY or not grads.births:
        yield from grads.in_last_call(ops, grads.births)
        return
    added, start = min(grads.complete, ops.num_run - 1), 0 if call.alternate else ops.num_forward
    for birth, nbytes in grads.births:
        yield Held(Kind.GRAD, nbytes, birth, added)
    yield from grads.in_last_call(ops, [(start, grads.sum_bytes)])
    left = last_unreduced(grads.complete, grads.wait, grads.stays, is_packed=grads.sizes.is_packed)
    if left < ops.num_run - 1:
        yield Held(Kind.GRAD, grads.sum_bytes, left + 1, ops.num_run - 1)


def storages_of_calls(
    step: StepGraph, ops: Ops, lives: Mapping[StorageId, Sequence[Life]], call: CallKind, calls: Calls
) -> Iterator[tuple[Storage, Held]]:
    """Yield the bytes of storages of other calls that are there during `call`.

    `lives` are the lives of the storages of a call under its plan, on the same axis as `ops`. Saved activations wait
    for their backward; the caller holds the inputs of all calls, and outputs and gradients as `calls` says.
    """
    if calls.num == 1:
        return
    outputs, tangents = frozenset(step.outputs), tangents_of_step(step)
    for storage in step.storages:
        saved = any(crosses(life, ops.num_forward) for life in lives.get(storage.id, ()))
        is_output = storage.id in outputs
        if storage.kind is Kind.INPUT and storage.id not in calls.shared:
            yield storage, Held(Kind.INPUT, (calls.num - 1) * storage.nbytes, 0, ops.num - 1)
            given_bytes = min(call.num_done, calls.input_grads - 1) * storage.nbytes
            yield storage, Held(Kind.INPUT, given_bytes, 0 if call.alternate else ops.num_forward, ops.num_run - 1)
        elif storage.id in tangents and calls.output_grads > 1:
            yield storage, Held(storage.kind, (calls.output_grads - 1) * storage.nbytes, 0, ops.num_run - 1)
            yield storage, Held(storage.kind, storage.nbytes, 0, ops.num_forward - 1)
            last = max((life.last for life in lives.get(storage.id, ())), default=ops.num_forward - 1)
            yield storage, Held(storage.kind, storage.nbytes, last + 1, ops.num_run - 1)
        elif storage.kind in ACTIVATIONS and (saved or is_output):
            forward = backward = call.beside - call.others_beside
            if is_output:
                # If forwards and backward passes do not alternate, none has ended before a forward.
                done = call.num_done if call.alternate else 0
                forward, backward = (
                    int(outputs_held(call.beside, num_done, calls.num - 1, calls)) for num_done in (done, call.num_done)
                )
                backward += not saved  # the caller holds the output of the call itself until its backward has ended
            yield storage, Held(storage.kind, forward * storage.nbytes, 0, ops.num_forward - 1)
            yield storage, Held(storage.kind, backward * storage.nbytes, ops.num_forward, ops.num_run - 1)


def input_bytes(step: StepGraph, calls: Calls) -> int:
    """Return the bytes of the inputs of one call, without the inputs that all calls have together."""
    return sum(own.nbytes for own in step.storages if own.kind is Kind.INPUT and own.id not in calls.shared)


def output_bytes(step: StepGraph) -> int:
    """Return the bytes of the outputs that one call makes."""
    outputs = frozenset(step.outputs)
    return sum(own.nbytes for own in step.storages if own.kind in ACTIVATIONS and own.id in outputs)


def outputs_held(
    num_waiting: int | NDArray[np.int64], num_done: int | NDArray[np.int64], most: int, calls: Calls
) -> NDArray[np.int64] | np.int64:
    """Return how many outputs, and losses of as many bytes, the caller holds of at most `most` calls while
    `num_waiting` forwards wait and `num_done` backward passes have ended."""
    num_outputs = np.minimum(num_waiting + np.minimum(num_done, calls.more_outputs), most)
    return num_outputs + int(calls.has_loss) * num_waiting
