"""Find how each value of a captured step is made of its values in micro-batches, and which ops need the whole batch.

```text
  EACH(d)  one slice per micro-batch along dimension d      SAME  equal for all      SUM  the sum over micro-batches
```

`walk` passes a graph once, with the rules of `batch_rules`. The inputs whose dimension 0 is the batch are EACH(0).
Whatever inputs are chosen, the result is right: with a wrong choice only more ops mix the batch.

An op that mixes the batch runs once, on whole tensors, between two laps. So all sums of the ops before it are complete
behind it, and count as SAME. The rest of a step is cut into laps by the plan, which the walk does not know. It takes
all ops between two that mix for one lap: more cuts only turn more sums into SAME.

A view that takes the slices apart, such as `[T, B]` to `[T * B]`, computes nothing, so it is no op of a `StepGraph`.
The op that made the memory mixes the batch instead. A view of an input is taken of the whole input, so it never mixes.

The dimension of the slices belongs to a node, because two views of one storage may have it in different places.
`Storage.batched` and `Op.mixes` have the rest.
"""

import operator
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.capture.batch_call import (
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
    operands_of,
)
from elixir_compile.capture.batch_rules import CREATES, LOOKUPS, RANDOM, is_linear_in_sum, is_pointwise, rule_for
from elixir_compile.capture.markers import MARKERS, TICKET, gradient
from elixir_compile.capture.node_facts import (
    as_node,
    has_dynamic_size,
    has_tensor,
    is_pure,
    outputs_of,
    tensor_of,
    value_of,
)
from elixir_compile.capture.views import view_chain
from elixir_compile.ir import Batched, Phase

if TYPE_CHECKING:
    from elixir_compile.capture.convert import Captured

OF_MODULE = "elixir_of_module"
"""The key in `node.meta` that marks the inputs that are tensors of modules, such as buffers. They are no batch, even if
they have as many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """The state of each value of a graph, and the ops of the graph that mix the batch."""

    states: Mapping[fx.Node, States]
    """The state of each node with a value."""
    mixes: Mapping[fx.Node, str]
    """Why an op needs the whole batch, or a view of its result."""
    narrowed: Mapping[tuple[fx.Node, fx.Node], int]
    """Pairs of a node and a SAME value that it reads in slices, with the dimension of the slices."""

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

    batch: int
    """The rows of the batch, 1 if the step has no batch that can be divided; all values are then SAME."""
    forward: Walked
    backward: Walked

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


def step_states(captured: "Captured") -> StepStates:
    """Return the states of the values of `captured`, a capture or one that `rewrite.recompute` has changed.

    The batch of a step without a backward, or with dynamic sizes, is 1. Sizes may also depend on data, as the number of
    nonzero entries.
    """
    graph = captured.forward.graph
    placeholders = graph.find_nodes(op="placeholder")
    if captured.backward is None or any(map(has_dynamic_size, (*graph.nodes, *captured.backward.graph.nodes))):
        return UNDIVIDED
    inputs = [node for node in placeholders if _may_have_batch(node)]
    sizes = Counter(int(tensor_of(node).shape[0]) for node in inputs)
    if not sizes:
        return UNDIVIDED
    ((batch, _),) = sizes.most_common(1)  # of sizes that as many inputs have, the size of the first input
    given = {node: each(0) for node in inputs if tensor_of(node).shape[0] == batch}
    forward = _best(graph, given, batch)
    seeds = _between(captured, captured.backward.graph, forward)
    return StepStates(batch=batch, forward=forward, backward=walk(captured.backward.graph, seeds, batch))


def mark_inputs_of_modules(graph: fx.Graph, positions: Collection[int]) -> None:
    """Mark the inputs of AOTAutograd's `graph` at `positions` as tensors of modules, for `step_states`."""
    for node in compat.inputs_at(graph, positions):
        node.meta[OF_MODULE] = True


def _may_have_batch(node: fx.Node) -> bool:
    is_input = has_tensor(node) and node.users and not node.meta.get(OF_MODULE, False)
    return bool(is_input) and tensor_of(node).ndim > 0 and tensor_of(node).shape[0] > 1


_MOST_LOST = 0.9
"""Values with slices that must be left without an input, as a share of those with it."""


def _best(graph: fx.Graph, given: Mapping[fx.Node, State], batch: int) -> Walked:
    """Return the walk with the inputs `given`, without one of them if it has as many rows as the batch by chance.

    Such an input, as a mask `[T, T]`, causes all conflicts between slices, and without it nearly as many values have
    slices. Each of two towers whose rows are compared causes all conflicts too, but half of the values are its own.
    """
    walked = walk(graph, given, batch)
    if not walked.num_conflicts or len(given) == 1:
        return walked
    fewest = _MOST_LOST * _num_divided(walked)
    for node in given:
        other = walk(graph, {own: state for own, state in given.items() if own is not node}, batch)
        if not other.num_conflicts and _num_divided(other) >= fewest:
            return other
    return walked


def _num_divided(walked: Walked) -> int:
    return sum(any(state.is_each for state in states_in(states)) for states in walked.states.values())


def _between(captured: "Captured", backward: fx.Graph, forward: Walked) -> dict[fx.Node, State]:
    """Return the EACH inputs of `backward`: saved values, and tangents of outputs, in the states of the forward."""
    saved = {node.name: node for node in captured.saved if isinstance(node, fx.Node)}
    outputs = [node for node in outputs_of(captured.forward.graph)[: captured.num_outputs] if isinstance(node, fx.Node)]
    found: dict[fx.Node, State] = {}
    for node in backward.find_nodes(op="placeholder"):
        source = saved.get(str(node.target))
        if source is None and has_tensor(node) and node.target != TICKET:
            # Tangents come in the order of the outputs. Outputs that need no gradient have none.
            shape = tensor_of(node).shape
            source = next((out for out in outputs if has_tensor(out) and tensor_of(out).shape == shape), None)
            outputs = outputs if source is None else outputs[outputs.index(source) + 1 :]
        state = SAME if source is None else forward.states.get(source, SAME)
        if isinstance(state, State) and state.is_each:
            found[node] = state
    return found


def states_in(states: States) -> tuple[State, ...]:
    """Return the state of each result of a node."""
    return (states,) if isinstance(states, State) else states


def walk(graph: fx.Graph, given: Mapping[fx.Node, State], batch: int) -> Walked:
    """Return the states of the values of `graph`, half of a step or a region of it, for a batch of `batch` rows.

    `given` has the states of placeholders; all others are SAME.
    """
    return _Walk(given, batch).passed(graph)


@dataclass(slots=True)
class _Walk:
    """One pass through a graph."""

    given: Mapping[fx.Node, State]
    batch: int
    states: dict[fx.Node, States] = field(default_factory=dict)
    mixes: dict[fx.Node, str] = field(default_factory=dict)
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
        return Walked(states=self.states, mixes=self.mixes, narrowed=self.narrowed, num_conflicts=self.num_conflicts)

    def _pass(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            self._pass_result(node, node.args[0])
            return
        read = {source: self._read(source) for source in operands_of(node)}
        kinds = {state.batched for state in read.values()}
        try:
            if Batched.EACH in kinds or not is_pure(node):
                states = self._ruled(node, read, kinds)
            elif Batched.SUM in kinds and is_linear_in_sum(node, read):
                states = all_results(node, SUM)
            elif Batched.SUM in kinds or any(state.is_total for state in read.values()):
                states = all_results(node, TOTAL)
            else:
                states = self._made(node)
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
        rule = rule_for(node.target)
        if rule is None:
            raise Mixes(f"no rule says how {node.target} treats the rows of the batch")
        call = Call(node, read, self.batch)
        states = rule(call)
        if call.narrowed:
            call.check_narrowed()
            self.narrowed.update({(node, operand): dim for operand, dim in call.narrowed.items()})
        return states

    def _made(self, node: fx.Node) -> States:
        """Return the state of a result of `node`, which reads SAME values only."""
        if str(node.target) in RANDOM:
            shape = tensor_of(node).shape
            return each(0) if len(shape) and shape[0] and shape[0] % self.batch == 0 else SAME
        return all_results(node, SAME)

    def _mix(self, node: fx.Node, read: Mapping[fx.Node, State], why: str) -> None:
        """Note that `node`, or the op of which it is a view, runs on whole tensors.

        Its results may be divided again, along dimensions that stay.
        """
        self.states[node] = _divided_again(node, read)
        owner = view_chain(node)[-1]
        if owner.op == "call_function" and owner.target not in MARKERS:
            self.mixes.setdefault(owner, why)
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
        for operand in operands if str(node.target) not in CREATES else ():
            own = tensor_of(operand).shape
            place = dim - (ndim - len(own))
            if place >= 0 and own[place] != 1:
                self.narrowed[node, operand] = place
        self.states[node] = each(dim)
        for user in readers:
            del self.narrowed[user, node]


def _why_impure(node: fx.Node) -> str:
    if compat.is_op_overload(node.target) and compat.schema_of(node.target).is_mutable:
        return "it writes one of its inputs"
    return f"no rule says how {node.target} treats the rows of the batch"


def _divided_again(node: fx.Node, read: Mapping[fx.Node, State]) -> States:
    """Return the state of the results of `node`, which ran on the whole batch: EACH along a dimension that has the same
    size as in an operand with slices there."""
    sliced = [(state.dim, tensor_of(source).shape) for source, state in read.items() if state.is_each]

    def again(value: object) -> State:
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        # A value of many fewer dimensions, such as a mean of each channel, is no slice, even if its size is that.
        alike = [(dim, own) for dim, own in sliced if max(dim, len(own) - 2) < len(shape)]
        found = (dim for dim, own in alike if shape[dim] == own[dim])
        return next(map(each, found), SAME)

    value = value_of(node)
    return tuple(map(again, value)) if isinstance(value, (tuple, list)) else again(value)
