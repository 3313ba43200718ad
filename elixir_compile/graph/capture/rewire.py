"""Turn parameter inputs of a Dynamo graph into gathers, and gathers into parameter inputs.

`rewire` turns a graph whose inputs are parameters into the graph of the prepared model, which gathers them:

    before   w = placeholder;                       linear(x, w)
    after    h = placeholder;  w = gather(h, ...);  linear(x, w)

Each use has a separate gather, so the graph of the first call and the graph of the prepared model are the same step.

`gathers_to_inputs` turns gathers into parameter inputs before AOTAutograd traces the graph:

    before   h = placeholder;  v = gather(h, ...);  w = gather(h, ...)
    after    v = placeholder;  ...;  w = placeholder

AOTAutograd takes 7.5 ms to trace a gather and its gradient; an input costs nothing. Each gather becomes a separate
input: the last gather of a handle takes the place of the handle, the others come behind all inputs. So a parameter with
two reads has two gradients, and neither is kept until the other is computed. `graph/capture/joint.py` turns these inputs
into markers. A call of the compiled graph passes the handle for each of them, and no op reads it.

Gathers in the branches of a `cond`, or in the body of a loop, move before it: torch runs these graphs as they are, so
nothing else would know of a parameter that is read there alone.

Two kinds of gathers stay as they are: gathers in the graphs that AOTAutograd traces as part of the step, such as the
inside of a `checkpoint`, and gathers of parameters in the memory of an output, because AOTAutograd would make such an
output from the input, which is a handle.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn.utils import stateless

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.capture.markers import key_of
from elixir_compile.graph.capture.node_facts import (
    bodies_of,
    example_of,
    ints_of,
    source_of,
    storages_of,
    tensor_example_of,
)
from elixir_compile.graph.ops.gather import GATHER
from elixir_compile.graph.ops.registry import Slot, slot_by_key, slot_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewired:
    """The example inputs with handles in place of parameters, and the handle to pass at each of these positions."""

    example_inputs: list[Any]
    handles: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedUnmanaged:
    """The example inputs with parameters in place of handles, and the key of the slot whose parameter to pass, by
    position."""

    example_inputs: list[Any]
    keys: dict[int, int]


def split_gathers(gm: fx.GraphModule) -> list[int]:
    """Give each use of a gather in a Dynamo graph a separate gather, outside of branches and loops; return the keys in
    order of first use."""
    _move_out_of_bodies(gm)
    keys = dict.fromkeys(key_of(node) for node in gathers_of(gm))
    for node in list(gm.graph.find_nodes(op="call_function", target=GATHER)):
        for user in list(node.users)[1:]:
            with gm.graph.inserting_after(node):
                twin = gm.graph.call_function(GATHER, node.args)
            twin.meta = dict(node.meta)
            user.replace_input_with(node, twin)
    gm.recompile()
    return list(keys)


_APART = ("associative_scan", "cond", "map_impl", "scan", "while_loop")
"""Functions of torch whose graphs AOTAutograd does not trace as part of the step."""


def _move_out_of_bodies(gm: fx.GraphModule) -> None:
    """Gather parameters before each branch and loop that gathers them inside."""
    for node in list(gm.graph.nodes):
        bodies = dict.fromkeys(bodies_of(gm, node))
        if str(node.target) not in _APART:
            for body in bodies:
                _move_out_of_bodies(body)
            continue
        for gather in {key_of(gather): gather for body in bodies for gather in gathers_of(body)}.values():
            slot = slot_by_key(key_of(gather))
            inside = {body: handles for body in bodies if (handles := _handles_of(body, slot))}
            (handle,) = [each for each in node.all_input_nodes if id(example_of(each)) in set().union(*inside.values())]
            with gm.graph.inserting_before(node):
                full = gm.graph.call_function(GATHER, (handle, *gather.args[1:]))
            full.meta = dict(gather.meta)
            node.replace_input_with(handle, full)
            for body in inside:
                taken = _placeholder_of(body, slot)
                _replace_gathers(body, slot, taken)
                taken.meta["example_value"] = full.meta["example_value"]
                body.recompile()


def handle_inputs(gm: fx.GraphModule) -> dict[int, int]:
    """Return the key of the parameter of each handle among the inputs of a Dynamo graph, by position."""
    keys = {id(example_of(source_of(gather))): key_of(gather) for gather in gathers_of(gm)}
    examples = [id(example_of(node)) for node in gm.graph.find_nodes(op="placeholder")]
    return {index: keys[example] for index, example in enumerate(examples) if example in keys}


def pass_unmanaged(gm: fx.GraphModule, example_inputs: Sequence[Any], slots: Collection[Slot]) -> PassedUnmanaged:
    """Make the parameters of `slots` inputs of `gm`, in place of their handles and gathers; change `gm` in place."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs, keys = list(example_inputs), {}
    places = {id(value): place for place, value in enumerate(inputs)}
    for slot in slots:
        param = slot.param
        place = places.get(id(param))
        if place is None:
            place = placeholders.index(_placeholder_of(gm, slot))
            keys[place] = slot.key
        _replace_gathers(gm, slot, placeholders[place])
        if place in keys or param.device != slot.device:  # a parameter on another device is moved before the graph runs
            inputs[place] = placeholders[place].meta["example_value"] = fake_parameter(gm, param, slot.device)
    gm.recompile()
    return PassedUnmanaged(example_inputs=inputs, keys=keys)


def fake_parameter(gm: fx.GraphModule, param: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    """Return a fake tensor like `param` on `device` for an input of `gm`, with separate memory."""
    examples = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    with compat.fake_mode_of(examples):
        empty = compat.like_in_strides(param, param.stride(), device)
        return torch.nn.Parameter(empty, requires_grad=param.requires_grad)


def gathers_of(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the gathers in `gm` and in the graphs run by its nodes."""
    inside = [gather for node in gm.graph.nodes for body in bodies_of(gm, node) for gather in gathers_of(body)]
    return [*gm.graph.find_nodes(op="call_function", target=GATHER), *inside]


def _replace_gathers(gm: fx.GraphModule, slot: Slot, full: fx.Node) -> None:
    """Replace the gathers of the slot's parameter by the input `full`, in `gm` and in the graphs its nodes run."""
    for gather in gm.graph.find_nodes(op="call_function", target=GATHER):
        if key_of(gather) == slot.key:
            gather.replace_all_uses_with(full)
            gm.graph.erase_node(gather)
    readers: list[fx.GraphModule] = []
    for node in gm.graph.nodes:
        for body in bodies_of(gm, node):
            handles = _handles_of(body, slot)
            readers += [body] if handles else []
            for handle in [source for source in node.all_input_nodes if id(example_of(source)) in handles]:
                node.replace_input_with(handle, full)
    for body in dict.fromkeys(readers):
        _replace_gathers(body, slot, _placeholder_of(body, slot))
        body.recompile()


def _placeholder_of(gm: fx.GraphModule, slot: Slot) -> fx.Node:
    """Return a handle for gathers of `slot`, in `gm` or in a graph run by its nodes, among the inputs of `gm`."""
    handles = _handles_of(gm, slot)
    found = [node for node in gm.graph.find_nodes(op="placeholder") if id(example_of(node)) in handles]
    if not found:
        raise UnsupportedModel(slot.name, "it is written in the forward, inside of another function of torch")
    return found[0]


def _handles_of(gm: fx.GraphModule, slot: Slot) -> set[int]:
    """Return the ids of the fake handles by which `gm` gathers `slot`.

    A graph and the graphs run by its nodes have the same fake tensor for a handle.
    """
    return {id(example_of(source_of(gather))) for gather in gathers_of(gm) if key_of(gather) == slot.key}


def read_functionally(gm: fx.GraphModule) -> Slot | None:
    """Return the slot of a parameter gathered inside of `torch.func.functional_call` in a Dynamo graph, or None.

    The call puts another tensor in the place of the parameter, but Dynamo traces the call, and the swapped module
    gathers the parameter instead of reading that tensor.
    """
    for node in gathers_of(gm):
        if stateless.__file__ in node.meta.get("stack_trace", ""):
            return slot_by_key(key_of(node))
    return None


def rewire(gm: fx.GraphModule, example_inputs: Sequence[Any], sink: object) -> Rewired:
    """Replace each parameter with a slot of the executor `sink` among the inputs of `gm` by a handle and gathers, in
    place.

    Those are all parameters of a model that is not prepared yet, and later those that the graph reads by name, as
    `model.parameters()` does: the property that gathers belongs to an attribute of a module. Not those that this rank
    has a part of, as the graph was traced with the part.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    fake_mode = compat.fake_mode_of(node.meta.get("example_value") for node in placeholders)
    inputs, handles = list(example_inputs), {}
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        slot = slot_of(value) if isinstance(value, torch.nn.Parameter) else None
        if slot is None or slot.sink is not sink or slot.is_dtensor or slot.shape != value.shape:
            continue
        handles[index] = slot.handle()
        inputs[index] = fake_mode.from_tensor(handles[index], static_shapes=True)
        _gather_for_each_user(gm.graph, node, placeholders[-1], slot)
        node.meta["example_value"] = inputs[index]
    if handles:
        gm.recompile()
    return Rewired(example_inputs=inputs, handles=handles)


def _gather_for_each_user(graph: fx.Graph, node: fx.Node, after: fx.Node, slot: Slot) -> None:
    size, stride = list(slot.shape), list(slot.stride)
    for user in list(node.users):
        with graph.inserting_after(after):
            gathered = graph.call_function(GATHER, (node, size, stride, slot.key))
        gathered.meta["example_value"] = node.meta["example_value"]
        user.replace_input_with(node, gathered)


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
    of_modules: frozenset[int]
    """The positions of other inputs that are tensors of modules, such as buffers."""


def gathers_to_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> ParameterInputs:
    """Return a copy of `gm` with parameter inputs in place of gathers. Each gather must have one user.

    `gm` is not changed, because Dynamo reads the inputs of its graph again after the backend returns.
    """
    copied = compat.copy_of(gm)
    placeholders = copied.graph.find_nodes(op="placeholder")
    positions = {node: position for position, node in enumerate(placeholders)}
    inputs, keys, repeated = list(example_inputs), {}, []
    of_modules = frozenset(place for node, place in positions.items() if compat.belongs_to_module(node))
    handed_out = {key for node in copied.graph.output_node().all_input_nodes for key in storages_of(node)}
    for gather in copied.graph.find_nodes(op="call_function", target=GATHER):
        handle, key = source_of(gather), key_of(gather)
        if handle not in positions or not handed_out.isdisjoint(storages_of(gather)):
            continue
        position, example = positions[handle], _fake_parameter(gather)
        if len(handle.users) == 1:  # the last gather of the handle, which has no other user
            read = handle
            inputs[position] = example
        else:
            read = compat.new_input(copied.graph, f"elixir_read_{key}", placeholders[-1])
            placeholders.append(read)
            repeated.append(position)
            position = len(inputs)
            inputs.append(example)
        keys[position] = key
        gather.replace_all_uses_with(read)
        copied.graph.erase_node(gather)
        read.meta["example_value"] = example
    return ParameterInputs(module=copied, example_inputs=inputs, keys=keys, repeated=repeated, of_modules=of_modules)


def _fake_parameter(gather: fx.Node) -> torch.Tensor:
    """Return an example of the result of `gather`: a leaf with separate memory, which requires a gradient if the handle
    does."""
    handle = tensor_example_of(source_of(gather))
    with compat.fake_mode_of([handle]):
        example = torch.empty_strided(ints_of(gather, 1), ints_of(gather, 2), dtype=handle.dtype, device=handle.device)
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
