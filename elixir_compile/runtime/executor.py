"""Run the actions of a schedule: one executor per model.

A program (see `rewrite`) calls the verbs below in schedule order. Transfers are handles: `gather` and `offload`
return a `Transfer`, `wait` takes it. The executor owns every gathered copy and every gradient between its production
and `param.grad`; nothing else does, so a program that fails in the middle is cleaned up by `abandon`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from elixir_compile import compat
from elixir_compile.errors import StaleParameters
from elixir_compile.ir import Bucket, BucketId, Lane, Placement, Plan, Tier, Update, Verb
from elixir_compile.ops.registry import Slot, follow_thaws, let_state_follow, let_update, new_slot, slot_of
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.gathers import Gathers
from elixir_compile.runtime.landed import LandedGradients
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.runtime.publish import publish
from elixir_compile.runtime.ranks import Ranks
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.runtime.sharded import ShardedBucket, ShardReduce, new_bucket
from elixir_compile.runtime.streams import CopyStream, LateTransfer, Transfer, wait_on_compute


class Executor:
    """The parameters of one model, their homes, and the verbs of its programs, on `device`."""

    def __init__(self, device: torch.device, name: str, ranks: Ranks | None = None) -> None:
        """`ranks` share the model, one of which is this process; None for one alone."""
        self.device = device
        self.name = name
        self.ranks = ranks
        self.compilations: list[object] = []
        """The records of the graphs that run on this executor, in order of capture."""
        self.ledger = Ledger(device_type=device.type)
        self.slots: dict[str, Slot] = {}
        self.whole_because: dict[str, str] = {}
        """Parameters that no plan can move, by name, with the reason."""
        self.generation = 0
        """Grows when buckets or homes change; programs and optimizer state made for an older one are made again."""
        self.trained_eagerly: set[int] = set()
        """Keys of slots whose gradients eager code made: no plan knows what they need."""
        self.is_crowded = False
        """Whether a forward found too little room beside those that wait for their backward."""
        self.sums_in_fp32 = False
        """Whether gradients of several backward passes add up in fp32, of parameters that have a master."""
        self.disk: tuple[Path, bool] | None = None
        """See `RunningBucket.disk`."""
        self._serves_training = False
        self._regions: dict[str, RegionCompiler] = {}
        self._buckets: dict[BucketId, RunningBucket] = {}
        self._bucket_of: dict[int, RunningBucket] = {}
        self.h2d = CopyStream(device)
        self.d2h = CopyStream(device)
        self._gathers = Gathers(device, self.h2d, self.ledger)
        self._departing: list[torch.Tensor] = []
        self._pending: dict[int, tuple[Slot, torch.Tensor]] = {}
        self._arriving: list[Transfer] = []
        self._reducing: dict[BucketId, ShardReduce] = {}
        """Of several ranks, the last reduce of each bucket."""
        self._flush_queued_for = -1
        self.landed = LandedGradients()
        self.saved = SavedActivations(device, self.h2d, self.d2h, self.ledger)
        """What forwards left for their backward."""
        self.num_calls = 0
        """Forwards that all ranks have run together: their number is the same on each."""
        self.nothing = torch.empty(0, device=device)
        """What a forward hands to autograd in place of a value that its plan does not keep on the device."""

    def regions_for(self, inner: str) -> RegionCompiler:
        """Return the compiler of this model's regions that uses `inner`."""
        return self._regions.setdefault(inner, RegionCompiler(inner))

    def keep_whole(self, name: str, param: torch.nn.Parameter, reason: str) -> None:
        """Note that `param` stays whole on the device, and why."""
        self.whole_because[name] = reason

    def slot_for(self, param: torch.nn.Parameter) -> Slot | None:
        """Return the slot of `param` in this executor, or None."""
        slot = slot_of(param)
        return slot if slot is not None and slot.sink is self else None

    def add_slot(self, name: str, param: torch.nn.Parameter) -> Slot:
        """Take charge of `param`, called `name` in the model; the same slot for a parameter that was added before."""
        slot = self.slot_for(param)
        if slot is None:
            slot = self.slots[name] = new_slot(name, param, self.device, self)
        return slot

    def buckets_in_force(self, *, for_training: bool) -> tuple[tuple[Bucket, Placement], ...]:
        """Return the buckets with their placements; for training, those that were made for it."""
        if for_training and not self._serves_training:
            return ()
        buckets = self._buckets.values()
        return tuple((one.spec, one.placement) for one in buckets if not (for_training and one.is_outdated()))

    def agrees(self, buckets: Iterable[Bucket], placements: Iterable[Placement], *, may_adopt: bool) -> bool:
        """Whether `buckets` and `placements` are in force, or, with `may_adopt`, can be put in force beside what is."""
        for spec, placement in zip(buckets, placements, strict=True):
            current = self._buckets.get(spec.id)
            if current is not None and (current.spec, current.placement) == (spec, placement):
                continue
            if not may_adopt or (current is not None and not current.is_outdated()):
                return False
        return True

    def running(self, slot: Slot) -> RunningBucket | None:
        """Return the bucket that holds `slot`, or None while no plan names it."""
        return self._bucket_of.get(slot.key)

    def in_use_order(self, buckets: Iterable[RunningBucket]) -> list[RunningBucket]:
        """Return `buckets` of this executor in the order in which a forward first reads them."""
        wanted = set(buckets)
        return [bucket for bucket in self._buckets.values() if bucket in wanted]

    def meet(self, slot: Slot) -> None:
        """Return when every rank is about to gather this parameter; RanksDiffer where one does something else."""
        self.ranks.talk.meet(slot.name, "a parameter")

    def settle(self, slot: Slot) -> None:
        """Wait for a queued update of the slot's bucket; raises what failed in it."""
        if (bucket := self._bucket_of.get(slot.key)) is not None:
            bucket.settle()

    def keep_until_gone(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep `tensors`, which `d2h` reads, until the next forward, which waits for that: their memory is its own."""
        self._departing += tensors

    def schedule_updates(self, plan: Plan, closing: Mapping[BucketId, Verb]) -> None:
        """Note when `plan`, which is in force, updates its buckets, and behind what each of `closing` may be."""
        for bucket in plan.buckets:
            self._buckets[bucket.id].update = plan.update
            self._buckets[bucket.id].closes = closing.get(bucket.id)

    @torch.no_grad()
    def adopt(self, buckets: Iterable[Bucket], placements: Iterable[Placement], *, for_training: bool) -> None:
        """Put `buckets` in force and every parameter where its placement says. Buckets they do not mention stay."""
        if for_training and not self._serves_training:
            self._serves_training = True
            for bucket in self._buckets.values():
                bucket.settle()
            self._buckets.clear()
            self._bucket_of.clear()
        moved: list[torch.Tensor] = []
        for spec, placement in zip(buckets, placements, strict=True):
            current = self._buckets.get(spec.id)
            if current is not None and current.spec == spec and current.placement == placement:
                continue
            self.generation += 1
            slots = [self.slots[name] for name in spec.params]
            for old in {self._bucket_of[slot.key] for slot in slots if slot.key in self._bucket_of}:
                old.settle()
                if self._buckets.get(old.spec.id) is old:  # else a new bucket has taken its name
                    del self._buckets[old.spec.id]
            bucket = new_bucket(spec, placement, slots, pin=self.device.type == "cuda", ranks=self.ranks)
            bucket.settle_home(self.device)
            bucket.disk = self.disk
            self._buckets[spec.id] = bucket
            self._bucket_of.update((slot.key, bucket) for slot in slots)
            moved += [slot.param for slot in slots]
        if moved:
            self.saved.drop_free_slabs()
        let_state_follow(moved)

    def move(self, buckets: Iterable[Bucket], placements: Iterable[Placement]) -> None:
        """Between two training steps: put `buckets` in force under new placements; what leaves the device goes before
        what comes back."""
        pairs = zip(buckets, placements, strict=True)
        in_order = sorted(pairs, key=lambda pair: pair[1].param is Tier.DEVICE)
        self.adopt([bucket for bucket, _ in in_order], [home for _, home in in_order], for_training=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Before a forward: drop what a failed backward left, and put parameters that were moved back in their home."""
        if self._flush_queued_for != -1 and compat.backward_pass_id() == -1:
            # Its end never came: an exception outside of our programs, in another autograd function.
            self.abandon()
        if self._departing:
            self.d2h.settle()
            self._departing.clear()
        self.saved.begin()
        # Nothing here reads what a queued update writes.
        with torch.DisableTorchFunctionSubclass():
            follow_thaws(self.slots.values())
            self.check_updates()
            for bucket in self._buckets.values():
                if bucket.has_drifted():
                    bucket.settle_home(self.device)
                    self.generation += 1

    def check_updates(self) -> None:
        """Raise what failed in a queued update, if that is known already."""
        for bucket in self._buckets.values():
            bucket.check_update()

    def end(self) -> None:
        """After a program: let go of the host's parameters, which anybody may write once it has returned.

        Costs no overlap: compute behind the last gather is queued already.
        """
        self.h2d.settle()

    # The verbs of a program.

    @torch.no_grad()
    def gather(self, bucket_id: BucketId) -> Transfer:
        """Start copying the parameters of a host bucket to the device, behind an update that is queued."""
        return self._gathers.begin(self._buckets[bucket_id])

    def wait(self, transfer: Transfer) -> tuple[torch.Tensor, ...]:
        """Let compute issued from now on run behind `transfer`; return what it brought. Raises what failed in an update
        that it was to follow."""
        wait_on_compute(transfer.issued(), self.device)
        transfer.kept = ()
        if isinstance(transfer, ShardReduce):
            self._close(transfer.bucket, Verb.REDUCE)
        return transfer.values

    def whole(self, bucket_id: BucketId) -> tuple[torch.Tensor, ...]:
        """Return the parameters of a bucket that is on the device."""
        bucket = self._buckets[bucket_id]
        bucket.settle()
        if not bucket.is_whole():
            # A resident bucket whose copy an exception or another backward took away.
            self.wait(self.gather(bucket_id))
        return bucket.whole

    def release(self, bucket_id: BucketId) -> None:
        """Drop the gathered copy of a host bucket; its memory is free when the last region that reads it lets go."""
        with self.ledger.span(Lane.COMPUTE, f"release {bucket_id}"):
            self._buckets[bucket_id].release()
        self._close(self._buckets[bucket_id], Verb.RELEASE)

    @torch.no_grad()
    def reduce(self, bucket_id: BucketId, params: Sequence[int], grads: list[torch.Tensor]) -> Transfer | None:
        """Take the gradients that a backward made: `params` are positions in the bucket, one may come more than
        once. Of a bucket cut over several ranks, empty `grads` and return what ends with this rank's part of means."""
        bucket = self._buckets[bucket_id]
        if isinstance(bucket, ShardedBucket):
            self._reducing[bucket_id] = reducing = ShardReduce(bucket, params, grads, self._add, self.ledger)
            return reducing
        if self.ranks is not None and grads:
            params, grads = self.ranks.mean_sums(params, grads, bucket.grad_dtype, self.ledger, bucket_id)
        with self.ledger.span(Lane.COMPUTE, f"reduce {bucket_id}"):
            for position, grad in zip(params, grads, strict=True):
                self._add(bucket.slots[position], grad)
        self._close(bucket, Verb.REDUCE)
        return None

    @torch.no_grad()
    def offload(self, bucket_id: BucketId) -> Transfer:
        """Start copying the gradients of a host bucket to the host."""
        bucket = self._buckets[bucket_id]
        if bucket_id in self._reducing and not self.d2h.is_asynchronous:
            return LateTransfer(f"offload {bucket_id}", lambda: self._offload(bucket))
        return self._offload(bucket)

    def _offload(self, bucket: RunningBucket) -> Transfer:
        bucket_id = bucket.spec.id
        landing: list[torch.Tensor] = []
        leaving: list[torch.Tensor] = []
        room = bucket.gradient_room()
        with self.d2h.behind_compute(), self.ledger.span(Lane.D2H, f"offload {bucket_id}"):
            reducing = self._reducing.pop(bucket_id, None)
            if reducing is not None:
                leaving += reducing.memory()  # only `d2h` follows the collective: compute may use none of it yet
                reducing.issued()
            for slot, target in zip(bucket.slots, room, strict=True):
                pending = self._pending.get(slot.key)
                if pending is None or pending[1].device != self.device:
                    continue  # No gradient, or one that left when another graph of this backward was done with it.
                target.copy_(pending[1], non_blocking=True)
                self.landed.take(slot, pending[1], target)
                self._pending[slot.key] = (slot, target)
                leaving.append(pending[1])
                landing.append(target)
        transfer = Transfer(f"offload {bucket_id}", self.d2h.mark(), tuple(landing), tuple(leaving))
        self._arriving.append(transfer)
        self._close(bucket, Verb.OFFLOAD)
        return transfer

    @torch.no_grad()
    def offload_saved(self, group: str, values: Sequence[torch.Tensor]) -> Transfer:
        """Start copying activations of this forward to the host."""
        return self.saved.offload(group, values)

    def leaving(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Return the offload of a group that began in the forward of `ticket`."""
        return self.saved.leaving(ticket, group)

    @torch.no_grad()
    def prefetch(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Start copying activations of the forward of `ticket` to the device."""
        return self.saved.prefetch(ticket, group)

    def ticket(self, names: Sequence[str]) -> torch.Tensor:
        """End a forward: return its number, and what `check` compares, the versions of the parameters `names` now."""
        return self.saved.ticket(self._versions(names), self.num_calls)

    def check(self, ticket: torch.Tensor, names: Sequence[str]) -> None:
        """Begin a backward; StaleParameters when a parameter that it reads changed since `ticket` was made."""
        _, *versions = ticket.tolist()
        for name, before, now in zip(names, versions, self._versions(names), strict=True):
            if before != now:
                raise StaleParameters(name)
        self._queue_flush()

    # Gradients between their production and `param.grad`.

    @torch.no_grad()
    def accumulate(self, slot: Slot, grad: torch.Tensor) -> None:
        """Add `grad`, made by eager code, to the gradient of `slot`."""
        # A copy, because autograd may hand one tensor to several parameters: the gradients of a sum are one tensor.
        self._add(slot, grad.clone() if self.ranks is None else self.ranks.mean_part(grad, slot.param, slot.name))
        self.trained_eagerly.add(slot.key)
        self._queue_flush()

    @torch.no_grad()
    def _close(self, bucket: RunningBucket, verb: Verb) -> None:
        """Where nothing can change the gradients of `bucket` behind `verb`, publish them and let them be used."""
        if bucket.update is not Update.IN_BACKWARD or bucket.closes is not verb or self.saved.num_waiting != 1:
            return
        own = [slot for slot in bucket.slots if slot.key in self._pending]
        is_away = all(self._pending[slot.key][1].device == slot.param.device for slot in own)
        # What is added to an earlier gradient on the host is read there, where the copy may still be on its way.
        is_read = verb is Verb.OFFLOAD and any(slot.param.grad is not None for slot in own)
        if own and is_away and not is_read and not any(compat.has_gradient_hooks(slot.param) for slot in own):
            self._publish(own)
            let_update([slot.param for slot in own if slot.param.requires_grad], self.d2h.mark())

    def abandon(self) -> None:
        """After an exception: drop gathered copies and gradients that were on their way."""
        self._gathers.call_off()
        if self.ranks is not None:
            self.ranks.settle()
        # Their memory must not be used again while a copy still reads or writes it.
        self.h2d.settle()
        self.d2h.settle()
        self.saved.begin()
        self._pending.clear()
        self._arriving.clear()
        self._reducing.clear()
        self.landed.drop()
        self._flush_queued_for = -1
        for bucket in self._buckets.values():
            bucket.release()

    def _add(self, slot: Slot, grad: torch.Tensor) -> None:
        _, total = self._pending.get(slot.key, (slot, None))
        if total is None:
            total = grad
        elif total.device == grad.device:
            total.add_(grad)
        else:
            # Another graph of this backward sent its share to the host: it comes back, and the sum leaves later.
            wait_on_compute(self.d2h.mark(), self.device)
            total = grad.add_(total.to(grad.device, non_blocking=True))
        self._pending[slot.key] = (slot, total)

    def _queue_flush(self) -> None:
        backward = compat.backward_pass_id()
        if backward != self._flush_queued_for:
            self._flush_queued_for = backward
            compat.after_backward(self._flush)

    @torch.no_grad()
    def _flush(self) -> None:
        """End a backward: publish every gradient as `param.grad`."""
        self._reducing.clear()
        self.d2h.settle()
        self._arriving.clear()
        self.end()
        self.saved.end()
        self._flush_queued_for = -1
        slots = [slot for slot, _ in self._pending.values()]
        try:
            self._publish(slots)
        finally:
            self._pending.clear()
        self.landed.end_backward()
        for bucket in dict.fromkeys(self._bucket_of.get(slot.key) for slot in slots):
            if bucket is not None and bucket.update is Update.IN_BACKWARD:
                own = [slot.param for slot in slots if slot in bucket.slots and slot.param.requires_grad]
                let_update(own, None)

    def _publish(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.settle(slot)
            _, grad = self._pending.pop(slot.key)
            bucket = self._bucket_of.get(slot.key) if self.sums_in_fp32 else None
            publish(slot.param, grad, None if bucket is None else functools.partial(bucket.total_room, slot))
            self.landed.keep(slot)

    def _versions(self, names: Sequence[str]) -> list[int]:
        return [self.slots[name].version for name in names]
