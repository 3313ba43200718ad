"""Put the buckets of plans in force: their parameters move to the homes in the placements.

adopt             a plan begins: new buckets, parameters in their homes
take_replaced     the user replaced a parameter: the slot takes the new one, and its bucket moves home again
return_drifted    user code moved parameters: they go back home

Gradients have the home of their parameters. Optimizer state has a home of its own, to which `optim.state` moves it.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import (
    ElixirWarning,
    ParameterReplaced,
    UnsupportedModel,
    UnsupportedWrapper,
)
from elixir_compile.compat.platforms import platform_of
from elixir_compile.graph.capture.modules import Sites, retire
from elixir_compile.graph.ops.optimizers import let_state_follow
from elixir_compile.graph.ops.registry import Slot, aliases, held_by_others
from elixir_compile.ir import Bucket, BucketId, BucketRef, Placement, Plan, Tier, Verb, label
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.distributed.sharded import new_bucket
from elixir_compile.runtime.lanes import Lanes
from elixir_compile.runtime.recording import Ledger
from elixir_compile.runtime.saved import SavedActivations


class PlacedBuckets:
    """The buckets in force of an executor, each with its parameters in their home."""

    def __init__(
        self,
        lanes: Lanes,
        ranks: Ranks | None,
        slots: Mapping[str, Slot],
        sites: Sites,
        saved: SavedActivations,
        ledger: Ledger,
    ) -> None:
        """`slots` holds all slots of the executor by name, and `sites` the places at which graphs find their
        parameters. `ranks` share the parameters, None if this process trains alone. `ledger` times what waits for a
        queued update."""
        self.generation = 0
        """Grows when buckets or homes change; programs and optimizer state of an older generation are made again."""
        self.disk: tuple[Path, bool] | None = None
        """See `RunningBucket.disk`."""
        self.reads_loaded_files = True
        """See `RunningBucket.reads_loaded_files`; False as soon as a graph of the model has `frozen_files=False`."""
        self._lanes = lanes
        self._ranks = ranks
        self._slots = slots
        self._sites = sites
        self._saved = saved
        self._ledger = ledger
        self._serves_training = False
        self._by_id: dict[BucketId, RunningBucket] = {}
        self._by_slot: dict[int, RunningBucket] = {}

    def __getitem__(self, bucket_id: BucketId) -> RunningBucket:
        return self._by_id[bucket_id]

    def __iter__(self) -> Iterator[RunningBucket]:
        return iter(self._by_id.values())

    def of(self, slot: Slot) -> RunningBucket | None:
        """Return the bucket in force with `slot`, or None if no plan manages the parameter."""
        return self._by_slot.get(slot.key)

    def in_use_order(self, buckets: Iterable[RunningBucket]) -> list[RunningBucket]:
        """Return those of `buckets` that are in force, in the order in which a forward first reads them."""
        wanted = set(buckets)
        return [bucket for bucket in self if bucket in wanted]

    def in_force(self, *, for_training: bool) -> tuple[tuple[Bucket, Placement], ...]:
        """Return the buckets in force with their placements; with `for_training`, only buckets made for training."""
        if for_training and not self._serves_training:
            return ()
        return tuple((bucket.spec, bucket.placement) for bucket in self if not (for_training and bucket.is_outdated()))

    def agree(self, buckets: Iterable[Bucket], placements: Iterable[Placement], *, may_adopt: bool) -> bool:
        """Whether `buckets` are in force with `placements`; with `may_adopt`, also if no bucket in force conflicts."""
        for spec, placement in zip(buckets, placements, strict=True):
            if self._is_in_force(spec, placement):
                continue
            current = self._by_id.get(spec.id)
            if not may_adopt or (current is not None and not current.is_outdated()):
                return False
        return True

    def _is_in_force(self, spec: Bucket, placement: Placement) -> bool:
        current = self._by_id.get(spec.id)
        return current is not None and (current.spec, current.placement) == (spec, placement)

    # Queued updates.

    def await_update(self, slot: Slot) -> None:
        """Wait for queued updates of the slot's bucket. Raises the exception of a failed update."""
        if (bucket := self._by_slot.get(slot.key)) is not None:
            bucket.queued.wait()

    def check_updates(self) -> None:
        """Raise the exception of a queued update if one has already failed; return at once otherwise."""
        for bucket in self:
            bucket.queued.check()

    def schedule_updates(self, plan: Plan, closing: Mapping[BucketId, Verb]) -> None:
        """Set for each bucket of `plan`, which is in force, its update mode and the verb that closes its gradients.

        `closing` holds this verb by bucket; see `RunningBucket.closes`.
        """
        for bucket in plan.buckets:
            self._by_id[bucket.id].update = plan.update
            self._by_id[bucket.id].closes = closing.get(bucket.id)

    # Moves.

    @torch.no_grad()
    def adopt(self, buckets: Iterable[Bucket], placements: Iterable[Placement], *, for_training: bool) -> None:
        """Put `buckets` in force and move their parameters to the homes in `placements`; other buckets stay in force.

        The first call with `for_training` drops all buckets made for inference.
        """
        if for_training and not self._serves_training:
            self._serves_training = True
            for queued in [bucket.queued for bucket in self]:  # a local bucket would hold the memory of its parameters
                queued.wait()
            self.forget()
        new: list[tuple[Bucket, Placement, list[Slot]]] = []
        for spec, placement in zip(buckets, placements, strict=True):
            if not self._is_in_force(spec, placement):
                new.append((spec, placement, [self._slots[name] for name in spec.params]))
        moved = [slot for _, _, slots in new for slot in slots]
        if moved:  # memory of their buckets may go, and parameters that the host has updated may still leave it
            self._lanes.h2d.synchronize()
            self._lanes.d2h.synchronize()
        self.drop(moved)
        self._check_move((slot, home) for _, home, slots in new for slot in slots)
        for _, placement, slots in new:
            if placement.param is Tier.DEVICE:
                refuse_lost_hooks(slots, self._lanes.device.type)
        for spec, placement, slots in new:
            self._place(spec, placement, slots)
        if moved:
            self._saved.drop_free_slabs()
        let_state_follow([slot.param for slot in moved])

    def move(self, buckets: Iterable[Bucket], placements: Iterable[Placement]) -> None:
        """Put `buckets` in force under new placements, between two steps, for training if the buckets in force are.

        Buckets that leave the device move first, so that the others find free memory there.
        """
        pairs = zip(buckets, placements, strict=True)
        in_order = sorted(pairs, key=lambda pair: pair[1].param is Tier.DEVICE)
        self.adopt(
            [bucket for bucket, _ in in_order], [home for _, home in in_order], for_training=self._serves_training
        )
        # What left the device leaves holes between tensors that stay, and no large tensor fits a hole.
        platform_of(self._lanes.device).empty_cache()

    @torch.no_grad()
    def place_replaced(self, replaced: Sequence[Slot]) -> None:
        """Move the parameters that the slots `replaced` have taken to their homes, with all others in their buckets."""
        buckets = dict.fromkeys(bucket for slot in replaced if (bucket := self.of(slot)) is not None)
        for bucket in buckets:
            bucket.queued.wait()
        self._check_move((slot, bucket.placement) for bucket in buckets for slot in bucket.slots)
        for bucket in buckets:
            self._place(bucket.spec, bucket.placement, bucket.slots)
        self.generation += 1
        let_state_follow([slot.param for slot in self._slots.values()])

    def return_drifted(self) -> None:
        """Move parameters home that user code moved elsewhere since they were placed."""
        drifted = [bucket for bucket in self if bucket.has_drifted()]
        for bucket in drifted:
            bucket.gathered = None  # no user code holds this memory
        self._check_move((slot, bucket.placement) for bucket in drifted for slot in bucket.slots)
        for bucket in drifted:
            self._move_home(bucket)
            self.generation += 1

    def drop(self, slots: Iterable[Slot]) -> None:
        """Remove from force the buckets that hold any of `slots`; their parameters stay in their current memory."""
        self.generation += 1
        for old in {self._by_slot.pop(slot.key) for slot in slots if slot.key in self._by_slot}:
            old.queued.wait()
            if self._by_id.get(old.spec.id) is old:  # a new bucket of the same name may be in force already
                del self._by_id[old.spec.id]

    def forget(self) -> None:
        """Remove all buckets from force."""
        self._by_id.clear()
        self._by_slot.clear()

    def _place(self, spec: Bucket, placement: Placement, slots: Sequence[Slot]) -> None:
        """Put a new bucket for `spec` in force, and move the parameters of `slots` to its home."""
        bucket = new_bucket(spec, placement, slots, pin=self._lanes.pins, ranks=self._ranks)
        bucket.disk, bucket.reads_loaded_files = self.disk, self.reads_loaded_files
        self._move_home(bucket)
        for slot in slots:
            slot.is_updated_in_file = spec.trainable and placement.param is Tier.DISK
        bucket.queued.waiting = functools.partial(self._ledger.waits, label(Verb.WAIT, BucketRef(spec.id)))
        self._by_id[spec.id] = bucket
        self._by_slot.update((slot.key, bucket) for slot in slots)

    def _move_home(self, bucket: RunningBucket) -> None:
        bucket.queued.wait()
        self._lanes.touches([slot.own for slot in bucket.slots])
        bucket.move_home(self._lanes.device)

    def _check_move(self, homes: Iterable[tuple[Slot, Placement]]) -> None:
        to_host: list[Slot] = []
        settling: list[Slot] = []
        for slot, home in homes:
            if home.param is not Tier.DEVICE:
                to_host.append(slot)
            elif compat.is_lazy(slot.own):
                settling.append(slot)
        check_move(to_host, self._slots.values(), self._sites, settling)


def check_move(leaving: Sequence[Slot], slots: Iterable[Slot], sites: Sites, settling: Sequence[Slot] = ()) -> None:
    """Find users of the old memory of parameters before they move: raise an error, or warn.

    `leaving` are the slots, among all `slots` of the model, whose parameters get new memory on the host, and `settling`
    those whose parameters have a lazy bit and get memory on the device for their values.

    Raises ParameterReplaced if a moving parameter shares memory with another parameter; the step is captured again with
    both unmanaged. Raises UnsupportedModel if a moving parameter changes its device and its autograd node may have
    hooks.
    """
    moving = [*leaving, *settling]
    if not moving:
        return
    named = [(slot.name, slot.param) for slot in slots]
    found = aliases(named)
    for slot in moving:
        if slot.name in found:
            retire(sites)
            raise ParameterReplaced(slot.name, f"it shares memory with {found[slot.name]}")
    refuse_lost_hooks(leaving, "cpu")
    held = held_by_others(named)
    _warn_of_holders([name for name in held if name in {slot.name for slot in leaving}], "move to the host")
    _warn_of_holders([name for name in held if name in {slot.name for slot in settling}], "get memory of their own")


def refuse_lost_hooks(moving: Iterable[Slot], device_type: str) -> None:
    """Raise UnsupportedModel if a parameter of `moving` changes to another type of device, `device_type`, and its
    autograd node may have hooks: the parameter gets another node there. Raises UnsupportedWrapper if they are those of
    DistributedDataParallel."""
    for slot in moving:
        if slot.own.device.type == device_type or not slot.has_node_holders:
            continue
        because = f"it moves to {device_type} and gets another autograd node there, but"
        if slot.is_reduced:
            because += " the hooks that reduce its gradient are on its present node"
            raise UnsupportedWrapper(slot.name, "DistributedDataParallel", because)
        because += " other code holds its present node, whose hooks would not be called"
        instead = "Use `param.register_post_accumulate_grad_hook`, which moves along"
        raise UnsupportedModel(slot.name, f"{because}. {instead}")


def _warn_of_holders(names: Sequence[str], event: str) -> None:
    """Warn that tensors other than parameters keep the memory that the parameters `names` leave in `event`."""
    if names:
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"{some} {event}, and other tensors hold the memory they leave, such as an earlier "
            "`model.state_dict()` or `param.data`. These tensors do not follow the training and keep that memory "
            "allocated. Take them again after the first step, or delete them before it.",
            ElixirWarning,
            stacklevel=2,
        )


def take_replaced(sites: Sites, next_forward: int) -> list[Slot]:
    """Make graphs read the parameters with which users replaced others, and return the slots of these parameters.

    The new parameters are not in their home yet: see `PlacedBuckets.place_replaced`. `next_forward` is the number of
    the next forward.

    Raises ParameterReplaced if no graph can read the new value; the step is captured again then.
    """
    moved = sites.moved()
    for site in moved:
        there = site.found()
        if sites.may_take(site.slot, there):
            continue
        is_param = isinstance(site.slot.param, nn.Parameter)
        if is_param and isinstance(there, torch.Tensor) and not isinstance(there, nn.Parameter):
            raise ParameterReplaced(site.slot.name, "a plain tensor is in its place", is_temporary=True)
        retire(sites)
        raise ParameterReplaced(site.slot.name, "it is gone" if there is None else "another is in its place")
    return list(sites.take(moved, next_forward))
