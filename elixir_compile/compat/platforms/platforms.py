"""Find the platform of a device, and the accelerator of this process."""

import torch

from elixir_compile.compat.platforms.accelerator import AcceleratorPlatform
from elixir_compile.compat.platforms.cuda import CudaPlatform
from elixir_compile.compat.platforms.platform import Platform

_IN_HOST_MEMORY = ("cpu", "mps", "meta")
"""Device types without memory of their own that a plan could fill. On `mps`, the CPU and the GPU share one memory."""


def platform_of(device: torch.device) -> Platform:
    """Return the platform of the type of `device`."""
    if device.type in _IN_HOST_MEMORY:
        return Platform(device.type)
    return CudaPlatform(device.type) if device.type == "cuda" else AcceleratorPlatform(device.type)


def accelerator_type() -> str | None:
    """Return the type of the accelerators of this machine that have memory of their own, or None. Initialises none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _IN_HOST_MEMORY else found.type


def accelerator_platform() -> Platform | None:
    """Return the platform of the accelerators of this machine that have memory of their own, or None."""
    found = accelerator_type()
    return None if found is None else platform_of(torch.device(found))


def is_accelerator_in_use() -> bool:
    """Return whether this process has used an accelerator, which forbids forks."""
    platform = accelerator_platform()
    return platform is not None and platform.is_in_use


def accelerator() -> torch.device | None:
    """Return the current accelerator of the calling thread, or None if there is none with memory of its own."""
    platform = accelerator_platform()
    return None if platform is None else platform.current()
