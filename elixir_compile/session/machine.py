"""The machine to plan for, measured earlier or roughly known, and the memory of its device and host for training."""

import functools
import hashlib
import logging
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.base.control_groups import num_usable_cores
from elixir_compile.base.errors import ElixirWarning, InvalidOption, ProfileFileError
from elixir_compile.base.folders import cache_dir, read_cached, write_cached
from elixir_compile.base.options import Options
from elixir_compile.base.units import GIB, format_bytes
from elixir_compile.compat.platforms import (
    available_host_bytes,
    host_memory_bytes,
    memory_sizes_bytes,
    num_local_ranks,
    platform_of,
)
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir.hardware import (
    Cluster,
    Fleet,
    cluster_from_json,
    cluster_to_json,
    fleet_from_json,
    is_fleet,
    parse_fleet,
    parse_hardware,
    profile_for,
)
from elixir_compile.runtime.distributed.peers import Peers

log = logging.getLogger("elixir_compile")


def cached_machine(device: torch.device) -> Cluster | None:
    """Return the machine as measured earlier with `device`, with its present memory sizes; None if it was not measured.

    A file that cannot be read counts as not measured, with an `ElixirWarning`.
    """

    def with_present_memory(text: str) -> Cluster:
        return with_memory(cluster_from_json(text), *memory_sizes_bytes(device))

    return read_cached(machine_path(device), with_present_memory, _warn)


def store_machine(cluster: Cluster, device: torch.device, *, is_own: bool = False) -> Path:
    """Write the measured `cluster` to the file for `device`, and return its path. The file is replaced atomically.

    If `is_own`, the file is for this rank alone: ranks that differ may have devices of equal names. Otherwise it is for
    all ranks, and a file for this rank alone is removed.
    """
    path = _own_path(device) if is_own else _common_path(device)
    write_cached(path, cluster_to_json(cluster))
    if not is_own:
        forget_own_machine(device)
    return path


def forget_own_machine(device: torch.device) -> None:
    """Remove the file for this rank alone, if there is one: ranks were measured again, and are equal."""
    _own_path(device).unlink(missing_ok=True)


def machine_path(device: torch.device) -> Path:
    """Return the path of the file with the measured machine for `device`, which need not exist: the file for this rank
    alone if there is one, else the file for all ranks."""
    own = _own_path(device)
    return own if own.exists() else _common_path(device)


def _own_path(device: torch.device) -> Path:
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    common = _common_path(device)
    return common.with_name(f"{common.stem}.{rank}.json")


def _common_path(device: torch.device) -> Path:
    device_bytes, _ = memory_sizes_bytes(device)
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    parts = (
        device.type,
        platform_of(device).name(device),
        num_usable_cores(),
        torch.__version__,  # a public name
        torch.get_num_threads(),
        # In GiB: the bytes that a driver keeps for itself change from start to start. The memory of the host is no part
        # of the key, as some virtual machines grow and shrink it; `with_present_memory` has it as it is now.
        round(device_bytes / GIB) if platform_of(device).has_own_memory else 0,
        world,
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_dir() / "machines" / f"{key}.json"


def with_memory(cluster: Cluster, device_bytes: int, host_bytes: int) -> Cluster:
    """Return `cluster` with these memory sizes; its limit of pinned memory and its reserves shrink with them."""
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
        stacklevel=5,
    )


_HANDLES = 2
"""Handles of each parameter: one in its module, another in the first graph of a plain model."""
_STEP_COUNT_BYTES = 4
_VERSION_BYTES = 8


def machine(device: torch.device, hardware: str | None = None) -> Cluster:
    """Return the machine to plan for; nothing is measured.

    `hardware` is the path of a profile, or a name such as "4 x a100-40g"; it has its own memory sizes. If it is None,
    the machine is the result of `elixir-compile measure` for `device`, or a rough profile if there is none, with the
    total memory of this machine.

    Raises `UnknownHardware` for an unknown name, and `ProfileFileError` for a file without a profile.
    """
    if hardware is not None:
        return _named_machine(hardware)
    cached = cached_machine(device)
    if cached is not None:
        return cached
    return profile_for(device.type, *memory_sizes_bytes(device), platform_of(device).name(device))


def _named_machine(hardware: str) -> Cluster:
    fleet = named_fleet(hardware)
    if fleet is not None:
        has_ranks = distributed.is_available() and distributed.is_initialized()
        num_ranks = distributed.get_world_size() if has_ranks else 1
        if fleet.num_ranks != num_ranks:
            raise InvalidOption("hardware", hardware, f"a fleet of {num_ranks} devices")
        return fleet.as_cluster() or fleet.seen_by(distributed.get_rank() if has_ranks else 0)
    text = _text_of_file(hardware)
    return parse_hardware(hardware) if text is None else cluster_from_json(text)


def named_fleet(hardware: str) -> Fleet | None:
    """Return the fleet that `hardware` names, such as "2 x l4-24g + 1 x p40-24g" or the path of a file of
    `elixir-compile measure`; None if it names the equal devices of one kind.

    Raises UnknownHardware, InvalidOption, and ProfileFileError for a file without a fleet or a profile.
    """
    text = _text_of_file(hardware)
    if text is None:
        return parse_fleet(hardware) if is_fleet(hardware) else None
    return fleet_from_json(text) if '"elixir": "fleet"' in text[:100] else None


def _text_of_file(hardware: str) -> str | None:
    """Return the text of the file `hardware`; None if it is the name of a machine."""
    path = Path(hardware)
    if not (path.suffix == ".json" or path.is_file()):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileFileError(hardware, "a file that can be read", error.strerror) from error
    except UnicodeDecodeError as error:
        raise ProfileFileError(hardware, "a text file", "bytes that are not UTF-8") from error


def device_budget_bytes(
    options: Options, cluster: Cluster, device: torch.device, held_bytes: int, peers: Peers | None = None
) -> int:
    """Return the device budget: the option, or else the free bytes plus `held_bytes` less the reserve.

    `held_bytes` are the bytes of the model that are on the device already. Workspaces of libraries count as free,
    because every plan has `library_bytes` for them. Warns ElixirWarning if the option names more than the device has.
    """
    if options.device_memory is not None:
        total_bytes, _ = memory_sizes_bytes(device)
        _warn_of_missing("device_memory", options.device_memory, total_bytes, platform_of(device).name(device))
        return options.device_memory
    platform = platform_of(device)
    platform.drop_workspaces()
    memory = platform.memory(device)
    if memory is not None:
        # The allocator refuses to hold more than its limit, even if more is free.
        reusable_bytes = memory.free_bytes + memory.reserved_bytes - memory.allocated_bytes
        available_bytes = min(reusable_bytes, memory.limit_bytes - memory.allocated_bytes)
        return max(available_bytes + held_bytes - cluster.device.reserve_bytes, 1)
    return _free_host_bytes(peers) + held_bytes


@functools.cache
def library_bytes(device: torch.device) -> int:
    """Return the bytes of the workspaces that matrix products leave allocated on `device`.

    cuBLAS keeps a workspace for each thread and stream, cuBLASLt (products with a bias) may keep another, and a step
    has two threads: the caller's and autograd's. They are measured at the first capture, while torch traces with fake
    tensors: a fake product would allocate nothing.
    """
    platform = platform_of(device)
    if not platform.has_own_memory:
        return 0
    with compat.real_tensors(), torch.no_grad():
        platform.drop_workspaces()
        before_bytes = platform.tensor_bytes(device)
        _multiply(torch.float32, device)
        try:
            _multiply(torch.bfloat16, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a device without bfloat16 needs no workspace for it
            log.info("%s has no products in bfloat16: %s", device, str(error).partition("\n")[0])
        left_bytes = platform.tensor_bytes(device) - before_bytes
    return 2 * max(0, left_bytes)


def _multiply(dtype: torch.dtype, device: torch.device) -> None:
    """Run a product without a bias and one with a bias on `device`."""
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    torch.mm(factor, factor)
    torch.addmm(factor[0], factor, factor)


def scalar_bytes(slots: Collection[Slot], device: torch.device) -> int:
    """Return the bytes on `device` of the small tensors that training keeps for the parameters of `slots`.

    Each parameter has `_HANDLES` handles, and its optimizer counts its steps in fp32. On a CPU the ticket of a forward
    counts too: its number, and the version of each parameter that its backward may read.
    """
    handles_bytes = _HANDLES * sum(slot.param.element_size() for slot in slots)
    ticket_bytes = _VERSION_BYTES * (1 + len(slots)) if device.type == "cpu" else 0
    return handles_bytes + _STEP_COUNT_BYTES * sum(slot.param.requires_grad for slot in slots) + ticket_bytes


def host_budget_bytes(options: Options, peers: Peers | None = None) -> int:
    """Return the host budget of one rank: the option, or else its part of the free host memory.

    Warns ElixirWarning if the option names more than this process may use of the host.
    """
    if options.host_memory is None:
        return _free_host_bytes(peers)
    _warn_of_missing("host_memory", options.host_memory, host_memory_bytes(), "this host")
    return options.host_memory


def _warn_of_missing(option: str, asked_bytes: int, total_bytes: int, place: str) -> None:
    """Warn if the budget in `option` is more than all memory of `place`, free or not."""
    if asked_bytes > total_bytes:
        warnings.warn(
            f"the option {option} is {format_bytes(asked_bytes)}, and {place} has {format_bytes(total_bytes)}: a plan "
            "may need memory that is not there. Leave the option out to plan for the free memory.",
            ElixirWarning,
            stacklevel=3,
        )


def num_sharing_host(peers: Peers | None) -> int:
    """Return the number of ranks on this host, or on the host with the most ranks; it is equal on all `peers`."""
    if peers is None or peers.control.is_echo:
        return num_local_ranks()
    # Ranks of another model may run on this host too.
    return max(peers.num_local, num_local_ranks(1))


def _free_host_bytes(peers: Peers | None) -> int:
    return available_host_bytes() // num_sharing_host(peers)
