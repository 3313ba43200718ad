"""Compile the regions of a program, equal regions only once, and run each at its place: whole, or in micro-batches.

Two regions are equal if their graphs have the same ops, constants, shapes, strides, dtypes and devices. They may read
different parameters and activations, so the twelve layers of a transformer are compiled once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import parameter
from elixir_compile.graph.rewrite.micro_batches import DividedGraph, Filled, Kept, Read, Size, Summed
from elixir_compile.graph.rewrite.regions import RECOMPUTED, RegionGraph
from elixir_compile.ir import Lane, Phase, sizes
from elixir_compile.ir.schedule import rows_of_micro_batches
from elixir_compile.runtime.lanes import Lanes
from elixir_compile.runtime.recording import Ledger
from elixir_compile.runtime.saved import (
    ArrivingView,
    InParts,
    LeavingStorage,
    LeavingView,
    SavedActivations,
    View,
    copy_into,
    kept_part,
    viewed,
)


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
# Run a region once per micro-batch: slices of its inputs go in, whole tensors and sums come out.
#
#   for each micro-batch j      body(slice j of each input)  -->  slice j of each whole result, part j of each sum
#
# A result that only regions in micro-batches read stays in parts, if the plan counts on it (see `runtime.saved`).
#
# Parts of 16 bits add up in fp32, and their sum is rounded once. Offloaded activations leave the device and arrive on
# it slice by slice, if the plan counts on it (see `runtime.saved`).
#
# The number of rows may be dynamic. Each run then cuts its own batch, see `ir.schedule`: the micro-batches of a run
# differ by at most one row, and a short batch has fewer of them.


_SEED_STEP = 0x9E3779B9
"""The seeds of two micro-batches differ by a multiple of this: 2**32 over the golden ratio, as in Philox."""
_SHORT = (torch.bfloat16, torch.float16)


class DividedRegion(torch.nn.Module):
    """A region at its place in a program that runs in micro-batches; a run is a span of the compute lane."""

    def __init__(
        self,
        divided: DividedGraph,
        parts: tuple[CompiledRegion | None, CompiledRegion, CompiledRegion | None],
        lanes: Lanes,
        ledger: Ledger,
        label: str,
        saved: SavedActivations,
    ) -> None:
        """`parts` are the compiled head, body and tail of `divided`; activations leave the device through `saved`."""
        super().__init__()
        self._divided = divided
        head, body, tail = parts
        self._head = None if head is None else lanes.computes(head.run)
        self._body = lanes.computes(body.run)
        self._tail = None if tail is None else lanes.computes(tail.run)
        self._lanes = lanes
        self._ledger = ledger
        self._label = label
        self._saved = saved

    def forward(self, box: list[Any]) -> Any:
        with self._ledger.span(Lane.COMPUTE, self._label):
            divided = self._divided
            values = list(box)
            box.clear()
            symbols = {name: values[place] for name, place in divided.symbols}
            values += [_at(size, symbols) for size in divided.numbers]
            if self._head is not None:
                values += self._head([_whole(values[place]) for place in divided.head_reads])
            arriving = list(dict.fromkeys(value.source for value in values if isinstance(value, ArrivingView)))
            results = _Results(divided, symbols, self._saved, self._lanes)
            self._lanes.touches(_tensors_in(values))  # slices in other strides are copies, and seeds are sums
            for number, cut in enumerate(cuts_of(divided, symbols)):
                for storage in arriving:
                    storage.begin(number)
                inputs = [slice_of(values[read.place], read, number, cut) for read in divided.body_reads]
                for storage in arriving:
                    storage.release()
                results.add(number, cut, list(self._body(inputs)))
            values += results.finished()
            for view in divided.views:
                values.append(viewed(values[view.place], view.layout, divided.micro_batches))
            if self._tail is not None:
                values += self._tail([_whole(values[place]) for place in divided.tail_reads])
            return tuple(values[place] for place in divided.outputs)

    def extra_repr(self) -> str:
        most = "at most " if isinstance(self._divided.batch, str) else ""
        return f"{most}{self._divided.micro_batches} micro-batches"


class _Results:
    """The results of the micro-batches so far."""

    def __init__(
        self, divided: DividedGraph, symbols: Mapping[str, int], saved: SavedActivations, lanes: Lanes
    ) -> None:
        """`symbols` are the values of the dynamic sizes of the whole batch."""
        self._lanes = lanes
        self._divided = divided
        self._symbols = symbols
        self._saved = saved
        self._wholes: list[torch.Tensor | None] = []
        """The memory of each whole tensor; None if it leaves in slices."""
        self._leaving: dict[int, LeavingStorage] = {}
        """The storages that leave in slices, by the index of their memory."""
        self._values: list[Any] = [None] * len(divided.results)
        self._dtypes: list[torch.dtype | None] = [None] * len(divided.results)

    def add(self, number: int, cut: "Cut", parts: list[Any]) -> None:
        """Add the results of micro-batch `number`, which has the rows of `cut`, and empty `parts`."""
        for place, memory in enumerate(self._divided.wholes if number == 0 else ()):
            numel = _at(memory.numel, self._symbols)
            if memory.group:
                nbytes, num = numel * memory.dtype.itemsize, self._divided.micro_batches
                self._leaving[place] = self._saved.begin_leaving(memory.group, nbytes, num)
                self._wholes.append(None)
            else:
                self._wholes.append(torch.empty(numel, dtype=memory.dtype, device=memory.device))
        for storage in self._leaving.values():
            storage.begin()
        self._lanes.touches(_tensors_in(parts), _tensors_in(self._values))
        kept: dict[int, torch.Tensor] = {}
        seen: set[int] = set()
        for place, result in enumerate(self._divided.results):
            part, parts[place] = parts[place], None
            if isinstance(result, Filled):
                self._fill(place, result, number, cut, part)
            elif isinstance(result, Kept):  # `kept` has a part of this micro-batch for each memory so far
                layout = result.layout
                if number == 0:
                    self._values[place] = InParts([], layout.dim)
                part = kept_part(part, layout, kept.get(layout.memory))
                kept.setdefault(layout.memory, part)
                self._values[place].tensors.append(part)
            elif isinstance(result, Summed):
                self._sum(place, number, part, seen)
            else:
                self._values[place] = part
        for storage in self._leaving.values():
            storage.send(number)

    def _fill(self, place: int, result: Filled, number: int, cut: "Cut", part: torch.Tensor) -> None:
        shape, strides = ([_at(size, self._symbols) for size in sizes] for sizes in (result.shape, result.stride))
        if number == 0:
            self._values[place] = self._whole(result, shape, strides)
        if result.is_copied:
            value = self._values[place]
            if isinstance(value, LeavingView):
                slice_of_whole = value.source.part(value.view, result.dim)
            else:
                slice_of_whole = cut.slice_of(value, result.dim)
            copy_into(slice_of_whole, part, shape, strides)

    def _whole(self, result: Filled, shape: Sequence[int], stride: Sequence[int]) -> "torch.Tensor | LeavingView":
        """Return the whole value of `result`: a tensor to fill, or the view of a storage that leaves in slices."""
        memory, dtype = self._wholes[result.whole], self._divided.wholes[result.whole].dtype
        offset = _at(result.offset, self._symbols)
        view = compat.MemoryView(dtype=dtype, shape=tuple(shape), stride=tuple(stride), offset=offset, bits=result.bits)
        if memory is not None:
            return view.over(memory.untyped_storage())
        return LeavingView(self._leaving[result.whole], View(0, view))

    def _sum(self, place: int, number: int, part: torch.Tensor, seen: set[int]) -> None:
        """Add `part` to a sum. `seen` are the addresses of the memory of the sums before it, of this micro-batch.

        Eight micro-batches of 256 tokens of a Llama with 35 million parameters spend 1.6 % of a step here: 12 bytes for
        each parameter and micro-batch. A matrix product that adds into its result would save most of it, but round
        differently.
        """
        if number > 0:
            self._values[place].add_(part)
            return
        self._dtypes[place] = part.dtype
        # Later parts are added in place, so each sum needs memory of its own. A compiler may return one memory twice.
        address = part.untyped_storage().data_ptr()
        is_alone = address not in seen and 0 not in part.stride()
        seen.add(address)
        self._values[place] = part.float() if part.dtype in _SHORT else part if is_alone else part.clone()

    def finished(self) -> Sequence[Any]:
        """Return the results for the whole batch."""
        for place, dtype in enumerate(self._dtypes):
            if dtype in _SHORT:
                self._values[place] = self._values[place].to(dtype)
        return self._values


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows of one micro-batch."""

    first: int
    rows: int
    batch: int
    """The rows of the whole batch."""
    symbols: Mapping[str, int]
    """The values of dynamic sizes in the micro-batch."""

    def slice_of(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the slice of `value`, a tensor of the whole batch, along `dim`."""
        factor = value.shape[dim] // self.batch
        return value.narrow(dim, self.first * factor, self.rows * factor)


def cuts_of(divided: DividedGraph, symbols: Mapping[str, int]) -> list[Cut]:
    """Return the micro-batches of a run of `divided`, whose dynamic sizes have the values `symbols`."""
    if isinstance(divided.batch, int):
        rows = divided.batch // divided.micro_batches
        return [Cut(number * rows, rows, divided.batch, symbols) for number in range(divided.micro_batches)]
    batch = symbols[divided.batch]
    nums = rows_of_micro_batches(batch, divided.micro_batches)
    firsts = accumulate(nums, initial=0)
    return [Cut(first, num, batch, {**symbols, divided.batch: num}) for first, num in zip(firsts, nums, strict=False)]


def slice_of(value: Any, read: Read, number: int, cut: Cut) -> Any:
    """Return what micro-batch `number`, which has the rows of `cut`, reads of `value`."""
    if isinstance(value, InParts):
        return value.tensors[number]
    if isinstance(value, ArrivingView):
        assert read.dim is not None, "a value that arrives in slices is read in slices"
        return value.source.slice(value.view, read.dim)
    if read.is_seed:
        return value + number * _SEED_STEP
    if read.is_rows:
        return cut.rows
    if read.dim is None:
        return value
    part = cut.slice_of(value, read.dim)
    if not read.strides:
        return part
    strides = [_at(size, cut.symbols) for size in read.strides]
    return torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device).copy_(part)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _whole(value: Any) -> Any:
    """Return `value` as one tensor, for an op that reads the whole batch."""
    return value.joined() if isinstance(value, InParts) else value


def _at(size: Size, symbols: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else sizes.evaluate(size, symbols)


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
