"""The machine a plan is for."""

from dataclasses import dataclass

from elixir_compile.hardware.device import DeviceProfile, HostProfile
from elixir_compile.hardware.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices on one host, each with its own pair of links to host memory."""

    device: DeviceProfile
    host: HostProfile
    h2d: Link
    d2h: Link
    num_devices: int = 1

    @property
    def name(self) -> str:
        """How plans name it: `1 x cpu`."""
        return f"{self.num_devices} x {self.device.name}"
