"""The parameters with an fp32 master, and the rest of each master until an optimizer takes it as state.

    bfloat16   the parameter is the high half of its master; the rest is the low half, an int16
    float16    the rest is the full master

`prepare` adds the rests, and the hybrid optimizer takes them as state. A step of an optimizer that keeps no masters
raises MasterIgnored, because it would change the parameter and not the master.
"""

import weakref
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile.base.errors import MasterIgnored
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import version

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


def _require_keeper(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raise MasterIgnored if `optimizer` would update a parameter whose master it does not keep.

    Called before each step of any optimizer.
    """
    if not _HELD:
        return
    with torch.DisableTorchFunctionSubclass():  # reads no value, so it need not wait for a queued update
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and has_master(param) and not _keeps(optimizer, param):
                    slot = slot_of(param)
                    name = "outside of every model" if slot is None else slot.name
                    raise MasterIgnored(name, str(param.dtype), type(optimizer).__name__, optimizer in _ALL_KEEPERS)


def _keeps(optimizer: Optimizer, param: torch.Tensor) -> bool:
    reference = _KEEPERS.get(param)
    keeper = None if reference is None else reference()
    if keeper is None and optimizer in _ALL_KEEPERS:  # a later keeper, such as a copy of the optimizer, was freed
        claim_master(param, optimizer)
        return True
    return keeper is optimizer


register_optimizer_step_pre_hook(_require_keeper)
