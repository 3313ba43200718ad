"""Measured machines, remembered: one profile per device, thread count and torch version in the cache folder."""

import hashlib
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from elixir_compile.cache_dir import cache_dir, write_cached
from elixir_compile.errors import ElixirWarning, InvalidPlan, ProfileFileError
from elixir_compile.hardware import Cluster, cluster_from_json, cluster_to_json
from elixir_compile.measure.machine import memory_sizes_bytes, num_usable_cores
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
