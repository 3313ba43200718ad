"""What the autograd engine is doing, and what hangs on a parameter."""

from collections.abc import Callable

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
