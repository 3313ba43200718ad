"""The machine that a plan is for, remembered or rough, and what its device and host have for training."""

import functools
import hashlib
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.errors import ElixirWarning, InvalidPlan, ProfileFileError
from elixir_compile.folders import cache_dir, write_cached
from elixir_compile.hardware import Cluster, cluster_from_json, cluster_to_json, parse_hardware, profile_for
from elixir_compile.measure.machine import available_host_bytes, memory_sizes_bytes, num_local_ranks, num_usable_cores
from elixir_compile.ops.registry import Slot
from elixir_compile.options import Options
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.units import GIB


def cached_machine(device: torch.device) -> Cluster | None:
    """Return what was measured here for `device`, with the memory that the machine has now; None if nothing was.

    A file that cannot be read counts as nothing, with one `ElixirWarning` that names it.
    """
    path = machine_path(device)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _warn(path, error)
        return None
    try:
        return with_memory(cluster_from_json(text), *memory_sizes_bytes(device))
    except (ProfileFileError, InvalidPlan) as error:
        _warn(path, error)
        return None


def store_machine(cluster: Cluster, device: torch.device) -> Path:
    """Remember `cluster` as what was measured for `device`; return the file. Readers see the old file or the new."""
    path = machine_path(device)
    write_cached(path, cluster_to_json(cluster))
    return path


def machine_path(device: torch.device) -> Path:
    """Return the file of what was measured for `device`, which need not exist."""
    is_cuda = device.type == "cuda"
    device_bytes, host_bytes = memory_sizes_bytes(device)
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    parts = (
        device.type,
        torch.cuda.get_device_name(device) if is_cuda else "cpu",
        num_usable_cores(),
        torch.__version__,  # a public name, underscores and all
        torch.get_num_threads(),
        # In GiB: what a kernel keeps for itself changes from one start to the next.
        round(device_bytes / GIB),
        round(host_bytes / GIB),
        world,
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_dir() / "machines" / f"{key}.json"


def with_memory(cluster: Cluster, device_bytes: int, host_bytes: int) -> Cluster:
    """Return `cluster` with these memory sizes; what may be pinned and what is reserved shrink with them."""
    node = cluster.nodes[0]
    device = replace(
        node.device, memory_bytes=device_bytes, reserve_bytes=min(node.device.reserve_bytes, device_bytes // 10)
    )
    host = replace(
        node.host,
        memory_bytes=host_bytes,
        pinned_bytes=min(node.host.pinned_bytes, host_bytes),
        reserve_bytes=min(node.host.reserve_bytes, host_bytes // 10),
    )
    return replace(cluster, nodes=(replace(node, device=device, host=host),) * len(cluster.nodes))


def _warn(path: Path, error: Exception) -> None:
    warnings.warn(
        f"the measured profile {path} cannot be used and is ignored: {error} "
        "Run `elixir-compile measure` to replace it.",
        ElixirWarning,
        stacklevel=4,
    )


_HANDLES = 2
_STEP_COUNT_BYTES = 4
_VERSION_BYTES = 8


def machine(device: torch.device, hardware: str | None = None) -> Cluster:
    """Return the machine to plan for; it is never measured here.

    `hardware` is the path of a profile, or a name such as "4 x a100-40g", and brings its own memory sizes. Without it:
    what `elixir-compile measure` found for `device`, else a rough profile, with the bytes that there are in all. Raises
    `UnknownHardware`, and `ProfileFileError` for a file that is no profile.
    """
    if hardware is not None:
        return _named_machine(hardware)
    cached = cached_machine(device)
    if cached is not None:
        return cached
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return profile_for(device.type, *memory_sizes_bytes(device), name)


def _named_machine(hardware: str) -> Cluster:
    path = Path(hardware)
    if not (path.suffix == ".json" or path.is_file()):
        return parse_hardware(hardware)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileFileError(hardware, "a file that can be read", error.strerror) from error
    except UnicodeDecodeError as error:
        raise ProfileFileError(hardware, "a text file", "bytes that are not UTF-8") from error
    return cluster_from_json(text)


def device_budget_bytes(
    options: Options, cluster: Cluster, device: torch.device, held_bytes: int, ranks: Ranks | None = None
) -> int:
    """Return the bytes that training may hold on the device: the option, else what is free now plus `held_bytes`, less
    the reserve.

    `held_bytes` are those that the model holds there already.
    """
    if options.device_memory is not None:
        return options.device_memory
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        allocated_bytes = torch.cuda.memory_allocated(device)
        cached_bytes = torch.cuda.memory_reserved(device) - allocated_bytes
        # What `torch.cuda.set_per_process_memory_fraction` leaves: the allocator refuses more, whatever is free.
        allowed_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes) - allocated_bytes
        available_bytes = min(free_bytes + cached_bytes, allowed_bytes)
        return max(available_bytes + held_bytes - cluster.device.reserve_bytes, 1)
    return _free_host_bytes(ranks) + held_bytes


@functools.cache
def library_bytes(device: torch.device) -> int:
    """Return the bytes that matrix products leave allocated on `device`.

    cuBLAS keeps a workspace per thread and stream, and a step has two threads: the caller's and autograd's.
    """
    if device.type != "cuda":
        return 0
    compat.drop_cublas_workspaces()
    one = torch.ones(16, 16, device=device)
    before_bytes = torch.cuda.memory_allocated(device)
    product = one @ one
    left_bytes = torch.cuda.memory_allocated(device) - before_bytes - product.untyped_storage().nbytes()
    return 2 * left_bytes


def scalar_bytes(slots: Collection[Slot], device: torch.device) -> int:
    """Return the bytes on `device` of the small tensors that training keeps for the parameters of `slots`.

    A handle in its module, another in the first graph of a plain model, and the optimizer's count of steps in fp32. On
    a CPU also the ticket of a forward: its number, and the version of each parameter that its backward may read.
    """
    handles_bytes = _HANDLES * sum(slot.param.element_size() for slot in slots)
    ticket_bytes = _VERSION_BYTES * (1 + len(slots)) if device.type == "cpu" else 0
    return handles_bytes + _STEP_COUNT_BYTES * sum(slot.param.requires_grad for slot in slots) + ticket_bytes


def host_budget_bytes(options: Options, ranks: Ranks | None = None) -> int:
    """Return the bytes of host memory that parameters, gradients and optimizer state may take."""
    return options.host_memory if options.host_memory is not None else _free_host_bytes(ranks)


def num_sharing_host(ranks: Ranks | None) -> int:
    """Return how many ranks share this host, the same on all `ranks`, where there are several hosts the most."""
    if ranks is None or ranks.control.is_echo:
        return num_local_ranks()
    # Ranks of another model may be here too.
    return max(ranks.num_local, num_local_ranks(1))


def _free_host_bytes(ranks: Ranks | None) -> int:
    """Return the part of this rank of what the host has free."""
    return available_host_bytes() // num_sharing_host(ranks)
