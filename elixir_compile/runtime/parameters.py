"""Parameters as users hold them: checked before they move to the host, and taken in again if they were replaced."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from elixir_compile.capture.modules import retire
from elixir_compile.errors import ElixirWarning, ParameterReplaced, UnsupportedModel
from elixir_compile.ops.aliases import aliases, held_by_others
from elixir_compile.ops.registry import Slot
from elixir_compile.ops.sites import Sites


def check_move(moving: Sequence[Slot], slots: Iterable[Slot], sites: Sites) -> None:
    """Before the parameters of `moving`, some of `slots`, get other memory on the host: refuse, or warn of, what would
    go on with the old memory.

    Raises ParameterReplaced if one shares memory with another parameter; the step is captured again, with both whole.
    Raises UnsupportedModel if somebody may have hooks on the autograd node of one, and it moves to another device.
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
                "it moves to the host and gets another autograd node there, and somebody holds the one that it has, "
                "whose hooks would not be called. Use `param.register_post_accumulate_grad_hook`, which moves along",
            )
    names = {slot.name for slot in moving}
    _warn_of_holders([name for name in held_by_others(named) if name in names])


def _warn_of_holders(names: Sequence[str]) -> None:
    """Warn that tensors which are no parameters hold the memory that the parameters `names` leave."""
    if names:
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"{some} move to the host, and other tensors hold the memory that they leave, as `model.state_dict()` or "
            "`param.data` taken before do: these neither follow the training nor free that memory. Take them again "
            "after the first step, or delete them before it.",
            ElixirWarning,
            stacklevel=2,
        )


def taken_in(sites: Sites, next_forward: int) -> list[Slot]:
    """Return the slots whose parameter was replaced, which read the new one now; it is not in its home yet.

    Raises ParameterReplaced, and has the step captured again, where a graph cannot read what is there.
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
