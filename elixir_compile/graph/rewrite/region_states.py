"""The states of the values of one region, and which of its views are taken of the whole batch: see `graph.capture.batch`."""

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.graph.capture.batch_call import Call, Mixes, State, States
from elixir_compile.graph.capture.batch_walk import Walked, state_by_rule, walk
from elixir_compile.graph.capture.views import viewed
from elixir_compile.graph.rewrite.regions import RegionGraph


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
        if base is None or (base.op != "placeholder" and base not in found):
            continue
        if base in found or _mixes(node, base, states[base], batch):
            found.add(node)
    return found


def _mixes(view: fx.Node, base: fx.Node, state: States, batch: int | torch.SymInt) -> bool:
    if not isinstance(state, State) or not state.is_each:
        return False
    try:
        state_by_rule(Call(view, {base: state}, compat.stand_in(batch), compat.symbol_of(batch)))
    except Mixes:
        return True
    return False
