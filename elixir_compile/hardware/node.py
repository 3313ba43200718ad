"""One machine: equal devices on one host, each with its own pair of links to host memory."""

from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan
from elixir_compile.hardware.device import DeviceProfile, HostProfile
from elixir_compile.hardware.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host and `num_devices` equal devices."""

    device: DeviceProfile
    host: HostProfile
    """The whole host, which its devices share."""
    h2d: Link
    """From host memory to one device, while all devices of the node use theirs."""
    d2h: Link
    peer: Link | None = None
    """What one device sends to the others of the node at once; None for a single device."""
    num_devices: int = 1

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise InvalidPlan(f"node of {self.device.name}: num_devices must be at least 1, got {self.num_devices}.")
        if self.num_devices > 1 and self.peer is None:
            raise InvalidPlan(f"node of {self.device.name}: {self.num_devices} devices need a `peer` link.")
