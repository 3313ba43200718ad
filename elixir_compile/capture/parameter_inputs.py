"""Turn the gathers of a Dynamo graph into parameter inputs before AOTAutograd traces the graph.

    before   h = placeholder;  v = gather(h, ...);  w = gather(h, ...)
    after    v = placeholder;  ...;  w = placeholder

AOTAutograd takes 7.5 ms to trace a gather and its gradient; an input costs nothing. Each gather becomes a separate
input: the last gather of a handle takes the place of the handle, the others come behind all inputs. So a parameter with
two reads has two gradients, and neither is kept until the other is computed. `capture/joint.py` turns these inputs
into markers. A call of the compiled graph passes the handle for each of them, and no op reads it.

Two kinds of gathers stay as they are: gathers in the graphs that nodes run, such as the inside of a `checkpoint`, and
gathers of parameters in the memory of an output, because AOTAutograd would make such an output from the input,
which is a handle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.capture.node_facts import example_of, storages_of
from elixir_compile.ops.schema import GATHER


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInputs:
    """A copy of a graph whose gathers became inputs."""

    module: fx.GraphModule
    example_inputs: list[Any]
    """The inputs for the compiler: fake parameters of full size in place of handles."""
    keys: dict[int, int]
    """The key of each parameter input, by its position."""
    repeated: list[int]
    """The positions of the handles that a call passes a second time, behind all arguments, in this order."""


def gathers_to_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> ParameterInputs:
    """Return a copy of `gm` with parameter inputs in place of gathers. Each gather must have one user.

    `gm` is not changed, because Dynamo reads the inputs of its graph again after the backend returns.
    """
    copied = compat.copy_of(gm)
    placeholders = copied.graph.find_nodes(op="placeholder")
    positions = {node: position for position, node in enumerate(placeholders)}
    inputs, keys, repeated = list(example_inputs), {}, []
    handed_out = {key for node in copied.graph.output_node().all_input_nodes for key in storages_of(node)}
    last = placeholders[-1] if placeholders else None
    for gather in copied.graph.find_nodes(op="call_function", target=GATHER):
        handle, key = gather.args[0], gather.args[3]
        if handle not in positions or not handed_out.isdisjoint(storages_of(gather)):
            continue
        position, example = positions[handle], _fake_parameter(gather)
        if len(handle.users) == 1:  # the last gather of the handle, which has no other user
            read = handle
            inputs[position] = example
        else:
            read = last = compat.new_input(copied.graph, f"elixir_read_{key}", last)
            repeated.append(position)
            position = len(inputs)
            inputs.append(example)
        keys[position] = key
        gather.replace_all_uses_with(read)
        copied.graph.erase_node(gather)
        read.meta["example_value"] = example
    return ParameterInputs(module=copied, example_inputs=inputs, keys=keys, repeated=repeated)


def _fake_parameter(gather: fx.Node) -> torch.Tensor:
    """Return an example of the result of `gather`: a leaf with separate memory, which requires a gradient if the handle
    does."""
    handle = example_of(gather.args[0])
    _, size, stride, _ = gather.args
    with compat.fake_mode_of([handle]):
        example = torch.empty_strided(size, stride, dtype=handle.dtype, device=handle.device)
    return example.requires_grad_(handle.requires_grad)


def with_handles(gm: fx.GraphModule, examples: Sequence[Any], keys: Mapping[int, int]) -> list[Any]:
    """Return the example inputs of AOTAutograd's `gm`, with handles at the positions `keys`.

    Called for a graph without parameters: its compiled code may still check the shape of an input.
    """
    given = list(examples)
    places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for node in compat.inputs_at(gm.graph, keys):
        example = given[places[node]]
        with compat.own_fake_mode(example):
            given[places[node]] = node.meta["val"] = torch.empty(1, dtype=example.dtype, device=example.device)
    return given
