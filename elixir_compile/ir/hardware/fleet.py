"""Fleets: ranks whose devices and hosts differ, with their JSON, and the text from which one is made, such as `2 x
l4-24g + 1 x a6000-48g | 1 x p40-24g`.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import InvalidOption, InvalidProfile, ProfileFileError, UnknownHardware
from elixir_compile.ir.hardware.cluster import MOST_RANKS, Cluster, Link, Node
from elixir_compile.ir.hardware.presets import MAX_DEVICES_PER_NODE, parse_hardware, preset, preset_names
from elixir_compile.ir.hardware.table import MACHINES

# ----------------------------------------------------------------------------------------------------------------------
# Fleets: ranks whose devices and hosts differ, as a value with a name and a JSON.
#
#   Fleet    2 x l4-24g + 1 x a6000-48g | 1 x p40-24g
#   seats    rank 0   rank 1   rank 2      rank 3
#   host     0        0        0           1
#
# `A + B` are devices of one host, `A | B` are hosts. A rank plans for its seat: a `Cluster` in which all ranks are as
# it is, so that formulas for equal ranks give the seconds of this rank.


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The device, the host and the links of one rank."""

    cluster: Cluster
    """A single node with the device and the host of this rank. `num_devices` is the number of ranks on the host,
    whatever their devices are, and `num_elsewhere` the number of ranks on other hosts."""
    host: int = 0
    """The number of the host: equal for ranks that share one."""

    def __post_init__(self) -> None:
        if len(self.cluster.nodes) != 1:
            raise InvalidProfile("seat", "cluster", "a single node", f"{len(self.cluster.nodes)} nodes")
        if self.host < 0:
            raise InvalidProfile("seat", "host", "0 or more", self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The seats of all ranks, in the order of ranks."""

    seats: tuple[Seat, ...]
    collective: Link | None = None
    """The slowest link of a ring over all ranks, which all collectives pass; None for a single rank."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.seats) <= MOST_RANKS:
            raise InvalidProfile("fleet", "seats", f"1 to {MOST_RANKS} seats", len(self.seats))
        if len(self.seats) > 1 and self.collective is None:
            raise InvalidProfile("fleet", "collective", f"a link, as there are {len(self.seats)} ranks", None)
        num_on = Counter(seat.host for seat in self.seats)
        for rank, seat in enumerate(self.seats):
            num_here, num_elsewhere = num_on[seat.host], len(self.seats) - num_on[seat.host]
            found = (seat.cluster.num_local_ranks, seat.cluster.num_elsewhere)
            if found != (num_here, num_elsewhere):
                expected = f"{num_here} devices on its host and {num_elsewhere} elsewhere"
                raise InvalidProfile("fleet", f"seats[{rank}].cluster", expected, found)

    @property
    def name(self) -> str:
        """The name, as the command line takes it: `2 x l4-24g + 1 x a6000-48g | 1 x p40-24g`, or `2 x 8 x h100-80g` for
        hosts of equal devices."""
        hosts = [
            " + ".join(f"{count} x {device}" for device, count in _runs([seat.cluster.device.name for seat in seats]))
            for _, seats in itertools.groupby(self.seats, key=lambda seat: seat.host)
        ]
        return " | ".join(
            " | ".join([host] * count) if count == 1 or "+" in host else f"{count} x {host}"
            for host, count in _runs(hosts)
        )

    @property
    def num_ranks(self) -> int:
        return len(self.seats)

    def seen_by(self, rank: int) -> Cluster:
        """Return the machine for which `rank` plans: all ranks are as it is, and collectives pass the slowest link."""
        cluster = self.seats[rank].cluster
        if cluster.num_elsewhere:
            return replace(cluster, network=self.collective)
        return replace(cluster, nodes=(replace(cluster.nodes[0], peer=self.collective),))

    def classes(self, labels: Sequence[Hashable] = ()) -> tuple[tuple[int, ...], ...]:
        """Return the ranks in classes, each in ascending order, in the order of their first ranks.

        Ranks of a class have equal machines and, if given, equal `labels`: one for each rank, as its share and its
        graph. Raises ValueError if there are labels, but not one for each rank.
        """
        found: dict[tuple[int, Hashable], list[int]] = {}
        machines: list[Cluster] = []
        for rank, (seat, label) in enumerate(zip(self.seats, labels or (None,) * self.num_ranks, strict=True)):
            if seat.cluster not in machines:
                machines.append(seat.cluster)
            found.setdefault((machines.index(seat.cluster), label), []).append(rank)
        return tuple(map(tuple, found.values()))

    def as_cluster(self) -> Cluster | None:
        """Return the fleet as equal nodes of equal devices; None if seats differ, or hosts have unequal numbers of
        ranks."""
        first = self.seats[0].cluster
        sizes = [len(list(seats)) for _, seats in itertools.groupby(self.seats, key=lambda seat: seat.host)]
        if len(self.classes()) > 1 or len(set(sizes)) > 1:
            return None
        network = self.collective if len(sizes) > 1 else None
        return Cluster(nodes=first.nodes * len(sizes), network=network)


def fleet_of(cluster: Cluster) -> Fleet:
    """Return the ranks of `cluster`, which are all equal, as a fleet."""
    if cluster.num_elsewhere:
        raise InvalidProfile("fleet", "cluster", "a machine with all of its ranks", cluster.name)
    num_local = cluster.num_local_ranks
    own = Cluster(nodes=cluster.nodes[:1], network=cluster.network, num_elsewhere=cluster.num_ranks - num_local)
    seats = tuple(Seat(cluster=own, host=rank // num_local) for rank in range(cluster.num_ranks))
    return Fleet(seats=seats, collective=cluster.collective)


def fleet_of_nodes(nodes: Sequence[Node], hosts: Sequence[int], collective: Link | None) -> Fleet:
    """Return the fleet of ranks on `nodes`, one each, on the hosts of the numbers `hosts`, joined by `collective`."""
    num_on = Counter(hosts)
    seats: list[Seat] = []
    for node, host in zip(nodes, hosts, strict=True):
        num_elsewhere = len(nodes) - num_on[host]
        own = replace(node, num_devices=num_on[host], peer=(node.peer or collective) if num_on[host] > 1 else None)
        cluster = Cluster(nodes=(own,), network=collective if num_elsewhere else None, num_elsewhere=num_elsewhere)
        seats.append(Seat(cluster=cluster, host=host))
    return Fleet(seats=tuple(seats), collective=collective)


_ALIKE = 0.1
"""Equal devices measure rates that differ by a few percent; kinds of devices differ by more."""


def with_like_seats(fleet: Fleet) -> Fleet:
    """Return `fleet` with equal seats for ranks whose devices have the same name and, within 10 %, the same figures.

    Else the noise of a measurement would make a class of each of eight equal devices. A rank gets the seat of the first
    rank that it is like; hosts keep their numbers.
    """

    def are_alike(one: Cluster, other: Cluster) -> bool:
        counts = [(cluster.device.name, cluster.num_local_ranks, cluster.num_elsewhere) for cluster in (one, other)]
        if counts[0] != counts[1] or set(one.device.flops_per_s) != set(other.device.flops_per_s):
            return False
        pairs = zip(_figures(one), _figures(other), strict=True)
        return all(abs(own - its) <= _ALIKE * max(own, its) for own, its in pairs)

    firsts: list[Seat] = []
    seats: list[Seat] = []
    for seat in fleet.seats:
        like = next((first for first in firsts if are_alike(first.cluster, seat.cluster)), None)
        if like is None:
            firsts.append(seat)
        seats.append(seat if like is None else replace(seat, cluster=like.cluster))
    return replace(fleet, seats=tuple(seats))


def _figures(cluster: Cluster) -> list[float]:
    """Return the figures of a seat on which plans depend: latencies are too small to tell devices apart."""
    device, host = cluster.device, cluster.host
    return [
        *(device.flops_per_s[dtype] for dtype in sorted(device.flops_per_s)),
        device.memory_bytes_per_s,
        device.update_elements_per_s,
        float(device.memory_bytes),
        host.update_elements_per_s,
        float(host.memory_bytes),
        cluster.h2d.bytes_per_s,
        cluster.d2h.bytes_per_s,
    ]


def _runs(items: Sequence[str]) -> list[tuple[str, int]]:
    """Return each item that differs from the item before it, with the number of equal items from it on."""
    return [(item, len(list(equal))) for item, equal in itertools.groupby(items)]


FLEET_FORMAT = 1

_FLEET = Form(what="fleet", version=FLEET_FORMAT, error=ProfileFileError)


def fleet_to_json(fleet: Fleet) -> str:
    """Return `fleet` as JSON; equal fleets have equal text."""
    return to_json(_FLEET, fleet)


def fleet_from_json(text: str) -> Fleet:
    """Return the fleet in `text`. Raises ProfileFileError with the wrong field, as `seats[0].cluster.network`."""
    return from_json(_FLEET, Fleet, text)


# ----------------------------------------------------------------------------------------------------------------------
# The text of a fleet, such as `2 x l4-24g + 1 x a6000-48g | 1 x p40-24g`, to a `Fleet` of common machines.
#
#   FLEET   HOST | HOST | ...         hosts, over a network
#   HOST    TERM + TERM + ...         devices of one host
#   TERM    NAME, DEVICES x NAME      as `presets.parse_hardware` takes it; NODES x DEVICES x NAME stands for several
#                                     hosts, so it is a host text of its own
#
# Ranks are numbered in this order. A host with devices of several kinds is the smallest of the usual hosts of its
# devices, so a plan for it fits any of them. Its devices reach each other through host memory: drivers allow peer
# access only between devices of one kind.


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
    part_bytes_per_s = host.memory_bytes_per_s / num_devices
    own: dict[str, Node] = {}
    for name, node in nodes.items():
        h2d, d2h = (replace(link, bytes_per_s=min(link.bytes_per_s, part_bytes_per_s)) for link in (node.h2d, node.d2h))
        own[name] = replace(node, host=host, h2d=h2d, d2h=d2h, peer=peer)
    return [own[cluster.device.name] for cluster in parsed for _ in range(cluster.num_ranks)]


def _network_of(host: list[Node]) -> Link:
    """Return the network of a host: that of its device with the slowest one, at most as fast as its peer link."""
    kinds = {node.device.name for node in host}
    links = [preset(kind, len(host), 2).network for kind in sorted(kinds)]
    found = min((link for link in links if link is not None), key=lambda link: link.bytes_per_s)
    peer = host[0].peer
    return found if peer is None else replace(found, bytes_per_s=min(found.bytes_per_s, peer.bytes_per_s))
