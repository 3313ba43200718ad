"""Which inputs and outputs of a graph that AOTAutograd makes belong to which inputs of the graph that it was given."""

from collections.abc import Collection
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._guards import TracingContext


def inputs_at(graph: fx.Graph, positions: Collection[int]) -> dict[fx.Node, int]:
    """Return the inputs of `graph`, of AOTAutograd, that were at `positions` of what it was given, each with its
    position.

    Inputs of a backward graph have none. `node.meta["desc"]`, `PlainAOTInput.idx`, checked on torch 2.13, there since
    2.9. Gone: ImportError at the first import.
    """
    found = {node: node.meta.get("desc") for node in (graph.find_nodes(op="placeholder") if positions else ())}
    return {
        node: description.idx
        for node, description in found.items()
        if isinstance(description, PlainAOTInput) and description.idx in positions
    }


def gradients_at(graph: fx.Graph, positions: Collection[int]) -> dict[int, int]:
    """Return the places among the outputs of `graph`, a joint graph, that are gradients of the inputs at `positions`,
    each with the position.

    `node.meta["desc"]` of the output, `GradAOTOutput.grad_of`, checked on torch 2.13, there since 2.9. Gone:
    ImportError at the first import, or KeyError at the first capture.
    """
    described: list[Any] = list(graph.output_node().meta["desc"]) if positions else []
    return {
        place: description.grad_of.idx
        for place, description in enumerate(described)
        if isinstance(description, GradAOTOutput)
        and isinstance(description.grad_of, PlainAOTInput)
        and description.grad_of.idx in positions
    }


def inputs_that_must_be_real() -> set[int]:
    """While AOTAutograd compiles: return the positions of the inputs that its compiled code works on itself, because
    the graph writes them or returns views of them.

    `TracingContext.fw_metadata.input_info`, `.output_info`, `OutputType`, checked on torch 2.13, in 2.11 by their
    names. Gone: AttributeError at the first capture.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    metadata: Any = TracingContext.get().fw_metadata
    written = {
        position for position, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
    }
    views = (OutputType.alias_of_input, OutputType.is_input)
    return written | {info.base_idx for info in metadata.output_info if info.output_type in views}
