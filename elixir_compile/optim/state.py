"""The state of an optimizer: created at the first update of a parameter, moved to where the plan in force has it, saved
and loaded.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import own_part
from elixir_compile.ir import Bucket, Tier
from elixir_compile.optim.disk import DiskStates
from elixir_compile.optim.rule import StatisticLayout, UpdateRule
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor, executor_of_slot
from elixir_compile.runtime.lanes import CopyLane

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
            if bucket.placement.optim is Tier.DISK:
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
            if bucket.placement.optim is Tier.DISK:
                self.disk.reserve(bucket, params, group)

    def buffers_of(
        self, bucket: RunningBucket, params: Sequence[nn.Parameter], group: Mapping[str, Any]
    ) -> tuple[Mapping[str, torch.Tensor], ...]:
        """Return, for each of `params`, the host tensors by name for statistics created by the update.

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
        state, device = states.get(param) or {}, own_part(param).device
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
        """Create the state of `param` in `buffers`, or beside `param`; do nothing if the update creates it."""
        if self._rule.makes_state:
            return
        state = states[param]
        if state:
            self._start(param, state, group)
            return
        like = own_part(param).detach()
        for name, layout in self._rule.state_layouts(param, group).items():
            buffer = buffers.get(name) if buffers else None
            state[name] = layout.zeros(like) if buffer is None else buffer.zero_()
        device = next(value.device for value in state.values())
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self._start(param, state, group, is_new=True)

    def _start(
        self, param: nn.Parameter, state: MutableMapping[str, Any], group: Mapping[str, Any], *, is_new: bool = False
    ) -> None:
        slot = slot_of(param)
        is_fresh = is_new or not self._rule.state_layouts(param, group).keys() <= state.keys()
        self._rule.start(param, state, param.device if slot is None else slot.device, is_fresh=is_fresh)

    def _move(
        self,
        state: MutableMapping[str, Any],
        param: nn.Parameter,
        group: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        like, layouts = own_part(param).detach(), self._rule.state_layouts(param, group)
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
        self._start(param, state, group)
