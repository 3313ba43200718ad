"""The platform of an accelerator, by `torch.accelerator` and the module that torch has for the device type.

Versions of torch differ in which statistics `torch.accelerator` has. A figure that a version or a device lacks counts
as not known: its method returns None, or 0 bytes. `missing` names the functions that must not be lacking.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from elixir_compile.platforms.blocks import BlockRecord, record_blocks
from elixir_compile.platforms.platform import Memory, Platform

_NEEDED = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
"""Functions of torch's module for the type, by which peaks are measured and compared with plans."""
_TOTAL = ("mem_get_info", "get_device_properties")
"""Functions that tell the size of the memory; one suffices."""


class AcceleratorPlatform(Platform):
    """Accelerators of a type for which torch has streams, such as XPU.

    It has more than 20 methods, because each answer of torch about a device is one.
    """

    @property
    def has_own_memory(self) -> bool:
        """Return True."""
        return True

    def missing(self, device: torch.device) -> Sequence[str]:
        """Return the functions that torch lacks for `device` and Elixir needs: streams, events, figures of memory."""
        module = getattr(torch, self.device_type, None)
        names = [name for name in _NEEDED if not callable(getattr(module, name, None))]
        found = [f"torch.{self.device_type}.{name}" for name in names]
        if not any(callable(getattr(module, name, None)) for name in _TOTAL):
            found.append(" or ".join(f"torch.{self.device_type}.{name}" for name in _TOTAL))
        try:
            torch.Event(device).record(torch.Stream(device))
        except RuntimeError as error:  # torch has no guard for the type, or a guard without streams
            line = str(error).partition("\n")[0]
            found.insert(0, f"streams and events ({line})")
        return found

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used a device of this type."""
        return bool(self._ask("is_initialized", default=False))

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return int(self._ask("device_count", default=0))

    def current(self) -> torch.device:
        """Return the current device of the calling thread."""
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def make_current(self, device: torch.device) -> None:
        """Make `device` the current device of the calling thread, if it is not."""
        if device.index is not None and torch.accelerator.current_device_index() != device.index:
            torch.accelerator.set_device_index(device.index)

    def name(self, device: torch.device) -> str:
        """Return the name of `device`, or its type if torch does not tell."""
        return str(self._ask("get_device_name", device, default=self.device_type))

    def total_bytes(self, device: torch.device) -> int | None:
        """Return the bytes of the memory of `device`; None if torch does not tell."""
        properties = self._ask("get_device_properties", device, default=None)
        return getattr(properties, "total_memory", None)

    def memory(self, device: torch.device) -> Memory | None:
        """Return how the memory of `device` is used; None if torch does not tell."""
        found = self._ask("mem_get_info", device, default=None)
        if found is None:
            return None
        free_bytes, total_bytes = found
        return Memory(
            free_bytes=free_bytes,
            allocated_bytes=self.allocated_bytes(device),
            reserved_bytes=self.reserved_bytes(device),
            limit_bytes=int(self._ask("get_per_process_memory_fraction", device, default=1.0) * total_bytes),
        )

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the bytes of this process's tensors on `device`."""
        return int(self._ask("memory_allocated", device, default=0))

    def reset_peak(self, device: torch.device) -> None:
        """Reset `peak_bytes` to the bytes that are allocated now."""
        self._ask("reset_peak_memory_stats", device, default=None)

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes that tensors asked for at once since `reset_peak`.

        A plan counts the same bytes. The allocator rounds up to more: 512 bytes for a scalar, up to 1 MiB for a
        large tensor in a block that it does not split.
        """
        return self._statistic("requested_bytes.all.peak", device, self.user_peak_bytes(device))

    def tensor_bytes(self, device: torch.device) -> int:
        """Return the bytes that the tensors on `device` asked for, without rounding."""
        return self._statistic("requested_bytes.all.current", device, self.allocated_bytes(device))

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the bytes that the allocator holds on `device`."""
        return int(self._ask("memory_reserved", device, default=0))

    def record_blocks(self, device: torch.device) -> BlockRecord | None:
        """Return a record that runs of the blocks on `device`; None if torch keeps no history, or one for others."""
        return record_blocks(device)

    def alloc_retries(self, device: torch.device) -> int | None:
        """Return how often the allocator freed its cache to satisfy an allocation; None if torch does not tell."""
        found = self._ask("memory_stats", device, default={}).get("num_alloc_retries")
        return None if found is None else int(found)

    def user_peak_bytes(self, device: torch.device) -> int:
        """Return the peak that torch tells the user, `max_memory_allocated`."""
        return int(self._ask("max_memory_allocated", device, default=0))

    def raise_peak(self, device: torch.device, peak_bytes: int) -> None:
        """Raise `user_peak_bytes` to `peak_bytes`, if the allocator's cache has the memory."""
        allocated_bytes = self.allocated_bytes(device)
        missing_bytes = peak_bytes - allocated_bytes
        is_cached = missing_bytes <= self.reserved_bytes(device) - allocated_bytes
        if is_cached and peak_bytes > self.user_peak_bytes(device):
            # torch has no function that sets a peak, but an allocation raises it.
            with suppress(torch.OutOfMemoryError):
                torch.empty(missing_bytes, dtype=torch.uint8, device=device)

    def _statistic(self, name: str, device: torch.device, default: int) -> int:
        """Return a statistic of the allocator, `default` if torch has none of that name."""
        return int(self._ask("memory_stats", device, default={}).get(name, default))

    def empty_cache(self) -> None:
        """Give memory that the allocator holds without tensors back to the driver."""
        self._ask("empty_cache", default=None)

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until all work issued on `device` is done."""
        torch.accelerator.synchronize(device)

    def synchronize_compute(self, device: torch.device) -> None:
        """Block the calling thread until the work issued on the current stream of `device` is done."""
        torch.accelerator.current_stream(device).synchronize()

    def random_states(self) -> Sequence[torch.Tensor]:
        """Return the state of the random generator of each device; empty if no device was used."""
        return self._ask("get_rng_state_all", default=()) if self.is_in_use else ()

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Set the random generator of the device with `index` to `state`."""
        self._ask("set_rng_state", state, index, default=None)

    def _ask(self, name: str, *args: object, default: Any) -> Any:
        """Return the result of the function `name` of torch's module for the type; `default` if there is no such."""
        module = getattr(torch, self.device_type, None)
        function: Callable[..., Any] | None = getattr(module, name, None)
        return default if function is None else function(*args)
