"""The state of an optimizer: created at the first update of a parameter, moved to where the plan in force has it, and
as a state dict holds it.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elixir_compile.graph.ops.optimizers import REST_DTYPES, REST_NAMES, has_master, take_rest, updated_dtype
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import as_dtensor, has_cut_rows, is_dtensor, own_shard, shard_like, shard_of_rows
from elixir_compile.ir import Bucket, Tier
from elixir_compile.optim.disk import DiskStates
from elixir_compile.optim.host.flat_step import joined, split
from elixir_compile.optim.masters import begin_rest, rest_layouts
from elixir_compile.optim.precision import (
    BLOCK,
    CODED,
    MOMENTS,
    STORED_NAMES,
    MomentForm,
    form_of,
    wide_moments,
    with_form,
)
from elixir_compile.optim.rule import StatisticLayout, UpdateRule
from elixir_compile.runtime.bucket import RunningBucket, flat
from elixir_compile.runtime.executor import Executor, executor_of_slot
from elixir_compile.runtime.lanes import CopyLane

# ----------------------------------------------------------------------------------------------------------------------
# The state of a parameter as a state dict holds it, and back.
#
#     in memory                                in a state dict
#     master_low, beside the bf16 parameter    master, in fp32
#     scales of blocks, flat                   (rows of the parameter, blocks of a row)
#     plain tensors                            DTensors, if the parameter is one
#
# A state dict can be loaded by any number of ranks, each with some rows of a parameter. If a row is not a whole number
# of blocks, a block has elements of two rows, and if a tensor axis cuts rows, other ranks cut them elsewhere: then a
# state dict holds moments in fp32. To store these in the same form again gives the same bits.
#
# `torch.optim.Optimizer.load_state_dict` moves all statistics to the devices of their parameters. If the plan keeps the
# statistics on the host, they may not fit on the device. So they are wrapped in objects that torch does not move.


def saved_names(rule: UpdateRule, groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names under which state dicts hold statistics, masters and scales, each with its parameter's rows."""
    return {"master", *STORED_NAMES, *(name for group in groups for name in rule.statistics(group))}


def saved_name(name: str, param: torch.Tensor) -> str | None:
    """Return the name under which a state dict holds the entry `name` of the state of `param`; None if it does not."""
    if name not in CODED or has_whole_rows(param):
        return name
    return name.removesuffix("_codes") if name.endswith("_codes") else None


def saved_value(state: Mapping[str, Any], name: str, param: torch.Tensor) -> Any:
    """Return what a state dict holds for the entry `name` in the `state` of `param`."""
    if name in CODED and not has_whole_rows(param):
        like = own_shard(param).detach()
        return wide_moments(state, like)[CODED.index(name)].as_strided(like.shape, like.stride())
    value = state[name]
    is_scale = name in CODED and name.endswith("_scale")
    return value.view(own_shard(param).shape[0], _row_numel(param) // BLOCK) if is_scale else value


def has_whole_rows(param: torch.Tensor) -> bool:
    """Return whether each row of `param`, its elements at the same first index, is a whole number of blocks in memory.

    The same on all ranks. False if an axis cuts the rows.
    """
    return _row_numel(param) % BLOCK == 0 and param.is_contiguous() and not has_cut_rows(param)


def _row_numel(param: torch.Tensor) -> int:
    return math.prod(param.shape[1:])


def saved_entry(entry: Mapping[str, Any], param: nn.Parameter, statistics: Collection[str]) -> Mapping[str, Any]:
    """Return `entry`, the state of `param`, for a state dict: in memory, with the fp32 `master` if there is one.

    The `statistics` are DTensors if `param` is a DTensor.
    """
    found = with_joined_master(entry, param)
    names = {name: saved_name(name, param) for name in found}
    saved = {wanted: saved_value(found, name, param) for name, wanted in names.items() if wanted is not None}
    return _as_sharded(saved, param, statistics)


def with_joined_master(entry: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return `entry`, the state of `param`, with the fp32 `master` in place of its low half."""
    found = dict(entry)
    low = found.pop("master_low", None)
    if low is not None:
        found["master"] = joined(own_shard(param).detach().to(low.device), low)
    return found


def _as_sharded(state: Mapping[str, Any], param: torch.Tensor, names: Collection[str]) -> dict[str, Any]:
    """Return `state` with the plain tensors under `names` as DTensors if `param` is a DTensor."""
    return {
        name: as_dtensor(value, param) if is_dtensor(param) and name in names and type(value) is torch.Tensor else value
        for name, value in state.items()
    }


def decoded_entry(entry: Mapping[str, Any], param: nn.Parameter) -> Mapping[str, Any]:
    """Return `entry`, of the state dict of `param`, with its moments in fp32; DTensors if `param` is a DTensor."""
    if form_of(entry) is MomentForm.FLOAT32:
        return entry
    own = {name: own_shard(value) if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
    decoded = with_form(_loaded_moments(own, param), MomentForm.FLOAT32, own_shard(param).detach())
    moments = _as_sharded({name: decoded[name] for name in MOMENTS}, param, MOMENTS)
    return {**moments, **{name: value for name, value in entry.items() if name not in STORED_NAMES}}


# -- loading ----------------------------------------------------------------------------------------------------------


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


def unwrap_statistics(
    entry: Mapping[str, Any], param: nn.Parameter, *, stays: bool, as_saved: bool = False
) -> dict[str, Any]:
    """Return `entry` with its statistics unwrapped and cast to the dtype of `param`, or to fp32 if it has a master.

    Codes and scales keep their dtype, and if `as_saved` all statistics do. The statistics are moved to the device of
    `param` unless `stays`. The master is loaded too, and sets `param`.
    """
    dtype = updated_dtype(param)
    found = {
        name: shard_like(value.tensor, param).to(
            dtype=value.tensor.dtype if as_saved or name in CODED else dtype, device=None if stays else param.device
        )
        if isinstance(value, _Wrapped)
        else value
        for name, value in entry.items()
    }
    return _load_master(_loaded_moments(found, param), param) if entry else found


def _loaded_moments(state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return `state`, the entries of a state dict of which this rank has its shard, with flat scales.

    The moments are in fp32 if `state` has the scales of whole rows, and an axis cuts the rows of `param`.
    """
    if has_cut_rows(param) and form_of(state).has_scales:
        first, root = (
            state[codes].float()
            * shard_of_rows(state[scale].repeat_interleave(BLOCK, dim=1).view(-1, *param.shape[1:]), param)
            for codes, scale in zip(CODED[:2], CODED[2:], strict=True)
        )
        kept = {name: value for name, value in state.items() if name not in STORED_NAMES}
        return {"exp_avg": first, "exp_avg_sq": root * root, **kept}
    return {name: value.reshape(-1) if name in CODED[2:] else value for name, value in state.items()}


def _memory_for_rest(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """Return memory for the rest of the master of `param`, beside the statistics in `state` if there are any."""
    like = own_shard(param).detach()
    homes = (value.device for value in state.values() if isinstance(value, torch.Tensor) and value.shape == like.shape)
    return torch.empty_like(like, dtype=REST_DTYPES[param.dtype], device=next(homes, like.device))


def _load_master(state: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """Return `state`, loaded from a state dict, with its entry `master` converted to the rest of the master of `param`.

    `param` is set to the 16-bit value nearest to the master. If `state` has no master, as in state dicts of
    `torch.optim.AdamW`, the master begins with the value of `param`. If `param` has no master, the entry is dropped.
    """
    found = dict(state)
    master = found.pop("master", None)
    if not has_master(param):
        return found
    rest = _memory_for_rest(param, found if master is None else {"master": master})
    if master is None:
        begin_rest(param, found, rest)
        return found
    found[REST_NAMES[param.dtype]] = rest
    master = torch.empty_like(rest, dtype=torch.float32).copy_(master)
    high = torch.empty_like(rest, dtype=param.dtype)
    if rest.dtype == torch.int16:
        split(flat(master), flat(high), flat(rest))
    else:
        rest.copy_(master)
        high.copy_(master)
    take_rest(param)
    with torch.no_grad():
        own_shard(param).copy_(high)
    torch.autograd.graph.increment_version(param)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What the plan in force says about a parameter.


def bucket_of(param: torch.Tensor) -> "tuple[RunningBucket, Executor] | None":
    """Return the bucket of `param` in the active plan and its executor; None if no plan has the parameter."""
    slot = slot_of(param)
    if slot is None:
        return None
    executor = executor_of_slot(slot)
    bucket = executor.buckets.of(slot)
    return None if bucket is None else (bucket, executor)


def planned_spec(param: torch.Tensor) -> Bucket | None:
    """Return the bucket of `param` as the active plan describes it; None if no plan has the parameter."""
    found = bucket_of(param)
    return None if found is None else found[0].spec


# ----------------------------------------------------------------------------------------------------------------------
# The state of an optimizer: created at the first update of a parameter, and moved when the plan changes.


_Kind = tuple[str, StatisticLayout]


def is_off_device(param: torch.Tensor) -> bool:
    """Return whether the active plan keeps the state of `param` on the host or on disk."""
    found = bucket_of(param)
    return found is not None and found[0].placement.optim is not Tier.DEVICE


def group_by_bucket(
    params: Iterable[nn.Parameter],
) -> tuple[dict[RunningBucket, list[nn.Parameter]], list[nn.Parameter], dict[RunningBucket, Executor]]:
    """Return `params` by bucket, the parameters without a bucket, and the executor of each bucket."""
    buckets: dict[RunningBucket, list[nn.Parameter]] = {}
    unplanned: list[nn.Parameter] = []
    executors: dict[RunningBucket, Executor] = {}
    for param in params:
        found = bucket_of(param)
        if found is None:
            unplanned.append(param)
        else:
            buckets.setdefault(found[0], []).append(param)
            executors[found[0]] = found[1]
    return buckets, unplanned, executors


class StateBuffers:
    """The host slabs of an optimizer, allocated at first use and freed with their bucket."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakKeyDictionary[RunningBucket, dict[_Kind, dict[int, torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def buffer(
        self, bucket: RunningBucket, kind: str, param: nn.Parameter, layout: StatisticLayout | None = None
    ) -> torch.Tensor:
        """Return the host tensor of `kind` for `param`, zeros at first; by default in the dtype of `param`."""
        kinds = self._buffers.setdefault(bucket, {})
        layout = layout or StatisticLayout(param.dtype)
        if layout.shape is not None:
            own = kinds.setdefault((kind, layout), {})
            if id(param) not in own:
                values = bucket.host_tensor(layout.dtype, layout.numel(param.numel()))
                own[id(param)] = layout.shaped(values, param)
            return own[id(param)]
        if (kind, layout) not in kinds:
            tensors = bucket.state_buffers(layout.dtype, layout.block)
            kinds[kind, layout] = {id(slot.param): tensor for slot, tensor in zip(bucket.slots, tensors, strict=True)}
        return kinds[kind, layout][id(param)]

    def copies(
        self, bucket: RunningBucket, kind: str, values: Mapping[nn.Parameter, torch.Tensor], d2h: CopyLane
    ) -> list[torch.Tensor]:
        """Start copies of `values`, by parameter, to the host on `d2h`, and return the host tensors."""
        copies = []
        for param, value in values.items():
            copies.append(self.buffer(bucket, kind, param, StatisticLayout(value.dtype)))
            d2h.copy(copies[-1], value)
        return copies


States = MutableMapping[nn.Parameter, MutableMapping[str, Any]]
"""The type of `torch.optim.Optimizer.state`."""


class StatePlacer:
    """Creates and moves optimizer state as the placements of the buckets say."""

    def __init__(self, rule: UpdateRule, fail: Callable[[BaseException], None]) -> None:
        self.disk = DiskStates(rule, fail)
        """State on disk."""
        self.buffers = StateBuffers()
        """Host memory of the state, a slab per bucket and statistic."""
        self._rule = rule
        self._placed: weakref.WeakKeyDictionary[RunningBucket, set[int]] = weakref.WeakKeyDictionary()
        """By bucket, the ids of the parameters whose state is where the placement wants it."""

    def place(
        self, states: States, group: Mapping[str, Any], buckets: Mapping[RunningBucket, Iterable[nn.Parameter]]
    ) -> None:
        """Create missing state of the parameters in `buckets`, and move state whose home the plan has changed."""
        # State leaves the device before other state moves to the device.
        for bucket, params in sorted(buckets.items(), key=lambda item: item[0].placement.optim is Tier.DEVICE):
            # A frozen parameter may have state of an earlier run, and be in a file of others: no folder is needed then.
            if bucket.placement.optim is Tier.DISK and (bucket.spec.trainable or bucket.disk is not None):
                self.disk.place(states, group, bucket, params)
                continue
            placed = self._placed.setdefault(bucket, set())
            for param in params:
                state = states.get(param)
                if id(param) in placed and state:
                    continue
                self.disk.fetch(states, param)
                state = states.get(param)
                buffers = self._buffers_of(bucket, param, group)
                if state:
                    state = states[param] = self._rule.as_planned(param, state, group)
                    self._move(state, param, group, buffers)
                else:
                    self.create(states, param, group, buffers)
                placed.add(id(param))

    def reserve(self, group: Mapping[str, Any], buckets: Mapping[RunningBucket, Iterable[nn.Parameter]]) -> None:
        """Reserve disk space for state whose home is the disk. Raises DiskFull if there is too little space."""
        for bucket, params in buckets.items():
            if bucket.placement.optim is Tier.DISK and bucket.spec.trainable:
                self.disk.reserve(bucket, params, group)

    def places_of(
        self, bucket: RunningBucket, params: Sequence[nn.Parameter], group: Mapping[str, Any]
    ) -> tuple[Mapping[str, torch.Tensor], ...]:
        """Return, for each of `params`, the host tensors by name for statistics made by the update.

        The mappings are empty if the rule does not create state, or if the home of the state is not the host.
        """
        if not self._rule.makes_state:
            return ({},) * len(params)
        return tuple(self._buffers_of(bucket, param, group) for param in params)

    def _buffers_of(
        self, bucket: RunningBucket, param: nn.Parameter, group: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor]:
        if bucket.placement.optim is not Tier.HOST:
            return {}
        layouts = self._rule.state_layouts(param, group)
        return {name: self.buffers.buffer(bucket, name, param, layout) for name, layout in layouts.items()}

    def place_beside(self, states: States, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Move the state of `param`, which no plan places any more, to the device of `param`, or create it there."""
        self.disk.fetch(states, param)
        state, device = states.get(param) or {}, own_shard(param).device
        away = {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.device != device}
        if away and not away.isdisjoint(self._rule.state_layouts(param, group)):
            self._move(state, param, group, {})
        else:
            self.create(states, param, group)

    def create(
        self,
        states: States,
        param: nn.Parameter,
        group: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Create the state of `param` in `buffers`, or beside `param`; if the update creates it, only the rest of its
        master."""
        state, buffers = states[param], buffers or {}
        if not (state or self._rule.makes_state):
            like, rests = own_shard(param).detach(), rest_layouts(param)
            for name, layout in self._rule.state_layouts(param, group).items():
                if name not in rests:
                    state[name] = buffers[name].zero_() if name in buffers else layout.zeros(like)
            device = next(value.device for value in state.values())
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self._start(param, state, group, buffers)

    def _start(
        self,
        param: nn.Parameter,
        state: MutableMapping[str, Any],
        group: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Begin the rest of the master of `param` if `state` has none, as if it was made before `param` was cast."""
        for name in rest_layouts(param).keys() - state.keys():
            if name in self._rule.state_layouts(param, group):  # else the parameter is its own master
                begin_rest(param, state, buffers[name] if name in buffers else _memory_for_rest(param, state))
        slot = slot_of(param)
        self._rule.start(param, state, param.device if slot is None else slot.device)

    def _move(
        self,
        state: MutableMapping[str, Any],
        param: nn.Parameter,
        group: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        like, layouts = own_shard(param).detach(), self._rule.state_layouts(param, group)
        for name, layout in layouts.items():
            value, target = state.get(name), buffers.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            if target is None or target.dtype != value.dtype:
                device = like.device if target is None else target.device
                target = replace(layout, dtype=value.dtype).zeros(like, device)
            state[name] = target if target.data_ptr() == value.data_ptr() else target.copy_(value)
        device = next((state[name].device for name in layouts if isinstance(state.get(name), torch.Tensor)), None)
        for name, value in state.items():
            if name not in layouts and isinstance(value, torch.Tensor) and self._rule.moves_with_update(name, group):
                state[name] = value.to(device)
        self._start(param, state, group, buffers)
