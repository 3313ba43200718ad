"""Find the gradients and the offloaded activations that each region of a plan touches."""

from collections.abc import Mapping
from dataclasses import dataclass

from elixir_compile.ir import GradientRef, GroupRef, Phase, Plan, RegionId, Saving, StepGraph, StorageId, Target
from elixir_compile.step.lifecycles import Event
from elixir_compile.step.slices import arrived_name, leaving_name, offloaded_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """An access of a region to the gradient of a bucket, or to a group of offloaded activations."""

    event: Event
    target: Target
    is_written: bool
    """Whether an op of the region writes a whole storage of the target."""
    is_whole: bool
    """Whether the region touches whole storages of the target, and not only slices."""
    leaves: bool = False
    """Whether the region makes storages of the group that leave the device in slices."""
    arrives: bool = False
    """Whether the region reads storages of the group that arrive on the device in slices."""


def region_touches(step: StepGraph, plan: Plan) -> Mapping[RegionId, tuple[Touch, ...]]:
    """Return the gradients and the offloaded activations touched by the ops of each region.

    A region completes a gradient if no later region writes it, and activations if no later region of the forward
    touches them.
    """
    grads, groups = _gradient_owners(step, plan), _offloaded(plan)
    leaving, arriving = _slice_names(plan)
    owners: dict[StorageId, Target] = {**grads, **groups}
    index = {op.id: number for number, op in enumerate(step.ops)}
    touched: dict[RegionId, dict[Target, set[StorageId]]] = {}
    written: dict[RegionId, set[Target]] = {}
    completed_by: dict[Target, RegionId] = {}
    for region in plan.regions:
        ops = step.ops[index[region.first] : index[region.last] + 1]
        found = touched[region.id] = {}
        for op in ops:
            for name in (*op.reads, *op.writes):
                if name in owners:
                    found.setdefault(owners[name], set()).add(name)
        written[region.id] = {owners[name] for op in ops for name in op.writes if name in owners}
        completed_by |= {target: region.id for target in written[region.id] if isinstance(target, GradientRef)}
        if region.phase is Phase.FORWARD:
            completed_by |= {target: region.id for target in found if isinstance(target, GroupRef)}
    return {
        region: tuple(
            Touch(
                event=Event.COMPLETE if completed_by.get(target) == region else Event.RUN,
                target=target,
                is_written=target in written[region],
                is_whole=not names <= leaving | arriving,
                leaves=not names.isdisjoint(leaving),
                arrives=not names.isdisjoint(arriving),
            )
            for target, names in found.items()
        )
        for region, found in touched.items()
    }


def _gradient_owners(step: StepGraph, plan: Plan) -> Mapping[StorageId, GradientRef]:
    owners = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
    return {s.id: GradientRef(owners[s.of]) for s in step.storages if s.of is not None and s.of in owners}


def _offloaded(plan: Plan) -> Mapping[StorageId, GroupRef]:
    return {name: GroupRef(group) for name, group in offloaded_names(plan.activations).items()}


def _slice_names(plan: Plan) -> tuple[frozenset[StorageId], frozenset[StorageId]]:
    """Return the storages of slices that leave the device, and the storages of slices that arrive there."""
    names = [name for group in plan.activations if group.saving is Saving.OFFLOAD for name in group.storages]
    return frozenset(map(leaving_name, names)), frozenset(map(arrived_name, names))
