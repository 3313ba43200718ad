"""Seconds of everything a plan can do on one machine, looked up once so that thousands of schedules can be played."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elixir_compile.cost import Stretch, collective_s, copy_s, corrected_s, op_s, update_s
from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Lane, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices by bucket id, and running sums of op seconds."""

    before_s: tuple[float, ...]
    """Seconds of all ops before op i; one entry more than there are ops."""
    h2d_s: Mapping[str, float]
    """Host to device: what one rank owns of a bucket's parameters."""
    d2h_s: Mapping[str, float]
    """Device to host: what one rank owns of a bucket's gradient."""
    collective_s: Mapping[str, float]
    """An all-gather of the bucket, or the reduce-scatter of its gradient; 0 for one rank."""
    device_update_s: Mapping[str, float]
    host_update_s: Mapping[str, float]
    lane_of: Mapping[Lane, Lane]
    """The lane that each lane's work really takes: a copy that does not overlap compute is work for the same cores."""

    @property
    def is_one_memory(self) -> bool:
        """Whether device and host are the same cores, so that an update reads both where they are."""
        return self.lane_of[Lane.HOST] is Lane.COMPUTE

    def run_s(self, first: int, last: int) -> float:
        """Return the seconds of the ops from index `first` to index `last`, both included."""
        return self.before_s[last + 1] - self.before_s[first]


def prices(graph: StepGraph, buckets: Sequence[Bucket], cluster: Cluster, measured: Sequence[Stretch] = ()) -> Prices:
    """Return the prices of `graph`'s ops and of what can happen to `buckets` on `cluster`; `measured` seconds count
    in place of the roofline's."""
    dtypes = {storage.id: storage.dtype for storage in graph.storages}
    seconds = [op_s(op, cluster.device, dtypes[op.writes[0]] if op.writes else "float32") for op in graph.ops]
    index = {op.id: i for i, op in enumerate(graph.ops)} if measured else {}
    lane_of = _lanes(cluster)
    device_update_s: dict[str, float] = {bucket.id: update_s(bucket, Tier.DEVICE, cluster) for bucket in buckets}
    host_update_s: dict[str, float] = {bucket.id: update_s(bucket, Tier.HOST, cluster) for bucket in buckets}
    if lane_of[Lane.HOST] is Lane.COMPUTE:
        # The same cores: that an update is faster for being called the host's is noise of the measurement.
        host_update_s = {name: max(seconds, device_update_s[name]) for name, seconds in host_update_s.items()}
    return Prices(
        before_s=tuple(accumulate(corrected_s(seconds, index, measured), initial=0.0)),
        h2d_s={bucket.id: copy_s(bucket, cluster.h2d) for bucket in buckets},
        d2h_s={bucket.id: copy_s(bucket, cluster.d2h) for bucket in buckets},
        collective_s={bucket.id: collective_s(bucket.nbytes, cluster) for bucket in buckets},
        device_update_s=device_update_s,
        host_update_s=host_update_s,
        lane_of=lane_of,
    )


def _lanes(cluster: Cluster) -> Mapping[Lane, Lane]:
    overlaps = {
        Lane.H2D: cluster.h2d.overlaps_compute,
        Lane.D2H: cluster.d2h.overlaps_compute,
        Lane.GATHER: cluster.collective is not None and cluster.collective.overlaps_compute,
        Lane.REDUCE: cluster.collective is not None and cluster.collective.overlaps_compute,
        # Where neither direction overlaps, device and host are the same cores.
        Lane.HOST: cluster.h2d.overlaps_compute or cluster.d2h.overlaps_compute,
    }
    return {Lane.COMPUTE: Lane.COMPUTE, **{lane: lane if own else Lane.COMPUTE for lane, own in overlaps.items()}}
