"""What one param group has in a bucket, for one update: tensors and hyperparameters as they were when it was queued."""

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
    """What one param group has in a bucket."""

    params: tuple[nn.Parameter, ...]
    weights: tuple[torch.Tensor, ...]
    """The values of `params`, where they live, or where their update has copies of them."""
    grads: tuple[torch.Tensor, ...]
    states: tuple[State, ...]
    buffers: tuple[Mapping[str, torch.Tensor], ...]
    """Where statistics belong that the update makes, by name."""
    group: Mapping[str, Any]


def snapshot(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the hyperparameters of `group` as they are now."""
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
    """Return the part of `params`, which have gradients, with `group` as it is now."""
    return GroupSlice(
        params=tuple(params),
        weights=tuple(own_part(param).detach() for param in params),
        grads=tuple(own_grad(param) for param in params),
        states=tuple(states[param] for param in params),
        buffers=tuple(buffers),
        group=snapshot(group),
    )


def require_dense(params: Iterable[nn.Parameter]) -> None:
    """Raise UnsupportedModel for a parameter whose gradient is sparse; no plan places one of these."""
    for param in params:
        if param.grad.is_sparse:
            raise UnsupportedModel(
                f"a parameter of shape {tuple(param.shape)}",
                "its gradient is sparse, and HybridAdamW updates dense ones. Give it to torch.optim.SparseAdam",
            )
