"""How the results of the body of a divided region become values of the whole batch: filled, in parts, or added up."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.batch_call import State, States, known_shape
from elixir_compile.graph.capture.node_facts import tensor_of, value_of
from elixir_compile.graph.capture.views import view_chain
from elixir_compile.graph.rewrite.divided_graph import Filled, Kept, Last, Layout, Memory, Result, Summed, size_of
from elixir_compile.ir import Batched, GroupId


@dataclass(slots=True)
class BodyResults:
    """Writes the results of one body, and collects the memory of those that are filled."""

    states: Mapping[fx.Node, States]
    micro_batches: int
    leaving: Mapping[fx.Node, GroupId]
    """The group of each value that leaves the device in slices."""
    in_parts: Collection[fx.Node]
    """The values that stay in parts."""
    outputs: Collection[fx.Node]
    """The nodes whose values the body returns."""
    wholes: dict[object, Memory] = field(default_factory=dict)
    memories: dict[fx.Node, int] = field(default_factory=dict)
    """The number of the memory of values in parts, by the node that owns it."""

    def of(self, node: fx.Node) -> Result:
        """Return how the results of `node`, one of `outputs`, become its value for the whole batch."""
        state, value = self.states[node], tensor_of(node)
        assert isinstance(state, State), f"{node.name} is one tensor"
        if state.batched is Batched.SUM:
            return Summed()
        if state.batched is Batched.SAME:
            return Last()
        owner = _owner(node)
        if node in self.in_parts:
            memory = self.memories.setdefault(owner, len(self.memories))
            return Kept(layout=layout_of(value, state, self.micro_batches, memory))
        key = (owner, value.dtype)
        numel = value.untyped_storage().nbytes() // value.element_size()
        group = self.leaving.get(node, "")
        whole = Memory(numel=size_of(numel), dtype=value.dtype, device=value.device, group=group)
        self.wholes.setdefault(key, whole)
        is_in_owner = owner is not node and owner in self.outputs and tensor_of(owner).dtype is value.dtype
        return Filled(
            whole=list(self.wholes).index(key),
            dim=state.dim,
            shape=tuple(map(size_of, value.shape)),
            stride=tuple(map(size_of, value.stride())),
            offset=size_of(value.storage_offset()),
            bits=compat.lazy_bits(value),
            is_copied=not is_in_owner,
        )


def layout_of(value: torch.Tensor, state: State, micro_batches: int, memory: int = 0) -> Layout:
    """Return the layout of the parts of `value`, which are views of the memory with the number `memory`."""
    return Layout(
        memory=memory,
        dim=state.dim,
        view=replace(compat.MemoryView.of(value), shape=local_shape(value, state, micro_batches)),
        nbytes=value.untyped_storage().nbytes() // micro_batches,
    )


def local_shape(whole: torch.Tensor, state: State, divisor: int) -> tuple[int, ...]:
    """Return the shape of one micro-batch's part of `whole`: the size along its slices is divided by `divisor`."""
    return tuple(
        size // divisor if state.is_each and dim == state.dim else size for dim, size in enumerate(known_shape(whole))
    )


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of `node`: of several results of an op, each owns its own."""
    *views, last = view_chain(node)
    is_result = bool(views) and not isinstance(value_of(last), torch.Tensor)
    return views[-1] if is_result else last
