"""The text of a fleet, such as `2 x l4-24g + 1 x a6000-48g | 1 x p40-24g`, to a `Fleet` of common machines.

```text
  FLEET   HOST | HOST | ...         hosts, over a network
  HOST    TERM + TERM + ...         devices of one host
  TERM    NAME, DEVICES x NAME      as `presets.parse_hardware` takes it; NODES x DEVICES x NAME stands for several
                                    hosts, so it is a host text of its own
```

Ranks are numbered in this order. A host with devices of several kinds is the smallest of the usual hosts of its
devices, so a plan for it fits any of them. Its devices reach each other through host memory: drivers allow peer access
only between devices of one kind.
"""

from dataclasses import replace

from elixir_compile.base.errors import InvalidOption, UnknownHardware
from elixir_compile.ir.hardware.cluster import Cluster, HostProfile, Link, Node
from elixir_compile.ir.hardware.fleet import Fleet, fleet_of_nodes
from elixir_compile.ir.hardware.presets import MAX_DEVICES_PER_NODE, parse_hardware, preset, preset_names
from elixir_compile.ir.hardware.table import MACHINES


def is_fleet(text: str) -> bool:
    """Return whether `text` names devices of several kinds or several hosts, and not the machine of one term."""
    return "+" in text or "|" in text


def parse_fleet(text: str) -> Fleet:
    """Return the fleet in `text`, a single term included.

    Raises UnknownHardware with the nearest name and the wrong term, and InvalidOption if a count is out of range, or a
    device that brings a host of its own shares a host.
    """
    hosts = [host for part in text.split("|") for host in _hosts(part, text)]
    links = [_network_of(host) for host in hosts] if len(hosts) > 1 else [host[0].peer for host in hosts]
    collective = min((link for link in links if link is not None), key=lambda link: link.bytes_per_s, default=None)
    numbers = [number for number, host in enumerate(hosts) for _ in host]
    return fleet_of_nodes([node for host in hosts for node in host], numbers, collective)


def _hosts(part: str, text: str) -> list[list[Node]]:
    """Return the nodes of each rank of each host in `part`, which has no `|`."""
    terms = [term.strip() for term in part.split("+")]
    if not all(terms):
        raise UnknownHardware(text, preset_names())
    if len(terms) == 1:
        cluster = parse_hardware(terms[0])
        return [[node] * node.num_devices for node in cluster.nodes]
    parsed = [parse_hardware(term) for term in terms]
    several = next((term for term, cluster in zip(terms, parsed, strict=True) if len(cluster.nodes) > 1), None)
    if several is not None:
        raise InvalidOption(
            "hardware", text, f"devices of one host beside `+`; write the hosts of {several!r} with `|`"
        )
    num_devices = sum(cluster.num_ranks for cluster in parsed)
    if num_devices > MAX_DEVICES_PER_NODE:
        raise InvalidOption("hardware", text, f"1 to {MAX_DEVICES_PER_NODE} devices on a host; hosts are parted by `|`")
    return [_shared_host(parsed, num_devices, text)]


def _shared_host(parsed: list[Cluster], num_devices: int, text: str) -> list[Node]:
    """Return the node of each rank on one host with the devices of all machines `parsed`."""
    names = [cluster.device.name for cluster in parsed]
    nodes = {name: preset(name, num_devices).nodes[0] for name in names}
    if len(nodes) == 1:
        return [nodes[names[0]]] * num_devices
    for name in nodes:
        if MACHINES[name].board.is_per_device:
            raise InvalidOption("hardware", text, f"{name} on hosts of its own, as each brings its host")
    host = min((node.host for node in nodes.values()), key=lambda host: (host.memory_bytes, host.memory_bytes_per_s))
    peer = Link(
        # Each byte is written to host memory and read from it.
        bytes_per_s=min(
            host.memory_bytes_per_s / (2 * num_devices), *(node.h2d.bytes_per_s for node in nodes.values())
        ),
        latency_s=max(node.peer.latency_s for node in nodes.values() if node.peer is not None),
        overlaps_compute=True,
        source="the slowest link to host memory, through it, as drivers allow no peer access between kinds of devices",
    )
    own = {name: _on_host(node, host, peer) for name, node in nodes.items()}
    return [own[cluster.device.name] for cluster in parsed for _ in range(cluster.num_ranks)]


def _on_host(node: Node, host: HostProfile, peer: Link) -> Node:
    """Return `node` on another `host`, whose memory bounds its links."""
    part_bytes_per_s = host.memory_bytes_per_s / node.num_devices
    h2d, d2h = (replace(link, bytes_per_s=min(link.bytes_per_s, part_bytes_per_s)) for link in (node.h2d, node.d2h))
    return replace(node, host=host, h2d=h2d, d2h=d2h, peer=peer)


def _network_of(host: list[Node]) -> Link:
    """Return the network of a host: that of its device with the slowest one, at most as fast as its peer link."""
    kinds = {node.device.name for node in host}
    links = [preset(kind, len(host), 2).network for kind in sorted(kinds)]
    found = min((link for link in links if link is not None), key=lambda link: link.bytes_per_s)
    peer = host[0].peer
    return found if peer is None else replace(found, bytes_per_s=min(found.bytes_per_s, peer.bytes_per_s))
