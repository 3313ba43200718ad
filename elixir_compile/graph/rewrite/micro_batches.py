"""Split the graph of a region that runs in n micro-batches: ops before the loop, ops of one micro-batch, ops behind it.

```text
  region   mask = ge(...)            head   mask = ge(...)                      once, before the first micro-batch
           y = addmm(b, x, w)        body   y = addmm(b, x', w)                 n times, on slices x' of x
           p = where(mask, y, ..)           p = where(mask, y, ..)
           s = sum(p)                       s = sum(p)                          its n results are added up
           m = div(s, k)             tail   m = div(s, k)                       once, behind the last micro-batch
```

`graph.capture.batch` says how each value is made of its values in micro-batches. The sizes among the arguments of the body's
ops become those of one micro-batch, and every result is checked: it has the shape of the whole value, divided by n
along the dimension of its slices.

If the number of rows is a symbol, the ops of the body stay as they are, and the symbol counts the rows of a micro-batch
there: see `graph.capture.batch_sizes`. Other dynamic sizes are the same in all parts.
"""

import operator
from collections.abc import Mapping

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.graph.capture.batch_call import State, States, known_shape, states_in
from elixir_compile.graph.capture.batch_sizes import ends_at_rows, is_seeded
from elixir_compile.graph.capture.batch_walk import Walked
from elixir_compile.graph.capture.node_facts import is_number, leaves_of, outputs_of, tensor_of, value_of
from elixir_compile.graph.capture.node_facts import size_of as number_of
from elixir_compile.graph.capture.views import view_chain
from elixir_compile.graph.rewrite.body_results import BodyResults, layout_of, local_shape
from elixir_compile.graph.rewrite.divided_graph import DividedGraph, Memory, Part, PartsView, Read, Result, size_of
from elixir_compile.graph.rewrite.local_args import copied, is_created, local_args
from elixir_compile.graph.rewrite.local_numbers import Numbers, symbols_of
from elixir_compile.graph.rewrite.local_values import computed, narrowed, strides_by_rows
from elixir_compile.graph.rewrite.region_states import views_taken_apart, walked
from elixir_compile.graph.rewrite.regions import RegionGraph
from elixir_compile.graph.rewrite.sliced_values import SlicedValues
from elixir_compile.ir import Batched


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
