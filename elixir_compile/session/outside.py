"""Count the bytes outside of the graph of a problem: parameters, state and gradients of other graphs, or of none."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from elixir_compile.graph.capture.convert import Captured
from elixir_compile.graph.ops.optimizers import ParamState, has_state, planned_states
from elixir_compile.graph.ops.registry import Slot, slot_of
from elixir_compile.graph.ops.shards import own_part
from elixir_compile.ir import Bucket, Kind, Placement
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.slab import is_slab_memory
from elixir_compile.step.bucket_bytes import bucket_host_bytes, kept_grad_bytes, resting


def state_of_hybrid_adamw(param: torch.Tensor) -> ParamState:
    """Return the state that HybridAdamW with its default arguments would keep for `param`.

    Without a master: two moments in the dtype of the parameter, 8 bytes for each fp32 element. With a master: two
    moments in fp32, and the rest of the master, 10 bytes for bfloat16 and 12 bytes for float16.
    """
    return AdamWRule().param_state(param, {"amsgrad": False})


def grad_dtype_of(slot: Slot, ranks: Ranks | None) -> torch.dtype:
    """Return the dtype of the gradient of one parameter after its reduce."""
    return slot.param.dtype if ranks is None else ranks.reduced_dtype(slot.param)


def device_bytes(executor: Executor, leaving_out: Collection[str] = ()) -> int:
    """Return the bytes of parameters and of their planned optimizer state on the device.

    Parameters named in `leaving_out` do not count.
    """
    total = 0
    for slot in executor.slots.values():
        if slot.name in leaving_out:
            continue
        bucket = executor.buckets.of(slot)
        total += slot.own_nbytes if slot.own.device == executor.device and not (bucket and bucket.is_on_host) else 0
        if bucket is not None:
            total += _share(slot, bucket, _resting_bytes(bucket, Kind.MOMENT))
    return total


def state_bytes(executor: Executor, params: Iterable[torch.Tensor]) -> int:
    """Return the bytes of optimizer state on the device, as planned: of buckets, and of those of `params`, all of the
    model, that eager code trains, because no graph reads them or no plan can move them."""
    eagerly = executor.gradients.trained_eagerly
    total = 0
    for slot in executor.slots.values():
        bucket = executor.buckets.of(slot)
        if bucket is not None:
            total += _share(slot, bucket, _resting_bytes(bucket, Kind.MOMENT))
        elif slot.key in eagerly:
            total += _state_bytes(slot.param) * slot.own.numel() // max(slot.numel, 1)
    unmanaged = (param for param in params if param.requires_grad and slot_of(param) is None)
    return total + sum(map(_state_bytes, unmanaged))


def on_device_bytes(executor: Executor) -> int:
    """Return the bytes of parameters that are on the device now."""
    there = (slot for slot in executor.slots.values() if slot.own.device == executor.device)
    return sum(slot.own_nbytes for slot in there if not ((bucket := executor.buckets.of(slot)) and bucket.is_on_host))


def training_bytes(executor: Executor) -> int:
    """Return the bytes of all parameters, and of the gradients and the optimizer state of those that are trained."""
    slots = executor.slots.values()
    trained = sum(_trained_bytes(slot, executor.ranks) for slot in slots if slot.param.requires_grad)
    return trained + sum(slot.own_nbytes for slot in slots)


def _resting_bytes(bucket: RunningBucket, kind: Kind) -> int:
    """Return the bytes of `kind` that `bucket` holds on the device of rank 0 during the whole step."""
    return sum(nbytes for held, nbytes in resting(bucket.spec, bucket.placement) if held is kind)


def _share(slot: Slot, bucket: RunningBucket, nbytes: int) -> int:
    """Return the bytes of `slot` on this rank, if `bucket` holds `nbytes` on rank 0."""
    return nbytes * slot.own_nbytes // max(bucket.spec.shard_nbytes(), 1)


class Held(NamedTuple):
    """Device bytes that graphs or models hold while another one runs."""

    resident_bytes: int
    """Parameters, optimizer state and sums of gradients; and all that belongs to parameters trained eagerly."""
    grad_bytes: int
    """Gradients, made while the activations of outstanding forwards are freed."""


def held_outside(executor: Executor, read: Collection[str]) -> Held:
    """Return the device bytes outside of the training graphs that read the parameters `read`, as planned.

    Sums of gradients over several backward passes are there always.
    """
    grads_bytes = sums_bytes = eager_bytes = 0
    for slot in executor.slots.values():
        bucket = executor.buckets.of(slot)
        if slot.name in read or not slot.param.requires_grad:
            continue
        if bucket is not None:
            sums_bytes += _share(slot, bucket, _resting_bytes(bucket, Kind.GRAD))
            if bucket.spec.trainable:
                grads_bytes += _share(slot, bucket, kept_grad_bytes(bucket.spec, bucket.placement))
        elif slot.key in executor.gradients.trained_eagerly:
            eager_bytes += _trained_bytes(slot, executor.ranks)
    held_bytes = device_bytes(executor, leaving_out=read) + sums_bytes + unmanaged_state_bytes(executor)
    return Held(held_bytes + eager_bytes, grads_bytes)


def outside_bytes(executor: Executor, read: Collection[str], outstanding_bytes: int = 0) -> int:
    """Return the device bytes outside of the training graphs that read the parameters `read`.

    Includes the larger of `outstanding_bytes` and the gradients of other graphs: these gradients are made while the
    activations of outstanding forwards are freed.
    """
    held = held_outside(executor, read)
    return held.resident_bytes + max(outstanding_bytes, held.grad_bytes)


def present_bytes(executor: Executor) -> int:
    """Return the device bytes of parameters, gradients, optimizer state and outstanding forwards that are there now.

    State that a plan places on the device is there from the first update on.
    """
    total = on_device_bytes(executor) + executor.saved.held_bytes()
    for slot in executor.slots.values():
        grad = slot.param.grad
        if grad is not None and grad.device == executor.device and not is_slab_memory(own_part(grad).data_ptr()):
            total += own_part(grad).nbytes
        bucket = executor.buckets.of(slot)
        if bucket is not None and has_state(slot.param):
            total += _share(slot, bucket, _resting_bytes(bucket, Kind.MOMENT))
    return total


def unplanned_bytes(executor: Executor) -> int:
    """Return the device bytes beside the parameters that no plan can place: state of plain optimizers that plans count,
    and the buckets of DistributedDataParallel."""
    return sum(executor.plain_state.by_name().values()) + executor.reducers.bucket_bytes(executor.device)


def unmanaged_state_bytes(executor: Executor) -> int:
    """Return the bytes of optimizer state of trained parameters that no plan can move, as those of an RNN.

    The parameters themselves are inputs of the graphs that read them, and their gradients are results.
    """
    return sum(map(_state_bytes, executor.gradients.unmanaged.values()))


def unread_bytes(captured: Captured, executor: Executor, read: Collection[str]) -> int:
    """Return the bytes of state and gradients of trained parameters that neither `captured`, which reads the parameters
    `read`, nor an earlier graph reads."""
    if captured.backward is None:
        return 0
    slots = [slot for slot in executor.slots.values() if slot.param.requires_grad and slot.name not in read]
    return sum(_trained_bytes(slot, executor.ranks) for slot in slots if executor.buckets.of(slot) is None)


def _trained_bytes(slot: Slot, ranks: Ranks | None) -> int:
    """Return the bytes of the gradient and the optimizer state of one parameter."""
    numel = slot.own.numel()
    return grad_dtype_of(slot, ranks).itemsize * numel + _state_bytes(slot.param) * numel // max(slot.numel, 1)


def _state_bytes(param: torch.Tensor) -> int:
    """Return the bytes of the optimizer state of one parameter without a bucket, over all ranks."""
    return (planned_states([param]).get(id(param)) or state_of_hybrid_adamw(param)).nbytes


def outside_host_bytes(in_force: Collection[tuple[Bucket, Placement]], read: Collection[str]) -> int:
    """Return the host bytes of the buckets without any of the parameters `read`."""
    others = [(bucket, placement) for bucket, placement in in_force if set(read).isdisjoint(bucket.params)]
    return sum(bucket_host_bytes(bucket, placement) for bucket, placement in others)
