"""Find when each storage of a graph is live and each bucket is gathered, and group saved activations by the layer that
reads them and by what recomputes them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from elixir_compile.ir import (
    Action,
    Batched,
    Bucket,
    BucketId,
    BucketRef,
    GradientRef,
    GroupId,
    GroupRef,
    Kind,
    Op,
    OpId,
    Phase,
    Placement,
    Plan,
    Region,
    RegionId,
    RegionRef,
    StepGraph,
    StorageId,
    Target,
    Tier,
    Verb,
)
from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.step.as_run import given_storages, makers, saved_storages, stale_reads

# ----------------------------------------------------------------------------------------------------------------------
# Find the ops at which each storage of a graph is live if nothing is moved.
#
#   op        0    1    2    3    4    5 (update)
#   param     ------------------------------      the whole step; input, buffer and optimizer state too
#   saved          ----------------               first write to last use
#   temp           -----                          an output of the forward: at least to the forward's last op. A loss
#                                                 with the storage of its inputs: to the backward's last op
#   grad                     ---------------      first write to the end of the step
#
# A storage is live at every op from its first to its last touch, both included. If a plan moves it, `plan_timeline`
# shortens its life.


_WHILE_NEEDED = (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED, Kind.GRAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Op indices between which a storage is live, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The life of every storage of a graph, if it has one."""

    ops: tuple[OpId, ...]
    lives: Mapping[StorageId, Life]
    """Temporary, saved and gradient storages untouched by any op are never allocated, and are not listed."""


def liveness(graph: StepGraph) -> Liveness:
    """Return the life of every storage of `graph`."""
    firsts: dict[StorageId, int] = {}
    lasts: dict[StorageId, int] = {}
    for index, op in enumerate(graph.ops):
        for name in (*op.reads, *op.writes):
            firsts.setdefault(name, index)  # the first op that touches a storage allocates it
            lasts[name] = index
    end = len(graph.ops) - 1
    forward_end = max((index for index, op in enumerate(graph.ops) if op.phase is Phase.FORWARD), default=-1)
    run_end = max((index for index, op in enumerate(graph.ops) if op.phase is not Phase.UPDATE), default=-1)
    outputs = frozenset(graph.outputs)
    lives: dict[StorageId, Life] = {}
    for storage in graph.storages:
        name = storage.id
        if storage.kind not in _WHILE_NEEDED:
            lives[name] = Life(first=0, last=end)
        elif name in firsts:
            last = end if storage.kind is Kind.GRAD else lasts[name]
            if name in outputs:
                # The caller of `backward` holds the loss. No plan counts its 4 bytes, but kernels may give it more.
                last = max(last, run_end if storage.traced else forward_end)
            lives[name] = Life(first=firsts[name], last=last)
    return Liveness(ops=tuple(op.id for op in graph.ops), lives=lives)


# ----------------------------------------------------------------------------------------------------------------------
# Find the windows of ops for which a bucket is gathered, the action after which it may be updated early, and the action
# with which the forward ends.


SMALL_SHARE = 16
"""A window of a bucket does not end at uses of another bucket with less than a sixteenth of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of ops, from index `first` to `last` (included), for which a bucket is gathered once in a phase."""

    bucket: BucketId
    phase: Phase
    first: int
    last: int


def use_windows(graph: StepGraph, buckets: Sequence[Bucket]) -> Mapping[BucketId, tuple[Window, ...]]:
    """Return the windows of every bucket in the order of ops. The update op is not a use."""
    owners = {param: bucket.id for bucket in buckets for param in bucket.params}
    uses: dict[BucketId, list[int]] = {bucket.id: [] for bucket in buckets}
    for index, op in enumerate(graph.ops):
        for owner in {owners[name] for name in op.reads if name in owners} if op.phase is not Phase.UPDATE else ():
            uses[owner].append(index)
    # Bytes of the largest bucket used by each op. Ops between consecutive uses of a bucket use only other buckets.
    largest_bytes = np.full(len(graph.ops), -1, dtype=np.int64)
    for bucket in buckets:
        indices = uses[bucket.id]
        largest_bytes[indices] = np.maximum(largest_bytes[indices], bucket.nbytes)
    found: dict[BucketId, tuple[Window, ...]] = {}
    for bucket in buckets:
        spans: list[tuple[int, int]] = []
        for index in uses[bucket.id]:
            first, last = spans[-1] if spans else (index, index)
            largest = int(largest_bytes[last + 1 : index].max(initial=-1))
            is_apart = largest >= 0 and largest * SMALL_SHARE >= bucket.nbytes
            if not spans or is_apart or graph.ops[last].phase is not graph.ops[index].phase:
                spans.append((index, index))
            else:
                spans[-1] = first, index
        found[bucket.id] = tuple(
            Window(bucket=bucket.id, phase=graph.ops[first].phase, first=first, last=last) for first, last in spans
        )
    return found


def one_in_each_phase(windows: Sequence[Window]) -> tuple[Window, ...]:
    """Return `windows` of a bucket, in order, with all of a phase joined into one."""
    joined: dict[Phase, Window] = {}
    for window in windows:
        first = joined.get(window.phase, window).first
        joined[window.phase] = replace(window, first=first)
    return tuple(joined.values())


def closing_verbs(plan: Plan) -> Mapping[BucketId, Verb]:
    """Return the verb of the last action on each bucket, after which it may be updated in the backward.

    It is REDUCE if the parameters are on the device, else OFFLOAD of the gradient or the RELEASE after it. Buckets that
    are read later are left out, and those with another last action in lean calls: either kind may be the last call.
    """
    reads = {region.id: region.buckets for region in plan.regions}
    found = closing_of(plan.schedules[0].pairs, reads, plan.placements)
    lean = found if plan.lean is None else closing_verbs(plan.of_lean_calls())
    return {bucket: verb for bucket, verb in found.items() if lean.get(bucket) is verb}


def closing_of(
    actions: Iterable[tuple[Verb, Target]],
    regions: Mapping[RegionId, Sequence[BucketId]],
    placements: Iterable[Placement],
) -> Mapping[BucketId, Verb]:
    """Return `closing_verbs` of `actions`, pairs of verb and target; `regions` lists the buckets that each region
    reads."""
    on_device = {placed.bucket for placed in placements if placed.param is Tier.DEVICE}
    closing: dict[BucketId, Verb] = {}
    reduced: set[BucketId] = set()
    reread: set[BucketId] = set()
    banned: set[BucketId] = set()
    for verb, target in actions:
        if isinstance(target, RegionRef):
            reread.update(read for read in regions[target.region] if read in reduced)
        elif isinstance(target, GradientRef):
            if verb is Verb.OFFLOAD and target.bucket not in on_device:
                closing[target.bucket] = verb
        elif isinstance(target, BucketRef) and verb is Verb.REDUCE:
            reduced.add(target.bucket)
            if target.bucket in on_device:
                closing[target.bucket] = verb
        elif isinstance(target, BucketRef) and verb is Verb.RELEASE and target.bucket in reduced:
            if closing.pop(target.bucket, None) is Verb.OFFLOAD:
                closing[target.bucket] = verb
                reread.discard(target.bucket)
            else:
                banned.add(target.bucket)
    return {bucket: verb for bucket, verb in closing.items() if bucket not in reread | banned}


def halves_of(plan: Plan) -> tuple[Sequence[Action], Sequence[Action]]:
    """Return the actions of the program of the forward, and those behind it; all are behind it if it runs no region."""
    actions, pairs = plan.schedules[0].actions, plan.schedules[0].pairs
    last = last_forward(plan.regions, pairs)
    end = max((at for at, (_, target) in enumerate(pairs, 1) if last and target == RegionRef(last)), default=0)
    while 0 < end < len(pairs) and may_end_forward(*pairs[end]):
        end += 1
    return actions[:end], actions[end:]


def last_forward(regions: Iterable[Region], actions: Sequence[tuple[Verb, Target]]) -> RegionId | None:
    """Return the region of the forward that runs last; None if none does."""
    forward = {region.id for region in regions if region.phase is Phase.FORWARD}
    runs = (target.region for _, target in reversed(actions) if isinstance(target, RegionRef))
    return next((region for region in runs if region in forward), None)


def may_end_forward(verb: Verb, target: Target) -> bool:
    """Return whether an action behind the last region of the forward belongs to the program of the forward."""
    return verb is Verb.RELEASE or (verb in (Verb.OFFLOAD, Verb.WAIT) and isinstance(target, GroupRef))


# ----------------------------------------------------------------------------------------------------------------------
# Group saved activations by the layer whose backward reads them first, and by the ops needed to recompute them.
#
#   h.3.pointwise   needs elementwise ops and reductions of other saved activations
#   h.3.matmul      needs matrix products or convolutions too
#   h.3.attention   needs attention kernels too
#   h.3.fixed       needs activations of another layer
#   h.3.kept        cannot be recomputed: random, with a side effect, a sum over the batch, or marked by the user to be
#                   saved
#   h.3.input       not saved by the capture: inputs of the layer, from which all of it, `fixed` too, can be recomputed
#
# Each class is recomputed from other saved activations and the classes before it. So a layer has few sensible choices
# (`Depth`): to recompute nothing, the first class, the first two, and so on. A storage counts once, however many of its
# views are saved.


class Depth(IntEnum):
    """The class of ops needed to recompute an activation. A layer is recomputed to a depth: this class and those
    before."""

    KEPT = 0
    POINTWISE = 1
    MATMUL = 2
    ATTENTION = 3
    FIXED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Activations of the same layer and class."""

    id: GroupId
    layer: str
    depth: Depth
    """The depth from which on these are recomputed; KEPT if they never are."""
    is_input: bool = False
    """True for inputs of the layer, saved only if the layer is recomputed to the depth FIXED."""
    storages: tuple[StorageId, ...]
    nbytes: int


def activation_groups(graph: StepGraph) -> tuple[Group, ...]:
    """Return the groups of saved activations of `graph`, in the order in which the forward computes them.

    Outputs of the forward are in no group: they live as long as the caller keeps them.
    """
    scan = _Scan(graph)
    classes: dict[tuple[str, Depth, bool], list[StorageId]] = {}
    for storage in graph.storages:
        if storage.id in scan.saved and storage.id not in scan.outputs and storage.nbytes:
            classes.setdefault((scan.layer(storage.id), scan.depth(storage.id), False), []).append(storage.id)
    for layer in dict.fromkeys(layer for layer, _, _ in classes):
        fixed = classes.get((layer, Depth.FIXED, False), [])
        inputs = scan.inputs(layer, fixed)
        if inputs is None:
            classes[layer, Depth.KEPT, False] = [*classes.get((layer, Depth.KEPT, False), ()), *fixed]
            classes.pop((layer, Depth.FIXED, False), None)
        elif inputs:
            classes[layer, Depth.KEPT, True] = inputs
    order = {op.id: i for i, op in enumerate(graph.ops)}
    groups = [scan.group(*key, storages) for key, storages in classes.items() if storages]
    first = {group.id: min(order[scan.maker(name).id] for name in group.storages) for group in groups}
    return tuple(sorted(groups, key=lambda group: (first[group.id], group.id)))


class _Scan:
    """Facts about a graph, computed once for all groups."""

    def __init__(self, graph: StepGraph) -> None:
        self.outputs = frozenset(graph.outputs)
        self.saved = saved_storages(graph)
        self._makers = makers(graph)
        self._given = given_storages(graph)
        # Without buffers overwritten by a layer: they exist in any case, and a plan cannot save them.
        self._made_in = {
            name: layer
            for name, op in self._makers.items()
            if op is not None and name not in self._given and is_numbered(layer := layer_of(op.module))
        }
        self._stale = stale_reads(graph)
        self._first_maker = {name: op for op in reversed(graph.ops) for name in op.writes}
        self._nbytes = {storage.id: storage.nbytes for storage in graph.storages}
        # A sum over the batch, such as the number of targets of a loss, is complete behind its lap. Recomputed in the
        # lap of the backward that divides rows by it, it would have to be complete before the first micro-batch.
        self._sums = frozenset(storage.id for storage in graph.storages if storage.batched is Batched.SUM)
        self._from_inputs: set[StorageId] = set()
        """Storages computed from inputs and parameters without a matrix product: masks and positions."""
        for op in graph.ops:
            is_plain = op.phase is Phase.FORWARD and not op.once and not op.flops
            if is_plain and all(read in self._given or read in self._from_inputs for read in op.reads):
                self._from_inputs.update(op.writes)
        self._readers: Mapping[StorageId, Op] = {
            name: op for op in reversed(graph.ops) if op.phase is Phase.BACKWARD for name in op.reads
        }

    def maker(self, name: StorageId) -> Op:
        """Return the first op writing the storage."""
        return self._first_maker[name]

    def layer(self, name: StorageId) -> str:
        """Return the layer whose backward reads the storage first; if that is no layer, the layer that computes it."""
        reader = layer_of(self._readers[name].module)
        return reader if is_numbered(reader) else layer_of(self.maker(name).module)

    def depth(self, name: StorageId) -> Depth:
        """Return the depth at which storage `name` can be recomputed from all other saved activations."""
        ops, leaves = self._chain([name], self.saved - {name})
        if ops is None:
            return Depth.KEPT
        layer = self.layer(name)

        def is_of_another(other: str) -> bool:
            return other != layer and is_numbered(other)

        # They start from activations of another layer, or repeat its matrix products.
        if any(leaf not in self._from_inputs and is_of_another(self.layer(leaf)) for leaf in leaves) or any(
            op.flops and is_of_another(layer_of(op.module)) for op in ops
        ):
            return Depth.FIXED
        if any("attention" in op.target for op in ops):
            return Depth.ATTENTION
        return Depth.MATMUL if any(op.flops for op in ops) else Depth.POINTWISE

    def inputs(self, layer: str, fixed: Sequence[StorageId]) -> list[StorageId] | None:
        """Return results of other layers from which `fixed` can be recomputed; None if keeping them saves no bytes."""
        if not fixed:
            return []
        elsewhere = {name for name, own in self._made_in.items() if own != layer}
        ops, leaves = self._chain(fixed, (self.saved - set(fixed)) | elsewhere)
        if ops is None:
            return None
        found = [name for name in leaves if name in elsewhere and name not in self.saved]
        is_worth_it = sum(map(self._nbytes.__getitem__, found)) < sum(map(self._nbytes.__getitem__, fixed))
        return found if is_worth_it and self.outputs.isdisjoint(found) else None

    def group(self, layer: str, depth: Depth, is_input: bool, storages: Sequence[StorageId]) -> Group:
        kind = "input" if is_input else depth.name.lower()
        return Group(
            id=GroupId(f"{layer or 'step'}.{kind}"),
            layer=layer,
            depth=depth,
            is_input=is_input,
            storages=tuple(storages),
            nbytes=sum(self._nbytes[name] for name in storages),
        )

    def _chain(
        self, targets: Iterable[StorageId], available: "frozenset[StorageId] | set[StorageId]"
    ) -> tuple[list[Op] | None, list[StorageId]]:
        """Return the ops to compute `targets` from `available` and given storages, and the storages of `available` they
        read.

        The ops are None if one of them must not run again.
        """
        ops: dict[str, Op] = {}
        leaves: dict[StorageId, None] = {}
        pending = list(targets)
        while pending:
            op = self._makers.get(pending.pop())
            if op is None or op.once or not self._sums.isdisjoint(op.writes):
                return None, []
            if op.id in ops:
                continue
            ops[op.id] = op
            for read in op.reads:
                if (op.id, read) in self._stale or (read not in available and read not in self._given):
                    pending.append(read)
                elif read in available:
                    leaves[read] = None
        return list(ops.values()), list(leaves)
