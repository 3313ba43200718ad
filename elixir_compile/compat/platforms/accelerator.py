"""The platform of an accelerator, by `torch.accelerator` and the module that torch has for the device type.

A figure of 0 bytes that stands for a function of another name would look like a device that needs nothing. So functions
are called by name, `missing` tells which are lacking before a model is trained, and only what a device type may do
without (its name, the size of its memory, a limit) has a default.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elixir_compile.compat.platforms.blocks import BlockRecord, record_blocks
from elixir_compile.compat.platforms.platform import Memory, Platform

_NEEDED = (
    "device_count",
    "empty_cache",
    "get_rng_state_all",
    "is_initialized",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "set_rng_state",
)
"""Functions of torch's module for the type that every device type must have."""
_TOTAL = ("mem_get_info", "get_device_properties")
"""Functions that tell the size of the memory; one suffices."""

_SMALL_NOW, _SMALL_PEAK = "reserved_bytes.small_pool.current", "reserved_bytes.small_pool.peak"
"""The bytes of segments for tensors of up to 1 MiB, in torch's statistics."""
_LEAST_OWN_BYTES, _ROUNDING_BYTES = 10 << 20, 2 << 20
"""A tensor of so many bytes has a segment of its own size, in which others follow it; that size is a multiple of the
second."""


@functools.cache
def lane_stream(device: torch.device, lane: str) -> torch.Stream:
    """Return the stream of `device` that belongs to `lane`, the same for all models: torch has a pool of 32 streams for
    each device, and deals them out again after those, so that lanes which must not wait would share one."""
    return torch.Stream(device)


class AcceleratorPlatform(Platform):
    """Accelerators of a type for which torch has streams, such as XPU.

    It has more than 20 methods, because each answer of torch about a device is one.
    """

    needed: Sequence[str] = _NEEDED
    """The functions of torch's module for the type that are called without asking whether they are there."""

    @property
    def has_own_memory(self) -> bool:
        """Return True."""
        return True

    @property
    def _module(self) -> Any:
        """The module that torch has for the type, such as `torch.cuda`."""
        return getattr(torch, self.device_type)

    def missing(self, device: torch.device) -> Sequence[str]:
        """Return the functions that torch lacks for `device` and Elixir needs: streams, events, figures of memory."""
        module = getattr(torch, self.device_type, None)
        names = [name for name in self.needed if not callable(getattr(module, name, None))]
        found = [f"torch.{self.device_type}.{name}" for name in names]
        if not any(callable(getattr(module, name, None)) for name in _TOTAL):
            found.append(" or ".join(f"torch.{self.device_type}.{name}" for name in _TOTAL))
        try:
            placed = device if device.index is not None else self.current()
            torch.Event(placed).record(lane_stream(placed, "h2d"))
        except RuntimeError as error:  # torch has no guard for the type, or a guard without streams
            line = str(error).partition("\n")[0]
            found.insert(0, f"streams and events ({line})")
        return found

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used a device of this type."""
        return bool(self._module.is_initialized())

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return int(self._module.device_count())

    def current(self) -> torch.device:
        """Return the current device of the calling thread."""
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def make_current(self, device: torch.device) -> None:
        """Make `device` the current device of the calling thread, if it is not."""
        if device.index is not None and torch.accelerator.current_device_index() != device.index:
            torch.accelerator.set_device_index(device.index)

    def name(self, device: torch.device) -> str:
        """Return the name of `device`, or its type if torch does not tell."""
        ask = self._optional("get_device_name")
        return self.device_type if ask is None else str(ask(device))

    def total_bytes(self, device: torch.device) -> int | None:
        """Return the bytes of the memory of `device`; None if torch does not tell."""
        ask = self._optional("get_device_properties")
        return None if ask is None else getattr(ask(device), "total_memory", None)

    def memory(self, device: torch.device) -> Memory | None:
        """Return how the memory of `device` is used; None if torch does not tell."""
        ask, ask_fraction = self._optional("mem_get_info"), self._optional("get_per_process_memory_fraction")
        if ask is None:
            return None
        free_bytes, total_bytes = ask(device)
        return Memory(
            free_bytes=free_bytes,
            allocated_bytes=self.allocated_bytes(device),
            reserved_bytes=self.reserved_bytes(device),
            limit_bytes=total_bytes if ask_fraction is None else int(ask_fraction(device) * total_bytes),
        )

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the bytes of this process's tensors on `device`."""
        return int(self._module.memory_allocated(device))

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes that tensors asked for at once since the user reset the statistics.

        A plan counts the same bytes. The allocator rounds up to more: 512 bytes for a scalar, up to 1 MiB for a
        large tensor in a block that it does not split.
        """
        return self._requested_bytes("peak", device)

    def tensor_bytes(self, device: torch.device) -> int:
        """Return the bytes that the tensors on `device` asked for, without rounding."""
        return self._requested_bytes("current", device)

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the bytes that the allocator holds on `device`."""
        ask = self._optional("memory_stats_as_nested_dict")  # 8 us, where `memory_reserved` takes 200
        found = {} if ask is None else ask(device)
        return int(found["reserved_bytes"]["all"]["current"] if found else self._module.memory_reserved(device))

    def record_blocks(self, device: torch.device) -> BlockRecord | None:
        """Return a record that runs of the blocks on `device`; None if torch keeps no history, or one for others."""
        return record_blocks(device)

    def alloc_retries(self, device: torch.device) -> int | None:
        """Return how often the allocator freed its cache to satisfy an allocation; None if torch does not tell."""
        ask = self._optional("memory_stats_as_nested_dict") or self._module.memory_stats
        found = ask(device).get("num_alloc_retries")
        return None if found is None else int(found)

    def _requested_bytes(self, when: str, device: torch.device) -> int:
        """Return the bytes that tensors asked for, `when` is "current" or "peak"."""
        statistics = self._module.memory_stats(device)
        if not statistics:
            return 0  # torch has none before the first tensor on a device
        # CUDA's own allocator, `backend:cudaMallocAsync`, counts no requests: their statistic stays 0.
        return int(statistics[f"requested_bytes.all.{when}"] or statistics[f"allocated_bytes.all.{when}"])

    def empty_cache(self) -> None:
        """Give memory that the allocator holds without tensors back to the driver."""
        self._module.empty_cache()

    def hold(self, device: torch.device, nbytes: int, *, spare_bytes: int) -> None:
        """Let the allocator take what it lacks of `nbytes` as one segment, if `spare_bytes` more are free.

        The segment is for tensors of more than 1 MiB; those below have segments of their own, for which room is left.
        """
        memory, stats = self.memory(device), self._module.memory_stats(device)
        if memory is None or _SMALL_PEAK not in stats:
            return
        small_bytes = stats[_SMALL_PEAK] - stats[_SMALL_NOW]
        lacking_bytes = (nbytes - memory.reserved_bytes - small_bytes) // _ROUNDING_BYTES * _ROUNDING_BYTES
        free_bytes = min(memory.free_bytes, memory.limit_bytes - memory.reserved_bytes)
        if lacking_bytes >= _LEAST_OWN_BYTES and lacking_bytes + spare_bytes <= free_bytes:
            torch.empty(lacking_bytes, dtype=torch.uint8, device=device)

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until all work issued on `device` is done."""
        torch.accelerator.synchronize(device)

    def synchronize_compute(self, device: torch.device) -> None:
        """Block the calling thread until the work issued on the current stream of `device` is done."""
        torch.accelerator.current_stream(device).synchronize()

    def random_states(self) -> Sequence[torch.Tensor]:
        """Return the state of the random generator of each device; empty if no device was used."""
        return self._module.get_rng_state_all() if self.is_in_use else ()

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Set the random generator of the device with `index` to `state`."""
        self._module.set_rng_state(state, index)

    def _optional(self, name: str) -> Callable[..., Any] | None:
        """Return the function `name` of torch's module for the type, None if the module has no such function."""
        return getattr(self._module, name, None)
