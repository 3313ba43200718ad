"""Split the graph of a region that runs in micro-batches into the ops before the loop, the ops of one micro-batch, and
the ops behind it.
"""

import ast
import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.graph.capture.batch import state_by_rule, walk
from elixir_compile.graph.capture.batch_call import (
    Call,
    Mixes,
    ends_at_rows,
    is_seeded,
    known_shape,
    rows_place,
    shape_place,
)
from elixir_compile.graph.capture.captured import State, States, Walked, states_in
from elixir_compile.graph.capture.node_facts import (
    as_node,
    is_number,
    leaves_of,
    outputs_of,
    size_of,
    tensor_of,
    value_of,
    values_of_arguments,
)
from elixir_compile.graph.capture.rewire import view_chain, viewed
from elixir_compile.graph.rewrite.regions import Layout, RegionGraph, SlicedValues, layout_of, local_shape
from elixir_compile.ir import Batched, GroupId

# ----------------------------------------------------------------------------------------------------------------------
# The parts of a region that runs in micro-batches, as graphs and as values that say how they fit together.


Size = int | str
"""A size, or the expression of a dynamic size, see `ir.sizes`."""


def as_size(size: "int | torch.SymInt") -> Size:
    """Return `size` as a number or an expression."""
    return compat.expression_of(size)[0] or int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A value that the body reads: entry `place` of the inputs of the region and the results of its head."""

    place: int
    dim: int | None = None
    """The dimension along which each micro-batch has its slice; None if all micro-batches read the same."""
    is_seed: bool = False
    """Whether the value seeds random numbers, so that each micro-batch needs another."""
    is_rows: bool = False
    """Whether the value, a dynamic number of rows, counts only the rows of the micro-batch."""
    is_unknown: bool = False
    """Whether the body knows nothing about the value, the rows of the batch, whose symbol has another value there."""
    strides: tuple[Size, ...] = ()
    """The strides in which the body expects its slice, if they depend on the number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A result of the body that fills a tensor of the whole batch, a slice per micro-batch."""

    whole: int
    """The index in `wholes` of the memory of the tensor; views of one memory share it."""
    dim: int
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    bits: compat.LazyBits
    is_copied: bool
    """False if another result of the body has all elements of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A result of the body that stays in parts: the tensors of all micro-batches."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsView:
    """An output of the region that is a view of its input `place`, which stays in parts."""

    place: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """A result of the body whose values in all micro-batches are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """A result of the body that is equal in all micro-batches."""


Result = Filled | Kept | Summed | Last


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a tensor of the whole batch."""

    numel: Size
    dtype: torch.dtype
    device: torch.device
    group: str = ""
    """The group of activations with which the tensor leaves the device in slices; empty if it stays until the region
    ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedGraph:
    """The three parts of a region.

    Values have places: first the inputs of the region, then its dynamic sizes `numbers`, then the results of its head,
    then those of its body as they are for the whole batch, then `views`, then those of its tail.
    """

    micro_batches: int
    """The number of micro-batches, an upper limit if the number of rows is dynamic."""
    num_inputs: int
    batch: Size
    """The rows of the batch; a symbol if their number is dynamic."""
    symbols: tuple[tuple[str, int], ...]
    """The symbols of dynamic sizes, each with its place among the inputs."""
    numbers: tuple[Size, ...]
    """The dynamic sizes among the outputs of the region."""
    head: RegionGraph | None
    head_reads: tuple[int, ...]
    body: RegionGraph
    body_reads: tuple[Read, ...]
    results: tuple[Result, ...]
    wholes: tuple[Memory, ...]
    views: tuple[PartsView, ...]
    tail: RegionGraph | None
    tail_reads: tuple[int, ...]
    outputs: tuple[int, ...]
    """The place of each output of the region."""


# ----------------------------------------------------------------------------------------------------------------------
# A part of a region under construction. It computes its own dynamic sizes from the symbols among its inputs.


_OPERATORS: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # sizes are whole numbers: sympy writes `s0 / 2` only if 2 divides s0
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
_WHOLE_ROWS = "elixir_whole_rows"
"""The key in `node.meta` of the symbol of the rows of a batch, for the number that stands for all rows in a body."""


def symbols_of(region: RegionGraph) -> Mapping[str, tuple[int, fx.Node]]:
    """Return the place and the node of each symbol among the inputs of `region`, by name."""
    return {
        name: (place, node)
        for place, node in enumerate(region.module.graph.find_nodes(op="placeholder"))
        if (name := compat.symbol_of(value_of(node)))
    }


@dataclass(slots=True)
class Part:
    """A graph under construction, with the values that it reads.

        region   s0, x -> n = mul(s0, 8); y = view(x, [n, 64]); z = div(y, n)
        body     rows, s0, x' -> n' = mul(rows, 8); y = view(x', [n', 64]); n = mul(s0, 8); z = div(y, n)

    A captured graph may read a size off a tensor, `sym_size(x, 0)`, that the part does not have. So sizes are written
    anew from their expressions.
    """

    source: RegionGraph
    rows: str = ""
    """The symbol that has the rows of a micro-batch as its value, empty in a head or tail."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The node of this graph for a node of the region."""
    created: dict[tuple[fx.Node, int | None], fx.Node] = field(default_factory=dict)
    """The copies of a tensor of one value, by the dimension along which they have the size of a micro-batch."""
    _by_read: dict[Read, fx.Node] = field(default_factory=dict)
    _stands_for: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The input of the region that a placeholder reads whole."""
    _sizes: dict[tuple[str, bool], Any] = field(default_factory=dict)
    _others: dict[fx.Node, Any] = field(default_factory=dict)
    _symbols: Mapping[str, tuple[int, fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        self._symbols = symbols_of(self.source)
        for name in self._symbols:  # a compiler needs each symbol of a shape among the inputs
            self._symbol(name, is_local=True)

    def read(self, read: Read, node: fx.Node, value: object) -> fx.Node:
        """Return the placeholder for `read` of the region's `node`, with the example `value`."""
        if read not in self._by_read:
            with self.graph.inserting_before(None):
                made = self.graph.placeholder(node.name)
            made.target = made.name  # a value may be read whole and in slices
            made.meta = {**node.meta, "val": value}
            self._by_read[read] = made
            is_changed = read.is_seed or read.is_rows or read.is_unknown
            if read.dim is None and not is_changed and read.place < len(self.source.inputs):
                self._stands_for[made] = self.source.inputs[read.place]
        return self._by_read[read]

    def constant(self, node: fx.Node) -> fx.Node:
        """Return the copy of `node`, a constant of the region."""
        if node not in self.copies:
            setattr(self.root, str(node.target), getattr(self.source.module, str(node.target)))
            self.copies[node] = self.graph.node_copy(node)
        return self.copies[node]

    def number(self, node: fx.Node, *, is_local: bool = False) -> Any:
        """Return the value of `node`, a symbolic number of the region, for the whole batch or for one micro-batch."""
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            return self.size(value, is_local=is_local)
        if node not in self._others:
            # A float or a condition, computed from sizes of the whole batch, or an input of the region.
            place = None
            if node.op == "placeholder":
                place = self.source.module.graph.find_nodes(op="placeholder").index(node)
            source = node if place is None else self.source.inputs[place]
            if place is not None and source.op == "placeholder":
                self._others[node] = self.read(Read(place=place), node, value)
            else:
                args = map_arg(source.args, lambda own: self.number(own) if is_number(own) else own)
                self._others[node] = self._call(source.target, args)  # pyright: ignore[reportArgumentType]
        return self._others[node]

    def size(self, size: "int | torch.SymInt", *, is_local: bool = True) -> Any:
        """Return `size` of one micro-batch, or of the whole batch: a number, or a node of the part."""
        text = compat.expression_of(size)[0]
        if not text:
            return int(size)
        is_local = is_local or self.rows not in compat.symbols_in(size)
        if (text, is_local) not in self._sizes:
            tree = ast.parse(text, mode="eval").body
            self._sizes[text, is_local] = self._written(tree, is_local=is_local)
        return self._sizes[text, is_local]

    def _written(self, tree: ast.expr, *, is_local: bool) -> Any:
        match tree:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return self._symbol(name, is_local=is_local)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._call(operator.neg, (self._written(operand, is_local=is_local),))
            case ast.BinOp(left=left, op=op, right=right):
                sides = (self._written(side, is_local=is_local) for side in (left, right))
                return self._call(_OPERATORS[type(op)], tuple(sides))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
                values = [self._written(value, is_local=is_local) for value in args]
                return functools.reduce(lambda left, right: self._call(_FUNCTIONS[name], (left, right)), values)
        raise AssertionError(f"a size of {self.source.id} has an expression that is not known: {ast.dump(tree)}")

    def _symbol(self, name: str, *, is_local: bool) -> fx.Node:
        place, node = self._symbols[name]
        if name != self.rows:
            return self.read(Read(place=place), node, value_of(node))
        if is_local:
            return self.read(Read(place=place, is_rows=True), node, value_of(node))
        meta = self.source.inputs[place].meta
        if _WHOLE_ROWS not in meta:
            meta[_WHOLE_ROWS] = compat.unknown_number(meta["val"])
        return self.read(Read(place=place, is_unknown=True), node, meta[_WHOLE_ROWS])

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not any(isinstance(arg, fx.Node) for arg in args):
            return target(*args)
        made = self.graph.call_function(target, args)
        values, _ = values_of_arguments(made, value_of)
        made.meta = {"val": target(*values)}
        return made

    def finished(self, outputs: Sequence[fx.Node]) -> tuple[RegionGraph, tuple[Read, ...]]:
        """Return the graph, which returns `outputs`, as a region, and what it reads."""
        placeholders = self.graph.find_nodes(op="placeholder")
        reads = {node: read for read, node in self._by_read.items()}
        self.graph.output(tuple(outputs))
        self.graph.lint()
        made = replace(
            self.source,
            module=compat.graph_module(self.root, self.graph),
            inputs=tuple(self._stands_for.get(node, node) for node in placeholders),
            outputs=tuple(outputs),
            is_only=False,
        )
        return made, tuple(reads[node] for node in placeholders)


# ----------------------------------------------------------------------------------------------------------------------
# The states of the values of one region, and which of its views are taken of the whole batch: see
# `graph.capture.batch`.


def walked(region: RegionGraph, states: Mapping[fx.Node, States], batch: int | torch.SymInt) -> Walked:
    """Return the states of the nodes of `region`. Its inputs are whole: a sum of an earlier region is equal for all
    micro-batches.

    `states` are those of the half from which the region was cut. Raises IllegalSchedule if an op of the region mixes
    the batch.
    """
    placeholders = region.module.graph.find_nodes(op="placeholder")
    given: dict[fx.Node, State] = {}
    for node, source in zip(placeholders, region.inputs, strict=True):
        state = states.get(source)
        if isinstance(state, State) and state.is_each:
            given[node] = state
    found = walk(region.module.graph, given, batch)
    mixing = next((node for node in found.mixes if viewed(node) is None), None)
    if mixing is not None:
        raise IllegalSchedule(
            f"{region.id} runs in micro-batches, but {mixing.name} mixes them: {found.mixes[mixing]}."
        )
    return found


def views_taken_apart(
    calls: Sequence[fx.Node], states: Mapping[fx.Node, States], batch: int | torch.SymInt
) -> set[fx.Node]:
    """Return the views of inputs among `calls` that do not keep the slices together, and the views of these: a view of
    a slice would be another value than a slice of the view."""
    found: set[fx.Node] = set()
    for node in calls:
        base = viewed(node)
        if base in found:
            found.add(node)
        elif base is not None and base.op == "placeholder":
            state = states[base]
            if isinstance(state, State) and state.is_each:
                try:
                    state_by_rule(Call(node, {base: state}, compat.stand_in(batch), compat.symbol_of(batch)))
                except Mixes:
                    found.add(node)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The arguments of an op for one micro-batch: its sizes are divided.
#
# `view(x, [64, 512, 768])` of slices of 8 rows becomes `view(x', [8, 512, 768])`.


_aten = torch.ops.aten
_CREATED = (_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.scalar_tensor.default)


def is_created(node: fx.Node) -> bool:
    """Return whether `node` makes a tensor of one value, which any part of a region can make for itself."""
    return node.target in _CREATED


_NEW: dict[Any, Any] = {
    _aten.new_zeros.default: _aten.zeros.default,
    _aten.new_ones.default: _aten.ones.default,
    _aten.new_full.default: _aten.full.default,
    _aten.new_empty.default: _aten.empty.memory_format,
}


def copied(graph: fx.Graph, node: fx.Node, read: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Return a copy of `node`, an op on the whole batch, in `graph`, where `read(source)` stands for a node `source`.

    A tensor of a stated size that takes only dtype and device from another, as `x.new_zeros(...)` does, is made without
    it: `x` may exist in slices alone.
    """
    target = _NEW.get(node.target)
    if target is None:
        return graph.node_copy(node, read)
    value = tensor_of(node)
    form = {"dtype": value.dtype, "device": value.device}
    made = graph.call_function(target, map_arg(node.args[1:], read), form)
    made.meta = dict(node.meta)
    return made


def local_args(
    node: fx.Node, dim: int | None, num: int, written: "Callable[[int | torch.SymInt], Any]"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `node` for a micro-batch, whose slices have one `num`-th of the size.

    `dim` is the dimension of the slices of its result, None if the result has none. `written` turns a size into a
    number or a node.
    """
    rows = rows_place(node)
    if rows is not None:
        num_rows = tensor_of(as_node(node.args[0])).shape[0] // num
        return (*node.args[:rows], written(num_rows), *node.args[rows + 1 :]), dict(node.kwargs)
    place = shape_place(node)
    if dim is None or place is None:
        return node.args, dict(node.kwargs)
    shape = list(tensor_of(node).shape)
    shape[dim] //= num
    return (*node.args[:place], [written(size) for size in shape], *node.args[place + 1 :]), dict(node.kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# How the results of the body of a divided region become values of the whole batch: filled, in parts, or added up.


@dataclass(slots=True)
class BodyResults:
    """Writes the results of one body, and collects the memory of those that are filled."""

    states: Mapping[fx.Node, States]
    micro_batches: int
    leaving: Mapping[fx.Node, GroupId]
    """The group of each value that leaves the device in slices."""
    in_parts: Collection[fx.Node]
    """The values that stay in parts."""
    outputs: Collection[fx.Node]
    """The nodes whose values the body returns."""
    wholes: dict[object, Memory] = field(default_factory=dict)
    memories: dict[fx.Node, int] = field(default_factory=dict)
    """The number of the memory of values in parts, by the node that owns it."""

    def of(self, node: fx.Node) -> Result:
        """Return how the results of `node`, one of `outputs`, become its value for the whole batch."""
        state, value = self.states[node], tensor_of(node)
        assert isinstance(state, State), f"{node.name} is one tensor"
        if state.batched is Batched.SUM:
            return Summed()
        if state.batched is Batched.SAME:
            return Last()
        *views, owner = view_chain(node)
        if views and not isinstance(value_of(owner), torch.Tensor):
            owner = views[-1]  # of several results of an op, each owns its own memory
        if node in self.in_parts:
            memory = self.memories.setdefault(owner, len(self.memories))
            return Kept(layout=layout_of(value, state, self.micro_batches, memory))
        key = (owner, value.dtype)
        numel = value.untyped_storage().nbytes() // value.element_size()
        group = self.leaving.get(node, "")
        whole = Memory(numel=as_size(numel), dtype=value.dtype, device=value.device, group=group)
        self.wholes.setdefault(key, whole)
        is_in_owner = owner is not node and owner in self.outputs and tensor_of(owner).dtype is value.dtype
        return Filled(
            whole=list(self.wholes).index(key),
            dim=state.dim,
            shape=tuple(map(as_size, value.shape)),
            stride=tuple(map(as_size, value.stride())),
            offset=as_size(value.storage_offset()),
            bits=compat.lazy_bits(value),
            is_copied=not is_in_owner,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Split the graph of a region that runs in n micro-batches: ops before the loop, ops of one micro-batch, ops behind it.
#
#   region   mask = ge(...)            head   mask = ge(...)                      once, before the first micro-batch
#            y = addmm(b, x, w)        body   y = addmm(b, x', w)                 n times, on slices x' of x
#            p = where(mask, y, ..)           p = where(mask, y, ..)
#            s = sum(p)                       s = sum(p)                          its n results are added up
#            m = div(s, k)             tail   m = div(s, k)                       once, behind the last micro-batch
#
# `graph.capture.batch` says how each value is made of its values in micro-batches. The sizes among the arguments of the
# body's ops become those of one micro-batch, and every result is checked: it has the shape of the whole value, divided
# by n along the dimension of its slices.
#
# If the number of rows is a symbol, the ops of the body stay as they are, and the symbol counts the rows of a micro-
# batch there: see `graph.capture.batch_call`. Other dynamic sizes are the same in all parts.


def divide(
    region: RegionGraph,
    states: Mapping[fx.Node, States],
    batch: int | torch.SymInt,
    micro_batches: int,
    sliced: SlicedValues,
) -> DividedGraph | None:
    """Return the graphs of `region` for a batch of `batch` rows in `micro_batches`; None if no op of it reads the
    batch.

    `states` are those of the half from which the region was cut. `sliced` has the values of the capture that leave in
    slices or stay in parts. Raises IllegalSchedule if an op of the region mixes the batch.
    """
    divider = _Divider(region, walked(region, states, batch), batch, micro_batches, sliced)
    return divider.divided() if divider.has_body else None


class _Divider:
    """Writes the parts of one region.

    It has more than 15 attributes, because each part needs facts about all values of the region: 7 of them are sets of
    nodes that `__init__` sorts once.
    """

    def __init__(
        self,
        region: RegionGraph,
        found: Walked,
        batch: int | torch.SymInt,
        micro_batches: int,
        sliced: SlicedValues,
    ) -> None:
        self._region = region
        self._states = found.states
        self._narrowed = found.narrowed
        self._batch = batch
        self._rows = compat.symbol_of(batch)
        self._num = micro_batches
        graph = region.module.graph
        self._outputs = [node for node in outputs_of(graph) if isinstance(node, fx.Node)]
        placeholders = graph.find_nodes(op="placeholder")
        own = dict(zip((*self._outputs, *placeholders), (*region.outputs, *region.inputs), strict=True))
        self._leaving = {node: sliced.leaving[source] for node, source in own.items() if source in sliced.leaving}
        self._in_parts = {node for node, source in own.items() if source in sliced.in_parts}
        self._places: dict[fx.Node, int] = {node: place for place, node in enumerate(placeholders)}
        self._sizes = [node for node in self._outputs if isinstance(value_of(node), torch.SymInt)]
        self._places |= {node: len(self._places) + place for place, node in enumerate(self._sizes)}
        calls = [node for node in graph.nodes if node.op == "call_function" and node not in self._sizes]
        apart = views_taken_apart(calls, found.states, batch)
        # Of the views of inputs among the outputs, and the views on the way to them, no new memory is filled.
        chains = [view_chain(node) for node in self._outputs]
        of_inputs = {view for chain in chains if chain[-1].op == "placeholder" for view in chain[:-1]}
        self._input_views = of_inputs | apart
        self._part_views = {node for node in of_inputs - apart if view_chain(node)[-1] in self._in_parts}

        def is_in_body(node: fx.Node) -> bool:
            while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                node = node.args[0]
            return any(state.batched is not Batched.SAME for state in states_in(self._states[node]))

        self._in_body = [node for node in calls if node not in apart and is_in_body(node)]
        self._in_tail = [node for node in calls if all(state.is_total for state in states_in(self._states[node]))]
        behind = {*self._in_body, *self._in_tail}
        self._in_head = [
            node
            for node in calls
            if node not in behind and (not (is_created(node) or is_number(node)) or node in self._outputs)
        ]

    @property
    def _divisor(self) -> int:
        """What sizes along the slices are divided by; sizes with the symbol of the rows need no division."""
        return 1 if self._rows else self._num

    @property
    def has_body(self) -> bool:
        """Whether any op runs once per micro-batch."""
        return bool(self._in_body)

    def divided(self) -> DividedGraph:
        """Return the parts of the region."""
        made = {*self._in_head, *(node for node in self._in_body if node in self._input_views - self._part_views)}
        readers = {*self._in_body, *self._in_tail}
        order = [node for node in self._region.module.graph.nodes if node in made]
        is_read = {
            node for node in order if any(user in readers and user not in self._input_views for user in node.users)
        }
        head, head_reads = self._around(order, [node for node in order if node in self._outputs or node in is_read])
        body, body_reads, results, wholes = self._body()
        views: list[PartsView] = []  # the outputs that are views of inputs in parts
        for node in self._outputs:
            if node in self._part_views and node not in self._places:
                state, source = self._states[node], view_chain(node)[-1]
                assert isinstance(state, State), f"{node.name} is one tensor"
                views.append(PartsView(place=self._places[source], layout=layout_of(tensor_of(node), state, self._num)))
                self._places[node] = len(self._places)
        tail, tail_reads = self._around(self._in_tail, [node for node in self._in_tail if node in self._outputs])
        return DividedGraph(
            micro_batches=self._num,
            num_inputs=len(self._region.inputs),
            batch=as_size(self._batch),
            symbols=tuple((name, place) for name, (place, _) in symbols_of(self._region).items()),
            numbers=tuple(as_size(size_of(node)) for node in self._sizes),
            head=head,
            head_reads=head_reads,
            body=body,
            body_reads=body_reads,
            results=results,
            wholes=wholes,
            views=tuple(views),
            tail=tail,
            tail_reads=tail_reads,
            outputs=tuple(self._places[node] for node in self._outputs),
        )

    def _around(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> tuple[RegionGraph | None, tuple[int, ...]]:
        """Return the head or the tail, which computes `nodes` and returns `outputs`, and the places that it reads."""
        if not outputs:
            return None, ()
        part = Part(self._region)
        for node in nodes:
            part.copies[node] = self._whole(part, node)
        for node in outputs:
            self._places[node] = len(self._places)
        graph, reads = part.finished([part.copies[node] for node in outputs])
        return graph, tuple(read.place for read in reads)

    def _whole(self, part: Part, node: fx.Node) -> fx.Node:
        """Return the whole value of `node` in `part`, the head or the tail."""
        if node in part.copies:
            return part.copies[node]
        if node.op == "get_attr":
            return part.constant(node)
        if is_number(node):
            return part.number(node)
        if node in self._places:
            return part.read(Read(place=self._places[node]), node, value_of(node))
        # An op of the part, or a created tensor, which every part makes for itself.
        part.copies[node] = copied(part.graph, node, lambda source: self._whole(part, source))
        return part.copies[node]

    def _body(self) -> tuple[RegionGraph, tuple[Read, ...], tuple[Result, ...], tuple[Memory, ...]]:
        part = Part(self._region, self._rows)
        for node in self._in_body:
            self._write_local(part, node)
        tail = {*self._in_tail}
        outputs = [
            node
            for node in self._in_body
            if node not in self._input_views and (node in self._outputs or not tail.isdisjoint(node.users))
        ]
        written = BodyResults(self._states, self._num, self._leaving, self._in_parts, outputs)
        results = tuple(map(written.of, outputs))
        for node in outputs:
            self._places[node] = len(self._places)
        body, reads = part.finished([part.copies[node] for node in outputs])
        return body, reads, results, tuple(written.wholes.values())

    def _write_local(self, part: Part, node: fx.Node) -> None:
        """Copy `node` into the body, with the sizes of one micro-batch, and check the shape of its result."""
        states = self._states[node]
        dim = states.dim if isinstance(states, State) and states.is_each else None

        def local(source: fx.Node) -> fx.Node:
            if source.graph is part.graph:  # a size that was divided already
                return source
            if is_number(source):
                return part.number(source, is_local=ends_at_rows(node))
            return self._local(part, source, self._narrowed.get((node, source)), is_seed=is_seeded(node))

        part.copies[node] = made = self._at_local_size(part, node, dim, local)
        wholes = leaves_of(value_of(node))
        spread = [states] * len(wholes) if isinstance(states, State) else states
        for value, whole, state in zip(leaves_of(made.meta["val"]), wholes, spread, strict=True):
            if isinstance(value, torch.Tensor) and isinstance(whole, torch.Tensor):
                expected = local_shape(whole, state, self._divisor)
                if known_shape(value) != expected:
                    raise AssertionError(
                        f"{node.name} = {node.target} has the shape {tuple(value.shape)} in a micro-batch; "
                        f"expected {expected}"
                    )

    def _at_local_size(self, part: Part, node: fx.Node, dim: int | None, read: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Return `node` with the sizes of one micro-batch along `dim`, where `read(source)` stands for a node."""
        args, kwargs = local_args(node, dim, self._divisor, part.size)
        made = part.graph.create_node(
            "call_function", node.target, map_arg(args, read), map_arg(kwargs, read), name=node.name
        )
        made.meta = dict(node.meta)
        if not self._rows:  # computed on the fake values of the arguments, in the mode of the value
            fake = next(leaf for leaf in leaves_of(value_of(node)) if isinstance(leaf, torch.Tensor))
            values, named = values_of_arguments(made, value_of)
            with compat.own_fake_mode(fake):
                made.meta["val"] = made.target(*values, **named)  # pyright: ignore[reportCallIssue]
        return made

    def _local(self, part: Part, node: fx.Node, dim: int | None, *, is_seed: bool) -> fx.Node:
        """Return what the body reads for `node`: its own copy, or one slice along `dim` of a whole value."""
        if node in part.copies:
            return part.copies[node]
        if node.op == "get_attr" and dim is None:
            return part.constant(node)
        state = self._states[node]
        if isinstance(state, State) and state.is_each:
            dim = state.dim
        if node.op == "call_function" and is_created(node) and node not in self._places:
            # A tensor of one value, at the size of a micro-batch along `dim`.
            if (node, dim) not in part.created:
                part.created[node, dim] = self._at_local_size(
                    part, node, dim, lambda source: source if source.graph is part.graph else part.number(source)
                )
            return part.created[node, dim]
        value, place = value_of(node), self._places[node]
        if dim is None:
            return part.read(Read(place=place, is_seed=is_seed), node, value)
        tensor = tensor_of(node)
        if not self._rows:
            with compat.own_fake_mode(tensor):
                value = tensor.narrow(dim, 0, tensor.shape[dim] // self._num)
        is_by_rows = bool(self._rows) and any(self._rows in compat.symbols_in(own) for own in tensor.stride())
        strides = tuple(map(as_size, tensor.stride())) if is_by_rows else ()
        return part.read(Read(place=place, dim=dim, is_seed=is_seed, strides=strides), node, value)
