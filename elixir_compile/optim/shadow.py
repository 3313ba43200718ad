"""An instance of an optimizer class that stands for another one and holds other tensors.

It has the attributes of the optimizer it stands for, as they are when it is made; nobody's hooks run for it.
"""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

_OWN = frozenset(
    {"state", "param_groups", "step", "_rule", "_line", "_placer", "_early", "_overflow"}
    | {"_is_accumulating", "_has_stepped", "_has_warned"}
)
"""Attributes that no shadow takes: what the optimizer holds, a `step` that a scheduler wrapped, what `Hybrid` adds."""


def attributes_of(optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the attributes of `optimizer` that its class may read in a step."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OWN}


def transient_optimizer(cls: type[Optimizer], attributes: Mapping[str, Any], group: dict[str, Any]) -> Optimizer:
    """Return an instance of `cls` that holds `group` and nothing else."""
    optimizer = cls.__new__(cls)
    hooks = {name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    vars(optimizer).update(attributes, **hooks, param_groups=[group], state=defaultdict(dict))
    return optimizer


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the `step` of `cls` without the hooks that torch wraps around it once an instance exists."""
    step = cls.step
    return inspect.unwrap(step, stop=lambda inner: not getattr(inner, "hooked", False))
