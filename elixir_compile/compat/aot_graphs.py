"""The inputs and gradients of AOTAutograd's graphs, by the positions of inputs in the graph it was given."""

from collections.abc import Collection
from typing import Any

from torch import fx


def inputs_at(graph: fx.Graph, positions: Collection[int]) -> dict[fx.Node, int]:
    """Return the inputs of AOTAutograd's `graph` with one of `positions` in the graph it was made from.

    Each input comes with its position. Inputs of a backward graph have no position.

    `node.meta["desc"]`, `PlainAOTInput.idx`: checked on torch 2.13, there since 2.9. Gone: ImportError at the first
    capture.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    found = {node: node.meta.get("desc") for node in (graph.find_nodes(op="placeholder") if positions else ())}
    return {
        node: description.idx
        for node, description in found.items()
        if isinstance(description, PlainAOTInput) and description.idx in positions
    }


def gradients_at(graph: fx.Graph, positions: Collection[int]) -> dict[int, int]:
    """Return the indices of gradients of the inputs at `positions` among the outputs of joint `graph`.

    Each index comes with the position of the input.

    `node.meta["desc"]` of the output, `GradAOTOutput.grad_of`: checked on torch 2.13, there since 2.9. Gone:
    ImportError or KeyError at the first capture.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    described: list[Any] = list(graph.output_node().meta["desc"]) if positions else []
    return {
        place: description.grad_of.idx
        for place, description in enumerate(described)
        if isinstance(description, GradAOTOutput)
        and isinstance(description.grad_of, PlainAOTInput)
        and description.grad_of.idx in positions
    }


def inputs_that_must_be_real() -> set[int]:
    """Return the positions of the inputs that the graph writes, or of which it returns views.

    The compiled code reads these inputs themselves, so the caller cannot pass other tensors in their place. Called
    while AOTAutograd compiles.

    `TracingContext.fw_metadata.input_info`, `.output_info`, `OutputType`: checked on torch 2.13, in 2.11 by their
    names. Gone: ImportError or AttributeError at the first capture.
    """
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import TracingContext

    metadata: Any = TracingContext.get().fw_metadata
    written = {
        position for position, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
    }
    views = (OutputType.alias_of_input, OutputType.is_input)
    return written | {info.base_idx for info in metadata.output_info if info.output_type in views}
