"""Run the actions of a schedule: one executor per model.

A program (see `rewrite`) calls the verbs below in schedule order. Transfers are handles: `gather` and `offload`
return a `Transfer`, `wait` takes it. The executor owns every gathered copy, and by its `GradientAccumulator` every
gradient between its production and `param.grad`; nothing else does, so a program that fails in the middle is cleaned up
by `abandon`.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.errors import StaleParameters
from elixir_compile.ir import Bucket, BucketId, Lane, Placement, Plan, Tier, Verb
from elixir_compile.ops.eager_reads import EagerReads
from elixir_compile.ops.gate import Gate
from elixir_compile.ops.registry import Slot, forget, let_state_follow, new_slot, slot_of
from elixir_compile.ops.sites import Sites
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.distributed.sharded import ShardReduce, new_bucket
from elixir_compile.runtime.gathers import Gathers
from elixir_compile.runtime.gradients import GradientAccumulator
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.runtime.parameters import check_move, taken_in
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.runtime.streams import CopyStream, Transfer, wait_on_compute


class Executor:
    """The parameters of one model, their homes, and the verbs of its programs, on `device`."""

    def __init__(self, device: torch.device, name: str, ranks: Ranks | None = None) -> None:
        """`ranks` share the model, one of which is this process; None for one alone."""
        self.device = device
        self.name = name
        self.ranks = ranks
        self.compilations: list[Any] = []
        """The records of the graphs that run on this executor, in order of capture."""
        self.gates: list[Gate] = []
        """The autograd nodes between those graphs and the parameters; compiled code holds them weakly."""
        self.ledger = Ledger(device_type=device.type)
        self.slots: dict[str, Slot] = {}
        self.unmanaged_because: dict[str, str] = {}
        """Parameters that no plan can move, by name, with the reason."""
        self.generation = 0
        """Grows when buckets or homes change; programs and optimizer state made for an older one are made again."""
        self.is_crowded = False
        """Whether a forward found too little room beside those that wait for their backward."""
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
        self.saved = SavedActivations(device, self.h2d, self.d2h, self.ledger)
        """What forwards left for their backward."""
        self.sites = Sites()
        """Where graphs find the parameters."""
        self.eager_reads = EagerReads()
        """Copies of parameters that eager code has read."""
        self.roots: tuple[weakref.ref[torch.nn.Module], ...] = ()
        """The models whose parameters these are."""
        self.gradients = GradientAccumulator(
            name,
            self.h2d,
            self.d2h,
            device=device,
            ledger=self.ledger,
            saved=self.saved,
            bucket_of=self._bucket_of,
            ranks=ranks,
        )
        self.num_calls = 0
        """Forwards that all ranks have run together: their number is the same on each."""
        self.nothing = torch.empty(0, device=device)
        """What a forward hands to autograd in place of a value that its plan does not keep on the device."""

    def regions_for(self, inner: str) -> RegionCompiler:
        """Return the compiler of this model's regions that uses `inner`."""
        return self._regions.setdefault(inner, RegionCompiler(inner))

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
            if self._is_in_force(spec, placement):
                continue
            current = self._buckets.get(spec.id)
            if not may_adopt or (current is not None and not current.is_outdated()):
                return False
        return True

    def _is_in_force(self, spec: Bucket, placement: Placement) -> bool:
        current = self._buckets.get(spec.id)
        return current is not None and (current.spec, current.placement) == (spec, placement)

    def running(self, slot: Slot) -> RunningBucket | None:
        """Return the bucket that holds `slot`, or None while no plan names it."""
        return self._bucket_of.get(slot.key)

    def in_use_order(self, buckets: Iterable[RunningBucket]) -> list[RunningBucket]:
        """Return `buckets` of this executor in the order in which a forward first reads them."""
        wanted = set(buckets)
        return [bucket for bucket in self._buckets.values() if bucket in wanted]

    def check_same_op(self, slot: Slot) -> None:
        """Return when every rank is about to gather this parameter; RanksDiffer where one does something else."""
        self.ranks.control.check_same_op(slot.name, "a parameter")

    def await_update(self, slot: Slot) -> None:
        """Wait for a queued update of the slot's bucket; raises what failed in it."""
        if (bucket := self._bucket_of.get(slot.key)) is not None:
            bucket.await_update()

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
                bucket.await_update()
            self._buckets.clear()
            self._bucket_of.clear()
        new: list[tuple[Bucket, Placement, list[Slot]]] = []
        for spec, placement in zip(buckets, placements, strict=True):
            if not self._is_in_force(spec, placement):
                new.append((spec, placement, [self.slots[name] for name in spec.params]))
        moved = [slot for _, _, slots in new for slot in slots]
        self.drop_buckets_of(moved)
        moving = [slot for _, placement, slots in new if placement.param is Tier.HOST for slot in slots]
        check_move(moving, self.slots.values(), self.sites)
        for spec, placement, slots in new:
            self._run_bucket(spec, placement, slots)
        if moved:
            self.saved.drop_free_slabs()
        let_state_follow([slot.param for slot in moved])

    def _run_bucket(self, spec: Bucket, placement: Placement, slots: Sequence[Slot]) -> None:
        """Put `slots` in their home, and let a new bucket be the one of `spec`."""
        bucket = new_bucket(spec, placement, slots, pin=self.device.type == "cuda", ranks=self.ranks)
        bucket.move_home(self.device)
        bucket.disk = self.disk
        self._buckets[spec.id] = bucket
        self._bucket_of.update((slot.key, bucket) for slot in slots)

    @torch.no_grad()
    def take_in_replaced(self) -> None:
        """Before a forward, and before its plan is put in force: read parameters that were replaced since the last one,
        and bring them home. Raises ParameterReplaced where the graph cannot."""
        taken = taken_in(self.sites, self.saved.next_number)
        if taken:
            for gate in self.gates:
                gate.disconnect()
            buckets = dict.fromkeys(self._bucket_of[slot.key] for slot in taken if slot.key in self._bucket_of)
            for bucket in buckets:
                bucket.await_update()
            moving = [slot for bucket in buckets if bucket.is_on_host for slot in bucket.slots]
            check_move(moving, self.slots.values(), self.sites)
            for bucket in buckets:
                self._run_bucket(bucket.spec, bucket.placement, bucket.slots)
            self.generation += 1
            let_state_follow([slot.param for slot in self.slots.values()])

    def forget_parameters(self) -> None:
        """Forget the parameters and their homes, because another executor takes them over; no graph runs here again."""
        for slot in self.slots.values():
            forget(slot)
        self.gates.clear()
        self.slots.clear()
        self.sites.clear()
        self._buckets.clear()
        self._bucket_of.clear()

    def drop_buckets_of(self, slots: Iterable[Slot]) -> None:
        """Take the buckets that hold any of `slots` out of force; parameters stay where they are."""
        self.generation += 1
        for old in {self._bucket_of.pop(slot.key) for slot in slots if slot.key in self._bucket_of}:
            old.await_update()
            if self._buckets.get(old.spec.id) is old:  # and not a new bucket that has the same name
                del self._buckets[old.spec.id]

    def move(self, buckets: Iterable[Bucket], placements: Iterable[Placement]) -> None:
        """Between two training steps: put `buckets` in force under new placements; what leaves the device goes before
        what comes back."""
        pairs = zip(buckets, placements, strict=True)
        in_order = sorted(pairs, key=lambda pair: pair[1].param is Tier.DEVICE)
        self.adopt([bucket for bucket, _ in in_order], [home for _, home in in_order], for_training=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Before a forward: drop what a failed backward left, and put parameters that were moved back in their home."""
        if self.gradients.is_in_backward and compat.backward_pass_id() == -1:
            # Its end never came: an exception outside of our programs, in another autograd function.
            self.abandon()
        if self._departing:
            self.d2h.synchronize()
            self._departing.clear()
        self.saved.begin()
        self.eager_reads.check()
        # Nothing here reads what a queued update writes.
        with torch.DisableTorchFunctionSubclass():
            for slot in self.slots.values():
                slot.follow_thaw()
            self.check_updates()
            drifted = [bucket for bucket in self._buckets.values() if bucket.has_drifted()]
            moving = [slot for bucket in drifted if bucket.is_on_host for slot in bucket.slots]
            check_move(moving, self.slots.values(), self.sites)
            for bucket in drifted:
                bucket.move_home(self.device)
                self.generation += 1

    def check_updates(self) -> None:
        """Raise what failed in a queued update, if that is known already."""
        for bucket in self._buckets.values():
            bucket.check_update()

    def end(self) -> None:
        """After a program: let go of the host's parameters, which anybody may write once it has returned.

        Costs no overlap: compute behind the last gather is queued already.
        """
        self.h2d.synchronize()

    # The verbs of a program.

    @torch.no_grad()
    def gather(self, bucket_id: BucketId) -> Transfer:
        """Start copying the parameters of a host bucket to the device, behind an update that is queued."""
        return self._gathers.begin(self._buckets[bucket_id])

    def wait(self, transfer: Transfer) -> tuple[torch.Tensor, ...]:
        """Let compute issued from now on run behind `transfer`; return what it brought. Raises what failed in an update
        that it was to follow."""
        wait_on_compute(transfer.ensure_issued(), self.device)
        transfer.kept = ()
        if isinstance(transfer, ShardReduce):
            self.gradients.close(transfer.bucket, Verb.REDUCE)
        return transfer.values

    def whole(self, bucket_id: BucketId) -> tuple[torch.Tensor, ...]:
        """Return the parameters of a bucket that is on the device."""
        bucket = self._buckets[bucket_id]
        bucket.await_update()
        if not bucket.is_whole():
            # A resident bucket whose copy an exception or another backward took away.
            self.wait(self.gather(bucket_id))
        return bucket.whole

    def release(self, bucket_id: BucketId) -> None:
        """Drop the gathered copy of a host bucket; its memory is free when the last region that reads it lets go."""
        with self.ledger.span(Lane.COMPUTE, f"release {bucket_id}"):
            self._buckets[bucket_id].release()
        self.gradients.close(self._buckets[bucket_id], Verb.RELEASE)

    def reduce(self, bucket_id: BucketId, params: Sequence[int], grads: list[torch.Tensor]) -> Transfer | None:
        """Take gradients that a backward made; see `GradientAccumulator.reduce`."""
        return self.gradients.reduce(self._buckets[bucket_id], params, grads)

    def offload(self, bucket_id: BucketId) -> Transfer:
        """Start copying the gradients of a host bucket to the host."""
        return self.gradients.offload(self._buckets[bucket_id])

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
        number, *versions = ticket.tolist()
        self.sites.check_forward(number)
        for name, before, now in zip(names, versions, self._versions(names), strict=True):
            if before != now:
                raise StaleParameters(name)
        self.gradients.begin_backward()

    def abandon(self) -> None:
        """After an exception: drop gathered copies and gradients that were on their way."""
        self._gathers.call_off()
        if self.ranks is not None:
            self.ranks.drain()
        # Their memory must not be used again while a copy still reads or writes it.
        self.h2d.synchronize()
        self.d2h.synchronize()
        self.saved.begin()
        self.gradients.abandon()
        for bucket in self._buckets.values():
            bucket.release()

    def _versions(self, names: Sequence[str]) -> list[int]:
        return [self.slots[name].version for name in names]
