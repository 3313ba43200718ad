"""The checks D01 to D15 of `elixir-compile doctor`, and the order in which they run."""

import importlib.util
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from elixir_compile.base.errors import EXPANDABLE_SEGMENTS, MEASURED_OF_THEM, has_expandable_segments
from elixir_compile.base.folders import WrittenByOthersError, own_folder
from elixir_compile.base.process import group_folders, group_limit_bytes, numbers_in, quota_cores, text_of
from elixir_compile.base.units import GIB, KIB, MIB, format_bytes
from elixir_compile.tools.doctor.facts import Check, Diagnosis, Finding, System, Torch, bad, note, ok, unknown

# ----------------------------------------------------------------------------------------------------------------------
# Checks D06 to D09: pinned memory, control groups, memory nodes, huge pages.


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
    allowed, usable = len(system.cores), system.num_usable_cores
    quota = quota_cores(*system.group_paths)
    found = f"a CPU quota of {quota or 0:g} cores for {allowed} cores"
    num_threads = system.number("OMP_NUM_THREADS") or allowed
    if system.torch is not None:
        num_threads = system.torch.num_threads
    if quota is None or quota >= allowed:
        yield ok(f"{allowed} cores, not reduced by a CPU quota")
    elif num_threads > usable:
        # All threads stop for the rest of each period as soon as together they have used the quota.
        yield bad(f"{found}, and ops of torch run on {num_threads} threads", f"export OMP_NUM_THREADS={usable}")
    else:
        yield note(found, f"docker run --cpus={allowed}" if system.is_container else "")
    if system.shm_bytes is None:
        yield note("there is no /dev/shm, which workers of a DataLoader use", "mount -t tmpfs shm /dev/shm")
        return
    found = f"/dev/shm of {format_bytes(system.shm_bytes)}"
    resize = "docker run --shm-size=8g" if system.is_container else "mount -o remount,size=8g /dev/shm"
    if system.shm_bytes >= LEAST_SHM_BYTES:
        yield ok(found)
    elif (system.number("WORLD_SIZE") or 1) > 1:
        yield bad(f"{found} is small for workers of a DataLoader and for the ranks", resize)
    else:
        yield note(f"{found} is small for workers of a DataLoader", resize)


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
    folders = [folder for folder, version in group_folders(memberships, groups, "memory") if version == 2]
    texts = {folder / "memory.high": text_of(folder / "memory.high") for folder in folders}
    high = min(((int(text), path) for path, text in texts.items() if text.isdecimal()), default=None)
    if high is not None and high[0] < planned_bytes:
        found = f"above {format_bytes(high[0])} of memory the control group is slowed down, below the limit for plans"
        yield bad(found, f"echo max | sudo tee {high[1]}")
    swapped_bytes = (int(meminfo.get("SwapTotal", 0)) - int(meminfo.get("SwapFree", 0))) * KIB
    swapped = (text_of(folder / "memory.swap.current") for folder in folders)
    swapped_bytes = next((int(text) for text in swapped if text.isdecimal()), swapped_bytes)  # of the group alone
    if swapped_bytes > MOST_SWAPPED_BYTES:
        yield note(f"{format_bytes(swapped_bytes)} of memory are swapped out", "sudo swapoff -a")


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


# ----------------------------------------------------------------------------------------------------------------------
# Checks D10 to D12: the link to the GPU, the rates of copies, the allocators.


MOST_OTHERS_BYTES = GIB
"""More bytes of other processes than this are worth a note: a desktop takes some hundred MiB."""
LEAST_RATE = 0.7
"""Share of the measured profile's rate below which a copy counts as slow."""
LEAST_MAPS = 65530
"""The default of Linux for the mappings of a process."""
_MEASURE = "elixir-compile measure"


def check_gpu(system: System) -> Iterator[Finding]:
    """D10: the PCIe link and the clocks run at full speed, and the GPU is free."""
    if system.accelerator is None:
        return
    state = system.accelerator.state
    if isinstance(state, str):
        yield unknown(f"{system.accelerator.name}: {state}")
        return
    said = "" if state.link is None else "PCIe generation {} x{} while a copy ran".format(*state.link)
    if state.link is None:
        yield unknown("the GPU does not tell its PCIe link")
    elif state.most_link is None:
        yield ok(said)
    elif any(now < most for now, most in zip(state.link, state.most_link, strict=True)):
        # No command repairs a slot, but plans can count on the rate that it has.
        yield note(f"{said}, of generation {state.most_link[0]} x{state.most_link[1]}", _MEASURE)
    else:
        yield ok(f"{said}, the most that GPU and slot support")
    if state.slowed_by:
        yield bad(
            f"the clocks are lowered by {' and '.join(state.slowed_by)}", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE"
        )
    if state.capped_by:
        yield note(f"the clocks are limited by {' and '.join(state.capped_by)}", "nvidia-smi -q -d PERFORMANCE,POWER")
    if state.is_mig:
        yield note("MIG is on: the device is a part of the GPU, and copies share the link with the other parts")
    if state.others_bytes is not None and state.others_bytes > MOST_OTHERS_BYTES:
        found = f"other processes hold {format_bytes(state.others_bytes)} of the GPU"
        yield note(found, "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")


def check_copies(system: System) -> Iterator[Finding]:
    """D11: copies of pinned memory run as fast as the measured profile says."""
    if system.accelerator is None:
        return
    copies, profile = system.accelerator.copies, system.profile
    said = (
        f"{copies.h2d_bytes_per_s / 1e9:.3g} GB/s to the device, {copies.d2h_bytes_per_s / 1e9:.3g} GB/s back, "
        f"{copies.pageable_bytes_per_s / 1e9:.3g} GB/s from pageable memory"
    )
    if profile is None or profile.h2d_bytes_per_s is None or profile.d2h_bytes_per_s is None:
        yield unknown(f"{said}; there is no measured profile to compare with", _MEASURE)
        return
    pairs = ((copies.h2d_bytes_per_s, profile.h2d_bytes_per_s), (copies.d2h_bytes_per_s, profile.d2h_bytes_per_s))
    share = min(rate / measured for rate, measured in pairs)
    if share < LEAST_RATE:
        yield bad(f"{said}: {share:.0%} of the rate in the measured profile", _MEASURE)
    else:
        yield ok(said)


def check_allocators(system: System) -> Iterator[Finding]:
    """D12: how the allocator of the device takes memory, and whether the kernel allows enough mappings."""
    installed = system.torch
    if installed is not None and installed.accelerator == "cuda":
        if has_expandable_segments(system.environ):
            yield ok("the allocator of the device has expandable segments")
        else:
            found = "the allocator of the device has no expandable segments"
            yield note(f"{found}, {MEASURED_OF_THEM}", f"export {EXPANDABLE_SEGMENTS}")
    maps = system.text("proc/sys/vm/max_map_count")
    if not maps.isdecimal():
        yield unknown("the system does not tell how many mappings a process may have")
    elif int(maps) < LEAST_MAPS:
        yield bad(
            f"a process may have {maps} mappings, fewer than Linux allows by default",
            f"sysctl -w vm.max_map_count={LEAST_MAPS}",
        )
    else:
        yield ok(f"a process may have {maps} mappings")


# ----------------------------------------------------------------------------------------------------------------------
# Checks D01 to D05: Python, torch, the driver, the backend, compilers.


OLDEST_PYTHON = (3, 11)
TORCH_VERSIONS = ((2, 11), (2, 13))
"""The oldest and the newest torch that the tests ran with."""
BACKEND = "elixir_compile.session.backend:elixir"

_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By major version of CUDA, the oldest driver: NVIDIA's "CUDA Compatibility", minor version compatibility."""
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"


def check_versions(system: System) -> Iterator[Finding]:
    """D01: Python and torch are in the tested range."""
    python = ".".join(map(str, system.python))
    if system.python < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield bad(f"Python {python} is older than {oldest}", f"apt install python{oldest} python{oldest}-venv")
    else:
        yield ok(f"Python {python}")
    oldest, newest = (".".join(map(str, version)) for version in TORCH_VERSIONS)
    install = f'pip install "torch>={oldest},<{TORCH_VERSIONS[1][0]}.{TORCH_VERSIONS[1][1] + 1}"'
    if system.torch is None:
        yield bad(f"torch cannot be imported: {system.torch_error}", install)
        return
    version = system.torch.version
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = None if found is None else (int(found[1]), int(found[2]))
    if numbers is None:
        yield unknown(f"torch {version} has an unknown version; tested are {oldest} to {newest}")
    elif numbers < TORCH_VERSIONS[0]:
        yield bad(f"torch {version} is older than {oldest}", install)
    elif numbers > TORCH_VERSIONS[1]:
        yield note(f"torch {version} is newer than {newest}, the newest that was tested", install)
    else:
        yield ok(f"torch {version}")


def check_build(system: System) -> Iterator[Finding]:
    """D02: torch uses the GPU of this machine."""
    installed = system.torch
    if installed is None:
        return
    driver = driver_version(system)
    if installed.accelerator is not None:
        yield ok(f"torch sees {installed.num_accelerators} x {installed.accelerator}")
    elif (system.root / "dev/nvidiactl").exists():
        gpu = f"the machine has a GPU with driver {driver or 'of unknown version'}"
        if installed.cuda is None and installed.rocm is None:
            yield bad(f"torch is a build for CPUs, but {gpu}", install_for_cuda(installed))
        elif system.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            yield note(f"CUDA_VISIBLE_DEVICES hides every GPU, but {gpu}", "unset CUDA_VISIBLE_DEVICES")
        else:
            yield bad(f"torch sees no GPU, but {gpu}", 'python -c "import torch; torch.cuda.init()"')
    elif driver is not None:
        found = f"the driver {driver} of NVIDIA is loaded, but this process has no device file of a GPU"
        yield note(found, "docker run --gpus all" if system.is_container else "nvidia-modprobe -u -c 0")
    elif any(
        text_of(device / "vendor") == _NVIDIA_VENDOR and text_of(device / "class").startswith(_DISPLAY_CLASS)
        for device in (system.root / "sys/bus/pci/devices").glob("*")
    ):
        yield note("there is a GPU of NVIDIA on the PCI bus, but no driver is loaded", "apt install nvidia-driver-580")
    else:
        yield ok("no GPU of NVIDIA: training runs on the CPU")


def install_for_cuda(installed: Torch) -> str:
    """Return the line that installs the same version of torch built for CUDA, as it is on PyPI for Linux."""
    version = installed.version.partition("+")[0]
    return f"pip install --force-reinstall --index-url https://pypi.org/simple torch=={version}"


def driver_version(system: System) -> str | None:
    """Return the version of NVIDIA's kernel driver, such as `580.95.05`; None if no driver is loaded."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", system.text("proc/driver/nvidia/version"))
    return None if found is None else found[0]


def check_driver(system: System) -> Iterator[Finding]:
    """D03: the driver is new enough for the CUDA that torch was built for."""
    installed = system.torch
    if installed is None or installed.cuda is None:
        return
    driver = driver_version(system)
    if driver is None:
        if installed.accelerator is not None:
            yield unknown(
                f"torch is built for CUDA {installed.cuda}; the system does not tell the version of the driver"
            )
        return
    cuda = int(installed.cuda.partition(".")[0])
    oldest = _OLDEST_DRIVERS.get(cuda)
    if oldest is None:
        yield unknown(
            f"driver {driver}, torch built for CUDA {installed.cuda}: which driver it needs is not known here"
        )
    elif int(driver.partition(".")[0]) < oldest:
        found = f"driver {driver} is older than {oldest}, which torch built for CUDA {installed.cuda} needs"
        yield bad(found, f"apt install nvidia-driver-{oldest}")
    else:
        yield ok(f"driver {driver}, torch built for CUDA {installed.cuda}")


def check_backend(system: System) -> Iterator[Finding]:
    """D04: `torch.compile(backend="elixir")` finds this package.

    Torch lists the same entry points in `torch.compiler.list_backends()`, but takes a second to import its compilers.
    """
    reinstall = "pip install --force-reinstall --no-deps elixir-compile"
    if not system.backend:
        yield bad('no installed package registers the backend "elixir"', reinstall)
    elif system.backend != BACKEND:
        yield bad(f'the backend "elixir" is {system.backend}, not {BACKEND}', reinstall)
    else:
        yield ok('the backend "elixir" is registered')


def check_compilers(system: System) -> Iterator[Finding]:
    """D05: the compilers and headers that Inductor, Triton and host passes need are installed."""
    cxx = shlex.split(system.environ.get("CXX", "")) or ["g++"]
    cc = shlex.split(system.environ.get("CC", ""))
    header = system.include / "Python.h"
    if _program(system, cxx[0]) is None:
        yield bad(f"no C++ compiler, which Inductor needs: {cxx[0]} is not installed", "apt install g++ python3-dev")
    else:
        yield ok(f"C++ compiler {cxx[0]}")
    if not any(_program(system, name) for name in ([cc[0]] if cc else ["cc", "gcc", "clang"])):
        missing = cc[0] if cc else "cc, gcc or clang"
        yield note(
            f"no C compiler, so host updates run on torch's slower ops: {missing} is not installed", "apt install gcc"
        )
    if not header.is_file():
        version = ".".join(map(str, system.python))
        yield bad(f"no {header}, which Inductor compiles with", f"apt install python{version}-dev")
    installed = system.torch
    is_on_cuda = installed is not None and installed.cuda is not None and installed.accelerator is not None
    if is_on_cuda and importlib.util.find_spec("triton") is None:
        yield bad("triton, with which Inductor compiles for the GPU, is not installed", "pip install triton")


def _program(system: System, name: str) -> str | None:
    return shutil.which(name, path=system.environ.get("PATH"))


# ----------------------------------------------------------------------------------------------------------------------
# Checks D13 to D15: the disk for optimizer state, the caches and the measured profile, the ranks.


IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "virtiofs")
LAYERED = ("overlay", "aufs")
LEAST_FREE_BYTES = 10 * GIB
ASSUMED_BYTES_PER_S = 1e9
"""The rate that the planner assumes for a disk that was not measured."""


def check_disk(system: System) -> Iterator[Finding]:
    """D13: the folder for optimizer state is on a disk, free and fast enough."""
    disk = system.disk
    if disk is None:
        return
    kind = filesystem_of(disk.path, system.text("proc/self/mountinfo"))
    disks = "df -hT -x tmpfs -x devtmpfs -x overlay"
    if kind in IN_MEMORY:
        yield bad(f"{disk.path} is on {kind}, which keeps its files in memory: choose a folder on a disk", disks)
    elif kind in OVER_NETWORK:
        yield note(f"{disk.path} is on {kind}: state passes through a network or another process", disks)
    elif kind in LAYERED:
        yield note(
            f"{disk.path} is on {kind}, a layer of the container: mount a disk there",
            "docker run -v /mnt/disk:/mnt/disk",
        )
    else:
        yield ok(f"{disk.path} is on {kind}") if kind else unknown(f"the filesystem of {disk.path} is not known")
    if disk.error:
        yield bad(disk.error, disk.fix)
        return
    if disk.is_direct:
        yield ok("the filesystem accepts O_DIRECT")
    else:
        yield note("the filesystem refuses O_DIRECT: state takes memory in the page cache", disks)
    free = f"{format_bytes(disk.free_bytes)} are free"
    yield ok(free) if disk.free_bytes >= LEAST_FREE_BYTES else note(free, f"df -h {disk.path}")
    rates = (disk.write_bytes_per_s, disk.read_bytes_per_s)
    said = "{:.3g} GB/s written, {:.3g} GB/s read".format(*(rate / 1e9 for rate in rates))
    if min(rates) >= ASSUMED_BYTES_PER_S or (system.profile is not None and system.profile.has_disk):
        yield ok(said)
    else:
        found = f"{said}; plans assume {ASSUMED_BYTES_PER_S / 1e9:g} GB/s until the disk is measured"
        yield note(found, f"{_MEASURE} --disk-path {disk.path}")


def filesystem_of(path: Path, mountinfo: str) -> str:
    """Return the type of the filesystem of `path`, such as `ext4`, by the text of `/proc/self/mountinfo`.

    Return an empty text if no mount holds the path.
    """
    found, depth = "", -1
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        point = Path(fields.split(" ")[4].replace("\\040", " "))  # as a space is written there
        # A later mount at the same place hides an earlier mount.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = source.split(" ")[0], len(point.parts)
    return found


def check_caches(system: System) -> Iterator[Finding]:
    """D14: caches can be written, and the machine was measured as it is now."""
    for variable, path in system.caches.items():
        yield _cache_finding(path, variable)
    profile = system.profile
    if profile is None:
        yield unknown("whether the machine was measured is not known without torch")
    elif profile.is_measured:
        yield ok(f"measured profile {profile.path}")
    elif profile.num_others:
        found = (
            f"none of the {profile.num_others} measured profiles is for this device, torch, and number of cores and "
            "threads, so plans use a rough profile"
        )
        yield note(found, _MEASURE)
    else:
        yield note("the machine was not measured, so plans use a rough profile", _MEASURE)


def _cache_finding(path: Path, variable: str) -> Finding:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        found = f"the cache {path} cannot be written ({error.strerror}): each process plans and compiles again"
        return bad(found, f"export {variable}={Path(tempfile.gettempdir()) / 'elixir'}")
    try:
        if (path / "host").exists():
            with own_folder(path / "host"):
                pass
    except WrittenByOthersError as error:
        return note(f"{error}: each process compiles its host passes again", f"chmod go-w {path / 'host'}")
    return ok(f"cache {path}")


def check_ranks(system: System) -> Iterator[Finding]:
    """D15: ranks on this machine have cores, threads and collectives."""
    installed = system.torch
    if installed is None:
        return
    started = system.number("LOCAL_WORLD_SIZE")
    num_ranks = started or max(installed.num_accelerators, 1)
    if num_ranks > 1:
        fix = install_for_cuda(installed)
        if not installed.has_gloo:
            yield bad("torch is built without gloo, by which ranks agree", fix)
        if installed.accelerator == "cuda" and not installed.has_nccl:
            yield bad("torch is built without NCCL, by which GPUs exchange parameters and gradients", fix)
        said = f"{num_ranks} ranks on {system.num_usable_cores} cores"
        if system.num_usable_cores >= 2 * num_ranks:
            yield ok(said)
        else:
            yield note(f"{said}: a rank needs a core for host updates beside the core of its training thread")
    # `torchrun` gives each of several ranks one thread, so the threads of this process count only if it is such a rank.
    num_threads, num_cores = installed.num_threads, len(system.cores)
    if started is not None and started > 1:
        num_threads, num_cores = num_threads * started, system.num_usable_cores
    said = f"threads of torch: {num_threads} on {num_cores} cores"
    if num_threads > num_cores:
        yield bad(said, f"export OMP_NUM_THREADS={max(num_cores // (started or 1), 1)}")
    else:
        yield ok(said)


# ----------------------------------------------------------------------------------------------------------------------
# The table of all checks, and the diagnosis of a machine.


CHECKS = (
    Check(code="D01", title="versions", run=check_versions),
    Check(code="D02", title="build of torch", run=check_build),
    Check(code="D03", title="driver", run=check_driver),
    Check(code="D04", title="backend", run=check_backend),
    Check(code="D05", title="compilers", run=check_compilers),
    Check(code="D06", title="pinned memory", run=check_pinning),
    Check(code="D07", title="limits", run=check_control_groups),
    Check(code="D08", title="memory nodes", run=check_memory_nodes),
    Check(code="D09", title="huge pages", run=check_huge_pages),
    Check(code="D10", title="GPU", run=check_gpu),
    Check(code="D11", title="copies", run=check_copies),
    Check(code="D12", title="allocators", run=check_allocators),
    Check(code="D13", title="disk", run=check_disk),
    Check(code="D14", title="caches", run=check_caches),
    Check(code="D15", title="ranks", run=check_ranks),
)


def diagnose(system: System) -> tuple[Diagnosis, ...]:
    """Return the findings of all checks that apply to `system`, in the order of their codes."""
    found: list[Diagnosis] = []
    for check in CHECKS:
        try:
            findings = list(check.run(system))
        except (OSError, ValueError) as error:  # files of the system in an unknown form
            findings = [unknown(f"the check failed: {type(error).__name__}: {error}")]
        for each in findings:
            code, title = check.code, check.title
            found.append(Diagnosis(code=code, title=title, verdict=each.verdict, found=each.found, fix=each.fix))
    return tuple(found)
