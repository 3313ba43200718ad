"""The machines a plan is for."""

from dataclasses import dataclass, replace

from elixir_compile.errors import InvalidPlan, InvalidProfile
from elixir_compile.hardware.device import DeviceProfile, HostProfile
from elixir_compile.hardware.link import Link
from elixir_compile.hardware.node import Node

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
