"""Give AOTAutograd a Dynamo graph that takes parameters as inputs, where it gathered them by handles.

    before   h = placeholder;  v = gather(h, ...);  w = gather(h, ...)
    after    v = placeholder;  ...;  w = placeholder

Tracing a gather and its gradient takes AOTAutograd 7.5 ms; an input costs nothing. Every gather becomes an input of its
own, the last one of a handle in place of the handle and the others behind all inputs: a parameter that is read twice
has a gradient from each read, and neither is kept until the other is there. `capture/joint.py` turns these inputs into
markers. When the compiled graph is called, the handle is passed for each of them, and nothing looks at it.

Two kinds of gathers stay as they are: in the graphs that nodes run, as inside of a `checkpoint`, and of parameters that
share memory with an output, because AOTAutograd would make such an output from the input, which is a handle.
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
    """The inputs to compile it with: fake parameters of full size in place of handles."""
    keys: dict[int, int]
    """The key of the parameter at each position that is one."""
    repeated: list[int]
    """The positions of the arguments, all of them handles, to pass once more behind the others, in this order."""


def gathers_to_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> ParameterInputs:
    """Return a copy of `gm` that has parameters as inputs where `gm` gathers them; each gather has one user.

    Dynamo looks at the inputs of its own graph once more when the backend has returned, so that stays as it is.
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
        if len(handle.users) == 1:  # the last gather of the handle, and nothing else takes it
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
    """Return an example of what `gather` gives: a leaf with memory of its own that requires a gradient if the handle
    does."""
    handle = example_of(gather.args[0])
    _, size, stride, _ = gather.args
    with compat.fake_mode_of([handle]):
        example = torch.empty_strided(size, stride, dtype=handle.dtype, device=handle.device)
    return example.requires_grad_(handle.requires_grad)


def with_handles(gm: fx.GraphModule, examples: Sequence[Any], keys: Mapping[int, int]) -> list[Any]:
    """Return the example inputs of `gm`, of AOTAutograd, which reads no parameter, with handles in place of those at
    the positions `keys`: compiled code may check the shape of an input that it does not read."""
    given = list(examples)
    places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for node in compat.inputs_at(gm.graph, keys):
        example = given[places[node]]
        with compat.own_fake_mode(example):
            given[places[node]] = node.meta["val"] = torch.empty(1, dtype=example.dtype, device=example.device)
    return given
