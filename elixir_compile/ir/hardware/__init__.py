"""Machines as values: devices, hosts and links; common machines by name; profiles as JSON."""

from elixir_compile.ir.hardware.along_data import along_data
from elixir_compile.ir.hardware.cluster import (
    Cluster,
    DeviceProfile,
    HostProfile,
    Link,
    Node,
    TensorRing,
    cluster_from_json,
    cluster_to_json,
    hardware_fingerprint,
)
from elixir_compile.ir.hardware.device_names import is_name_of
from elixir_compile.ir.hardware.fleet import (
    Fleet,
    Seat,
    fleet_from_json,
    fleet_of,
    fleet_of_nodes,
    fleet_to_json,
    with_like_seats,
)
from elixir_compile.ir.hardware.fleet_text import is_fleet, parse_fleet
from elixir_compile.ir.hardware.presets import (
    parse_hardware,
    preset,
    preset_names,
    preset_of_ranks,
    profile_for,
    with_devices,
)

__all__ = [
    "Cluster",
    "DeviceProfile",
    "Fleet",
    "HostProfile",
    "Link",
    "Node",
    "Seat",
    "TensorRing",
    "along_data",
    "cluster_from_json",
    "cluster_to_json",
    "fleet_from_json",
    "fleet_of",
    "fleet_of_nodes",
    "fleet_to_json",
    "hardware_fingerprint",
    "is_fleet",
    "is_name_of",
    "parse_fleet",
    "parse_hardware",
    "preset",
    "preset_names",
    "preset_of_ranks",
    "profile_for",
    "with_devices",
    "with_like_seats",
]
