"""Compute the seconds of ops, transfers and updates on a machine in closed forms, and the bytes of the buffers through
which optimizer state passes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import MIB
from elixir_compile.ir.bucket import NUM_WHOLE_ROOMS, Activations, Bucket, WholeUpdate, streamed_bytes
from elixir_compile.ir.graph import Op
from elixir_compile.ir.hardware import Cluster, HostProfile, Link
from elixir_compile.ir.hardware.presets import ADAM_BYTES_PER_ELEMENT
from elixir_compile.ir.kinds import BucketId, OpId, Tier

# ----------------------------------------------------------------------------------------------------------------------
# Count the memory of the buffers through which optimizer state passes: to and from disk, or through the device.
#
# State on disk is read and written through a ring of buffers, shared by all buckets of an optimizer:
#
#     buffer   the same elements of each statistic, at least one block of the narrowest:  4 MiB / 2 B * (4 + 4 + 2) B
#     ring     `NUM_DISK_STAGING` buffers, each aligned to huge pages, and one huge page to align the first buffer
#
# Trained parameters on disk pass through it beside their state. For each gather, parameters on disk are read through a
# ring of their own. In a shared ring, updates could hold all buffers while they wait for a gather, and the gather would
# wait for a buffer.
#
# If parameters are updated whole, a buffer holds the state of the largest of them, in whole blocks. Their optimizer is
# another than that of parameters whose elements are updated alone, so both have a ring. Less than a cache line of gap
# for each statistic is not counted.
#
# The narrowest statistic is guessed from the bytes of all statistics of one element: its width is the largest power of
# two that divides them, at most 4 bytes. Not counted: tensors held by `state_dict()` or `load_state_dict()`.


NUM_DISK_STAGING = 3
"""Buffers of the ring: one is read, one updated, one written."""
DISK_STAGING_BYTES = 16 * MIB
"""Bytes of a buffer, unless its blocks need more: 4 blocks for 4 threads, or 2 M elements of Adam's two fp32
moments."""
DISK_BLOCK_BYTES = 4 * MIB
"""Bytes of one read or write, and of one checksum. Larger blocks were no faster."""
NUM_GATHER_STAGING = 4
"""Buffers of the ring of gathers, which reads as far ahead of the copies to the device."""
GATHER_STAGING_BYTES = 16 * MIB
"""Bytes of each of them, and of one piece of a gather."""
HUGE_PAGE_BYTES = 2 * MIB
_WIDEST_BYTES = 4


def disk_staging_bytes(buckets: Iterable[Bucket], with_params: Collection[BucketId] = ()) -> int:
    """Return the bytes of the rings for `buckets` with their state on disk, or 0 if they have no state; the trained
    parameters of those `with_params` are there too."""
    buffer_bytes: dict[bool, int] = {}
    for bucket in buckets:
        whole, width = bucket.own_update, -(-bucket.state_nbytes // max(bucket.numel, 1))
        if not width:
            continue
        if whole is None:
            narrowest = min(width & -width, _WIDEST_BYTES)
            if bucket.id in with_params:
                own_width = bucket.nbytes // max(bucket.numel, 1)
                narrowest, width = min(narrowest, own_width), width + own_width
            least_bytes = DISK_BLOCK_BYTES // narrowest * width
        else:
            least_bytes = -(-whole.most_state_nbytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
        key = whole is not None
        buffer_bytes[key] = max(buffer_bytes.get(key, DISK_STAGING_BYTES), least_bytes)
    aligned = (-(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES for nbytes in buffer_bytes.values())
    return sum(NUM_DISK_STAGING * nbytes + HUGE_PAGE_BYTES for nbytes in aligned)


def gather_staging_bytes(buckets: Iterable[Bucket]) -> int:
    """Return the bytes of the ring through which parameters of `buckets`, homes on disk, are gathered: 0 if there are
    none."""
    return NUM_GATHER_STAGING * GATHER_STAGING_BYTES + HUGE_PAGE_BYTES if any(True for _ in buckets) else 0


def rings_bytes(buckets: Iterable[Bucket], with_params: Collection[BucketId] = ()) -> int:
    """Return the bytes of the rings for `buckets` of which state, or the frozen parameters, are on disk; and, of those
    `with_params`, the trained parameters."""
    own = tuple(buckets)
    state_bytes = disk_staging_bytes((bucket for bucket in own if bucket.trainable), with_params)
    gathered = (bucket for bucket in own if not bucket.trainable or bucket.id in with_params)
    return state_bytes + gather_staging_bytes(gathered)


MOST_STREAMED_ROOMS = 4
"""Rooms on the device for pieces of a streamed update: one piece arrives, one is updated, one leaves, and one more
evens out lanes of unequal speed."""
LEAST_STREAMED_ROOM_BYTES = MIB
"""Bytes below which a bucket is not cut into more pieces: their copies would take less time than their launches."""
MOST_STREAMED_ROOM_BYTES = 32 * MIB
"""Larger pieces would only make the first copy in and the last copy out longer, beside which no other lane works."""


def streamed_rooms(nbytes: int) -> tuple[int, int]:
    """Return the number of rooms for streamed updates of buckets of at most `nbytes`, and the bytes of each room.

    All rooms together take at most `nbytes`.
    """
    num_rooms = min(max(nbytes // LEAST_STREAMED_ROOM_BYTES, 1), MOST_STREAMED_ROOMS)
    room_bytes = nbytes if num_rooms == 1 else nbytes // num_rooms // 256 * 256
    return num_rooms, min(room_bytes, MOST_STREAMED_ROOM_BYTES)


# ----------------------------------------------------------------------------------------------------------------------
# Seconds of ops, transfers and updates on a machine, in closed forms. More bytes never take fewer seconds.


def is_free(op: Op) -> bool:
    """Return whether `op` launches no kernel: a view, or a result computed inside its readers."""
    return op.flops == 0 and op.moved_bytes == 0


def op_s(op: Op, cluster: Cluster, dtype: str = "float32") -> float:
    """Return the seconds of all runs of `op` in a step on a device of `cluster` by the roofline model, or 0 if it
    launches no kernel. A collective in the graph takes the seconds of its messages too."""
    if is_free(op):
        return 0.0
    device = cluster.device
    flops_per_s = device.flops_per_s.get(dtype, device.flops_per_s["float32"])
    own_s = op.times * op.launches * device.launch_s + max(
        op.flops / flops_per_s, op.moved_bytes / device.memory_bytes_per_s
    )
    return own_s if op.ring is None else own_s + ring_s(op, cluster)


def is_along_data(op: Op, cluster: Cluster) -> bool:
    """Return whether `op` is a collective of the model itself between ranks along the data axes of `cluster`.

    One of as many ranks as the tensor axis has is taken to be along that axis.
    """
    num_along_tensor = 1 if cluster.tensor is None else cluster.tensor.num_ranks
    return op.ring is not None and op.ring.num_ranks not in {1, num_along_tensor}


def ring_s(op: Op, cluster: Cluster) -> float:
    """Return the seconds of the messages of all runs of `op`, a collective in the graph; 0 for another op.

    They take the link of the tensor axis, or of a ring of consecutive ranks along the data axes.
    """
    if op.ring is None:
        return 0.0
    tensor = None if is_along_data(op, cluster) else cluster.tensor
    link = cluster.link_of(op.ring.num_ranks) if tensor is None else tensor.link
    return op.ring.passes * _ring_s(op.ring.nbytes, op.ring.num_ranks, link, num_times=op.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive ops, from `first` to `last` (included), with their measured seconds together."""

    first: OpId
    last: OpId
    run_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.run_s < float("inf"):
            raise InvalidPlan(f"the ops from {self.first} to {self.last} took {self.run_s} s; expected 0 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured stretches, which do not overlap, with the activations that were recomputed or offloaded in that step,
    and the micro-batches in which its laps ran."""

    stretches: tuple[Stretch, ...] = ()
    activations: tuple[Activations, ...] = ()
    micro_batches: int = 1


def corrected_s(seconds: Sequence[float], index: Mapping[OpId, int], stretches: Sequence[Stretch]) -> list[float]:
    """Return the seconds of every op, with the ops of each stretch scaled to its measured seconds.

    `index` is the place of each op in `seconds`. Raises InvalidPlan if a stretch names an op without a place.
    """
    found = list(seconds)
    for stretch in stretches:
        if stretch.first not in index or stretch.last not in index:
            raise InvalidPlan(f"measured ops {stretch.first} to {stretch.last} are not all in this graph.")
        first, end = index[stretch.first], index[stretch.last] + 1
        priced_s = sum(seconds[first:end])
        for i in range(first, end):
            share = seconds[i] / priced_s if priced_s > 0 else 1 / (end - first)
            found[i] = stretch.run_s * share
    return found


def copy_s(nbytes: int, link: Link, num_copies: int = 1) -> float:
    """Return the seconds to copy `nbytes` between host and device in `num_copies` consecutive copies."""
    return num_copies * link.latency_s + nbytes / link.bytes_per_s


def collective_s(nbytes: int, cluster: Cluster, num_copies: int = 1) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `nbytes` in all over the ranks of a copy; 0 for a
    single rank."""
    num_shards = cluster.num_ranks // num_copies
    return _ring_s(nbytes, num_shards, cluster.link_of(num_shards))


def average_s(nbytes: int, cluster: Cluster, num_copies: int) -> float:
    """Return the seconds of the all-reduces over copies, of `nbytes` on each rank; 0 for a single copy.

    All shards of a bucket are averaged at the same time. Between nodes they share the network of a node; within a node
    each device has its own link.
    """
    num_at_once = min(cluster.num_ranks // num_copies, cluster.num_local_ranks) if cluster.is_over_nodes else 1
    return 2 * _ring_s(nbytes * num_at_once, num_copies, cluster.collective)


def _ring_s(nbytes: int, num_ranks: int, link: Link | None, num_times: int = 1) -> float:
    """Return the seconds in which `nbytes`, in `num_times` turns, pass once round a ring."""
    if link is None or num_ranks == 1:
        return 0.0
    return (num_ranks - 1) * (num_times * link.latency_s + nbytes / num_ranks / link.bytes_per_s)


ROUGH_DISK_BYTES_PER_S = 1e9
"""Order of magnitude of a shared NVMe drive: good enough to compare placements, not to predict seconds."""


def disk_s(bucket: Bucket, cluster: Cluster) -> float:
    """Return the seconds to read and write back the optimizer state of `bucket` on each rank of a node, which share the
    disk."""
    return disk_both_ways_s(bucket.shard_state_nbytes(), cluster)


def disk_both_ways_s(nbytes: int, cluster: Cluster) -> float:
    """Return the seconds in which each rank of a node reads `nbytes` from the disk that they share, and writes them
    back."""
    write_bytes_per_s = cluster.host.disk_write_bytes_per_s or ROUGH_DISK_BYTES_PER_S
    return disk_read_s(nbytes, cluster) + nbytes * cluster.num_local_ranks / write_bytes_per_s


def disk_read_s(nbytes: int, cluster: Cluster) -> float:
    """Return the seconds in which each rank of a node reads `nbytes` from the disk that they share."""
    return nbytes * cluster.num_local_ranks / (cluster.host.disk_read_bytes_per_s or ROUGH_DISK_BYTES_PER_S)


def host_memory_bytes_per_s(cluster: Cluster) -> float:
    """Return the bytes per second that host memory can read and write in all."""
    host, h2d, d2h, num_devices = cluster.host, cluster.h2d, cluster.d2h, cluster.num_local_ranks
    alone = (ADAM_BYTES_PER_ELEMENT * host.update_elements_per_s, num_devices * max(h2d.bytes_per_s, d2h.bytes_per_s))
    if host.busy_update_elements_per_s is None:
        return max(host.memory_bytes_per_s, *alone)
    copies = (h2d.busy_bytes_per_s or h2d.bytes_per_s) + (d2h.busy_bytes_per_s or d2h.bytes_per_s)
    return max(ADAM_BYTES_PER_ELEMENT * host.busy_update_elements_per_s + num_devices * copies, *alone)


def host_memory_s(nbytes: int, cluster: Cluster) -> float:
    """Return the seconds for every rank of a node to read or write `nbytes` of host memory."""
    return cluster.num_local_ranks * nbytes / host_memory_bytes_per_s(cluster)


def update_bytes(bucket: Bucket) -> int:
    """Return the bytes of host memory that an update of `bucket` reads and writes on a rank.

    State and parameters are read and written, gradients are read. The result is at most the bytes of Adam in fp32 if
    elements are updated by themselves.
    """
    nbytes = 2 * bucket.shard_state_nbytes() + 3 * bucket.shard_nbytes()
    if bucket.whole_update is not None:
        return nbytes if bucket.trainable else 0
    return min(nbytes, ADAM_BYTES_PER_ELEMENT * bucket.own_numel) if bucket.trainable else 0


MASTER_BYTES_PER_ELEMENT = {"bfloat16": 74, "float16": 12}
"""Bytes that an update on the device reads and writes per element with a master, in fp32 scratch tensors beside the
kernels of its class: see `optim.masters`. On the host one pass does it all for AdamW, and the same ops for others."""
_NARROW_BYTES_PER_ELEMENT = {"bfloat16": 300, "int8": 500}
"""Bytes that an update on the device reads and writes per element with narrower moments: an estimate from the number of
torch's ops that decode, round and encode them, not measured on a device."""
_ROUGH_OVER_FP32 = {"bfloat16": 0.82, "int8": 1.2}
"""`FormPrice.over_fp32` by dtype of the moments where it was not measured: of one thread of a machine on which the
arithmetic of 8-bit codes took longer than memory saved. See `benchmarks/state_precision_rates.py`."""
_BLOCKS_OVER_FP32 = {"bfloat16": 6.3, "float16": 1.4, "float32": 0.0}
_NARROW_BLOCKS_OVER_FP32 = 7.0
"""What an update block by block adds on the host, over the seconds of as many elements of AdamW in fp32: by dtype of
the parameters to join masters and split them, and to widen and round statistics in bf16. Of CPU seconds of one thread
of an AMD EPYC for 8.4 M elements, where torch's ops on integers and noise are slower than the memory: in bfloat16 SGD
added 5.8, SGD with momentum 6.9, Lion 6.2 and NAdam 7.2, in float16 the first three 1.2, 1.4 and 2.1."""
_LEAST_STATE_WITH_MASTER_BYTES = 10
"""Of an element: two fp32 moments and an int16 low half."""


def update_s(bucket: Bucket, tier: Tier, cluster: Cluster) -> float:
    """Return the seconds of the update of `bucket` by the device or the host, without transfers; 0 if it is frozen.

    Raises InvalidPlan if `tier` is the disk.
    """
    if not bucket.trainable:
        return 0.0
    if bucket.own_update is not None and tier is not Tier.DISK:
        launches_s = bucket.own_update.num_kernels * cluster.device.launch_s if tier is Tier.DEVICE else 0.0
        return launches_s + max(whole_update_s(bucket.own_update, tier, cluster))
    if tier is Tier.DEVICE:
        # What moves, over the bytes of the fused kernel for fp32.
        moved_bytes = ADAM_BYTES_PER_ELEMENT
        if bucket.state_dtype is not None:
            moved_bytes = _NARROW_BYTES_PER_ELEMENT[bucket.state_dtype]
        elif bucket.block_update is not None or _has_exact_master(bucket):
            moved_bytes += MASTER_BYTES_PER_ELEMENT.get(bucket.dtype, 0)
        over_fp32 = moved_bytes / ADAM_BYTES_PER_ELEMENT
        if cluster.host.update_forms and not cluster.copies_overlap:
            over_fp32 = _host_over_fp32(bucket, cluster.host)  # the same cores run the host's pass
        return cluster.device.launch_s + bucket.own_numel * over_fp32 / cluster.device.update_elements_per_s
    if tier is Tier.HOST:
        numel = _host_over_fp32(bucket, cluster.host) * bucket.own_numel
        return numel * cluster.num_local_ranks / cluster.host.update_elements_per_s
    raise InvalidPlan(f"bucket {bucket.id}: nothing can be updated on {tier}.")


def _host_over_fp32(bucket: Bucket, host: HostProfile) -> float:
    """Return the seconds of an update of `bucket` on the host over those of as many elements of AdamW in fp32."""
    if bucket.block_update is not None:
        narrow = 0.0 if bucket.state_dtype is None else _NARROW_BLOCKS_OVER_FP32
        return 1.0 + _BLOCKS_OVER_FP32[bucket.dtype] + narrow
    if bucket.state_dtype is None and not _has_exact_master(bucket):
        return 1.0
    form = (bucket.dtype, bucket.state_dtype or "float32")
    measured = (each.over_fp32 for each in host.update_forms if (each.dtype, each.state_dtype) == form)
    return next(measured, 1.0 if bucket.state_dtype is None else _ROUGH_OVER_FP32[bucket.state_dtype])


def _has_exact_master(bucket: Bucket) -> bool:
    return bucket.state_nbytes >= _LEAST_STATE_WITH_MASTER_BYTES * bucket.numel


_ROUGH_HOST_FLOPS_PER_S = 1e11
"""Floating-point operations per second of the cores of one rank where they were not measured: an order of magnitude,
which tells matrix products from passes over memory."""


def whole_update_s(whole: WholeUpdate, tier: Tier, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of the matrix products, and those of the memory, of updates of whole tensors on `tier`: the
    longer of them count, beside the launches on a device."""
    if tier is Tier.HOST:
        flops_per_s, share, moved_s = (
            cluster.host.flops_per_s,
            cluster.num_local_ranks,
            host_memory_s(whole.moved_bytes, cluster),
        )
    else:
        device = cluster.device
        flops_per_s, share, moved_s = device.flops_per_s, 1, whole.moved_bytes / device.memory_bytes_per_s
    if flops_per_s is None:
        return whole.total_flops / _ROUGH_HOST_FLOPS_PER_S, moved_s
    products_s = sum(flops / flops_per_s.get(dtype, flops_per_s["float32"]) for dtype, flops in whole.flops)
    return share * products_s, moved_s


def add_bytes(bucket: Bucket) -> int:
    """Return the bytes of memory read and written to add the gradients of `bucket` to their sums on a rank; 0 if there
    are no sums."""
    return bucket.shard_grad_nbytes() + 2 * bucket.own_sum_nbytes if bucket.sum_nbytes else 0


def add_s(bucket: Bucket, tier: Tier, cluster: Cluster) -> float:
    """Return the seconds to add the gradients of `bucket` to their sums in the memory `tier`."""
    nbytes = add_bytes(bucket)
    if not nbytes or tier is not Tier.DEVICE:
        return host_memory_s(nbytes, cluster)
    return len(bucket.params) * cluster.device.launch_s + nbytes / cluster.device.memory_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedCopies:
    """Seconds of the copies of a streamed update, of which no other lane is in the way.

    ```text
      h2d   |-0-|-1-|-2-|-3-|             there_s: from the first copy there to the last
      d2h       |-0--|-1--|-2--|-3--|     back_s: the copies back; first_s after `there_s` began, last_s of the last
    ```
    """

    there_s: float
    """The copies to the device. If those back are slower, a piece waits for a room on the device, and its lane too."""
    first_s: float
    """The copies to the device of the first piece."""
    back_s: float
    """The copies back."""
    num_pieces: float
    """1 if the copies back begin behind the update of the last element."""
    are_whole: bool = False
    """If True, pieces are whole tensors in two rooms, and copies of a bucket pass beside the updates of the others."""

    @property
    def last_s(self) -> float:
        """The seconds of the last piece's way back, beside which there is no other copy of the update."""
        return self.back_s / self.num_pieces

    @property
    def alone_s(self) -> float:
        """The seconds of all copies, both ways at once where they can be; 0 if they pass beside other updates."""
        return 0.0 if self.are_whole else self.there_s + self.last_s

    def pace_s(self, update_s: float) -> float:
        """Return the seconds from one piece to the next, of tensors in two rooms whose updates take `update_s`: a room
        is taken while its piece arrives, is updated, and leaves."""
        each = (self.first_s, update_s / self.num_pieces, self.last_s)
        return max(*each, sum(each) / NUM_WHOLE_ROOMS)


def streamed_copies(bucket: Bucket, param: Tier, cluster: Cluster) -> StreamedCopies:
    """Return the seconds of the copies of a streamed update; `param` is the parameters' home.

    Each moment (two, as of Adam), parameter and gradient is a copy of its own. A bucket of several pieces passes both
    links at once.
    """
    there_bytes, back_bytes = stream_bytes(bucket, param)
    num_states, num_params = 2 * len(bucket.params), 0 if param is Tier.DEVICE else len(bucket.params)
    there_s = copy_s(there_bytes, cluster.h2d, num_states + 2 * num_params)
    back_s = copy_s(back_bytes, cluster.d2h, num_states + num_params)
    if not (cluster.h2d.overlaps_compute and cluster.d2h.overlaps_compute):
        return StreamedCopies(there_s=there_s, first_s=there_s, back_s=back_s, num_pieces=1.0)
    # Not the whole number of pieces that `streamed_rooms` gives: more bytes would take fewer seconds at some sizes.
    room_bytes = max(there_bytes / MOST_STREAMED_ROOMS, LEAST_STREAMED_ROOM_BYTES)
    if bucket.whole_update is None:
        room_bytes = min(room_bytes, MOST_STREAMED_ROOM_BYTES)
    else:
        room_bytes = streamed_bytes(bucket, param) / NUM_WHOLE_ROOMS
    num_pieces = max(there_bytes / max(room_bytes, 1), 1.0)
    first_s, last_s = there_s / num_pieces, back_s / num_pieces
    if bucket.whole_update is not None:
        return StreamedCopies(there_s=there_s, first_s=first_s, back_s=back_s, num_pieces=num_pieces, are_whole=True)
    blocked_s = first_s + back_s - last_s
    return StreamedCopies(there_s=max(there_s, blocked_s), first_s=first_s, back_s=back_s, num_pieces=num_pieces)


def stream_bytes(bucket: Bucket, param: Tier) -> tuple[int, int]:
    """Return the bytes that a streamed update copies to the device, and the bytes it copies back, on this rank."""
    back_bytes = bucket.shard_state_nbytes() + (0 if param is Tier.DEVICE else bucket.shard_nbytes())
    return back_bytes + (0 if param is Tier.DEVICE else bucket.update_grad_nbytes()), back_bytes
