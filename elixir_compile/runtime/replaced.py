"""Before a forward: parameters that were replaced since the step was captured are taken in, or refused by name."""

import torch
from torch import nn

from elixir_compile.capture.modules import retire
from elixir_compile.errors import ParameterReplaced
from elixir_compile.ops.registry import Slot
from elixir_compile.ops.sites import Sites


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
