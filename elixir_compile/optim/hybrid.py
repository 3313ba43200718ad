"""Optimizers whose state lives where the plan says, and which update each bucket where and when the plan says.

    in the backward      a bucket is updated once its gradient has landed; `step()` does what is left
    after the backward   `step()` updates everything and returns
    across steps         `step()` updates what the device updates, queues what the host updates and returns;
                         whoever reads a parameter waits for the update of its bucket, and for no other

Device updates are queued first, so that on an accelerator both sides work at once, and what is streamed comes last.
What an update is: see `update` and `rule`; every tensor is a tensor of its own in it, so the result is the same bits in
each of the three. A class that is not element-wise keeps its own step.
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
from elixir_compile.optim.clip.guard import watch
from elixir_compile.optim.clip.overflow import Overflow
from elixir_compile.optim.early import EarlyUpdates
from elixir_compile.optim.generic.transient import plain_step
from elixir_compile.optim.group_slice import GroupSlice, group_slice_of, require_dense
from elixir_compile.optim.host.threads import HostThreads, at_least_threads, bind_thread, host_threads_for
from elixir_compile.optim.rule import AdamWRule, UpdateRule, scaled
from elixir_compile.optim.state.disk import DiskState
from elixir_compile.optim.state.loading import held, shared_entry, unheld
from elixir_compile.optim.state.placer import StatePlacer, States
from elixir_compile.optim.update import BucketUpdate
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.updates import UpdateLine, Work


class Hybrid(torch.optim.Optimizer):
    """The part of a hybrid optimizer that is the same for each class it inherits from; see `classes`."""

    updates_as: ClassVar[type[torch.optim.Optimizer]]
    """The class whose step it takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._begin()
        super().__init__(*args, **kwargs)

    @abstractmethod
    def _new_rule(self) -> UpdateRule:
        """Return what the class computes."""

    def _begin(self) -> None:
        self._rule = self._new_rule()
        self._line = UpdateLine()
        self._placer = StatePlacer(self._rule, self._line.fail)
        self._early = EarlyUpdates()
        self._overflow = Overflow()
        self._is_accumulating = False
        self._has_stepped = False
        self._has_warned = False

    # What the planner and executors ask.

    @property
    def places_state(self) -> bool:
        """Whether the state may live apart from the parameters: the class is element-wise."""
        return not self._obstacle()

    def states_of(self, params: Sequence[torch.Tensor]) -> list[ParamState]:
        """Return what is kept, or will be, for each of `params`; see `StateOwner`."""
        where = {id(param): index for index, group in enumerate(self.param_groups) for param in group["params"]}
        return [self._state_of(param, where.get(id(param))) for param in params]

    def _state_of(self, param: torch.Tensor, group: int | None) -> ParamState:
        if group is None:  # somebody took it out of its group: it is not updated any more
            return ParamState(0, 0)
        dtypes = self._rule.kinds(param, self.param_groups[group]).values()
        return ParamState(group=group, nbytes=param.numel() * sum(dtype.itemsize for dtype in dtypes))

    def _obstacle(self) -> str:
        because = self._rule.obstacle(self.param_groups)
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

    # What torch's optimizers have.

    @property
    def state(self) -> States:
        """The state by parameter; reading it waits for every queued update."""
        self.wait()
        return self.__dict__["state"]

    @state.setter
    def state(self, states: States) -> None:
        self.__dict__["state"] = states

    def wait(self) -> None:
        """Return when every queued update is done; raises what failed in one."""
        self._line.wait()
        self._placer.disk.wait_for_writes()
        self._line.check()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every torch optimizer does."""
        self.wait()
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            claim_for_hybrid(param, self)

    def state_dict(self) -> dict[str, Any]:
        """Return what `state_dict()` of the class returns, when every queued update is done; state on disk is read into
        memory."""
        states = self.state
        for param in [param for param, entry in states.items() if not entry]:
            del states[param]
        found = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        names = self._shaped_names(self.param_groups)
        entries = found["state"].items()
        own = {key: dict(entry) if isinstance(entry, DiskState) else entry for key, entry in entries}
        state = {
            key: shared_entry(self._saved_entry(entry, params[key]), params[key], names)
            if isinstance(key, int)
            else entry
            for key, entry in own.items()
        }
        return {**found, "state": state}

    def _saved_entry(self, entry: Mapping[str, Any], param: nn.Parameter) -> Mapping[str, Any]:
        """Return the state of one parameter as a state dict has it."""
        return entry

    def _shaped_names(self, groups: Iterable[Mapping[str, Any]]) -> set[str]:
        """Return what a state may have that is shaped like its parameter."""
        return {"master", *(name for group in groups for name in self._rule.statistics(group))}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; an update that reads them keeps them for itself. Without `set_to_none` it is waited
        for."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with torch.DisableTorchFunctionSubclass():
            super().zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the class it inherits from, and put the state where the plan says."""
        self.wait()
        saved = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        names = self._shaped_names(saved)
        entries = state_dict["state"].items()
        early, is_accumulating = self._early, self._is_accumulating
        early.overwrite(were_updated=self._has_stepped)
        super().load_state_dict({**state_dict, "state": {index: held(entry, names) for index, entry in entries}})
        self._early, self._is_accumulating = early, is_accumulating  # which `__setstate__` made new
        for param, entry in self.state.items():
            self.state[param] = unheld(entry, param, stays=self._is_off_device(param))
        self.follow([param for param in self.state if self._is_off_device(param)])

    def _is_off_device(self, param: nn.Parameter) -> bool:
        found = _bucket_of(param)
        return found is not None and found[0].placement.optim is not Tier.DEVICE

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        super().__setstate__(state)
        for group in self.param_groups:
            for param in group["params"]:
                claim_for_hybrid(param, self)

    @torch.compiler.disable  # `torch.compile(optimizer.step)`: an update has a thread, locks and a plan of its own
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or queue that; return the loss that `closure` gives, if there is
        one.

        Raises GradientsChanged where the plan updates in the backward and a gradient was changed after it. The first
        step updates nothing before that is known.
        """
        if self._obstacle():
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
                    "not `model`."
                ),
                stacklevel=4,
            )

    # Updates.

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let backward passes inside only add to the gradients: all of a step but the last, where the plan updates in
        the backward."""
        was, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = was

    @torch.no_grad()
    def landed(self, params: Sequence[torch.Tensor], arrived: torch.cuda.Event | None) -> None:
        """Update `params`, of one bucket, whose gradients this backward has published; see `StateOwner`."""
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
                return  # What no update in the backward allows, scaling or clipping, shows at the first step.
            self._update(own, arrived)
            torch.autograd.graph.increment_version(own)

    @torch.no_grad()
    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state that `params` have to where the plan in force says."""
        self.wait()
        moved = {id(param) for param in params}
        for group in self.param_groups:
            own = [param for param in group["params"] if id(param) in moved]
            self._placer.reserve(group, _by_bucket(own)[0])
            own = [param for param in own if self._states.get(param)]
            self._placer.place(self._states, group, _by_bucket(own)[0])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `GradScaler`, which asks before a step, hands its scale to `step()`; else it unscales the gradients
        itself and skips `step()` on overflow, so that weights, state and step count stay untouched. It looks for
        infinities next, so what several ranks have found is agreed here, at once on all of them: nothing else may ask
        on one rank alone.

        Raises GradientsChanged where this backward has updated with gradients that are still scaled.
        """
        self._early.refuse("a GradScaler asked to unscale its gradient")
        self._overflow.spread(self.param_groups)
        return self._takes_loss_scale()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Do nothing: torch's fused classes want True."""

    def _takes_loss_scale(self) -> bool:
        return False

    def _take_factor(self) -> float | None:
        """Return what the update multiplies gradients by, once; None where a gradient overflowed."""
        return 1.0

    @property
    def _states(self) -> States:
        """`state`, without waiting."""
        return self.__dict__["state"]

    def _update(
        self, params: Sequence[nn.Parameter], arrived: torch.cuda.Event | None = None, factor: float = 1.0
    ) -> None:
        """Update those of `params` that have gradients, or queue that; gradients count `factor` times for parameters
        that have a master."""
        rule = self._rule.now()
        wanted = {id(param) for param in params if param.grad is not None}
        parts: dict[RunningBucket, list[GroupSlice]] = {}
        executors: dict[RunningBucket, Executor] = {}
        elsewhere: list[tuple[list[nn.Parameter], Mapping[str, Any]]] = []
        for group in scaled(self.param_groups, factor):
            own = [param for param in group["params"] if id(param) in wanted]
            buckets, unplanned, found = _by_bucket(own)
            executors |= found
            for bucket in buckets:
                bucket.await_update()
            if isinstance(rule, AdamWRule):
                require_dense(unplanned)
            elsewhere.append((unplanned, group))
            self._placer.place(self._states, group, buckets)
            for bucket, members in buckets.items():
                buffers = self._placer.buffers_of(bucket, members, group)
                parts.setdefault(bucket, []).append(group_slice_of(members, self._states, group, buffers))
        for unplanned, group in elsewhere:  # not before it is known that no earlier update failed and no disk is full
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
            if update.bucket.placement.streamed:  # returns when its copies are done: the host works meanwhile
                update.run()

    def _run_on_host(self, update: BucketUpdate, arrived: torch.cuda.Event | None) -> None:
        threads = host_threads_for(update.executor.device)
        if update.bucket.update is Update.AFTER_BACKWARD:
            with at_least_threads(threads.num_threads):
                update.run()
            return
        for param in update.params:
            watch(param.grad)
        queued = self._line.queue(_on_host_threads(update.work(arrived), threads), update.label)
        update.bucket.begin_update(queued, update.params)
        update.executor.keep_until_gone(grad for grad in update.grads if grad.device.type != "cpu")

    def _update_unplanned(self, params: list[nn.Parameter], group: Mapping[str, Any], rule: UpdateRule) -> None:
        for param in params:
            self._placer.create(self._states, param, group)
        if params:
            part = group_slice_of(params, self._states, group)
            rule.update(part.weights, part.grads, part.states, part.group)


def _on_host_threads(work: Work, threads: HostThreads) -> Work:
    """Return `work` for the worker, with as many of torch's own threads as `threads` has, on the same cores."""

    def run() -> torch.cuda.Event | None:
        bind_thread(threads.cores)  # before OpenMP starts the threads of the worker, which inherit it
        with at_least_threads(threads.num_threads):
            return work()

    return run


def _bucket_of(param: torch.Tensor) -> "tuple[RunningBucket, Executor] | None":
    slot = slot_of(param)
    bucket = None if slot is None else slot.sink.running(slot)
    return None if bucket is None else (bucket, slot.sink)


def _by_bucket(
    params: Iterable[nn.Parameter],
) -> tuple[dict[RunningBucket, list[nn.Parameter]], list[nn.Parameter], dict[RunningBucket, Executor]]:
    """Return `params` by bucket, those that no plan names, and the executor of each bucket."""
    buckets: dict[RunningBucket, list[nn.Parameter]] = {}
    unplanned: list[nn.Parameter] = []
    executors: dict[RunningBucket, Executor] = {}
    for param in params:
        found = _bucket_of(param)
        if found is None:
            unplanned.append(param)
        else:
            buckets.setdefault(found[0], []).append(param)
            executors[found[0]] = found[1]
    return buckets, unplanned, executors
