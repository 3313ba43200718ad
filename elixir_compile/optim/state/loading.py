"""Load optimizer state without moving it to the device on the way.

`torch.optim.Optimizer.load_state_dict` moves every statistic to the device of its parameter, all of them at once. Where
the plan keeps them on the host they may not fit there, so they pass through it in a wrapper that it leaves alone.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from elixir_compile.ops.masters import has_master
from elixir_compile.ops.shards import as_dtensor, is_dtensor, part_like
from elixir_compile.optim.master_adamw import with_master


class _Held:
    """A tensor that `load_state_dict` takes for some other value."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def held(entry: Mapping[str, Any], statistics: Collection[str]) -> dict[str, Any]:
    """Return the state of one parameter with its `statistics` wrapped."""
    return {
        name: _Held(value) if name in statistics and isinstance(value, torch.Tensor) else value
        for name, value in entry.items()
    }


def unheld(entry: Mapping[str, Any], param: nn.Parameter, *, stays: bool) -> dict[str, Any]:
    """Return what `held` took; the statistics in the dtype of `param` and, unless each `stays`, on its device.

    Where `param` has a master, they are fp32, and the master is that of `entry`, else the parameter: see `with_master`.
    """
    dtype = torch.float32 if has_master(param) else param.dtype
    found = {
        name: part_like(value.tensor, param).to(dtype=dtype, device=None if stays else param.device)
        if isinstance(value, _Held)
        else value
        for name, value in entry.items()
    }
    return with_master(found, param) if entry else found


def shared_entry(entry: Mapping[str, Any], param: nn.Parameter, statistics: Collection[str]) -> Mapping[str, Any]:
    """Return the state of one parameter as a state dict has it: where ranks share the parameter, `statistics` are
    DTensors laid out as it is."""
    if not is_dtensor(param):
        return entry
    return {
        name: as_dtensor(value, param) if name in statistics and type(value) is torch.Tensor else value
        for name, value in entry.items()
    }
