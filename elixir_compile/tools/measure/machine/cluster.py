"""Measure the machine and combine its rates and sizes in a `Cluster`; add the rates of a disk to a `Cluster`."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import distributed

from elixir_compile.base.control_groups import num_usable_cores
from elixir_compile.base.units import MIB
from elixir_compile.compat.platforms import memory_sizes_bytes, num_local_ranks, platform_of
from elixir_compile.ir.hardware import (
    Cluster,
    Fleet,
    Link,
    Node,
    fleet_of,
    fleet_of_nodes,
    profile_for,
    with_like_seats,
)
from elixir_compile.runtime.disk.disk_queue import DiskTransfer
from elixir_compile.runtime.disk.disk_store import DiskStore, StagingBuffers
from elixir_compile.tools.measure.machine.limits import pinned_limit_bytes
from elixir_compile.tools.measure.machine.links import measure_collectives
from elixir_compile.tools.measure.machine.rates import Progress, measure_rates


def measure_machine(device: torch.device, *, progress: Progress | None = None, seconds: float = 30.0) -> Cluster:
    """Return the machine with `device`, a CPU or a CUDA device, measured for about `seconds`.

    The number of threads stays as set in torch. If a process group is initialized, all ranks must call this together;
    they measure at the same time, and all ranks get the result of rank 0.
    """
    ranks = _Ranks.present()
    cluster = _measured(device, ranks, progress or _no_report, seconds)
    if ranks.num_ranks == 1:
        return cluster
    of_first = [cluster]
    distributed.broadcast_object_list(of_first, src=0, device=device)
    return of_first[0]


def measure_fleet(device: torch.device, *, progress: Progress | None = None, seconds: float = 30.0) -> Fleet:
    """Return all ranks, each with the machine that it measured for about `seconds`; ranks that are alike are equal.

    If a process group is initialized, all ranks must call this together; all get the same fleet. `device` is as for
    `measure_machine`.
    """
    ranks = _Ranks.present()
    own = _measured(device, ranks, progress or _no_report, seconds)
    if ranks.num_ranks == 1:
        return fleet_of(own)
    said: list[tuple[str, Cluster]] = [(platform.node(), own)] * ranks.num_ranks
    distributed.all_gather_object(said, (platform.node(), own))
    hosts = list(dict.fromkeys(host for host, _ in said))
    links = [cluster.collective for _, cluster in said if cluster.collective is not None]
    slowest = min(links, key=lambda link: link.bytes_per_s, default=None)
    nodes = [cluster.nodes[0] for _, cluster in said]
    return with_like_seats(fleet_of_nodes(nodes, [hosts.index(host) for host, _ in said], slowest))


@torch.no_grad()
def _measured(device: torch.device, ranks: "_Ranks", report: Progress, seconds: float) -> Cluster:
    """Return the machine of this rank, with the links between `ranks`."""
    rates = measure_rates(device, seconds, report)
    source = f"measured, torch {torch.__version__}, num_threads {torch.get_num_threads()}"
    node = _node(device, rates, ranks.num_local, source)
    network: Link | None = None
    if ranks.num_ranks > 1:
        report("collectives", 1.0)
        peer, network = _collective_links(device, ranks, source)
        node = replace(node, peer=peer, num_devices=ranks.num_local)
    cluster = Cluster(nodes=(node,) * (ranks.num_ranks // ranks.num_local), network=network)
    report("done", 1.0)
    return cluster


def _no_report(title: str, share_done: float) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The number of ranks, and the number of ranks on each host."""

    num_ranks: int = 1
    num_local: int = 1

    @classmethod
    def present(cls) -> "_Ranks":
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        num_ranks = distributed.get_world_size()
        num_local = num_local_ranks()
        # Plans assume equal nodes. If hosts have different numbers of ranks, all ranks count as one node.
        return cls(num_ranks=num_ranks, num_local=num_local if num_ranks % num_local == 0 else num_ranks)


def _node(device: torch.device, rates: Mapping[str, float], num_local: int, source: str) -> Node:
    """Return a node with a single device: name and reserves of the rough profile, memory and rates of this machine."""
    rough = profile_for(device.type, *memory_sizes_bytes(device), platform_of(device).name(device)).nodes[0]
    dtypes = [key.removeprefix("flops_per_s.") for key in rates if key.startswith("flops_per_s.")]
    profile = replace(
        rough.device,
        flops_per_s={dtype: _rounded(rates[f"flops_per_s.{dtype}"]) for dtype in dtypes},
        memory_bytes_per_s=_rounded(rates["pointwise_bytes_per_s"]),
        launch_s=_rounded(rates["launch_s"]),
        update_elements_per_s=_rounded(rates["update.device"]),
        source=source,
    )
    # The profile describes the host. Its ranks measured at the same time, each a share of the rate.
    host = replace(
        rough.host,
        pinned_bytes=pinned_limit_bytes(device),
        cores=num_usable_cores(),
        memory_bytes_per_s=_rounded(num_local * rates["dram_bytes_per_s"]),
        update_elements_per_s=_rounded(num_local * rates["update.host"]),
        busy_update_elements_per_s=_rounded(num_local * min(rates["update.busy_host"], rates["update.host"])),
        source=source,
    )
    h2d, d2h = (_copy_link(device, rates, name, source) for name in ("h2d", "d2h"))
    return replace(rough, device=profile, host=host, h2d=h2d, d2h=d2h)


def _copy_link(device: torch.device, rates: Mapping[str, float], name: str, source: str) -> Link:
    alone, busy = rates[f"{name}.bytes_per_s"], rates[f"{name}.busy_bytes_per_s"]
    return Link(
        bytes_per_s=_rounded(alone),
        latency_s=_rounded(rates[f"{name}.latency_s"]),
        overlaps_compute=platform_of(device).has_own_memory,
        source=source,
        # If the other direction does not slow down this direction, noise may make the busy rate the higher rate.
        busy_bytes_per_s=_rounded(min(busy, alone)),
    )


def _collective_links(device: torch.device, ranks: _Ranks, source: str) -> tuple[Link | None, Link | None]:
    """Return the link between the devices of a node and the link between nodes; None for a missing link."""
    over_all = _collective_link(device, None, source)
    if ranks.num_local == ranks.num_ranks:
        return over_all, None
    if ranks.num_local == 1:
        return None, over_all
    own, _ = distributed.new_subgroups(group_size=ranks.num_local)
    # Each rank is in one of the subgroups; torch returns a number to ranks outside of all of them.
    return _collective_link(device, cast("distributed.ProcessGroup", own), source), over_all


def _collective_link(device: torch.device, group: "distributed.ProcessGroup | None", source: str) -> Link:
    latency_s, bytes_per_s = measure_collectives(device, group)
    return Link(
        bytes_per_s=_rounded(bytes_per_s),
        latency_s=_rounded(latency_s),
        overlaps_compute=platform_of(device).has_own_memory,
        source=source,
    )


_NBYTES = 256 * MIB
"""Twice the bytes after which four threads of 4 MiB reached their rate."""
_NUM_RUNS = 3


def with_disk(cluster: Cluster, disk_path: "str | os.PathLike[str]", nbytes: int = _NBYTES) -> Cluster:
    """Return `cluster` with the rates of the disk of the folder `disk_path`, measured with a file of `nbytes`.

    Raises DiskFailed if the folder cannot be written, DiskFull if the disk is full.
    """
    store = DiskStore(disk_path)
    try:
        region = store.allocate("measure", nbytes)
        buffer = StagingBuffers(1, nbytes).acquire().tensor
        buffer.random_(0, 256)  # random bytes, because a drive may store zeros faster
        region.write_from(buffer).wait()  # not timed, because the first write also allocates the blocks of the file
        write_s = _median_s(lambda: region.write_from(buffer))
        read_s = _median_s(lambda: region.read_into(buffer))
    finally:
        store.close()
    rates = {"disk_read_bytes_per_s": _rounded(nbytes / read_s), "disk_write_bytes_per_s": _rounded(nbytes / write_s)}
    nodes = tuple(replace(node, host=replace(node.host, **rates)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _median_s(begin: Callable[[], DiskTransfer]) -> float:
    seconds: list[float] = []
    for _ in range(_NUM_RUNS):
        began_s = time.perf_counter()
        begin().wait()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _rounded(rate: float) -> float:
    """Return `rate` rounded to four digits, the precision of a measurement."""
    return float(f"{rate:.4g}")
