"""Find how each value of a captured graph divides by the rows of the batch, and which storages hold scattered
slices."""

import operator
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from elixir_compile import compat
from elixir_compile.graph.capture.batch_call import (
    Call,
    Conflict,
    Mixes,
    all_results,
    check_sizes,
    has_rows_at,
    known_shape,
    operands_of,
    shape_of,
)
from elixir_compile.graph.capture.batch_rules import CREATES, LOOKUPS, RANDOM, is_linear_in_sum, is_pointwise, rule_for
from elixir_compile.graph.capture.captured import (
    SAME,
    SUM,
    TOTAL,
    UNDIVIDED,
    Captured,
    State,
    States,
    StepStates,
    Walked,
    each,
    states_in,
)
from elixir_compile.graph.capture.node_facts import (
    MARKERS,
    OF_MODULE,
    TICKET,
    as_node,
    gradient,
    has_tensor,
    is_collective,
    is_number,
    is_pure,
    leaves_of,
    outputs_of,
    source_of,
    tensor_of,
    value_of,
)
from elixir_compile.graph.capture.rewire import view_chain
from elixir_compile.ir import Batched, Phase, StorageId
from elixir_compile.ir.schedule import LEAST_ROWS

# ----------------------------------------------------------------------------------------------------------------------
# Pass once through a graph and find the state of each value, with the rules of `batch_rules`.


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
        if node.target is operator.getitem and isinstance(source := node.args[0], fx.Node):
            states = self.states[source]
            self.states[node] = states[int(str(node.args[1]))] if isinstance(states, tuple) else states
            if source in self.laps:
                self.laps[node] = self.laps[source]
            return
        if is_number(node):  # a number of the whole batch; `batch_call` says where that of a micro-batch is read
            self.states[node] = SAME
            return
        read = {source: self._read(source) for source in operands_of(node)}
        kinds = {state.batched for state in read.values()}
        has_sum = Batched.SUM in kinds or any(state.is_total for state in read.values())
        try:
            if not is_pure(node):
                if compat.is_op_overload(node.target) and compat.schema_of(node.target).is_mutable:
                    raise Mixes("it writes one of its inputs")
                if is_collective(node):
                    raise Mixes("a collective joins the rows of several ranks")
                raise Mixes(f"no rule says how {node.target} treats the rows of the batch")
            if Batched.EACH in kinds:
                if has_sum:
                    raise Mixes("a sum over the batch meets rows of it")
                call = Call(node, read, self.batch, self.symbol)
                states = state_by_rule(call)
                self.narrowed.update({(node, operand): dim for operand, dim in call.narrowed.items()})
            elif Batched.SUM in kinds and is_linear_in_sum(node, read) and self._allows(node, read, SUM):
                states = all_results(node, SUM)
            elif has_sum:
                states = all_results(node, TOTAL)
            elif str(node.target) in RANDOM:
                shape = shape_of(node)
                is_of_rows = len(shape) and shape[0] and shape[0] % self.batch == 0
                states = each(0) if is_of_rows and self._allows(node, read, each(0)) else SAME
            else:
                states = all_results(node, SAME)
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

    def _mix(self, node: fx.Node, read: Mapping[fx.Node, State], why: str) -> None:
        """Note that `node`, or the op of which it is a view, runs on whole tensors.

        Its results are EACH again along a dimension that has the same size as in an operand with slices there.
        """
        sliced = [(state.dim, shape_of(source)) for source, state in read.items() if state.is_each]

        def again(value: object) -> State:
            if not isinstance(value, torch.Tensor):
                return SAME
            shape = known_shape(value)
            # A value of many fewer dimensions, such as a mean of each channel, is no slice, even if its size is that.
            alike = [(dim, own) for dim, own in sliced if max(dim, len(own) - 2) < len(shape)]
            found = (dim for dim, own in alike if shape[dim] == own[dim])
            return next((each(dim) for dim in found if not self.symbol or has_rows_at(value, dim, self.symbol)), SAME)

        value = value_of(node)
        self.states[node] = tuple(map(again, value)) if isinstance(value, (tuple, list)) else again(value)
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
            is_lookup, is_created = str(node.target) in LOOKUPS, str(node.target) in CREATES
            if not is_lookup and not is_created and not is_pointwise(node.target):
                continue
            readers = [user for user in node.users if user.op != "output"]
            dims = {self.narrowed.get((user, node)) for user in readers}
            if len(dims) != 1 or None in dims:
                continue
            (dim,) = dims
            assert dim is not None
            if is_lookup and dim >= tensor_of(as_node(node.args[1])).ndim:
                continue
            # The operands of the value are read in slices too, but for the table of a lookup.
            ndim, operands = tensor_of(node).ndim, operands_of(node)
            if is_lookup:
                ndim, operands = ndim - 1, operands[1:]
            narrowed: dict[fx.Node, int] = {}
            for operand in operands if not is_created else ():
                own = shape_of(operand)
                place = dim - (ndim - len(own))
                if place >= 0 and own[place] != 1:
                    narrowed[operand] = place
            if self._allows(node, {own: self._read(own) for own in operands_of(node)}, each(dim), narrowed):
                self.narrowed.update({(node, operand): place for operand, place in narrowed.items()})
                self.states[node] = each(dim)
                for user in readers:
                    del self.narrowed[user, node]


# ----------------------------------------------------------------------------------------------------------------------
# Find how each value of a captured step is made of its values in micro-batches, and which ops need the whole batch.
#
# `walk` passes a graph once, with the rules of `batch_rules`. The inputs whose dimension 0 is the batch are EACH(0).
# Whatever inputs are chosen, the result is right: with a wrong choice only more ops mix the batch.
#
# An op that mixes the batch runs once, on whole tensors, between two laps. So all sums of the ops before it are
# complete behind it, and count as SAME. The rest of a step is cut into laps by the plan, which the walk does not know.
# It takes all ops between two that mix for one lap: more cuts only turn more sums into SAME.
#
# A view that takes the slices apart, such as `[T, B]` to `[T * B]`, computes nothing, so it is no op of a `StepGraph`.
# The op that made the memory mixes the batch instead. A view of an input is taken of the whole input, so it never
# mixes.
#
# Sizes may be dynamic. If the number of rows is a symbol, a micro-batch runs the same graph with fewer rows as the
# symbol: `batch_call` says which ops allow that.


def step_states(captured: Captured) -> StepStates:
    """Return the states of the values of `captured`, a capture or one that `graph.rewrite.regions` has changed.

    The batch of a step without a backward is 1. So is the batch of a step whose sizes depend on data, as the number of
    nonzero entries.
    """
    graph = captured.forward.graph
    given = [node for node in graph.find_nodes(op="placeholder") if has_tensor(node) and node.users]
    given = [node for node in given if not node.meta.get(OF_MODULE, False) and tensor_of(node).ndim > 0]
    inputs = [node for node in given if shape_of(node)[0] > 1]
    if captured.backward is None or not inputs:
        return UNDIVIDED
    backward = captured.backward.graph
    sizes = Counter(shape_of(node)[0] for node in inputs)
    ((size, _),) = sizes.most_common(1)  # of sizes that as many inputs have, the size of the first input
    own = [node for node in inputs if shape_of(node)[0] == size]
    batch = tensor_of(own[0]).shape[0]
    values = (leaf for node in (*graph.nodes, *backward.nodes) for leaf in leaves_of(value_of(node)))
    symbolic = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    why = ""
    if any(isinstance(value, symbolic) and free_unbacked_symbols(value) for value in values):
        why = "its sizes depend on the elements of a tensor"
    elif isinstance(batch, torch.SymInt):  # a micro-batch must be able to have any number of rows in its place
        symbol = compat.symbol_of(batch)
        numbers = [map(value_of, half.find_nodes(op="placeholder")) for half in (graph, backward)]
        if not symbol:
            why = f"its number of rows, {batch}, is computed from other sizes"
        elif not compat.may_have_any_value_from(LEAST_ROWS, batch):
            why = "the model reads conditions from its number of rows, which a part of them may not meet"
        elif any(all(compat.symbol_of(value) != symbol for value in of_half) for of_half in numbers):
            why = "its number of rows is no input of the graph"
    if why:
        return replace(UNDIVIDED, undivided=why)
    forward = _best(graph, {node: each(0) for node in own}, batch)
    seeds = _between(captured, backward, forward)
    return StepStates(batch=batch, forward=forward, backward=walk(backward, seeds, batch))


def mark_inputs_of_modules(graph: fx.Graph, positions: Collection[int]) -> None:
    """Mark the inputs of AOTAutograd's `graph` at `positions` as tensors of modules, for `step_states`."""
    for node in compat.inputs_at(graph, positions):
        node.meta[OF_MODULE] = True


_MOST_LOST = 0.9
"""Values with slices that must be left without an input, as a share of those with it."""


def _best(graph: fx.Graph, given: Mapping[fx.Node, State], batch: int | torch.SymInt) -> Walked:
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


def _between(captured: Captured, backward: fx.Graph, forward: Walked) -> dict[fx.Node, State]:
    """Return the EACH inputs of `backward`: saved values, and tangents of outputs, in the states of the forward."""
    saved = {node.name: node for node in captured.saved if isinstance(node, fx.Node)}
    outputs = [node for node in outputs_of(captured.forward.graph)[: captured.num_outputs] if isinstance(node, fx.Node)]
    found: dict[fx.Node, State] = {}
    for node in backward.find_nodes(op="placeholder"):
        source = saved.get(str(node.target))
        if source is None and has_tensor(node) and node.target != TICKET:
            # Tangents come in the order of the outputs. Outputs that need no gradient have none.
            shape = shape_of(node)
            source = next((out for out in outputs if has_tensor(out) and shape_of(out) == shape), None)
            outputs = outputs if source is None else outputs[outputs.index(source) + 1 :]
        state = SAME if source is None else forward.states.get(source, SAME)
        if isinstance(state, State) and state.is_each:
            found[node] = state
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Find the storages whose slices of micro-batches are not consecutive pieces of memory.
#
#   [B, T, C]           slice j is bytes j * n to (j + 1) * n of the storage       consecutive
#   [T, B, C]           slice j has rows of every t                                scattered
#   [B, C] of [B, 2C]   slice j is a part of bytes j * n to (j + 1) * n            consecutive


def scattered(
    graph: fx.Graph, phase: Phase, storages: Mapping[fx.Node, tuple[StorageId, ...]], walked: Walked
) -> set[StorageId]:
    """Return the storages of `graph`, the half of `phase`, of which a slice cannot be alone in memory.

    `storages` has the storages of each node, and `walked` the states. A value that the backward returns counts too: the
    caller takes the whole of it.
    """

    def is_consecutive(value: object, state: States | None) -> bool:
        if not (isinstance(value, torch.Tensor) and isinstance(state, State) and state.is_each):
            return False
        layout = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
        if not all(isinstance(number, int) for number in layout):
            return False
        return compat.MemoryView.of(value).is_consecutive(state.dim, value.untyped_storage().nbytes())

    found: set[StorageId] = set()
    for node, names in storages.items():
        value, state = value_of(node), walked.states.get(node)
        if isinstance(value, (tuple, list)):
            continue  # its results are nodes of their own
        if len(names) == 1 and node not in walked.apart and is_consecutive(value, state):
            continue
        found.update(names)
    if phase is Phase.BACKWARD:
        returned = [node for node in outputs_of(graph) if isinstance(node, fx.Node)]
        returned += [source_of(node, 0) for node in graph.find_nodes(op="call_function", target=gradient)]
        found.update(name for node in returned for name in storages.get(node, ()))
    return found
