"""The machines that a plan is for: nodes of equal devices, the cluster they form, and its JSON."""

import hashlib
from dataclasses import dataclass, replace

from elixir_compile.codec import Form, from_json, to_json
from elixir_compile.errors import InvalidPlan, InvalidProfile, ProfileFileError
from elixir_compile.hardware.device import DeviceProfile, HostProfile, Link, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host and `num_devices` equal devices."""

    device: DeviceProfile
    host: HostProfile
    """The whole host, which its devices share."""
    h2d: Link
    """From host memory to one device, while all devices of the node use theirs."""
    d2h: Link
    peer: Link | None = None
    """What one device sends around a ring of all devices of the node; None for a single device."""
    num_devices: int = 1

    def __post_init__(self) -> None:
        what = f"node of {self.device.name}"
        require_positive(what, num_devices=self.num_devices)
        if self.num_devices > 1 and self.peer is None:
            raise InvalidProfile(what, "peer", f"a link, as there are {self.num_devices} devices", None)


MOST_RANKS = 1 << 20
"""More in a plan or a machine are a slip of the pen, which should not fill the memory: shards are listed by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes; one rank per device."""

    nodes: tuple[Node, ...]
    network: Link | None = None
    """What a ring over all devices carries from one node to the next; None for a single node."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InvalidPlan("a cluster needs at least one node.")
        if self.num_ranks > MOST_RANKS:
            raise InvalidPlan(f"a cluster has {self.num_ranks} devices; expected at most {MOST_RANKS}.")
        if any(node != self.nodes[0] for node in self.nodes):
            raise InvalidPlan("the nodes of a cluster must be equal; unequal ones are not planned for yet.")
        if len(self.nodes) > 1 and self.network is None:
            raise InvalidProfile("cluster", "network", f"a link, as there are {len(self.nodes)} nodes", None)

    @property
    def name(self) -> str:
        """How plans name it: `4 x a100-40g`, and `2 x 4 x a100-40g` for two nodes of four."""
        nodes = f"{len(self.nodes)} x " if len(self.nodes) > 1 else ""
        return f"{nodes}{self.num_local_ranks} x {self.device.name}"

    @property
    def num_ranks(self) -> int:
        """Devices in all."""
        return sum(node.num_devices for node in self.nodes)

    @property
    def num_local_ranks(self) -> int:
        """Devices that share one host."""
        return self.nodes[0].num_devices

    def alone(self) -> "Cluster":
        """Return one device of it, with the host to itself."""
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
        """The link that bounds a ring over all ranks: the network, else the peer link; None for one rank."""
        first, *others = self.nodes
        return self.network if others else first.peer


MACHINE_FORMAT = 1

_MACHINE = Form(what="machine", version=MACHINE_FORMAT, error=ProfileFileError)


def cluster_to_json(cluster: Cluster) -> str:
    """Return `cluster` as JSON; equal clusters have equal text."""
    return to_json(_MACHINE, cluster)


def cluster_from_json(text: str) -> Cluster:
    """Return the cluster in `text`; ProfileFileError names the field that is not right, `nodes[0].h2d.bytes_per_s`."""
    return from_json(_MACHINE, Cluster, text)


def hardware_fingerprint(cluster: Cluster) -> str:
    """Return 12 hex digits that two clusters share only when every number of theirs is equal."""
    return hashlib.sha256(cluster_to_json(cluster).encode()).hexdigest()[:12]
