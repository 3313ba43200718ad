"""Convert the state of a run, a model, an optimizer and random number generators, to JSON and tensors by key, and
back."""

import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import ElixirWarning, UnsupportedModel
from elixir_compile.compat.platforms import accelerator_platform, platform_of
from elixir_compile.graph.ops.optimizers import REST_NAMES
from elixir_compile.graph.ops.shards import as_dtensor, as_rows, is_dtensor, is_wrapped, own_shard, owner_of, parts_of
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.optim.precision import STORED_NAMES, MomentForm
from elixir_compile.optim.state import saved_name, saved_value, with_joined_master

# ----------------------------------------------------------------------------------------------------------------------
# Convert nested Python values to JSON and back without pickle and without rounding; tensors are kept apart by key.
#
#   {"lr": 0.1, "betas": (0.9, 0.95), "step": tensor(3.)}
#   {"lr": 0.1, "betas": {"$": "tuple", "items": [0.9, 0.95]}, "step": {"$": "tensor", "key": "optimizer.step"}}
#
# These types come back unchanged: None, bool, int, float with infinities and NaN, complex, str, bytes, list, tuple,
# dict with keys of these types, Counter, torch.dtype and torch.device. An OrderedDict or a defaultdict comes back as a
# dict.


_KIND = "$"
"""The field of a JSON object that holds the type of its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A tensor that is read only when it is written; `like` has its shape and dtype, on `meta`."""

    like: torch.Tensor
    read: Callable[[], torch.Tensor]


Sources = MutableMapping[str, "torch.Tensor | Deferred"]
"""Tensors by key."""


class UnsupportedValue(Exception):  # noqa: N818 - never leaves this package
    """The value at `key` has an unsupported type; `save`, which knows the path, raises NotSavable instead."""

    def __init__(self, key: str, kind: str) -> None:
        super().__init__(key, kind)
        self.key = key
        self.kind = kind


def to_plain(value: Any, key: str, sources: Sources) -> Any:
    """Return `value` as JSON can hold it, and put its tensors in `sources`, by `key` and their path in the value.

    Raises UnsupportedValue for a value of an unsupported type.
    """
    if isinstance(value, torch.Tensor | Deferred):
        sources[key] = value
        return tensor_at(key)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "text": repr(float(value))}
    if isinstance(value, Counter):
        return {_KIND: "counter", "items": _items_to_plain(value, key, sources)}
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value) and _KIND not in value:
            return {name: to_plain(item, f"{key}.{name}", sources) for name, item in value.items()}
        return {_KIND: "dict", "items": _items_to_plain(value, key, sources)}
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": _list_to_plain(value, key, sources)}
    if isinstance(value, list):
        return _list_to_plain(value, key, sources)
    if isinstance(value, complex):
        return {_KIND: "complex", "parts": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    if isinstance(value, torch.dtype | torch.device):
        return {_KIND: "torch", "name": str(value)}
    raise UnsupportedValue(key, f"a {type(value).__module__}.{type(value).__qualname__}")


def tensor_at(key: str) -> Mapping[str, str]:
    """Return the JSON object that stands for the tensor under `key`."""
    return {_KIND: "tensor", "key": key}


def key_of(plain: Any) -> str | None:
    """Return the key of the tensor if `plain` stands for a tensor, else None."""
    return plain["key"] if isinstance(plain, Mapping) and plain.get(_KIND) == "tensor" else None


def tensor_keys(plain: Any) -> Iterator[str]:
    """Yield the keys of all tensors in `plain`, the result of `to_plain`."""
    key = key_of(plain)
    if key is not None:
        yield key
    elif isinstance(plain, list | Mapping):
        for item in plain.values() if isinstance(plain, Mapping) else plain:
            yield from tensor_keys(item)


def from_plain(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of `plain`, as the inverse of `to_plain`. Raises KeyError if `tensors` lacks a key."""
    if isinstance(plain, list):
        return [from_plain(item, tensors) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    kind = plain.get(_KIND)
    if kind is None:
        return {name: from_plain(item, tensors) for name, item in plain.items()}
    return _READERS[kind](plain, tensors)


def _items_to_plain(value: Mapping[Any, Any], key: str, sources: Sources) -> list[Any]:
    return [
        [to_plain(name, f"{key}.{index}.key", sources), to_plain(item, f"{key}.{index}", sources)]
        for index, (name, item) in enumerate(value.items())
    ]


def _list_to_plain(value: Iterable[Any], key: str, sources: Sources) -> list[Any]:
    return [to_plain(item, f"{key}.{index}", sources) for index, item in enumerate(value)]


def _pairs(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {from_plain(name, tensors): from_plain(item, tensors) for name, item in plain["items"]}


def _from_torch(name: str) -> "torch.dtype | torch.device":
    found = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return found if isinstance(found, torch.dtype) else torch.device(name)


_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": lambda plain, tensors: tensors[plain["key"]],
    "float": lambda plain, tensors: float(plain["text"]),
    "complex": lambda plain, tensors: complex(*map(float, plain["parts"])),
    "bytes": lambda plain, tensors: bytes.fromhex(plain["hex"]),
    "torch": lambda plain, tensors: _from_torch(plain["name"]),
    "tuple": lambda plain, tensors: tuple(from_plain(item, tensors) for item in plain["items"]),
    "dict": _pairs,
    "counter": lambda plain, tensors: Counter(_pairs(plain, tensors)),
}


# ----------------------------------------------------------------------------------------------------------------------
# The state of a run, a model, an optimizer and random number generators, as JSON and tensors by key, and back.
#
# The model: parameters and buffers by the keys of its `state_dict()`; tied tensors are saved once.
#
# The optimizer: state and param groups by the names of the parameters, so their order may differ when loaded. Loading
# sets the hyperparameters of each group to the saved values, but for the flags that choose an implementation
# (`foreach`, `fused`, ...). So `HybridAdamW` and every form of `torch.optim.AdamW` load each other's state.


_KEY = "model"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of `model` with the keys of the uncompiled model.

    Of a tensor made of others, such as codes and scales, it has those, by keys such as `weight.codes`.
    """
    state: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        own = compat.uncompiled_name(name)
        state |= parts_of(value, own) if isinstance(value, torch.Tensor) else {own: value}
    return state


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
    held = (*model.parameters(), *model.buffers())
    own = {memory_of(part.detach()) for tensor in held for part in parts_of(tensor).values()}
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


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key of memory, dtype, shape, strides and bits: two tensors are tied if their keys are equal."""
    if is_wrapped(tensor):
        return tuple(map(memory_of, parts_of(tensor).values()))
    own = own_shard(tensor)
    # Not the address: shards without elements all have the address 0, and are not tied.
    place = compat.storage_key(own), own.storage_offset()
    return place, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), compat.lazy_bits(own)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"


OPTIMIZER_KEY = "optimizer."
"""The prefix of the keys of an optimizer's tensors."""
_LOW_HALF = REST_NAMES[torch.bfloat16]
_IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def optimizer_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, owned_sources: Sources
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of `optimizer` as JSON can hold it, and apart from it by the name of the parameter that which
    only this rank has; wait for queued updates.

    The tensors of the first are put in `sources`, and those of the other in `owned_sources`.

    Raises UnsupportedModel if a parameter of `optimizer` does not belong to `model`.
    """
    names = _names(model, optimizer)
    groups = [
        to_plain(
            {name: value for name, value in group.items() if name not in ("params", *_IMPLEMENTATION_FLAGS)},
            f"{OPTIMIZER_KEY}groups.{number}",
            sources,
        )
        | {"params": own}
        for number, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True))
    ]
    owned = _owned_names(optimizer, names)
    states: dict[str, Any] = {}
    owned_states: dict[str, Any] = {}
    for name, state in _states(optimizer, names):
        key = f"{OPTIMIZER_KEY}states.{name}"
        if name in owned:
            owned_states[name] = to_plain(state, key, owned_sources)
        else:
            states[name] = to_plain(state, key, sources)
    plain = {
        "kind": type(optimizer).__qualname__,
        "hyperparameters": _hyperparameter_names(optimizer),
        "groups": groups,
        "moments": _moments(optimizer),
        "states": states,
    }
    return plain, owned_states


def _owned_names(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> Mapping[str, torch.Tensor]:
    """Return by name the parameters of which one rank of several has the state; `names` are those of each group."""
    if not isinstance(optimizer, Hybrid):
        return {}
    return {
        name: param
        for own, group in zip(names, optimizer.param_groups, strict=True)
        for name, param in zip(own, group["params"], strict=True)
        if owner_of(param) is not None and optimizer.has_plain_state(param, group)
    }


def _states_here(model: nn.Module, optimizer: torch.optim.Optimizer, plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return by the name of the parameter those of the saved states in `plain` that this rank keeps."""
    owned = _owned_names(optimizer, _names(model, optimizer))
    return {
        name: state for name, state in plain["states"].items() if name not in owned or own_shard(owned[name]).numel()
    }


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the number of parameters with state by the form of their moments; empty if all moments are exact."""
    if not isinstance(optimizer, Hybrid):
        return {}
    states = optimizer.states_of([param for param, state in optimizer.state.items() if state])
    forms = Counter(state.state_dtype or MomentForm.FLOAT32.value for state in states)
    return dict(forms) if forms.keys() - {MomentForm.FLOAT32.value} else {}


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
    for form in plain.get("moments", {}).keys() - {form.value for form in MomentForm}:
        yield f"moments in {form} in the checkpoint, which this version does not have"
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
    with this rank's shard.
    """
    like: dict[str, torch.Tensor] = {}
    states = _states_here(model, optimizer, plain)
    for own, group in zip(_names(model, optimizer), optimizer.param_groups, strict=True):
        for name, param in zip(own, group["params"], strict=True):
            like.update((key, param) for key in tensor_keys(states.get(name)))
    found: dict[str, torch.Tensor] = {}
    for key in [*tensor_keys(plain["groups"]), *tensor_keys(states)]:
        form, param = forms[key], like.get(key)
        is_count = form.ndim == 0 and key.endswith(".step")  # never a shard, even if the parameter has shape ()
        if param is not None and is_dtensor(param) and _is_shared_out(key, form, param) and not is_count:
            own, is_whole = own_shard(param).shape, form.shape == param.shape
            shard = torch.empty(own if is_whole else (*own[:1], *form.shape[1:]), dtype=form.dtype, device="cpu")
            found[key] = as_dtensor(shard, param) if is_whole else as_rows(shard, param)
        else:
            found[key] = torch.empty(form.shape, dtype=form.dtype, device="cpu")
    return found


def _is_shared_out(key: str, form: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether the entry `key` with the shape of `form` has the rows of `param`: a statistic, or its scales.

    Then each rank with a shard of `param` has a shard of the entry.
    """
    is_scale = key.endswith("_scale") and key.rpartition(".")[2] in STORED_NAMES
    return form.shape == param.shape or (is_scale and form.shape[:1] == param.shape[:1])


def fill_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plain: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Load the saved optimizer `plain` into `optimizer`; `tensors` holds its tensors by key."""
    states: dict[int, Any] = {}
    here = _states_here(model, optimizer, plain)
    groups: list[dict[str, Any]] = []
    for own, group, saved in zip(_names(model, optimizer), optimizer.param_groups, plain["groups"], strict=True):
        first = sum(len(group["params"]) for group in groups)
        for index, name in enumerate(own, start=first):
            if name in here:
                states[index] = from_plain(here[name], tensors)
        loaded = from_plain({name: value for name, value in saved.items() if name != "params"}, tensors)
        flags = {name: value for name, value in group.items() if name in _IMPLEMENTATION_FLAGS}
        groups.append({**loaded, **flags, "params": list(range(first, first + len(own)))})
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _states(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name of the parameter, its state) for each parameter with state; `names` are by param group."""
    states = optimizer.state
    if all(isinstance(state, dict) for state in states.values()):
        of_all = [name for own in names for name in own]
        for index, state in optimizer.state_dict()["state"].items():
            yield of_all[index], state
        return
    # State on disk or on the device is read at each access, so each statistic is read when it is written.
    for own, group in zip(names, optimizer.param_groups, strict=True):
        for name, param in zip(own, group["params"], strict=True):
            if param in states:
                state, of = states[param], param
                if isinstance(optimizer, Hybrid) and optimizer.has_plain_state(param, group):
                    of = own_shard(param).detach()
                found = dict(entry for kind in state for entry in _deferred(state, kind, of))
                yield name, optimizer.as_class(found, param, group) if isinstance(optimizer, Hybrid) else found


def _deferred(state: Mapping[str, Any], kind: str, param: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the names and the values under which a checkpoint holds the entry `kind` of the state of `param`."""
    if kind == _LOW_HALF:  # a checkpoint holds the full master: the parameter has the other half
        form = torch.empty_like(own_shard(param), dtype=torch.float32, device="meta")
        like = _as_of("master", form, param)
        yield "master", Deferred(like=like, read=lambda: with_joined_master({kind: state[kind]}, param)["master"])
        return
    name = saved_name(kind, param)
    if name is None:
        return
    value = saved_value(state, kind, param)
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        yield name, value
    elif isinstance(state, dict):
        yield name, _as_of(name, value, param)
    else:
        like = _as_of(name, torch.empty_like(value, device="meta"), param)
        yield name, Deferred(like=like, read=lambda: saved_value(state, kind, param))


def _as_of(key: str, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the entry `key` of the state of `param`, a DTensor if `param` is one and `value` is its own shard."""
    is_shard = is_dtensor(param) and not is_dtensor(value) and _is_shared_out(key, value, own_shard(param))
    return as_dtensor(value, param) if is_shard else value


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


def _hyperparameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    return sorted(optimizer.defaults.keys() - _IMPLEMENTATION_FLAGS)


def random_state() -> dict[str, Any]:
    """Return the states by generator; an accelerator's only if it was used, numpy's only if numpy was imported."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    platform = accelerator_platform()
    if platform is not None and platform.is_in_use:
        state[platform.device_type] = list(platform.random_states())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        state["numpy"] = [keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to `state`. Warns if `state` has more accelerators of a type than this machine."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device_type in state.keys() - {"python", "torch", "numpy"}:
        platform = platform_of(torch.device(device_type))
        saved, num_devices = state[device_type], platform.num_devices
        if len(saved) > num_devices:
            warnings.warn(
                ElixirWarning(
                    f"the checkpoint has random states of {len(saved)} {device_type} devices, and this machine has "
                    f"{num_devices}: dropout continues with other random numbers."
                ),
                stacklevel=3,
            )
        for index, device_state in enumerate(saved[:num_devices]):
            platform.set_random_state(device_state, index)
    if "numpy" in state:
        import numpy as np  # only if the process that saved had imported numpy

        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
