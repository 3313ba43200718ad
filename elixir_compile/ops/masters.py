"""Which parameters have an fp32 master, and what of it the parameter itself does not hold until an optimizer does.

    bfloat16   the parameter is the high half of its master; the rest is the low half, an int16
    float16    the rest is the whole master

`prepare` puts a rest here, the hybrid optimizer takes it as state. An optimizer that does not keep masters raises at
its step: it would change the parameter and leave the master behind.
"""

import weakref
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile.errors import MasterIgnored
from elixir_compile.ops.registry import slot_of
from elixir_compile.ops.shards import version

REST_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
"""The dtype of the rest, by that of the parameter."""
REST_NAMES = {torch.bfloat16: "master_low", torch.float16: "master"}
"""What optimizer state calls the rest, by the dtype of the parameter."""


@dataclass(slots=True)
class _Held:
    """A rest that no optimizer has taken yet."""

    rest: torch.Tensor | None
    version: int
    """Of the parameter, when the rest was right."""


_HELD = WeakTensorKeyDictionary()
_KEEPERS = WeakTensorKeyDictionary()
_ALL_KEEPERS: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def add_master(param: torch.Tensor, rest: torch.Tensor | None) -> None:
    """Note that `param`, bf16 or fp16, has a master: `rest` and itself, or itself alone where `rest` is None."""
    _HELD[param] = _Held(rest, version(param))


def has_master(param: torch.Tensor) -> bool:
    """Whether `param` has an fp32 master: not any more once it was cast, by `model.float()`."""
    return param.dtype in REST_NAMES and param in _HELD


def take_rest(param: torch.Tensor) -> torch.Tensor | None:
    """Return what `add_master` was given, once; None where the parameter was written since, and is its own master."""
    held = _HELD.get(param)
    if held is None:
        return None
    rest, held.rest = held.rest, None
    return rest if held.version == version(param) else None


def claim_master(param: torch.Tensor, keeper: Optimizer) -> None:
    """Note that `keeper` updates the master of `param`, if it has one or gets one, and whoever did so until now does
    not."""
    _KEEPERS[param] = weakref.ref(keeper)
    _ALL_KEEPERS.add(keeper)


def _require_keeper(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Before a step of any optimizer: raise MasterIgnored for a parameter whose master it does not keep."""
    if not _HELD:
        return
    with torch.DisableTorchFunctionSubclass():  # an update may be queued, and nobody reads here
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and has_master(param) and not _keeps(optimizer, param):
                    slot = slot_of(param)
                    name = "outside of every model" if slot is None else slot.name
                    raise MasterIgnored(name, str(param.dtype), type(optimizer).__name__, optimizer in _ALL_KEEPERS)


def _keeps(optimizer: Optimizer, param: torch.Tensor) -> bool:
    reference = _KEEPERS.get(param)
    keeper = None if reference is None else reference()
    if keeper is None and optimizer in _ALL_KEEPERS:  # one that was made later, a copy, is gone again
        claim_master(param, optimizer)
        return True
    return keeper is optimizer


register_optimizer_step_pre_hook(_require_keeper)
