"""One capture: its two FX graphs, how each of their values divides by the rows of the batch, and what kernels take."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import is_tangent, kernel_of, leaves_of, op_of, outputs_of, value_of
from elixir_compile.graph.capture.rewire import is_view
from elixir_compile.ir import Batched, Kernel, Phase

# ----------------------------------------------------------------------------------------------------------------------
# The bytes that the kernel of an op takes, where they may differ from those that tracing states.
#
#   meta kernel   results of the shapes and strides of the kernel                  what tracing states
#   kernel        storages larger than the results, as `mse_loss` on a CPU         `KernelBytes.results_bytes`
#                 results whose size no meta kernel knows, as the reserve of an RNN
#                 copies in another layout, sums, temporaries of another dtype     `KernelBytes.workspace_bytes`
#
# Which kernels may differ is a fact of the op; the bytes are measured, by whoever captures (`Captured.kernels`).


NEGLIGIBLE_BYTES = 4096
"""Smaller workspaces are left out of graphs: half of all ops turn a scalar into a tensor, in 12 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBytes:
    """The bytes that a kernel allocates."""

    results_bytes: tuple[int | None, ...]
    """The bytes of the storage of each tensor of the result, in order; None if the storage is that of an input."""
    workspace_bytes: int
    """The most bytes that it allocates at once beside its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """The call of a kernel, as far as its bytes depend on it."""

    node: fx.Node
    sizes: Mapping[str, int]
    """The values of the symbols of dynamic shapes."""
    unlike: Mapping[fx.Node, int] = field(default_factory=dict)
    """The bytes of the inputs that are themselves not as traced: the reserve of an RNN is empty in a trace."""
    parts: int = 1
    """The number of micro-batches of which the call takes one."""
    slices: Mapping[fx.Node, int] = field(default_factory=dict)
    """The dimension along which each of the inputs has its slices, for those that have some."""
    result_dim: int | None = None
    """The dimension along which the result has its slices; None if it has none."""

    def layout_of(self, source: fx.Node, tensor: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the shape and the strides of `tensor`, the input `source` or a part of it, in this call."""
        shape = [compat.evaluate_size(size, self.sizes) for size in tensor.shape]
        if source in self.slices and self.parts > 1:
            shape[self.slices[source]] //= self.parts
        return shape, [compat.evaluate_size(stride, self.sizes) for stride in tensor.stride()]

    def words(self) -> str:
        """Return a text that is equal for equal ops on equal shapes: the op, its numbers, and each of its tensors."""

        def text(source: fx.Node, value: object) -> str:
            if isinstance(value, torch.Tensor):
                return f"{value.dtype} {self.layout_of(source, value)}"
            if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
                return str(compat.evaluate_size(value, self.sizes))
            return str(value)

        def text_of(source: fx.Node) -> Any:
            return [*(text(source, leaf) for leaf in leaves_of(value_of(source))), self.unlike.get(source, "")]

        node = self.node
        parts = f" 1/{self.parts} along {self.result_dim}" if self.parts > 1 else ""
        return f"{node.target} {fx.map_arg((node.args, dict(node.kwargs)), text_of)}{parts}"


Kernels = Callable[[KernelCall], KernelBytes | None]
"""Returns the bytes of a kernel; None if they are those that tracing stated, or are not known."""


def as_traced(call: KernelCall) -> KernelBytes | None:
    """Return None: every kernel takes the bytes that tracing stated. The `Kernels` of a plan without a device."""
    return None


_LIBRARIES = ("aten", "mkldnn")
"""Op libraries of torch itself. The ops of other libraries are not run on made-up inputs: they may read or write files,
or wait for other ranks."""
_CHOSEN_BY_A_LIBRARY = (
    "aten.convolution",
    "aten._convolution",
    "aten.cudnn_",
    "aten._cudnn_",
    "aten.miopen_",
    "aten._thnn_fused_",
    "aten._fft_",
    "aten._scaled_dot_product_cudnn_attention",
)
"""Ops of accelerators whose library chooses the workspace or the size of a result, in fused programs too."""
INDICES_OF = {torch.ops.aten.embedding_dense_backward.default: (1, 2)}
"""Ops that read indices and are run all the same: the arguments that are the indices, and their number."""


def may_differ(node: fx.Node, *, fused: bool) -> bool:
    """Return whether the kernel of `node` may take other bytes than tracing stated.

    If the program is `fused`, only opaque ops have kernels of their own. A pointwise op whose tensors all have one
    dtype allocates its result and nothing else; tensors of other dtypes are copied first.

    On an accelerator, a reduction that many blocks of threads share allocates their parts: 18 MiB for the sums of the
    columns of 1,024 x 2,304 numbers (H200, torch 2.11). Ops that read integers are not run there: an index out of
    range, which a kernel of a CPU reports, ends the use of a CUDA device.
    """
    op = op_of(node)
    if not compat.is_op_overload(op) or op.namespace not in _LIBRARIES or is_view(node):
        return False
    devices = {tensor.device.type for source in (node, *node.all_input_nodes) for tensor in _tensors(source)}
    if not any(_tensors(source) for source in node.all_input_nodes):
        return False
    if devices != {"cpu"}:
        if fused or torch.Tag.pointwise in op.tags:
            return str(op).startswith(_CHOSEN_BY_A_LIBRARY)
        read = {tensor.dtype for source in node.all_input_nodes for tensor in _tensors(source)}
        reads_integers = any(not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool) for dtype in read)
        return not reads_integers or op in INDICES_OF
    if fused:
        return kernel_of(node) is Kernel.OPAQUE
    dtypes = {tensor.dtype for source in (node, *node.all_input_nodes) for tensor in _tensors(source)}
    return torch.Tag.pointwise not in op.tags or len(dtypes) > 1


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value_of(node)) if isinstance(leaf, torch.Tensor)]


# ----------------------------------------------------------------------------------------------------------------------
# How the values of a captured step are made of their values in micro-batches.
#
#   EACH(d)  one slice per micro-batch along dimension d      SAME  equal for all      SUM  the sum over micro-batches
#
# The dimension of the slices belongs to a node, because two views of one storage may have it in different places.
# `Storage.batched` and `Op.mixes` have the rest. `batch.step_states` finds the states.


@dataclass(frozen=True, slots=True)
class State:
    """How a value is made of its values in micro-batches, and where its slices are."""

    batched: Batched
    dim: int = 0
    """The dimension of the slices if `batched` is EACH, else 0."""
    is_total: bool = False
    """Whether the value, which is SAME, is computed from a sum over the micro-batches. Within the lap of the sum it
    exists only behind the last micro-batch; for later laps it is as any other SAME value."""

    @property
    def is_each(self) -> bool:
        """Whether the value has one slice per micro-batch."""
        return self.batched is Batched.EACH


SAME = State(Batched.SAME)
SUM = State(Batched.SUM)
TOTAL = State(Batched.SAME, is_total=True)
States = State | tuple[State, ...]
"""The state of a node: one state, or one for each of its results."""


def each(dim: int) -> State:
    """Return the state of a value with its slices along `dim`."""
    return State(Batched.EACH, dim)


def states_in(states: States) -> tuple[State, ...]:
    """Return the state of each result of a node."""
    return (states,) if isinstance(states, State) else states


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """The state of each value of a graph, and the ops of the graph that mix the batch."""

    states: Mapping[fx.Node, States]
    """The state of each node with a value."""
    mixes: Mapping[fx.Node, str]
    """Why an op needs the whole batch, or a view of its result."""
    narrowed: Mapping[tuple[fx.Node, fx.Node], int]
    """Pairs of a node and a SAME value that it reads in slices, with the dimension of the slices."""

    apart: frozenset[fx.Node] = frozenset()
    """The views of inputs that do not keep the slices together, so that they are taken of the whole inputs."""
    num_conflicts: int = 0
    """How many ops mix the batch because slices of two values do not match."""

    def batched(self, node: fx.Node, index: int) -> Batched:
        """Return how tensor `index` of the value of `node` is made of its values in micro-batches."""
        states = states_in(self.states.get(node, SAME))
        value = value_of(node)
        values = value if isinstance(value, (tuple, list)) else (value,)
        places = [at for at, v in enumerate(values) if isinstance(v, torch.Tensor) for _ in compat.dense_parts(v)]
        return states[places[index] if len(states) == len(values) else 0].batched


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """The states of the values of a captured step."""

    batch: int | torch.SymInt
    """The rows of the batch, 1 if the step has no batch that can be divided; all values are then SAME."""
    forward: Walked
    backward: Walked
    undivided: str = ""
    """Why the batch that the inputs share cannot be divided, empty if it can be."""

    def half(self, phase: Phase) -> Walked:
        """Return the states of the values of the forward or the backward."""
        return self.forward if phase is Phase.FORWARD else self.backward

    @property
    def states(self) -> Mapping[fx.Node, States]:
        """The state of each node of both halves."""
        return {**self.forward.states, **self.backward.states}


_NOTHING = Walked(states={}, mixes={}, narrowed={})
UNDIVIDED = StepStates(batch=1, forward=_NOTHING, backward=_NOTHING)
"""The states of a step without a batch."""

# ----------------------------------------------------------------------------------------------------------------------
# The FX graphs of one capture.


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The FX graphs of one capture, after partitioning, and the names of the parameters they read."""

    name: str
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int
    """The number of leading outputs of the forward that go to the caller; the others are saved for the backward."""
    param_names: Mapping[int, str]
    fused: bool
    """If True, Inductor compiles the regions and fuses kernels."""
    kernels: Kernels = as_traced
    """Knows the bytes of kernels that may take others than tracing stated."""

    @property
    def backward_module(self) -> fx.GraphModule:
        """The backward. Raises TypeError if the capture has none, because it trains nothing."""
        if self.backward is None:
            raise TypeError(f"{self.name} has no backward")
        return self.backward

    @property
    def saved(self) -> tuple[Argument, ...]:
        """The outputs of the forward for the backward: the ticket, then saved values."""
        return outputs_of(self.forward.graph)[self.num_outputs :]


def returns_loss(captured: Captured) -> bool:
    """Return whether a result of `captured` through which it is trained is a single number."""
    placeholders = captured.backward_module.graph.find_nodes(op="placeholder")
    values = (node.meta.get("val") for node in placeholders if is_tangent(node))
    return any(isinstance(value, torch.Tensor) and value.ndim == 0 for value in values)


def copied(half: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of `half` of a capture, whose graph can be changed."""
    return compat.graph_module(half, copy.deepcopy(half.graph))
