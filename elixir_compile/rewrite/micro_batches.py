"""Split the graph of a region that runs in n micro-batches: ops before the loop, ops of one micro-batch, ops behind it.

```text
  region   mask = ge(...)            head   mask = ge(...)                      once, before the first micro-batch
           y = addmm(b, x, w)        body   y = addmm(b, x', w)                 n times, on slices x' of x
           p = where(mask, y, ..)           p = where(mask, y, ..)
           s = sum(p)                       s = sum(p)                          its n results are added up
           m = div(s, k)             tail   m = div(s, k)                       once, behind the last micro-batch
```

`capture.batch` says how each value is made of its values in micro-batches. The sizes among the arguments of the body's
ops become those of one micro-batch, and every result is checked: it has the shape of the whole value, divided by n
along the dimension of its slices.

If the number of rows is a symbol, the ops of the body stay as they are, and the symbol counts the rows of a micro-batch
there: see `capture.batch_sizes`. Other dynamic sizes are the same in all parts.
"""

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.capture.batch_call import State, States, known_shape, states_in
from elixir_compile.capture.batch_sizes import ends_at_rows, is_seeded
from elixir_compile.capture.batch_walk import Walked
from elixir_compile.capture.node_facts import (
    is_number,
    leaves_of,
    outputs_of,
    tensor_of,
    value_of,
)
from elixir_compile.capture.node_facts import size_of as number_of
from elixir_compile.capture.views import view_chain
from elixir_compile.ir import Batched, GroupId
from elixir_compile.rewrite.divided_graph import (
    DividedGraph,
    Filled,
    Last,
    Memory,
    Part,
    Read,
    Result,
    Summed,
    size_of,
)
from elixir_compile.rewrite.local_args import is_created, local_args
from elixir_compile.rewrite.local_numbers import Numbers, symbols_of
from elixir_compile.rewrite.local_values import computed, narrowed, strides_by_rows
from elixir_compile.rewrite.region_states import views_taken_apart, walked
from elixir_compile.rewrite.regions import RegionGraph


def divide(
    region: RegionGraph,
    states: Mapping[fx.Node, States],
    batch: int | torch.SymInt,
    micro_batches: int,
    leaving: Mapping[fx.Node, GroupId] = MappingProxyType({}),
) -> DividedGraph | None:
    """Return the parts of `region` for a batch of `batch` rows in `micro_batches`; None if no op of it reads the batch.

    `states` are those of the half from which the region was cut. `leaving` has the group of each of its values that
    leaves the device in slices. Raises IllegalSchedule if an op of the region mixes the batch.
    """
    divider = _Divider(region, walked(region, states, batch), batch, micro_batches, leaving)
    return divider.divided() if divider.has_body else None


class _Divider:
    """Writes the parts of one region."""

    def __init__(
        self,
        region: RegionGraph,
        found: Walked,
        batch: int | torch.SymInt,
        micro_batches: int,
        leaving: Mapping[fx.Node, GroupId],
    ) -> None:
        self._region = region
        self._states = found.states
        self._narrowed = found.narrowed
        self._batch = batch
        self._rows = compat.symbol_of(batch)
        self._num = micro_batches
        graph = region.module.graph
        self._outputs = [node for node in outputs_of(graph) if isinstance(node, fx.Node)]
        own = zip(self._outputs, region.outputs, strict=True)
        self._leaving = {node: leaving[source] for node, source in own if source in leaving}
        placeholders = graph.find_nodes(op="placeholder")
        self._places: dict[fx.Node, int] = {node: place for place, node in enumerate(placeholders)}
        self._sizes = [node for node in self._outputs if isinstance(value_of(node), torch.SymInt)]
        self._places |= {node: len(self._places) + place for place, node in enumerate(self._sizes)}
        calls = [node for node in graph.nodes if node.op == "call_function" and node not in self._sizes]
        self._apart = views_taken_apart(calls, found.states, batch)
        self._whole_views = self._views_of_inputs() | self._apart
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
        made += [node for node in self._in_body if node in self._whole_views]
        order = [node for node in self._region.module.graph.nodes if node in {*made}]
        readers = {*self._in_body, *self._in_tail}
        outputs = [
            node
            for node in order
            if node in self._outputs or any(user in readers and user not in self._whole_views for user in node.users)
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
        return part.graph.node_copy(node, lambda source: self._whole(part, numbers, source))

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
            if node not in self._whole_views and (node in self._outputs or not tail.isdisjoint(node.users))
        ]
        wholes: dict[object, Memory] = {}
        results = tuple(self._result(node, outputs, wholes) for node in outputs)
        for node in outputs:
            self._places[node] = len(self._places)
        body, reads = part.finished([part.copies[node] for node in outputs])
        return body, reads, results, tuple(wholes.values())

    def _result(self, node: fx.Node, outputs: Sequence[fx.Node], wholes: dict[object, Memory]) -> Result:
        state, value = self._states[node], tensor_of(node)
        assert isinstance(state, State)
        if state.batched is Batched.SUM:
            return Summed()
        if state.batched is Batched.SAME:
            return Last()
        owner = _owner(node)
        key = (owner, value.dtype)
        numel = value.untyped_storage().nbytes() // value.element_size()
        group = self._leaving.get(node, "")
        memory = Memory(numel=size_of(numel), dtype=value.dtype, device=value.device, group=group)
        wholes.setdefault(key, memory)
        is_in_owner = owner is not node and owner in outputs and tensor_of(owner).dtype is value.dtype
        return Filled(
            whole=list(wholes).index(key),
            dim=state.dim,
            shape=tuple(map(size_of, value.shape)),
            stride=tuple(map(size_of, value.stride())),
            offset=size_of(value.storage_offset()),
            is_copied=not is_in_owner,
        )

    def _write_local(self, part: Part, numbers: Numbers, node: fx.Node) -> None:
        """Copy `node` into the body, with the sizes of one micro-batch, and check the shape of its result."""
        state = self._states[node]
        dim = state.dim if isinstance(state, State) and state.is_each else None
        args, kwargs = local_args(node, dim, self._divisor, numbers.local)

        def local(source: fx.Node) -> fx.Node:
            if source.graph is part.graph:  # a size that `local_args` has written
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
        expected = self._local_shape(whole, state)
        if known_shape(value) != expected:
            raise AssertionError(
                f"{node.name} = {node.target} has the shape {tuple(value.shape)} in a micro-batch; expected {expected}"
            )

    def _local_shape(self, whole: torch.Tensor, state: State) -> tuple[int, ...]:
        return tuple(
            size // self._divisor if state.is_each and dim == state.dim else size
            for dim, size in enumerate(known_shape(whole))
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


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of `node`: of several results of an op, each owns its own."""
    *views, last = view_chain(node)
    is_result = bool(views) and not isinstance(value_of(last), torch.Tensor)
    return views[-1] if is_result else last


def _spread(state: States, node: fx.Node) -> list[State]:
    """Return the state of each leaf of the value of `node`."""
    num = len(leaves_of(value_of(node)))
    return [state] * num if isinstance(state, State) else list(state)
