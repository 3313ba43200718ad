"""The platform of CUDA: pinned memory and the place on the PCI bus, which `torch.accelerator` does not serve."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.compat.platforms.accelerator import AcceleratorPlatform
from elixir_compile.compat.platforms.platform import PinningError

_PORTABLE = 1
"""`cudaHostRegisterPortable`: page-locked for every device, not only for the current device."""


class CudaPlatform(AcceleratorPlatform):
    """GPUs by CUDA, or by ROCm, which torch also calls CUDA."""

    needed = (
        *AcceleratorPlatform.needed,
        "get_device_name",
        "get_device_properties",
        "get_per_process_memory_fraction",
        "mem_get_info",
    )

    def drop_workspaces(self) -> None:
        """Free the workspaces of cuBLAS and cuBLASLt on all devices."""
        compat.drop_cublas_workspaces()

    def pin(self, address: int, nbytes: int) -> Callable[[int], object] | None:
        """Page-lock host memory. Return the function that unlocks it, or None without a GPU."""
        if not torch.cuda.is_available():
            return None
        cudart: Any = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            # CUDA keeps the error, and torch would raise it after the next kernel launch. This launch takes it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            raise PinningError(code)
        return cudart.cudaHostUnregister

    def uuid(self, device: torch.device) -> str | None:
        """Return the number of `device` as NVML writes it, `GPU-8f6e...`; None if torch tells of none."""
        found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return None if found is None else f"GPU-{str(found).removeprefix('GPU-')}"

    def pci_address(self, device: torch.device) -> str:
        """Return the address of `device` on the PCI bus."""
        found = torch.cuda.get_device_properties(device)
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
