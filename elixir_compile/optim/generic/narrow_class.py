"""The update rule of any optimizer class with its fp32 statistics stored in bf16.

    bf16 statistics -> fp32, a block of a parameter -> the class's own step -> bf16, rounded stochastically

Classes are element-wise, and dry steps have found that flat parts of a tensor get the bits of the whole, so a block is
a tensor of its own to the class. Only one block is in fp32 at a time.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from elixir_compile.optim.generic.class_rule import ClassRule
from elixir_compile.optim.layout import StatisticLayout, flat_order
from elixir_compile.optim.moment_forms import noise_key, rounded_to_bfloat16, weight_noise
from elixir_compile.optim.narrow_state import StatePrecision
from elixir_compile.optim.rule import State
from elixir_compile.optim.step_counts import note_num_steps, num_steps
from elixir_compile.runtime.slab import flat

_BLOCK = 1 << 20
"""Elements in fp32 at a time: 4 MiB for each statistic."""
_NUM_UPDATES = "num_updates"
"""The entry of a state that counts updates if the class does not, as SGD and Lion. The noise of each update must be its
own: with the same noise in every update, a statistic that decays slowly is rounded back to its value each time."""


class NarrowClassRule(ClassRule):
    """The update rule of a class whose statistics have the precision `precision`: fp32 ones become bf16."""

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer, precision: StatePrecision) -> None:
        super().__init__(cls, optimizer)
        self._precision = precision

    def state_layouts(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StatisticLayout]:
        """Return the layout of each statistic of `param` by name."""
        return {
            name: replace(layout, dtype=torch.bfloat16) if layout.dtype == torch.float32 else layout
            for name, layout in super().state_layouts(param, group).items()
        }

    def narrow_dtype(self, param: torch.Tensor, group: Mapping[str, Any]) -> str | None:
        """Return bfloat16 if the class would keep a statistic of `param` in fp32, else None."""
        dtypes = self.schema(group, param.dtype).dtypes.values()
        return "bfloat16" if torch.float32 in dtypes else None

    def as_planned(self, param: torch.Tensor, state: State, group: Mapping[str, Any]) -> State:
        """Return `state` with its fp32 statistics in bf16, rounded to the nearest."""
        layouts = self.state_layouts(param, group)
        found = {
            name: value.to(layouts[name].dtype) if name in layouts and isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        return state if all(found[name] is state[name] for name in found) else found

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` in place and the entries of `states` in place or by new values."""
        narrow = {name for name, dtype in self.schema(group, torch.float32).dtypes.items() if dtype == torch.float32}
        for weight, grad, state in zip(weights, grads, states, strict=True):
            if weight.dtype != torch.float32 or not narrow or not weight.numel():
                super().update([weight], [grad], [state], group)
            else:
                self._in_blocks(weight, grad, state, group, narrow)

    def _in_blocks(
        self, weight: torch.Tensor, grad: torch.Tensor, state: State, group: Mapping[str, Any], narrow: set[str]
    ) -> None:
        """Update a parameter block by block; the statistics `narrow` are in bf16 in `state`."""
        number = num_steps(state.get("step", state.get(_NUM_UPDATES, 0))) + 1
        key = noise_key(self._precision.seed, number)
        given = {name: flat_order(value, weight) for name, value in state.items() if _is_statistic(value, weight)}
        others = {name: value for name, value in state.items() if name not in given and name != _NUM_UPDATES}
        kept, left = dict(given), dict[str, Any]()
        slope, high = flat_order(grad, weight), flat(weight)
        for start in range(0, weight.numel(), _BLOCK):
            block = slice(start, start + _BLOCK)
            # The class counts a step for each block, so each gets copies of what is no statistic.
            piece: State = {
                **{name: value[block].float() if name in narrow else value[block] for name, value in given.items()},
                **copy.deepcopy(others),
            }
            super().update([high[block]], [slope[block]], [piece], group)
            for name, value in piece.items():
                if not _is_statistic(value, high[block]):
                    left[name] = value
                    continue
                if name not in kept:  # the class has made it in this step
                    kept[name] = torch.empty_like(high, dtype=torch.bfloat16 if name in narrow else value.dtype)
                kept[name][block] = self._rounded(value, key) if name in narrow else value
        self._store(state, kept, left, weight)
        if "step" not in state:
            state[_NUM_UPDATES] = number
        elif self.counts_steps(group):
            note_num_steps(state["step"], number)

    def _store(self, state: State, kept: Mapping[str, torch.Tensor], left: State, weight: torch.Tensor) -> None:
        """Put the flat statistics `kept` and the entries `left` into `state`, in its own memory where it has any."""
        for name, value in kept.items():
            before = state.get(name)
            if not isinstance(before, torch.Tensor) or before.data_ptr() != value.data_ptr():
                state[name] = value.as_strided(weight.shape, weight.stride())
        for name, value in left.items():
            before = state.get(name)
            if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor) and before.shape == value.shape:
                before.copy_(value)
            else:
                state[name] = value
        torch.autograd.graph.increment_version(weight)

    def _rounded(self, values: torch.Tensor, key: int) -> torch.Tensor:
        # The key as the int32 with its bits: the noise is a function of the value, the step and the seed.
        bits = torch.full((), key, dtype=torch.int64, device=values.device).to(torch.int32)
        return rounded_to_bfloat16(values, weight_noise(bits, values))


def _is_statistic(value: object, weight: torch.Tensor) -> bool:
    """Return whether `value` is a tensor with a value for each element of `weight`."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == weight.shape
