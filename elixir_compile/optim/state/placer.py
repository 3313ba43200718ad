"""The state of one optimizer in host or device memory: made at the first update of a parameter, moved by the plan."""

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_compile.ir import Tier
from elixir_compile.ops.registry import slot_of
from elixir_compile.ops.shards import own_part
from elixir_compile.optim.rule import UpdateRule
from elixir_compile.optim.state.disk_states import DiskStates
from elixir_compile.runtime.bucket import RunningBucket

_Kind = tuple[str, torch.dtype]


class StateBuffers:
    """The slabs of one optimizer, made when first asked for and kept as long as the bucket."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakKeyDictionary[RunningBucket, dict[_Kind, dict[int, torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def buffer(
        self, bucket: RunningBucket, kind: str, param: nn.Parameter, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the host tensor of `kind` for `param`, in its dtype or `dtype`, zero when it was never written."""
        kinds = self._buffers.setdefault(bucket, {})
        dtype = dtype or param.dtype
        if (kind, dtype) not in kinds:
            tensors = bucket.state_buffers(dtype)
            kinds[kind, dtype] = {id(slot.param): tensor for slot, tensor in zip(bucket.slots, tensors, strict=True)}
        return kinds[kind, dtype][id(param)]

    def copies(
        self, bucket: RunningBucket, kind: str, values: Mapping[nn.Parameter, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Start copying `values`, by parameter, to the host, and return where they land."""
        landing = []
        for param, value in values.items():
            landing.append(self.buffer(bucket, kind, param, value.dtype).copy_(value, non_blocking=True))
        return landing


States = MutableMapping[nn.Parameter, MutableMapping[str, Any]]
"""What `torch.optim.Optimizer` calls `state`."""


class StatePlacer:
    """Puts the state of parameters where the placements of their buckets say."""

    def __init__(self, rule: UpdateRule, fail: Callable[[BaseException], None]) -> None:
        self.disk = DiskStates(rule, fail)
        """State on disk."""
        self.buffers = StateBuffers()
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
                    self._move(state, param, group, buffers)
                else:
                    self.create(states, param, group, buffers)
                placed.add(id(param))

    def reserve(self, group: Mapping[str, Any], buckets: Mapping[RunningBucket, Iterable[nn.Parameter]]) -> None:
        """Take the space on disk of the state that goes there; DiskFull where there is none."""
        for bucket, params in buckets.items():
            if bucket.placement.optim is Tier.DISK:
                self.disk.reserve(bucket, params, group)

    def buffers_of(
        self, bucket: RunningBucket, params: Sequence[nn.Parameter], group: Mapping[str, Any]
    ) -> tuple[Mapping[str, torch.Tensor], ...]:
        """Return by name where statistics of each of `params` belong that an update makes; nothing where the statistics
        are there before it, or stay beside the parameter."""
        if not self._rule.makes_state:
            return ({},) * len(params)
        return tuple(self._buffers_of(bucket, param, group) for param in params)

    def _buffers_of(
        self, bucket: RunningBucket, param: nn.Parameter, group: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor]:
        if bucket.placement.optim is not Tier.HOST:
            return {}
        kinds = self._rule.kinds(param, group)
        return {name: self.buffers.buffer(bucket, name, param, dtype) for name, dtype in kinds.items()}

    def create(
        self,
        states: States,
        param: nn.Parameter,
        group: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Make the state of `param` where it has none, in `buffers` or beside it, unless its update will."""
        if self._rule.makes_state:
            return
        state = states[param]
        if state:
            self._start(param, state, group)
            return
        like = own_part(param).detach()
        for name, dtype in self._rule.kinds(param, group).items():
            buffer = buffers.get(name) if buffers else None
            state[name] = torch.zeros_like(like, dtype=dtype) if buffer is None else buffer.zero_()
        state["step"] = torch.zeros((), dtype=torch.float32, device=state[self._rule.statistics(group)[0]].device)
        self._start(param, state, group, is_new=True)

    def _start(
        self, param: nn.Parameter, state: MutableMapping[str, Any], group: Mapping[str, Any], *, is_new: bool = False
    ) -> None:
        slot = slot_of(param)
        is_fresh = is_new or not self._rule.kinds(param, group).keys() <= state.keys()
        self._rule.start(param, state, param.device if slot is None else slot.device, is_fresh=is_fresh)

    def _move(
        self,
        state: MutableMapping[str, Any],
        param: nn.Parameter,
        group: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        kinds = self._rule.kinds(param, group)
        for name in kinds:
            value, target = state.get(name), buffers.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            device = own_part(param).device if target is None else target.device
            if target is None or target.dtype != value.dtype:
                target = torch.empty_like(own_part(param).detach(), dtype=value.dtype, device=device)
            state[name] = target if target.data_ptr() == value.data_ptr() else target.copy_(value)
        beside = next((state[name].device for name in kinds if isinstance(state.get(name), torch.Tensor)), None)
        for name, value in state.items():
            if name not in kinds and isinstance(value, torch.Tensor) and self._rule.travels(name, group):
                state[name] = value.to(beside)
        self._start(param, state, group)
