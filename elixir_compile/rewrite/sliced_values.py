"""Find the values of a capture that pass between device and host in slices, by what the plan counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from elixir_compile.analysis.laps import laps_of
from elixir_compile.analysis.recompute import as_run
from elixir_compile.analysis.slices import crossings, leaving_name, next_name
from elixir_compile.capture.batch_call import State, States
from elixir_compile.capture.convert import storages_behind
from elixir_compile.capture.node_facts import outputs_of
from elixir_compile.ir import GroupId, Plan, StepGraph
from elixir_compile.rewrite.recompute import Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedValues:
    """The offloaded values that pass in slices."""

    leaving: Mapping[fx.Node, GroupId] = field(default_factory=dict)
    """The group of each value of the forward that leaves in slices."""
    arriving: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The dimension and the number of the slices of each value that arrives in slices, by its name."""


def sliced_values(halves: Partition, graph: StepGraph, plan: Plan, states: Mapping[fx.Node, States]) -> SlicedValues:
    """Return the values of `halves`, made for the activations of `plan`, that pass in slices.

    `graph` is the step of the capture, and `states` are those of the values of `halves`.
    """
    step = as_run(graph, plan.activations, laps_of(plan))
    crosses = crossings(step, plan.activations)
    if not crosses:
        return SlicedValues()
    there = {storage.id for storage in step.storages}
    forward = halves.captured.forward.graph
    saved = {node.name: node for node in outputs_of(forward) if isinstance(node, fx.Node)}
    behind = storages_behind(halves.captured)
    leaving: dict[fx.Node, GroupId] = {}
    arriving: dict[str, tuple[int, int]] = {}
    for group, found in crosses.items():
        for name in halves.away[group]:
            node = saved[name]
            (storage,), state = behind[node], states[node]
            if found.arriving is not None and next_name(storage) in there:
                assert isinstance(state, State), f"{name} is one tensor"
                arriving[name] = (state.dim, found.arriving.micro_batches)
            if leaving_name(storage) in there:
                leaving[node] = group
    return SlicedValues(leaving=leaving, arriving=arriving)
