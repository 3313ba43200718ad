"""The machine as one slice of a tensor-parallel model sees it: the ranks that hold the same part along the tensor axis.

```text
  2 nodes of 4 devices, tensor axis of 4      each slice has 1 device of each node, a quarter of each host, and a
                                              quarter of the network; the tensor axis is the peer link of a node
  2 nodes of 4 devices, tensor axis of 2      each slice has 2 devices of each node, half of each host and network
  4 nodes of 2 devices, tensor axis of 4      each slice has 1 device of each two nodes, half of a host; the tensor
                                              axis is the network
```

All slices gather and reduce at once, so they share what is shared. The tensor axis is taken to be the last axis of the
mesh: its ranks are consecutive. Not modelled: collectives of the tensor axis and of the data axis at the same time.
"""

from dataclasses import replace

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.hardware.cluster import Cluster, HostProfile, Link, TensorRing


def along_data(cluster: Cluster, num_tensor: int) -> Cluster:
    """Return the slice of `cluster` along the data axes, with a tensor axis of `num_tensor` ranks.

    Raises InvalidPlan if the ranks of `cluster` cannot be divided so.
    """
    num_local = cluster.num_local_ranks
    if cluster.num_elsewhere or cluster.num_ranks % num_tensor:
        raise InvalidPlan(
            f"{cluster.name} has no tensor axis of {num_tensor} ranks: expected equal nodes, divided by it."
        )
    if num_tensor == 1:
        return cluster
    is_within = num_local % num_tensor == 0
    num_devices = num_local // num_tensor if is_within else 1
    num_slices = num_local // num_devices
    num_nodes = cluster.num_ranks // num_tensor // num_devices
    first = cluster.nodes[0]
    node = replace(
        first,
        num_devices=num_devices,
        peer=first.peer if num_devices > 1 else None,
        host=_part_of_host(first.host, num_slices),
    )
    between = cluster.network if cluster.is_over_nodes else first.peer
    link = first.peer if is_within else between
    if link is None:
        raise InvalidPlan(f"{cluster.name} has no link for a tensor axis of {num_tensor} ranks.")
    return Cluster(
        nodes=(node,) * num_nodes,
        network=_part_of_link(between, num_slices) if num_nodes > 1 and between is not None else None,
        tensor=TensorRing(num_ranks=num_tensor, link=link),
    )


def _part_of_link(link: Link, num_slices: int) -> Link:
    busy = link.busy_bytes_per_s
    return replace(
        link,
        bytes_per_s=link.bytes_per_s / num_slices,
        busy_bytes_per_s=None if busy is None else busy / num_slices,
    )


def _part_of_host(host: HostProfile, num_slices: int) -> HostProfile:
    rates = {
        name: None if (rate := getattr(host, name)) is None else rate / num_slices
        for name in (
            "memory_bytes_per_s",
            "update_elements_per_s",
            "busy_update_elements_per_s",
            "disk_read_bytes_per_s",
            "disk_write_bytes_per_s",
        )
    }
    sizes = {name: getattr(host, name) // num_slices for name in ("memory_bytes", "pinned_bytes", "reserve_bytes")}
    return replace(host, **rates, **sizes)
