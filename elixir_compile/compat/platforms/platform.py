"""The platform of a device type: the answers for a CPU, which the platforms of accelerators override."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from elixir_compile.compat.platforms.blocks import BlockRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes of a device's memory."""

    free_bytes: int
    """Bytes that no process uses."""
    allocated_bytes: int
    """Bytes of the tensors of this process."""
    reserved_bytes: int
    """Bytes that torch's allocator holds: `allocated_bytes` and what it keeps for later tensors."""
    limit_bytes: int
    """The most bytes that the allocator of this process may hold."""


class Platform:
    """The devices of one type, here the CPU: it computes in the memory of the host, and copies are synchronous.

    It has more than 20 methods, because each answer of torch about a device is one.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    @property
    def has_own_memory(self) -> bool:
        """Whether devices have memory apart from the host's, and streams that copy and compute at the same time."""
        return False

    def missing(self, device: torch.device) -> Sequence[str]:
        """Return what torch lacks for `device` and Elixir cannot do without; empty for a device in host memory."""
        return ()

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used a device of this type, which takes memory there and forbids forks."""
        return False

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return 1

    def current(self) -> torch.device:
        """Return the current device of the calling thread."""
        return torch.device(self.device_type)

    def make_current(self, device: torch.device) -> None:
        """Make `device` the current device of the calling thread; a new thread begins with device 0."""

    def name(self, device: torch.device) -> str:
        """Return the name of `device`: `NVIDIA A100-SXM4-40GB`, or `cpu`."""
        return self.device_type

    def total_bytes(self, device: torch.device) -> int | None:
        """Return the bytes of the memory of `device`; None if it has none of its own, or torch does not tell."""
        return None

    def memory(self, device: torch.device) -> Memory | None:
        """Return how the memory of `device` is used; None if it has none of its own, or torch does not tell."""
        return None

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the bytes of this process's tensors in the memory of `device`; 0 if it has no memory of its own."""
        return 0

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes that tensors asked for at once since the user reset torch's statistics; 0 without
        memory of its own. `PeakRecord` has the peak of a part of a program."""
        return 0

    def tensor_bytes(self, device: torch.device) -> int:
        """Return the bytes that the tensors on `device` asked for, without rounding; 0 without memory of its own."""
        return 0

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the bytes that the allocator holds on `device`; 0 without memory of its own."""
        return 0

    def record_blocks(self, device: torch.device) -> BlockRecord | None:
        """Return a record that runs of the blocks of the allocator on `device`.

        None without memory of its own, if torch keeps no history of the allocator, or if somebody else reads it.
        """
        return None

    def alloc_retries(self, device: torch.device) -> int | None:
        """Return how often the allocator freed its cache to satisfy an allocation; None if torch does not tell."""
        return None

    def empty_cache(self) -> None:
        """Give memory that the allocator holds without tensors back to the driver."""

    def hold(self, device: torch.device, nbytes: int, *, spare_bytes: int) -> None:
        """Let the allocator take what it lacks of `nbytes` as one segment, of which later tensors are parts, if
        `spare_bytes` more are free. Nothing happens without memory of its own."""

    def drop_workspaces(self) -> None:
        """Free the workspaces that libraries keep for later matrix products; the next product allocates a new one.

        Their memory stays with the allocator, in the order of the streams that used it.
        """

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until all work issued on `device` is done."""

    def synchronize_compute(self, device: torch.device) -> None:
        """Block the calling thread until the work issued on the current stream of `device` is done."""

    def pin(self, address: int, nbytes: int) -> Callable[[int], object] | None:
        """Page-lock host memory for copies by every device; return the function that unlocks the memory at an address.

        Return None if no copy is faster from locked memory. Raises PinningError if the driver refuses.
        """
        return None

    def pci_address(self, device: torch.device) -> str | None:
        """Return the address of `device` on the PCI bus, `0000:17:00.0`; None if torch tells of none."""
        return None

    def uuid(self, device: torch.device) -> str | None:
        """Return the number of `device` that no other device has, `GPU-8f6e...`; None if torch tells of none."""
        return None

    def random_states(self) -> Sequence[torch.Tensor]:
        """Return the state of the random generator of each device; empty if no device was used."""
        return ()

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Set the random generator of the device with `index` to `state`."""


class PinningError(Exception):
    """The driver refused to page-lock host memory, with the driver's `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"error {code}")
        self.code = code
