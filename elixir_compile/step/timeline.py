"""Live bytes of every op of a plan, the peaks, also as a formula of dynamic sizes, and the traffic on the lanes."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Activations, OpId, Phase, StorageId, Tier, sizes
from elixir_compile.ir.bucket import takes_device
from elixir_compile.ir.cost import is_along_data, ring_s, rings_bytes, stream_bytes
from elixir_compile.ir.graph import Op, Ring, StepGraph, Storage
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.kinds import Kind, Saving
from elixir_compile.ir.plan import Plan, RingTraffic
from elixir_compile.step.as_run import as_run
from elixir_compile.step.bucket_bytes import bucket_host_bytes
from elixir_compile.step.divide import WHOLE, crossings, laps_of
from elixir_compile.step.liveness import Life, liveness
from elixir_compile.step.plan_rows import Halves, PlanRows, TwoPrograms, calls_by_program
from elixir_compile.step.works import Deed, Do

# ----------------------------------------------------------------------------------------------------------------------
# Count the live bytes on the device at each op of a step, by kind, under a plan or with everything kept there.
#
#   live_bytes[kind][op] = sum of nbytes over the storages of the kind live at op
#
# Each storage adds its bytes at its first op and subtracts them after its last, so a running sum per kind counts the
# step: O(ops + storages + actions). An offloaded activation does so twice:
#
#   op           fwd.mm  fwd.gelu  fwd.sum  bwd.mm  bwd.gelu
#   activation   ----------------                   --------
#   schedule             offload^  ^wait    ^prefetch     the first wait ends its first life, and the prefetch begins
#                                                         the second
#
# On several ranks two actions between ops need more bytes than the ops around them:
#
#   gather, wait    the flat buffer and the parameters copied out of it       count at the op after the wait
#   reduce          gradients and the flat buffer into which they are         a position of its own, with the bytes
#                   packed, or their means                                    between the two ops
#
# An op has the bytes of its fullest position: its own, or that of a reduce behind it.
#
# Not modelled: memory allocated inside a kernel, rounding of the allocator, and the moment between two ops in
# which a gather before a release in the schedule holds both copies.


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The op with the most live bytes; the first, if several have as many."""

    op: OpId
    nbytes: int
    by_kind: Mapping[Kind, int]
    """Live bytes at the op by kind, in the order of `Kind`, without zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Live bytes on the device at each op, and bytes on the host, which are the same during the whole step."""

    ops: tuple[OpId, ...]
    live_bytes_by_kind: Mapping[Kind, tuple[int, ...]]
    """Live bytes at each op by kind, in the order of `Kind`, without kinds of zero bytes."""
    live_bytes: tuple[int, ...]
    """The sum over kinds."""
    host_bytes: int
    positions: tuple[int, ...] = field(default=(), compare=False)
    """By op: its fullest position on the axis of the rows; empty if they are of several calls, or of no plan."""

    @property
    def peak(self) -> Peak:
        """The first op with the most live bytes, with its bytes by kind."""
        at = self.live_bytes.index(max(self.live_bytes))
        by_kind = {kind: live[at] for kind, live in self.live_bytes_by_kind.items() if live[at]}
        return Peak(op=self.ops[at], nbytes=self.live_bytes[at], by_kind=by_kind)


def keep_everything_timeline(graph: StepGraph, state_nbytes: Mapping[StorageId, int]) -> MemoryTimeline:
    """Return the timeline with all parameters, gradients, optimizer state and saved activations on the device.

    `state_nbytes` holds the bytes of optimizer state of each trainable parameter.
    """
    step = as_run(graph)
    tally = _Tally(range(len(step.ops)))
    storages = {storage.id: storage for storage in step.storages}
    for name, life in liveness(step).lives.items():
        tally.add(storages[name].kind, storages[name].nbytes, life.first, life.last)
    tally.add(Kind.MOMENT, sum(state_nbytes.values()), 0, len(step.ops) - 1)
    return tally.timeline(step, host_bytes=0)


def plan_timeline(graph: StepGraph, plan: Plan) -> MemoryTimeline:
    """Return the timeline of a rank under `plan`, which must be a plan of `graph`.

    If the step has several calls, each op has the bytes of the call that holds the most there. The ops include
    recomputed ops, those of full calls if there are lean ones: an op that lean calls alone run counts at the next op
    that both run. Fused storages are left out.
    """
    if plan.calls.num == 1:
        return timeline_of(PlanRows(graph, plan))
    programs = TwoPrograms.of(graph, plan)
    step = programs.full.rows.step
    index = {op.id: at for at, op in enumerate(step.ops)}
    highest: list[tuple[MemoryTimeline, int] | None] = [None] * len(step.ops)
    for half, rows in programs.fullest(Halves(plan.calls, plan.most_full)):
        found, ops = timeline_of(rows), rows.step.ops
        place = len(step.ops) - 1
        for at in reversed(range(len(ops))):
            if (ops[at].phase is not Phase.FORWARD) is half.is_backward:
                place = index.get(ops[at].id, place)
                before = highest[place]
                if before is None or before[0].live_bytes[before[1]] < found.live_bytes[at]:
                    highest[place] = (found, at)
    parts = [found for found in highest if found is not None]
    kinds = [kind for kind in Kind if any(kind in own.live_bytes_by_kind for own, _ in parts)]
    nothing = (0,) * max(len(own.ops) for own, _ in parts)
    return MemoryTimeline(
        ops=tuple(op.id for op in step.ops),
        live_bytes_by_kind={
            kind: tuple(own.live_bytes_by_kind.get(kind, nothing)[at] for own, at in parts) for kind in kinds
        },
        live_bytes=tuple(own.live_bytes[at] for own, at in parts),
        host_bytes=host_bytes(plan),
    )


def timeline_of(rows: PlanRows) -> MemoryTimeline:
    """Return the timeline to which `rows` add up."""
    tally = _Tally(rows.axis.op_of)
    for held in rows.all():
        tally.add(held.kind, held.nbytes, held.first, held.last)
    return tally.timeline(rows.step, host_bytes(rows.plan))


def with_peaks(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with the peaks of its timeline in its prediction."""
    timeline = plan_timeline(graph, plan)
    prediction = replace(
        plan.prediction,
        device_peak_bytes=timeline.peak.nbytes,
        device_peak_at=timeline.peak.op,
        host_peak_bytes=timeline.host_bytes,
    )
    return replace(plan, prediction=prediction)


def device_lives(graph: StepGraph, plan: Plan) -> Mapping[StorageId, tuple[Life, ...]]:
    """Return the stretches of ops in which each storage is on the device, for the ops run by `plan`.

    Parameters of buckets are listed as if they never moved.
    """
    rows = PlanRows(graph, plan)
    axis = rows.axis
    return {
        name: tuple(Life(first=axis.op_from(life.first), last=axis.op_to(life.last)) for life in lives)
        for name, lives in rows.lives.items()
    }


def live_storages(graph: StepGraph, plan: Plan, at: OpId) -> Sequence[Storage]:
    """Return the storages on the device while the op `at` of `plan` runs, the largest first."""
    step, lives = as_run(graph, plan.activations, laps_of(plan)), device_lives(graph, plan)
    number = next(number for number, op in enumerate(step.ops) if op.id == at)
    live = (own for own in step.storages if any(o.first <= number <= o.last for o in lives.get(own.id, ())))
    return sorted(live, key=lambda storage: -storage.nbytes)


def host_bytes(plan: Plan) -> int:
    """Return the bytes on the host of this rank: parameters, gradients, optimizer state, staging, activations, and the
    work space of an update."""
    placed = list(zip(plan.buckets, plan.placements, strict=True))
    on_disk = (own for own, home in placed if home.optim is Tier.DISK)
    with_params = {home.bucket for _, home in placed if home.param is Tier.DISK}
    # Updates on the host come one after another.
    works = [own.work_nbytes for own, home in placed if own.trainable and not takes_device(own, home)]
    staging_bytes = rings_bytes(on_disk, with_params) + max(works, default=0)
    return away_bytes(plan) + staging_bytes + sum(bucket_host_bytes(bucket, placement) for bucket, placement in placed)


def away_bytes(plan: Plan) -> int:
    """Return the bytes of the offloaded activations of `plan`, of all forwards that are outstanding at once."""
    lean = () if plan.lean is None else plan.lean.activations
    num_lean = plan.calls.outstanding - plan.most_full
    return plan.most_full * offloaded_bytes(plan.activations) + num_lean * offloaded_bytes(lean)


def offloaded_bytes(activations: Iterable[Activations]) -> int:
    """Return the bytes of the groups among `activations` that are offloaded."""
    return sum(group.nbytes for group in activations if group.saving is Saving.OFFLOAD)


class _Tally:
    """Sums intervals of bytes: a row of differences by position for each kind."""

    def __init__(self, op_of: Sequence[int]) -> None:
        """`op_of` has the op of each position."""
        self._changes: dict[Kind, NDArray[np.int64]] = {}
        self._op_of = np.array(op_of, dtype=np.int64)

    def add(self, kind: Kind, nbytes: int, first: int, last: int) -> None:
        """Add `nbytes` from position `first` to position `last`, both included; nothing if `last` is before `first`."""
        if nbytes and first <= last:
            changes = self._changes.get(kind)
            if changes is None:
                changes = self._changes[kind] = np.zeros(len(self._op_of) + 1, dtype=np.int64)
            changes[first] += nbytes
            changes[last + 1] -= nbytes

    def timeline(self, graph: StepGraph, host_bytes: int) -> MemoryTimeline:
        """Return the timeline of `graph`, the ops that run."""
        changes = functools.reduce(np.add, self._changes.values(), np.zeros(len(self._op_of) + 1, dtype=np.int64))
        total = np.cumsum(changes[:-1])
        # The fullest position of each op comes first, and of equally full ones the earliest.
        order = np.lexsort((-total, self._op_of))
        _, firsts = np.unique(self._op_of[order], return_index=True)
        fullest = order[firsts]
        live = {kind: np.cumsum(self._changes[kind][:-1])[fullest] for kind in Kind if kind in self._changes}
        return MemoryTimeline(
            ops=tuple(op.id for op in graph.ops),
            live_bytes_by_kind={kind: tuple(row.tolist()) for kind, row in live.items()},
            live_bytes=tuple(total[fullest].tolist()),
            host_bytes=host_bytes,
            positions=tuple(fullest.tolist()),
        )


# ----------------------------------------------------------------------------------------------------------------------
# The device peak of a plan as a formula of the graph's symbols: `Max(4*s0*s1 + 1024, 8*s0 + 2048)`.
#
#   op         1     s0    s0*s1      a row of coefficients per op, by running sums as in a timeline
#   fwd.mm   1024     8      4
#   bwd.mm   2048     8      0        rows never the largest, for symbols of 0 or more, are left out
#
# The constant of a row is the plan's bytes at the op less the bytes of live storages with symbolic sizes. There is a
# row for each op that runs, recomputed ops included, and for each reduce with buffers. Offloaded activations are in no
# row of the ops while they are away.


def peak_formula(graph: StepGraph, plan: Plan) -> str:
    """Return the device peak under `plan` as an expression in sympy's form, or `""` if no size is symbolic, or if the
    step has several calls."""
    if plan.calls.num > 1:
        return ""
    step = as_run(graph, plan.activations, laps_of(plan))
    growing = [storage for storage in step.storages if storage.size]
    if not growing:
        return ""
    products = list(dict.fromkeys(name for storage in growing for name, _ in sizes.terms(storage.size) if name))
    column = {name: number for number, name in enumerate(products, start=1)}
    plan_rows = PlanRows(graph, plan)
    num = plan_rows.axis.ops.num
    changes = np.zeros((num + 1, len(products) + 1), dtype=np.int64)
    numbers = np.zeros(num + 1, dtype=np.int64)
    for storage in growing:
        for life in plan_rows.lives.get(storage.id, ()):
            if life.last < life.first:
                continue
            for name, coefficient in sizes.terms(storage.size):
                changes[life.first, column.get(name, 0)] += coefficient
                changes[life.last + 1, column.get(name, 0)] -= coefficient
            numbers[life.first] += storage.nbytes
            numbers[life.last + 1] -= storage.nbytes
    rows = np.cumsum(changes[:-1], axis=0)
    # Bytes of constant sizes. The constants of symbolic sizes are in the first column already.
    rows[:, 0] += plan_rows.nbytes - np.cumsum(numbers[:-1])
    # The distinct rows that no other row equals or exceeds in every column, largest first. In falling order a row can
    # only be dominated by an earlier row.
    highest: list[NDArray[np.int64]] = []
    for row in np.unique(rows, axis=0)[::-1]:
        if not highest or not (np.array(highest) >= row).all(axis=1).any():
            highest.append(row)
    texts = [sizes.sum_text([*zip(products, row[1:].tolist(), strict=True), ("", int(row[0]))]) for row in highest]
    return texts[0] if len(texts) == 1 else f"Max({', '.join(texts)})"


# ----------------------------------------------------------------------------------------------------------------------
# The bytes that works of a step move, as a ledger counts them in a run.
#
#   gather b1 on h2d            the parameters of the bucket, or the padded shard of a rank
#   read b1 on disk             the parameters of the bucket, for a gather
#   read b1.state on disk       statistics, and parameters too if their home is the disk; as many are written
#   gather b1 on gather         the flat buffer of all ranks
#   offload b1.grad on d2h      the gradients that the step makes
#   gather b1.state on h2d      statistics, and parameters and gradients too if their home is the host


def traffic(graph: StepGraph, plan: Plan) -> Mapping[tuple[Deed, str], int]:
    """Return the bytes that each work of rank 0 moves, by what it does and its bucket or group, in a step of `plan` for
    `graph`."""
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    param_bytes = {s.id: s.nbytes for s in graph.storages if s.kind is Kind.PARAM and s.id in trained}
    found: dict[tuple[Deed, str], int] = {}
    for bucket, placement in zip(plan.buckets, plan.placements, strict=True):
        # The step makes gradients of some of its parameters.
        trained_bytes = sum(param_bytes.get(name, 0) for name in bucket.params)
        own_grad_bytes = bucket.shard_grad_nbytes() if bucket.is_sharded else bucket.grad_ratio * trained_bytes
        there_bytes, back_bytes = stream_bytes(bucket, placement.param) if bucket.trainable else (0, 0)
        on_disk_bytes = bucket.shard_state_nbytes() + (bucket.shard_nbytes() if placement.param is Tier.DISK else 0)
        moved_bytes = {
            Do.GATHER: bucket.flat_shard_nbytes,
            Do.GATHER_FROM_DISK: bucket.flat_shard_nbytes,
            Do.READ_PARAMS: bucket.shard_nbytes(),
            Do.RETURN: bucket.flat_shard_nbytes,
            Do.STAGE: bucket.shard_nbytes(),
            Do.ALL_GATHER: bucket.flat_nbytes,
            Do.REDUCE: bucket.flat_grad_nbytes if bucket.is_sharded else own_grad_bytes,
            Do.AVERAGE: bucket.reduced_nbytes if bucket.is_sharded else own_grad_bytes,
            Do.OFFLOAD: own_grad_bytes,
            Do.STAGE_GRADIENT: own_grad_bytes,
            Do.STREAM_THERE: there_bytes,
            Do.STREAM_BACK: back_bytes,
            Do.READ: on_disk_bytes,
            Do.WRITE: on_disk_bytes,
        }
        found |= {(do, bucket.id): nbytes for do, nbytes in moved_bytes.items()}
    away = [group for group in plan.activations if group.saving is Saving.OFFLOAD]
    laps = laps_of(plan)
    sliced = crossings(as_run(graph, plan.activations, laps), away) if away and laps else {}
    for group in away:
        crosses = sliced.get(group.id, WHOLE)
        for whole, slices, crossing in (
            (Do.OFFLOAD_GROUP, Do.SLICES_LEAVE, crosses.leaving),
            (Do.PREFETCH, Do.SLICES_ARRIVE, crosses.arriving),
        ):
            beside_bytes = 0 if crossing is None else crossing.beside_bytes
            found[slices, group.id], found[whole, group.id] = beside_bytes, group.nbytes - beside_bytes
    return found


def with_ring_traffic(graph: StepGraph, plan: Plan, cluster: Cluster) -> Plan:
    """Return `plan` for `graph` with the traffic of the collectives in the graph, in all calls of a step: along the
    tensor axis of `cluster`, and of the model's own along the data axes, over the most ranks of any."""
    programs = calls_by_program(plan) if any(op.ring is not None for op in graph.ops) else ()
    runs = [
        (num, op, op.ring)
        for num, own in programs
        for op in as_run(graph, own.activations, laps_of(own)).ops
        if op.ring is not None
    ]

    def traffic(own: Sequence[tuple[int, Op, Ring]], num_ranks: int) -> RingTraffic:
        return RingTraffic(
            num_ranks=num_ranks,
            num_collectives=sum(num * op.times for num, op, _ in own),
            nbytes=sum(num * ring.nbytes for num, _, ring in own),
            run_s=sum(num * ring_s(op, cluster) for num, op, _ in own),
        )

    found: dict[bool, list[tuple[int, Op, Ring]]] = {True: [], False: []}
    for run in runs:
        found[is_along_data(run[1], cluster)].append(run)
    num_ranks = max((ring.num_ranks for _, _, ring in found[True]), default=1)
    return replace(
        plan,
        tensor=None if cluster.tensor is None else traffic(found[False], cluster.tensor.num_ranks),
        own_collectives=traffic(found[True], num_ranks) if found[True] else None,
    )
