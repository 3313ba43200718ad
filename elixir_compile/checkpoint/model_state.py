"""A model's parameters and buffers by the keys of its `state_dict()`; tied tensors are saved once."""

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
    """Return the state dict of `model` with the keys of the uncompiled model."""
    return {compat.uncompiled_name(name): value for name, value in model.state_dict().items()}


def model_plain(state: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """Return `state`, the state dict of a model, as JSON can hold it, and put each tensor in `sources` once.

    Tied tensors stand under the key of the first name.
    """
    first: dict[object, str] = {}
    plain: dict[str, Any] = {}
    for name, value in state.items():
        key = f"{_KEY}.{name}"
        if isinstance(value, torch.Tensor) and value.numel():
            known = first.setdefault(memory_of(value), key)
            if known != key:
                plain[name] = tensor_at(known)
                continue
        plain[name] = to_plain(value, key, sources)
    return plain


def model_differences(
    state: Mapping[str, Any], plain: Mapping[str, Any], forms: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield each difference between the state dict `state` and the saved one `plain`, as a text.

    `forms` holds by key a tensor with the saved shape and dtype.
    """
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
    """The places in a model for the saved values."""

    in_place: dict[str, torch.Tensor] = field(default_factory=dict)
    """By key of the checkpoint, a parameter or buffer that is filled in place."""
    untied: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    """Parameters that were tied when saved and are not now, each with the key of its saved tensor."""
    rest: dict[str, Any] = field(default_factory=dict)
    """By name, the saved values that must go through `load_state_dict`, as JSON can hold them."""


def model_targets(model: nn.Module, state: Mapping[str, Any], plain: Mapping[str, Any]) -> ModelTargets:
    """Return the targets in `model` for the saved state `plain`; `state` is the state dict of `model`."""
    own = {memory_of(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())}
    targets = ModelTargets()
    for name, value in state.items():
        key = key_of(plain[name])
        # A state dict may hold copies, made by hooks or by a module's own code: filling a copy would change nothing.
        if key is None or memory_of(value) not in own:
            targets.rest[name] = plain[name]
        elif key not in targets.in_place:
            targets.in_place[key] = value
        elif memory_of(targets.in_place[key]) != memory_of(value):
            targets.untied.append((value, key))
    return targets


@torch.no_grad()
def fill_rest(model: nn.Module, targets: ModelTargets, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the `untied` and `rest` targets of `model`; `tensors` holds the tensors of `targets.rest` by key."""
    for target, key in targets.untied:
        target.copy_(targets.in_place[key])
    if targets.rest:
        own = {compat.uncompiled_name(name): name for name in model.state_dict()}
        rest = {own[name]: from_plain(value, tensors) for name, value in targets.rest.items()}
        model.load_state_dict(rest, strict=False)


def memory_of(tensor: torch.Tensor) -> object:
    """Return a key of memory, dtype, shape and strides: two tensors are tied if their keys are equal."""
    own = own_part(tensor)
    # Not the address: parts without elements all have the address 0, and are not tied.
    place = compat.storage_key(own), own.storage_offset()
    return place, tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
