"""Choose the lanes of an executor by its device."""

import torch

from elixir_compile.platforms import platform_of
from elixir_compile.runtime.lanes.accelerator import Accelerator
from elixir_compile.runtime.lanes.interface import Lanes
from elixir_compile.runtime.lanes.plain import Plain


def lanes_for(device: torch.device) -> Lanes:
    """Return new lanes on `device`."""
    return Accelerator(device) if platform_of(device).has_own_memory else Plain(device)
