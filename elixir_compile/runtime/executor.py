"""Run the actions of a schedule: each prepared model has one executor.

A program (see `rewrite`) calls the verbs of `Executor` in schedule order. `gather` and `offload` start a copy and
return a `Transfer`; `wait` takes the transfer. The executor owns every gathered copy, and its `GradientAccumulator`
owns every gradient from its op to `param.grad`. No other object holds them, so `abandon` can clean up after a program
that raised an exception.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.errors import StaleParameters
from elixir_compile.ir import Bucket, BucketId, Lane, Placement, Plan, Tier, Verb
from elixir_compile.ops.gather import Gate
from elixir_compile.ops.reads import EagerReads, Sites
from elixir_compile.ops.registry import Slot, forget, let_state_follow, new_slot, slot_of
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.distributed.sharded import ShardReduce, new_bucket
from elixir_compile.runtime.gathers import Gathers
from elixir_compile.runtime.gradients import GradientAccumulator
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.runtime.parameters import adopt_replaced, check_move
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.runtime.streams import CopyStream, Transfer, wait_on_compute


class Executor:
    """The parameters of a model, their homes, and the verbs of its programs, on `device`."""

    def __init__(self, device: torch.device, name: str, ranks: Ranks | None = None) -> None:
        """`name` is the name of the model in messages; `ranks` train it together, None if this process trains alone."""
        self.device = device
        self.name = name
        self.ranks = ranks
        self.compilations: list[Any] = []
        """The records of the graphs that run on this executor, in order of capture."""
        self.gates: list[Gate] = []
        """The autograd nodes between the graphs and the parameters; compiled code holds them weakly."""
        self.ledger = Ledger(device_type=device.type)
        self.slots: dict[str, Slot] = {}
        self.unmanaged_because: dict[str, str] = {}
        """The reason why no plan can move a parameter, by the name of the unmanaged parameter."""
        self.generation = 0
        """Grows when buckets or homes change; programs and optimizer state of an older generation are made again."""
        self.is_crowded = False
        """Whether a forward found too little device memory beside the activations of outstanding forwards."""
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
        """The activations of outstanding forwards."""
        self.sites = Sites()
        """The modules and attribute names at which graphs find the parameters."""
        self.eager_reads = EagerReads()
        """Copies of parameters that eager code has read."""
        self.roots: tuple[weakref.ref[torch.nn.Module], ...] = ()
        """The models that the parameters belong to."""
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
        """How many forwards all ranks have run together; the same number on each rank."""
        self.nothing = torch.empty(0, device=device)
        """The placeholder that a forward saves for autograd instead of a value that the plan keeps off the device."""

    def regions_for(self, inner: str) -> RegionCompiler:
        """Return the compiler of this model's regions for the inner backend `inner`."""
        return self._regions.setdefault(inner, RegionCompiler(inner))

    def slot_for(self, param: torch.nn.Parameter) -> Slot | None:
        """Return the slot of `param` in this executor, or None."""
        slot = slot_of(param)
        return slot if slot is not None and slot.sink is self else None

    def add_slot(self, name: str, param: torch.nn.Parameter) -> Slot:
        """Return the slot of `param`, called `name` in the model; make the slot on the first call for `param`."""
        slot = self.slot_for(param)
        if slot is None:
            slot = self.slots[name] = new_slot(name, param, self.device, self)
        return slot

    def buckets_in_force(self, *, for_training: bool) -> tuple[tuple[Bucket, Placement], ...]:
        """Return the buckets in force with their placements; with `for_training`, only buckets made for training."""
        if for_training and not self._serves_training:
            return ()
        buckets = self._buckets.values()
        return tuple(
            (bucket.spec, bucket.placement) for bucket in buckets if not (for_training and bucket.is_outdated())
        )

    def agrees(self, buckets: Iterable[Bucket], placements: Iterable[Placement], *, may_adopt: bool) -> bool:
        """Whether `buckets` are in force with `placements`; with `may_adopt`, also if no bucket in force conflicts."""
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
        """Return the bucket in force with `slot`, or None if no plan manages the parameter."""
        return self._bucket_of.get(slot.key)

    def in_use_order(self, buckets: Iterable[RunningBucket]) -> list[RunningBucket]:
        """Return `buckets` of this executor in the order in which a forward first reads them."""
        wanted = set(buckets)
        return [bucket for bucket in self._buckets.values() if bucket in wanted]

    def check_same_op(self, slot: Slot) -> None:
        """Wait until every rank is about to gather this parameter. Raises RanksDiffer if a rank does something else."""
        assert self.ranks is not None, "only a parameter that several ranks share is gathered by all of them"
        self.ranks.control.check_same_op(slot.name, "a parameter")

    def await_update(self, slot: Slot) -> None:
        """Wait for queued updates of the slot's bucket. Raises the exception of a failed update."""
        if (bucket := self._bucket_of.get(slot.key)) is not None:
            bucket.await_update()

    def keep_until_gone(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep `tensors`, which copies on `d2h` read, alive until the next forward; it waits for the copies."""
        self._departing += tensors

    def schedule_updates(self, plan: Plan, closing: Mapping[BucketId, Verb]) -> None:
        """Set for each bucket of `plan`, which is in force, its update mode and the verb that closes its gradients.

        `closing` holds this verb by bucket; see `RunningBucket.closes`.
        """
        for bucket in plan.buckets:
            self._buckets[bucket.id].update = plan.update
            self._buckets[bucket.id].closes = closing.get(bucket.id)

    @torch.no_grad()
    def adopt(self, buckets: Iterable[Bucket], placements: Iterable[Placement], *, for_training: bool) -> None:
        """Put `buckets` in force and move their parameters to the homes in `placements`; other buckets stay in force.

        The first call with `for_training` drops all buckets made for inference.
        """
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
        """Put a new bucket for `spec` in force, and move the parameters of `slots` to its home."""
        bucket = new_bucket(spec, placement, slots, pin=self.device.type == "cuda", ranks=self.ranks)
        bucket.move_home(self.device)
        bucket.disk = self.disk
        self._buckets[spec.id] = bucket
        self._bucket_of.update((slot.key, bucket) for slot in slots)

    @torch.no_grad()
    def adopt_replaced(self) -> None:
        """Make graphs read parameters that users replaced since the last forward, and move these to their homes.

        Runs before each forward, and before its plan is put in force. Raises ParameterReplaced if the graphs cannot
        read a new parameter.
        """
        replaced = adopt_replaced(self.sites, self.saved.next_number)
        if replaced:
            for gate in self.gates:
                gate.disconnect()
            buckets = dict.fromkeys(self._bucket_of[slot.key] for slot in replaced if slot.key in self._bucket_of)
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
        """Remove from force the buckets that hold any of `slots`; their parameters stay in their current memory."""
        self.generation += 1
        for old in {self._bucket_of.pop(slot.key) for slot in slots if slot.key in self._bucket_of}:
            old.await_update()
            if self._buckets.get(old.spec.id) is old:  # a new bucket of the same name may be in force already
                del self._buckets[old.spec.id]

    def move(self, buckets: Iterable[Bucket], placements: Iterable[Placement]) -> None:
        """Put `buckets` in force under new placements, between two training steps.

        Buckets that leave the device move first, so that the others find free memory there.
        """
        pairs = zip(buckets, placements, strict=True)
        in_order = sorted(pairs, key=lambda pair: pair[1].param is Tier.DEVICE)
        self.adopt([bucket for bucket, _ in in_order], [home for _, home in in_order], for_training=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Clean up after a failed backward, and return parameters to their home if user code moved them.

        Runs before each forward.
        """
        if self.gradients.is_in_backward and compat.backward_pass_id() == -1:
            # An autograd function of other code raised an exception, so the end of the backward never ran.
            self.abandon()
        if self._departing:
            self.d2h.synchronize()
            self._departing.clear()
        self.saved.begin()
        self.eager_reads.check()
        # The block reads addresses and flags, not values that a queued update writes.
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
        """Raise the exception of a queued update if one has already failed; return at once otherwise."""
        for bucket in self._buckets.values():
            bucket.check_update()

    def end(self) -> None:
        """Wait until no copy reads parameters on the host, because user code may write them after the program returns.

        This costs no overlap: the compute after the last gather is queued already.
        """
        self.h2d.synchronize()

    # The verbs of a program.

    @torch.no_grad()
    def gather(self, bucket_id: BucketId) -> Transfer:
        """Start copying the parameters of a host bucket to the device, after its queued updates."""
        return self._gathers.begin(self._buckets[bucket_id])

    def wait(self, transfer: Transfer) -> tuple[torch.Tensor, ...]:
        """Make compute issued from now on wait for `transfer`, and return its tensors.

        Raises the exception of an update before the transfer if the update failed.
        """
        wait_on_compute(transfer.ensure_issued(), self.device)
        transfer.kept = ()
        if isinstance(transfer, ShardReduce):
            self.gradients.close(transfer.bucket, Verb.REDUCE)
        return transfer.values

    def whole(self, bucket_id: BucketId) -> tuple[torch.Tensor, ...]:
        """Return the parameters of a bucket whose home is the device, or which is resident there."""
        bucket = self._buckets[bucket_id]
        bucket.await_update()
        copy = bucket.current_copy()
        # A resident bucket has no copy if an exception or another backward released it.
        return self.wait(self.gather(bucket_id)) if copy is None else copy

    def release(self, bucket_id: BucketId) -> None:
        """Drop the gathered copy of a host bucket; its memory is free after the last region with a view of it."""
        with self.ledger.span(Lane.COMPUTE, f"release {bucket_id}"):
            self._buckets[bucket_id].release()
        self.gradients.close(self._buckets[bucket_id], Verb.RELEASE)

    def reduce(self, bucket_id: BucketId, params: Sequence[int], grads: list[torch.Tensor]) -> Transfer | None:
        """Add gradients of a bucket, average them over ranks; see `GradientAccumulator.reduce`."""
        return self.gradients.reduce(self._buckets[bucket_id], params, grads)

    def offload(self, bucket_id: BucketId) -> Transfer:
        """Start copying the gradients of a host bucket to the host."""
        return self.gradients.offload(self._buckets[bucket_id])

    @torch.no_grad()
    def offload_saved(self, group: str, values: Sequence[torch.Tensor]) -> Transfer:
        """Start copying `values`, activations of the running forward, to the host as the group `group`."""
        return self.saved.offload(group, values)

    def leaving(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Return the offload of `group` that the forward of `ticket` started."""
        return self.saved.leaving(ticket, group)

    @torch.no_grad()
    def prefetch(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Start copying `group`, activations of the forward of `ticket`, to the device."""
        return self.saved.prefetch(ticket, group)

    def ticket(self, names: Sequence[str]) -> torch.Tensor:
        """End a forward and return its ticket: its number and the versions of the parameters `names`, for `check`."""
        return self.saved.ticket(self._versions(names), self.num_calls)

    def check(self, ticket: torch.Tensor, names: Sequence[str]) -> None:
        """Begin the backward of the forward of `ticket`, which reads the parameters `names`.

        Raises StaleParameters if any of them changed since the forward.
        """
        number, *versions = ticket.tolist()
        self.sites.check_forward(number)
        for name, before, now in zip(names, versions, self._versions(names), strict=True):
            if before != now:
                raise StaleParameters(name)
        self.gradients.begin_backward()

    def abandon(self) -> None:
        """Drop gathered copies, unpublished gradients and transfers in flight; called after an exception."""
        self._gathers.call_off()
        if self.ranks is not None:
            self.ranks.drain()
        # Memory must not be used again while a copy still reads or writes it.
        self.h2d.synchronize()
        self.d2h.synchronize()
        self.saved.begin()
        self.gradients.abandon()
        for bucket in self._buckets.values():
            bucket.release()

    def _versions(self, names: Sequence[str]) -> list[int]:
        return [self.slots[name].version for name in names]


def executor_of_slot(slot: Slot) -> Executor:
    """Return the executor that owns `slot`; `ops` knows it only as a `SlotOwner`."""
    assert isinstance(slot.sink, Executor)
    return slot.sink
