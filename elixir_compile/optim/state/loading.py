"""Load optimizer state without moving it to the device first.

`torch.optim.Optimizer.load_state_dict` moves all statistics to the devices of their parameters. If the plan keeps the
statistics on the host, they may not fit on the device. So they are wrapped in objects that torch does not move.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from elixir_compile.ops.masters import has_master
from elixir_compile.ops.shards import as_dtensor, is_dtensor, part_like
from elixir_compile.optim.master_adamw import load_master


class _Wrapped:
    """Holds a tensor; `load_state_dict` of torch leaves such objects as they are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def wrap_statistics(entry: Mapping[str, Any], statistics: Collection[str]) -> dict[str, Any]:
    """Return `entry`, the state of a parameter, with its `statistics` wrapped."""
    return {
        name: _Wrapped(value) if name in statistics and isinstance(value, torch.Tensor) else value
        for name, value in entry.items()
    }


def unwrap_statistics(entry: Mapping[str, Any], param: nn.Parameter, *, stays: bool) -> dict[str, Any]:
    """Return `entry` with its statistics unwrapped and cast to the dtype of `param`, or to fp32 if it has a master.

    The statistics are moved to the device of `param` unless `stays`. The master is loaded too: see `load_master`.
    """
    dtype = torch.float32 if has_master(param) else param.dtype
    found = {
        name: part_like(value.tensor, param).to(dtype=dtype, device=None if stays else param.device)
        if isinstance(value, _Wrapped)
        else value
        for name, value in entry.items()
    }
    return load_master(found, param) if entry else found


def shared_entry(entry: Mapping[str, Any], param: nn.Parameter, statistics: Collection[str]) -> Mapping[str, Any]:
    """Return `entry`, the state of `param`, for a state dict: `statistics` are DTensors if `param` is a DTensor."""
    if not is_dtensor(param):
        return entry
    return {
        name: as_dtensor(value, param) if name in statistics and type(value) is torch.Tensor else value
        for name, value in entry.items()
    }
