"""Choose the lanes of an executor: by its device, and with checks if the user asks for them."""

import os

import torch

from elixir_compile.errors import UnsupportedDevice
from elixir_compile.platforms import platform_of
from elixir_compile.runtime.lanes.accelerator import Accelerator
from elixir_compile.runtime.lanes.checked import Checked
from elixir_compile.runtime.lanes.interface import Lanes
from elixir_compile.runtime.lanes.plain import Plain


def lanes_for(device: torch.device) -> Lanes:
    """Return new lanes on `device`, which raise `Race` if the environment has `ELIXIR_CHECK_RACES=1`.

    Raises UnsupportedDevice if torch has no streams, no events or no figures of memory for the type of `device`.
    """
    platform = platform_of(device)
    if missing := platform.missing(device):
        raise UnsupportedDevice(device.type, missing)
    lanes = Accelerator(device) if platform.has_own_memory else Plain(device)
    return Checked(lanes) if os.environ.get("ELIXIR_CHECK_RACES") == "1" else lanes
