"""Seconds of everything a plan can do on one machine, looked up once so that thousands of schedules can be played."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elixir_compile.cost import gather_s, offload_s, op_s, update_s
from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices by bucket id, and running sums of op seconds."""

    before_s: tuple[float, ...]
    """Seconds of all ops before op i; one entry more than there are ops."""
    gather_s: Mapping[str, float]
    offload_s: Mapping[str, float]
    device_update_s: Mapping[str, float]
    host_update_s: Mapping[str, float]
    h2d_overlaps: bool
    d2h_overlaps: bool

    def run_s(self, first: int, last: int) -> float:
        """Return the seconds of the ops from index `first` to index `last`, both included."""
        return self.before_s[last + 1] - self.before_s[first]


def prices(graph: StepGraph, buckets: Sequence[Bucket], cluster: Cluster) -> Prices:
    """Return the prices of `graph`'s ops and of what can happen to `buckets` on `cluster`."""
    dtypes = {storage.id: storage.dtype for storage in graph.storages}
    seconds = (op_s(op, cluster.device, dtypes[op.writes[0]] if op.writes else "float32") for op in graph.ops)
    return Prices(
        before_s=tuple(accumulate(seconds, initial=0.0)),
        gather_s={bucket.id: gather_s(bucket, cluster.h2d) for bucket in buckets},
        offload_s={bucket.id: offload_s(bucket, cluster.d2h) for bucket in buckets},
        device_update_s={bucket.id: update_s(bucket, Tier.DEVICE, cluster) for bucket in buckets},
        host_update_s={bucket.id: update_s(bucket, Tier.HOST, cluster) for bucket in buckets},
        h2d_overlaps=cluster.h2d.overlaps_compute,
        d2h_overlaps=cluster.d2h.overlaps_compute,
    )
