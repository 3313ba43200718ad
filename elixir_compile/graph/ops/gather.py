"""The ops `elixir::gather`, which Dynamo captures for a parameter, and `elixir::reduce`, its backward.

`gather(handle, size, stride, key)` returns the gathered parameter on the compute device. `handle` is a tensor of a
single element that carries `requires_grad`, a leaf during capture (see `Gate`). The parameter is no input of Dynamo's
graph, so its device, dtype and placement can change and no guard fails. AOTAutograd gets most parameters as inputs
(`graph/capture/rewire.py`) and traces the ops for the others; for tracing, both ops are functional. A compiled
graph contains neither op, because the rewriter replaces them by the actions of the schedule. Eager code (evaluation,
`generate`, code outside of compiled graphs) runs the ops themselves.

A gate is the autograd node between parameters and their handles.

    w, b   -->  gate  -->  handle of w, handle of b  -->  gather ...  -->  loss

A compiled graph reads handles and passes the gradient of a parameter to `GradientSink`, not to autograd. The gate makes
the parameters reachable from the loss, so that `loss.backward(inputs=[p])` and `torch.autograd.grad(loss, [p])` find
`p`. In a backward the gate runs after all graphs that read its handles. It returns the gradients that autograd itself
accumulates or returns, and None for the gradients that the sink publishes.

Dynamo captures leaf handles, which stay the same tensors. A call of the graph passes the handles of the gate in their
place.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.base.errors import ElixirWarning
from elixir_compile.graph.ops.registry import GradientSink, Slot, slot_by_key

_LIBRARY = torch.library.Library("elixir", "DEF")
_LIBRARY.define("gather(Tensor handle, int[] size, int[] stride, int key) -> Tensor")
_LIBRARY.define("reduce(Tensor grad, int key) -> Tensor")


def _reduce(grad: torch.Tensor, key: int) -> torch.Tensor:
    slot = slot_by_key(key)
    if not compat.is_trial_of_scan():
        slot.sink.gradients.accumulate(slot, grad)
    return grad.new_zeros(1)


def _gather_fake(handle: torch.Tensor, size: Sequence[int], stride: Sequence[int], key: int) -> torch.Tensor:
    # The key of a gather is a constant, so a graph with gathers reads the same parameters wherever it runs.
    compat.trace_each_region()
    return handle.new_empty_strided(size, stride)


def _setup_context(ctx, inputs, output) -> None:
    ctx.key = inputs[3]
    # Autograd keeps a parameter alive if it is deleted before the backward, so the context keeps the slot. Not during
    # tracing: the graph, and with it the slot, would outlive the model.
    ctx.slot = slot_by_key(inputs[3]) if type(inputs[0]) is torch.Tensor else None


# Between the graphs of a model with graph breaks, Dynamo would compile these functions with their collectives.
_gather = torch.compiler.disable(lambda handle, size, stride, key: slot_by_key(key).gather())
_LIBRARY.impl("gather", _gather, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce", torch.compiler.disable(_reduce), "CompositeExplicitAutograd")
torch.library.register_fake("elixir::gather", _gather_fake, lib=_LIBRARY)
torch.library.register_fake("elixir::reduce", lambda grad, key: grad.new_empty(1), lib=_LIBRARY)
torch.library.register_autograd(
    "elixir::gather",
    lambda ctx, grad: (torch.ops.elixir.reduce(grad, ctx.key), None, None, None),
    setup_context=_setup_context,
    lib=_LIBRARY,
)

GATHER = torch.ops.elixir.gather.default
REDUCE = torch.ops.elixir.reduce.default


class Gate:
    """Handles of `slots`, through which autograd reaches the parameters. All slots belong to the same executor."""

    def __init__(self, slots: Sequence[Slot], untracked: Sequence[Slot] = ()) -> None:
        self.slots = tuple(slots)
        self._untracked = tuple(untracked)
        """The slots whose gradients the captured graph does not compute, because they were frozen."""
        self._generation = -1
        self._frozen: tuple[Slot, ...] = ()
        self._handles: tuple[torch.Tensor | None, ...] = ()
        self._is_entered = False
        self._has_begun = False

    def disconnect(self) -> None:
        """Drop the handles, whose autograd graph keeps the parameters alive. `handles` makes new handles."""
        self._handles, self._generation = (), -1

    @property
    def is_current(self) -> bool:
        """Whether no parameter moved, and no frozen parameter was thawed, since the handles were made."""
        # If the data of a parameter moves to another device, torch makes a new accumulate node for it.
        return all(slot.sink.buckets.generation == self._generation for slot in self.slots[:1]) and not any(
            slot.param.requires_grad for slot in self._frozen
        )

    def handles(self) -> tuple[torch.Tensor | None, ...]:
        """Return a handle for each slot, None if the parameter is frozen."""
        if not self.slots or self.is_current:
            return self._handles
        owner = self.slots[0].sink
        # `DisableTorchFunctionSubclass`, because nothing here reads a value, so it need not wait for a queued update.
        with torch.DisableTorchFunctionSubclass(), torch.enable_grad():
            trained = [slot for slot in self.slots if slot.param.requires_grad]
            made: dict[int, torch.Tensor] = {}
            for slot in trained:
                slot.find_node()
            if trained:
                params = [slot.param for slot in trained]
                outputs = _GateNode.apply(trained, owner.gradients, *params, owner.gradients.sentinel)
                made = {slot.key: handle for slot, handle in zip(trained, outputs, strict=True)}
        self._frozen = tuple(slot for slot in self.slots if slot.key not in made)
        self._handles = tuple(made.get(slot.key) for slot in self.slots)
        self._generation = owner.buckets.generation
        return self._handles

    def call(
        self,
        run: Callable[..., Any],
        op_by_op: Callable[..., Any] | None,
        positions: Sequence[int],
        args: Sequence[Any],
    ) -> Any:
        """Call `run`, a compiled graph, with the handles of the gate in place of the leaf handles at `positions`.

        `positions` are in the order of the slots. If a parameter was thawed since the capture, call the captured graph
        `op_by_op` instead, which computes the gradient of that parameter too; Dynamo captures the next call again.
        """
        self._has_begun = False
        self._is_entered = torch.is_grad_enabled()
        if not self._is_entered:
            return run(*args)
        values = self._connected(args, positions)
        with torch.DisableTorchFunctionSubclass():
            thawed = [slot.name for slot in self._untracked if slot.param.requires_grad]
            for slot in self._untracked:
                slot.follow_thaw()
        if op_by_op is not None and thawed:
            warnings.warn(
                f"{', '.join(thawed)} began to require a gradient after the step was captured, so this forward runs op "
                "by op, without a plan; the next one is captured again. To keep to the plan, call the compiled model "
                "once under `torch.no_grad()` before.",
                ElixirWarning,
                stacklevel=4,
            )
            return op_by_op(*values)
        try:
            return run(*values)
        except _MovedError:
            pass
        return run(*self._connected(args, positions))

    def begin(self, prepare: Callable[[], None]) -> None:
        """Call `prepare` before the forward of a `call`. If parameters moved, the `call` restarts with new handles."""
        if not self._has_begun:
            prepare()
            if self._is_entered and not self.is_current:
                self._has_begun = True
                raise _MovedError

    def _connected(self, args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        values = list(args)
        for position, handle in zip(positions, self.handles(), strict=True):
            if handle is not None:
                values[position] = handle
        return values


class _GateNode(torch.autograd.Function):
    """The gate in autograd. It saves no tensor, so it can run in any number of backward passes.

    It has only weak references to slots and executor.
    """

    @staticmethod
    def forward(
        ctx: Any, slots: Sequence[Slot], gradients: GradientSink, *params_and_sentinel: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.slots = [weakref.ref(slot) for slot in slots]
        ctx.gradients = weakref.ref(gradients)
        # No op reads a handle, so all handles of a dtype share an element.
        memory: dict[torch.dtype, torch.Tensor] = {}
        for slot in slots:
            if slot.param.dtype not in memory:
                memory[slot.param.dtype] = torch.zeros(1, dtype=slot.param.dtype, device=slot.device)
        return tuple(memory[slot.param.dtype].detach() for slot in slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        slots, gradients = [slot() for slot in ctx.slots], ctx.gradients()
        given = [None] * len(slots) if gradients is None else gradients.hand_over(slots)
        return (None, None, *given, None)


class _MovedError(Exception):
    """Parameters moved after the handles of this forward were made."""
