"""Pass once through a graph and find the state of each value, with the rules of `batch_rules`: see `batch`."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.batch_call import (
    SAME,
    SUM,
    TOTAL,
    Call,
    Conflict,
    Mixes,
    State,
    States,
    all_results,
    each,
    known_shape,
    operands_of,
    shape_of,
    states_in,
)
from elixir_compile.graph.capture.batch_rules import CREATES, LOOKUPS, RANDOM, is_linear_in_sum, is_pointwise, rule_for
from elixir_compile.graph.capture.batch_sizes import check_sizes, has_rows_at
from elixir_compile.graph.capture.markers import MARKERS, gradient
from elixir_compile.graph.capture.node_facts import as_node, is_number, is_pure, tensor_of, value_of
from elixir_compile.graph.capture.rings import is_collective
from elixir_compile.graph.capture.views import view_chain
from elixir_compile.ir import Batched


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


def walk(graph: fx.Graph, given: Mapping[fx.Node, State], batch: int | torch.SymInt) -> Walked:
    """Return the states of the values of `graph`, half of a step or a region of it, for a batch of `batch` rows.

    `given` has the states of placeholders; all others are SAME.
    """
    return _Walk(given, compat.stand_in(batch), compat.symbol_of(batch)).passed(graph)


def state_by_rule(call: Call) -> States:
    """Return the state of the result of `call`, which reads a value with slices and no sum.

    Raises Mixes if the op needs the whole batch.
    """
    rule = rule_for(call.node.target)
    if rule is None:
        raise Mixes(f"no rule says how {call.node.target} treats the rows of the batch")
    states = rule(call)
    if call.narrowed:
        call.check_narrowed()
    check_sizes(call.node, call.read, call.narrowed, states, call.symbol)
    return states


@dataclass(slots=True)
class _Walk:
    """One pass through a graph."""

    given: Mapping[fx.Node, State]
    batch: int
    symbol: str
    """The symbol of the number of rows; empty if it is constant."""
    states: dict[fx.Node, States] = field(default_factory=dict)
    mixes: dict[fx.Node, str] = field(default_factory=dict)
    apart: set[fx.Node] = field(default_factory=set)
    narrowed: dict[tuple[fx.Node, fx.Node], int] = field(default_factory=dict)
    num_conflicts: int = 0
    lap: int = 0
    """The number of ops passed that mix the batch."""
    laps: dict[fx.Node, int] = field(default_factory=dict)
    """The number of the lap in which a sum or a total is made. It is whole in later laps."""

    def passed(self, graph: fx.Graph) -> Walked:
        for node in graph.nodes:
            if node.op == "call_function" and node.target not in MARKERS:
                self._pass(node)
            elif node.op != "output" and node.target is not gradient:
                self.states[node] = self.given.get(node, SAME)
        self._divide_shared(graph)
        return Walked(
            states=self.states,
            mixes=self.mixes,
            narrowed=self.narrowed,
            apart=frozenset(self.apart),
            num_conflicts=self.num_conflicts,
        )

    def _pass(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            self._pass_result(node, node.args[0])
            return
        if is_number(node):  # a number of the whole batch; `batch_sizes` says where that of a micro-batch is read
            self.states[node] = SAME
            return
        read = {source: self._read(source) for source in operands_of(node)}
        kinds = {state.batched for state in read.values()}
        try:
            if Batched.EACH in kinds or not is_pure(node):
                states = self._ruled(node, read, kinds)
            elif Batched.SUM in kinds and is_linear_in_sum(node, read) and self._allows(node, read, SUM):
                states = all_results(node, SUM)
            elif Batched.SUM in kinds or any(state.is_total for state in read.values()):
                states = all_results(node, TOTAL)
            else:
                states = self._made(node, read)
        except Mixes as mixed:
            self.num_conflicts += isinstance(mixed, Conflict)
            self._mix(node, read, str(mixed))
            return
        self.states[node] = states
        if SUM in states_in(states) or TOTAL in states_in(states):
            self.laps[node] = self.lap

    def _read(self, source: fx.Node) -> State:
        """Return the state in which the next op reads `source`: behind its lap, a sum is SAME."""
        state = self.states[source]
        if not isinstance(state, State):
            return SAME
        is_sum = state.batched is Batched.SUM or state.is_total
        return SAME if is_sum and self.laps[source] < self.lap else state

    def _pass_result(self, node: fx.Node, source: fx.Node) -> None:
        states = self.states[source]
        self.states[node] = states[int(str(node.args[1]))] if isinstance(states, tuple) else states
        if source in self.laps:
            self.laps[node] = self.laps[source]

    def _ruled(self, node: fx.Node, read: Mapping[fx.Node, State], kinds: set[Batched]) -> States:
        if not is_pure(node):
            raise Mixes(_why_impure(node))
        if Batched.SUM in kinds or any(state.is_total for state in read.values()):
            raise Mixes("a sum over the batch meets rows of it")
        call = Call(node, read, self.batch, self.symbol)
        states = state_by_rule(call)
        self.narrowed.update({(node, operand): dim for operand, dim in call.narrowed.items()})
        return states

    def _allows(
        self,
        node: fx.Node,
        read: Mapping[fx.Node, State],
        states: States,
        narrowed: Mapping[fx.Node, int] = MappingProxyType({}),
    ) -> bool:
        """Return whether `node` may have `states` if the number of rows is a symbol, see `check_sizes`."""
        try:
            check_sizes(node, read, narrowed, states, self.symbol)
        except Mixes:
            return False
        return True

    def _made(self, node: fx.Node, read: Mapping[fx.Node, State]) -> States:
        """Return the state of a result of `node`, which reads SAME values only."""
        if str(node.target) in RANDOM:
            shape = shape_of(node)
            is_of_rows = len(shape) and shape[0] and shape[0] % self.batch == 0 and self._allows(node, read, each(0))
            return each(0) if is_of_rows else SAME
        return all_results(node, SAME)

    def _mix(self, node: fx.Node, read: Mapping[fx.Node, State], why: str) -> None:
        """Note that `node`, or the op of which it is a view, runs on whole tensors.

        Its results may be divided again, along dimensions that stay.
        """
        self.states[node] = _divided_again(node, read, self.symbol)
        owner = view_chain(node)[-1]
        if owner.op == "call_function" and owner.target not in MARKERS:
            self.mixes.setdefault(owner, why)
        else:
            self.apart.add(node)
        self.lap += owner is node

    def _divide_shared(self, graph: fx.Graph) -> None:
        """Make a SAME value EACH if it is computed by element or row and all that read it in the graph read slices.

        A tensor of zeros, or a mask, then never exists for the whole batch.
        """
        for node in reversed(graph.nodes):
            if self.states.get(node) != SAME or node.op != "call_function" or node in self.mixes:
                continue
            if str(node.target) not in CREATES | LOOKUPS and not is_pointwise(node.target):
                continue
            readers = [user for user in node.users if user.op != "output"]
            dims = {self.narrowed.get((user, node)) for user in readers}
            if len(dims) != 1 or None in dims:
                continue
            (dim,) = dims
            assert dim is not None
            if str(node.target) not in LOOKUPS or dim < tensor_of(as_node(node.args[1])).ndim:
                self._divide(node, readers, dim)

    def _divide(self, node: fx.Node, readers: list[fx.Node], dim: int) -> None:
        """Make `node`, whose `readers` read slices along `dim`, EACH, and its own operands read in slices."""
        ndim, operands = tensor_of(node).ndim, operands_of(node)
        if str(node.target) in LOOKUPS:
            ndim, operands = ndim - 1, operands[1:]
        narrowed: dict[fx.Node, int] = {}
        for operand in operands if str(node.target) not in CREATES else ():
            own = shape_of(operand)
            place = dim - (ndim - len(own))
            if place >= 0 and own[place] != 1:
                narrowed[operand] = place
        if not self._allows(node, {own: self._read(own) for own in operands_of(node)}, each(dim), narrowed):
            return
        self.narrowed.update({(node, operand): place for operand, place in narrowed.items()})
        self.states[node] = each(dim)
        for user in readers:
            del self.narrowed[user, node]


def _why_impure(node: fx.Node) -> str:
    if compat.is_op_overload(node.target) and compat.schema_of(node.target).is_mutable:
        return "it writes one of its inputs"
    if is_collective(node):
        return "a collective joins the rows of several ranks"
    return f"no rule says how {node.target} treats the rows of the batch"


def _divided_again(node: fx.Node, read: Mapping[fx.Node, State], symbol: str) -> States:
    """Return the state of the results of `node`, which ran on the whole batch: EACH along a dimension that has the same
    size as in an operand with slices there."""
    sliced = [(state.dim, shape_of(source)) for source, state in read.items() if state.is_each]

    def again(value: object) -> State:
        shape = known_shape(value) if isinstance(value, torch.Tensor) else ()
        # A value of many fewer dimensions, such as a mean of each channel, is no slice, even if its size is that.
        alike = [(dim, own) for dim, own in sliced if max(dim, len(own) - 2) < len(shape)]
        found = (dim for dim, own in alike if shape[dim] == own[dim] and _is_sliced(value, dim, symbol))
        return next(map(each, found), SAME)

    value = value_of(node)
    return tuple(map(again, value)) if isinstance(value, (tuple, list)) else again(value)


def _is_sliced(value: object, dim: int, symbol: str) -> bool:
    return not symbol or (isinstance(value, torch.Tensor) and has_rows_at(value, dim, symbol))
