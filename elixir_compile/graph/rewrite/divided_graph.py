"""The parts of a region that runs in micro-batches, as graphs and as values that say how they fit together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.rewrite.regions import RegionGraph

Size = int | str
"""A size, or the expression of a dynamic size, see `ir.sizes`."""


def size_of(size: "int | torch.SymInt") -> Size:
    """Return `size` as a number or an expression."""
    return compat.expression_of(size)[0] or int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A value that the body reads: entry `place` of the inputs of the region and the results of its head."""

    place: int
    dim: int | None = None
    """The dimension along which each micro-batch has its slice; None if all micro-batches read the same."""
    is_seed: bool = False
    """Whether the value seeds random numbers, so that each micro-batch needs another."""
    is_rows: bool = False
    """Whether the value, a dynamic number of rows, counts only the rows of the micro-batch."""
    is_unknown: bool = False
    """Whether the body knows nothing about the value, the rows of the batch, whose symbol has another value there."""
    strides: tuple[Size, ...] = ()
    """The strides in which the body expects its slice, if they depend on the number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A result of the body that fills a tensor of the whole batch, a slice per micro-batch."""

    whole: int
    """The index in `wholes` of the memory of the tensor; views of one memory share it."""
    dim: int
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    bits: compat.LazyBits
    is_copied: bool
    """False if another result of the body has all elements of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of each part of a value that stays in parts, or of its whole."""

    memory: int
    """A number that the results have in common that are views of one memory."""
    dim: int
    """The dimension of the slices."""
    view: compat.MemoryView
    nbytes: int
    """The bytes of the memory of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A result of the body that stays in parts: the tensors of all micro-batches."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsView:
    """An output of the region that is a view of its input `place`, which stays in parts."""

    place: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """A result of the body whose values in all micro-batches are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """A result of the body that is equal in all micro-batches."""


Result = Filled | Kept | Summed | Last


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a tensor of the whole batch."""

    numel: Size
    dtype: torch.dtype
    device: torch.device
    group: str = ""
    """The group of activations with which the tensor leaves the device in slices; empty if it stays until the region
    ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedGraph:
    """The three parts of a region.

    Values have places: first the inputs of the region, then its dynamic sizes `numbers`, then the results of its head,
    then those of its body as they are for the whole batch, then `views`, then those of its tail.
    """

    micro_batches: int
    """The number of micro-batches, an upper limit if the number of rows is dynamic."""
    num_inputs: int
    batch: Size
    """The rows of the batch; a symbol if their number is dynamic."""
    symbols: tuple[tuple[str, int], ...]
    """The symbols of dynamic sizes, each with its place among the inputs."""
    numbers: tuple[Size, ...]
    """The dynamic sizes among the outputs of the region."""
    head: RegionGraph | None
    head_reads: tuple[int, ...]
    body: RegionGraph
    body_reads: tuple[Read, ...]
    results: tuple[Result, ...]
    wholes: tuple[Memory, ...]
    views: tuple[PartsView, ...]
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
            made.target = made.name  # a value may be read whole and in slices
            made.meta = {**node.meta, "val": value}
            self.by_read[read], self.reads[made] = made, read
            is_changed = read.is_seed or read.is_rows or read.is_unknown
            if read.dim is None and not is_changed and read.place < len(self.source.inputs):
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
