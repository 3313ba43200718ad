"""One machine: equal devices on one host, each with its own pair of links to host memory."""

from dataclasses import dataclass

from elixir_compile.errors import InvalidProfile
from elixir_compile.hardware.device import DeviceProfile, HostProfile, require_positive
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
    """What one device sends around a ring of all devices of the node; None for a single device."""
    num_devices: int = 1

    def __post_init__(self) -> None:
        what = f"node of {self.device.name}"
        require_positive(what, num_devices=self.num_devices)
        if self.num_devices > 1 and self.peer is None:
            raise InvalidProfile(what, "peer", f"a link, as there are {self.num_devices} devices", None)
