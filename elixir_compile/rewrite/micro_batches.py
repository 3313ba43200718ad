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
"""

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.capture.batch import Walked, states_in, walk
from elixir_compile.capture.batch_call import Call, Mixes, State, States
from elixir_compile.capture.batch_rules import rule_for
from elixir_compile.capture.node_facts import leaves_of, outputs_of, tensor_of, value_of, values_of_arguments
from elixir_compile.capture.views import view_chain, viewed
from elixir_compile.errors import IllegalSchedule
from elixir_compile.ir import Batched, GroupId
from elixir_compile.rewrite.divided_graph import DividedGraph, Filled, Last, Memory, Part, Read, Result, Summed
from elixir_compile.rewrite.local_args import is_created, is_seeded, local_args
from elixir_compile.rewrite.regions import RegionGraph


def divide(
    region: RegionGraph,
    states: Mapping[fx.Node, States],
    batch: int,
    micro_batches: int,
    leaving: Mapping[fx.Node, GroupId] = MappingProxyType({}),
) -> DividedGraph | None:
    """Return the parts of `region` for a batch of `batch` rows in `micro_batches`; None if no op of it reads the batch.

    `states` are those of the half from which the region was cut. `leaving` has the group of each of its values that
    leaves the device in slices. Raises IllegalSchedule if an op of the region mixes
    the batch.
    """
    divider = _Divider(region, _walked(region, states, batch), batch, micro_batches, leaving)
    return divider.divided() if divider.has_body else None


class _Divider:
    """Writes the parts of one region."""

    def __init__(
        self,
        region: RegionGraph,
        walked: Walked,
        batch: int,
        micro_batches: int,
        leaving: Mapping[fx.Node, GroupId],
    ) -> None:
        self._region = region
        self._states = walked.states
        self._narrowed = walked.narrowed
        self._batch = batch
        self._num = micro_batches
        graph = region.module.graph
        self._outputs = [node for node in outputs_of(graph) if isinstance(node, fx.Node)]
        own = zip(self._outputs, region.outputs, strict=True)
        self._leaving = {node: leaving[source] for node, source in own if source in leaving}
        placeholders = graph.find_nodes(op="placeholder")
        self._places: dict[fx.Node, int] = {node: place for place, node in enumerate(placeholders)}
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self._apart = self._views_taken_apart(calls)
        self._whole_views = self._views_of_inputs() | self._apart
        self._in_body = [node for node in calls if self._is_in_body(node)]
        self._in_tail = [node for node in calls if self._is_in_tail(node)]
        behind = {*self._in_body, *self._in_tail}
        self._in_head = [
            node for node in calls if node not in behind and (not is_created(node) or node in self._outputs)
        ]

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

    def _views_taken_apart(self, calls: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the views of inputs that do not keep the slices together, and the views of these: a view of a slice
        would be another value than a slice of the view."""
        found: set[fx.Node] = set()
        for node in calls:
            base = viewed(node)
            if base is None or (base.op != "placeholder" and base not in found):
                continue
            if base in found or self._mixes(node, base):
                found.add(node)
        return found

    def _mixes(self, view: fx.Node, base: fx.Node) -> bool:
        state, rule = self._states[base], rule_for(view.target)
        if not isinstance(state, State) or not state.is_each:
            return False
        if rule is None:
            return True
        try:
            rule(Call(view, {base: state}, self._batch))
        except Mixes:
            return True
        return False

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
        part = Part(self._region)
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
        for node in order:
            part.copies[node] = part.graph.node_copy(node, lambda source: self._whole(part, source))
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
        if node not in self._places:  # a created tensor, which every part makes for itself
            part.copies[node] = part.graph.node_copy(node, lambda source: self._whole(part, source))
            return part.copies[node]
        return part.read(Read(place=self._places[node]), node, value_of(node))

    def _body(self) -> tuple[RegionGraph, tuple[Read, ...], tuple[Result, ...], tuple[Memory, ...]]:
        part = Part(self._region)
        for node in self._in_body:
            self._write_local(part, node)
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
        wholes.setdefault(key, Memory(numel=numel, dtype=value.dtype, device=value.device, group=group))
        is_in_owner = owner is not node and owner in outputs and tensor_of(owner).dtype is value.dtype
        return Filled(
            whole=list(wholes).index(key),
            dim=state.dim,
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            offset=int(value.storage_offset()),
            is_copied=not is_in_owner,
        )

    def _write_local(self, part: Part, node: fx.Node) -> None:
        """Copy `node` into the body, with the sizes of one micro-batch, and check the shape of its result."""
        state = self._states[node]
        dim = state.dim if isinstance(state, State) and state.is_each else None
        args, kwargs = local_args(node, dim, self._num)

        def local(source: fx.Node) -> fx.Node:
            return self._local(part, source, self._narrowed.get((node, source)), is_seed=is_seeded(node))

        made = part.graph.create_node(
            "call_function", node.target, map_arg(args, local), map_arg(kwargs, local), name=node.name
        )
        made.meta = {**node.meta, "val": _computed(made, value_of(node))}
        part.copies[node] = made
        for value, whole, state in zip(
            leaves_of(made.meta["val"]), leaves_of(value_of(node)), _spread(self._states[node], node), strict=True
        ):
            self._check(node, value, whole, state)

    def _check(self, node: fx.Node, value: object, whole: object, state: State) -> None:
        if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
            return
        expected = self._local_shape(whole, state)
        if tuple(value.shape) != expected:
            raise AssertionError(
                f"{node.name} = {node.target} has the shape {tuple(value.shape)} in a micro-batch; expected {expected}"
            )

    def _local_shape(self, whole: torch.Tensor, state: State) -> tuple[int, ...]:
        return tuple(
            size // self._num if state.is_each and dim == state.dim else size for dim, size in enumerate(whole.shape)
        )

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
            return self._created(part, node, dim)
        value = value_of(node)
        if dim is not None:
            value = _narrowed(value, dim, self._num)
        return part.read(Read(place=self._places[node], dim=dim, is_seed=is_seed), node, value)

    def _created(self, part: Part, node: fx.Node, dim: int | None) -> fx.Node:
        """Return `node`, a tensor of one value, at the size of a micro-batch along `dim`."""
        key = (node, dim)
        if key not in part.created:
            args, kwargs = local_args(node, dim, self._num)
            made = part.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
            made.meta = {**node.meta, "val": _computed(made, value_of(node))}
            part.created[key] = made
        return part.created[key]

    def _tail(self) -> tuple[RegionGraph | None, tuple[int, ...]]:
        outputs = [node for node in self._in_tail if node in self._outputs]
        if not outputs:
            return None, ()
        part = Part(self._region)
        for node in self._in_tail:
            part.copies[node] = part.graph.node_copy(node, lambda source: self._whole(part, source))
        for node in outputs:
            self._places[node] = len(self._places)
        graph, reads = part.finished([part.copies[node] for node in outputs])
        return graph, tuple(read.place for read in reads)


def _walked(region: RegionGraph, states: Mapping[fx.Node, States], batch: int) -> Walked:
    """Return the states of the nodes of `region`. Its inputs are whole: a sum of an earlier region is equal for all
    micro-batches."""
    placeholders = region.module.graph.find_nodes(op="placeholder")
    given: dict[fx.Node, State] = {}
    for node, source in zip(placeholders, region.inputs, strict=True):
        state = states.get(source)
        if isinstance(state, State) and state.is_each:
            given[node] = state
    walked = walk(region.module.graph, given, batch)
    mixing = next((node for node in walked.mixes if viewed(node) is None), None)
    if mixing is not None:
        raise IllegalSchedule(
            f"{region.id} runs in micro-batches, but {mixing.name} mixes them: {walked.mixes[mixing]}."
        )
    return walked


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of `node`: of several results of an op, each owns its own."""
    *views, last = view_chain(node)
    is_result = bool(views) and not isinstance(value_of(last), torch.Tensor)
    return views[-1] if is_result else last


def _spread(state: States, node: fx.Node) -> list[State]:
    """Return the state of each leaf of the value of `node`."""
    num = len(leaves_of(value_of(node)))
    return [state] * num if isinstance(state, State) else list(state)


def _narrowed(value: object, dim: int, num: int) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    with compat.own_fake_mode(value):
        return value.narrow(dim, 0, value.shape[dim] // num)


def _computed(node: fx.Node, like: object) -> object:
    """Return the value of `node`, computed on the fake values of its arguments; `like` is a value in the same mode."""
    fake = next(leaf for leaf in leaves_of(like) if isinstance(leaf, torch.Tensor))
    args, kwargs = values_of_arguments(node, value_of)
    with compat.own_fake_mode(fake):
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
