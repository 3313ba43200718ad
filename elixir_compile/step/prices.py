"""Compute the seconds of all possible actions on a machine once, so that thousands of schedules can be simulated.

`ir.cost` has the formulas: `copy_s` of the bytes of bucket b1 and of the link gives the seconds of the work `gather b1`
on the lane h2d. `prices` applies them to all buckets and groups, and `Prices.of_deed` has the seconds by what a work
does (`step.works.Do`) and its bucket or group. `step.seconds` says from when on they count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from elixir_compile.ir.bucket import Activations, Bucket, sharded_buckets
from elixir_compile.ir.cost import (
    GATHER_STAGING_BYTES,
    Measured,
    StreamedCopies,
    add_bytes,
    add_s,
    average_s,
    collective_s,
    copy_s,
    corrected_s,
    disk_both_ways_s,
    disk_read_s,
    disk_s,
    host_memory_s,
    is_free,
    op_s,
    stream_bytes,
    streamed_copies,
    update_bytes,
    update_s,
)
from elixir_compile.ir.graph import Op, StepGraph
from elixir_compile.ir.hardware import Cluster, Link
from elixir_compile.ir.kinds import GroupId, Lane, Saving, StorageId, Tier
from elixir_compile.step.as_run import as_run, laps_at, repeated_op
from elixir_compile.step.divide import WHOLE, Crossing, Crossings, Lap, crossings
from elixir_compile.step.works import Deed, Do

_NOT_MEASURED = Measured()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Seconds of host memory at its full rate, by action; empty if device and host are the same memory."""

    copy_s: Mapping[str, float] = field(default_factory=dict)
    """A copy of a bucket's flat shard or of a group of activations, in either direction."""
    update_s: Mapping[str, float] = field(default_factory=dict)
    """An update by the host."""
    stream_s: Mapping[tuple[str, Tier], float] = field(default_factory=dict)
    """A streamed update with its copies both ways, by bucket and home of its parameters."""
    add_s: Mapping[str, float] = field(default_factory=dict)
    """Adding the gradients of a bucket to their sums on the host."""


@dataclass(frozen=True, slots=True)
class LapCopies:
    """Copies of activations that run while a lap does, all slices but one: (group, seconds) in each direction."""

    micro_batches: int
    arriving: list[tuple[GroupId, float]] = field(default_factory=list)
    leaving: list[tuple[GroupId, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of works by bucket or group of activations, and running sums of the seconds of ops.

    It has more than 15 fields, one for each kind of work.
    """

    before_s: tuple[float, ...]
    """Entry `i` is the seconds of all ops before op `i`; the last entry is the sum of all."""
    h2d_s: Mapping[str, float]
    """Copies from host to device: the flat shard of a bucket's parameters, or a group of activations without
    `lap_copies`."""
    d2h_s: Mapping[str, float]
    """Copies from device to host: the flat shard of a bucket's gradient, or a group of activations without
    `lap_copies`."""
    leave_s: Mapping[str, float]
    """The copy of a bucket's parameters from device to host, where they live on the device and the host updates
    them."""
    gather_s: Mapping[str, float]
    """The all-gather into a bucket's flat buffer; 0 if it is not sharded."""
    reduce_s: Mapping[str, float]
    """The reduce-scatter of a bucket's gradient, or the all-reduce if it is not sharded; 0 for a single rank."""
    device_update_s: Mapping[str, float]
    host_update_s: Mapping[str, float]
    lane_of: Mapping[Lane, Lane]
    """The lane that really does the work of each lane: copies that do not overlap compute run on its lane."""
    sharded: frozenset[str] = frozenset()
    """The buckets of which each rank owns a shard."""
    summed: frozenset[str] = frozenset()
    """The buckets whose gradients are added to the sums of earlier backward passes."""
    average_s: Mapping[str, float] = field(default_factory=dict)
    """The all-reduce over copies after the reduce; empty if there is a single copy."""
    memory: HostMemory = field(default_factory=HostMemory)
    disk_s: Mapping[str, float] = field(default_factory=dict)
    """Reading a bucket's state from the disk and writing it back."""
    param_disk_s: Mapping[str, float] = field(default_factory=dict)
    """The same for the parameters of a trained bucket, which an update reads and writes too if they are on the disk."""
    reads: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Reading a bucket's parameters from the disk for a gather, and the number of pieces in which they come."""
    streams: Mapping[tuple[str, Tier], StreamedCopies] = field(default_factory=dict)
    """The copies of a streamed update to the device and back, by bucket and home of its parameters."""
    add_s: Mapping[tuple[str, Tier], float] = field(default_factory=dict)
    """Adding a bucket's gradients to the sums of gradients at the end of the backward, by bucket and home of its
    parameters; only buckets with sums."""
    lap_copies: Mapping[int, LapCopies] = field(default_factory=dict)
    """Copies that run while a lap does, by the index of the first op of the lap."""

    of_deed: Mapping[Deed, Mapping[str, tuple[float, float]]] = field(init=False, repr=False, compare=False)
    """The seconds of each work that has some, and those of host memory in it, by what it does and its bucket or group.
    Regions, streamed copies and gathers from the disk are not in it."""

    def __post_init__(self) -> None:
        copies_s, updates_s, adds_s = self.memory.copy_s, self.memory.update_s, self.memory.add_s

        def moved(seconds: Mapping[str, float], memory_s: Mapping[str, float]) -> Mapping[str, tuple[float, float]]:
            return {name: (own_s, memory_s.get(name, 0.0)) for name, own_s in seconds.items()}

        there, back, updated = moved(self.h2d_s, copies_s), moved(self.d2h_s, copies_s), moved(self.device_update_s, {})
        on_disk = {
            name: self.off_device_update_s(name, Tier.DISK) for name in self.host_update_s if name in self.disk_s
        }
        slices = self.lap_copies.values()
        added = {home: {name: s for (name, own), s in self.add_s.items() if own is home} for home in Tier}
        of_deed = {
            Do.GATHER: there,
            Do.RETURN: there,
            Do.PREFETCH: there,
            Do.ALL_GATHER: moved(self.gather_s, {}),
            Do.REDUCE: moved(self.reduce_s, {}),
            Do.AVERAGE: moved(self.average_s, {}),
            Do.OFFLOAD: back,
            Do.OFFLOAD_GROUP: back,
            Do.STAGE: moved(self.leave_s, copies_s),
            Do.STAGE_GRADIENT: back,
            Do.SLICES_ARRIVE: {group: (s, 0.0) for each in slices for group, s in each.arriving},
            Do.SLICES_LEAVE: {group: (s, 0.0) for each in slices for group, s in each.leaving},
            Do.ADD: moved(added[Tier.DEVICE], {}),
            Do.ADD_ON_HOST: moved(added[Tier.HOST], adds_s),
            Do.UPDATE: updated,
            Do.STREAM_UPDATE: updated,
            Do.UPDATE_ON_HOST: moved(self.host_update_s, updates_s),
            Do.UPDATE_ON_DISK: moved(on_disk, updates_s),
        }
        object.__setattr__(self, "of_deed", of_deed)

    @property
    def is_one_memory(self) -> bool:
        """True if device and host are the same cores and memory, so that updates need no copies."""
        return self.lane_of[Lane.HOST] is Lane.COMPUTE

    def staged_s(self, bucket: str) -> float:
        """Return the seconds of the copies to the host before it updates a bucket with its parameters on the device."""
        return self.leave_s[bucket] + self.d2h_s[bucket]

    def off_device_update_s(self, bucket: str, optim: Tier) -> float:
        """Return the seconds of an update by the host, beside which state on disk is read and written."""
        seconds = self.host_update_s[bucket]
        return max(seconds, self.disk_s[bucket]) if optim is Tier.DISK else seconds

    def run_s(self, first: int, last: int) -> float:
        """Return the seconds of the ops from index `first` to index `last`, both included."""
        return self.before_s[last + 1] - self.before_s[first]


def prices(
    graph: StepGraph,
    buckets: Sequence[Bucket],
    cluster: Cluster,
    measured: Measured = _NOT_MEASURED,
    activations: tuple[Activations, ...] = (),
    num_copies: int = 1,
    divided_into: tuple[Lap, ...] = (),
    ops: "OpSeconds | None" = None,
) -> Prices:
    """Return the seconds of ops of `graph` with `activations`, and of actions on `activations` and `buckets`; the laps
    `divided_into` run in micro-batches. `ops` are the seconds of ops of `graph`, if they are known.

    `num_copies` ranks of `cluster` hold each shard of a bucket. `measured` seconds replace those of the roofline model.
    """
    away = [group for group in activations if group.saving is Saving.OFFLOAD]
    ops = OpSeconds(graph, cluster, measured) if ops is None else ops
    lane_of, homes = _lanes(cluster), (Tier.DEVICE, Tier.HOST)
    sliced = crossings(as_run(graph, activations, divided_into), away) if away and divided_into else {}
    device_update_s: dict[str, float] = {bucket.id: update_s(bucket, Tier.DEVICE, cluster) for bucket in buckets}
    host_update_s: dict[str, float] = {bucket.id: update_s(bucket, Tier.HOST, cluster) for bucket in buckets}
    if lane_of[Lane.HOST] is Lane.COMPUTE:
        # Host and device are the same cores, so a faster update by the host is noise of the measurement.
        host_update_s = {name: max(seconds, device_update_s[name]) for name, seconds in host_update_s.items()}
    return Prices(
        before_s=tuple(accumulate(ops.of(activations, divided_into), initial=0.0)),
        h2d_s={
            **{b.id: copy_s(b.flat_shard_nbytes, cluster.h2d) for b in buckets},
            **{g.id: _at_once_s(g, sliced.get(g.id, WHOLE).arriving, cluster.h2d) for g in away},
        },
        d2h_s={
            **{b.id: copy_s(b.grad_ratio * b.flat_shard_nbytes, cluster.d2h) for b in buckets},
            **{g.id: _at_once_s(g, sliced.get(g.id, WHOLE).leaving, cluster.d2h) for g in away},
        },
        lap_copies=_lap_copies(away, sliced, cluster),
        gather_s={b.id: collective_s(b.flat_nbytes, cluster, num_copies) if b.is_sharded else 0.0 for b in buckets},
        leave_s={b.id: copy_s(b.shard_nbytes(), cluster.d2h) for b in buckets},
        reduce_s={b.id: _reduce_s(b, cluster, num_copies) for b in buckets},
        average_s={b.id: average_s(b.reduced_nbytes, cluster, num_copies) for b in buckets if num_copies > 1},
        device_update_s=device_update_s,
        host_update_s=host_update_s,
        disk_s={bucket.id: disk_s(bucket, cluster) for bucket in buckets},
        param_disk_s={own.id: disk_both_ways_s(own.shard_nbytes(), cluster) for own in buckets if own.trainable},
        reads={bucket.id: _read(bucket, cluster) for bucket in buckets},
        lane_of=lane_of,
        sharded=sharded_buckets(buckets),
        summed=frozenset(bucket.id for bucket in buckets if bucket.sum_nbytes),
        memory=HostMemory() if lane_of[Lane.HOST] is Lane.COMPUTE else _host_memory(buckets, away, cluster),
        streams={
            (bucket.id, home): streamed_copies(bucket, home, cluster)
            for bucket in buckets
            if bucket.trainable
            for home in homes
        },
        add_s={(b.id, home): add_s(b, home, cluster) for b in buckets if b.sum_nbytes for home in homes},
    )


def _read(bucket: Bucket, cluster: Cluster) -> tuple[float, int]:
    """Return the seconds in which each rank of a node reads its parameters of `bucket` from the disk, and the number of
    pieces."""
    nbytes = bucket.shard_nbytes()
    return disk_read_s(nbytes, cluster), max(-(-nbytes // GATHER_STAGING_BYTES), 1)


def _host_memory(buckets: Sequence[Bucket], away: Sequence[Activations], cluster: Cluster) -> HostMemory:
    return HostMemory(
        copy_s={
            **{bucket.id: host_memory_s(bucket.flat_shard_nbytes, cluster) for bucket in buckets},
            **{group.id: host_memory_s(group.nbytes, cluster) for group in away},
        },
        update_s={bucket.id: host_memory_s(update_bytes(bucket), cluster) for bucket in buckets},
        stream_s={
            (bucket.id, home): host_memory_s(sum(stream_bytes(bucket, home)), cluster)
            for bucket in buckets
            if bucket.trainable
            for home in (Tier.DEVICE, Tier.HOST)
        },
        add_s={bucket.id: host_memory_s(add_bytes(bucket), cluster) for bucket in buckets if bucket.sum_nbytes},
    )


class OpSeconds:
    """Seconds of the ops of a graph with any activations; what does not depend on them is computed once."""

    def __init__(self, graph: StepGraph, cluster: Cluster, measured: Measured = _NOT_MEASURED) -> None:
        self._graph, self._cluster = graph, cluster
        step = as_run(graph, measured.activations, laps_at(graph, measured.activations, measured.micro_batches))
        self._dtypes = dtypes = _dtypes(step)
        """By storage of the measured step: micro-batches fuse other ops, so another step may lack some of them."""
        seconds = [self._priced_s(op, dtypes) for op in step.ops]
        index = {op.id: i for i, op in enumerate(step.ops)} if measured.stretches else {}
        self._before = {op.id: op for op in step.ops}
        """The ops of the measured step."""
        self._known_s = dict(zip(self._before, corrected_s(seconds, index, measured.stretches), strict=True))
        self._original = {repeated_op(op.id): op.id for op in graph.ops}
        """By the id under which an op runs again: the id of the op."""

    def of(self, activations: tuple[Activations, ...] = (), divided_into: tuple[Lap, ...] = ()) -> list[float]:
        """Return the seconds of every op that runs with `activations`, with the laps `divided_into` micro-batches.

        A repeated op takes as long as in the forward, unless it was fused there and took no time.
        """
        step = as_run(self._graph, activations, divided_into)
        dtypes = _dtypes(step)
        return [self._seconds(op, dtypes) for op in step.ops]

    def _seconds(self, op: Op, dtypes: Mapping[StorageId, str]) -> float:
        own_id = op.id if op.id in self._known_s else self._original.get(op.id, op.id)
        found, before = self._known_s.get(own_id, 0.0), self._before.get(own_id)
        if before is not None and before.times != op.times:
            priced_s, before_s = self._priced_s(op, dtypes), self._priced_s(before, self._dtypes)
            return found * priced_s / before_s if before_s else priced_s
        return found if bool(found) is not is_free(op) else self._priced_s(op, dtypes)

    def _priced_s(self, op: Op, dtypes: Mapping[StorageId, str]) -> float:
        return op_s(op, self._cluster, dtypes[op.writes[0]] if op.writes else "float32")


def _dtypes(step: StepGraph) -> Mapping[StorageId, str]:
    return {storage.id: storage.dtype for storage in step.storages}


def _reduce_s(bucket: Bucket, cluster: Cluster, num_copies: int) -> float:
    """Return the seconds of a reduce-scatter, or of an all-reduce if `bucket` is not sharded, which takes twice as
    long."""
    return (1 if bucket.is_sharded else 2) * collective_s(bucket.flat_grad_nbytes, cluster, num_copies)


def crossing_s(nbytes: int, num_copies: int, crossing: Crossing | None, link: Link) -> tuple[float, float]:
    """Return the seconds over `link` of a group of `nbytes` in `num_copies` storages: of the copies before or behind
    the lap in which it is read or made, and of the copies while the lap runs."""
    if crossing is None:
        return copy_s(nbytes, link, num_copies), 0.0
    return (
        copy_s(nbytes - crossing.beside_bytes, link, num_copies),
        copy_s(crossing.beside_bytes, link, crossing.num_beside),
    )


def _at_once_s(group: Activations, crossing: Crossing | None, link: Link) -> float:
    return crossing_s(group.nbytes, len(group.storages), crossing, link)[0]


def _lap_copies(
    away: Sequence[Activations], sliced: Mapping[GroupId, Crossings], cluster: Cluster
) -> Mapping[int, LapCopies]:
    """Return the copies that run while a lap does, by the index of the first op of the lap."""
    found: dict[int, LapCopies] = {}
    for group in away:
        crosses, num_copies = sliced.get(group.id, WHOLE), len(group.storages)
        if crosses.arriving is not None:
            _, beside_s = crossing_s(group.nbytes, num_copies, crosses.arriving, cluster.h2d)
            copies = found.setdefault(crosses.arriving.first, LapCopies(crosses.arriving.micro_batches))
            copies.arriving.append((group.id, beside_s))
        if crosses.leaving is not None:
            _, beside_s = crossing_s(group.nbytes, num_copies, crosses.leaving, cluster.d2h)
            copies = found.setdefault(crosses.leaving.first, LapCopies(crosses.leaving.micro_batches))
            copies.leaving.append((group.id, beside_s))
    return found


def _lanes(cluster: Cluster) -> Mapping[Lane, Lane]:
    overlaps = {
        Lane.H2D: cluster.h2d.overlaps_compute,
        Lane.D2H: cluster.d2h.overlaps_compute,
        Lane.GATHER: cluster.collective is not None and cluster.collective.overlaps_compute,
        Lane.REDUCE: cluster.collective is not None and cluster.collective.overlaps_compute,
        Lane.HOST: cluster.copies_overlap,
    }
    return {Lane.COMPUTE: Lane.COMPUTE, **{lane: lane if own else Lane.COMPUTE for lane, own in overlaps.items()}}
