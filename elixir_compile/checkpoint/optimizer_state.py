"""An optimizer's state and param groups by the names of the parameters, so their order may differ when loaded.

Loading sets the hyperparameters of each group to the saved values, but for the flags that choose an implementation
(`foreach`, `fused`, ...). So `HybridAdamW` and every form of `torch.optim.AdamW` load each other's state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.checkpoint.values import Deferred, Sources, from_plain, tensor_keys, to_plain
from elixir_compile.errors import UnsupportedModel
from elixir_compile.ops.masters import REST_NAMES
from elixir_compile.ops.shards import as_dtensor, is_dtensor, own_part
from elixir_compile.optim.master_adamw import with_joined_master

OPTIMIZER_KEY = "optimizer."
"""The prefix of the keys of an optimizer's tensors."""
_LOW_HALF = REST_NAMES[torch.bfloat16]
_IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def optimizer_plain(model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources) -> dict[str, Any]:
    """Return the state of `optimizer` as JSON can hold it, and put its tensors in `sources`; wait for queued updates.

    Raises UnsupportedModel if a parameter of `optimizer` does not belong to `model`.
    """
    names = _names(model, optimizer)
    groups = [
        to_plain(_hyperparameters(group), f"{OPTIMIZER_KEY}groups.{number}", sources) | {"params": own}
        for number, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True))
    ]
    states = {
        name: to_plain(state, f"{OPTIMIZER_KEY}states.{name}", sources)
        for name, state in _states(optimizer, [name for own in names for name in own])
    }
    return {
        "kind": type(optimizer).__qualname__,
        "hyperparameters": _hyperparameter_names(optimizer),
        "groups": groups,
        "states": states,
    }


def optimizer_differences(
    model: nn.Module, optimizer: torch.optim.Optimizer, plain: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield each difference between `optimizer` and the saved one `plain` that loading cannot resolve, as a text."""
    if plain is None:
        yield "the checkpoint holds no optimizer; leave `optimizer` out"
        return
    own = _hyperparameter_names(optimizer)
    if own != plain["hyperparameters"]:
        saved, here = ", ".join(plain["hyperparameters"]), ", ".join(own)
        yield f"{plain['kind']} with {saved} in the checkpoint, {type(optimizer).__qualname__} with {here} here"
        return
    names, groups = _names(model, optimizer), plain["groups"]
    if len(names) != len(groups):
        yield f"{len(groups)} param groups in the checkpoint, {len(names)} here"
        return
    for number, (here, group) in enumerate(zip(names, groups, strict=True)):
        for name in sorted(set(here) ^ set(group["params"])):
            yield f"{name}: in param group {number} of {'the optimizer' if name in here else 'the checkpoint'} only"


def optimizer_targets(
    model: nn.Module, optimizer: torch.optim.Optimizer, plain: Mapping[str, Any], forms: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return uninitialised tensors in host memory, by key, for the tensors of the saved optimizer `plain`.

    `forms` holds by key a tensor with the saved shape and dtype. The statistics of a DTensor parameter become DTensors
    with this rank's part.
    """
    like: dict[str, torch.Tensor] = {}
    for own, group in zip(_names(model, optimizer), optimizer.param_groups, strict=True):
        for name, param in zip(own, group["params"], strict=True):
            like.update((key, param) for key in tensor_keys(plain["states"].get(name)))
    found: dict[str, torch.Tensor] = {}
    for key in [*tensor_keys(plain["groups"]), *tensor_keys(plain["states"])]:
        form, param = forms[key], like.get(key)
        is_count = form.ndim == 0 and key.endswith(".step")  # never a part, even if the parameter has shape ()
        if param is not None and is_dtensor(param) and form.shape == param.shape and not is_count:
            found[key] = as_dtensor(torch.empty(own_part(param).shape, dtype=form.dtype, device="cpu"), param)
        else:
            found[key] = torch.empty(form.shape, dtype=form.dtype, device="cpu")
    return found


def fill_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plain: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Load the saved optimizer `plain` into `optimizer`; `tensors` holds its tensors by key."""
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for own, group, saved in zip(_names(model, optimizer), optimizer.param_groups, plain["groups"], strict=True):
        first = sum(len(group["params"]) for group in groups)
        for index, name in enumerate(own, start=first):
            if name in plain["states"]:
                states[index] = from_plain(plain["states"][name], tensors)
        loaded = from_plain({name: value for name, value in saved.items() if name != "params"}, tensors)
        kept = {name: value for name, value in group.items() if name in _IMPLEMENTATION_FLAGS}
        groups.append({**loaded, **kept, "params": list(range(first, first + len(own)))})
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _states(optimizer: torch.optim.Optimizer, names: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name of the parameter, its state) for each parameter with state."""
    states = optimizer.state
    if all(isinstance(state, dict) for state in states.values()):
        for index, state in optimizer.state_dict()["state"].items():
            yield names[index], state
        return
    # State on disk or on the device is read at each access, so each statistic is read when it is written.
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for name, param in zip(names, params, strict=True):
        if param in states:
            yield name, dict(_deferred(states[param], kind, param) for kind in states[param])


def _deferred(state: Mapping[str, Any], kind: str, param: torch.Tensor) -> tuple[str, Any]:
    """Return the name and the value under which a checkpoint holds the statistic `kind` of `param`."""
    if kind == _LOW_HALF:  # a checkpoint holds the full master: the parameter has the other half
        form = torch.empty_like(own_part(param), dtype=torch.float32, device="meta")
        like = _as_of(form, param)
        return "master", Deferred(like=like, read=lambda: with_joined_master({kind: state[kind]}, param)["master"])
    value = state[kind]
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return kind, value
    if isinstance(state, dict):
        return kind, _as_of(value, param)
    return kind, Deferred(like=_as_of(torch.empty_like(value, device="meta"), param), read=lambda: state[kind])


def _as_of(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the statistic `value` of `param`, as a DTensor if `param` is a DTensor and `value` is this rank's part."""
    is_part = is_dtensor(param) and not is_dtensor(value) and value.shape == own_part(param).shape
    return as_dtensor(value, param) if is_part else value


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters, group by group. Raises UnsupportedModel for a parameter without a name."""
    by_id = {id(param): compat.uncompiled_name(name) for name, param in model.named_parameters()}
    names: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        names.append([])
        for index, param in enumerate(group["params"]):
            if id(param) not in by_id:
                raise UnsupportedModel(
                    f"parameter {index} of param group {number}",
                    "it is not in the model, so it has no name in a checkpoint. Pass the model that contains it",
                )
            names[-1].append(by_id[id(param)])
    return names


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params" and name not in _IMPLEMENTATION_FLAGS}


def _hyperparameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    return sorted(optimizer.defaults.keys() - _IMPLEMENTATION_FLAGS)
