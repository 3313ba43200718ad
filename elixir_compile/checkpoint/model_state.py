"""A model's parameters and buffers by the keys of its `state_dict()`; what is tied is one tensor under several."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.checkpoint.values import Sources, from_plain, key_of, tensor_at, to_plain
from elixir_compile.ops.shards import own_part

_KEY = "model"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of `model`, by the names that it has uncompiled."""
    return {compat.uncompiled_name(name): value for name, value in model.state_dict().items()}


def model_plain(state: Mapping[str, Any], aside: Sources) -> dict[str, Any]:
    """Return what JSON holds of `state`, that of a model; each tensor is put aside once, under its first key."""
    first: dict[object, str] = {}
    plain: dict[str, Any] = {}
    for name, value in state.items():
        key = f"{_KEY}.{name}"
        if isinstance(value, torch.Tensor) and value.numel():
            known = first.setdefault(memory_of(value), key)
            if known != key:
                plain[name] = tensor_at(known)
                continue
        plain[name] = to_plain(value, key, aside)
    return plain


def model_differences(
    state: Mapping[str, Any], plain: Mapping[str, Any], forms: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield how the model with the state `state` differs from the one that was saved as `plain`."""
    for name in state.keys() | plain.keys():
        if name not in plain:
            yield f"{name}: only in the model"
        elif name not in state:
            yield f"{name}: only in the checkpoint"
    saved_at: dict[object, tuple[str, str]] = {}
    for name in (name for name in state if name in plain):
        key, value = key_of(plain[name]), state[name]
        if (key is None) == isinstance(value, torch.Tensor):
            yield f"{name}: a tensor on one side only"
        elif key is not None and _form(forms[key]) != _form(value):
            yield f"{name}: {_form(forms[key])} in the checkpoint, {_form(value)} in the model"
        elif key is not None and value.numel():
            other, known = saved_at.setdefault(memory_of(value), (name, key))
            if known != key:
                yield f"{other} and {name}: tied in the model, two tensors in the checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTargets:
    """Where what was saved goes."""

    in_place: dict[str, torch.Tensor] = field(default_factory=dict)
    """By key of the checkpoint, a parameter or buffer that is filled where it is."""
    again: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    """Parameters that were tied when saved and are not now, and the key of what they get."""
    rest: dict[str, Any] = field(default_factory=dict)
    """By name, what only `load_state_dict` can take."""


def model_targets(model: nn.Module, state: Mapping[str, Any], plain: Mapping[str, Any]) -> ModelTargets:
    """Return the targets in `model`, whose state `state` does not differ from `plain`."""
    own = {memory_of(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())}
    targets = ModelTargets()
    for name, value in state.items():
        key = key_of(plain[name])
        # A state dict may hold copies, made by hooks or modules of their own: to fill one would change nothing.
        if key is None or memory_of(value) not in own:
            targets.rest[name] = plain[name]
        elif key not in targets.in_place:
            targets.in_place[key] = value
        elif memory_of(targets.in_place[key]) != memory_of(value):
            targets.again.append((value, key))
    return targets


@torch.no_grad()
def fill_rest(model: nn.Module, targets: ModelTargets, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give `model` what was not read in place; `tensors` holds those of `targets.rest`."""
    for target, key in targets.again:
        target.copy_(targets.in_place[key])
    if targets.rest:
        own = {compat.uncompiled_name(name): name for name in model.state_dict()}
        rest = {own[name]: from_plain(value, tensors) for name, value in targets.rest.items()}
        model.load_state_dict(rest, strict=False)


def memory_of(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common that are one, tied."""
    own = own_part(tensor)
    # No address: a part without elements has none, and two of them are not tied.
    place = compat.storage_key(own), own.storage_offset()
    return place, tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
