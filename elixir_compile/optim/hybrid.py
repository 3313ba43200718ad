"""AdamW whose state lives where the plan says, and which updates each bucket on that side.

    state on DEVICE                     fused update on the device
    state on HOST, parameter on HOST    fused update on the host, in the slabs
    state on HOST, parameter on DEVICE  gradient and parameter travel to the host, the new parameter travels back

Device updates are queued first, so that on an accelerator both sides work at once. Every tensor goes through torch's
own fused kernel as a tensor of its own, so the result is bitwise that of `torch.optim.AdamW(fused=True)` on the same
side.
"""

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.errors import NoGraphCaptured
from elixir_compile.ir import Lane, Tier
from elixir_compile.ops.registry import claim_for_hybrid, slot_of
from elixir_compile.optim.loading import STATISTICS, held, unheld
from elixir_compile.optim.rooms import StateRooms
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor


class HybridAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with its state on the device or on the host, as planned.

    Arguments, `param_groups`, hooks and `state_dict()` are those of `torch.optim.AdamW`; state dicts load in both
    directions. `foreach` and `fused` are accepted and change nothing: the update is fused. Parameters of models that
    Elixir did not compile are updated where they are.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: "float | torch.Tensor" = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True)
        self._begin()

    def _begin(self) -> None:
        # `GradScaler` then unscales the gradients itself and skips `step()` on overflow: weights, state and step count
        # stay untouched.
        self._step_supports_amp_scaling = False
        self._rooms = StateRooms()
        self._placed: weakref.WeakKeyDictionary[RunningBucket, set[int]] = weakref.WeakKeyDictionary()
        """By bucket, the ids of the parameters whose state is where the bucket's placement says."""
        self._has_stepped = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every torch optimizer does."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            claim_for_hybrid(param, self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`, and put the state where the plan says."""
        entries = state_dict["state"].items()
        super().load_state_dict({**state_dict, "state": {index: held(entry) for index, entry in entries}})
        for param, entry in self.state.items():
            self.state[param] = unheld(entry, param, stays=self._is_on_host(param))

    def _is_on_host(self, param: nn.Parameter) -> bool:
        slot = slot_of(param)
        bucket = None if slot is None else slot.sink.running(slot)
        return bucket is not None and bucket.placement.optim is Tier.HOST

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    @torch.no_grad()
    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state that `params` have to where the plan in force says."""
        moved = {id(param) for param in params}
        for group in self.param_groups:
            buckets: dict[RunningBucket, list[nn.Parameter]] = {}
            for param in group["params"]:
                slot = slot_of(param)
                bucket = None if slot is None else slot.sink.running(slot)
                if id(param) in moved and bucket is not None and self.state.get(param):
                    buckets.setdefault(bucket, []).append(param)
            self._place_state(group, buckets, ())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return the loss that `closure` gives, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._first_step_checks()
        for group in self.param_groups:
            self._update_group(group)
        return loss

    def _first_step_checks(self) -> None:
        if self._has_stepped:
            return
        self._has_stepped = True
        params = [param for group in self.param_groups for param in group["params"]]
        if not any(slot_of(param) is not None for param in params):
            warnings.warn(
                NoGraphCaptured(
                    "no parameter of this HybridAdamW belongs to a model that Elixir compiled or prepared, so nothing "
                    "is planned or offloaded. Call what `torch.compile(model, backend='elixir')` returns, not `model`."
                ),
                stacklevel=4,
            )

    def _update_group(self, group: Mapping[str, Any]) -> None:
        buckets: dict[RunningBucket, list[nn.Parameter]] = {}
        unplanned: list[nn.Parameter] = []
        executors: dict[RunningBucket, Executor] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            slot = slot_of(param)
            bucket = None if slot is None else slot.sink.running(slot)
            if bucket is None:
                unplanned.append(param)
            else:
                buckets.setdefault(bucket, []).append(param)
                executors[bucket] = slot.sink
        self._place_state(group, buckets, unplanned)
        if unplanned:
            _fused_adamw(unplanned, unplanned, [p.grad for p in unplanned], self.state, group)
        on_device = [bucket for bucket in buckets if bucket.placement.optim is Tier.DEVICE]
        on_host = [bucket for bucket in buckets if bucket.placement.optim is Tier.HOST]
        for bucket in (*on_device, *on_host):
            lane = Lane.COMPUTE if bucket.placement.optim is Tier.DEVICE else Lane.HOST
            with executors[bucket].ledger.span(lane, f"update {bucket.spec.id}"):
                self._update_bucket(bucket, buckets[bucket], group)

    def _update_bucket(self, bucket: RunningBucket, params: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        if bucket.placement.optim is Tier.DEVICE or params[0].device.type == "cpu":
            _fused_adamw(params, params, [param.grad for param in params], self.state, group)
            return
        weights = self._rooms.copies(bucket, "param", {param: param for param in params})
        grads = self._rooms.copies(bucket, "grad", {param: param.grad for param in params})
        torch.cuda.current_stream(params[0].device).synchronize()
        _fused_adamw(params, weights, grads, self.state, group)
        for param, updated in zip(params, weights, strict=True):
            param.copy_(updated, non_blocking=True)

    def _place_state(
        self,
        group: Mapping[str, Any],
        buckets: Mapping[RunningBucket, list[nn.Parameter]],
        unplanned: Iterable[nn.Parameter],
    ) -> None:
        """Create the state of parameters that have none, and move what a new plan wants elsewhere."""
        for param in unplanned:
            self._create_state(param, group, {})
        # What leaves the device goes before what comes back.
        for bucket, params in sorted(buckets.items(), key=lambda item: item[0].placement.optim is Tier.DEVICE):
            placed = self._placed.setdefault(bucket, set())
            for param in params:
                if id(param) in placed and self.state[param]:
                    continue
                rooms = {}
                if bucket.placement.optim is Tier.HOST:
                    rooms = {name: self._rooms.room(bucket, name, param) for name in _names(group)}
                if self.state[param]:
                    self._move_state(param, group, rooms)
                else:
                    self._create_state(param, group, rooms)
                placed.add(id(param))

    def _create_state(self, param: nn.Parameter, group: Mapping[str, Any], rooms: Mapping[str, torch.Tensor]) -> None:
        state = self.state[param]
        if state:
            return
        for name in _names(group):
            room = rooms.get(name)
            fresh = torch.zeros_like(param, memory_format=torch.preserve_format) if room is None else room.zero_()
            state[name] = fresh
        state["step"] = torch.zeros((), dtype=torch.float32, device=state["exp_avg"].device)

    def _move_state(self, param: nn.Parameter, group: Mapping[str, Any], rooms: Mapping[str, torch.Tensor]) -> None:
        state = self.state[param]
        for name in _names(group):
            target = rooms.get(name)
            if target is None:
                target = torch.empty_like(param, memory_format=torch.preserve_format)
            state[name] = target if target.data_ptr() == state[name].data_ptr() else target.copy_(state[name])
        state["step"] = state["step"].to(state["exp_avg"].device)


def _names(group: Mapping[str, Any]) -> tuple[str, ...]:
    return STATISTICS if group["amsgrad"] else STATISTICS[:2]


def _beside(lr: "float | torch.Tensor", weight: torch.Tensor) -> "float | torch.Tensor":
    """Return `lr` where the kernel of `weight` reads it: a number and a tensor on the host are read everywhere."""
    is_elsewhere = isinstance(lr, torch.Tensor) and lr.device.type != "cpu" and lr.device != weight.device
    return lr.to(weight.device) if is_elsewhere else lr


def _fused_adamw(
    params: list[nn.Parameter],
    weights: list[Any],
    grads: list[Any],
    state: Mapping[nn.Parameter, Mapping[str, torch.Tensor]],
    group: Mapping[str, Any],
) -> None:
    """Update `weights`, the values of `params` on the side of their state, in place."""
    sides: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, weight in enumerate(weights):
        sides.setdefault((weight.device, weight.dtype), []).append(index)
    for indices in sides.values():
        own = [state[params[index]] for index in indices]
        steps = [entry["step"] for entry in own]
        compat.fused_adamw_(
            [weights[index] for index in indices],
            [grads[index] for index in indices],
            [entry["exp_avg"] for entry in own],
            [entry["exp_avg_sq"] for entry in own],
            [entry["max_exp_avg_sq"] for entry in own] if group["amsgrad"] else [],
            steps,
            amsgrad=group["amsgrad"],
            lr=_beside(group["lr"], weights[indices[0]]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
