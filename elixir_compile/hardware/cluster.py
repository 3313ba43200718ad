"""Nodes of equal devices, clusters of equal nodes, and their JSON."""

import hashlib
from dataclasses import dataclass, replace

from elixir_compile.codec import Form, from_json, to_json
from elixir_compile.errors import InvalidPlan, InvalidProfile, ProfileFileError
from elixir_compile.hardware.device import DeviceProfile, HostProfile, Link, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host with `num_devices` equal devices."""

    device: DeviceProfile
    host: HostProfile
    """The host, shared by all devices of the node."""
    h2d: Link
    """From host memory to each device, while all devices of the node copy."""
    d2h: Link
    peer: Link | None = None
    """From each device to the next, in a ring of all devices of the node; None for a single device."""
    num_devices: int = 1

    def __post_init__(self) -> None:
        what = f"node of {self.device.name}"
        require_positive(what, num_devices=self.num_devices)
        if self.num_devices > 1 and self.peer is None:
            raise InvalidProfile(what, "peer", f"a link, as there are {self.num_devices} devices", None)


MOST_RANKS = 1 << 20
"""The most ranks of a plan or a machine. Shards are listed by rank, so a typing error must not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes, with a rank for each device."""

    nodes: tuple[Node, ...]
    network: Link | None = None
    """From each node to the next, in a ring of all devices; None for a single node."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InvalidPlan("a cluster needs at least one node.")
        if self.num_ranks > MOST_RANKS:
            raise InvalidPlan(f"a cluster has {self.num_ranks} devices; expected at most {MOST_RANKS}.")
        if any(node != self.nodes[0] for node in self.nodes):
            raise InvalidPlan("the nodes of a cluster must be equal; clusters of unequal nodes are not supported.")
        if len(self.nodes) > 1 and self.network is None:
            raise InvalidProfile("cluster", "network", f"a link, as there are {len(self.nodes)} nodes", None)

    @property
    def name(self) -> str:
        """The name in plans: `4 x a100-40g`, or `2 x 4 x a100-40g` for two nodes of four devices."""
        nodes = f"{len(self.nodes)} x " if len(self.nodes) > 1 else ""
        return f"{nodes}{self.num_local_ranks} x {self.device.name}"

    @property
    def num_ranks(self) -> int:
        """Number of devices of all nodes."""
        return sum(node.num_devices for node in self.nodes)

    @property
    def num_local_ranks(self) -> int:
        """Number of devices of each node."""
        return self.nodes[0].num_devices

    def alone(self) -> "Cluster":
        """Return a cluster of a single device, with a host of its own."""
        return Cluster(nodes=(replace(self.nodes[0], num_devices=1, peer=None),))

    @property
    def device(self) -> DeviceProfile:
        return self.nodes[0].device

    @property
    def host(self) -> HostProfile:
        return self.nodes[0].host

    @property
    def h2d(self) -> Link:
        return self.nodes[0].h2d

    @property
    def d2h(self) -> Link:
        return self.nodes[0].d2h

    @property
    def collective(self) -> Link | None:
        """The slowest link of a ring over all ranks: the network, else the peer link; None for a single rank."""
        first, *others = self.nodes
        return self.network if others else first.peer


MACHINE_FORMAT = 1

_MACHINE = Form(what="machine", version=MACHINE_FORMAT, error=ProfileFileError)


def cluster_to_json(cluster: Cluster) -> str:
    """Return `cluster` as JSON; equal clusters have equal text."""
    return to_json(_MACHINE, cluster)


def cluster_from_json(text: str) -> Cluster:
    """Return the cluster in `text`. Raises ProfileFileError with the wrong field, as `nodes[0].h2d.bytes_per_s`."""
    return from_json(_MACHINE, Cluster, text)


def hardware_fingerprint(cluster: Cluster) -> str:
    """Return 12 hex digits of the SHA-256 of the JSON of `cluster`, which holds all of its numbers."""
    return hashlib.sha256(cluster_to_json(cluster).encode()).hexdigest()[:12]
