"""What the device and the host have for training when the user does not say."""

import psutil
import torch

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
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(free_bytes + cached_bytes + held_bytes - cluster.device.reserve_bytes, 1)
    return psutil.virtual_memory().available + held_bytes


def host_budget_bytes(options: Options) -> int:
    """Return the bytes of host memory that parameters, gradients and optimizer state may take."""
    return options.host_memory if options.host_memory is not None else psutil.virtual_memory().available
