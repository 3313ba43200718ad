"""Machines: devices, hosts, links and clusters of equal nodes, their JSON, the slice of a machine that a tensor-
parallel model sees, and the two names of a device.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from elixir_compile.base.codec import LEFT_OUT, Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan, InvalidProfile, ProfileFileError
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir.hardware.table import MACHINES, PeakShare

# ----------------------------------------------------------------------------------------------------------------------
# Machines: devices, hosts, links, nodes of equal devices and clusters of equal nodes, and their JSON.


_LEAST_RATE, _MOST_RATE = 1e-9, 1e30
"""Limits of rates per second. Between them, seconds of at most 2**63 bytes are finite numbers."""
_MOST_LATENCY_S = 1e9


def require_positive(what: str, **numbers: float | None) -> None:
    """Raise InvalidProfile for the first number that is not positive and finite; None is allowed.

    A rate of zero would make seconds infinite.
    """
    for name, number in numbers.items():
        if number is None:
            continue
        if not 0 < number < math.inf:
            raise InvalidProfile(what, name, "a positive finite number", number)
        if not _LEAST_RATE <= number <= _MOST_RATE:
            raise InvalidProfile(what, name, f"a number from {_LEAST_RATE} to {_MOST_RATE}", number)


def require_not_negative(what: str, **numbers: float) -> None:
    """Raise InvalidProfile for the first number that is negative or not finite."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise InvalidProfile(what, name, "a finite number of 0 or more", number)
        if number > _MOST_LATENCY_S and name.endswith("_s"):
            raise InvalidProfile(what, name, f"at most {_MOST_LATENCY_S} seconds", number)


def require_part(what: str, name: str, part_bytes: int, of_bytes: int) -> None:
    """Raise InvalidProfile if `part_bytes`, called `name`, is negative or takes all of the memory of `of_bytes`."""
    if not 0 <= part_bytes < of_bytes:
        raise InvalidProfile(what, name, f"0 or more and less than memory_bytes = {of_bytes}", part_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device as the planner sees it: its memory and its rates."""

    name: str
    memory_bytes: int
    reserve_bytes: int
    """Bytes that no plan may use: for the context, libraries and fragmentation."""
    flops_per_s: Mapping[str, float]
    """Rates by dtype as torch prints it. Must hold `float32`, which is used for every missing dtype."""
    memory_bytes_per_s: float
    launch_s: float
    """Fixed seconds of each op."""
    update_elements_per_s: float
    """Elements that the optimizer updates per second with parameter, gradient and state on the device."""
    source: str
    """The origin of the numbers: a data sheet, a paper, a measurement."""
    shares: Mapping[str, PeakShare] | None = field(default=None, metadata=LEFT_OUT)
    """The shares of the data sheet that `flops_per_s` are, by dtype; None if the rates were measured."""

    def __post_init__(self) -> None:
        what = f"device {self.name}"
        if "float32" not in self.flops_per_s:
            raise InvalidProfile(what, "flops_per_s", "an entry for float32", dict(self.flops_per_s))
        require_positive(
            what,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            update_elements_per_s=self.update_elements_per_s,
            **{f"flops_per_s.{dtype}": rate for dtype, rate in self.flops_per_s.items()},
        )
        require_not_negative(what, launch_s=self.launch_s)
        require_part(what, "reserve_bytes", self.reserve_bytes, self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPrice:
    """What a host update of parameters and moments in these dtypes costs. The figure is over that of fp32, so it holds
    when the rate of updates is corrected, or shared by ranks."""

    dtype: str
    """Of the parameters; those in 16 bits have fp32 masters."""
    state_dtype: str
    """Of the moments."""
    over_fp32: float
    """Seconds over those of as many elements of fp32 parameters with fp32 moments."""

    def __post_init__(self) -> None:
        require_positive(f"host update of {self.dtype} with {self.state_dtype} moments", over_fp32=self.over_fp32)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """The host, which can hold training state and update it."""

    memory_bytes: int
    pinned_bytes: int
    """The most bytes that may be page-locked."""
    reserve_bytes: int
    cores: int
    memory_bytes_per_s: float
    update_elements_per_s: float
    """Elements that the optimizer updates per second with parameter, gradient and state on the host."""
    source: str
    busy_update_elements_per_s: float | None = None
    """Elements updated per second while copies use the host's memory too; None if not measured."""
    disk_read_bytes_per_s: float | None = None
    """Rate of reads of large blocks from the disk for optimizer state; None if not measured."""
    disk_write_bytes_per_s: float | None = None
    """Rate of writes of large blocks; None if not measured."""
    update_forms: tuple[FormPrice, ...] = field(default=(), metadata=LEFT_OUT)
    """The prices of updates whose parameters or moments are not fp32, as far as they were measured."""
    flops_per_s: Mapping[str, float] | None = field(default=None, metadata=LEFT_OUT)
    """Rates of matrix products by dtype, as `DeviceProfile.flops_per_s`; None if not measured."""

    def __post_init__(self) -> None:
        flops_per_s = {"float32": None} if self.flops_per_s is None else self.flops_per_s
        if "float32" not in flops_per_s:
            raise InvalidProfile("host", "flops_per_s", "an entry for float32", dict(flops_per_s))
        require_positive(
            "host",
            **{f"flops_per_s.{dtype}": rate for dtype, rate in flops_per_s.items()},
            disk_read_bytes_per_s=self.disk_read_bytes_per_s,
            disk_write_bytes_per_s=self.disk_write_bytes_per_s,
            memory_bytes=self.memory_bytes,
            cores=self.cores,
            memory_bytes_per_s=self.memory_bytes_per_s,
            update_elements_per_s=self.update_elements_per_s,
            busy_update_elements_per_s=self.busy_update_elements_per_s,
        )
        require_not_negative("host", pinned_bytes=self.pinned_bytes)
        require_part("host", "reserve_bytes", self.reserve_bytes, self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection in a single direction: seconds = latency_s + bytes / bytes_per_s."""

    bytes_per_s: float
    latency_s: float
    overlaps_compute: bool
    """True if the device computes while the link copies; False if the same cores do both."""
    source: str
    busy_bytes_per_s: float | None = None
    """Rate while the other direction copies too; None if not measured."""

    def __post_init__(self) -> None:
        require_positive("link", bytes_per_s=self.bytes_per_s, busy_bytes_per_s=self.busy_bytes_per_s)
        require_not_negative("link", latency_s=self.latency_s)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRing:
    """The ranks with the other shards of a tensor-parallel model, for each rank of a cluster, and the link to them."""

    num_ranks: int
    link: Link
    """From each rank to the next, in a ring of the ranks along the tensor axis."""

    def __post_init__(self) -> None:
        require_positive("tensor axis", num_ranks=self.num_ranks)


MOST_RANKS = 1 << 20
"""The most ranks of a plan or a machine. Shards are listed by rank, so a typing error must not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes, with a rank for each device."""

    nodes: tuple[Node, ...]
    network: Link | None = None
    """From each node to the next, in a ring of all devices; None for a single node."""
    num_elsewhere: int = field(default=0, metadata=LEFT_OUT)
    """Ranks on other hosts, whatever their devices are, beside those of a single node: see `fleet.Fleet.seen_by`."""
    tensor: TensorRing | None = field(default=None, metadata=LEFT_OUT)
    """The tensor axis, whose ranks are no ranks of this cluster: see the function `along_data`. None if there is
    none."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InvalidPlan("a cluster needs at least one node.")
        if any(node != self.nodes[0] for node in self.nodes):
            raise InvalidPlan("the nodes of a cluster must be equal; clusters of unequal nodes are not supported.")
        if self.num_ranks > MOST_RANKS:
            raise InvalidPlan(f"a cluster has {self.num_ranks} devices; expected at most {MOST_RANKS}.")
        require_not_negative("cluster", num_elsewhere=self.num_elsewhere)
        if len(self.nodes) > 1 and self.num_elsewhere:
            raise InvalidProfile("cluster", "num_elsewhere", f"0 beside {len(self.nodes)} nodes", self.num_elsewhere)
        if self.is_over_nodes and self.network is None:
            others = f"{self.num_elsewhere} ranks elsewhere" if self.num_elsewhere else f"{len(self.nodes)} nodes"
            raise InvalidProfile("cluster", "network", f"a link, as there are {others}", None)

    @property
    def name(self) -> str:
        """The name in plans: `4 x a100-40g`, or `2 x 4 x a100-40g` for two nodes of four devices."""
        nodes = f"{len(self.nodes)} x " if len(self.nodes) > 1 else ""
        elsewhere = f" and {self.num_elsewhere} elsewhere" if self.num_elsewhere else ""
        tensor = "" if self.tensor is None else f", each x {self.tensor.num_ranks} along the tensor axis"
        return f"{nodes}{self.num_local_ranks} x {self.device.name}{elsewhere}{tensor}"

    @property
    def num_ranks(self) -> int:
        """Number of devices of all nodes, and of ranks elsewhere."""
        return len(self.nodes) * self.num_local_ranks + self.num_elsewhere

    @property
    def is_over_nodes(self) -> bool:
        """Whether collectives of all ranks pass the network."""
        return len(self.nodes) > 1 or self.num_elsewhere > 0

    @property
    def num_local_ranks(self) -> int:
        """Number of devices of each node."""
        return self.nodes[0].num_devices

    @property
    def copies_overlap(self) -> bool:
        """Whether copies between host and device run beside compute in some direction. If they do not, device and host
        are the same cores, as on a CPU."""
        return self.h2d.overlaps_compute or self.d2h.overlaps_compute

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
        return self.network if self.is_over_nodes else self.nodes[0].peer

    def link_of(self, num_ranks: int) -> Link | None:
        """The slowest link of a ring of `num_ranks` consecutive ranks: the peer link if they are devices of one node,
        else that of a ring over all ranks; None for a single device."""
        return self.nodes[0].peer if self.num_local_ranks % num_ranks == 0 else self.collective


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


# ----------------------------------------------------------------------------------------------------------------------
# The machine as one slice of a tensor-parallel model sees it: the ranks that hold the same shard along the tensor axis.
#
#   2 nodes of 4 devices, tensor axis of 4      each slice has 1 device of each node, a quarter of each host, and a
#                                               quarter of the network; the tensor axis is the peer link of a node
#   2 nodes of 4 devices, tensor axis of 2      each slice has 2 devices of each node, half of each host and network
#   4 nodes of 2 devices, tensor axis of 4      each slice has 1 device of each two nodes, half of a host; the tensor
#                                               axis is the network
#
# All slices gather and reduce at once, so they share what is shared. The tensor axis is taken to be the last axis of
# the mesh: its ranks are consecutive. Not modelled: collectives of the tensor axis and of the data axis at the same
# time.


_HOST_RATES = (
    "memory_bytes_per_s",
    "update_elements_per_s",
    "busy_update_elements_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
)
_HOST_SIZES = ("memory_bytes", "pinned_bytes", "reserve_bytes")
"""What the slices share of a host, as all of them use it at once."""


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
    rates = {name: getattr(first.host, name) for name in _HOST_RATES}
    rates = {name: None if rate is None else rate / num_slices for name, rate in rates.items()}
    sizes = {name: getattr(first.host, name) // num_slices for name in _HOST_SIZES}
    flops_per_s = first.host.flops_per_s
    if flops_per_s is not None:
        flops_per_s = {dtype: rate / num_slices for dtype, rate in flops_per_s.items()}
    host = replace(first.host, **rates, **sizes, flops_per_s=flops_per_s)
    node = replace(first, num_devices=num_devices, peer=first.peer if num_devices > 1 else None, host=host)
    between = cluster.network if cluster.is_over_nodes else first.peer
    link = first.peer if is_within else between
    if link is None:
        raise InvalidPlan(f"{cluster.name} has no link for a tensor axis of {num_tensor} ranks.")
    network = None
    if num_nodes > 1 and between is not None:
        rate, busy = between.bytes_per_s, between.busy_bytes_per_s
        busy = None if busy is None else busy / num_slices
        network = replace(between, bytes_per_s=rate / num_slices, busy_bytes_per_s=busy)
    return Cluster(nodes=(node,) * num_nodes, network=network, tensor=TensorRing(num_ranks=num_tensor, link=link))


# ----------------------------------------------------------------------------------------------------------------------
# The two names of a device: that of the common machine, `h100-80g`, and that which its driver tells, such as `NVIDIA
# H100 80GB HBM3`.


_OTHER_DEVICES = {"laptop", "mig"}
"""Words in the names of devices that have a part of the rates: chips of laptops, and partitions of a device."""


def machine_name_of(device_name: str, memory_bytes: int) -> str | None:
    """Return the name in `MACHINES` of a machine with the device `device_name`, which has `memory_bytes`, or None.

    Of `NVIDIA H100 NVL`, `h100nvl` says more than `h100`. If several machines have the chip, it is the machine whose
    device has the nearest memory size.
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    if _OTHER_DEVICES & set(words):
        return None
    chips = {"".join(words[first:last]) for first, last in combinations(range(len(words) + 1), 2)}
    found = [name for name in MACHINES if name.split("-")[0] in chips]

    def rank(name: str) -> tuple[int, int]:
        return -len(name.split("-")[0]), abs(MACHINES[name].chip.memory_mib * MIB - memory_bytes)

    return min(found, key=rank, default=None)


def is_name_of(text: str, cluster: Cluster) -> bool:
    """Return whether `text`, the name of a cluster in a plan, is a name of `cluster`: `1 x h100-80g` and `1 x NVIDIA
    H100 80GB HBM3` are one machine.

    Two names that drivers tell are two machines, because chips with one name have several forms: an A100 for PCIe has
    no NVLink.
    """
    device = cluster.device
    before, _, after = cluster.name.partition(device.name)
    own = text.removeprefix(before).removesuffix(after)
    if before + own + after != text:
        return False
    names = {own, device.name}
    machines: set[str | None] = set()
    for name in names:
        said = re.search(r"(\d+) ?GB", name)
        memory_bytes = device.memory_bytes if said is None else int(said.group(1)) * GIB
        machines.add(name if name in MACHINES else machine_name_of(name, memory_bytes))
    return len(names) == 1 or (len(machines) == 1 and bool(machines & names))
