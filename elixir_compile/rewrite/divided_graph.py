"""The parts of a region that runs in micro-batches, as graphs and as values that say how they fit together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.rewrite.regions import RegionGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A value that the body reads: entry `place` of the inputs of the region and the results of its head."""

    place: int
    dim: int | None = None
    """The dimension along which each micro-batch has its slice; None if all micro-batches read the same."""
    is_seed: bool = False
    """Whether the value seeds random numbers, so that each micro-batch needs another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A result of the body that fills a tensor of the whole batch, a slice per micro-batch."""

    whole: int
    """The index in `wholes` of the memory of the tensor; views of one memory share it."""
    dim: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_copied: bool
    """False if another result of the body has all elements of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """A result of the body whose values in all micro-batches are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """A result of the body that is equal in all micro-batches."""


Result = Filled | Summed | Last


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a tensor of the whole batch."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    group: str = ""
    """The group of activations with which the tensor leaves the device in slices; empty if it stays until the region
    ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedGraph:
    """The three parts of a region.

    Values have places: first the inputs of the region, then the results of its head, then those of its body as they are
    for the whole batch, then those of its tail.
    """

    micro_batches: int
    num_inputs: int
    head: RegionGraph | None
    head_reads: tuple[int, ...]
    body: RegionGraph
    body_reads: tuple[Read, ...]
    results: tuple[Result, ...]
    wholes: tuple[Memory, ...]
    tail: RegionGraph | None
    tail_reads: tuple[int, ...]
    outputs: tuple[int, ...]
    """The place of each output of the region."""


@dataclass(slots=True)
class Part:
    """A graph under construction, with the values that it reads."""

    source: RegionGraph
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The node of this graph for a node of the region."""
    reads: dict[fx.Node, Read] = field(default_factory=dict)
    """What each placeholder of this graph reads."""
    stands_for: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The input of the region that a placeholder reads whole."""
    by_read: dict[Read, fx.Node] = field(default_factory=dict)
    created: dict[tuple[fx.Node, int | None], fx.Node] = field(default_factory=dict)
    """The copies of a tensor of one value, by the dimension along which they have the size of a micro-batch."""

    def read(self, read: Read, node: fx.Node, value: object) -> fx.Node:
        """Return the placeholder for `read` of the region's `node`, with the example `value`."""
        if read not in self.by_read:
            with self.graph.inserting_before(None):
                made = self.graph.placeholder(node.name)
            made.meta = {**node.meta, "val": value}
            self.by_read[read], self.reads[made] = made, read
            if read.dim is None and not read.is_seed and read.place < len(self.source.inputs):
                self.stands_for[made] = self.source.inputs[read.place]
        return self.by_read[read]

    def constant(self, node: fx.Node) -> fx.Node:
        """Return the copy of `node`, a constant of the region."""
        if node not in self.copies:
            setattr(self.root, str(node.target), getattr(self.source.module, str(node.target)))
            self.copies[node] = self.graph.node_copy(node)
        return self.copies[node]

    def finished(self, outputs: Sequence[fx.Node]) -> tuple[RegionGraph, tuple[Read, ...]]:
        """Return the graph, which returns `outputs`, as a region, and what it reads."""
        placeholders = self.graph.find_nodes(op="placeholder")
        self.graph.output(tuple(outputs))
        self.graph.lint()
        made = replace(
            self.source,
            module=compat.graph_module(self.root, self.graph),
            inputs=tuple(self.stands_for.get(node, node) for node in placeholders),
            outputs=tuple(outputs),
            is_only=False,
        )
        return made, tuple(self.reads[node] for node in placeholders)
