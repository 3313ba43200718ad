"""Every gradient of one executor between its production and `param.grad`.

    the backward asks for            the gradient of p is
    everything                       added to p.grad when the backward ends, or by an early update of its bucket
    everything, and p has hooks      handed to autograd, which calls the hooks and accumulates
    inputs=[p], p among others       as above
    inputs=[x], p not among them     dropped when it is made, on several ranks behind its collective
    torch.autograd.grad(loss, [p])   handed to autograd, which returns it

Autograd takes gradients at the gate (see `ops.gate`), behind all graphs of the backward that read its parameters. Where
one backward runs inside another, as in a reentrant checkpoint, each publishes its own gradients.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elixir_compile import compat
from elixir_compile.errors import UnsupportedBackward
from elixir_compile.ir import BucketId, Lane, Update, Verb
from elixir_compile.ops.registry import Slot, let_update
from elixir_compile.ops.shards import as_dtensor
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.distributed.sharded import ShardedBucket, ShardReduce
from elixir_compile.runtime.landed import GradNormCache
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.publish import fitted, publish, widen_sum
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.runtime.streams import CopyStream, LateTransfer, Transfer, wait_on_compute


@dataclass(slots=True)
class _Backward:
    """One backward pass, from the first of our graphs in it to its end."""

    asks_for_all: bool
    """Whether it adds every gradient to `.grad`, and not those of chosen tensors."""
    asked: dict[int, compat.Asked] = field(default_factory=dict)
    """By slot, if it does not ask for all: what it does with the gradient."""
    pending: dict[int, tuple[Slot, torch.Tensor]] = field(default_factory=dict)
    """By slot, the sum of what its graphs have made so far, where it is now."""
    handed: list[Slot] = field(default_factory=list)
    """Parameters whose gradient autograd has added to `.grad`."""
    reducing: dict[BucketId, ShardReduce] = field(default_factory=dict)
    """Of several ranks, the last reduce of each bucket."""
    arriving: list[Transfer] = field(default_factory=list)
    """Copies to the host, kept until they are done."""

    def asks_for(self, slot: Slot) -> compat.Asked:
        """Return what it does with the gradient of the slot's parameter."""
        if self.asks_for_all:
            return compat.Asked.TO_ACCUMULATE
        if slot.key not in self.asked:
            self.asked[slot.key] = _asked_for(slot)
        return self.asked[slot.key]

    def goes_through_autograd(self, slot: Slot) -> bool:
        """Whether autograd itself takes the gradient of the slot's parameter."""
        return self.asks_for(slot) is compat.Asked.TO_RETURN or slot.has_hooks


class GradientAccumulator:
    """Takes the gradients that backward passes make, and lets each become what its backward was asked for."""

    def __init__(
        self,
        name: str,
        h2d: CopyStream,
        d2h: CopyStream,
        *,
        device: torch.device,
        ledger: Ledger,
        saved: SavedActivations,
        bucket_of: Mapping[int, RunningBucket],
        ranks: Ranks | None,
    ) -> None:
        """`name` is the model's, `bucket_of` the buckets in force by slot, `ranks` who shares the model."""
        self.norm_cache = GradNormCache()
        self.trained_eagerly: set[int] = set()
        """Keys of slots whose gradients eager code made: no plan knows what they need."""
        self.sums_in_fp32 = False
        """Whether gradients of several backward passes add up in fp32, of parameters that have a master."""
        self.sentinel = torch.zeros(1, requires_grad=True)
        """See `GradientSink.sentinel`."""
        self._name = name
        self._h2d, self._d2h = h2d, d2h
        self._device = device
        self._ledger = ledger
        self._saved = saved
        self._bucket_of = bucket_of
        self._ranks = ranks
        self._backwards: dict[int, _Backward] = {}
        """By the number of the pass; more than one if they are nested."""

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and has not come to its end."""
        return bool(self._backwards)

    def begin_backward(self) -> _Backward:
        """Return the backward that runs on this thread, whose gradients are published when it ends.

        Raises UnsupportedBackward if it is to make a graph of its own.
        """
        number = compat.backward_pass_id()
        now = self._backwards.get(number)
        if now is None:
            self._refuse_double()
            asks_for_all = compat.asked_for(self.sentinel) is compat.Asked.TO_ACCUMULATE
            now = self._backwards[number] = _Backward(asks_for_all)
            compat.after_backward(functools.partial(self._end_backward, number))
        return now

    def _refuse_double(self) -> None:
        if torch.is_grad_enabled():  # as under `create_graph=True`
            instead = "Leave it out if no gradient of a gradient is taken"
            raise UnsupportedBackward(self._name, "create_graph=True", instead)

    # What graphs and eager code make.

    def accumulate(self, slot: Slot, grad: torch.Tensor) -> None:
        """Add `grad`, made by eager code, to the gradient of `slot`."""
        now = self.begin_backward()
        self.trained_eagerly.add(slot.key)
        with torch.no_grad():
            # A copy, because autograd may hand one tensor to several parameters: the gradients of a sum are one tensor.
            own = grad.clone() if self._ranks is None else self._ranks.mean_part(grad, slot.param, slot.name)
            self._add(now, slot, own)

    @torch.no_grad()
    def reduce(self, bucket: RunningBucket, params: Sequence[int], grads: list[torch.Tensor]) -> Transfer | None:
        """Take gradients of `bucket`: `params` are positions in it, one may come more than once. Of a bucket cut over
        several ranks, empty `grads` and return what ends with this rank's part of their means."""
        now = self.begin_backward()
        if isinstance(bucket, ShardedBucket):
            land = functools.partial(self._add, now)
            now.reducing[bucket.spec.id] = reducing = ShardReduce(bucket, params, grads, land, self._ledger)
            return reducing
        if self._ranks is not None and grads:
            params, grads = self._ranks.mean_sums(params, grads, bucket.grad_dtype, self._ledger, bucket.spec.id)
        with self._ledger.span(Lane.COMPUTE, f"reduce {bucket.spec.id}"):
            for position, grad in zip(params, grads, strict=True):
                self._add(now, bucket.slots[position], grad)
        self.close(bucket, Verb.REDUCE)
        return None

    def _add(self, now: _Backward, slot: Slot, grad: torch.Tensor) -> None:
        if now.asks_for(slot) is compat.Asked.NOT:
            return
        if not now.asks_for_all and compat.is_batched(grad):
            instead = "Ask for the gradients of one output after another"
            raise UnsupportedBackward(self._name, "is_grads_batched=True", instead)
        _, total = now.pending.get(slot.key, (slot, None))
        if total is None:
            total = grad
        elif total.device == grad.device:
            total.add_(grad)
        else:
            # Another graph of this backward sent its share to the host: it comes back, and the sum leaves later.
            wait_on_compute(self._d2h.mark(), self._device)
            total = grad.add_(total.to(grad.device, non_blocking=True))
        now.pending[slot.key] = (slot, total)

    # Where they go.

    @torch.no_grad()
    def offload(self, bucket: RunningBucket) -> Transfer:
        """Start copying the gradients of a host bucket to the host."""
        now = self.begin_backward()
        if bucket.spec.id in now.reducing and not self._d2h.is_asynchronous:
            return LateTransfer(f"offload {bucket.spec.id}", functools.partial(self._offload, now, bucket))
        return self._offload(now, bucket)

    def _offload(self, now: _Backward, bucket: RunningBucket) -> Transfer:
        label = f"offload {bucket.spec.id}"
        landing: list[torch.Tensor] = []
        leaving: list[torch.Tensor] = []
        room = bucket.gradient_room()
        with self._d2h.behind_compute(), self._ledger.span(Lane.D2H, label):
            reducing = now.reducing.pop(bucket.spec.id, None)
            if reducing is not None:
                leaving += reducing.memory()  # only `d2h` follows the collective: compute may use none of it yet
                reducing.ensure_issued()
            for slot, target in zip(bucket.slots, room, strict=True):
                pending = now.pending.get(slot.key)
                if pending is None or pending[1].device != self._device:
                    continue  # No gradient, or one that left when another graph of this backward was done with it.
                target.copy_(pending[1], non_blocking=True)
                self.norm_cache.take(slot, pending[1], target)
                now.pending[slot.key] = (slot, target)
                leaving.append(pending[1])
                landing.append(target)
        transfer = Transfer(label, self._d2h.mark(), tuple(landing), tuple(leaving))
        now.arriving.append(transfer)
        self.close(bucket, Verb.OFFLOAD)
        return transfer

    @torch.no_grad()
    def close(self, bucket: RunningBucket, verb: Verb) -> None:
        """If nothing can change the gradients of `bucket` behind `verb`, publish them and let them be used."""
        if bucket.update is not Update.IN_BACKWARD or bucket.closes is not verb or self._saved.num_waiting != 1:
            return
        now = self._backwards.get(compat.backward_pass_id())
        own = [] if now is None else [slot for slot in bucket.slots if slot.key in now.pending]
        if now is None or not own:
            return
        is_away = all(now.pending[slot.key][1].device == slot.param.device for slot in own)
        # What is added to an earlier gradient on the host is read there, where the copy may still be on its way.
        is_read = verb is Verb.OFFLOAD and any(slot.param.grad is not None for slot in own)
        if is_away and not is_read and not any(now.goes_through_autograd(slot) for slot in own):
            self._publish(now, own)
            let_update([slot.param for slot in own if slot.param.requires_grad], self._d2h.mark())

    def hand_over(self, slots: Sequence[Slot | None]) -> Sequence[torch.Tensor | None]:
        """Return the gradients, of those of `slots`, that autograd itself takes in this backward; None for each of the
        others. Raises UnsupportedBackward if they are to have a graph of their own."""
        now = self._backwards.get(compat.backward_pass_id())
        made = [slot if now is not None and slot is not None and slot.key in now.pending else None for slot in slots]
        if now is None or not any(slot is not None for slot in made):
            return made
        self._refuse_double()
        leaving = [slot if slot is not None and now.goes_through_autograd(slot) else None for slot in made]
        if any(slot is not None for slot in leaving):
            self._d2h.synchronize()
        with torch.no_grad():
            return [None if slot is None else self._handed(now, slot) for slot in leaving]

    def _handed(self, now: _Backward, slot: Slot) -> torch.Tensor | None:
        """Return the gradient of `slot`, once: a gate has two handles of a parameter that two modules share."""
        self._settle(slot)
        _, grad = now.pending.pop(slot.key, (slot, None))
        if grad is None:
            return None
        grad = fitted(slot.param, grad)
        if now.asks_for(slot) is compat.Asked.TO_ACCUMULATE:
            now.handed.append(slot)
            widen_sum(slot.param, grad.dtype, self._total_room(slot))
        return as_dtensor(grad, slot.param)

    # The end.

    @torch.no_grad()
    def _end_backward(self, number: int) -> None:
        now = self._backwards.pop(number, None)
        if now is None:  # It failed, and was abandoned.
            return
        now.reducing.clear()
        self._d2h.synchronize()
        now.arriving.clear()
        self._h2d.synchronize()
        self._saved.end()
        slots = [slot for slot, _ in now.pending.values()]
        self._publish(now, slots)
        self.norm_cache.end_backward()
        slots += now.handed
        for bucket in dict.fromkeys(self._bucket_of.get(slot.key) for slot in slots):
            if bucket is not None and bucket.update is Update.IN_BACKWARD:
                own = [slot.param for slot in slots if slot in bucket.slots and slot.param.requires_grad]
                let_update(own, None)

    def abandon(self) -> None:
        """After an exception: drop what backward passes have made and not published."""
        self._backwards.clear()
        self.norm_cache.drop()

    def _publish(self, now: _Backward, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._settle(slot)
            _, grad = now.pending.pop(slot.key)
            publish(slot.param, grad, self._total_room(slot))
            self.norm_cache.keep(slot)

    def _total_room(self, slot: Slot) -> "functools.partial[torch.Tensor] | None":
        bucket = self._bucket_of.get(slot.key) if self.sums_in_fp32 else None
        return None if bucket is None else functools.partial(bucket.total_room, slot)

    def _settle(self, slot: Slot) -> None:
        """Wait for a queued update of the slot's bucket; raises what failed in it."""
        if (bucket := self._bucket_of.get(slot.key)) is not None:
            bucket.await_update()


def _asked_for(slot: Slot) -> compat.Asked:
    """Return what the backward that runs, which asks for chosen tensors, does with the gradient of the slot's
    parameter."""
    with torch.DisableTorchFunctionSubclass():
        found = compat.asked_for(slot.param) if slot.param.requires_grad else compat.Asked.NOT
    if found is compat.Asked.NOT and any(handle.requires_grad for handle in slot.handles):
        # Code that no gate was made for reads the leaf itself, which only a backward for everything runs.
        leaves = (handle for handle in slot.handles if handle.requires_grad)
        if any(compat.asked_for(leaf) is compat.Asked.TO_ACCUMULATE for leaf in leaves):
            return compat.Asked.TO_ACCUMULATE
    return found
