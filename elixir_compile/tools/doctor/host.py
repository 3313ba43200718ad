"""Checks D06 to D09: pinned memory, control groups, memory nodes, huge pages."""

import re
from collections.abc import Iterator
from pathlib import Path

from elixir_compile.base.control_groups import group_folders, group_limit_bytes, numbers_in, quota_cores, text_of
from elixir_compile.base.units import GIB, KIB, MIB, format_bytes
from elixir_compile.tools.doctor.values import Finding, System, bad, note, ok, unknown

MOST_SWAPPED_BYTES = GIB
"""More bytes on swap than this are worth a note: the system swaps some idle pages out on any machine."""
LEAST_SHM_BYTES = 64 * MIB + 1
"""`/dev/shm` of a container is 64 MiB by default, too small for workers of a `DataLoader` and for NCCL."""


def check_pinning(system: System) -> Iterator[Finding]:
    """D06: host memory can be page-locked, so that copies run beside the compute."""
    pinning = None if system.accelerator is None else system.accelerator.pinning
    if pinning is None:
        return
    pinned = f"{format_bytes(pinning.pinned_bytes)} of host memory were pinned"
    if pinning.refused_bytes is None:
        yield ok(pinned)
    else:
        limit = (
            "" if pinning.lock_limit_bytes is None else f"; RLIMIT_MEMLOCK is {format_bytes(pinning.lock_limit_bytes)}"
        )
        fix = "docker run --ulimit memlock=-1" if system.is_container else "ulimit -l unlimited"
        yield bad(f"{pinned}, but the driver refused {format_bytes(pinning.refused_bytes)}{limit}", fix)
    if system.is_wsl:
        yield note("under WSL the driver pins only a part of the host memory: set `host_memory` below that part")


def check_control_groups(system: System) -> Iterator[Finding]:
    """D07: limits of memory, swap and cores by control groups; the size of `/dev/shm`."""
    yield from _memory_findings(system)
    yield _core_finding(system)
    yield _shm_finding(system)


def _memory_findings(system: System) -> Iterator[Finding]:
    memberships, groups = system.group_paths
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", system.text("proc/meminfo"), re.MULTILINE))
    total_bytes = int(meminfo.get("MemTotal", 0)) * KIB
    limit_bytes = group_limit_bytes(memberships, groups)
    planned_bytes = min(filter(None, (total_bytes, limit_bytes)), default=0)
    if not planned_bytes:
        yield unknown("the system does not tell its host memory")
        return
    is_limited = limit_bytes is not None and planned_bytes < total_bytes
    yield ok(
        f"host memory {format_bytes(planned_bytes)}"
        + (f", a limit of the control group: the machine has {format_bytes(total_bytes)}" if is_limited else "")
    )
    high = min(_high_limits(memberships, groups), default=None)
    if high is not None and high[0] < planned_bytes:
        found = f"above {format_bytes(high[0])} of memory the control group is slowed down, below the limit for plans"
        yield bad(found, f"echo max | sudo tee {high[1]}")
    swapped_bytes = _swapped_bytes(memberships, groups)
    if swapped_bytes is None:
        swapped_bytes = (int(meminfo.get("SwapTotal", 0)) - int(meminfo.get("SwapFree", 0))) * KIB
    if swapped_bytes > MOST_SWAPPED_BYTES:
        yield note(f"{format_bytes(swapped_bytes)} of memory are swapped out", "sudo swapoff -a")


def _high_limits(memberships: Path, groups: Path) -> Iterator[tuple[int, Path]]:
    """Yield the bytes above which a group of this process is slowed down, and their file."""
    for folder, version in group_folders(memberships, groups, "memory"):
        text = text_of(folder / "memory.high") if version == 2 else ""
        if text.isdecimal():
            yield int(text), folder / "memory.high"


def _swapped_bytes(memberships: Path, groups: Path) -> int | None:
    """Return the bytes of this process's group on swap, without its parents; None if the system does not tell."""
    for folder, version in group_folders(memberships, groups, "memory"):
        text = text_of(folder / "memory.swap.current") if version == 2 else ""
        if text.isdecimal():
            return int(text)
    return None


def _core_finding(system: System) -> Finding:
    allowed = len(system.cores)
    quota = quota_cores(*system.group_paths)
    if quota is None or quota >= allowed:
        return ok(f"{allowed} cores, not reduced by a CPU quota")
    usable = system.num_usable_cores
    found = f"a CPU quota of {quota:g} cores for {allowed} cores"
    num_threads = _num_threads(system)
    if num_threads > usable:
        # All threads stop for the rest of each period as soon as together they have used the quota.
        return bad(f"{found}, and ops of torch run on {num_threads} threads", f"export OMP_NUM_THREADS={usable}")
    return note(found, f"docker run --cpus={allowed}" if system.is_container else "")


def _num_threads(system: System) -> int:
    """Return the number of threads that one op of torch runs on."""
    if system.torch is not None:
        return system.torch.num_threads
    return system.number("OMP_NUM_THREADS") or len(system.cores)


def _shm_finding(system: System) -> Finding:
    if system.shm_bytes is None:
        return note("there is no /dev/shm, which workers of a DataLoader use", "mount -t tmpfs shm /dev/shm")
    found = f"/dev/shm of {format_bytes(system.shm_bytes)}"
    if system.shm_bytes >= LEAST_SHM_BYTES:
        return ok(found)
    resize = "docker run --shm-size=8g" if system.is_container else "mount -o remount,size=8g /dev/shm"
    found += " is small for workers of a DataLoader"
    return bad(f"{found} and for the ranks", resize) if (system.number("WORLD_SIZE") or 1) > 1 else note(found, resize)


def check_memory_nodes(system: System) -> Iterator[Finding]:
    """D08: this process may use cores and memory beside the device."""
    nodes = {
        int(path.name.removeprefix("node")): numbers_in(text_of(path / "cpulist"))
        for path in (system.root / "sys/devices/system/node").glob("node[0-9]*")
    }
    policy = (system.text("proc/self/numa_maps").splitlines() or [""])[0].split()[1:2]
    said = f"{len(nodes)} memory nodes" + "".join(f", policy {name}" for name in policy)
    if len(nodes) < 2:
        yield ok("a single memory node") if nodes else unknown("the system does not tell its memory nodes")
        return
    if system.accelerator is None:
        yield ok(said)
        return
    node = system.text(f"sys/bus/pci/devices/{system.accelerator.address}/numa_node")
    if not node.isdecimal() or int(node) not in nodes:
        yield unknown(f"{said}; the system does not tell which of them is beside the device")
        return
    beside = nodes[int(node)] & system.cores
    fix = f"numactl --cpunodebind={node} --membind={node} python train.py"
    if nodes[int(node)] and not beside:
        yield bad(f"{said}; this process may use no core of node {node}, which is beside the device", fix)
    elif policy and policy[0].startswith("bind") and int(node) not in numbers_in(policy[0].rpartition(":")[2]):
        yield bad(f"{said}; host memory comes from other nodes than node {node}, which is beside the device", fix)
    else:
        yield ok(f"{said}; {len(beside)} cores of node {node}, which is beside the device")


def check_huge_pages(system: System) -> Iterator[Finding]:
    """D09: slabs get huge pages."""
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    found = re.search(r"\[(\w+)\]", system.text(path))
    if found is None:
        yield unknown("the system does not tell whether it gives transparent huge pages")
    elif found[1] in ("always", "madvise"):
        yield ok(f"transparent huge pages: {found[1]}")
    else:
        fix = f"echo madvise | sudo tee /{path}"
        yield bad(f"transparent huge pages: {found[1]}; host passes and disks are slower on small pages", fix)
