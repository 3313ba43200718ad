"""The two names of a device: that of the common machine, `h100-80g`, and that which its driver tells, such as `NVIDIA
H100 80GB HBM3`."""

import re
from itertools import pairwise

from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.hardware.table import MACHINES

_OTHER_DEVICES = {"laptop", "mig"}
"""Words in the names of devices that have a part of the rates: chips of laptops, and partitions of a device."""


def machine_name_of(device_name: str, memory_bytes: int) -> str | None:
    """Return the name in `MACHINES` of a machine with the device `device_name`, which has `memory_bytes`, or None.

    If several machines have the chip, it is the machine whose device has the nearest memory size.
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    if _OTHER_DEVICES & set(words):
        return None
    chips = {*words, *(first + second for first, second in pairwise(words))}
    found = [name for name in MACHINES if name.split("-")[0] in chips]
    return min(found, key=lambda name: abs(MACHINES[name].chip.memory_mib * MIB - memory_bytes), default=None)


def is_name_of(text: str, cluster: Cluster) -> bool:
    """Return whether `text`, the name of a cluster in a plan, is a name of `cluster`: `1 x h100-80g` and `1 x NVIDIA
    H100 80GB HBM3` are one machine.

    Two names that drivers tell are two machines, because chips with one name have several forms: an H100 for PCIe has
    half of the memory's rate.
    """
    device = cluster.device
    before, _, after = cluster.name.partition(device.name)
    own = text.removeprefix(before).removesuffix(after)
    if before + own + after != text:
        return False
    names = {own, device.name}
    machines = {name if name in MACHINES else machine_name_of(name, _memory_bytes(name, cluster)) for name in names}
    return len(names) == 1 or (len(machines) == 1 and bool(machines & names))


def _memory_bytes(device_name: str, cluster: Cluster) -> int:
    """Return the bytes of memory that `device_name` says, else those of the device of `cluster`."""
    said = re.search(r"(\d+) ?GB", device_name)
    return cluster.device.memory_bytes if said is None else int(said.group(1)) * GIB
