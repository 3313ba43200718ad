"""Try facts that no file tells: pinned memory, copies to the accelerator, a disk. Find the measured profile."""

import errno
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from elixir_compile.base.errors import DiskFailed, DiskFull, ElixirWarning
from elixir_compile.base.units import MIB
from elixir_compile.compat.platforms import accelerator as current_accelerator
from elixir_compile.compat.platforms import available_host_bytes, num_local_ranks, platform_of
from elixir_compile.runtime.bucket import Slab
from elixir_compile.runtime.disk_file import DiskTransfer
from elixir_compile.runtime.disk_store import DiskRegion, DiskStore, staging_buffers
from elixir_compile.session.machine import cached_machine, machine_path
from elixir_compile.tools.doctor.facts import Accelerator, CopyRates, DiskTrial, Pinning, Profile, gpu_at
from elixir_compile.tools.measure.machine import COPY_BYTES, Copies, beside, copies_of, lock_limit_bytes, median_s

FIRST_PINNED_BYTES = 256 * MIB
_PINNING_S = 0.5
_COPYING_S = 0.1
_DISK_BYTES = 256 * MIB
_TRANSFER_BYTES = 32 * MIB
_DISK_S = 1.0


def try_accelerator() -> Accelerator | None:
    """Return facts about the current accelerator; None if there is none with memory of its own. Takes a second."""
    device = current_accelerator()
    if device is None:
        return None
    platform = platform_of(device)
    address = platform.pci_address(device)
    gpu = "torch does not tell its PCI address" if address is None else gpu_at(address)
    # Read before the first copy, because from then on this process takes memory of the GPU too.
    others_bytes = None if isinstance(gpu, str) else gpu.used_bytes()
    pinning = try_pinning(available_host_bytes() // num_local_ranks(platform.num_devices))
    copies = copies_of(device, COPY_BYTES)
    if isinstance(gpu, str):
        state = gpu
    else:
        with beside(copies.h2d):
            time.sleep(_COPYING_S)  # an idle link takes some copies to reach its full speed
            state = gpu.state(others_bytes)
        gpu.close()
    return Accelerator(
        name=platform.name(device),
        address=address,
        pinning=pinning,
        state=state,
        copies=copy_rates(device, copies),
    )


def try_pinning(budget_bytes: int) -> Pinning | None:
    """Pin slabs of 256 MiB and of twice the bytes of the last, up to `budget_bytes` or for about half a second.

    Return None if no copy of the accelerator is faster from pinned memory.
    """
    ends_s = time.monotonic() + _PINNING_S
    pinned_bytes, next_bytes = 0, FIRST_PINNED_BYTES
    refused_bytes: int | None = None
    while refused_bytes is None and next_bytes <= max(budget_bytes, FIRST_PINNED_BYTES):
        with warnings.catch_warnings(record=True) as refusals:
            warnings.simplefilter("always", ElixirWarning)
            is_pinned = Slab(next_bytes, pin=True).is_pinned
        if is_pinned:
            pinned_bytes, next_bytes = next_bytes, 2 * next_bytes
        elif refusals:
            refused_bytes = next_bytes
        else:
            return None
        if time.monotonic() > ends_s:
            break
    return Pinning(pinned_bytes=pinned_bytes, refused_bytes=refused_bytes, lock_limit_bytes=lock_limit_bytes())


def copy_rates(device: torch.device, copies: Copies) -> CopyRates:
    """Return the rates of `copies`, made as gathers and offloads are, and of a copy out of pageable memory."""
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cpu")
    arriving = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

    def rate(copy: Callable[[], object], num_copies: int = 1) -> float:
        return num_copies * COPY_BYTES / median_s(copy, device, _COPYING_S)

    return CopyRates(
        h2d_bytes_per_s=rate(copies.h2d, num_copies=2),  # it copies twice
        d2h_bytes_per_s=rate(copies.d2h),
        pageable_bytes_per_s=rate(lambda: arriving.copy_(pageable)),
    )


def find_profile() -> Profile:
    """Return the path and the rates of the measured profile of this machine."""
    device = current_accelerator() or torch.device("cpu")
    path = machine_path(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ElixirWarning)  # an unreadable file counts as not measured
        cluster = cached_machine(device)
    others = [other for other in path.parent.glob("*.json") if other != path]
    return Profile(
        path=path,
        is_measured=cluster is not None,
        num_others=len(others),
        h2d_bytes_per_s=None if cluster is None else cluster.h2d.bytes_per_s,
        d2h_bytes_per_s=None if cluster is None else cluster.d2h.bytes_per_s,
        has_disk=cluster is not None and cluster.host.disk_read_bytes_per_s is not None,
    )


def try_disk(path: Path) -> DiskTrial:
    """Write files in the folder `path` and read them for about a second each; none of them stays."""
    try:
        free_bytes = shutil.disk_usage(path).free
        store = DiskStore(path)
        try:
            region = store.allocate("doctor", _DISK_BYTES if free_bytes > 2 * _DISK_BYTES else MIB)
            (buffer,) = staging_buffers(1, min(_TRANSFER_BYTES, region.nbytes))
            buffer.random_(0, 256)  # random bytes, because a drive may store zeros faster
            write_bytes_per_s = _rate(region, lambda at: region.write_from(buffer, at), buffer)
            read_bytes_per_s = _rate(region, lambda at: region.read_into(buffer, at), buffer)
            return DiskTrial(
                path=path.resolve(),
                error="",
                is_direct=region.is_direct,
                free_bytes=free_bytes,
                write_bytes_per_s=write_bytes_per_s,
                read_bytes_per_s=read_bytes_per_s,
            )
        finally:
            store.close()
    except (DiskFailed, DiskFull, OSError) as error:
        fix = f"mkdir -p {path}" if error.errno == errno.ENOENT else f"ls -ld {path}; df -h {path}"
        return DiskTrial(path=path, error=str(error), fix=fix)


def _rate(region: DiskRegion, begin: Callable[[int], DiskTransfer], buffer: torch.Tensor) -> float:
    """Return the bytes per second of transfers through the region, for about a second or until its end."""
    began_s = now_s = time.perf_counter()
    offset_bytes = 0
    while offset_bytes + buffer.numel() <= region.nbytes and now_s - began_s < _DISK_S:
        begin(offset_bytes).wait()
        offset_bytes += buffer.numel()
        now_s = time.perf_counter()
    return offset_bytes / (now_s - began_s)
