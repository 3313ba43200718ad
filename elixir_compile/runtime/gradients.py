"""Gradients of a backward: sums over calls, reduction over ranks, and where the update reads them."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedBackward
from elixir_compile.base.process import Living
from elixir_compile.graph.ops.optimizers import has_master, let_update
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import as_dtensor, own_shard
from elixir_compile.ir import BucketRef, GradientRef, InnerVerb, Kept, Lane, Update, Verb, label
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.distributed.sharded import ShardedBucket, ShardReduce
from elixir_compile.runtime.gathers import StepCalls
from elixir_compile.runtime.lanes import Lanes, LateTransfer, Transfer
from elixir_compile.runtime.placed import PlacedBuckets
from elixir_compile.runtime.published import BackwardPass, GradNormCache, fitted, publish, widen_sum
from elixir_compile.runtime.recording import Ledger
from elixir_compile.runtime.saved import SavedActivations

# ----------------------------------------------------------------------------------------------------------------------
# Sums of the gradients of the calls of a step, kept on the device until the last call reduces them.
#
#   backward 1    g1 -> sum           the gradient itself becomes the sum
#   backward 2    sum += g2
#   backward 3    sum += g3, reduce   one collective and one copy to the host, whatever the number of calls


class SumsOfCalls:
    """The unreduced sums of an executor, by the key of the slot of their parameter."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def add(
        self,
        bucket: RunningBucket,
        positions: Sequence[int],
        grads: list[torch.Tensor],
        *,
        in_fp32: bool,
    ) -> None:
        """Add `grads`, of the parameters at `positions` of `bucket`, to their sums, and empty `grads`.

        If sums are `in_fp32`, so are those of parameters with a master; else a sum has the dtype of its gradients.
        """
        for place, position in enumerate(positions):
            key, grad = bucket.slots[position].key, grads[place]
            wide = torch.float32 if in_fp32 and has_master(bucket.slots[position].param) else grad.dtype
            total = self._sums.get(key)
            if total is None:
                # Not a view, as a transposed product is: a view keeps its base.
                self._sums[key] = grad.detach().to(wide)
            else:
                total.add_(grad)
        grads.clear()

    def with_sums(
        self, bucket: RunningBucket, positions: Sequence[int], grads: list[torch.Tensor]
    ) -> tuple[Sequence[int], list[torch.Tensor]]:
        """Return `positions` and `grads` of the last call with the sums of the earlier calls added, and forget these.

        The list that is returned is `grads` itself, which the caller may empty.
        """
        if not self._sums:
            return positions, grads
        found = list(positions)
        for place, position in enumerate(positions):
            total = self._sums.pop(bucket.slots[position].key, None)
            if total is not None:
                grads[place] = total.add_(grads[place])
        for position, slot in enumerate(bucket.slots):
            total = self._sums.pop(slot.key, None)
            if total is not None:  # the last call, for example of other experts, has no gradient of the parameter
                found.append(position)
                grads.append(total)
        return found, grads

    def holds_any_of(self, bucket: RunningBucket) -> bool:
        """Return whether there is a sum of a parameter of `bucket`."""
        return bool(self._sums) and any(slot.key in self._sums for slot in bucket.slots)

    def clear(self) -> None:
        """Forget all sums; called after an exception."""
        self._sums.clear()


# ----------------------------------------------------------------------------------------------------------------------
# Collect the gradients of an executor's graphs, and add them to `param.grad` or hand them to autograd.
#
#     the backward asks for            the gradient of p is
#     every gradient                   added to p.grad when the backward ends, or before an early update of its bucket
#     every gradient, p has hooks      handed to autograd, which calls the hooks and accumulates; the reducer of a
#                                      DistributedDataParallel has a hook on each of its parameters
#     inputs=[p, ...]                  added or handed over, as in the two rows above
#     inputs=[x], p is not in it       dropped as soon as it is made; with several ranks, after its collective
#     torch.autograd.grad(loss, [p])   handed to autograd, which returns it
#
# Autograd takes gradients at the gate (see `graph.ops.gather`), which runs after all graphs of the backward that read
# the gate's parameters. If a backward runs inside another backward, as in a reentrant checkpoint, each publishes its
# own gradients.


class GradientAccumulator:
    """Collects the gradients of each backward pass, and publishes them as `param.grad` or hands them to autograd.

    It has more than 20 methods, because gradients come from three sides: programs, eager code and gates.
    """

    def __init__(
        self,
        name: str,
        lanes: Lanes,
        *,
        ledger: Ledger,
        saved: SavedActivations,
        buckets: PlacedBuckets,
        calls: StepCalls,
        ranks: Ranks | None,
    ) -> None:
        """`name` is the model's name, and `buckets` are the buckets in force. `calls` tell which call of a step runs.
        `ranks` train the model together; None if a single rank trains it."""
        self.norm_cache = GradNormCache()
        self.trained_eagerly: set[int] = set()
        """Keys of the slots whose gradients eager code made; planning counts the bytes of these gradients."""
        self.stay = False
        """Whether gradients of an earlier backward stay through the next forward: a user said so, or a forward or a
        backward found some. Plans count them from then on."""
        self.unmanaged: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
        """The trained parameters that no plan can move, by name. Their gradients and state are where they are."""
        self.sums_in_fp32 = False
        """Whether the gradients of several backward passes are summed in fp32 for parameters that have a master."""
        self.sentinel = torch.zeros(1, device="cpu", requires_grad=True)
        """See `GradientSink.sentinel`."""
        self._name = name
        self._lanes = lanes
        self._ledger = ledger
        self._saved = saved
        self._buckets = buckets
        self._calls = calls
        self.sums = SumsOfCalls()
        """The sums of gradients over the calls of a step, before the last."""
        self._ranks = ranks
        self._backwards: dict[int, BackwardPass] = {}
        """Running backward passes by autograd's number of the pass; several if passes are nested."""

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass with graphs of this executor has begun and not ended."""
        return bool(self._backwards)

    def begin_backward(self) -> BackwardPass:
        """Return the backward on this thread; the first call in a backward has its gradients published when it ends.

        Raises UnsupportedBackward if the backward runs under `create_graph=True`.
        """
        number = compat.backward_pass_id()
        backward = self._backwards.get(number)
        if backward is None:
            self._refuse_double()
            asks_for_all = compat.asked_for(self.sentinel) is compat.Asked.TO_ACCUMULATE
            backward = self._backwards[number] = BackwardPass(asks_for_all)
            compat.after_backward(functools.partial(self._end_backward, number))
        return backward

    def _refuse_double(self) -> None:
        if torch.is_grad_enabled():  # as under `create_graph=True`
            instead = "Leave it out if no gradient of a gradient is taken"
            raise UnsupportedBackward(self._name, "create_graph=True", instead)

    def staying_bytes(self, slots: Iterable[Slot]) -> int:
        """Return the bytes of the gradients of trained parameters of `slots` that are there now."""
        with torch.DisableTorchFunctionSubclass():  # a parameter may be in update
            params = (slot.param for slot in slots)
            grads = [param.grad for param in params if param.grad is not None and param.requires_grad]
        return sum(own_shard(grad).nbytes for grad in grads)

    # Gradients from graphs and from eager code.

    def accumulate(self, slot: Slot, grad: torch.Tensor) -> None:
        """Add `grad`, which eager code made, to the gradient of `slot`."""
        self.trained_eagerly.add(slot.key)
        backward = self.begin_backward()
        with backward.in_order(self._lanes), torch.no_grad():
            # A copy, because autograd may hand the same tensor to several parameters, as for the gradients of a sum.
            own = grad.clone() if self._ranks is None else self._ranks.mean_shard(grad, slot.param, slot.name)
            self._add(backward, slot, own)

    def reach(self, slot: Slot) -> None:
        """Give the parameter of `slot` a gradient of zeros in this backward, if eager code that the backward has passed
        through made none: the parameter is read in a branch that was not taken."""
        backward = self.begin_backward()
        if slot.key not in backward.pending:
            zeros = torch.empty_strided(slot.shape, slot.stride, dtype=slot.param.dtype, device=slot.device).zero_()
            self.accumulate(slot, zeros)

    @torch.no_grad()
    def reduce(self, bucket: RunningBucket, params: Sequence[int], grads: list[torch.Tensor]) -> Transfer | None:
        """Add gradients to the sums of `bucket`; `params` holds the position in the bucket of each gradient.

        A position may occur several times. For a sharded bucket, empty `grads`, start the collective, and return the
        transfer whose wait adds this rank's shard of the means. Before the last call of a step, keep the sums over its
        calls, and do no more.
        """
        backward = self.begin_backward()
        if not self._calls.trains:
            grads.clear()
            return None
        if not self._calls.is_last:
            self._lanes.touches(grads)
            self.sums.add(bucket, params, grads, in_fp32=self.sums_in_fp32)
            return None
        params, grads = self.sums.with_sums(bucket, params, grads)
        if isinstance(bucket, ShardedBucket):
            self._ledger.takes(Verb.REDUCE, grads)
            take = functools.partial(self._add, backward)
            reducing = ShardReduce(bucket, params, grads, take, self._lanes, self._ledger)
            backward.reducing[bucket.spec.id] = reducing
            return reducing
        if self._ranks is not None and grads:
            self._lanes.touches(grads)
            params, grads = self._ranks.mean_sums(
                params, grads, bucket.grad_dtype, self._ledger, BucketRef(bucket.spec.id)
            )
        with self._ledger.span(Lane.COMPUTE, label(Verb.REDUCE, BucketRef(bucket.spec.id))):
            for position, grad in zip(params, grads, strict=True):
                self._add(backward, bucket.slots[position], grad)
        self.close(bucket, Verb.REDUCE)
        return None

    def _add(self, backward: BackwardPass, slot: Slot, grad: torch.Tensor) -> None:
        if backward.asks_for(slot) is compat.Asked.NOT:
            return
        if not backward.asks_for_all and compat.is_batched(grad):
            instead = "Ask for the gradients of one output after another"
            raise UnsupportedBackward(self._name, "is_grads_batched=True", instead)
        self._ledger.takes(Verb.REDUCE, (grad,))
        _, total = backward.pending.get(slot.key, (slot, None))
        if total is None:
            # Not a view, as a transposed product is: a view keeps its base, and thereby the memory that the gradient
            # leaves when its bucket moves to the host.
            total = grad.detach()
        elif total.device == grad.device:
            if slot.key in backward.offloaded:  # the device is a CPU: both are in host memory
                self._lanes.host_waits(self._lanes.d2h.mark())
            self._lanes.touches((grad,), (total,))
            total.add_(grad)
        else:
            # Another graph of this backward offloaded its gradient: copy it back, and offload the sum later.
            self._lanes.compute_waits(self._lanes.d2h.mark())
            with self._ledger.span(Lane.H2D, self._named(Verb.PREFETCH, slot), total.nbytes, times=0):
                total = grad.add_(total.to(grad.device, non_blocking=True))
        backward.pending[slot.key] = (slot, total)

    def _named(self, verb: Verb | InnerVerb, slot: Slot) -> str:
        """Return the label of `verb` on the gradient of the bucket of `slot`."""
        bucket = self._buckets.of(slot)
        return label(verb, Kept.GRADIENTS if bucket is None else GradientRef(bucket.spec.id))

    # Offload, early publishing, and hand-over to autograd.

    @torch.no_grad()
    def offload(self, bucket: RunningBucket) -> Transfer | None:
        """Start copying the gradients of `bucket`, whose home is the host, to the host.

        Before the last call of a step, nothing is copied, and None returned.
        """
        backward = self.begin_backward()
        if not (self._calls.is_last and self._calls.trains):
            return None
        if bucket.spec.id in backward.reducing and not self._lanes.d2h.is_asynchronous:
            late = functools.partial(self._offload, backward, bucket)
            return LateTransfer(label(Verb.OFFLOAD, GradientRef(bucket.spec.id)), late)
        return self._offload(backward, bucket)

    def _offload(self, backward: BackwardPass, bucket: RunningBucket) -> Transfer:
        name = label(Verb.OFFLOAD, GradientRef(bucket.spec.id))
        targets: list[torch.Tensor] = []
        leaving: list[torch.Tensor] = []
        moved: list[tuple[Slot, torch.Tensor, torch.Tensor]] = []
        buffers = bucket.gradient_buffers()
        d2h = self._lanes.d2h
        reducing = backward.reducing.pop(bucket.spec.id, None)
        nbytes = sum(grad.nbytes for grad in backward.made_on(self._lanes.device, bucket.slots))
        nbytes += 0 if reducing is None else reducing.own_nbytes
        with d2h.behind_compute(), self._ledger.span(Lane.D2H, name, nbytes):
            if reducing is not None:
                leaving += reducing.memory()  # only `d2h` waits for the collective, so compute must not reuse it yet
                reducing.ensure_issued()
            for slot, target in zip(bucket.slots, buffers, strict=True):
                pending = backward.pending.get(slot.key)
                if pending is None or pending[1].device != self._lanes.device:
                    continue  # There is no gradient, or another graph of this backward has offloaded it.
                if pending[1].dtype != target.dtype:  # a sum in fp32 over the calls of a step
                    target = bucket.fp32_sum_buffer(slot)
                d2h.copy(target, pending[1])
                moved.append((slot, pending[1], target))
                backward.pending[slot.key] = (slot, target)
                backward.offloaded.add(slot.key)
                leaving.append(pending[1])
                targets.append(target)
            if reducing is not None:  # only `d2h` waits for the collective
                self._take_norms(moved)
        if reducing is None:
            self._take_norms(moved)
        transfer = Transfer(name, d2h.mark(), tuple(targets), tuple(leaving))
        backward.arriving.append(transfer)
        self.close(bucket, Verb.OFFLOAD)
        return transfer

    def _take_norms(self, moved: Sequence[tuple[Slot, torch.Tensor, torch.Tensor]]) -> None:
        self._lanes.touches(grad for _, grad, _ in moved)
        self.norm_cache.take(moved)

    @torch.no_grad()
    def close(self, bucket: RunningBucket, verb: Verb) -> None:
        """Publish the gradients of `bucket` for an update in the backward, if they are final after this `verb`."""
        if bucket.update is not Update.IN_BACKWARD or bucket.closes is not verb or self._saved.num_outstanding != 1:
            return
        backward = self._backwards.get(compat.backward_pass_id())
        own = [] if backward is None else [slot for slot in bucket.slots if slot.key in backward.pending]
        if backward is None or not own:
            return
        is_away = all(backward.pending[slot.key][1].device == slot.param.device for slot in own)
        # Adding to an earlier gradient on the host reads the offloaded gradient, whose copy must have arrived.
        is_read = bucket.is_away and any(slot.param.grad is not None for slot in own)
        if verb is Verb.OFFLOAD and is_read:
            return
        if is_away and not any(backward.goes_through_autograd(slot) for slot in own):
            if is_read:
                self._lanes.host_waits(self._lanes.d2h.mark())
            self._publish(backward, own)
            let_update([slot.param for slot in own if slot.param.requires_grad], self._lanes.d2h.mark())

    def hand_over(self, slots: Sequence[Slot | None]) -> Sequence[torch.Tensor | None]:
        """Return for each of `slots` the gradient that autograd itself takes in this backward, or None.

        It is None too on a second call in the same backward: a gate asks twice for a parameter that two modules share,
        because it has two handles of it. Raises UnsupportedBackward if the backward runs under `create_graph=True`.
        """
        backward = self._backwards.get(compat.backward_pass_id())
        found: list[torch.Tensor | None] = [None] * len(slots)
        pending = {} if backward is None else backward.pending
        made = {place: slot for place, slot in enumerate(slots) if slot is not None and slot.key in pending}
        if backward is None or not made:
            return found
        self._refuse_double()
        leaving = {place: slot for place, slot in made.items() if backward.goes_through_autograd(slot)}
        if leaving:
            self._wait_for_copies()
        if any(slot.is_reduced for slot in leaving.values()):
            for bucket in self._buckets:  # the reducer writes gradients of parameters too that no graph has read
                bucket.queued.wait()
        with torch.no_grad():
            for place, slot in leaving.items():
                self._buckets.await_update(slot)
                _, grad = backward.pending.pop(slot.key, (slot, None))
                if grad is None:
                    continue
                self._lanes.touches((grad,))  # by hooks, and by autograd that adds it
                grad = fitted(slot.param, grad)
                if backward.asks_for(slot) is compat.Asked.TO_ACCUMULATE:
                    backward.handed.append(slot)
                    widen_sum(slot.param, grad.dtype, self._new_fp32_sum(slot))
                found[place] = as_dtensor(grad, slot.param)
        return found

    def _wait_for_copies(self) -> None:
        """Wait until gradients are on the host. Raises PeerFailed if a collective before them has failed."""
        if self._ranks is not None:
            self._ranks.unfinished.wait_for(self._lanes.d2h.mark())
        with self._ledger.waits(label(Verb.WAIT, Kept.GRADIENTS)):
            self._lanes.d2h.synchronize()

    # The end of a backward.

    @torch.no_grad()
    def _end_backward(self, number: int) -> None:
        backward = self._backwards.pop(number, None)
        if backward is None:  # The backward raised an exception and was abandoned.
            return
        backward.resume_hooks()
        backward.reducing.clear()
        self._lanes.compute_waits(backward.computed)
        self._wait_for_copies()
        backward.arriving.clear()
        self._lanes.h2d.synchronize()
        self._saved.end()
        slots = [slot for slot, _ in backward.pending.values()]
        self._publish(backward, slots)
        self.norm_cache.end_backward()
        if self._calls.spec.num > 1 and not self._calls.is_under_way:  # the last call may have other parameters
            backward.run_missed_hooks(slots)
        slots += backward.handed
        for bucket in dict.fromkeys(self._buckets.of(slot) for slot in slots):
            if bucket is not None and bucket.update is Update.IN_BACKWARD:
                own = [slot for slot in slots if slot in bucket.slots and slot.param.requires_grad]
                # The callback in which a reducer waits for other ranks comes after this one.
                let_update([slot.param for slot in own if not slot.is_reduced], None)

    def abandon(self) -> None:
        """Drop all unpublished gradients; called after an exception."""
        for backward in self._backwards.values():
            backward.resume_hooks()
        self._backwards.clear()
        self.sums.clear()
        self.norm_cache.drop()

    def _publish(self, backward: BackwardPass, slots: Iterable[Slot]) -> None:
        sums: Counter[str] = Counter()
        for slot in slots:
            self._buckets.await_update(slot)
            _, grad = backward.pending.pop(slot.key)
            if slot.param.grad is None:
                publish(slot.param, grad, self._new_fp32_sum(slot))
            else:
                self._lanes.touches((grad,), (own_shard(slot.param.grad),))
                name, bucket = self._named(InnerVerb.ADD, slot), self._buckets.of(slot)
                lane = Lane.HOST if bucket is not None and bucket.is_away else Lane.COMPUTE
                with self._ledger.span(lane, name, times=0, piece=sums[name]):
                    publish(slot.param, grad, self._new_fp32_sum(slot))
                sums[name] += 1
            self.norm_cache.store(slot)

    def _new_fp32_sum(self, slot: Slot) -> "functools.partial[torch.Tensor] | None":
        bucket = self._buckets.of(slot) if self.sums_in_fp32 else None
        return None if bucket is None else functools.partial(bucket.fp32_sum_buffer, slot)


# ----------------------------------------------------------------------------------------------------------------------
# The DistributedDataParallel modules that reduce the gradients of an executor's parameters.
#
# Such a module has a reducer in C++, which hangs a hook on the autograd node of each parameter. The hooks copy
# gradients into flat buckets, and sum the buckets over all ranks while the backward runs. So three things hold for its
# parameters:
#
#     gradients    go through autograd, which calls the hooks (see `runtime.gradients`), and not to `.grad` directly
#     updates      never run in the backward, whose gradients are summed only when it ends
#     parameters   stay on their device: on another one they would get another node, without the hook


_COUNTS_BYTES = 8
"""Of each parameter: how often it was used on this rank, and on all, in 4 bytes each."""


class Reducers:
    """The DistributedDataParallel modules in whose forwards graphs of an executor have run."""

    def __init__(self) -> None:
        self._found: Living[DistributedDataParallel] = Living()

    def __bool__(self) -> bool:
        """Whether any such module exists."""
        return bool(self._found)

    def __contains__(self, ddp: DistributedDataParallel) -> bool:
        return ddp in self._found

    def add(self, ddp: DistributedDataParallel, slots: Iterable[Slot]) -> None:
        """Note that `ddp` reduces the gradients of those `slots` whose parameters it has."""
        reduced = {id(param) for param in compat.reduced_by(ddp)}
        for slot in slots:
            if id(slot.param) in reduced:
                slot.note_reducer(ddp)
        self._found.add(ddp)

    def bucket_bytes(self, device: torch.device) -> int:
        """Return the bytes of the buckets on `device`: as many as the gradients have.

        The same again counts for the copies that a communication hook makes, whatever it is.
        """
        total = 0
        for ddp in self._found:
            params = [param for param in compat.reduced_by(ddp) if param.device == device]
            copies = 2 if compat.has_communication_hook(ddp) else 1
            total += sum(copies * param.nbytes + _COUNTS_BYTES for param in params)
        return total
