"""Split the graph of a region that runs in micro-batches into the ops before the loop, the ops of one micro-batch, and
the ops behind it.
"""

import ast
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.graph.capture.batch import Walked
from elixir_compile.graph.capture.batch_call import (
    State,
    States,
    ends_at_rows,
    is_seeded,
    known_shape,
    rows_place,
    shape_place,
    states_in,
)
from elixir_compile.graph.capture.convert import storages_behind
from elixir_compile.graph.capture.node_facts import (
    as_node,
    is_number,
    leaves_of,
    outputs_of,
    tensor_of,
    value_of,
    values_of_arguments,
)
from elixir_compile.graph.capture.node_facts import size_of as number_of
from elixir_compile.graph.capture.rewire import view_chain
from elixir_compile.graph.rewrite.regions import (
    DividedGraph,
    Filled,
    Kept,
    Last,
    Layout,
    Memory,
    Part,
    Partition,
    PartsView,
    Read,
    RegionGraph,
    Result,
    Size,
    Summed,
    views_taken_apart,
    walked,
)
from elixir_compile.graph.rewrite.regions import as_size as size_of
from elixir_compile.ir import Batched, GroupId, Phase, Plan, StepGraph, StorageId
from elixir_compile.step.as_run import as_run, stays_in_parts
from elixir_compile.step.divide import Lap, crossings, laps_of, leaving_name, next_name

# ----------------------------------------------------------------------------------------------------------------------
# Fake values of one micro-batch, for the nodes of the body of a divided region.


def narrowed(value: object, dim: int, num: int) -> torch.Tensor:
    """Return the first of `num` slices of the tensor `value` along `dim`."""
    assert isinstance(value, torch.Tensor)
    with compat.own_fake_mode(value):
        return value.narrow(dim, 0, value.shape[dim] // num)


def computed(node: fx.Node, like: object) -> object:
    """Return the value of `node`, computed on the fake values of its arguments; `like` is a value in the same mode."""
    fake = next(leaf for leaf in leaves_of(like) if isinstance(leaf, torch.Tensor))
    args, kwargs = values_of_arguments(node, value_of)
    with compat.own_fake_mode(fake):
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]


def strides_by_rows(value: torch.Tensor, rows: str) -> tuple[Size, ...]:
    """Return the strides of `value` if they depend on the number of `rows`, a symbol, else none."""
    is_by_rows = bool(rows) and any(rows in compat.symbols_in(stride) for stride in value.stride())
    return tuple(map(size_of, value.stride())) if is_by_rows else ()


# ----------------------------------------------------------------------------------------------------------------------
# Compute dynamic sizes in a part of a divided region: each part computes its own from the symbols among its inputs.
#
#   region   s0, x -> n = mul(s0, 8); y = view(x, [n, 64]); z = div(y, n)
#   body     rows of the micro-batch, s0, x' -> n' = mul(rows, 8); y = view(x', [n', 64]); n = mul(s0, 8); z = div(y, n)
#
# A captured graph may read a size off a tensor, `sym_size(x, 0)`, that the part does not have. So sizes are written
# anew from their expressions.


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


class Numbers:
    """Writes numbers into one part of a divided region."""

    def __init__(self, part: Part, rows: str = "") -> None:
        """`rows` is the symbol that has the rows of a micro-batch as its value, empty in a head or tail."""
        self._part = part
        self._rows = rows
        self._symbols = symbols_of(part.source)
        for name in self._symbols:  # a compiler needs each symbol of a shape among the inputs
            self._symbol(name, is_local=True)
        self._sizes: dict[tuple[str, bool], Any] = {}
        self._others: dict[fx.Node, Any] = {}

    def local(self, size: "int | torch.SymInt") -> Any:
        """Return `size` of one micro-batch: a number, or a node of the part."""
        return self._size(size, is_local=True)

    def of(self, node: fx.Node, *, is_local: bool = False) -> Any:
        """Return the value of `node`, a symbolic number of the region, for the whole batch or for one micro-batch."""
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            return self._size(value, is_local=is_local)
        if node not in self._others:
            self._others[node] = self._other(node)
        return self._others[node]

    def _other(self, node: fx.Node) -> fx.Node:
        """Return a float or a condition, computed from sizes of the whole batch, or an input of the region."""
        source, inputs = node, self._part.source.inputs
        placeholders = self._part.source.module.graph.find_nodes(op="placeholder")
        if node.op == "placeholder":
            place = placeholders.index(node)
            source = inputs[place]
            if source.op == "placeholder":
                return self._part.read(Read(place=place), node, value_of(node))
        args = map_arg(source.args, lambda own: self.of(own) if is_number(own) else own)
        return self._call(source.target, args)  # pyright: ignore[reportArgumentType]

    def _size(self, size: "int | torch.SymInt", *, is_local: bool) -> Any:
        text = compat.expression_of(size)[0]
        if not text:
            return int(size)
        is_local = is_local or self._rows not in compat.symbols_in(size)
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
        raise AssertionError(f"a size of {self._part.source.id} has an expression that is not known: {ast.dump(tree)}")

    def _symbol(self, name: str, *, is_local: bool) -> fx.Node:
        place, node = self._symbols[name]
        if name != self._rows:
            return self._part.read(Read(place=place), node, value_of(node))
        if is_local:
            return self._part.read(Read(place=place, is_rows=True), node, value_of(node))
        meta = self._part.source.inputs[place].meta
        if _WHOLE_ROWS not in meta:
            meta[_WHOLE_ROWS] = compat.unknown_number(meta["val"])
        return self._part.read(Read(place=place, is_unknown=True), node, meta[_WHOLE_ROWS])

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not any(isinstance(arg, fx.Node) for arg in args):
            return target(*args)
        made = self._part.graph.call_function(target, args)
        values, _ = values_of_arguments(made, value_of)
        made.meta = {"val": target(*values)}
        return made


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
        owner = _owner(node)
        if node in self.in_parts:
            memory = self.memories.setdefault(owner, len(self.memories))
            return Kept(layout=layout_of(value, state, self.micro_batches, memory))
        key = (owner, value.dtype)
        numel = value.untyped_storage().nbytes() // value.element_size()
        group = self.leaving.get(node, "")
        whole = Memory(numel=size_of(numel), dtype=value.dtype, device=value.device, group=group)
        self.wholes.setdefault(key, whole)
        is_in_owner = owner is not node and owner in self.outputs and tensor_of(owner).dtype is value.dtype
        return Filled(
            whole=list(self.wholes).index(key),
            dim=state.dim,
            shape=tuple(map(size_of, value.shape)),
            stride=tuple(map(size_of, value.stride())),
            offset=size_of(value.storage_offset()),
            bits=compat.lazy_bits(value),
            is_copied=not is_in_owner,
        )


def layout_of(value: torch.Tensor, state: State, micro_batches: int, memory: int = 0) -> Layout:
    """Return the layout of the parts of `value`, which are views of the memory with the number `memory`."""
    return Layout(
        memory=memory,
        dim=state.dim,
        view=replace(compat.MemoryView.of(value), shape=local_shape(value, state, micro_batches)),
        nbytes=value.untyped_storage().nbytes() // micro_batches,
    )


def local_shape(whole: torch.Tensor, state: State, divisor: int) -> tuple[int, ...]:
    """Return the shape of one micro-batch's part of `whole`: the size along its slices is divided by `divisor`."""
    return tuple(
        size // divisor if state.is_each and dim == state.dim else size for dim, size in enumerate(known_shape(whole))
    )


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of `node`: of several results of an op, each owns its own."""
    *views, last = view_chain(node)
    is_result = bool(views) and not isinstance(value_of(last), torch.Tensor)
    return views[-1] if is_result else last


# ----------------------------------------------------------------------------------------------------------------------
# Find the values of a capture that are there in slices or in parts, by what the plan counts.
#
# Offloaded values may pass between device and host in slices. Others may stay in parts between two laps.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedValues:
    """The values that pass in slices, and those that stay in parts."""

    leaving: Mapping[fx.Node, GroupId] = field(default_factory=dict)
    """The group of each value of the forward that leaves in slices."""
    arriving: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The dimension and the number of the slices of each value that arrives in slices, by its name."""
    in_parts: frozenset[fx.Node] = frozenset()
    """The values of both halves that stay in parts."""
    saved_in_parts: Mapping[str, Layout] = field(default_factory=dict)
    """The layout in the capture of each value in parts that the forward saves for the backward, by its name."""


def sliced_values(halves: Partition, graph: StepGraph, plan: Plan, states: Mapping[fx.Node, States]) -> SlicedValues:
    """Return the values of `halves`, made for the activations of `plan`, that pass in slices or stay in parts.

    `graph` is the step of the capture, and `states` are those of the values of `halves`.
    """
    laps = laps_of(plan)
    leaving, arriving = _passing(halves, graph, plan, states, laps)
    names = stays_in_parts(graph, plan.activations, laps)
    if not names:
        return SlicedValues(leaving=leaving, arriving=arriving)
    captured = halves.captured
    in_parts = frozenset(
        node
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for node, storages in storages_behind(captured, phase).items()
        if len(storages) == 1 and storages[0] in names
    )
    saved = outputs_of(captured.forward.graph)[captured.num_outputs :]
    kept = {node.name: node for node in saved if isinstance(node, fx.Node) and node in in_parts}
    layouts = _layouts(kept, storages_behind(captured), states)
    return SlicedValues(leaving=leaving, arriving=arriving, in_parts=in_parts, saved_in_parts=layouts)


def _layouts(
    kept: Mapping[str, fx.Node], storages: Mapping[fx.Node, tuple[StorageId, ...]], states: Mapping[fx.Node, States]
) -> Mapping[str, Layout]:
    """Return the layout of the whole of each value of `kept`; views of one of `storages` share a memory."""
    memories: dict[StorageId, int] = {}
    found: dict[str, Layout] = {}
    for name, node in kept.items():
        state = states[node]
        assert isinstance(state, State), f"{name} is one tensor"
        memory = memories.setdefault(storages[node][0], len(memories))
        found[name] = layout_of(tensor_of(node), state, 1, memory)
    return found


def _passing(
    halves: Partition, graph: StepGraph, plan: Plan, states: Mapping[fx.Node, States], laps: tuple[Lap, ...]
) -> tuple[Mapping[fx.Node, GroupId], Mapping[str, tuple[int, int]]]:
    """Return the values that leave in slices, and those that arrive in slices."""
    step = as_run(graph, plan.activations, laps)
    crosses = crossings(step, plan.activations)
    leaving: dict[fx.Node, GroupId] = {}
    arriving: dict[str, tuple[int, int]] = {}
    if not crosses:
        return leaving, arriving
    there = {storage.id for storage in step.storages}
    forward = halves.captured.forward.graph
    saved = {node.name: node for node in outputs_of(forward) if isinstance(node, fx.Node)}
    behind = storages_behind(halves.captured)
    for group, found in crosses.items():
        for name in halves.away[group]:
            node = saved[name]
            (storage,), state = behind[node], states[node]
            if found.arriving is not None and next_name(storage) in there:
                assert isinstance(state, State), f"{name} is one tensor"
                arriving[name] = (state.dim, found.arriving.micro_batches)
            if leaving_name(storage) in there:
                leaving[node] = group
    return leaving, arriving


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
        self._apart = views_taken_apart(calls, found.states, batch)
        self._input_views = self._views_of_inputs() | self._apart
        self._part_views = {n for n in self._input_views - self._apart if view_chain(n)[-1] in self._in_parts}
        self._in_body = [node for node in calls if self._is_in_body(node)]
        self._in_tail = [node for node in calls if self._is_in_tail(node)]
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
        head, head_reads = self._head()
        body, body_reads, results, wholes = self._body()
        views = self._views_of_parts()
        tail, tail_reads = self._tail()
        return DividedGraph(
            micro_batches=self._num,
            num_inputs=len(self._region.inputs),
            batch=size_of(self._batch),
            symbols=tuple((name, place) for name, (place, _) in symbols_of(self._region).items()),
            numbers=tuple(size_of(number_of(node)) for node in self._sizes),
            head=head,
            head_reads=head_reads,
            body=body,
            body_reads=body_reads,
            results=results,
            wholes=wholes,
            views=views,
            tail=tail,
            tail_reads=tail_reads,
            outputs=tuple(self._places[node] for node in self._outputs),
        )

    def _views_of_inputs(self) -> set[fx.Node]:
        """Return the views of inputs among the outputs, with the views on the way to them: no new memory is filled."""
        found: set[fx.Node] = set()
        for node in self._outputs:
            chain = view_chain(node)
            if chain[-1].op == "placeholder":
                found.update(chain[:-1])
        return found

    def _is_in_body(self, node: fx.Node) -> bool:
        if node in self._apart:
            return False
        while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        states = states_in(self._states[node])
        return any(state.batched is not Batched.SAME for state in states)

    def _is_in_tail(self, node: fx.Node) -> bool:
        return all(state.is_total for state in states_in(self._states[node]))

    def _head(self) -> tuple[RegionGraph | None, tuple[int, ...]]:
        made = list(self._in_head)
        made += [node for node in self._in_body if node in self._input_views - self._part_views]
        order = [node for node in self._region.module.graph.nodes if node in {*made}]
        readers = {*self._in_body, *self._in_tail}
        outputs = [
            node
            for node in order
            if node in self._outputs or any(user in readers and user not in self._input_views for user in node.users)
        ]
        if not outputs:
            return None, ()
        part = Part(self._region)
        numbers = Numbers(part)
        for node in order:
            part.copies[node] = self._copied(part, numbers, node)
        for node in outputs:
            self._places[node] = len(self._places)
        graph, reads = part.finished([part.copies[node] for node in outputs])
        return graph, tuple(read.place for read in reads)

    def _copied(self, part: Part, numbers: Numbers, node: fx.Node) -> fx.Node:
        """Return `node` in `part`, the head or the tail."""
        if is_number(node):
            return numbers.of(node)
        return copied(part.graph, node, lambda source: self._whole(part, numbers, source))

    def _whole(self, part: Part, numbers: Numbers, node: fx.Node) -> fx.Node:
        """Return the whole value of `node` in `part`, the head or the tail."""
        if node in part.copies:
            return part.copies[node]
        if node.op == "get_attr":
            return part.constant(node)
        if is_number(node):
            return numbers.of(node)
        if node not in self._places:  # a created tensor, which every part makes for itself
            part.copies[node] = self._copied(part, numbers, node)
            return part.copies[node]
        return part.read(Read(place=self._places[node]), node, value_of(node))

    def _body(self) -> tuple[RegionGraph, tuple[Read, ...], tuple[Result, ...], tuple[Memory, ...]]:
        part = Part(self._region)
        numbers = Numbers(part, self._rows)
        for node in self._in_body:
            self._write_local(part, numbers, node)
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

    def _views_of_parts(self) -> tuple[PartsView, ...]:
        """Return the outputs that are views of inputs in parts."""
        found: list[PartsView] = []
        for node in self._outputs:
            if node in self._part_views and node not in self._places:
                state, source = self._states[node], view_chain(node)[-1]
                assert isinstance(state, State), f"{node.name} is one tensor"
                found.append(PartsView(place=self._places[source], layout=layout_of(tensor_of(node), state, self._num)))
                self._places[node] = len(self._places)
        return tuple(found)

    def _write_local(self, part: Part, numbers: Numbers, node: fx.Node) -> None:
        """Copy `node` into the body, with the sizes of one micro-batch, and check the shape of its result."""
        state = self._states[node]
        dim = state.dim if isinstance(state, State) and state.is_each else None
        args, kwargs = local_args(node, dim, self._divisor, numbers.local)

        def local(source: fx.Node) -> fx.Node:
            if source.graph is part.graph:  # a size that was divided already
                return source
            if is_number(source):
                return numbers.of(source, is_local=ends_at_rows(node))
            return self._local(part, numbers, source, self._narrowed.get((node, source)), is_seed=is_seeded(node))

        made = part.graph.create_node(
            "call_function", node.target, map_arg(args, local), map_arg(kwargs, local), name=node.name
        )
        made.meta = self._meta(made, node)
        part.copies[node] = made
        for value, whole, state in zip(
            leaves_of(made.meta["val"]), leaves_of(value_of(node)), _spread(self._states[node], node), strict=True
        ):
            self._check(node, value, whole, state)

    def _meta(self, made: fx.Node, node: fx.Node) -> dict[str, object]:
        """Return the facts about `made`, the copy of `node` in the body."""
        return dict(node.meta) if self._rows else {**node.meta, "val": computed(made, value_of(node))}

    def _check(self, node: fx.Node, value: object, whole: object, state: State) -> None:
        if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
            return
        expected = local_shape(whole, state, self._divisor)
        if known_shape(value) != expected:
            raise AssertionError(
                f"{node.name} = {node.target} has the shape {tuple(value.shape)} in a micro-batch; expected {expected}"
            )

    def _local(self, part: Part, numbers: Numbers, node: fx.Node, dim: int | None, *, is_seed: bool) -> fx.Node:
        """Return what the body reads for `node`: its own copy, or one slice along `dim` of a whole value."""
        if node in part.copies:
            return part.copies[node]
        if node.op == "get_attr" and dim is None:
            return part.constant(node)
        state = self._states[node]
        if isinstance(state, State) and state.is_each:
            dim = state.dim
        if node.op == "call_function" and is_created(node) and node not in self._places:
            return self._created(part, numbers, node, dim)
        value = value_of(node)
        if dim is None:
            return part.read(Read(place=self._places[node], is_seed=is_seed), node, value)
        strides = strides_by_rows(tensor_of(node), self._rows)
        if not self._rows:
            value = narrowed(value, dim, self._num)
        return part.read(Read(place=self._places[node], dim=dim, is_seed=is_seed, strides=strides), node, value)

    def _created(self, part: Part, numbers: Numbers, node: fx.Node, dim: int | None) -> fx.Node:
        """Return `node`, a tensor of one value, at the size of a micro-batch along `dim`."""
        key = (node, dim)
        if key not in part.created:
            args, kwargs = local_args(node, dim, self._divisor, numbers.local)

            def number(source: fx.Node) -> fx.Node:
                return source if source.graph is part.graph else numbers.of(source)

            own = part.graph.create_node(
                "call_function", node.target, map_arg(args, number), map_arg(kwargs, number), name=node.name
            )
            own.meta = self._meta(own, node)
            part.created[key] = own
        return part.created[key]

    def _tail(self) -> tuple[RegionGraph | None, tuple[int, ...]]:
        outputs = [node for node in self._in_tail if node in self._outputs]
        if not outputs:
            return None, ()
        part = Part(self._region)
        numbers = Numbers(part)
        for node in self._in_tail:
            part.copies[node] = self._copied(part, numbers, node)
        for node in outputs:
            self._places[node] = len(self._places)
        graph, reads = part.finished([part.copies[node] for node in outputs])
        return graph, tuple(read.place for read in reads)


def _spread(state: States, node: fx.Node) -> list[State]:
    """Return the state of each leaf of the value of `node`."""
    num = len(leaves_of(value_of(node)))
    return [state] * num if isinstance(state, State) else list(state)
