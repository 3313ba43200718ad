"""Hide the reads of parameters from the partitioner of a joint graph, and show them again in the forward and backward.

The partitioner must see the same graph as under `torch.compile`: parameters are inputs, which are free to save, and
gradients are outputs. So

    before   primal w, v, of one parameter;            ...;  gradients of the primals are outputs
             gather(handle, ..., key) -> u;            ...;  reduce(g, key) -> gradient of the handle, an output
    during   one placeholder for each parameter;       ...;  gradients are extra outputs; None for the primals
    after    parameter(key) in its place;              ...;  gradient(g, key), directly behind g

and the partitioner returns, node for node, the forward and backward of the same model without Elixir. `parameter` and
`gradient` are markers: the rewriter replaces them by the actions of the schedule. `graph/capture/rewire.py` says
which inputs are parameters, by their positions.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.capture.node_facts import (
    OF_MODULE,
    TICKET,
    as_node,
    first_op,
    gather_keys,
    gradient,
    has_tensor,
    is_number,
    is_tangent,
    key_of,
    marker_node,
    may_run_again,
    merge_markers,
    outputs_of,
    parameter,
    set_outputs,
    source_of,
    tensor_of,
    ticket,
    value_of,
)
from elixir_compile.graph.capture.rewire import fresh_value, view_chain, viewed
from elixir_compile.graph.ops.gather import GATHER, REDUCE
from elixir_compile.graph.ops.registry import slot_by_key

_GRADIENT_IN_SUBCLASS = (
    "its gradient is a tensor subclass: an op of the forward reads it together with one, and plans move plain tensors. "
    "Let the subclass return a plain tensor from such an op, or take the tensors inside out of it before"
)


@dataclass(slots=True)
class _Hidden:
    """The parameters and gradients taken out of a joint graph."""

    keys: dict[str, int] = field(default_factory=dict)
    """The key of each parameter, by the name of the placeholder in its place."""
    gradient_keys: list[int] = field(default_factory=list)
    """The key of the parameter of each extra gradient output, in order."""
    saved_views: dict[str, list[fx.Node]] = field(default_factory=dict)
    """For each saved view of a parameter, by its name: the placeholder of the parameter, then the views to it."""
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The strides of each parameter, by key."""


def reads_parameters(graph: fx.Graph, keys: Mapping[int, int]) -> bool:
    """Return whether AOTAutograd's `graph` reads parameters, by gathers or from its inputs at the positions `keys`."""
    return bool(gather_keys(graph)) or any(node.users for node in compat.inputs_at(graph, keys))


def partition_hidden(
    joint: fx.GraphModule, joint_inputs: Sequence[object], partition: Callable, keys: Mapping[int, int], **options
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition `joint` as if each parameter were one input; forward and backward read the parameters through markers.

    `keys` has the key of each parameter among the inputs, by position. `options` are the partitioner's own:
    `num_fwd_outputs`, `static_lifetime_input_indices` and, with Inductor, `compiler`.
    """
    add_sizes(joint.graph)
    hidden = _hide(joint, options["num_fwd_outputs"], keys)
    _recompute_frozen(joint.graph, hidden)
    num_primals = sum(not is_tangent(node) for node in joint.graph.find_nodes(op="placeholder"))
    known = options.pop("static_lifetime_input_indices", None) or []
    static = [*known, *range(num_primals - len(hidden.keys), num_primals)]
    forward, backward = partition(joint, joint_inputs, static_lifetime_input_indices=static, **options)
    num_saved_from = options["num_fwd_outputs"]
    _describe_draws(forward.graph, backward.graph)
    save_sizes(forward.graph, backward.graph)
    _show_in_forward(forward, hidden, num_saved_from)
    _show_in_backward(backward, hidden)
    for module in (forward, backward):
        module.graph.lint()
    return forward, backward


def _describe_draws(forward: fx.Graph, backward: fx.Graph) -> None:
    """Give the draws of random numbers that the backward repeats the values that other nodes have, and name the states.

    The partitioner saves the state of the generator for each random op of a `checkpoint` region. Unlike for other saved
    values, it names the backward's inputs by a count: `rng_state_output_0`. Both halves have them in the same order.
    The ops that draw have no values in torch 2.11 to 2.13, so their results would count as made by none of them.
    """
    draws = forward.find_nodes(op="call_function", target=torch.ops.higher_order.run_and_save_rng_state)
    drawn: dict[fx.Node, object] = {}
    for draw in draws:
        results = {node.args[1]: value_of(node) for node in draw.users}
        drawn[draw] = results.get(1)
        draw.meta["val"] = (results[0], drawn[draw])
    repeated = backward.find_nodes(op="call_function", target=torch.ops.higher_order.run_with_rng_state)
    again = {source_of(node): node for node in repeated}
    saved = [node for node in outputs_of(forward) if isinstance(node, fx.Node) and node.args]
    states = [node for node in saved if node.args[0] in draws and node.args[1] == 0]
    inputs = [node for node in backward.find_nodes(op="placeholder") if node in again]
    for state, given in zip(states, inputs, strict=True):
        with backward.inserting_before(given):
            named = backward.placeholder(state.name)
        named.meta = dict(given.meta)
        again[given].meta["val"] = drawn[source_of(state)]
        given.replace_all_uses_with(named)
        backward.erase_node(given)


def show_in_inference(module: fx.GraphModule, keys: Mapping[int, int]) -> None:
    """Make an inference graph read each parameter through one marker, instead of by gathers or as an input.

    `keys` has the key of each parameter among the inputs, by position.
    """
    add_sizes(module.graph)
    graph, first = module.graph, first_op(module.graph)
    for node, position in compat.inputs_at(graph, keys).items():
        if node.users:
            with graph.inserting_before(first):
                node.replace_all_uses_with(marker_node(graph, parameter, (keys[position],), node.meta))
    for node in graph.find_nodes(op="call_function", target=GATHER):
        with graph.inserting_before(node):
            node.replace_all_uses_with(marker_node(graph, parameter, (key_of(node),), node.meta))
        graph.erase_node(node)
    merge_markers(graph)


def _hide(joint: fx.GraphModule, num_fwd_outputs: int, keys: Mapping[int, int]) -> _Hidden:
    """Put one input in place of the reads of each parameter, and move the gradients of all parameters behind the other
    outputs, in the order in which they are computed.

    Raises UnsupportedModel if a gradient is a tensor subclass.
    """
    graph, hidden = joint.graph, _Hidden()
    given = compat.inputs_at(graph, keys)
    gathers = graph.find_nodes(op="call_function", target=GATHER)
    reads = {node: keys[position] for node, position in given.items() if node.users}
    reads |= {node: key_of(node) for node in gathers}
    inputs: dict[int, fx.Node] = {}
    last = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)][-1]
    # In the order of the keys, so the step does not depend on the order of the reads.
    for read, key in sorted({key: (read, key) for read, key in reads.items()}.values(), key=lambda found: found[1]):
        with graph.inserting_after(last):
            last = inputs[key] = graph.placeholder(f"elixir_parameter_{key}")
        last.meta = {name: read.meta[name] for name in ("val", "tensor_meta") if name in read.meta}
        hidden.strides[key] = tensor_of(read).stride()
    for read, key in reads.items():
        read.replace_all_uses_with(inputs[key])
    for node in gathers:
        graph.erase_node(node)
    hidden.keys = {node.name: key for key, node in inputs.items()}
    for position in compat.gradients_in_subclasses_at(graph, given.values()):
        raise UnsupportedModel(slot_by_key(keys[position]).name, _GRADIENT_IN_SUBCLASS)
    output, outputs = graph.output_node(), list(outputs_of(graph))
    descriptions = list(output.meta.get("desc", [None] * len(outputs)))
    reduces = graph.find_nodes(op="call_function", target=REDUCE)
    # The reduces and what is computed from them: the sums of the one-element gradients of handles.
    reached, pending = dict.fromkeys(reduces), list(reduces)
    while pending:
        users = [user for user in pending.pop().users if user.op != "output" and user not in reached]
        reached |= dict.fromkeys(users)
        pending += users
    found = [(source_of(node), key_of(node)) for node in reduces]
    for place, position in compat.gradients_at(graph, given.values()).items():
        found += [(as_node(outputs[place]), keys[position])] if outputs[place] is not None else []
        outputs[place] = None
    for index in range(num_fwd_outputs, len(outputs)):
        outputs[index] = None if outputs[index] in reached else outputs[index]
    order = {node: place for place, node in enumerate(graph.nodes)}
    found.sort(key=lambda pair: order[pair[0]])
    hidden.gradient_keys = [key for _, key in found]
    set_outputs(graph, [*outputs, *(grad for grad, _ in found)])
    if "desc" in output.meta:
        output.meta["desc"] = [*descriptions, *[None] * len(found)]
    for node in reversed([node for node in graph.nodes if node in reached]):
        graph.erase_node(node)
    return hidden


_FROZEN_REGION = sys.maxsize
"""The number of the region of tagged ops: behind all regions of `checkpoint`, so that torch saves no result of them as
the last of one region that a later region reads."""


def _recompute_frozen(graph: fx.Graph, hidden: _Hidden) -> None:
    """Have the backward compute again what depends on frozen parameters alone and is larger than they are.

    Weights in 4 or 8 bits become such values in each forward, and torch's partitioner would save them: memory for which
    the user quantised them. So the backward reads the parameters once more instead, as under a `checkpoint` of these
    ops alone. Buffers and constants, such as the table of the 16 values of NF4, may be among what an op reads. Ops that
    draw random numbers or write are left out.
    """
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    """The frozen parameters on which each node depends, for nodes that depend on nothing but them and constants."""
    written = compat.returned_writes(graph)
    for node in graph.nodes:
        if node.name in hidden.keys:
            is_frozen = not slot_by_key(hidden.keys[node.name]).param.requires_grad
            roots |= {node: frozenset([node])} if is_frozen else {}
        elif node.op == "placeholder":
            is_read_only = node.meta.get("desc") not in written and all(map(may_run_again, node.users))
            is_constant = has_tensor(node) and not tensor_of(node).requires_grad  # a mesh of ranks is no tensor
            if node.meta.get(OF_MODULE, False) and is_read_only and is_constant:
                roots[node] = frozenset()
        elif may_run_again(node) and all(source in roots for source in node.all_input_nodes):
            roots[node] = frozenset().union(*(roots[source] for source in node.all_input_nodes))
    for node, read in roots.items():
        if _nbytes([node]) > _nbytes(read) > 0:
            node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, _FROZEN_REGION


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    """Return the bytes of the storages of the values of `nodes`."""
    tensors = [tensor_of(node) for node in nodes if has_tensor(node)]
    storages = {compat.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(compat.evaluate_size(nbytes, {}) for nbytes in storages.values())


def _show_in_forward(forward: fx.GraphModule, hidden: _Hidden, num_fwd_outputs: int) -> None:
    """Remove saved parameters and their views from the outputs, add the ticket, and read parameters through markers."""
    graph = forward.graph
    outputs, saved = outputs_of(graph)[:num_fwd_outputs], outputs_of(graph)[num_fwd_outputs:]
    saved_nodes = dict.fromkeys(node for node in saved if isinstance(node, fx.Node))
    for node in saved_nodes:
        chain = _view_chain(node, hidden.keys, saved_nodes)
        if chain is not None:
            hidden.saved_views[node.name] = chain
    remaining = [node for node in saved if not (isinstance(node, fx.Node) and node.name in hidden.saved_views)]
    keys = tuple(dict.fromkeys(hidden.keys[chain[0].name] for chain in hidden.saved_views.values()))
    with graph.inserting_before(graph.output_node()):
        stamp = marker_node(graph, ticket, (keys,), {"val": _ticket_example(graph, len(keys))})
    set_outputs(graph, (*outputs, stamp, *remaining))
    _replace_inputs(graph, hidden)


def _show_in_backward(backward: fx.GraphModule, hidden: _Hidden) -> None:
    """Do the same as `_show_in_forward` to the inputs, and put a `gradient` marker behind each extra gradient output.

    The marker gets a contiguous copy if the gradient shares its storage, if its strides are not the parameter's, or if
    it has a lazy bit, as its bytes go to the host and to other ranks.
    """
    graph = backward.graph
    placeholders = graph.find_nodes(op="placeholder")
    sizes = {str(node.target): node for node in placeholders if is_number(node)}
    first = first_op(graph)
    for node in placeholders:
        if node.name in hidden.saved_views:
            first = _rebuild_view(graph, node, hidden, first, sizes)
    first_tensor = next(node for node in placeholders if not isinstance(value_of(node), torch.SymInt))
    keys = {hidden.keys[chain[0].name] for chain in hidden.saved_views.values()}
    example = _ticket_example(graph, len(keys))
    with graph.inserting_before(first_tensor):
        graph.placeholder(TICKET).meta = {"val": example}
    for node in placeholders:
        if node.name in hidden.saved_views:
            graph.erase_node(node)
    _replace_inputs(graph, hidden)
    output, outputs = graph.output_node(), outputs_of(graph)
    num_results = len(outputs) - len(hidden.gradient_keys)
    set_outputs(graph, outputs[:num_results])
    if "desc" in output.meta:
        output.meta["desc"] = list(output.meta["desc"])[:num_results]
    given = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    claimed = {compat.storage_key(tensor_of(node)) for node in given if has_tensor(node)}
    for made, key in zip(outputs[num_results:], hidden.gradient_keys, strict=True):
        if made is None:
            continue
        grad = as_node(made)
        value = tensor_of(grad)
        storage = compat.storage_key(value)
        owns = compat.evaluate_size(value.untyped_storage().nbytes(), {}) == value.numel() * value.element_size()
        with graph.inserting_before(first_op(graph) if grad.op == "placeholder" else grad.next):
            if storage in claimed or not owns or compat.is_lazy(value) or value.stride() != hidden.strides[key]:
                with compat.own_fake_mode(value):
                    example = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                clone = torch.ops.aten.clone.default
                copy = graph.call_function(clone, (grad,), {"memory_format": torch.contiguous_format})
                copy.meta = {**grad.meta, "val": example}
                grad = copy
            marker_node(graph, gradient, (grad, key), {"val": None})
        claimed.add(storage)


def _view_chain(saved_value: fx.Node, names: Collection[str], saved: Collection[fx.Node]) -> list[fx.Node] | None:
    """Return a hidden parameter's placeholder and the views that lead from it to `saved_value`.

    Return None if `saved_value` is no such view, or if the views take an unsaved dynamic size, because the backward
    could not make the views again.
    """
    chain: list[fx.Node] = []
    node = saved_value
    while node.op != "placeholder":
        base = viewed(node)
        is_known = all(source is base or source in saved for source in node.all_input_nodes)
        if not getattr(node.target, "is_view", False) or base is None or not is_known:
            return None
        chain.append(node)
        node = base
    return [node, *reversed(chain)] if node.name in names else None


def _rebuild_view(
    graph: fx.Graph, saved: fx.Node, hidden: _Hidden, before: fx.Node, sizes: Mapping[str, fx.Node]
) -> fx.Node:
    """Make the saved view again in the backward, in front of the node `before`; return the first new node.

    A saved view would keep the full gathered bucket alive. `sizes` are the sizes among the inputs, by name.
    """
    base, *views = hidden.saved_views[saved.name]
    with graph.inserting_before(before):
        made = first = marker_node(graph, parameter, (hidden.keys[base.name],), base.meta)
        for view in views:
            source = made
            made = graph.node_copy(view, lambda node, source=source: sizes.get(node.name, source))
    saved.replace_all_uses_with(made)
    return first


def _replace_inputs(graph: fx.Graph, hidden: _Hidden) -> None:
    """Turn the placeholders of hidden parameters into markers."""
    before = first_op(graph)
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in hidden.keys:
            continue
        if node.users:
            with graph.inserting_before(before):
                before = marker_node(graph, parameter, (hidden.keys[node.name],), node.meta)
            node.replace_all_uses_with(before)
        graph.erase_node(node)
    merge_markers(graph)


def _ticket_example(graph: fx.Graph, num_keys: int) -> torch.Tensor:
    example = next(tensor_of(node) for node in graph.nodes if has_tensor(node))
    with compat.own_fake_mode(example):
        return torch.empty(1 + num_keys, dtype=torch.int64, device="cpu")


# ----------------------------------------------------------------------------------------------------------------------
# Give a graph of AOTAutograd each dynamic size of its inputs as a number among its inputs.
#
# `add_sizes` does so for the forward, `save_sizes` for the backward.
#
#   Dynamo       s0, x [s0, 64]                     the size of a plain tensor comes as a number
#   AOTAutograd  values [s1, 64], offsets [s2 + 1]  a tensor subclass is taken apart; s1 is no number of the graph
#   here         values, offsets, s1                s1 becomes the last input; each call reads it from the tensor
#
# So what counts, saves or divides by numbers among the inputs does so for tensors inside of subclasses too. The length
# of the jagged dimension of a nested tensor stays an input that no op reads: it names the offsets and is no number.
#
#   partitioner  forward   h = view(x, [mul(s0, s1), 64]); return ..., h, s0, s1
#                backward  s0, s1, h, g -> n = sym_size(h, 0); r = view(g, [n, 64]);  ...;  w = mm(r, t(h))
#   here         forward   n = mul(s0, s1); h = view(x, [n, 64]); return ..., h, s0, s1, n
#                backward  s0, s1, n, h, g -> r = view(g, [n, 64]);  ...;  w = mm(r, t(h))
#
# So the saved tensor `h` may be on the host, or not be made again yet, until an op reads its elements.


_SIZE_OF = "elixir_size_of"
"""The key in `node.meta` of an added input: the position of the tensor among the inputs, and the dimension."""
_aten = torch.ops.aten
SIZES = (_aten.sym_size.int, _aten.sym_stride.int, _aten.sym_numel.default, _aten.sym_storage_offset.default)
"""Ops that return a number about a tensor without a look at its elements."""


def add_sizes(graph: fx.Graph) -> None:
    """Add an input behind those of the forward for each symbol that is a size of a tensor among them, and no number."""
    given = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
    known = {compat.symbol_of(value_of(node)) for node in given if is_number(node)}
    added: dict[str, fx.Node] = {}
    last = given[-1]
    for position, node in enumerate(given):
        for dim, size in enumerate(tensor_of(node).shape if has_tensor(node) else ()):
            symbol = compat.symbol_of(size)
            if symbol and symbol not in known and symbol not in added:
                added[symbol] = last = compat.new_input(graph, f"elixir_size_{symbol}", last)
                last.meta = {"val": size, _SIZE_OF: (position, dim)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        if (symbol := compat.symbol_of(value_of(node))) in added:
            node.replace_all_uses_with(added[symbol])
            graph.erase_node(node)


def added_sizes(graph: fx.Graph) -> list[tuple[int, int]]:
    """Return the position among the inputs and the dimension of the tensor whose size is each input that `add_sizes`
    added, in their order."""
    return [node.meta[_SIZE_OF] for node in graph.find_nodes(op="placeholder") if _SIZE_OF in node.meta]


def sizes_in(args: Sequence[Any], added: Sequence[tuple[int, int]]) -> list[int]:
    """Return the values of the inputs `added` in a call with the other inputs `args`."""
    return [args[position].shape[dim] for position, dim in added]


def save_sizes(forward: fx.Graph, backward: fx.Graph) -> None:
    """Let `backward` take the sizes that it reads off saved tensors as numbers, which `forward` returns last.

    A number with the same expression that the backward takes already, or that the forward has, stands for the size.
    Sizes of views that the backward makes of saved tensors stay if no number stands for them; `step_graph` counts them
    as reads.
    """
    made = {node.name: node for node in forward.nodes}
    known = _by_expression(node for node in backward.nodes if node.op == "placeholder")
    before = _by_expression(forward.nodes)
    read = [
        node for node in backward.nodes if node.target in SIZES and view_chain(source_of(node))[-1].op == "placeholder"
    ]
    for node in read:
        expression = _expression(node)
        if expression not in known:
            source, tensor = before.get(expression), made.get(source_of(node).name)
            if source is None and tensor is not None:
                with forward.inserting_before(first_op(forward) if tensor.op == "placeholder" else tensor.next):
                    source = forward.node_copy(node, lambda _, tensor=tensor: tensor)
            if source is None:
                continue
            set_outputs(forward, (*outputs_of(forward), source))
            known[expression] = add_numbers(backward, [source])[0]
        node.replace_all_uses_with(known[expression])
        backward.erase_node(node)


def add_numbers(backward: fx.Graph, numbers: Sequence[fx.Node]) -> list[fx.Node]:
    """Add a placeholder to `backward` for each of `numbers` of the forward, behind those of other numbers, which come
    first, as AOTAutograd orders them."""
    known = [node for node in backward.find_nodes(op="placeholder") if is_number(node)]
    return add_placeholders(backward, known[-1] if known else None, numbers)


def add_placeholders(backward: fx.Graph, last: fx.Node | None, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Add a placeholder to `backward` for each of `nodes` of the forward, behind `last`, or at the front if `last` is
    None, and return them."""
    found: list[fx.Node] = []
    for node in nodes:
        with backward.inserting_before(next(iter(backward.nodes)) if last is None else last.next):
            last = backward.placeholder(node.name)
        last.meta = {**node.meta, "val": fresh_value(node)}
        found.append(last)
    return found


def _by_expression(nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """Return the first of `nodes` with each expression of dynamic sizes."""
    found: dict[str, fx.Node] = {}
    for node in nodes:
        if expression := _expression(node):
            found.setdefault(expression, node)
    return found


def _expression(node: fx.Node) -> str:
    value = value_of(node)
    return compat.expression_of(value)[0] if isinstance(value, torch.SymInt) else ""
