"""Connect optimizers with the slots of the parameters that they update, and keep the rest of each fp32 master until an
optimizer takes it as state.
"""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile.base.errors import IncompleteStep, MasterIgnored, OptimizerTooEarly
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import version
from elixir_compile.ir import Param

# ----------------------------------------------------------------------------------------------------------------------
# The parameters with an fp32 master, and the rest of each master until an optimizer takes it as state.
#
#     bfloat16   the parameter is the high half of its master; the rest is the low half, an int16
#     float16    the rest is the full master
#
# `prepare` adds the rests, and the hybrid optimizer takes them as state. A step of an optimizer that keeps no masters
# raises MasterIgnored, because it would change the parameter and not the master. Such are torch's optimizers, and
# hybrid optimizers whose class updates all parameters at once.


REST_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
"""The dtype of the rest, by the dtype of the parameter."""
REST_NAMES = {torch.bfloat16: "master_low", torch.float16: "master"}
"""The name of the rest in optimizer state, by the dtype of the parameter."""


@dataclass(slots=True)
class _Held:
    """The rest of a master; None if an optimizer has taken it, or if there is none."""

    rest: torch.Tensor | None
    version: int
    """The version of the parameter for which the rest is correct."""


_HELD = WeakTensorKeyDictionary()
_KEEPERS = WeakTensorKeyDictionary()
_ALL_KEEPERS: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def add_master(param: torch.Tensor, rest: torch.Tensor | None) -> None:
    """Record that the bf16 or fp16 `param` has a master: `param` and `rest`, or `param` alone if `rest` is None."""
    _HELD[param] = _Held(rest, version(param))


def has_master(param: torch.Tensor) -> bool:
    """Return whether `param` has an fp32 master. It has none after a cast to fp32, as by `model.float()`."""
    return param.dtype in REST_NAMES and param in _HELD


def updated_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype in which an optimizer updates `param`: fp32 if it has a master, else its own."""
    return torch.float32 if has_master(param) else param.dtype


def take_rest(param: torch.Tensor) -> torch.Tensor | None:
    """Remove and return the rest of the master of `param`.

    Return None if there is none, or if `param` was written since `add_master`: then `param` itself is the master.
    """
    held = _HELD.get(param)
    if held is None:
        return None
    rest, held.rest = held.rest, None
    return rest if held.version == version(param) else None


def claim_master(param: torch.Tensor, keeper: Optimizer) -> None:
    """Record that the optimizer `keeper` updates the master of `param`, now or later, and no other optimizer does."""
    _KEEPERS[param] = weakref.ref(keeper)
    _ALL_KEEPERS.add(keeper)


def master_ignored(param: torch.Tensor, optimizer: Optimizer, because: str = "") -> MasterIgnored:
    """Return the error of a step of `optimizer` that would not update the master of `param`; `because` says why its
    class cannot."""
    slot = slot_of(param)
    name, is_kept = "outside of every model" if slot is None else slot.name, optimizer in _ALL_KEEPERS and not because
    return MasterIgnored(name, str(param.dtype), type(optimizer).__name__, is_kept, because)


# ----------------------------------------------------------------------------------------------------------------------
# Connect optimizers with the slots of the parameters that they update.
#
# A hybrid optimizer claims its parameters, so that a plan may place their state. Hooks around the steps of any
# optimizer count the versions of the updated parameters, and refuse an optimizer made before `prepare` sharded its
# parameters.


_HYBRID = WeakTensorKeyDictionary()
_REPLACED = WeakTensorKeyDictionary()


class StateOwner(Protocol):
    """The interface of a hybrid optimizer for the planner and the executor."""

    @property
    def places_state(self) -> bool:
        """Whether the plan may give the state another home than the parameters."""
        ...

    def states_of(self, params: Sequence[torch.Tensor]) -> Sequence[Param]:
        """Return group and state, present or future, of each of `params`, by the optimizer's own indices of groups."""
        ...

    def work_bytes(self, *, of_one: bool) -> int:
        """Return the most bytes that a step of all parameters at once holds beside weights, gradients and state; if
        `of_one`, the most bytes that it holds for a single parameter. 0 if its updates run bucket by bucket."""
        ...

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state of `params` to the homes in the placements of their buckets."""
        ...

    def update_in_backward(self, params: Sequence[torch.Tensor], arrived: Any) -> None:
        """Update the bucket of `params`, whose gradients this backward has published.

        The gradients are in memory after `arrived`, an event of `runtime.lanes`, or now if it is None.
        """
        ...


def claim_for_hybrid(param: torch.Tensor, owner: StateOwner) -> None:
    """Make the hybrid optimizer `owner` the owner of the state of `param`, so a plan counts the state, and may place it
    if the owner does."""
    _HYBRID[param] = weakref.ref(owner)


class PlainState:
    """The bytes of state that optimizers keep beside parameters of a model, where no plan places it: plain ones, and
    hybrid ones of a class that is not element-wise."""

    def __init__(self) -> None:
        self.is_counted = False
        """Whether plans count it: it was known before the first plan, or a step exceeded its budget with it."""
        self._found: weakref.WeakKeyDictionary[Optimizer, Mapping[str, int]] = weakref.WeakKeyDictionary()

    def note(self, optimizer: Optimizer, nbytes: Mapping[str, int]) -> None:
        """Note that `optimizer` keeps `nbytes` of state, by the name of the parameter, in place of what it kept."""
        self._found[optimizer] = nbytes

    def expect(self, optimizer: Optimizer, nbytes: Mapping[str, int]) -> None:
        """Let plans count `nbytes`, by the name of the parameter, that `optimizer` will keep where it has none yet."""
        self._found[optimizer] = {**nbytes, **self._found.get(optimizer, {})}
        self.is_counted = True

    def all_by_name(self) -> dict[str, int]:
        """Return the bytes that all live optimizers keep, by the name of the parameter."""
        found: dict[str, int] = {}
        for nbytes in list(self._found.values()):
            for name, own in nbytes.items():
                found[name] = found.get(name, 0) + own
        return {name: own for name, own in found.items() if own}

    def by_name(self) -> dict[str, int]:
        """Return `all_by_name()` if plans count it, else nothing."""
        return self.all_by_name() if self.is_counted else {}


def has_state(param: torch.Tensor) -> bool:
    """Return whether a hybrid optimizer keeps state for `param` already."""
    reference = _HYBRID.get(param)
    owner = None if reference is None else reference()
    return owner is not None and param in vars(owner)["state"]  # the attribute waits for queued updates


def are_optimized(params: Sequence[torch.Tensor]) -> bool:
    """Return whether any optimizer in the process has one of `params`; walks through all objects of the process."""
    wanted = set(map(id, params))
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    owned = (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])
    return any(id(param) in wanted for param in owned)


def planned_states(params: Sequence[torch.Tensor]) -> Mapping[int, Param]:
    """Return group and state of `params` in hybrid optimizers, by the id of the parameter, also of those that place no
    state.

    A parameter of another optimizer is left out.
    """
    found: dict[int, Param] = {}
    first_group = 0
    for owner, own in owners_of(params).items():
        states = [replace(state, group=first_group + state.group) for state in owner.states_of(own)]
        found.update(zip(map(id, own), states, strict=True))
        first_group = 1 + max(state.group for state in states)
    return found


def let_state_follow(params: Sequence[torch.Tensor]) -> None:
    """Make the hybrid optimizers move the state of `params` to the homes in the present plan.

    Runs before the first step under a new plan: the state is twice as large as the parameters, so in its old home it
    could exceed a budget.
    """
    for owner, own in _owned(params).items():
        owner.follow(own)


def let_update(params: Sequence[torch.Tensor], arrived: Any) -> None:
    """Tell the hybrid optimizers that the gradients of `params` were published; see `StateOwner.update_in_backward`."""
    for owner, own in _owned(params).items():
        owner.update_in_backward(own, arrived)


def place_state(params: Sequence[torch.Tensor]) -> bool:
    """Return whether hybrid optimizers own all of `params`, and let plans place their state."""
    return sum(map(len, _owned(params).values())) == len(params)


def update_work_bytes(params: Sequence[torch.Tensor], device: torch.device) -> int:
    """Return the most bytes that a step of a hybrid optimizer of `params`, of a class whose state no plan places, holds
    on `device` at once beside weights, gradients and state. Optimizers step one after another.

    Ops on lists of tensors hold bytes for each tensor of the device. On a CPU all are there; on an accelerator those of
    one count, because which parameters are there is what a plan decides.
    """
    of_one = device.type != "cpu"
    return max((owner.work_bytes(of_one=of_one) for owner in owners_of(params)), default=0)


def _owned(params: Sequence[torch.Tensor]) -> dict[StateOwner, list[torch.Tensor]]:
    """Return the hybrid optimizers of `params` that let plans place their state, each with its own of `params`."""
    return {owner: own for owner, own in owners_of(params).items() if owner.places_state}


def owners_of(params: Sequence[torch.Tensor]) -> dict[StateOwner, list[torch.Tensor]]:
    """Return the hybrid optimizers of `params`, each with its own of `params`."""
    owned: dict[StateOwner, list[torch.Tensor]] = {}
    for param in params:
        reference = _HYBRID.get(param)
        owner = None if reference is None else reference()
        if owner is not None:
            owned.setdefault(owner, []).append(param)
    return owned


def _note_update(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Increment the versions of the updated parameters, because fused kernels do not.

    Runs after each step of any optimizer. Versions tell stale copies of parameters.
    """
    with torch.DisableTorchFunctionSubclass():  # reads no value, so it need not wait for a queued update
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    note_written([param for param in params if slot_of(param) is not None], optimizer)


def note_written(params: Sequence[torch.Tensor], optimizer: object) -> None:
    """Increment the versions of `params`, which `optimizer` has updated, or whose updates it has queued.

    Not of those that hybrid updates write in their file: these note the version themselves, and every other version
    says that a user has written the parameter, which its file does not know.
    """
    written = []
    for param in params:
        slot, reference = slot_of(param), _HYBRID.get(param)
        owner = None if reference is None else reference()
        is_in_file = slot is not None and slot.is_updated_in_file
        if not (is_in_file and owner is optimizer and owner is not None and owner.places_state):
            written.append(param)
    torch.autograd.graph.increment_version(written)


def note_replaced(param: torch.Tensor) -> None:
    """Record that `prepare` replaced `param` in its model by a sharded parameter."""
    _REPLACED[param] = True


def _check_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raise an error if a step of `optimizer` would not train a model as its user expects. Runs before each step of any
    optimizer.

    Raises MasterIgnored if it would update a parameter whose master it does not keep; OptimizerTooEarly if it has
    parameters that `prepare` replaced by sharded parameters, as it was made before and would never update the model;
    IncompleteStep if a model with its parameters has gradients of some calls of a step only.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with torch.DisableTorchFunctionSubclass():  # reads no value, so it need not wait for a queued update
        for param in params if _HELD else ():
            if param.grad is None or not has_master(param):
                continue
            reference = _KEEPERS.get(param)
            keeper = None if reference is None else reference()
            if (
                keeper is None and optimizer in _ALL_KEEPERS
            ):  # a later keeper, such as a copy of the optimizer, was freed
                claim_master(param, optimizer)
            elif keeper is not optimizer:
                raise master_ignored(param, optimizer)
        # A replaced parameter with a gradient is still in use, for example tied into a module beside the model.
        if len(_REPLACED) and any(param in _REPLACED and param.grad is None for param in params):
            raise OptimizerTooEarly(type(optimizer).__name__)
    incomplete: list[IncompleteStep] = []
    slots = map(slot_of, params)
    for owner in {id(slot.sink): slot.sink for slot in slots if slot is not None}.values():
        try:
            owner.require_whole_step()
        except IncompleteStep as error:  # every model must begin a new step
            incomplete.append(error.renewed())
    for error in incomplete:
        raise error.renewed()


register_optimizer_step_pre_hook(_check_step)
register_optimizer_step_post_hook(_note_update)
