"""Compile the regions of a program, equal regions only once.

Two regions are equal if their graphs have the same ops, constants, shapes, strides, dtypes and devices. They may read
different parameters and activations, so the twelve layers of a transformer are compiled once.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import parameter
from elixir_compile.graph.rewrite.regions import RECOMPUTED, RegionGraph
from elixir_compile.ir import Lane, Phase
from elixir_compile.runtime.lanes import Lanes
from elixir_compile.runtime.recording import Ledger


class CompiledRegion(torch.nn.Module):
    """A compiled region: a call takes a list of inputs, which it empties, and returns the outputs in order."""

    def __init__(
        self,
        run: Callable[[list[Any]], Any],
        num_ops: int,
        strides: Sequence[compat.Strides],
        constants: Sequence[object],
    ) -> None:
        super().__init__()
        self.constants = constants
        """The constants of the graph, kept alive with the region because its key has their identity."""
        self._code = run
        self.room_bytes: int | None = None
        """Device bytes that the plan leaves free at its peak, in which the first run may time kernels; None if no plan
        says."""
        self._has_run = False
        self.num_ops = num_ops
        self.strides = strides
        """Strides of the outputs if Inductor chose them, else empty."""

    def run(self, box: list[Any]) -> Any:
        """Return the outputs for the inputs in `box`, which is emptied. The first run times kernels to choose among."""
        if self._has_run:
            return self._code(box)
        with nullcontext() if self.room_bytes is None else compat.timed_within(self.room_bytes):
            results = self._code(box)
        self._has_run = True
        return results

    def forward(self, box: list[Any]) -> Any:
        return self.run(box)

    def extra_repr(self) -> str:
        return f"{self.num_ops} ops"


class PlacedRegion(torch.nn.Module):
    """A compiled region at its place in a program; each run is a span of the compute lane under `label`."""

    def __init__(self, compiled: CompiledRegion, lanes: Lanes, ledger: Ledger, label: str) -> None:
        super().__init__()
        self.compiled = compiled
        self._run = lanes.computes(compiled.run)
        self._ledger = ledger
        self._label = label

    def forward(self, box: list[Any]) -> Any:
        with self._ledger.span(Lane.COMPUTE, self._label):
            return self._run(box)


class RegionCompiler:
    """Compiles the regions of a model by Inductor, or runs them op by op if `inner` is "aot_eager"."""

    def __init__(self, inner: str) -> None:
        self._inner = inner
        self._compiled: dict[str, CompiledRegion] = {}
        self._kernels = compat.Kernels()

    def lower(
        self,
        region: RegionGraph,
        visible: Sequence[int],
        *,
        is_inference: bool = False,
        room_bytes: int | None = None,
    ) -> CompiledRegion:
        """Return `region` compiled, or the earlier compilation of an equal region.

        `visible` holds the positions of outputs that keep the strides of the graph. `room_bytes` are the device bytes
        that the plan leaves free at its peak; None if no plan says.
        """
        key = f"{region_key(region)}\n{list(visible)}"
        if key not in self._compiled:
            self._compiled[key] = self._compile(region, visible, is_inference)
        self._compiled[key].room_bytes = None if self._inner == "aot_eager" else room_bytes
        return self._compiled[key]

    def start_kernels(self) -> None:
        """Start compiling the C++ kernels of the regions lowered so far, without waiting for them."""
        self._kernels.start()

    def lower_plain(self, gm: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        """Return `gm`, a graph without managed parameters, compiled as torch would compile it."""
        if self._inner == "aot_eager":
            return compat.boxed(_op_by_op(gm))
        return compat.lower_plainly_with_inductor(gm, examples, **options)

    def _compile(self, region: RegionGraph, visible: Sequence[int], is_inference: bool) -> CompiledRegion:
        num_ops = sum(node.op == "call_function" for node in region.module.graph.nodes)
        constants = [getattr(region.module, str(n.target)) for n in region.module.graph.find_nodes(op="get_attr")]
        if self._inner == "aot_eager":
            return CompiledRegion(_op_by_op(region.module), num_ops, (), constants)
        examples = [node.meta["val"] for node in region.inputs]
        static = [index for index, node in enumerate(region.inputs) if node.target is parameter]
        run, strides = compat.lower_with_inductor(
            region.module,
            examples,
            visible,
            self._kernels,
            repeated=[node.name for node in region.module.graph.nodes if node.meta.get(RECOMPUTED)],
            static_input_idxs=static,
            is_backward=region.phase is Phase.BACKWARD,
            is_inference=is_inference,
        )
        return CompiledRegion(run, num_ops, strides, constants)


def region_key(region: RegionGraph) -> str:
    """Return a text that two regions share if and only if they are equal."""
    number: dict[fx.Node, int] = {}
    lines = [str(region.phase)]
    for node in region.module.graph.nodes:
        number[node] = len(number)
        args = map_aggregate((node.args, node.kwargs), lambda a: f"%{number[a]}" if isinstance(a, fx.Node) else a)
        lines.append(f"{node.op} {_target(region.module, node)} {args!r} {_layout(node)}")
    return "\n".join(lines)


def _target(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "get_attr":
        return str(id(getattr(module, str(node.target))))
    return str(node.target) if node.op == "call_function" else ""


def _layout(node: fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return "; ".join(
        f"{v.dtype} {tuple(v.shape)} {v.stride()} {v.device} {v.requires_grad} {tuple(compat.lazy_bits(v))}"
        if isinstance(v, torch.Tensor)
        else str(v)
        for v in values
    )


def _op_by_op(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function that runs `module` op by op; it takes a list of inputs, which it empties."""
    graph = fx.Graph()
    box = graph.placeholder("box")
    values: dict[fx.Node, fx.Node] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for index, node in enumerate(placeholders):
        values[node] = graph.call_method("__getitem__", (box, index))
    graph.call_method("clear", (box,))
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            values[node] = graph.node_copy(node, lambda source: values[source])
    graph.output(
        map_aggregate(module.graph.output_node().args[0], lambda n: values[n] if isinstance(n, fx.Node) else n)
    )
    return with_own_memory(fx.GraphModule(module, graph)).forward


# ----------------------------------------------------------------------------------------------------------------------
# Ops that copy all the memory behind their first argument, written so that they copy that argument alone.
#
#   slice_scatter(x[8:16], src, ...)     torch's kernel     all of x, of which the result is a view again
#                                        here               8 rows
#
# The results of `copy`, `slice_scatter`, `select_scatter` and `diagonal_scatter` have the strides of the first
# argument, and torch makes them by a copy of its whole storage (`at::clone_preserve_strides`, torch 2.11 to 2.13). So
# in n micro-batches, which read slices of whole values, an op took n times its bytes, one on a gathered parameter took
# its bucket, and one on rows of a data set the data set. Inductor lowers these ops to kernels that write the result
# alone.
#
# An argument whose elements share memory, as those of `x.unfold(0, 3, 1)`, goes to torch's kernel: in its result, too,
# a write of one element is one of all that share its place.


_aten = torch.ops.aten


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements of `tensor` may share a place in memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * max(0, size - 1)
    return False


_BY_PLACE = (_aten.as_strided.default, _aten.as_strided_scatter.default)
"""Ops that count places from the start of the memory of a tensor."""


_SCATTERS: dict[Any, Any] = {
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.select_scatter.default: _aten.select.int,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
}
"""By scatter, the op that returns the part into which it writes."""


def _in_own_memory(target: Any) -> Callable[..., torch.Tensor]:
    """Return `copy` or a scatter, `target`, written so that it allocates its result alone."""
    part_of = _SCATTERS.get(target)

    def made(into: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _overlaps(into):
            return target(into, source, *args, **kwargs)
        if part_of is None:
            return torch.empty_like(into).copy_(source, *args, **kwargs)
        result = into.clone()
        part_of(result, *args, **kwargs).copy_(source)
        return result

    return made


_IN_OWN_MEMORY = {target: _in_own_memory(target) for target in (_aten.copy.default, *_SCATTERS)}


def in_own_memory(target: Any) -> Any:
    """Return a function with the results of the op `target` that allocates no more than these; `target` itself, if it
    does not copy the memory behind an argument. The results are dense, in the order of the strides of that argument."""
    return _IN_OWN_MEMORY.get(target, target)


def with_own_memory(module: fx.GraphModule) -> fx.GraphModule:
    """Return `module`, a graph that runs op by op, with its ops `in_own_memory`, also in the graphs that it runs.

    A graph stays as it is if some op of it counts places from the start of a memory: a result would begin elsewhere.
    """
    nodes = module.graph.nodes
    if any(node.target in _BY_PLACE for node in nodes):
        return module
    bodies = {
        str(node.target): body
        for node in module.graph.find_nodes(op="get_attr")
        if isinstance(body := getattr(module, str(node.target)), fx.GraphModule)
    }
    if not bodies and _IN_OWN_MEMORY.keys().isdisjoint(node.target for node in nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.target = in_own_memory(node.target)
    made = fx.GraphModule(module, graph)
    for name, body in bodies.items():
        setattr(made, name, with_own_memory(body))
    return made
