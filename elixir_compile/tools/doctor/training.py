"""Checks D13 to D15: the disk for optimizer state, the caches and the measured profile, the ranks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from elixir_compile.base.folders import WrittenByOthersError, own_folder
from elixir_compile.base.units import GIB, format_bytes
from elixir_compile.tools.doctor.software import install_for_cuda
from elixir_compile.tools.doctor.values import DiskTrial, Finding, Profile, System, Torch, bad, note, ok, unknown

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
    yield _rate_finding(disk, system.profile)


def _rate_finding(disk: DiskTrial, profile: Profile | None) -> Finding:
    rates = (disk.write_bytes_per_s, disk.read_bytes_per_s)
    said = "{:.3g} GB/s written, {:.3g} GB/s read".format(*(rate / 1e9 for rate in rates))
    if min(rates) >= ASSUMED_BYTES_PER_S or (profile is not None and profile.has_disk):
        return ok(said)
    found = f"{said}; plans assume {ASSUMED_BYTES_PER_S / 1e9:g} GB/s until the disk is measured"
    return note(found, f"elixir-compile measure --disk-path {disk.path}")


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
        yield note(found, "elixir-compile measure")
    else:
        yield note("the machine was not measured, so plans use a rough profile", "elixir-compile measure")


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
        yield from _collective_findings(installed)
        yield _cores_finding(num_ranks, system.num_usable_cores)
    # `torchrun` gives each of several ranks one thread, so the threads of this process count only if it is such a rank.
    num_threads, num_cores = installed.num_threads, len(system.cores)
    if started is not None and started > 1:
        num_threads, num_cores = num_threads * started, system.num_usable_cores
    said = f"threads of torch: {num_threads} on {num_cores} cores"
    if num_threads > num_cores:
        yield bad(said, f"export OMP_NUM_THREADS={max(num_cores // (started or 1), 1)}")
    else:
        yield ok(said)


def _cores_finding(num_ranks: int, num_cores: int) -> Finding:
    said = f"{num_ranks} ranks on {num_cores} cores"
    if num_cores >= 2 * num_ranks:
        return ok(said)
    return note(f"{said}: a rank needs a core for host updates beside the core of its training thread")


def _collective_findings(installed: Torch) -> Iterator[Finding]:
    fix = install_for_cuda(installed)
    if not installed.has_gloo:
        yield bad("torch is built without gloo, by which ranks agree", fix)
    if installed.accelerator == "cuda" and not installed.has_nccl:
        yield bad("torch is built without NCCL, by which GPUs exchange parameters and gradients", fix)
