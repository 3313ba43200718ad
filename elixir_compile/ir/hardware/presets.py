"""Profiles of machines without a measurement: common machines by name, and rough profiles for any other.

A common machine has the rates of its data sheets times the shares that software reaches. A rough profile is good enough
to compare plans, not to predict seconds:

`cpu`   the device is the host: the same cores compute, copy and update, so nothing overlaps compute
`cuda`  a data-centre GPU behind PCIe 4 x16, with the rates of the Elixir paper; for any other
accelerator too
"""

import math
import re
from dataclasses import dataclass, replace

from elixir_compile.base.errors import InvalidOption, UnknownHardware
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir.hardware.cluster import Cluster, DeviceProfile, HostProfile, Link, Node, machine_name_of
from elixir_compile.ir.hardware.table import ASSUMED, MACHINES, Machine

MAX_DEVICES_PER_NODE = 8

_DEVICE_MEMORY_SHARE = 0.9
"""Share of the memory rate. Adam at the paper's 50 G elements/s on an A100 40GB moves 1400 of 1555 GB/s."""
_DRAM_SHARE = 0.8
"""Share of the DRAM rate. STREAM triad reaches 78-85 % of the rate of all channels of a server."""

_MOST_DESKTOP_BYTES = 192 * GIB
"""The most memory of a desktop: four modules of 48 GiB."""
_PAPER_DRAM_BYTES_PER_S = 409.6e9
"""DRAM rate of the paper's host, assumed to be a DGX A100. Update rates of other hosts are scaled by their DRAM
rate."""

_RESERVE_BYTES = GIB
"""Reserve of a device: a CUDA context, cuBLAS and NCCL buffers take 0.5-1 GiB."""
_LAUNCH_S = 5e-6
"""Seconds of a kernel launch: 3-6 us on servers."""
_COPY_LATENCY_S = 10e-6
"""Seconds of a small cudaMemcpyAsync with its event."""
_PEER_LATENCY_S = 20e-6
"""Seconds of a small all-gather within a node; nccl-tests report 10-30 us."""
_NETWORK_LATENCY_S = 40e-6
"""Seconds of a small all-gather over InfiniBand; nccl-tests report 30-60 us for a few nodes."""
_TYPICAL = "latency, launch and reserve are typical figures"


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(MACHINES))


def preset(name: str, num_devices: int = 1, num_nodes: int = 1, host_bytes: int | None = None) -> Cluster:
    """Return `num_nodes` machines called `name` with `num_devices` devices each.

    A GeForce chip is in a desktop if the name ends with `@desktop`, or if the budget `host_bytes` of each device is one
    that the memory of a desktop can hold; else it is in a server. Both have the same name. Raises UnknownHardware with
    the nearest name if there is none, and InvalidOption if a count is out of range.
    """
    chip, at, form = name.lower().partition("@")
    machine = MACHINES.get(chip)
    if machine is None or (at and (form != "desktop" or machine.desktop is None)):
        raise UnknownHardware(name, preset_names())
    is_small = host_bytes is not None and host_bytes * num_devices <= _MOST_DESKTOP_BYTES
    if machine.desktop is not None and (at or is_small):
        machine = replace(machine, board=machine.desktop)
    if not 1 <= num_devices <= MAX_DEVICES_PER_NODE:
        raise InvalidOption(
            "num_devices", num_devices, f'1 to {MAX_DEVICES_PER_NODE} per node; two nodes of 8 are "2 x 8 x {name}"'
        )
    if num_nodes < 1:
        raise InvalidOption("num_nodes", num_nodes, "at least 1 node")
    h2d, d2h = _copies(machine, num_devices)
    peer = network = None
    if num_devices > 1:
        bytes_per_s, source = machine.peer.reached_bytes_per_s, machine.peer.reached_source
        if machine.bounces:
            # Each byte is written to the host's DRAM and read from it.
            bytes_per_s = min(bytes_per_s, _dram_bytes_per_s(machine, num_devices) / (2 * num_devices))
            source += ", through host memory, as GeForce drivers allow no peer access"
        peer = _link(bytes_per_s, _PEER_LATENCY_S, source)
    node = Node(
        device=_device(chip, machine),
        host=_host(machine, num_devices),
        h2d=h2d,
        d2h=d2h,
        peer=peer,
        num_devices=num_devices,
    )
    if num_nodes > 1:
        # A collective uses all adapters of a node at once.
        num_adapters = num_devices if machine.has_adapter_per_device else 1
        bytes_per_s = num_adapters * machine.network.reached_bytes_per_s
        bytes_per_s = bytes_per_s if peer is None else min(bytes_per_s, peer.bytes_per_s)
        source = f"{machine.network.reached_source}, at most as `peer`"
        network = _link(bytes_per_s, _NETWORK_LATENCY_S, source)
    return Cluster(nodes=(node,) * num_nodes, network=network)


def preset_of_ranks(name: str, num_ranks: int, host_bytes: int | None = None) -> Cluster:
    """Return machines called `name` with `num_ranks` devices in all: a single node, or full nodes of 8 devices; with
    `host_bytes` as in `preset`.

    Raises UnknownHardware with the nearest name if there is none, and InvalidOption if a node would not be full.
    """
    most = MAX_DEVICES_PER_NODE
    if num_ranks <= most:
        return preset(name, num_ranks, host_bytes=host_bytes)
    num_nodes, rest = divmod(num_ranks, most)
    if rest:
        near = f"{num_nodes * most} or {(num_nodes + 1) * most}"
        raise InvalidOption("ranks", num_ranks, f"1 to {most}, or whole nodes of {most}: {near}")
    return preset(name, most, num_nodes, host_bytes)


def parse_hardware(text: str, host_bytes: int | None = None) -> Cluster:
    """Return the machines in `text`: `NAME`, `DEVICES x NAME` or `NODES x DEVICES x NAME`, with `host_bytes` as in
    `preset`.

    Raises UnknownHardware with the nearest name if there is none, and InvalidOption if a count is out of range.
    """
    # Not every "x" behind a digit is one of a count: there is an MI300X.
    found = re.fullmatch(r"((?:\d+\s*x\s*){0,2})(.*)", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise UnknownHardware(text, preset_names())
    counts = [1, 1, *map(int, re.findall(r"\d+", found.group(1)))]
    return preset(found.group(2), counts[-1], counts[-2] if len(counts) == 4 else 1, host_bytes)


def _device(name: str, machine: Machine) -> DeviceProfile:
    chip = machine.chip
    memory_bytes_per_s = _DEVICE_MEMORY_SHARE * chip.memory_bytes_per_s
    update_elements_per_s = memory_bytes_per_s / ADAM_BYTES_PER_ELEMENT
    shares = {dtype: chip.shares.get(dtype, ASSUMED) for dtype in chip.flops_per_s}
    update = f"Adam at {ADAM_BYTES_PER_ELEMENT} bytes per element"
    if machine.has_papers_rates:
        update_elements_per_s = paper_rates(1).device_update_elements_per_s
        update = f"Adam {DEVICE_UPDATE_FIT}: {SOURCE}"
    return DeviceProfile(
        name=name,
        memory_bytes=chip.memory_mib * MIB,
        reserve_bytes=_RESERVE_BYTES,
        flops_per_s={dtype: shares[dtype].share * rate for dtype, rate in chip.flops_per_s.items()},
        memory_bytes_per_s=memory_bytes_per_s,
        launch_s=_LAUNCH_S,
        update_elements_per_s=update_elements_per_s,
        source=f"{chip.source}; {_DEVICE_MEMORY_SHARE:.0%} of the memory rate; {update}; {_TYPICAL}",
        shares=shares,
    )


def _host(machine: Machine, num_devices: int) -> HostProfile:
    board = machine.board
    num_boards = num_devices if board.is_per_device else 1
    memory_bytes = num_boards * board.memory_bytes
    papers_elements_per_s = paper_rates(num_devices // num_boards).host_update_elements_per_s * num_boards
    update = f"Adam {HOST_UPDATE_FIT}: {SOURCE}"
    if not machine.has_papers_rates:
        update += ", scaled by DRAM rate"
    return HostProfile(
        memory_bytes=memory_bytes,
        pinned_bytes=memory_bytes * 4 // 5,
        reserve_bytes=memory_bytes // 20,
        cores=num_boards * board.cores,
        memory_bytes_per_s=_dram_bytes_per_s(machine, num_devices),
        update_elements_per_s=papers_elements_per_s * board.memory_bytes_per_s / _PAPER_DRAM_BYTES_PER_S,
        source=f"{board.source}; {_DRAM_SHARE:.0%} of the DRAM rate; {update}; 80 % may be pinned, 5 % is reserved",
    )


def _dram_bytes_per_s(machine: Machine, num_devices: int) -> float:
    num_boards = num_devices if machine.board.is_per_device else 1
    return _DRAM_SHARE * num_boards * machine.board.memory_bytes_per_s


def _copies(machine: Machine, num_devices: int) -> tuple[Link, Link]:
    """Return the links from host to device and back, while all devices of the node copy."""
    if machine.has_papers_rates:
        rates = paper_rates(num_devices)
        h2d = _link(rates.h2d_bytes_per_s / num_devices, _COPY_LATENCY_S, f"{H2D_FIT}: {SOURCE}")
        d2h = _link(rates.d2h_bytes_per_s / num_devices, _COPY_LATENCY_S, f"{D2H_FIT}: {SOURCE}")
        return h2d, d2h
    # Copies of all devices share the DRAM of the host.
    shared_bytes_per_s = _dram_bytes_per_s(machine, num_devices) / num_devices
    copy = _link(
        min(machine.lane.reached_bytes_per_s, shared_bytes_per_s),
        _COPY_LATENCY_S,
        f"{machine.lane.reached_source}, at most a device's part of the DRAM rate",
    )
    return copy, copy


def _link(bytes_per_s: float, latency_s: float, source: str) -> Link:
    return Link(
        bytes_per_s=bytes_per_s, latency_s=latency_s, overlaps_compute=True, source=f"{source}; latency is typical"
    )


SOURCE = "Elixir (arXiv 2212.05339), measured rates"
H2D_FIT = "c2g = 16.3 n + 8.7"
D2H_FIT = "g2c = 15.8 n + 2.3"
DEVICE_UPDATE_FIT = "v_gpu = 50 n"
HOST_UPDATE_FIT = "v_cpu = 1.66 ln n + 5.15"

ADAM_BYTES_PER_ELEMENT = 28
"""Adam in float32 reads parameter, gradient and two moments and writes all but the gradient: 7 words of 4 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRates:
    """Rates of all devices together."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    device_update_elements_per_s: float
    host_update_elements_per_s: float


def paper_rates(num_devices: int) -> PaperRates:
    """Return the rates that the paper fitted to its measurements, for `num_devices` devices together."""
    return PaperRates(
        h2d_bytes_per_s=16.3e9 * num_devices + 8.7e9,
        d2h_bytes_per_s=15.8e9 * num_devices + 2.3e9,
        device_update_elements_per_s=50e9 * num_devices,
        host_update_elements_per_s=1.66e9 * math.log(num_devices) + 5.15e9,
    )


_PAPER = f"{SOURCE} for one A100"
_DATA_SHEET = "NVIDIA A100 data sheet, half of the peak"
_CPU = "order of magnitude of one server core with AVX2 and one DDR4 channel; ranks choices, predicts nothing"

_LOOPBACK = Link(
    bytes_per_s=1e9,
    latency_s=100e-6,
    overlaps_compute=False,
    source="order of magnitude of gloo between two processes of one machine",
)

_ETHERNET = Link(
    bytes_per_s=1e9, latency_s=100e-6, overlaps_compute=True, source="10 Gb/s Ethernet, less a fifth; a small message"
)


_WITHOUT_MEMORY = ("mps", "meta")
"""Device types that torch names, without memory of their own that a plan could fill."""


def profile_for(device_type: str, memory_bytes: int, host_memory_bytes: int, name: str) -> Cluster:
    """Return the profile of an unmeasured device called `name` with the given memory sizes in bytes.

    An accelerator of a common machine has the rates of that machine. Any other accelerator has the rates of the rough
    profile `cuda`. Raises InvalidOption if the device type has no memory of its own and is not the CPU.
    """
    if device_type in _WITHOUT_MEMORY:
        raise InvalidOption("device", device_type, "'cpu', 'cuda', or another accelerator with memory of its own")
    if device_type == "cpu":
        return _cpu(memory_bytes, host_memory_bytes, name)
    known = machine_name_of(name, memory_bytes)
    if known is None:
        return _cuda(memory_bytes, host_memory_bytes, name)
    node = preset(known).nodes[0]
    device = replace(
        node.device, name=name, memory_bytes=memory_bytes, reserve_bytes=min(_RESERVE_BYTES, memory_bytes // 10)
    )
    host = replace(
        node.host,
        memory_bytes=host_memory_bytes,
        pinned_bytes=host_memory_bytes,
        reserve_bytes=host_memory_bytes // 20,
    )
    return Cluster(nodes=(replace(node, device=device, host=host),))


def with_devices(cluster: Cluster, num_devices: int, num_nodes: int = 1) -> Cluster:
    """Return `num_nodes` nodes with `num_devices` devices each, as in `cluster`, and rough links if it has none."""
    first = cluster.nodes[0]
    is_cpu = not first.h2d.overlaps_compute
    peer = None
    if num_devices > 1:
        peer = first.peer or (_LOOPBACK if is_cpu else replace(first.d2h, latency_s=20e-6))
    network = None
    if num_nodes > 1:
        network = cluster.network or replace(_ETHERNET, overlaps_compute=not is_cpu)
    return Cluster(nodes=(replace(first, num_devices=num_devices, peer=peer),) * num_nodes, network=network)


def _cpu(memory_bytes: int, host_memory_bytes: int, name: str) -> Cluster:
    dram_bytes_per_s = 10e9  # _CPU
    update_elements_per_s = dram_bytes_per_s / ADAM_BYTES_PER_ELEMENT
    # A copy reads and writes the same DRAM, so its rate is half.
    copy = Link(bytes_per_s=dram_bytes_per_s / 2, latency_s=1e-6, overlaps_compute=False, source=_CPU)
    device = DeviceProfile(
        name=name,
        memory_bytes=memory_bytes,
        reserve_bytes=0,  # host and device are one memory; the reserve is the host's
        flops_per_s={"float32": 50e9, "float64": 25e9, "bfloat16": 25e9, "float16": 25e9},  # _CPU
        memory_bytes_per_s=dram_bytes_per_s,
        launch_s=2e-6,  # _CPU
        update_elements_per_s=update_elements_per_s,
        source=_CPU,
    )
    host = _rough_host(host_memory_bytes, dram_bytes_per_s, update_elements_per_s, _CPU)
    return Cluster(nodes=(Node(device=device, host=host, h2d=copy, d2h=copy),))


def _cuda(memory_bytes: int, host_memory_bytes: int, name: str) -> Cluster:
    rates = paper_rates(1)
    device = DeviceProfile(
        name=name,
        memory_bytes=memory_bytes,
        # CUDA context and libraries take 0.5-0.8 GiB, but never more than a tenth of a small share of a device.
        reserve_bytes=min(GIB, memory_bytes // 10),
        flops_per_s={"float32": 9.7e12, "float64": 4.8e12, "bfloat16": 156e12, "float16": 156e12},  # _DATA_SHEET
        memory_bytes_per_s=1.55e12 / 2,  # _DATA_SHEET
        launch_s=5e-6,  # typical kernel launch on PCIe machines
        update_elements_per_s=rates.device_update_elements_per_s,
        source=f"{_DATA_SHEET}; {_PAPER}",
        shares=dict.fromkeys(("float32", "float64", "bfloat16", "float16"), ASSUMED),
    )
    host = _rough_host(host_memory_bytes, 100e9, rates.host_update_elements_per_s, _PAPER)
    h2d = Link(bytes_per_s=rates.h2d_bytes_per_s, latency_s=10e-6, overlaps_compute=True, source=_PAPER)
    d2h = Link(bytes_per_s=rates.d2h_bytes_per_s, latency_s=10e-6, overlaps_compute=True, source=_PAPER)
    return Cluster(nodes=(Node(device=device, host=host, h2d=h2d, d2h=d2h),))


def _rough_host(memory_bytes: int, bytes_per_s: float, update_elements_per_s: float, source: str) -> HostProfile:
    return HostProfile(
        memory_bytes=memory_bytes,
        pinned_bytes=memory_bytes,
        reserve_bytes=memory_bytes // 20,
        cores=1,
        memory_bytes_per_s=bytes_per_s,
        update_elements_per_s=update_elements_per_s,
        source=source,
    )
