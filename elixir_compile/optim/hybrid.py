"""The hybrid optimizer: it keeps state and updates each bucket in the memory and at the time chosen by the plan, and
clips and unscales gradients as it reads them.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import nn

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.graph.ops.optimizers import (
    claim_for_hybrid,
    claim_master,
    has_master,
    master_ignored,
    note_written,
)
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import (
    by_mesh,
    cut_axes,
    is_dtensor,
    is_whole,
    own_grad,
    sum_over_shards,
)
from elixir_compile.ir import Param
from elixir_compile.optim.generic.dry_step import plain_step
from elixir_compile.optim.guard import EarlyUpdates, GradientSnapshots, Overflow, warn_if_unplanned
from elixir_compile.optim.host import sum_of_squares
from elixir_compile.optim.rule import UpdateRule, scaled
from elixir_compile.optim.state import (
    States,
    is_off_device,
    saved_entry,
    saved_names,
    unwrap_statistics,
    wrap_statistics,
)
from elixir_compile.optim.update import Updater
from elixir_compile.runtime.bucket import flat
from elixir_compile.runtime.executor import executor_of_slot
from elixir_compile.runtime.lanes import Event
from elixir_compile.runtime.published import Squares, SquaresOf

# ----------------------------------------------------------------------------------------------------------------------
# The hybrid optimizer: keep state and update each bucket in the memory and at the time chosen by the plan.
#
#     in the backward      a bucket is updated once its gradients are published; `step()` updates the remaining buckets
#     after the backward   `step()` updates all buckets and returns
#     across steps         `step()` runs the device updates, queues the host updates and returns; reading a parameter
#                          waits for the update of its bucket only
#
# Device updates are launched first, so that an accelerator and the host work at once; streamed updates come last. All
# three modes give the same bits, because an update treats each tensor alone: see `update` and `rule`. If the optimizer
# class is not element-wise, its own step runs for all parameters at once.


P = ParamSpec("P")
R = TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` so that `torch.compile(optimizer.step)` calls it and does not trace it.

    Updates use a thread and locks, and follow the plan. `torch.compiler.disable` itself has no type for callers.
    """
    return cast("Callable[P, R]", torch.compiler.disable(function))


class Hybrid(torch.optim.Optimizer):
    """The base of all hybrid optimizers; see `HybridAdamW` and `hybrid(cls)`.

    It has more than 20 methods, because it is an optimizer of torch and an owner of state for plans at once.
    """

    updates_as: ClassVar[type[torch.optim.Optimizer]]
    """The optimizer class that computes the same updates."""
    _clip_factor: float = 1.0
    """The clip coefficient for the next update."""
    _clipped = GradientSnapshots()
    """The gradients to which `_clip_factor` applies."""

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
        self._is_checked = False
        """Whether the class was watched for the step whose updates have begun."""
        self._counts: Sequence[Mapping[str, Any]] = ()
        """By param group, the numbers that the class counts in steps, as they are after this step."""

    # Called by the planner and by executors; see `StateOwner`.

    @property
    def places_state(self) -> bool:
        """Return whether the state may live in another memory than the parameters: if the class is element-wise.

        If not, warn once why.
        """
        because = self._updater.rule.why_not_placed(self.param_groups)
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

    def states_of(self, params: Sequence[torch.Tensor]) -> list[Param]:
        """Return the param group and the state bytes of each of `params`, including state to be created."""
        group_of = {id(param): index for index, group in enumerate(self.param_groups) for param in group["params"]}
        found: list[Param] = []
        for param in params:
            group = group_of.get(id(param))
            if group is None:  # user code removed the parameter from its group, so it is never updated
                found.append(Param(is_trained=True))
                continue
            found.append(replace(self._updater.rule.param_state(param, self.param_groups[group]), group=group))
        return found

    def work_bytes(self, *, of_one: bool) -> int:
        """Return the most bytes that `step()` holds at once beside weights, gradients and state, if it is one step for
        all parameters; if `of_one`, the most that it holds for a single parameter. 0 if plans count the work space of
        each update with its bucket."""
        found = 0
        for group in self.param_groups if not self.places_state else ():
            params = [param for param in group["params"] if param.requires_grad]
            for together in [[param] for param in params] if of_one else [params]:
                found = max(found, self._updater.rule.work_bytes(together, group))
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
        self._claim(self.param_groups[-1:])

    def _claim(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Own the state and the masters of the parameters of `groups`."""
        for group in groups:
            for param in group["params"]:
                claim_for_hybrid(param, self)
                claim_master(param, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer class, after all queued updates; state on disk is read into memory."""
        states = self.state
        for param in [param for param, entry in states.items() if not entry]:
            del states[param]
        found = super().state_dict()
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        names, state = saved_names(self._updater.rule, self.param_groups), dict(found["state"])
        for key, entry in state.items():
            if isinstance(key, int) and isinstance(entry, Mapping):
                param, group = params[key]
                kept = self.as_class(entry, param, group)
                state[key] = saved_entry(kept, param, () if self.has_plain_state(param, group) else names)
        return {**found, "state": state}

    def has_plain_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Return whether state dicts hold the state of `param` in `group` as plain tensors, which may have any shape:
        if it is updated whole, by one rank of several or by all of them."""
        return is_whole(param) and self._updater.rule.updates_whole(param, group)

    def as_class(self, entry: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `entry`, the state of `param` in `group`, as `updates_as` keeps it: statistics may be in lists."""
        return self._updater.rule.as_class(param, entry, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None without waiting: queued updates hold their gradients themselves. The clip coefficient
        that was stored for them is dropped.

        If `set_to_none` is False, gradients become zeros, after the queued updates that read them.
        """
        self._clip_factor = 1.0
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with torch.DisableTorchFunctionSubclass():
            super().zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `updates_as`, and move the state to where the plan wants it."""
        self.wait()
        own = (param for group in self.param_groups for param in group["params"])
        rule, entries = self._updater.rule, dict(state_dict["state"])
        saved: list[dict[str, Any]] = []
        for group in state_dict["param_groups"]:
            saved.append({**self.defaults, **group, "params": [*islice(own, len(group["params"]))]})
            for index, param in zip(group["params"], saved[-1]["params"], strict=False):
                if index in entries:
                    entries[index] = rule.from_class(param, entries[index], saved[-1])
        names = saved_names(rule, saved)
        early, is_accumulating = self._early, self._is_accumulating
        early.overwrite(were_updated=self._has_stepped)
        super().load_state_dict(
            {**state_dict, "state": {index: wrap_statistics(entry, names) for index, entry in entries.items()}}
        )
        self._early, self._is_accumulating = early, is_accumulating  # `__setstate__`, called above, replaced them
        group_of = {id(param): group for group in self.param_groups for param in group["params"]}
        rule = self._updater.rule
        for param, entry in list(self.state.items()):
            group = group_of[id(param)]
            if not rule.keeps(param, group):
                del self.state[param]
                continue
            as_saved = rule.updates_whole(param, group)
            loaded = unwrap_statistics(entry, param, stays=is_off_device(param), as_saved=as_saved)
            self.state[param] = rule.as_planned(param, loaded, group)
        self.follow([param for param in self.state if is_off_device(param)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        super().__setstate__(state)
        self._claim(self.param_groups)

    @_untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients, or queue their updates; return the loss of `closure`, if given.

        Raises GradientsChanged if the plan updates in the backward and a gradient was changed after the backward. No
        update runs in the backward before the first step, so the first step raises before any weight has changed.
        """
        if not self.places_state:
            params = (param for group in self.param_groups for param in group["params"])
            kept = next((param for param in params if param.grad is not None and has_master(param)), None)
            if kept is not None:
                raise master_ignored(kept, self, self._updater.rule.why_not_placed(self.param_groups))
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
        with torch.DisableTorchFunctionSubclass():  # which does not wait for queued updates to read their gradients
            self._check_once()
            self._is_checked = False
            if factor is not None:
                self._overflow.require_skipped()
            groups = scaled(self.param_groups, 1.0 if factor is None else factor)
            seen = self._early.check(groups)
            done = seen if self._has_stepped else frozenset()
            if factor is not None:
                left = [param for group in groups for param in group["params"] if param not in done]
                self._updater.update(left, groups, self.__dict__["state"])
                for group, counts in zip(self.param_groups, self._counts, strict=False):
                    group.update(counts)
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
    def update_in_backward(self, params: Sequence[torch.Tensor], arrived: Event | None) -> None:
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
            self._check_once()
            self._updater.update(own, self.param_groups, self.__dict__["state"], arrived)
            note_written(own, self)

    def _check_once(self) -> None:
        """Raise OptimizerNotTensorWise before the first update of a step that joins two parameters."""
        if not self._is_checked:
            self._counts = self._updater.rule.check_step(self.param_groups, self.__dict__["state"])
        self._is_checked = True

    @torch.no_grad()
    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state of `params` to where the active plan wants it; executors call this after a change of plan."""
        self._updater.follow(params, self.param_groups, self.state)

    # Clip gradients and unscale them.
    #
    #     clip_grad_norm_(norm)   stores the clip coefficient, by which the update multiplies gradients as it reads them
    #     GradScaler.step(self)   stores 1 / loss scale in the same way for float16 masters; changes nothing on overflow
    #
    # Gradients of parameters without a master are multiplied at once by torch's own ops: bitwise as in torch.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether `GradScaler` passes its scale to `step()`; `GradScaler` reads this before each step.

        True if a float16 parameter has a master: `GradScaler` refuses to unscale float16 gradients itself. If False,
        `GradScaler` unscales the gradients itself and skips `step()` on overflow, so that weights, state and
        step count stay unchanged. `GradScaler` looks for infinities after reading this property, so ranks agree on
        overflow here. This is a collective: all ranks must read the property together.

        Raises GradientsChanged if the backward has already updated parameters with scaled gradients.
        """
        self._early.refuse("a GradScaler asked to unscale its gradient")
        self._overflow.spread(self.param_groups)
        params = (param for group in self.param_groups for param in group["params"])
        return any(param.dtype == torch.float16 and has_master(param) for param in params)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the assignment: torch's fused optimizers assign True in their constructors."""

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, grad_scale: float = 1.0) -> torch.Tensor:
        """Clip gradients for the next step to the global norm `max_norm`; return their norm before clipping.

        Gradients of parameters with a master are read in fp32 or wider but not written: the update multiplies them.
        Other gradients are scaled at once. `grad_scale` is the present loss scale, `scaler.get_scale()`; the returned
        norm is the norm of the unscaled gradients.
        """
        mixed, plain = self._by_master()
        kinds = {is_dtensor(param) for param in plain}
        is_as_torch = not mixed and grad_scale == 1.0 and kinds == {False}
        known = known_squares([*mixed, *plain], norm_of if is_as_torch else squares_of)
        if is_as_torch:
            return clip_as_torch(plain, max_norm, known)
        # Ranks take this branch together if gradients are DTensors: their caches of norms may differ.
        clip_factor = self._take_clip_factor()
        squares = clip_factor**2 * sum_of_all_squares(mixed, known) + sum_of_all_squares(plain, known)
        is_double = any(param.dtype == torch.float64 for param in plain)
        dtype = torch.float64 if is_double else torch.float32
        norm = torch.tensor(squares**0.5 / grad_scale, dtype=dtype, device="cpu")
        # As torch does: without a branch, and not finite if the norm is not.
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._clip_factor, self._clipped = clip_factor * factor, GradientSnapshots(mixed)
        if factor != 1.0:
            _multiply_grads(plain, factor)
        return norm

    def _take_factor(self) -> float | None:
        """Return clip coefficient / loss scale, and reset the coefficient; None if a gradient overflowed."""
        clip_factor = self._take_clip_factor()
        given = vars(self)  # `GradScaler` sets both around `step()` if `_step_supports_amp_scaling`
        if float(given.get("found_inf", 0.0)):
            return None
        inverse_scale = 1.0 / float(given.get("grad_scale", 1.0))
        if inverse_scale != 1.0:  # else do not touch gradients: updates of this step may be queued already
            _multiply_grads(self._by_master()[1], inverse_scale)
        return clip_factor * inverse_scale

    def _take_clip_factor(self) -> float:
        """Return the stored clip coefficient, and reset it to 1.

        Returns 1 if all gradients that were clipped are gone: the coefficient of a skipped step must not apply to the
        next step.
        """
        factor, self._clip_factor = self._clip_factor, 1.0
        if factor == 1.0:
            return factor
        with torch.DisableTorchFunctionSubclass():  # compares identities, so no queued update is waited for
            return factor if self._clipped.any_remains() else 1.0

    def _by_master(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with gradients in two lists: with a master, and without."""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        mixed = [param for param in params if has_master(param)]
        return mixed, [param for param in params if not has_master(param)]


# ----------------------------------------------------------------------------------------------------------------------
# The norm of gradients, and their multiplication.
#
# The norm of a gradient that the backward has computed on the gradient's way to the host is not computed again: see
# `runtime.published.GradNormCache`.
#
#     squares_of   sum of squares, in double on the host, in fp32 on a device; float64 gradients in float64 on both
#     norm_of      bitwise equal to the norm that `torch.nn.utils.clip_grad_norm_` computes for a single gradient


def _multiply_grads(params: Sequence[nn.Parameter], factor: float) -> None:
    if params:
        torch._foreach_mul_(list(map(own_grad, params)), factor)  # pyright: ignore[reportPrivateImportUsage]
        in_parts = [param.grad for param in params if is_dtensor(param) and param.grad is not None]
        torch.autograd.graph.increment_version(in_parts)


_HELD_BY_FP32 = (2.0**-30, 2.0**60)
"""Between these norms, fp32 squares neither overflow nor vanish. Outside, a gradient on the host is summed again."""


def squares_of(grad: torch.Tensor) -> Squares:
    """Return the sum of squares of `grad` as a float if `grad` is on the host, else its norm as a device tensor."""
    is_double = grad.dtype == torch.float64
    if grad.device.type == "cpu" and not is_double and grad.is_contiguous():
        return sum_of_squares(flat(grad)) if grad.numel() else 0.0
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64 if is_double else torch.float32)
    return float(norm) ** 2 if grad.device.type == "cpu" else norm


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of `grad`, with its dtype, on its device."""
    return _foreach_norm([grad])[0]


def known_squares(params: Iterable[nn.Parameter], squares: SquaresOf) -> Mapping[int, Squares]:
    """Return the results of `squares` that the backward has cached, by the id of the parameter.

    Also ask the backwards of later steps to cache `squares` for all of `params`.
    """
    slots = {id(param): slot for param in params if (slot := slot_of(param)) is not None}
    found: dict[int, Squares] = {}
    for executor in dict.fromkeys(map(executor_of_slot, slots.values())):
        selected = {key: slot for key, slot in slots.items() if slot.sink is executor}
        known = executor.gradients.norm_cache.known(squares)
        found |= {key: known[slot.key] for key, slot in selected.items() if slot.key in known}
        executor.gradients.norm_cache.ask(selected.values(), squares)
    return found


def sum_of_all_squares(params: Sequence[nn.Parameter], known: Mapping[int, Squares]) -> float:
    """Return the sum of the squares of all gradients of `params`, each summed over the axes along which it is sharded.

    Gradients on a device cost a synchronisation for each mesh and set of axes.
    """
    squares = _own_squares((param for param in params if not cut_axes(param)), known)
    for sharded in by_mesh(params):
        by_axes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for param in sharded:
            by_axes.setdefault(cut_axes(param), []).append(param)
        for axes in sorted(by_axes):  # ranks may have the gradients in another order
            squares += sum_over_shards(_own_squares(by_axes[axes], known), by_axes[axes][0], axes)
    return squares


def _own_squares(params: Iterable[nn.Parameter], known: Mapping[int, Squares]) -> float:
    """Return the sum of squares over this rank's gradients of `params`, which may be shards."""
    total, computing = 0.0, []
    for param in params:
        squares = known[id(param)] if id(param) in known else squares_of(own_grad(param))
        if isinstance(squares, float):
            total += squares
        else:
            computing.append((param, squares))
    if not computing:
        return total
    for (param, _), norm in zip(computing, torch.stack([norm for _, norm in computing]).tolist(), strict=True):
        is_held = _HELD_BY_FP32[0] < norm < _HELD_BY_FP32[1] or own_grad(param).device.type != "cpu"
        total += norm**2 if is_held else float(squares_of(own_grad(param)))
    return total


def clip_as_torch(params: Sequence[nn.Parameter], max_norm: float, known: Mapping[int, Squares]) -> torch.Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_` does, but take cached norms from `known`; return the total norm.

    The bits can differ from torch only if gradients have several devices or dtypes, or if a cached norm was computed on
    another device than the gradient's.
    """
    if not known:
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    grads = {id(param): param.grad for param in params if param.grad is not None}
    norms = {key: norm for key, norm in known.items() if isinstance(norm, torch.Tensor)}
    unknown: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for key, grad in grads.items():
        if key not in norms:
            unknown.setdefault((grad.device, grad.dtype), {})[key] = grad
    for group in unknown.values():
        norms |= zip(group, _foreach_norm(list(group.values())), strict=True)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for key in grads:
        by_device.setdefault(norms[key].device, []).append(norms[key])
    first = next(iter(grads.values())).device
    total = torch.linalg.vector_norm(torch.cat([torch.stack(group).to(first) for group in by_device.values()]), 2.0)
    if not torch.isfinite(total):  # a device norm in fp32 may overflow although torch's norm on the host does not
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    if max_norm / (total + 1e-6) < 1.0:  # torch also multiplies by a factor of 1, which changes no finite number
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def _foreach_norm(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the 2-norm of each gradient, by the operator that `torch.nn.utils.clip_grad_norm_` calls."""
    return torch._foreach_norm(list(grads), 2.0)  # pyright: ignore[reportPrivateImportUsage]
