"""AdamW for parameters with an fp32 master, and the conversion of masters between memory and state dicts.

A 16-bit parameter holds a part of its master; optimizer state holds the rest of the master: the int16 low half if the
parameter is bf16, and the fp32 master itself if the parameter is fp16. See `ops.masters`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_compile.ops.masters import REST_DTYPES, REST_NAMES, has_master, take_rest
from elixir_compile.ops.shards import own_part
from elixir_compile.optim.device_masters import FlatUpdate, update_masters
from elixir_compile.optim.host import HostThreads, host_threads_for, mixed_adamw, split_adamw
from elixir_compile.optim.host.flat_step import joined, split
from elixir_compile.optim.host.passes import Extras, Scalars, coalesce, kernel
from elixir_compile.optim.layout import StatisticLayout
from elixir_compile.optim.rule import GRAD_SCALE, AdamWRule, State
from elixir_compile.runtime.slab import flat


class MixedAdamWRule(AdamWRule):
    """torch's fused AdamW; parameters with a master get the same arithmetic on the master."""

    def __init__(self) -> None:
        self._threads: HostThreads | None = None

    def state_layouts(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StatisticLayout]:
        """Return the layout of each moment of `param`, and of the rest of the master if `param` has a master."""
        if not has_master(param):
            return super().state_layouts(param, group)
        rest = {REST_NAMES[param.dtype]: StatisticLayout(REST_DTYPES[param.dtype])}
        return {**dict.fromkeys(self.statistics(group), StatisticLayout(torch.float32)), **rest}

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Write the rest of the master of `param` to fresh `state`: from `prepare`, else from the parameter itself."""
        if not has_master(param):
            return
        self._prepare_passes(device)
        if not is_fresh:
            return
        if REST_NAMES[param.dtype] not in state:  # the state was created before the parameter was cast
            local = own_part(param)
            device = next((value.device for value in state.values() if value.shape == local.shape), param.device)
            rest = torch.empty_like(local.detach(), dtype=REST_DTYPES[param.dtype], device=device)
            state[REST_NAMES[param.dtype]] = rest
        begin_master_rest(param, state)

    def _prepare_passes(self, device: torch.device) -> None:
        """Build the kernel and choose the host threads for `device`, once; called on the training thread.

        Else the worker's first update would inspect the machine and wait for the compiler.
        """
        if self._threads is None:
            kernel()
            self._threads = host_threads_for(device)

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` and `states` in place."""
        plain, on_host, on_device = [], [], []
        for each in zip(weights, grads, states, strict=True):
            if master_rest_of(each[2]) is None:
                plain.append(each)
            elif each[0].device.type != "cpu":
                on_device.append(each)
            elif each[0].numel():
                on_host.append(each)
            else:  # The shard of this rank is empty, but all ranks count steps.
                each[2]["step"].add_(1)
        if plain:
            plain_weights, plain_grads, plain_states = zip(*plain, strict=True)
            super().update(plain_weights, plain_grads, plain_states, group)
        if on_device:
            self._on_device(on_device, group)
        if on_host:
            self._on_host(on_host, group)

    def _on_device(self, updates: Sequence[tuple[torch.Tensor, torch.Tensor, State]], group: Mapping[str, Any]) -> None:
        """Update weights with a master on a device; `updates` holds weight, gradient and state of each parameter."""
        kinds: dict[tuple[torch.device, torch.dtype], list[FlatUpdate]] = {}
        for weight, grad, state in updates:
            rest = master_rest_of(state)
            assert rest is not None, "`update` passes parameters with a master"
            moments = {name: flat(state[name]) for name in self.statistics(group)}
            found = FlatUpdate(
                high=flat(weight),
                grad=flat(in_layout_of(grad, weight)),
                rest=flat(rest),
                moments=moments,
                step=state["step"],
            )
            kinds.setdefault((weight.device, rest.dtype), []).append(found)
        for members in kinds.values():
            update_masters(members, group.get(GRAD_SCALE, 1.0), group, super().update)

    def _on_host(self, updates: Sequence[tuple[torch.Tensor, torch.Tensor, State]], group: Mapping[str, Any]) -> None:
        """Update weights with a master on the host; `updates` holds weight, gradient and state of each parameter."""
        steps = [int(state["step"]) + 1 for *_, state in updates]
        rows = [
            [
                weight,
                in_layout_of(grad, weight),
                master_rest_of(state),
                *(state[name] for name in self.statistics(group)),
            ]
            for weight, grad, state in updates
        ]
        for members, (weight, grad, rest, exp_avg, exp_avg_sq, *most) in coalesce(rows, steps):
            kernel_of = split_adamw if rest.dtype == torch.int16 else mixed_adamw
            largest = most[0] if most else None
            extras: Extras = {**scalars_of(group), "max_exp_avg_sq": largest, "threads": self._threads}
            kernel_of(rest, exp_avg, exp_avg_sq, grad, weight, steps[members[0]], **extras)
            if len(members) > 1:
                # The pass wrote through other tensors over the same memory. It only reads gradients, `rows[index][1]`.
                written = [tensor for index in members for tensor in (rows[index][0], *rows[index][2:])]
                torch.autograd.graph.increment_version(written)
        for *_, state in updates:
            state["step"].add_(1)


def scalars_of(group: Mapping[str, Any]) -> Scalars:
    """Return the hyperparameters of `group` for a host pass, and the factor of its gradients."""
    return {
        "lr": float(group["lr"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "grad_scale": group.get(GRAD_SCALE, 1.0),
        "maximize": group["maximize"],
    }


def master_rest_of(state: State) -> torch.Tensor | None:
    """Return the int16 low half or the fp32 master in `state`; None if the parameter has no master."""
    return next((state[name] for name in REST_NAMES.values() if name in state), None)


def begin_master_rest(param: torch.Tensor, state: State) -> None:
    """Write the rest of the master of `param` to `state`, from the bits kept by `prepare` if there are any."""
    target, rest = state[REST_NAMES[param.dtype]], take_rest(param)
    if rest is not None:
        target.copy_(rest)
    elif target.dtype == torch.int16:
        target.zero_()
    else:
        target.copy_(own_part(param).detach())


def in_layout_of(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `grad` with the strides of `weight`, copied if its strides differ."""
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def load_master(state: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """Return `state`, loaded from a state dict, with its entry `master` converted to the rest of the master of `param`.

    `param` is set to the 16-bit value nearest to the master. If `state` has no master, as in state dicts of
    `torch.optim.AdamW`, the master begins with the value of `param`. If `param` has no master, the entry is dropped.
    """
    found = dict(state)
    master = found.pop("master", None)
    if not has_master(param):
        return found
    home = next(value.device for name, value in found.items() if name != "step" and isinstance(value, torch.Tensor))
    rest = torch.empty_like(own_part(param).detach(), dtype=REST_DTYPES[param.dtype], device=home)
    found[REST_NAMES[param.dtype]] = rest
    if master is None:
        begin_master_rest(param, found)
        return found
    master = torch.empty_like(rest, dtype=torch.float32).copy_(master)
    high = torch.empty_like(rest, dtype=param.dtype)
    if rest.dtype == torch.int16:
        split(flat(master), flat(high), flat(rest))
    else:
        rest.copy_(master)
        high.copy_(master)
    take_rest(param)
    with torch.no_grad():
        own_part(param).copy_(high)
    torch.autograd.graph.increment_version(param)
    return found


def with_joined_master(entry: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return `entry`, the state of `param`, with the fp32 `master` in place of its low half; called to save state."""
    found = dict(entry)
    low = found.pop("master_low", None)
    if low is not None:
        found["master"] = joined(own_part(param).detach().to(low.device), low)
    return found
