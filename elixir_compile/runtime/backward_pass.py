"""One backward pass of autograd: the gradients that its graphs have made so far, and who takes them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from elixir_compile import compat
from elixir_compile.ir import BucketId
from elixir_compile.ops.registry import Slot
from elixir_compile.runtime.distributed.sharded import ShardReduce
from elixir_compile.runtime.lanes import Transfer


@dataclass(slots=True)
class BackwardPass:
    """A backward pass, from its first graph of this executor to its end."""

    asks_for_all: bool
    """Whether the backward adds the gradient of every leaf to `.grad`, and does not ask for chosen tensors."""
    asked: dict[int, compat.Asked] = field(default_factory=dict)
    """By slot, unless `asks_for_all`: how the backward uses the gradient."""
    pending: dict[int, tuple[Slot, torch.Tensor]] = field(default_factory=dict)
    """By slot, the sum of the gradients that graphs have made so far; on the device, or offloaded to the host."""
    offloaded: set[int] = field(default_factory=set)
    """Slots whose sum an offload has taken to the host."""
    handed: list[Slot] = field(default_factory=list)
    """Slots of the parameters whose gradient autograd adds to `.grad`."""
    reducing: dict[BucketId, ShardReduce] = field(default_factory=dict)
    """The last reduce of each sharded bucket."""
    arriving: list[Transfer] = field(default_factory=list)
    """Copies to the host, kept until they are done."""

    def made_on(self, device: torch.device, slots: Iterable[Slot]) -> list[torch.Tensor]:
        """Return the gradients of `slots` that graphs have made so far and that are on `device`."""
        found = (self.pending.get(slot.key) for slot in slots)
        return [made[1] for made in found if made is not None and made[1].device == device]

    def asks_for(self, slot: Slot) -> compat.Asked:
        """Return how the backward uses the gradient of the slot's parameter."""
        if self.asks_for_all:
            return compat.Asked.TO_ACCUMULATE
        if slot.key not in self.asked:
            self.asked[slot.key] = _asked_for(slot)
        return self.asked[slot.key]

    def asks_for_any(self, slots: Iterable[Slot]) -> bool:
        """Return whether the backward asks for the gradient of any of `slots`."""
        return self.asks_for_all or any(self.asks_for(slot) is not compat.Asked.NOT for slot in slots)

    def goes_through_autograd(self, slot: Slot) -> bool:
        """Whether autograd itself takes the gradient of the slot's parameter."""
        return self.asks_for(slot) is compat.Asked.TO_RETURN or slot.has_hooks


def _asked_for(slot: Slot) -> compat.Asked:
    """Return how the running backward, which asks for chosen tensors, uses the slot's gradient."""
    with torch.DisableTorchFunctionSubclass():
        found = compat.asked_for(slot.param) if slot.param.requires_grad else compat.Asked.NOT
    if found is compat.Asked.NOT and any(handle.requires_grad for handle in slot.handles):
        # Code without a gate reads the handle itself. Autograd runs the handle's accumulate node only in a backward for
        # every leaf.
        leaves = (handle for handle in slot.handles if handle.requires_grad)
        if any(compat.asked_for(leaf) is compat.Asked.TO_ACCUMULATE for leaf in leaves):
            return compat.Asked.TO_ACCUMULATE
    return found
