"""Group slices: tensors and hyperparameters of a param group in a bucket, copied when an update is queued."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir_compile.errors import UnsupportedModel
from elixir_compile.ops.shards import own_grad, own_part
from elixir_compile.optim.rule import State


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """The tensors and hyperparameters of a param group in a bucket, for a single update."""

    params: tuple[nn.Parameter, ...]
    weights: tuple[torch.Tensor, ...]
    """The values of `params` on this rank: the parameters' own memory, or copies on the host for a host update."""
    grads: tuple[torch.Tensor, ...]
    states: tuple[State, ...]
    buffers: tuple[Mapping[str, torch.Tensor], ...]
    """For each parameter, host tensors by name for statistics created by the update."""
    group: Mapping[str, Any]


def snapshot(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of the hyperparameters of `group`; tensors are cloned."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def group_slice_of(
    params: Sequence[nn.Parameter],
    states: Mapping[nn.Parameter, State],
    group: Mapping[str, Any],
    buffers: Sequence[Mapping[str, torch.Tensor]] = (),
) -> GroupSlice:
    """Return the slice of `group` with `params`; each parameter must have a gradient."""
    return GroupSlice(
        params=tuple(params),
        weights=tuple(own_part(param).detach() for param in params),
        grads=tuple(own_grad(param) for param in params),
        states=tuple(states[param] for param in params),
        buffers=tuple(buffers),
        group=snapshot(group),
    )


def require_dense(params: Iterable[nn.Parameter]) -> None:
    """Raise UnsupportedModel if a parameter in `params` has a sparse gradient. Plans never place such parameters."""
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            raise UnsupportedModel(
                f"a parameter of shape {tuple(param.shape)}",
                "its gradient is sparse, and HybridAdamW updates dense ones. Give it to torch.optim.SparseAdam",
            )
