"""The state of the running backward pass, and the hooks of a parameter."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum, auto
from types import FrameType
from typing import Any

import torch


def backward_pass_id() -> int:
    """Return the number of the running backward pass of this thread, -1 if none runs.

    `torch._C._current_graph_task_id`: torch 2.11 to 2.13. Gone: AttributeError at the first backward.
    """
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the current backward pass ends without an exception.

    `Variable._execution_engine.queue_callback`, as FSDP2 uses it: torch 2.11 to 2.13. Gone: AttributeError at the
    first backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def packs_saved_tensors() -> bool:
    """Return whether `torch.autograd.graph.saved_tensors_hooks` pack what the running forward saves for its backward.

    `torch._C._autograd._top_saved_tensors_default_hooks`: torch 2.11 to 2.13. Gone: ImportError at the first forward in
    micro-batches.
    """
    from torch._C._autograd import _top_saved_tensors_default_hooks

    return _top_saved_tensors_default_hooks(True) is not None


def saved_behind(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that autograd keeps for the backward of the ops that made `results`.

    What hooks packed is left out, and no hook is called: one of activation checkpointing would run its forward again.

    `_raw_saved_*` of a node, as the notes of `torch.autograd.graph.saved_tensors_hooks` use it, and
    `torch._C._autograd.SavedTensor.data`: torch 2.11 to 2.13. Gone: nothing is found.
    """
    nodes: list[Any] = [result.grad_fn for result in results]
    found: list[torch.Tensor] = []
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [other for other, _ in node.next_functions]
        for name in dir(node):
            if not name.startswith("_raw_saved_"):
                continue
            with suppress(RuntimeError):  # its backward has run
                saved = getattr(node, name)
                datas = [
                    getattr(each, "data", None) for each in (saved if isinstance(saved, (list, tuple)) else [saved])
                ]
                found += [data for data in datas if isinstance(data, torch.Tensor)]
    return found


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Return whether the user registered a hook on the gradient of leaf `param`.

    `Tensor._backward_hooks` and `Tensor._post_accumulate_grad_hooks`: torch 2.11 to 2.13. Gone: AttributeError at the
    first backward.
    """
    return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)


def has_hooks_before_accumulation(param: torch.Tensor) -> bool:
    """Return whether the user registered a hook by `param.register_hook`, which may change the gradient; see
    `has_gradient_hooks`."""
    return bool(param._backward_hooks)


def hooks_after_accumulation(param: torch.Tensor) -> dict[int, Callable[[torch.Tensor], None]]:
    """Return the hooks of `param.register_post_accumulate_grad_hook`, in the dictionary that autograd reads.

    Autograd calls them in each backward that reaches the leaf, whether or not there is a gradient. See
    `has_gradient_hooks`.
    """
    return param._post_accumulate_grad_hooks or {}


def _nodes_are_made() -> AbstractContextManager[None]:
    """Return a context in which an op on a leaf makes an autograd node even if torch runs below autograd.

    Eager backwards of `cond`, `map`, `scan` and `while_loop` run their graphs there.

    `torch._C._ForceDispatchKeyGuard`, `DispatchKeySet`, `_dispatch_tls_local_exclude_set` and `_include_set`, as
    `torch._higher_order_ops` uses them: checked on torch 2.13. Gone: AttributeError at the import of this module.
    """
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)  # the difference is that of all devices
    excluded = torch._C._dispatch_tls_local_exclude_set() - autograd
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    return guard


def let_gradients_follow(leaf: torch.Tensor) -> None:
    """Let the gradients of graphs that read `leaf` until now arrive on the device that it has by then.

    A leaf gets another accumulate node with another device. Graphs keep the node that they lead to, which adds
    gradients on the old device, and refuses hooks that change the device, but not hooks that take the gradient: torch
    2.11 to 2.13. So a hook adds the gradient to `.grad` as the node would, in place, and the node then calls the user's
    hooks after accumulation. Without a graph the node is freed when this returns.
    """
    if not leaf.requires_grad:
        return
    with torch.enable_grad(), _nodes_are_made():
        node = torch.autograd.graph.get_gradient_edge(leaf).node

    def add(grads: Sequence[torch.Tensor | None]) -> tuple[None] | None:
        (grad,) = grads
        if grad is None or not leaf.requires_grad or grad.device == leaf.device:
            return None
        arrived, total = grad.to(leaf.device), leaf.grad
        if total is None:
            leaf.grad = arrived
        elif total.is_sparse and not arrived.is_sparse:
            leaf.grad = arrived + total
        else:
            with torch.no_grad():
                total.add_(arrived)
        return (None,)

    node.register_prehook(add)


def is_trial_of_scan() -> bool:
    """Return whether the running op belongs to a turn that an eager `scan` runs to learn the shapes of its results.

    It runs that turn again, so an effect of the op would happen twice. `generic_scan` of torch 2.11 keeps in its local
    variable `dummy_carry` what that turn returned; torch 2.13 runs each turn once. Gone: False.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_scan = "dummy_carry" in code.co_varnames and code.co_filename.endswith("_higher_order_ops/scan.py")
        if is_scan and "dummy_carry" not in frame.f_locals:
            return True
        frame = frame.f_back
    return False


class AccumulateNode:
    """The autograd node that adds to `.grad` of a leaf. A leaf has at most one; it must require a gradient."""

    def __init__(self, leaf: torch.Tensor) -> None:
        with torch.enable_grad(), _nodes_are_made():
            self._reader = torch.autograd.graph.get_gradient_edge(torch.ops.aten.alias.default(leaf)).node
        # torch 2.13 holds a reference to the Python object of a node if other nodes lead to it. `_reader` always leads
        # to this node, so the count below is the same whether or not the user's graph does.
        self._node = self._reader.next_functions[0][0]

    def num_references(self) -> int:
        """Return how many references Python code holds to the node."""
        return sys.getrefcount(self._node)

    @property
    def is_held_by_others(self) -> bool:
        """Whether other Python code holds the node. Code that registers a hook on it must, or torch frees the node.

        torch keeps a single Python object for a node as long as Python code holds the object: torch 2.11 to 2.13. If
        torch made a new object at each access, hooks on the node would be called without a gradient.
        """
        return self.num_references() > _REFERENCES_OF_OURS


_REFERENCES_OF_OURS = AccumulateNode(torch.zeros(1, requires_grad=True)).num_references()


class Asked(Enum):
    """The use of the gradient of a leaf in the running backward."""

    NOT = auto()
    """None: the caller asked for the gradients of other tensors."""
    TO_ACCUMULATE = auto()
    """The backward adds the gradient to `.grad`."""
    TO_RETURN = auto()
    """`torch.autograd.grad` returns the gradient."""


def asked_for(leaf: torch.Tensor) -> Asked:
    """Return how the backward on this thread uses the gradient of `leaf`. The leaf must require a gradient.

    `torch._C._will_engine_execute_node`, as `torch.autograd.graph.register_multi_grad_hook` uses it: torch 2.11 to
    2.13. It raises RuntimeError for the accumulate node of a leaf if `torch.autograd.grad` returns the leaf's gradient.
    Gone: AttributeError at the first backward.
    """
    with _nodes_are_made():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return Asked.TO_ACCUMULATE if torch._C._will_engine_execute_node(node) else Asked.NOT
    except RuntimeError:
        return Asked.TO_RETURN


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a batch of tensors under vmap, as gradients are with `is_grads_batched=True`.

    `torch._C._functorch.is_legacy_batchedtensor` and `is_batchedtensor`: torch 2.11 to 2.13. Gone: AttributeError at
    the first `torch.autograd.grad` of a parameter.
    """
    from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]  (stubs)

    return _functorch.is_legacy_batchedtensor(tensor) or _functorch.is_batchedtensor(tensor)


def keeps_tangents() -> bool:
    """Return whether a compiled backward holds the gradients of its outputs until it returns.

    Autograd makes a gradient of zeros for an output without one, as the logits beside a loss. AOTAutograd's backward
    holds it in a tuple of arguments: torch 2.11. torch 2.13 drops the tuple before the first op.
    """
    return torch.__version__ < "2.13"


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which ops know nothing of the running `torch.func.grad`, `vmap` and the like.

    `torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack`: torch 2.11 to 2.13. Gone: ImportError when eager
    code reads a parameter whose home is the host.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
