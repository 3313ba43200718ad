"""The state of one optimizer: made when a parameter is first updated, moved when a plan wants it elsewhere."""

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from elixir_compile.ir import Tier
from elixir_compile.optim.disk_states import DiskStates
from elixir_compile.optim.rooms import StateRooms
from elixir_compile.optim.rule import UpdateRule
from elixir_compile.runtime.bucket import RunningBucket

States = MutableMapping[nn.Parameter, MutableMapping[str, torch.Tensor]]
"""What `torch.optim.Optimizer` calls `state`."""


class StatePlacer:
    """Puts the state of parameters where the placements of their buckets say."""

    def __init__(self, rule: UpdateRule, fail: Callable[[BaseException], None]) -> None:
        self.disk = DiskStates(fail)
        """State on disk."""
        self.rooms = StateRooms()
        """Host memory of the state, one slab per bucket and statistic."""
        self._rule = rule
        self._placed: weakref.WeakKeyDictionary[RunningBucket, set[int]] = weakref.WeakKeyDictionary()
        """By bucket, the ids of the parameters whose state is where the bucket's placement says."""

    def place(
        self, states: States, group: Mapping[str, Any], buckets: Mapping[RunningBucket, Iterable[nn.Parameter]]
    ) -> None:
        """Create the state of parameters that have none, and move what a new plan wants elsewhere."""
        # What leaves the device goes before what comes back.
        for bucket, params in sorted(buckets.items(), key=lambda item: item[0].placement.optim is Tier.DEVICE):
            if bucket.placement.optim is Tier.DISK:
                self.disk.place(states, self._rule.statistics(group), bucket, params)
                continue
            placed = self._placed.setdefault(bucket, set())
            for param in params:
                if id(param) in placed and states[param]:
                    continue
                self.disk.fetch(states, param)
                rooms = {}
                if bucket.placement.optim is Tier.HOST:
                    rooms = {name: self.rooms.room(bucket, name, param) for name in self._rule.statistics(group)}
                if states[param]:
                    self._move(states[param], param, group, rooms)
                else:
                    self.create(states, param, group, rooms)
                placed.add(id(param))

    def reserve(self, group: Mapping[str, Any], buckets: Iterable[RunningBucket]) -> None:
        """Take the space on disk of the state that goes there; DiskFull where there is none."""
        for bucket in buckets:
            if bucket.placement.optim is Tier.DISK:
                self.disk.reserve(bucket, self._rule.statistics(group))

    def create(
        self,
        states: States,
        param: nn.Parameter,
        group: Mapping[str, Any],
        rooms: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Make the state of `param` where it has none: in `rooms`, or beside it."""
        state = states[param]
        if state:
            return
        like = param.detach()
        for name in self._rule.statistics(group):
            room = rooms.get(name) if rooms else None
            fresh = torch.zeros_like(like, memory_format=torch.preserve_format) if room is None else room.zero_()
            state[name] = fresh
        state["step"] = torch.zeros((), dtype=torch.float32, device=state[self._rule.statistics(group)[0]].device)

    def _move(
        self,
        state: MutableMapping[str, torch.Tensor],
        param: nn.Parameter,
        group: Mapping[str, Any],
        rooms: Mapping[str, torch.Tensor],
    ) -> None:
        for name in self._rule.statistics(group):
            target = rooms.get(name)
            if target is None:
                target = torch.empty_like(param.detach(), memory_format=torch.preserve_format)
            state[name] = target if target.data_ptr() == state[name].data_ptr() else target.copy_(state[name])
        state["step"] = state["step"].to(state[self._rule.statistics(group)[0]].device)
