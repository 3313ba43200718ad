"""The bytes of one call in a step of several calls: its own, and those of the other calls meanwhile.

```text
                    F1 F2 F3 F4 B1 B2 B3 B4       4 calls, 4 outstanding
  outstanding       0  1  2  3  3  2  1  0        forwards beside the call
  bucket b1         g--------r  g--------r        gathered in the first, released in the last
  gradients                     +--+--+--r        summed over the calls, reduced in the last
```

All calls run the same ops, so a step has as many timelines of these ops as it has kinds of calls: the first, the last,
and those between. The bytes at an op are the most of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Bucket, Calls, Kind, Phase, StepGraph, Storage, StorageId
from elixir_compile.step.bucket_bytes import (
    Births,
    Held,
    Sizes,
    gather_buffers,
    gathered_copy,
    last_unreduced,
    step_gradients,
)
from elixir_compile.step.liveness import Life


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """A kind of calls: the call of a step that is first, last, both, or between."""

    is_first: bool = True
    is_last: bool = True
    alternate: bool = False
    """Whether forwards and backward passes of the step alternate."""
    beside_forward: int = 0
    """Outstanding forwards beside the forward of the call."""
    beside_backward: int = 0
    """Outstanding forwards beside the backward of the call."""
    input_grads: int = 0
    """Gradients of inputs of earlier calls that the caller holds."""
    others_beside_forward: int = 0
    """How many of `beside_forward` run the other program of a plan with lean calls: `others_bytes` are theirs."""
    others_beside_backward: int = 0
    """The same of `beside_backward`."""


ONLY = CallKind()
"""The only call of a step."""
_SAVED = (Kind.SAVED, Kind.TEMP)
"""The kinds of activations."""


def call_kinds(calls: Calls) -> tuple[CallKind, ...]:
    """Return the kinds of calls in a step: one for a step of a single call, else up to four.

    Of the calls between the first and the last, the earliest has the most outstanding forwards beside it, and the
    latest the most gradients of inputs.
    """
    if calls.num == 1:
        return (ONLY,)
    most, grads, alternate = calls.outstanding - 1, calls.input_grads - 1, calls.alternate
    first = CallKind(is_last=False, alternate=alternate, beside_backward=most)
    last = CallKind(is_first=False, alternate=alternate, beside_forward=most, input_grads=grads)

    def between(beside: int, input_grads: int) -> CallKind:
        return CallKind(
            is_first=False,
            is_last=False,
            alternate=alternate,
            beside_forward=beside,
            beside_backward=beside,
            input_grads=min(input_grads, grads),
        )

    if calls.num == 2:
        return (first, last)
    if alternate:
        return (first, between(most, calls.num - 2), last)
    return (first, *dict.fromkeys((between(most - 1, 1), between(1, calls.num - 2))), last)


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
    most = calls.outstanding - 1
    return CallKind(
        is_first=False,
        is_last=False,
        alternate=calls.alternate,
        beside_forward=most,
        beside_backward=most,
        input_grads=calls.input_grads - 1,
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
    outputs, tangents = frozenset(step.outputs), tangents_of(step)
    for storage in step.storages:
        saved = any(crosses(life, ops.num_forward) for life in lives.get(storage.id, ()))
        is_output = storage.id in outputs
        if storage.kind is Kind.INPUT and storage.id not in calls.shared:
            yield storage, Held(Kind.INPUT, (calls.num - 1) * storage.nbytes, 0, ops.num - 1)
            given_bytes = call.input_grads * storage.nbytes
            yield storage, Held(Kind.INPUT, given_bytes, 0 if call.alternate else ops.num_forward, ops.num_run - 1)
        elif storage.id in tangents and calls.output_grads > 1:
            yield storage, Held(storage.kind, (calls.output_grads - 1) * storage.nbytes, 0, ops.num_run - 1)
            yield storage, Held(storage.kind, storage.nbytes, 0, ops.num_forward - 1)
            last = max((life.last for life in lives.get(storage.id, ())), default=ops.num_forward - 1)
            yield storage, Held(storage.kind, storage.nbytes, last + 1, ops.num_run - 1)
        elif storage.kind in _SAVED and (saved or is_output):
            forward = call.beside_forward - call.others_beside_forward
            backward = call.beside_backward - call.others_beside_backward
            if is_output:
                forward = int(outputs_beside(call.beside_forward, calls, is_backward=False))
                # The caller holds the output of the call itself until its backward has ended.
                backward = int(outputs_beside(call.beside_backward, calls, is_backward=True)) + int(not saved)
            yield storage, Held(storage.kind, forward * storage.nbytes, 0, ops.num_forward - 1)
            yield storage, Held(storage.kind, backward * storage.nbytes, ops.num_forward, ops.num_run - 1)


def input_bytes(step: StepGraph, calls: Calls) -> int:
    """Return the bytes of the inputs of one call, without the inputs that all calls have together."""
    return sum(own.nbytes for own in step.storages if own.kind is Kind.INPUT and own.id not in calls.shared)


def output_bytes(step: StepGraph) -> int:
    """Return the bytes of the outputs that one call makes."""
    outputs = frozenset(step.outputs)
    return sum(own.nbytes for own in step.storages if own.kind in _SAVED and own.id in outputs)


def outputs_beside(
    num_beside: int | NDArray[np.int64], calls: Calls, *, is_backward: bool
) -> NDArray[np.int64] | np.int64:
    """Return how many outputs of other calls, and losses of as many bytes, there are beside a half of a call while
    `num_beside` other forwards wait."""
    more = calls.more_outputs if is_backward or calls.alternate else 0
    return np.minimum(num_beside + more, calls.num - 1) + int(calls.has_loss) * num_beside


def waiting_bytes(step: StepGraph, ops: Ops, lives: Mapping[StorageId, Sequence[Life]]) -> Mapping[Kind, int]:
    """Return the bytes by kind that a forward leaves for its backward, without outputs, which every call has alike.

    `lives` are on the same axis as `ops`.
    """
    num_forward, outputs = ops.num_forward, frozenset(step.outputs)
    found: dict[Kind, int] = dict.fromkeys(_SAVED, 0)
    for storage in step.storages:
        if storage.kind in _SAVED and storage.id not in outputs:
            found[storage.kind] += storage.nbytes * any(
                crosses(life, num_forward) for life in lives.get(storage.id, ())
            )
    return found


def tangents_of(step: StepGraph) -> frozenset[StorageId]:
    """Return the gradients of outputs, which the first op of the backward reads without a write before."""
    first = next((op for op in step.ops if op.phase is Phase.BACKWARD), None)
    return frozenset() if first is None else frozenset(name for name in first.writes if name in first.reads)
