"""Turn a Dynamo graph whose inputs are parameters into the graph of the prepared model, which gathers them.

    before   w = placeholder;                       linear(x, w)
    after    h = placeholder;  w = gather(h, ...);  linear(x, w)

One gather per use in both, so that the graph of the first call and that of the prepared model are the same step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn.utils import stateless

from elixir_compile import compat
from elixir_compile.ops.registry import Slot, slot_by_key, slot_of
from elixir_compile.ops.schema import GATHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewired:
    """What changed: the example inputs with handles in place of parameters, and the handle to pass at each position."""

    example_inputs: list[Any]
    handles: dict[int, torch.Tensor]


def split_gathers(gm: fx.GraphModule) -> list[int]:
    """Give every use of a gather in a Dynamo graph a gather of its own; return the keys, in order of first use."""
    keys: dict[int, None] = {}
    for node in list(gm.graph.find_nodes(op="call_function", target=GATHER)):
        keys[node.args[3]] = None
        for user in list(node.users)[1:]:
            with gm.graph.inserting_after(node):
                twin = gm.graph.call_function(GATHER, node.args)
            twin.meta = dict(node.meta)
            user.replace_input_with(node, twin)
    gm.recompile()
    return list(keys)


def handle_inputs(gm: fx.GraphModule) -> dict[int, int]:
    """Return the positions of the inputs of a Dynamo graph that are handles, with the key of each one's parameter."""
    found = {}
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        keys = (user.args[3] for user in node.users if user.target is GATHER)
        key = next(keys, None)
        if key is not None:
            found[index] = key
    return found


def pass_whole(
    gm: fx.GraphModule, example_inputs: Sequence[Any], slots: Collection[Slot]
) -> tuple[list[Any], list[Slot]]:
    """Replace in place what `gm` gathers of the parameters of `slots` by these parameters as inputs.

    Return the example inputs, and the slots of the parameters that were added at their end.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    fake_mode = compat.fake_mode_of(node.meta.get("example_value") for node in placeholders)
    inputs, added = list(example_inputs), []
    places = {id(value): place for place, value in enumerate(inputs)}
    for slot in slots:
        param = slot.param
        with fake_mode:
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=slot.device)
            fake = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
        place = places.get(id(param))
        if place is None:
            with gm.graph.inserting_after(placeholders[-1]):
                node = gm.graph.placeholder(f"elixir_whole_{slot.key}")
            compat.mark_as_input(node)
            node.meta["example_value"] = fake
            placeholders.append(node)
            inputs.append(fake)
            added.append(slot)
        else:
            node = placeholders[place]
            if param.device != slot.device:  # it is moved before the graph runs
                inputs[place] = node.meta["example_value"] = fake
        for gather in gm.graph.find_nodes(op="call_function", target=GATHER):
            if gather.args[3] == slot.key:
                gather.replace_all_uses_with(node)
                gm.graph.erase_node(gather)
    gm.recompile()
    return inputs, added


def read_functionally(gm: fx.GraphModule) -> Slot | None:
    """Return the slot of a parameter that a Dynamo graph gathers within `torch.func.functional_call`, which put another
    tensor in its place; None where there is none. Dynamo traces the call, and a module reads no tensor that was put
    there."""
    for node in gm.graph.find_nodes(op="call_function", target=GATHER):
        if stateless.__file__ in node.meta.get("stack_trace", ""):
            return slot_by_key(node.args[3])
    return None


def rewire(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Rewired:
    """Replace in place the inputs of `gm` that are parameters with a slot by handles and gathers."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    fake_mode = compat.fake_mode_of(node.meta.get("example_value") for node in placeholders)
    inputs, handles = list(example_inputs), {}
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        slot = slot_of(value) if isinstance(value, torch.nn.Parameter) else None
        if slot is None:
            continue
        handles[index] = slot.handle()
        inputs[index] = fake_mode.from_tensor(handles[index], static_shapes=True)
        _gather_for_each_user(gm.graph, node, placeholders[-1], slot)
        node.meta["example_value"] = inputs[index]
    gm.recompile()
    return Rewired(example_inputs=inputs, handles=handles)


def _gather_for_each_user(graph: fx.Graph, node: fx.Node, after: fx.Node, slot: Slot) -> None:
    size, stride = list(slot.param.shape), list(slot.param.stride())
    for user in list(node.users):
        with graph.inserting_after(after):
            gathered = graph.call_function(GATHER, (node, size, stride, slot.key))
        gathered.meta["example_value"] = node.meta["example_value"]
        user.replace_input_with(node, gathered)
