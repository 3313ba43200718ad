"""A made-up machine with one GPU on which every check is silent; tests change one fact of it at a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from elixir_compile.base.units import GIB, KIB, MIB
from elixir_compile.tools.doctor.checks import BACKEND, CHECKS
from elixir_compile.tools.doctor.facts import (
    Accelerator,
    CopyRates,
    DiskTrial,
    Finding,
    GpuState,
    Pinning,
    Profile,
    System,
    Torch,
    Verdict,
)

ADDRESS = "0000:c1:00.0"
NUM_CORES = 8
MEMORY_BYTES = 64 * GIB
FILES = {
    "proc/self/cgroup": "0::/pod/box\n",
    "proc/meminfo": f"MemTotal: {MEMORY_BYTES // KIB} kB\nSwapTotal: {8 * MIB} kB\nSwapFree: {7 * MIB} kB\n",
    "proc/self/mountinfo": (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 22 0:24 / /dev/shm rw - tmpfs tmpfs rw\n"
        "31 22 0:25 / /mnt/nfs rw shared:2 - nfs4 server:/ rw\n"
        "32 22 0:26 / /mnt/with\\040space rw - overlay overlay rw\n"
        "33 22 0:27 / /mnt/hidden rw - ext4 /dev/vdb rw\n"
        "34 33 0:28 / /mnt/hidden rw - tmpfs tmpfs rw\n"
    ),
    "proc/self/numa_maps": "5555 default file=/usr/bin/python mapped=2\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 2025\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/sys/kernel/osrelease": "6.8.0-generic\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    f"sys/bus/pci/devices/{ADDRESS}/numa_node": "1\n",
    f"sys/bus/pci/devices/{ADDRESS}/vendor": "0x10de\n",
    f"sys/bus/pci/devices/{ADDRESS}/class": "0x030200\n",
    "dev/nvidiactl": "",
    "include/Python.h": "",
    "bin/g++": "#!/bin/sh\n",
    "bin/cc": "#!/bin/sh\n",
}

TORCH = Torch(
    version="2.13.0+cu130",
    cuda="13.0",
    rocm=None,
    accelerator="cuda",
    num_accelerators=1,
    num_threads=NUM_CORES,
    has_gloo=True,
    has_nccl=True,
)
STATE = GpuState(link=(5, 16), most_link=(5, 16), slowed_by=(), capped_by=(), is_mig=False, others_bytes=0)
ACCELERATOR = Accelerator(
    name="NVIDIA H100",
    address=ADDRESS,
    pinning=Pinning(pinned_bytes=4 * GIB, refused_bytes=None, lock_limit_bytes=8 * KIB),
    state=STATE,
    copies=CopyRates(h2d_bytes_per_s=50e9, d2h_bytes_per_s=50e9, pageable_bytes_per_s=9e9),
)
DISK = DiskTrial(
    path=Path("/srv/state"),
    error="",
    is_direct=True,
    free_bytes=100 * GIB,
    write_bytes_per_s=2e9,
    read_bytes_per_s=3e9,
)


def write(root: Path, files: dict[str, str | None]) -> None:
    """Write files below `root`; a text of None removes the file."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)
            path.chmod(0o755)


def good_machine(root: Path, files: dict[str, str | None] | None = None, **changes: Any) -> System:
    """Return the machine with its files below `root`, other `files`, and other fields."""
    write(root, {**FILES, **(files or {})})
    cache = root / "cache"
    cache.mkdir(exist_ok=True)
    system = System(
        root=root,
        environ={"PATH": str(root / "bin"), "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        python=(3, 12),
        include=root / "include",
        cores=frozenset(range(NUM_CORES)),
        shm_bytes=8 * GIB,
        caches={"ELIXIR_CACHE_DIR": cache},
        backend=BACKEND,
        torch=TORCH,
        torch_error="",
        accelerator=ACCELERATOR,
        profile=Profile(
            path=cache / "machines" / "a.json",
            is_measured=True,
            num_others=0,
            h2d_bytes_per_s=50e9,
            d2h_bytes_per_s=50e9,
            has_disk=True,
        ),
        disk=DISK,
    )
    return replace(system, **changes)


def with_variables(system: System, **variables: str) -> System:
    """Return `system` with more variables in its environment."""
    return replace(system, environ={**system.environ, **variables})


def findings(code: str, system: System) -> list[Finding]:
    """Return what the check with `code` finds."""
    (check,) = (check for check in CHECKS if check.code == code)
    return list(check.run(system))


def faults(code: str, system: System) -> list[Finding]:
    """Return what the check with `code` finds that is not ok."""
    return [finding for finding in findings(code, system) if finding.verdict is not Verdict.OK]
