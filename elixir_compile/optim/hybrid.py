"""The hybrid optimizer: keep state and update each bucket in the memory and at the time chosen by the plan.

    in the backward      a bucket is updated once its gradients are published; `step()` updates the remaining buckets
    after the backward   `step()` updates all buckets and returns
    across steps         `step()` runs the device updates, queues the host updates and returns; reading a parameter
                         waits for the update of its bucket only

Device updates are launched first, so that an accelerator and the host work at once; streamed updates come last. All
three modes give the same bits, because an update treats each tensor alone: see `update` and `rule`. If the optimizer
class is not element-wise, its own step runs for all parameters at once.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import nn

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.graph.ops.optimizers import ParamState, claim_for_hybrid
from elixir_compile.optim.generic.class_step import plain_step
from elixir_compile.optim.guard import EarlyUpdates, Overflow
from elixir_compile.optim.rule import UpdateRule, scaled
from elixir_compile.optim.saved_state import saved_entry, saved_names, unwrap_statistics, wrap_statistics
from elixir_compile.optim.state import States, is_off_device
from elixir_compile.optim.unplanned import warn_if_unplanned
from elixir_compile.optim.update import Updater
from elixir_compile.runtime.lanes import Event

P = ParamSpec("P")
R = TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` so that `torch.compile(optimizer.step)` calls it and does not trace it.

    Updates use a thread and locks, and follow the plan. `torch.compiler.disable` itself has no type for callers.
    """
    return cast("Callable[P, R]", torch.compiler.disable(function))


class Hybrid(torch.optim.Optimizer):
    """The base of all hybrid optimizers; see `HybridAdamW` and `hybrid(cls)`."""

    updates_as: ClassVar[type[torch.optim.Optimizer]]
    """The optimizer class that computes the same updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._begin()
        super().__init__(*args, **kwargs)

    @abstractmethod
    def _new_rule(self) -> UpdateRule:
        """Return the update rule of the class."""

    def _begin(self) -> None:
        self._updater = Updater(self._new_rule())
        self._early = EarlyUpdates()
        self._overflow = Overflow()
        self._is_accumulating = False
        self._has_stepped = False
        self._has_warned = False

    # Called by the planner and by executors; see `StateOwner`.

    @property
    def places_state(self) -> bool:
        """Return whether the state may live in another memory than the parameters: if the class is element-wise.

        If not, warn once why.
        """
        because = self._updater.rule.why_not_elementwise(self.param_groups)
        if because and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                ElixirWarning(
                    f"{type(self).__name__} is not element-wise: {because}. Its state stays beside the parameters and "
                    "its step is that of its class, one for all parameters."
                ),
                stacklevel=2,
            )
        return not because

    def states_of(self, params: Sequence[torch.Tensor]) -> list[ParamState]:
        """Return the param group and the state bytes of each of `params`, including state to be created."""
        group_of = {id(param): index for index, group in enumerate(self.param_groups) for param in group["params"]}
        found: list[ParamState] = []
        for param in params:
            group = group_of.get(id(param))
            if group is None:  # user code removed the parameter from its group, so it is never updated
                found.append(ParamState(0, 0))
                continue
            found.append(replace(self._updater.rule.param_state(param, self.param_groups[group]), group=group))
        return found

    # The interface of `torch.optim.Optimizer`.

    @property
    def state(self) -> States:
        """Return the state by parameter, after waiting for all queued updates."""
        self.wait()
        return self.__dict__["state"]

    @state.setter
    def state(self, states: States) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  readers must wait
        self.__dict__["state"] = states

    def wait(self) -> None:
        """Wait for all queued updates and disk writes. Raises the exception of a failed update or write."""
        self._updater.wait()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as in `torch.optim.Optimizer`."""
        self.wait()
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            claim_for_hybrid(param, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer class, after all queued updates; state on disk is read into memory."""
        states = self.state
        for param in [param for param, entry in states.items() if not entry]:
            del states[param]
        found = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        names = saved_names(self._updater.rule, self.param_groups)
        state = {
            key: saved_entry(entry, params[key], names)
            if isinstance(key, int) and isinstance(entry, Mapping)
            else entry
            for key, entry in found["state"].items()
        }
        return {**found, "state": state}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None without waiting: queued updates hold their gradients themselves.

        If `set_to_none` is False, gradients become zeros, after the queued updates that read them.
        """
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with torch.DisableTorchFunctionSubclass():
            super().zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `updates_as`, and move the state to where the plan wants it."""
        self.wait()
        saved = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        names = saved_names(self._updater.rule, saved)
        entries = state_dict["state"].items()
        early, is_accumulating = self._early, self._is_accumulating
        early.overwrite(were_updated=self._has_stepped)
        super().load_state_dict(
            {**state_dict, "state": {index: wrap_statistics(entry, names) for index, entry in entries}}
        )
        self._early, self._is_accumulating = early, is_accumulating  # `__setstate__`, called above, replaced them
        group_of = {id(param): group for group in self.param_groups for param in group["params"]}
        for param, entry in self.state.items():
            loaded = unwrap_statistics(entry, param, stays=is_off_device(param))
            self.state[param] = self._updater.rule.as_planned(param, loaded, group_of[id(param)])
        self.follow([param for param in self.state if is_off_device(param)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        super().__setstate__(state)
        for group in self.param_groups:
            for param in group["params"]:
                claim_for_hybrid(param, self)

    @_untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients, or queue their updates; return the loss of `closure`, if given.

        Raises GradientsChanged if the plan updates in the backward and a gradient was changed after the backward. No
        update runs in the backward before the first step, so the first step raises before any weight has changed.
        """
        if not self.places_state:
            self.wait()
            return plain_step(self.updates_as)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._updater.line.check()
        if not self._has_stepped:
            warn_if_unplanned(self)
        factor = self._take_factor()
        with torch.DisableTorchFunctionSubclass():
            if factor is not None:
                self._overflow.require_skipped()
            groups = scaled(self.param_groups, 1.0 if factor is None else factor)
            seen = self._early.check(groups)
            done = seen if self._has_stepped else frozenset()
            if factor is not None:
                left = [param for group in groups for param in group["params"] if param not in done]
                self._updater.update(left, groups, self.__dict__["state"])
        self._has_stepped = True
        return loss

    # Updates.

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Disable updates in backward passes inside this context.

        For gradient accumulation if the plan updates in the backward: wrap all backwards of a step but the last.
        """
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    @torch.no_grad()
    def landed(self, params: Sequence[torch.Tensor], arrived: Event | None) -> None:
        """Update `params`, all of a bucket, in the backward; executors call this once the gradients are published.

        `arrived` is the event after which the gradients are in memory; None if they are there.
        """
        if self._is_accumulating:
            return
        own = [param for param in params if isinstance(param, nn.Parameter)]
        with torch.DisableTorchFunctionSubclass():
            if not self._has_stepped:
                self._early.forget_dropped()
            self._early.require_first(own)
            wanted = {id(param) for param in own if param.grad is not None}
            for group in self.param_groups:
                self._early.note([param for param in group["params"] if id(param) in wanted], group)
            if not self._has_stepped:
                return  # The first step shows whether the user clips or scales gradients, which forbids such updates.
            self._updater.update(own, self.param_groups, self.__dict__["state"], arrived)
            torch.autograd.graph.increment_version(own)

    @torch.no_grad()
    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state of `params` to where the active plan wants it; executors call this after a change of plan."""
        self._updater.follow(params, self.param_groups, self.state)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether `GradScaler` passes its scale to `step()`; `GradScaler` reads this before each step.

        If False, `GradScaler` unscales the gradients itself and skips `step()` on overflow, so that weights, state and
        step count stay unchanged. `GradScaler` looks for infinities after reading this property, so ranks agree on
        overflow here. This is a collective: all ranks must read the property together.

        Raises GradientsChanged if the backward has already updated parameters with scaled gradients.
        """
        self._early.refuse("a GradScaler asked to unscale its gradient")
        self._overflow.spread(self.param_groups)
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the assignment: torch's fused optimizers assign True in their constructors."""

    def _take_factor(self) -> float | None:
        """Return the factor by which this update multiplies gradients; None if a gradient overflowed."""
        return 1.0
