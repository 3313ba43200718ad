"""Find a common machine by the name that the driver of its device tells, such as `NVIDIA H100 80GB HBM3`."""

import re
from itertools import pairwise

from elixir_compile.hardware.table import MACHINES
from elixir_compile.units import MIB

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
