"""What a machine is: devices, host, links, and two built-in profiles."""

from elixir_compile.hardware.cluster import Cluster
from elixir_compile.hardware.device import DeviceProfile, HostProfile
from elixir_compile.hardware.link import Link
from elixir_compile.hardware.node import Node
from elixir_compile.hardware.presets import profile_for

__all__ = ["Cluster", "DeviceProfile", "HostProfile", "Link", "Node", "profile_for"]
