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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from elixir_compile.errors import ElixirWarning, NoGraphCaptured
from elixir_compile.ir import Tier, Update
from elixir_compile.ops.registry import ParamState, claim_for_hybrid, slot_of
from elixir_compile.optim.by_bucket import bucket_of, group_by_bucket
from elixir_compile.optim.clip.guard import watch
from elixir_compile.optim.clip.overflow import Overflow
from elixir_compile.optim.early import EarlyUpdates
from elixir_compile.optim.generic.transient import plain_step
from elixir_compile.optim.group_slice import GroupSlice, group_slice_of, require_dense
from elixir_compile.optim.host.threads import at_least_threads, host_threads_for, on_host_threads
from elixir_compile.optim.rule import AdamWRule, UpdateRule, scaled
from elixir_compile.optim.state.disk import DiskState
from elixir_compile.optim.state.loading import shared_entry, unwrap_statistics, wrap_statistics
from elixir_compile.optim.state.placer import StatePlacer, States
from elixir_compile.optim.update import BucketUpdate
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.updates import UpdateLine


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
        self._rule = self._new_rule()
        self._line = UpdateLine()
        self._placer = StatePlacer(self._rule, self._line.fail)
        self._early = EarlyUpdates()
        self._overflow = Overflow()
        self._is_accumulating = False
        self._has_stepped = False
        self._has_warned = False

    # Called by the planner and by executors; see `StateOwner`.

    @property
    def places_state(self) -> bool:
        """Return whether the state may live in another memory than the parameters: if the class is element-wise."""
        return not self._why_not_elementwise()

    def states_of(self, params: Sequence[torch.Tensor]) -> list[ParamState]:
        """Return the param group and the state bytes of each of `params`, including state to be created."""
        group_of = {id(param): index for index, group in enumerate(self.param_groups) for param in group["params"]}
        return [self._state_of(param, group_of.get(id(param))) for param in params]

    def _state_of(self, param: torch.Tensor, group: int | None) -> ParamState:
        if group is None:  # user code removed the parameter from its group, so it is never updated
            return ParamState(0, 0)
        dtypes = self._rule.state_dtypes(param, self.param_groups[group]).values()
        return ParamState(group=group, nbytes=param.numel() * sum(dtype.itemsize for dtype in dtypes))

    def _why_not_elementwise(self) -> str:
        because = self._rule.why_not_elementwise(self.param_groups)
        if because and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                ElixirWarning(
                    f"{type(self).__name__} is not element-wise: {because}. Its state stays beside the parameters and "
                    "its step is that of its class, one for all parameters."
                ),
                stacklevel=2,
            )
        return because

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
        self._line.wait()
        self._placer.disk.wait_for_writes()
        self._line.check()

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
        names = self._shaped_names(self.param_groups)
        entries = found["state"].items()
        in_memory = {key: dict(entry) if isinstance(entry, DiskState) else entry for key, entry in entries}
        state = {
            key: shared_entry(self._saved_entry(entry, params[key]), params[key], names)
            if isinstance(key, int)
            else entry
            for key, entry in in_memory.items()
        }
        return {**found, "state": state}

    def _saved_entry(self, entry: Mapping[str, Any], param: nn.Parameter) -> Mapping[str, Any]:
        """Return `entry`, the state of `param`, as state dicts hold it."""
        return entry

    def _shaped_names(self, groups: Iterable[Mapping[str, Any]]) -> set[str]:
        """Return the names of all statistics, which have the shape of their parameter, in `groups`."""
        return {"master", *(name for group in groups for name in self._rule.statistics(group))}

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
        names = self._shaped_names(saved)
        entries = state_dict["state"].items()
        early, is_accumulating = self._early, self._is_accumulating
        early.overwrite(were_updated=self._has_stepped)
        super().load_state_dict(
            {**state_dict, "state": {index: wrap_statistics(entry, names) for index, entry in entries}}
        )
        self._early, self._is_accumulating = early, is_accumulating  # `__setstate__`, called above, replaced them
        for param, entry in self.state.items():
            self.state[param] = unwrap_statistics(entry, param, stays=self._is_off_device(param))
        self.follow([param for param in self.state if self._is_off_device(param)])

    def _is_off_device(self, param: nn.Parameter) -> bool:
        found = bucket_of(param)
        return found is not None and found[0].placement.optim is not Tier.DEVICE

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        super().__setstate__(state)
        for group in self.param_groups:
            for param in group["params"]:
                claim_for_hybrid(param, self)

    @torch.compiler.disable  # for `torch.compile(optimizer.step)`: updates use a thread and locks, and follow the plan
    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  `disable` hides the signature
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Update all parameters that have gradients, or queue their updates; return the loss of `closure`, if given.

        Raises GradientsChanged if the plan updates in the backward and a gradient was changed after the backward. No
        update runs in the backward before the first step, so the first step raises before any weight has changed.
        """
        if self._why_not_elementwise():
            self.wait()
            return plain_step(self.updates_as)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._line.check()
        if not self._has_stepped:
            self._warn_where_unplanned()
        factor = self._take_factor()
        with torch.DisableTorchFunctionSubclass():
            if factor is not None:
                self._overflow.require_skipped(self.param_groups)
            seen = self._early.check(scaled(self.param_groups, 1.0 if factor is None else factor))
            done = seen if self._has_stepped else frozenset()
            if factor is not None:
                left = [param for group in self.param_groups for param in group["params"] if param not in done]
                self._update(left, factor=factor)
        self._has_stepped = True
        return loss

    def _warn_where_unplanned(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if not any(slot_of(param) is not None for param in params):
            warnings.warn(
                NoGraphCaptured(
                    f"no parameter of this {type(self).__name__} belongs to a model that Elixir compiled or prepared, "
                    "so nothing is planned or offloaded. Call what `torch.compile(model, backend='elixir')` returns, "
                    "not `model`. If torch has logged that `recompile_limit` was reached, call "
                    "`torch.compiler.reset()` before compiling another model of the same class."
                ),
                stacklevel=4,
            )

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
    def landed(self, params: Sequence[torch.Tensor], arrived: torch.cuda.Event | None) -> None:
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
            self._update(own, arrived)
            torch.autograd.graph.increment_version(own)

    @torch.no_grad()
    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state of `params` to where the active plan wants it; executors call this after a change of plan."""
        self.wait()
        moved = {id(param) for param in params}
        for group in self.param_groups:
            own = [param for param in group["params"] if id(param) in moved]
            self._placer.reserve(group, group_by_bucket(own)[0])
            own = [param for param in own if self._states.get(param)]
            self._placer.place(self._states, group, group_by_bucket(own)[0])

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
        return self._takes_loss_scale()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the assignment: torch's fused optimizers assign True in their constructors."""

    def _takes_loss_scale(self) -> bool:
        return False

    def _take_factor(self) -> float | None:
        """Return the factor by which this update multiplies gradients; None if a gradient overflowed."""
        return 1.0

    @property
    def _states(self) -> States:
        """Return `state` without waiting for queued updates."""
        return self.__dict__["state"]

    def _update(
        self, params: Sequence[nn.Parameter], arrived: torch.cuda.Event | None = None, factor: float = 1.0
    ) -> None:
        """Update the parameters in `params` that have gradients, or queue their updates.

        Gradients are multiplied by `factor` if their parameter has a master.
        """
        rule = self._rule.snapshot()
        wanted = {id(param) for param in params if param.grad is not None}
        parts: dict[RunningBucket, list[GroupSlice]] = {}
        executors: dict[RunningBucket, Executor] = {}
        unplanned_by_group: list[tuple[list[nn.Parameter], Mapping[str, Any]]] = []
        for group in scaled(self.param_groups, factor):
            own = [param for param in group["params"] if id(param) in wanted]
            buckets, unplanned, found = group_by_bucket(own)
            executors |= found
            for bucket in buckets:
                bucket.await_update()
            if isinstance(rule, AdamWRule):
                require_dense(unplanned)
            unplanned_by_group.append((unplanned, group))
            self._placer.place(self._states, group, buckets)
            for bucket, members in buckets.items():
                buffers = self._placer.buffers_of(bucket, members, group)
                parts.setdefault(bucket, []).append(group_slice_of(members, self._states, group, buffers))
        for unplanned, group in unplanned_by_group:  # after the checks above for failed updates and a full disk
            self._update_unplanned(unplanned, group, rule)
        updates = [
            BucketUpdate(
                bucket=bucket,
                executor=executors[bucket],
                rule=rule,
                buffers=self._placer.buffers,
                parts=tuple(parts[bucket]),
                disk=self._placer.disk.prepare(bucket, (state for part in parts[bucket] for state in part.states)),
            )
            for executor in dict.fromkeys(executors.values())
            for bucket in executor.in_use_order(b for b in parts if executors[b] is executor)
        ]
        for update in updates:
            if update.is_on_device and not update.bucket.placement.streamed:
                update.run()
        for update in updates:
            if not update.is_on_device:
                self._run_on_host(update, arrived)
        for update in updates:
            if update.bucket.placement.streamed:  # waits for its copies, so queued host updates must already run
                update.run()

    def _run_on_host(self, update: BucketUpdate, arrived: torch.cuda.Event | None) -> None:
        threads = host_threads_for(update.executor.device)
        if update.bucket.update is Update.AFTER_BACKWARD:
            with at_least_threads(threads.num_threads):
                update.run()
            return
        for param in update.params:
            if param.grad is not None:
                watch(param.grad)
        queued = self._line.queue(on_host_threads(update.work(arrived), threads), update.label)
        update.bucket.begin_update(queued, update.params)
        update.executor.keep_until_gone(grad for grad in update.grads if grad.device.type != "cpu")

    def _update_unplanned(self, params: list[nn.Parameter], group: Mapping[str, Any], rule: UpdateRule) -> None:
        for param in params:
            self._placer.create(self._states, param, group)
        if params:
            part = group_slice_of(params, self._states, group)
            rule.update(part.weights, part.grads, part.states, part.group)
