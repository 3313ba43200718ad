"""Check parameters before they move to the host, and adopt parameters with which users replaced others."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from elixir_compile.capture.modules import retire
from elixir_compile.errors import ElixirWarning, ParameterReplaced, UnsupportedModel
from elixir_compile.ops.aliases import aliases, held_by_others
from elixir_compile.ops.reads import Sites
from elixir_compile.ops.registry import Slot


def check_move(moving: Sequence[Slot], slots: Iterable[Slot], sites: Sites) -> None:
    """Find users of the old memory of parameters before they move to the host: raise an error, or warn.

    `moving` are the slots, among all `slots` of the model, whose parameters get new memory on the host.

    Raises ParameterReplaced if a moving parameter shares memory with another parameter; the step is captured again with
    both unmanaged. Raises UnsupportedModel if a moving parameter changes its device and its autograd node may have
    hooks.
    """
    if not moving:
        return
    named = [(slot.name, slot.param) for slot in slots]
    found = aliases(named)
    for slot in moving:
        if slot.name in found:
            retire(sites)
            raise ParameterReplaced(slot.name, f"it shares memory with {found[slot.name]}")
        if slot.own.device.type != "cpu" and slot.has_node_holders:
            raise UnsupportedModel(
                slot.name,
                "it moves to the host and gets another autograd node there, but other code holds its present node, "
                "whose hooks would not be called. Use `param.register_post_accumulate_grad_hook`, which moves along",
            )
    names = {slot.name for slot in moving}
    _warn_of_holders([name for name in held_by_others(named) if name in names])


def _warn_of_holders(names: Sequence[str]) -> None:
    """Warn that tensors other than parameters keep the memory that the parameters `names` leave."""
    if names:
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"{some} move to the host, and other tensors hold the memory they leave, such as an earlier "
            "`model.state_dict()` or `param.data`. These tensors do not follow the training and keep that memory "
            "allocated. Take them again after the first step, or delete them before it.",
            ElixirWarning,
            stacklevel=2,
        )


def adopt_replaced(sites: Sites, next_forward: int) -> list[Slot]:
    """Make graphs read the parameters with which users replaced others, and return the slots of these parameters.

    The new parameters are not in their home yet. `next_forward` is the number of the next forward.

    Raises ParameterReplaced if no graph can read the new value; the step is captured again then.
    """
    moved = sites.moved()
    for site in moved:
        there = site.params.get(site.name)
        if sites.may_take(site.slot, there):
            continue
        if isinstance(there, torch.Tensor) and not isinstance(there, nn.Parameter):
            raise ParameterReplaced(site.slot.name, "a plain tensor is in its place", is_temporary=True)
        retire(sites)
        raise ParameterReplaced(site.slot.name, "it is gone" if there is None else "another is in its place")
    return list(sites.take(moved, next_forward))
