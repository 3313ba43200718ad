"""Rough profiles for a machine without a name or a measurement: good enough to compare plans, not to predict seconds.

`cpu`   the device is the host: the same cores compute, copy and update, so nothing overlaps compute
`cuda`  a data-centre GPU behind PCIe 4 x16, with the rates of the Elixir paper
"""

from dataclasses import replace

from elixir_compile.errors import InvalidOption
from elixir_compile.hardware.cluster import Cluster, Node
from elixir_compile.hardware.device import DeviceProfile, HostProfile, Link
from elixir_compile.hardware.presets import ADAM_BYTES_PER_ELEMENT, SOURCE, paper_rates
from elixir_compile.units import GIB

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


def profile_for(device_type: str, memory_bytes: int, host_memory_bytes: int, name: str) -> Cluster:
    """Return the rough profile for `cpu` or `cuda` with the given memory sizes in bytes, and the given name.

    Raises InvalidOption if the device type is another.
    """
    if device_type == "cpu":
        return _cpu(memory_bytes, host_memory_bytes, name)
    if device_type == "cuda":
        return _cuda(memory_bytes, host_memory_bytes, name)
    raise InvalidOption("device", device_type, "'cpu' or 'cuda'")


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
    host = _host(host_memory_bytes, dram_bytes_per_s, update_elements_per_s, _CPU)
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
    )
    host = _host(host_memory_bytes, 100e9, rates.host_update_elements_per_s, _PAPER)
    h2d = Link(bytes_per_s=rates.h2d_bytes_per_s, latency_s=10e-6, overlaps_compute=True, source=_PAPER)
    d2h = Link(bytes_per_s=rates.d2h_bytes_per_s, latency_s=10e-6, overlaps_compute=True, source=_PAPER)
    return Cluster(nodes=(Node(device=device, host=host, h2d=h2d, d2h=d2h),))


def _host(memory_bytes: int, bytes_per_s: float, update_elements_per_s: float, source: str) -> HostProfile:
    return HostProfile(
        memory_bytes=memory_bytes,
        pinned_bytes=memory_bytes,
        reserve_bytes=memory_bytes // 20,
        cores=1,
        memory_bytes_per_s=bytes_per_s,
        update_elements_per_s=update_elements_per_s,
        source=source,
    )
