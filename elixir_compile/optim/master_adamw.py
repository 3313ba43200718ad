"""AdamW for parameters with an fp32 master, and how their state is kept and saved."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_compile.ops.masters import REST_DTYPES, REST_NAMES, has_master, take_rest
from elixir_compile.ops.shards import own_part
from elixir_compile.optim.host import HostThreads, fallback, host_threads_for, mixed_adamw, split_adamw
from elixir_compile.optim.host.coalesce import coalesce
from elixir_compile.optim.host.fallback import joined, split
from elixir_compile.optim.host.kernel import kernel
from elixir_compile.optim.host.passes import Extras, Scalars
from elixir_compile.optim.rule import GRAD_SCALE, AdamWRule, State
from elixir_compile.runtime.slab import flat

_BLOCK = 1 << 24
"""Elements whose master a device makes at once: 64 MiB, and as much for the gradient."""


class MixedAdamWRule(AdamWRule):
    """torch's fused AdamW, and for parameters with a master the same arithmetic on the master."""

    def __init__(self) -> None:
        self._threads: HostThreads | None = None

    def kinds(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """Return the statistics of `param` by name, each shaped like it: moments, and the rest of its master."""
        if not has_master(param):
            return super().kinds(param, group)
        rest = {REST_NAMES[param.dtype]: REST_DTYPES[param.dtype]}
        return {**dict.fromkeys(self.statistics(group), torch.float32), **rest}

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Begin the master of `param` with every bit that `prepare` kept; else with the parameter as it is."""
        if not has_master(param):
            return
        # On the thread that trains, once: the worker's first update would read the machine and build the kernel.
        if self._threads is None:
            kernel()
            self._threads = host_threads_for(device)
        if not is_fresh:
            return
        if REST_NAMES[param.dtype] not in state:  # the state is older than the cast
            own = own_part(param)
            beside = next((value.device for value in state.values() if value.shape == own.shape), param.device)
            rest = torch.empty_like(own.detach(), dtype=REST_DTYPES[param.dtype], device=beside)
            state[REST_NAMES[param.dtype]] = rest
        start_rest(param, state)

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` and `states` in place."""
        plain, on_host = [], []
        for each in zip(weights, grads, states, strict=True):
            if rest_of(each[2]) is None:
                plain.append(each)
            elif each[0].device.type != "cpu":
                self._on_device(*each, group)
            elif each[0].numel():
                on_host.append(each)
            else:  # This rank has nothing of it, and counts its steps as the others do.
                each[2]["step"].add_(1)
        if plain:
            own_weights, own_grads, own_states = zip(*plain, strict=True)
            super().update(own_weights, own_grads, own_states, group)
        if on_host:
            self._on_host(on_host, group)

    def _on_device(self, weight: torch.Tensor, grad: torch.Tensor, state: State, group: Mapping[str, Any]) -> None:
        """Update one parameter in blocks, where it is."""
        names = self.statistics(group)
        kept = (rest_of(state), *(state[name] for name in names))
        tensors = [flat(tensor) for tensor in (weight, like(grad, weight), *kept) if tensor is not None]
        for start in range(0, weight.numel(), _BLOCK):
            high, given, own, *moments = (tensor[start : start + _BLOCK] for tensor in tensors)
            wide = given.to(torch.float32, copy=True).mul_(group.get(GRAD_SCALE, 1.0))
            is_split = own.dtype == torch.int16
            master = fallback.joined(high, own) if is_split else own
            # Each block counts from the same step.
            block = {**dict(zip(names, moments, strict=True)), "step": state["step"].clone()}
            super().update([master], [wide], [block], group)
            if is_split:
                fallback.split(master, high, own)
            else:
                high.copy_(master)
        state["step"].add_(1)

    def _on_host(self, updates: Sequence[tuple[torch.Tensor, torch.Tensor, State]], group: Mapping[str, Any]) -> None:
        """Update the weight, by the gradient, of each state."""
        steps = [int(state["step"]) + 1 for *_, state in updates]
        scalars: Scalars = {
            "lr": float(group["lr"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "grad_scale": group.get(GRAD_SCALE, 1.0),
            "maximize": group["maximize"],
        }
        rows = [
            [weight, like(grad, weight), rest_of(state), *(state[name] for name in self.statistics(group))]
            for weight, grad, state in updates
        ]
        for members, (weight, grad, rest, exp_avg, exp_avg_sq, *most) in coalesce(rows, steps):
            kernel_of = split_adamw if rest.dtype == torch.int16 else mixed_adamw
            extras: Extras = {**scalars, "max_exp_avg_sq": most[0] if most else None, "threads": self._threads}
            kernel_of(rest, exp_avg, exp_avg_sq, grad, weight, steps[members[0]], **extras)
            if len(members) > 1:
                # The pass saw tensors of its own over the same memory. It only reads gradients, which are second.
                written = [tensor for index in members for tensor in (rows[index][0], *rows[index][2:])]
                torch.autograd.graph.increment_version(written)
        for *_, state in updates:
            state["step"].add_(1)


def rest_of(state: State) -> torch.Tensor | None:
    """Return what `state` has of a master: its int16 low half, the fp32 whole, or None where there is none."""
    return next((state[name] for name in REST_NAMES.values() if name in state), None)


def start_rest(param: torch.Tensor, state: State) -> None:
    """Write the rest of `param`'s master to `state`."""
    target, rest = state[REST_NAMES[param.dtype]], take_rest(param)
    if rest is not None:
        target.copy_(rest)
    elif target.dtype == torch.int16:
        target.zero_()
    else:
        target.copy_(own_part(param).detach())


def like(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `grad` in the memory layout of `weight`."""
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def with_master(state: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """Return loaded `state` with its `master`, in fp32, as `param` has it: none, whole, or split with `param`.

    `param` becomes the nearest to the master. State without one, of `torch.optim.AdamW`, begins with the parameter.
    """
    found = dict(state)
    master = found.pop("master", None)
    if not has_master(param):
        return found
    home = found["exp_avg"]
    rest = torch.empty_like(own_part(param).detach(), dtype=REST_DTYPES[param.dtype], device=home.device)
    found[REST_NAMES[param.dtype]] = rest
    if master is None:
        start_rest(param, found)
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


def with_whole_master(entry: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the state of one parameter with its master whole."""
    found = dict(entry)
    low = found.pop("master_low", None)
    if low is not None:
        found["master"] = joined(own_part(param).detach().to(low.device), low)
    return found
