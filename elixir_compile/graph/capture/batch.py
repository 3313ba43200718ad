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

Sizes may be dynamic. If the number of rows is a symbol, a micro-batch runs the same graph with fewer rows as the
symbol: `batch_sizes` says which ops allow that.

The dimension of the slices belongs to a node, because two views of one storage may have it in different places.
`Storage.batched` and `Op.mixes` have the rest.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from elixir_compile import compat
from elixir_compile.graph.capture.batch_call import SAME, State, States, each, shape_of, states_in
from elixir_compile.graph.capture.batch_walk import Walked, walk
from elixir_compile.graph.capture.markers import TICKET
from elixir_compile.graph.capture.node_facts import has_tensor, leaves_of, outputs_of, tensor_of, value_of
from elixir_compile.ir import Phase
from elixir_compile.ir.rows import LEAST_ROWS

if TYPE_CHECKING:
    from elixir_compile.graph.capture.convert import Captured

OF_MODULE = "elixir_of_module"
"""The key in `node.meta` that marks the inputs that are tensors of modules, such as buffers. They are no batch, even if
they have as many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """The states of the values of a captured step."""

    batch: int | torch.SymInt
    """The rows of the batch, 1 if the step has no batch that can be divided; all values are then SAME."""
    forward: Walked
    backward: Walked
    undivided: str = ""
    """Why the batch that the inputs share cannot be divided, empty if it can be."""

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
    """Return the states of the values of `captured`, a capture or one that `graph.rewrite.recompute` has changed.

    The batch of a step without a backward is 1. So is the batch of a step whose sizes depend on data, as the number of
    nonzero entries.
    """
    graph = captured.forward.graph
    inputs = [node for node in graph.find_nodes(op="placeholder") if _may_have_batch(node)]
    if captured.backward is None or not inputs:
        return UNDIVIDED
    backward = captured.backward.graph
    sizes = Counter(shape_of(node)[0] for node in inputs)
    ((size, _),) = sizes.most_common(1)  # of sizes that as many inputs have, the size of the first input
    own = [node for node in inputs if shape_of(node)[0] == size]
    batch = tensor_of(own[0]).shape[0]
    if any(map(_depends_on_data, (*graph.nodes, *backward.nodes))):
        return replace(UNDIVIDED, undivided="its sizes depend on the elements of a tensor")
    if isinstance(batch, torch.SymInt) and (why := _not_free(batch, graph, backward)):
        return replace(UNDIVIDED, undivided=why)
    forward = _best(graph, {node: each(0) for node in own}, batch)
    seeds = _between(captured, backward, forward)
    return StepStates(batch=batch, forward=forward, backward=walk(backward, seeds, batch))


def _depends_on_data(node: fx.Node) -> bool:
    return any(
        isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(leaf)
        for leaf in leaves_of(value_of(node))
    )


def _not_free(batch: torch.SymInt, *halves: fx.Graph) -> str:
    """Return why a micro-batch cannot have any number of rows in place of `batch`, "" if it can."""
    symbol = compat.symbol_of(batch)
    if not symbol:
        return f"its number of rows, {batch}, is computed from other sizes"
    if not compat.may_have_any_value_from(LEAST_ROWS, batch):
        return "the model reads conditions from its number of rows, which a part of them may not meet"
    for graph in halves:
        if all(compat.symbol_of(value_of(node)) != symbol for node in graph.find_nodes(op="placeholder")):
            return "its number of rows is no input of the graph"
    return ""


def mark_inputs_of_modules(graph: fx.Graph, positions: Collection[int]) -> None:
    """Mark the inputs of AOTAutograd's `graph` at `positions` as tensors of modules, for `step_states`."""
    for node in compat.inputs_at(graph, positions):
        node.meta[OF_MODULE] = True


def _may_have_batch(node: fx.Node) -> bool:
    is_input = has_tensor(node) and node.users and not node.meta.get(OF_MODULE, False)
    return bool(is_input) and tensor_of(node).ndim > 0 and shape_of(node)[0] > 1


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


def _between(captured: "Captured", backward: fx.Graph, forward: Walked) -> dict[fx.Node, State]:
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
