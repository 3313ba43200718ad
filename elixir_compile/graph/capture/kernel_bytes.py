"""The bytes that the kernel of an op takes, where they may differ from those that tracing states.

```text
  meta kernel   results of the shapes and strides of the kernel                  what tracing states
  kernel        storages larger than the results, as `mse_loss` on a CPU         `KernelBytes.results_bytes`
                results whose size no meta kernel knows, as the reserve of an RNN
                copies in another layout, sums, temporaries of another dtype     `KernelBytes.workspace_bytes`
```

Which kernels may differ is a fact of the op; the bytes are measured, by whoever captures (`Captured.kernels`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import kernel_of, leaves_of, op_of, value_of
from elixir_compile.graph.capture.rewire import is_view
from elixir_compile.ir import Kernel

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

        def text_of(source: fx.Node) -> Any:
            return [*(self._text(source, leaf) for leaf in leaves_of(value_of(source))), self.unlike.get(source, "")]

        node = self.node
        parts = f" 1/{self.parts} along {self.result_dim}" if self.parts > 1 else ""
        return f"{node.target} {fx.map_arg((node.args, dict(node.kwargs)), text_of)}{parts}"

    def _text(self, source: fx.Node, value: object) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {self.layout_of(source, value)}"
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return str(compat.evaluate_size(value, self.sizes))
        return str(value)


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
        reads_integers = any(_has_integers(tensor) for source in node.all_input_nodes for tensor in _tensors(source))
        return not reads_integers or op in INDICES_OF
    if fused:
        return kernel_of(node) is Kernel.OPAQUE
    dtypes = {tensor.dtype for source in (node, *node.all_input_nodes) for tensor in _tensors(source)}
    return torch.Tag.pointwise not in op.tags or len(dtypes) > 1


def _has_integers(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value_of(node)) if isinstance(leaf, torch.Tensor)]
