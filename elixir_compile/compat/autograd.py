"""What the autograd engine is doing, and what hangs on a parameter."""

import sys
from collections.abc import Callable
from enum import Enum, auto

import torch


def backward_pass_id() -> int:
    """Return the number of the backward pass that runs on this thread, -1 outside of one.

    `torch._C._current_graph_task_id`, torch 2.11 to 2.13. Gone: AttributeError at the first backward.
    """
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the current backward pass ends without an exception.

    `Variable._execution_engine.queue_callback`, as FSDP2 uses it, torch 2.11 to 2.13. Gone: AttributeError at the
    first backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether the user hooked the gradient of leaf `param`.

    `Tensor._backward_hooks` and `Tensor._post_accumulate_grad_hooks`, torch 2.11 to 2.13. Gone: AttributeError at the
    first backward.
    """
    return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)


class AccumulateNode:
    """The autograd node that adds to `.grad` of a leaf which requires a gradient; at most one exists for each leaf."""

    def __init__(self, leaf: torch.Tensor) -> None:
        with torch.enable_grad():
            self._reader = leaf.view_as(leaf).grad_fn
        # torch 2.13 holds a reference to the object of a node that other nodes lead to: `_reader` always does.
        self._node = self._reader.next_functions[0][0]

    def num_references(self) -> int:
        """Return how many references Python code holds to the node."""
        return sys.getrefcount(self._node)

    @property
    def is_held_by_others(self) -> bool:
        """Whether somebody else holds the node, as whoever registers a hook on it must: torch lets go of it otherwise.

        torch gives Python one object per node for as long as somebody holds that, torch 2.11 to 2.13. If it gave a new
        one each time, hooks on the node would be called without a gradient.
        """
        return self.num_references() > _REFERENCES_OF_OURS


_REFERENCES_OF_OURS = AccumulateNode(torch.zeros(1, requires_grad=True)).num_references()


class Asked(Enum):
    """What the running backward does with the gradient of a leaf."""

    NOT = auto()
    """Nothing: it was asked for the gradients of other tensors."""
    TO_ACCUMULATE = auto()
    """It adds it to `.grad`."""
    TO_RETURN = auto()
    """`torch.autograd.grad` returns it."""


def asked_for(leaf: torch.Tensor) -> Asked:
    """Return what the backward that runs on this thread does with the gradient of `leaf`, which requires one.

    `torch._C._will_engine_execute_node`, as `torch.autograd.graph.register_multi_grad_hook` uses it, torch 2.11 to
    2.13. It raises RuntimeError for the accumulate node of a leaf whose gradient `torch.autograd.grad` returns. Gone:
    AttributeError at the first backward.
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return Asked.TO_ACCUMULATE if torch._C._will_engine_execute_node(node) else Asked.NOT
    except RuntimeError:
        return Asked.TO_RETURN


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `tensor` stands for many tensors at once, as gradients do in a backward with `is_grads_batched=True`.

    `torch._C._functorch.is_legacy_batchedtensor` and `is_batchedtensor`, torch 2.11 to 2.13. Gone: AttributeError at
    the first `torch.autograd.grad` of a parameter.
    """
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)
