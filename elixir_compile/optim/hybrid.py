"""AdamW whose state lives where the plan says, and which updates each bucket where and when the plan says.

    in the backward      a bucket is updated once its gradient has landed; `step()` does what is left
    after the backward   `step()` updates everything and returns
    across steps         `step()` updates what the device updates, queues what the host updates and returns;
                         whoever reads a parameter waits for the update of its bucket, and for no other

Device updates are queued first, so that on an accelerator both sides work at once, and what is streamed comes last.
What an update is: see `update` and `rule`. Every tensor goes through torch's own fused kernel as a tensor of its own,
so the result is bitwise that of `torch.optim.AdamW(fused=True)` on the same side, in each of the three.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elixir_compile.errors import NoGraphCaptured
from elixir_compile.ir import Tier, Update
from elixir_compile.ops.registry import claim_for_hybrid, slot_of
from elixir_compile.optim.early import EarlyUpdates
from elixir_compile.optim.loading import held, unheld
from elixir_compile.optim.rule import AdamWRule
from elixir_compile.optim.state import StatePlacer, States
from elixir_compile.optim.update import BucketUpdate, Part, part_of
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.updates import UpdateLine


class HybridAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with its state on the device or on the host, as planned.

    Arguments, `param_groups`, hooks and `state_dict()` are those of `torch.optim.AdamW`; state dicts load in both
    directions. `foreach` and `fused` are accepted and change nothing: the update is fused. Parameters of models that
    Elixir did not compile are updated where they are.

    Where the plan updates across steps, `step()` returns before the host is done. Reading a parameter, its gradient or
    `state` waits for what is read; `wait()` waits for everything. An exception of an update is raised by the next call
    that waits for it.
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
        self._begin()
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True)
        # `GradScaler` then unscales the gradients itself and skips `step()` on overflow: weights, state and step count
        # stay untouched.
        self._step_supports_amp_scaling = False

    def _begin(self) -> None:
        self._rule = AdamWRule()
        self._line = UpdateLine()
        self._placer = StatePlacer(self._rule)
        self._early = EarlyUpdates()
        self._is_accumulating = False
        self._has_stepped = False

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every torch optimizer does."""
        self.wait()
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            claim_for_hybrid(param, self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; an update that reads them keeps them for itself. Without `set_to_none` it is waited
        for."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with torch.DisableTorchFunctionSubclass():
            super().zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`, and put the state where the plan says."""
        self.wait()
        entries = state_dict["state"].items()
        super().load_state_dict({**state_dict, "state": {index: held(entry) for index, entry in entries}})
        for param, entry in self.state.items():
            self.state[param] = unheld(entry, param, stays=self._is_on_host(param))

    def _is_on_host(self, param: nn.Parameter) -> bool:
        found = _bucket_of(param)
        return found is not None and found[0].placement.optim is Tier.HOST

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        super().__setstate__(state)
        self._step_supports_amp_scaling = False
        for group in self.param_groups:
            for param in group["params"]:
                claim_for_hybrid(param, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or queue that; return the loss that `closure` gives, if there is
        one.

        Raises GradientsChanged where the plan updates in the backward and a gradient was changed after it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._line.check()
        self._first_step_checks()
        with torch.DisableTorchFunctionSubclass():
            done = self._early.check(self.param_groups)
            self._update([p for group in self.param_groups for p in group["params"] if p not in done])
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
            self._early.require_first(own)
            for update in self._update(own, arrived):
                for part in update.parts:
                    self._early.note(part)
            torch.autograd.graph.increment_version(own)

    @torch.no_grad()
    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state that `params` have to where the plan in force says."""
        self.wait()
        moved = {id(param) for param in params}
        for group in self.param_groups:
            own = [param for param in group["params"] if id(param) in moved and self._states.get(param)]
            self._placer.place(self._states, group, _by_bucket(own)[0])

    @property
    def _states(self) -> States:
        """`state`, without waiting."""
        return self.__dict__["state"]

    def _update(self, params: Sequence[nn.Parameter], arrived: torch.cuda.Event | None = None) -> list[BucketUpdate]:
        """Update those of `params` that have gradients, or queue that; return the updates of buckets."""
        wanted = {id(param) for param in params if param.grad is not None}
        parts: dict[RunningBucket, list[Part]] = {}
        executors: dict[RunningBucket, Executor] = {}
        for group in self.param_groups:
            own = [param for param in group["params"] if id(param) in wanted]
            buckets, unplanned, found = _by_bucket(own)
            executors |= found
            for bucket in buckets:
                bucket.settle()
            self._update_unplanned(unplanned, group)
            self._placer.place(self._states, group, buckets)
            for bucket, members in buckets.items():
                parts.setdefault(bucket, []).append(part_of(members, self._states, group))
        updates = [
            BucketUpdate(
                bucket=bucket,
                executor=executors[bucket],
                rule=self._rule,
                rooms=self._placer.rooms,
                parts=tuple(parts[bucket]),
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
        return updates

    def _run_on_host(self, update: BucketUpdate, arrived: torch.cuda.Event | None) -> None:
        if update.bucket.update is Update.AFTER_BACKWARD:
            update.run()
            return
        queued = self._line.queue(update.work(arrived), update.label)
        update.bucket.begin_update(queued, update.params)
        update.executor.keep_until_gone(grad for grad in update.grads if grad.device.type != "cpu")

    def _update_unplanned(self, params: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        for param in params:
            self._placer.create(self._states, param, group)
        if params:
            part = part_of(params, self._states, group)
            self._rule.update(part.weights, part.grads, part.states, part.group)


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
