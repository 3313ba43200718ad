"""Update rules: the arithmetic of AdamW from gradients and statistics to new weights, how a statistic lies in memory,
and how many steps it has counted.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.ops.registry import gathered_numel
from elixir_compile.graph.ops.shards import own_grad, own_shard, owner_of
from elixir_compile.ir import Param
from elixir_compile.runtime.bucket import flat

# ----------------------------------------------------------------------------------------------------------------------
# How a statistic of an optimizer lies in memory: a value for each element of its parameter, or one for each block.


@dataclass(frozen=True, slots=True)
class StatisticLayout:
    """The values of a statistic: one of `dtype` for each `block` elements of the parameter in the order of memory.

    A statistic with a value for each element has the shape and the strides of its parameter; with a value for each
    block it is flat. One of another `shape`, or with its elements in another order, belongs to the whole parameter.
    """

    dtype: torch.dtype
    block: int = 1
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()
    """The dimensions of `shape` from the outermost in memory to the innermost; empty for their own order. A product of
    matrices that are stored by columns, as `torch.linalg.qr` returns them, may have other bits than by rows."""

    @property
    def is_by_element(self) -> bool:
        """Whether it has a value for each element of the parameter, in its order."""
        return self.block == 1 and self.shape is None

    def numel(self, numel: int) -> int:
        """Return the number of values of the statistic for `numel` elements of the parameter."""
        return -(-numel // self.block) if self.shape is None else math.prod(self.shape)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the statistic for `numel` elements of the parameter."""
        return self.numel(numel) * self.dtype.itemsize

    def span(self, start: int, stop: int) -> slice:
        """Return where the flat statistic has the elements `start` to `stop`; `start` is a multiple of `block`, and 0
        for a statistic of the whole parameter."""
        return slice(start // self.block, self.numel(stop))

    def zeros(self, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Return zeros for a parameter with the shape and strides of `like`, by default on the device of `like`."""
        if self.is_by_element:
            return torch.zeros_like(like, dtype=self.dtype, device=device)
        values = torch.zeros(self.numel(like.numel()), dtype=self.dtype, device=device or like.device)
        return self.shaped(values, like)

    def shaped(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the flat `values`, those of the whole parameter `like`, in the shape of the statistic, as a view."""
        if self.shape is not None:
            order = self.order or range(len(self.shape))
            return values.view([self.shape[dim] for dim in order]).permute(sorted(order, key=order.__getitem__))
        return values.as_strided(like.shape, like.stride()) if self.block == 1 else values

    def in_order(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return `value`, the statistic of the parameter `like`, with its elements in this order; a copy if it has
        another."""
        if self.shape is not None:
            return in_order_of(value, self.zeros(like, torch.device("meta")))
        return in_order_of(value, like) if self.block == 1 else value


def order_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of `value` from the outermost in memory to the innermost; empty if that is their own order,
    or if `value` is not dense."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return tuple(order) if not value.is_contiguous() and value.permute(order).is_contiguous() else ()


def is_alike(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether `value`, which has the shape of `like`, has its elements in the same order in memory."""
    strides = zip(value.stride(), like.stride(), like.shape, strict=True)
    return all(own == other for own, other, size in strides if size > 1)


def in_order_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, shaped like `like`, with its elements in the memory order of `like`; a copy if it has another."""
    if is_alike(value, like):
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def flat_order(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of `value`, shaped like `like`, in the memory order of `like`: a view if it has the order."""
    return flat(in_order_of(value, like))


# ----------------------------------------------------------------------------------------------------------------------
# How many steps a counter of an optimizer state has counted, without waiting for the device that holds it.
#
# A counter on a device is read once; whoever counts on notes the number. A counter that somebody else has written since
# has another version, and is read again. A write through `.data` raises no version, and is not noticed.


_known = WeakTensorKeyDictionary()
"""By counter on a device, its version and its number."""


def num_steps(counter: torch.Tensor | float) -> int:
    """Return the number of steps in `counter`, a number or a tensor of one element."""
    if not isinstance(counter, torch.Tensor) or counter.device.type == "cpu":
        return int(counter)
    known = _known.get(counter)
    if known is not None and known[0] == counter._version:
        return known[1]
    number = int(counter)
    note_num_steps(counter, number)
    return number


def note_num_steps(counter: object, number: int) -> None:
    """Remember that `counter` has counted `number` steps."""
    if isinstance(counter, torch.Tensor) and counter.device.type != "cpu":
        _known[counter] = (counter._version, number)


# ----------------------------------------------------------------------------------------------------------------------
# Update rules: the arithmetic of an optimizer class, from gradients and statistics to new weights, in place.
#
# A rule does not know placements. `BucketUpdate` calls it with the tensors and hyperparameters of a group slice, which
# were copied when the update was requested. `adamw_rule` has the rule of AdamW, `generic.class_rule` that of any other
# optimizer class.


State = MutableMapping[str, Any]
"""The optimizer state of a parameter by name: its statistics, and counters such as `step`."""


def forms_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `state` for readers of shapes, dtypes and counters, which is not read from disk: see `disk.DiskState`."""
    return getattr(state, "forms", state)


NO_PLACES: Mapping[str, torch.Tensor] = MappingProxyType({})


class ParamUpdate(NamedTuple):
    """The tensors of a parameter in an update, all on one device."""

    weight: torch.Tensor
    grad: torch.Tensor
    state: State
    places: Mapping[str, torch.Tensor] = NO_PLACES
    """Memory by name for statistics that the update may make, where the plan wants them; what is there is not read."""


class StatesInPlace(defaultdict[torch.Tensor, Any]):
    """The state of a transient optimizer. `places` has memory by the id of a parameter for what the class makes."""

    def __init__(self, places: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        super().__init__(dict)
        self._places = places

    def __missing__(self, param: torch.Tensor) -> dict[str, Any]:
        found = self[param] = _InPlace(self._places.get(id(param), {}))
        return found


class _InPlace(dict[str, Any]):
    """The state of a parameter in its first step: what the class puts into it moves into its place at once.

    So a class never holds a statistic twice, in memory of its own and where the plan wants it, while it computes.
    """

    def __init__(self, places: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._places = places

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        for path, own in paths_of(value, name) if self._places else ():
            place = self._places.get(path)
            if place is None or type(own) is not torch.Tensor or own.device != place.device:
                continue
            is_like = (own.shape, own.stride(), own.dtype) == (place.shape, place.stride(), place.dtype)
            storage = own.untyped_storage()
            # A view of it, for example, would not follow.
            if is_like and storage.nbytes() == own.nbytes and compat.num_holders(storage) == 1:
                own.data = place.copy_(own)


def store_made(one: ParamUpdate) -> None:
    """Copy the statistics that the update made into their places, unless they are there or of another kind."""
    for name, place in one.places.items():
        value = one.state.get(name)
        if isinstance(value, torch.Tensor) and (place.shape, place.dtype) == (value.shape, value.dtype):
            one.state[name] = place if value.data_ptr() == place.data_ptr() else place.copy_(value)


def paths_of(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested mappings, lists and tuples, each with its path: keys and positions between dots."""
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for key, entry in entries:
        yield from paths_of(entry, f"{path}.{key}" if path else str(key))


GRAD_SCALE = " grad_scale"
"""The hyperparameter by which an update multiplies gradients of parameters with a master; 1 if the group has no such
key. No class has one of this name, which begins with a space."""


def scaled(groups: Sequence[dict[str, Any]], factor: float) -> Sequence[Mapping[str, Any]]:
    """Return `groups` with `GRAD_SCALE` set to `factor`; the groups themselves if `factor` is 1."""
    return groups if factor == 1.0 else [{**group, GRAD_SCALE: factor} for group in groups]


class UpdateRule:
    """The arithmetic of an optimizer class; `group` holds the hyperparameters of a param group.

    What is not overridden is right for a rule whose tensors may be updated one by one, in any order and at any time.
    """

    makes_state = False
    """Whether `update` creates missing state, but for the rest of a master; if False, `StatePlacer` creates it as
    zeros."""

    def snapshots(self) -> "tuple[UpdateRule, UpdateRule]":
        """Return the rule with the optimizer's attributes as they are now, for updates that run later: on the device,
        and on the host. What it keeps from update to update must not be shared by the two."""
        return self, self

    def why_not_placed(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return why `groups` may not be updated bucket by bucket, and their state placed by plans."""
        return ""

    def keeps(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Return whether this rank updates `param` and keeps its state: unless another has all of it, and it is updated
        whole."""
        return owner_of(param) is None or own_shard(param).numel() > 0 or not self.updates_whole(param, group)

    def updates_whole(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Return whether the update of `param` reads the whole tensor."""
        return False

    def check_step(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Raise OptimizerNotTensorWise if the next step joins two parameters; called before it changes any. Return for
        each group the numbers that it counts in steps, such as `step`, as they are after this one."""
        return ()

    def as_class(self, param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `state` as the optimizer class keeps it: its statistics may be in lists."""
        return state

    def from_class(self, param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `state`, which the optimizer class keeps, with each statistic as an entry of its own."""
        return state

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """Return whether `update` wants the entry `step` of a state beside the weight, and only reads it and adds 1."""
        return True

    def moves_with_update(self, name: str, group: Mapping[str, Any]) -> bool:
        """Return whether the entry `name` of a state must be on the device that updates the parameter."""
        return True

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics of exact state, shaped like their parameter."""
        raise NotImplementedError

    def state_layouts(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StatisticLayout]:
        """Return the layout of each statistic of `param` by name."""
        raise NotImplementedError

    def param_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> Param:
        """Return the bytes of the state of `param`, in param group 0, and in which other dtypes a plan may store it."""
        return Param(is_trained=True, state_nbytes=state_nbytes(param, self.state_layouts(param, group)))

    def work_bytes(self, params: Sequence[torch.Tensor], group: Mapping[str, Any]) -> int:
        """Return the most bytes that one step of all of `params` holds at once beside weights, gradients and state."""
        return 0

    def as_planned(self, param: torch.Tensor, state: State, group: Mapping[str, Any]) -> State:
        """Return `state` of `param` in the layouts of `state_layouts`, converted if it is in others."""
        return state

    def start(self, param: torch.Tensor, state: State, device: torch.device) -> None:
        """Prepare for updates of `param`, whose state is `state`, on `device` or on the host; called on the training
        thread."""

    def update(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        """Update the weights and the states of `updates` in place."""
        raise NotImplementedError


def state_nbytes(param: torch.Tensor, layouts: Mapping[str, StatisticLayout]) -> int:
    """Return the bytes of statistics with `layouts` of all of `param`, on however many ranks it is."""
    return sum(layout.nbytes(gathered_numel(param)) for layout in layouts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """The tensors and hyperparameters of a param group in a bucket, for a single update."""

    params: tuple[nn.Parameter, ...]
    updates: tuple[ParamUpdate, ...]
    """Of each parameter what is on this rank: its own memory, or copies on the host for a host update."""
    group: Mapping[str, Any]

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of all parameters."""
        return [each.weight for each in self.updates]

    @property
    def grads(self) -> list[torch.Tensor]:
        """The gradients of all parameters."""
        return [each.grad for each in self.updates]

    @property
    def memory(self) -> list[torch.Tensor]:
        """The statistics in memory."""
        states = (each.state for each in self.updates if isinstance(each.state, dict))
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def snapshot(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of the hyperparameters of `group`; tensors are cloned."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def on_host(value: Any) -> Any:
    """Return `value`, a hyperparameter, readable on the host by any thread: a copy of a tensor on an accelerator.

    Waits for the tensor's device, so it is called by the thread that wrote the tensor.
    """
    if isinstance(value, tuple):
        return tuple(map(on_host, value))
    return value.to("cpu") if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value


def group_slice_of(
    params: Sequence[nn.Parameter],
    states: Mapping[nn.Parameter, State],
    group: Mapping[str, Any],
    places: Sequence[Mapping[str, torch.Tensor]] = (),
) -> GroupSlice:
    """Return the slice of `group` with `params`; each parameter must have a gradient. `places` has memory by parameter
    for the statistics that the update may make."""
    return GroupSlice(
        params=tuple(params),
        updates=tuple(
            ParamUpdate(own_shard(param).detach(), compat.settled(own_grad(param)), states[param], own)
            for param, own in zip(params, places or itertools.repeat(NO_PLACES, len(params)), strict=True)
        ),
        group=snapshot(group),
    )


def require_dense(params: Iterable[nn.Parameter]) -> None:
    """Raise UnsupportedModel if a parameter in `params` has a sparse gradient. Plans never place such parameters."""
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            raise UnsupportedModel(
                f"a parameter of shape {tuple(param.shape)}",
                "its gradient is sparse, and HybridAdamW updates dense ones, as every update of an fp32 master does. "
                "Give it to torch.optim.SparseAdam, without a master",
            )
