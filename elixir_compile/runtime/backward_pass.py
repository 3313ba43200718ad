"""One backward pass of autograd: the gradients that its graphs have made so far, and who takes them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedBackward
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir import BucketId, Calls
from elixir_compile.runtime.distributed.sharded import ShardReduce
from elixir_compile.runtime.lanes import Event, Lanes, Transfer


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
    computed: Event | None = None
    """After the compute of the last graph that ran, and of all before it."""
    arriving: list[Transfer] = field(default_factory=list)
    """Copies to the host, kept until they are done."""
    suspended: list[tuple[dict[int, Any], dict[int, Any]]] = field(default_factory=list)
    """By parameter, the dictionary of its hooks after accumulation, and the hooks that `_no_hook` replaces in it."""

    @contextmanager
    def in_order(self, lanes: Lanes) -> Iterator[None]:
        """Let the compute of the block follow that of earlier blocks of this backward pass; its end follows the last.

        Autograd runs each part of a backward on the stream of its forward, which a user may have chosen, and orders
        only the gradients that it handles itself.
        """
        lanes.compute_waits(self.computed)
        yield
        self.computed = lanes.mark_compute()

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

    def suspend_hooks(self, slots: Iterable[Slot]) -> None:
        """Keep autograd from calling hooks after accumulation until `resume_hooks`: the gradients of `slots` are only
        there after the last call of a step."""
        for slot in slots:
            hooks = compat.hooks_after_accumulation(slot.param)
            kept = {key: hook for key, hook in hooks.items() if hook is not _no_hook}
            if kept:
                self.suspended.append((hooks, kept))
                hooks.update(dict.fromkeys(kept, _no_hook))

    def resume_hooks(self) -> None:
        """Give the suspended hooks back, except those that the user removed meanwhile."""
        for hooks, kept in self.suspended:
            hooks.update({key: hook for key, hook in kept.items() if key in hooks})
        self.suspended.clear()

    def run_missed_hooks(self, slots: Iterable[Slot]) -> None:
        """Run the hooks after accumulation of those `slots` whose gradient autograd did not take in this backward."""
        for slot in slots:
            if slot not in self.handed:
                for hook in list(compat.hooks_after_accumulation(slot.param).values()):
                    hook(slot.param)

    def goes_through_autograd(self, slot: Slot) -> bool:
        """Whether autograd itself takes the gradient of the slot's parameter."""
        return self.asks_for(slot) is compat.Asked.TO_RETURN or slot.has_hooks


def refuse_hooks(model: str, slots: Iterable[Slot], step: Calls) -> None:
    """Raise UnsupportedBackward if `slots` of `model` have a hook before accumulation, or one on their autograd node.

    In a `step` of several calls, the gradient of a parameter is there after the last backward: autograd would call such
    a hook with None in all others. Hooks after accumulation run once.
    """
    for slot in slots:
        if not (compat.has_hooks_before_accumulation(slot.param) or slot.has_node_holders):
            continue
        where = "the autograd node of" if slot.has_node_holders else "the gradient of"
        instead = "Use `register_post_accumulate_grad_hook`, which runs once, in the last backward of the step"
        raise UnsupportedBackward(model, f"a hook on {where} {slot.name} in a step of {step}", instead)


def _no_hook(param: torch.Tensor) -> None:
    """Stand in for a hook after accumulation."""


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
