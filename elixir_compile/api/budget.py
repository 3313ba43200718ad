"""What the device and the host have for training when the user does not say."""

import functools

import psutil
import torch

from elixir_compile import compat
from elixir_compile.hardware import Cluster, profile_for
from elixir_compile.options import Options


def machine(device: torch.device) -> Cluster:
    """Return the profile of `device` and its host, with the memory they have in all, in bytes."""
    host_bytes = psutil.virtual_memory().total
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return profile_for("cuda", properties.total_memory, host_bytes, properties.name)
    return profile_for("cpu", host_bytes, host_bytes, "cpu")


def device_budget_bytes(options: Options, cluster: Cluster, device: torch.device, held_bytes: int) -> int:
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
    return psutil.virtual_memory().available + held_bytes


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


def host_budget_bytes(options: Options) -> int:
    """Return the bytes of host memory that parameters, gradients and optimizer state may take."""
    return options.host_memory if options.host_memory is not None else psutil.virtual_memory().available
