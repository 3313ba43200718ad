"""Turn parameter inputs of a Dynamo graph into gathers and gathers into parameter inputs, and find parameters that the
graph writes and the views of a storage.
"""

import operator
import types
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.nn.utils import stateless

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.capture.node_facts import (
    MARKERS,
    bodies_of,
    example_of,
    int_of,
    ints_of,
    is_number,
    is_wait,
    key_of,
    leaves_of,
    parameter,
    source_of,
    storages_of,
    tensor_example_of,
    tensor_of,
    tensors_of,
    value_of,
    values_of_arguments,
    written_by,
)
from elixir_compile.graph.ops.gather import GATHER
from elixir_compile.graph.ops.registry import Slot, slot_by_key, slot_of

# ----------------------------------------------------------------------------------------------------------------------
# Find the views among nodes, and how one view of a storage is rebuilt from another.


_VIEWS_BEYOND_SCHEMAS = (operator.getitem, torch.ops.aten._unsafe_view.default)
"""Targets that return a view although their schema does not say so."""


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node of which `node` is a view, or None if `node` is no view.

    With dynamic shapes, the sizes of a view are inputs of the node too: `view(x, [s0, 64])`.
    """
    is_one = node.target in _VIEWS_BEYOND_SCHEMAS or getattr(node.target, "is_view", False) or is_wait(node.target)
    if not is_one:
        return None
    bases = [source for source in node.all_input_nodes if not is_number(source)]
    return bases[0] if len(bases) == 1 else None


def view_chain(node: fx.Node) -> list[fx.Node]:
    """Return `node`, the node of which it is a view, and so on, to the owner of the memory."""
    found = [node]
    while (base := viewed(found[-1])) is not None:
        found.append(base)
    return found


def is_view(node: fx.Node) -> bool:
    """Return whether `node` is a view of another node, or one of the results of another node."""
    return viewed(node) is not None


def ops_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of `graph` for the ops of the `StepGraph`, in order.

    A view is no op: it computes nothing, takes no memory, and stays with its base. The exception is a view of a
    parameter among the outputs of the step.
    """

    def is_op(node: fx.Node) -> bool:
        return not is_view(node) or (is_parameter_view(node) and any(user.op == "output" for user in node.users))

    calls = [node for node in graph.nodes if node.op == "call_function" and node.target not in MARKERS]
    return list(filter(is_op, calls)) or calls


def is_parameter_view(node: fx.Node) -> bool:
    """Return whether `node` is a view of a parameter, or a view of such a view."""
    while (base := viewed(node)) is not None:
        node = base
        if node.target is parameter:
            return True
    return False


_aten = torch.ops.aten
_RESHAPES = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
}
_SELF_INVERSE = {_aten.alias.default, _aten.detach.default, _aten.transpose.int, _aten.t.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way to a view of a storage: start with `source`, undo views, then apply other views."""

    source: fx.Node
    undo: tuple[fx.Node, ...]
    """Views of the forward to undo, the last view first."""
    redo: tuple[fx.Node, ...]
    """Views of the forward to apply, the first view first."""


def path_to(wanted: fx.Node, there: Mapping[fx.Node, list[fx.Node]], numbers: Container[str]) -> Path | None:
    """Return the shortest path from an available value to `wanted`, a node of the forward; None if there is no path.

    `there` has the available nodes, by the owner of their memory. `numbers` has the names of the available
    dynamic sizes.
    """

    def can_undo(view: fx.Node) -> bool:
        if view.target in _RESHAPES:
            return all(isinstance(size, int) for size in tensor_of(source_of(view)).shape)
        return view.target is _aten.permute.default or view.target in _SELF_INVERSE

    chain_of_wanted = view_chain(wanted)
    for at, common in enumerate(chain_of_wanted):
        redo = tuple(reversed(chain_of_wanted[:at]))
        if not all(number.name in numbers for view in redo for number in view.all_input_nodes if is_number(number)):
            return None
        for source in there.get(chain_of_wanted[-1], ()):
            chain = view_chain(source)
            if common not in chain:
                continue
            undo = tuple(chain[: chain.index(common)])
            if all(map(can_undo, undo)):
                return Path(source=source, undo=undo, redo=redo)
    return None


def by_owner(nodes: "list[fx.Node] | tuple[fx.Node, ...]") -> dict[fx.Node, list[fx.Node]]:
    """Return `nodes` grouped by the owner of their memory."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(view_chain(node)[-1], []).append(node)
    return found


def undo(view: fx.Node, value: fx.Node) -> fx.Node:
    """Add a node at the insertion point that undoes `view` for `value`, a node in place of `view`; return the node."""
    graph, base = value.graph, source_of(view)
    if view.target in _RESHAPES:
        made = graph.call_function(_aten.view.default, (value, list(tensor_of(base).shape)))
    elif view.target is _aten.permute.default:
        dims = [dim % len(ints_of(view, 1)) for dim in ints_of(view, 1)]
        made = graph.call_function(_aten.permute.default, (value, [dims.index(place) for place in range(len(dims))]))
    elif view.target in _SELF_INVERSE:
        made = graph.create_node("call_function", view.target, (value, *view.args[1:]))
    else:
        raise AssertionError(f"{view.target} is not among the views that can be undone")
    made.meta = {**base.meta, "val": fresh_value(base, value)}
    return made


def fresh_value(node: fx.Node, base: fx.Node | None = None) -> object:
    """Return new fake tensors like the values of `node`: views of the values of `base`, or with separate memory.

    They are for a node in place of `node` in the backward. The partitioner may have recomputed `node` there with the
    same fake tensors, and two values with one storage would count as views of each other.
    """
    value, under = value_of(node), None if base is None else value_of(base)
    if isinstance(under, (tuple, list)) and not isinstance(value, (tuple, list)):
        under = under[int_of(node, 1)]
    return renewed(value, _memory_under(value, under))


def _memory_under(value: object, under: object) -> dict[int, torch.Tensor]:
    """Return the tensors of `under` by the storages of the tensors of `value` that become views of them."""
    if isinstance(value, (tuple, list)):
        parts = zip(value, under, strict=True) if isinstance(under, (tuple, list)) else ((v, under) for v in value)
        return {key: tensor for pair in parts for key, tensor in _memory_under(*pair).items()}
    if isinstance(value, torch.Tensor) and isinstance(under, torch.Tensor):
        return {compat.storage_key(value): under}
    return {}


def renewed(value: object, memory: dict[int, torch.Tensor]) -> object:
    """Return `value` with new fake tensors in place of its own.

    A tensor whose storage has its key in `memory` becomes a view of the tensor there. Other tensors get new memory,
    which is added to `memory`.
    """
    if isinstance(value, (tuple, list)):
        return type(value)([renewed(part, memory) for part in value])
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    key, offset = compat.storage_key(value), value.storage_offset()
    with compat.own_fake_mode(value):
        if key in memory:
            source = memory[key]
            flat = compat.with_bits(source, compat.LazyBits())
            flat = flat if flat.dtype is value.dtype else flat.view(value.dtype)
        elif not isinstance(offset, int) or offset == 0:
            return memory.setdefault(key, compat.like_in_strides(value, value.stride()))
        else:
            numel = value.untyped_storage().nbytes() // value.element_size()
            flat = torch.empty(numel, dtype=value.dtype, device=value.device)
        made = compat.with_bits(flat.as_strided(value.shape, value.stride(), offset), compat.lazy_bits(value))
        return memory.setdefault(key, made) if key not in memory else made


# ----------------------------------------------------------------------------------------------------------------------
# Turn parameter inputs of a Dynamo graph into gathers, and gathers into parameter inputs.
#
# `rewire` turns a graph whose inputs are parameters into the graph of the prepared model, which gathers them:
#
#     before   w = placeholder;                       linear(x, w)
#     after    h = placeholder;  w = gather(h, ...);  linear(x, w)
#
# Each use has a separate gather, so the graph of the first call and the graph of the prepared model are the same step.
#
# `gathers_to_inputs` turns gathers into parameter inputs before AOTAutograd traces the graph:
#
#     before   h = placeholder;  v = gather(h, ...);  w = gather(h, ...)
#     after    v = placeholder;  ...;  w = placeholder
#
# AOTAutograd takes 7.5 ms to trace a gather and its gradient; an input costs nothing. Each gather becomes a separate
# input: the last gather of a handle takes the place of the handle, the others come behind all inputs. So a parameter
# with two reads has two gradients, and neither is kept until the other is computed. `graph/capture/joint.py` turns
# these inputs into markers. A call of the compiled graph passes the handle for each of them, and no op reads it.
#
# Gathers in the branches of a `cond`, or in the body of a loop, move before it: torch runs these graphs as they are, so
# nothing else would know of a parameter that is read there alone.
#
# Two kinds of gathers stay as they are: gathers in the graphs that AOTAutograd traces as part of the step, such as the
# inside of a `checkpoint`, and gathers of parameters in the memory of an output, because AOTAutograd would make such an
# output from the input, which is a handle.


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


def fake_parameter(gm: fx.GraphModule, param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor like `param`, or a buffer, on `device` for an input of `gm`, with separate memory."""
    examples = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    with compat.fake_mode_of(examples):
        empty = compat.like_in_strides(param, param.stride(), device)
        is_param = isinstance(param, torch.nn.Parameter)
        return torch.nn.Parameter(empty, requires_grad=param.requires_grad) if is_param else empty


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
    has a shard of, as the graph was traced with the shard.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    fake_mode = compat.fake_mode_of(node.meta.get("example_value") for node in placeholders)
    inputs, handles = list(example_inputs), {}
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        slot = slot_of(value) if isinstance(value, torch.Tensor) else None
        if slot is None or slot.sink is not sink or slot.is_dtensor or slot.shape != value.shape:
            continue
        handles[index] = slot.handle()
        inputs[index] = fake_mode.from_tensor(handles[index], static_shapes=True)
        for user in list(node.users):
            with gm.graph.inserting_after(placeholders[-1]):
                gathered = gm.graph.call_function(GATHER, (node, list(slot.shape), list(slot.stride), slot.key))
            gathered.meta["example_value"] = node.meta["example_value"]
            user.replace_input_with(node, gathered)
        node.meta["example_value"] = inputs[index]
    if handles:
        gm.recompile()
    return Rewired(example_inputs=inputs, handles=handles)


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
        read, key = source_of(gather), key_of(gather)
        if read not in positions or not handed_out.isdisjoint(storages_of(gather)):
            continue
        # A leaf with separate memory, which requires a gradient if the handle does.
        position, handle = positions[read], tensor_example_of(read)
        form = {"dtype": handle.dtype, "device": handle.device}
        with compat.fake_mode_of([handle]):
            example = torch.empty_strided(ints_of(gather, 1), ints_of(gather, 2), **form)
        example.requires_grad_(handle.requires_grad)
        if len(read.users) == 1:  # the last gather of the handle, which has no other user
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


# ----------------------------------------------------------------------------------------------------------------------
# Find the parameters written by Dynamo's graph. They cannot be gathers, because a gather returns a copy.
#
#     weight.clamp_(-1, 1)                 embedding(ids, weight, max_norm=1.0)          weight.data = ...
#     torch.mul(a, b, out=weight)          torch._foreach_lerp_(targets, sources, 0.01)
#
# Few nodes take a parameter or a view of a parameter, and most of these write no argument, by their name. The others
# are called a second time on the fake tensors of the capture, and the schemas of the ops inside say which arguments
# they write.


_WRITES_STATISTICS = ("batch_norm", "instance_norm", "fake_quant", "embedding")
"""Parts of the names of torch's compiled functions that write an input, or whose gradient may be sparse."""

_Roots = frozenset[int]


@dataclass(slots=True)
class _Found:
    """The parameters of a graph and the reasons found so far why some of them cannot be gathered."""

    params: dict[int, torch.Tensor] = field(default_factory=dict)
    """The parameters and buffers that the graph takes or gathers, by their id."""
    roots: dict[fx.Node, _Roots] = field(default_factory=dict)
    """The ids of the parameters with which a node shares memory."""
    reasons: dict[int, str] = field(default_factory=dict)
    """The reason why a parameter cannot be gathered, by its id."""

    def mark(self, roots: _Roots, reason: str) -> None:
        for root in roots:
            self.reasons.setdefault(root, reason)


def written_parameters(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[torch.Tensor, str]]:
    """Return the parameters and buffers of `gm` that must be plain inputs instead of gathers, each with the reason.

    A parameter must be an input if `gm` writes it, if `gm` returns it to eager code behind a graph break, which may
    write it, if its gradient is sparse, or if an earlier graph made it an input.

    Raises UnsupportedModel for a write to a parameter with gradients on, which eager PyTorch refuses.
    """
    found = _Found()
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and compat.belongs_to_module(node)):
            found.params[id(value)] = value
            found.roots[node] = frozenset({id(value)})
    for node in gathers_of(gm):
        param = slot_by_key(key_of(node)).param
        found.params[id(param)] = param
        found.roots[node] = frozenset({id(param)})
        if slot_of(param) is None:
            found.mark(found.roots[node], "an earlier graph writes it")
    if found.roots:
        _walk(gm, found, is_grad_on=torch.is_grad_enabled())
    if found.roots and compat.graph_break_of(gm) is not None:
        for node in gm.graph.output_node().all_input_nodes:
            found.mark(found.roots.get(node, frozenset()), "eager code behind a graph break may write it")
    return [(found.params[root], reason) for root, reason in found.reasons.items()]


def gathered_among(gm: fx.GraphModule, params: Sequence[tuple[torch.Tensor, str]]) -> dict[Slot, str]:
    """Return the slots of `params` that `gm` gathers, or reads by name beside gathers, with the reason of each.

    A graph without gathers reads all its parameters where they live, and can write them there.
    """
    reasons = {id(param): reason for param, reason in params}
    gathers = gathers_of(gm) if reasons else []
    slots = dict.fromkeys(slot_by_key(key_of(node)) for node in gathers)
    if gathers:
        by_name = (slot for param, _ in params if (slot := slot_of(param)) is not None)
        slots |= dict.fromkeys(slot for slot in by_name if not slot.is_dtensor)
    return {slot: reasons[id(slot.param)] for slot in slots if id(slot.param) in reasons}


def _walk(gm: fx.GraphModule, found: _Found, *, is_grad_on: bool) -> None:
    """Follow the parameters through `gm` in order, from the roots of its placeholders and gathers."""
    for node in gm.graph.nodes:
        is_grad_on = compat.sets_gradients(node, is_grad_on)
        taken = [source for source in node.all_input_nodes if source in found.roots]
        bodies = bodies_of(gm, node)
        for body in bodies:
            for placeholder in body.graph.find_nodes(op="placeholder"):
                _follow(placeholder, taken, found)
            _walk(body, found, is_grad_on=is_grad_on)
        if not taken or bodies or node.op == "output":
            continue
        if compat.is_higher_order(node.target):
            # Such a function may write any input, as a Triton kernel does: it has no schema.
            found.mark(frozenset().union(*(found.roots[source] for source in taken)), _reason(node))
        elif _may_write(node):
            _call(node, taken, found, is_grad_on=is_grad_on)
        _follow(node, taken, found)


def _follow(node: fx.Node, taken: Sequence[fx.Node], found: _Found) -> None:
    """Give `node` the roots of each node in `taken` with which its result shares memory."""
    keys = storages_of(node)
    shared = [found.roots[source] for source in taken if not keys.isdisjoint(storages_of(source))]
    if shared and node not in found.roots:
        found.roots[node] = frozenset().union(*shared)


def _may_write(node: fx.Node) -> bool:
    target = node.target
    if node.kwargs.get("out") is not None:
        return True
    if isinstance(target, str):
        return target.endswith("_")
    if target is GATHER:
        return False
    if isinstance(target, types.FunctionType) or compat.is_operator(target):
        return True
    name = getattr(target, "__name__", "_")
    if getattr(target, "__module__", None) == "_operator":
        return name == "setitem" or name.startswith("i")
    return name.endswith("_") or any(part in name for part in _WRITES_STATISTICS)


def _call(node: fx.Node, taken: Sequence[fx.Node], found: _Found, *, is_grad_on: bool) -> None:
    """Call `node` on fake tensors, and mark the written parameters."""
    by_object = {id(leaf): found.roots[source] for source in taken for leaf in tensors_of(source)}
    by_storage: dict[int, _Roots] = {}
    for source in taken:
        for key in storages_of(source):
            by_storage[key] = by_storage.get(key, frozenset()) | found.roots[source]

    def note(value: object, reason: str, *, is_write: bool) -> None:
        for leaf in leaves_of(value):
            if not isinstance(leaf, torch.Tensor) or leaf.is_sparse:
                continue
            roots = by_object.get(id(leaf)) or by_storage.get(compat.storage_key(leaf), frozenset())
            for root in roots if is_write and is_grad_on and leaf.requires_grad else ():
                slot = slot_of(found.params[root])
                name = "a parameter" if slot is None else slot.name
                because = f"{reason} while gradients are on, which PyTorch refuses for a leaf that requires one. "
                raise UnsupportedModel(name, f"{because}Write it under `torch.no_grad()`")
            found.mark(roots, reason)

    def see(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        schema, written = compat.schema_of(op), written_by(op, args, kwargs)
        for value in written:
            note(value, _reason(node), is_write=True)
        for place, argument in enumerate(schema.arguments):
            if argument.name == "sparse" and (args[place] if place < len(args) else kwargs.get("sparse")) is True:
                note(args[0], "its gradient is sparse", is_write=False)
        if not written or not all(value.alias_info is not None for value in schema.returns):
            return op(*args, **kwargs)
        # `set_` and `t_` are not run: they would change shape or memory of the fake tensors of the capture.
        num_returns = len(schema.returns)
        return None if num_returns == 0 else written[0] if num_returns == 1 else tuple(written)

    def inner_example(source: fx.Node) -> object:
        """Return Dynamo's example value without the wrappers of function transforms, whose levels are gone."""
        return map_aggregate(example_of(source), compat.unwrapped)  # pyright: ignore[reportArgumentType]  any value

    args, kwargs = values_of_arguments(node, inner_example)
    function: Callable[..., Any] = node.target if callable(node.target) else getattr(type(args[0]), node.target)
    fakes = compat.own_fake_mode(next(iter(tensors_of(taken[0]))))
    try:
        with torch.no_grad(), fakes, compat.ops_seen_by(see):
            function(*args, **kwargs)
    except UnsupportedModel:
        raise
    except Exception:
        # The call can fail although it works in the graph, as under autocast. Its writes until the error are known. A
        # function of torch writes first; another function may write later, so all its parameters are marked.
        if not str(getattr(function, "__module__", "")).startswith("torch"):
            found.mark(frozenset().union(*by_object.values()), _reason(node))


def _reason(node: fx.Node) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return f"the forward writes it ({name})"
