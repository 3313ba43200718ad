"""Find the values of a capture that are there in slices or in parts, by what the plan counts.

Offloaded values may pass between device and host in slices. Others may stay in parts between two laps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from elixir_compile.graph.capture.batch_call import State, States
from elixir_compile.graph.capture.convert import storages_behind
from elixir_compile.graph.capture.node_facts import outputs_of, tensor_of
from elixir_compile.graph.rewrite.body_results import layout_of
from elixir_compile.graph.rewrite.divided_graph import Layout
from elixir_compile.graph.rewrite.recompute import Partition
from elixir_compile.ir import GroupId, Phase, Plan, StepGraph, StorageId
from elixir_compile.step.laps import Lap, laps_of
from elixir_compile.step.recompute import as_run, stays_in_parts
from elixir_compile.step.slices import crossings, leaving_name, next_name


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
