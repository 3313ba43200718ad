"""Hide the reads of parameters from the partitioner of a joint graph, and show them again in the forward and backward.

The partitioner must see the same graph as under `torch.compile`: parameters are inputs, which are free to save, and
gradients are outputs. So

    before   primal w, v, of one parameter;            ...;  gradients of the primals are outputs
             gather(handle, ..., key) -> u;            ...;  reduce(g, key) -> gradient of the handle, an output
    during   one placeholder for each parameter;       ...;  gradients are extra outputs; None for the primals
    after    parameter(key) in its place;              ...;  gradient(g, key), directly behind g

and the partitioner returns, node for node, the forward and backward of the same model without Elixir. `parameter` and
`gradient` are markers: the rewriter replaces them by the actions of the schedule. `capture/parameter_inputs.py` says
which inputs are parameters, by their positions.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.capture.views import is_number, viewed
from elixir_compile.ops.schema import GATHER, REDUCE


def parameter(key: int) -> torch.Tensor:
    """Marker for the gathered parameter `key`."""
    raise AssertionError("a marker is replaced before a graph runs")


def gradient(grad: torch.Tensor, key: int) -> None:
    """Marker: `grad` is a term of the gradient of parameter `key`."""
    raise AssertionError("a marker is replaced before a graph runs")


def ticket(keys: tuple[int, ...]) -> torch.Tensor:
    """Marker for the ticket: the number of the forward, and the versions of the parameters `keys`.

    The backward compares the versions, to find out whether a parameter that it reads has changed.
    """
    raise AssertionError("a marker is replaced before a graph runs")


TICKET = "elixir_ticket"
"""The name of the backward's input for the ticket."""

for _marker in (gradient, ticket):
    fx.node.has_side_effect(_marker)


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


def gather_keys(graph: fx.Graph) -> list[int]:
    """Return the keys of the parameters gathered in `graph`, in order of first use."""
    return list(dict.fromkeys(node.args[3] for node in graph.find_nodes(op="call_function", target=GATHER)))


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
    hidden = _hide(joint, options["num_fwd_outputs"], keys)
    num_primals = sum("tangents" not in str(node.target) for node in joint.graph.find_nodes(op="placeholder"))
    known = options.pop("static_lifetime_input_indices", None) or []
    static = [*known, *range(num_primals - len(hidden.keys), num_primals)]
    forward, backward = partition(joint, joint_inputs, static_lifetime_input_indices=static, **options)
    num_saved_from = options["num_fwd_outputs"]
    _name_random_states(forward.graph, backward.graph)
    _show_in_forward(forward, hidden, num_saved_from)
    _show_in_backward(backward, hidden)
    for module in (forward, backward):
        module.graph.lint()
    return forward, backward


def _name_random_states(forward: fx.Graph, backward: fx.Graph) -> None:
    """Give random generator states the same names among the backward's inputs as in the forward.

    The partitioner saves a state for each random op of a `checkpoint` region. Unlike for other saved values, it names
    the backward's inputs by a count: `rng_state_output_0`. Both halves have them in the same order.
    """
    draws = forward.find_nodes(op="call_function", target=torch.ops.higher_order.run_and_save_rng_state)
    repeated = backward.find_nodes(op="call_function", target=torch.ops.higher_order.run_with_rng_state)
    taken = {node.args[0] for node in repeated}
    saved = [node for node in forward.output_node().args[0] if isinstance(node, fx.Node) and node.args]
    states = [node for node in saved if node.args[0] in draws and node.args[1] == 0]
    inputs = [node for node in backward.find_nodes(op="placeholder") if node in taken]
    for state, given in zip(states, inputs, strict=True):
        with backward.inserting_before(given):
            named = backward.placeholder(state.name)
        named.meta = dict(given.meta)
        given.replace_all_uses_with(named)
        backward.erase_node(given)


def show_in_inference(module: fx.GraphModule, keys: Mapping[int, int]) -> None:
    """Make an inference graph read each parameter through one marker, instead of by gathers or as an input.

    `keys` has the key of each parameter among the inputs, by position.
    """
    graph, first = module.graph, first_op(module.graph)
    for node, position in compat.inputs_at(graph, keys).items():
        if node.users:
            with graph.inserting_before(first):
                node.replace_all_uses_with(marker_node(graph, parameter, (keys[position],), node.meta))
    for node in graph.find_nodes(op="call_function", target=GATHER):
        with graph.inserting_before(node):
            node.replace_all_uses_with(marker_node(graph, parameter, (node.args[3],), node.meta))
        graph.erase_node(node)
    merge_markers(graph)


def _hide(joint: fx.GraphModule, num_fwd_outputs: int, keys: Mapping[int, int]) -> _Hidden:
    graph, hidden = joint.graph, _Hidden()
    placeholders = graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if "tangents" not in str(node.target)]
    given = compat.inputs_at(graph, keys)
    gathers = graph.find_nodes(op="call_function", target=GATHER)
    reads = {node: keys[position] for node, position in given.items() if node.users}
    reads |= {node: node.args[3] for node in gathers}
    inputs: dict[int, fx.Node] = {}
    last = primals[-1]
    # In the order of the keys, so the step does not depend on the order of the reads.
    for read, key in sorted({key: (read, key) for read, key in reads.items()}.values(), key=lambda found: found[1]):
        with graph.inserting_after(last):
            last = inputs[key] = graph.placeholder(f"elixir_parameter_{key}")
        last.meta = {name: read.meta[name] for name in ("val", "tensor_meta") if name in read.meta}
        hidden.strides[key] = tuple(read.meta["val"].stride())
    for read, key in reads.items():
        read.replace_all_uses_with(inputs[key])
    for node in gathers:
        graph.erase_node(node)
    hidden.keys = {node.name: key for key, node in inputs.items()}
    _turn_gradients_into_extra_outputs(graph, hidden, num_fwd_outputs, given, keys)
    return hidden


def _turn_gradients_into_extra_outputs(
    graph: fx.Graph, hidden: _Hidden, num_fwd_outputs: int, given: Mapping[fx.Node, int], keys: Mapping[int, int]
) -> None:
    """Move the gradients of all parameters behind the other outputs, in the order in which they are computed.

    The parameters are the inputs `given` and the gathered parameters.
    """
    output = graph.output_node()
    outputs = list(output.args[0])
    descriptions = list(output.meta.get("desc", [None] * len(outputs)))
    reduces = graph.find_nodes(op="call_function", target=REDUCE)
    reached = _downstream(reduces)
    found = [(node.args[0], node.args[1]) for node in reduces]
    for place, position in compat.gradients_at(graph, given.values()).items():
        found += [(outputs[place], keys[position])] if outputs[place] is not None else []
        outputs[place] = None
    for index in range(num_fwd_outputs, len(outputs)):
        if outputs[index] in reached:
            outputs[index] = None
    order = {node: place for place, node in enumerate(graph.nodes)}
    for grad, key in sorted(found, key=lambda pair: order[pair[0]]):
        outputs.append(grad)
        descriptions.append(None)
        hidden.gradient_keys.append(key)
    output.args = (tuple(outputs),)
    if "desc" in output.meta:
        output.meta["desc"] = descriptions
    for node in reversed([node for node in graph.nodes if node in reached]):
        graph.erase_node(node)


def _downstream(roots: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return `roots` and all nodes computed from them, without the output node.

    From the reduces on, these are the sums of the one-element gradients of handles.
    """
    reached = dict.fromkeys(roots)
    pending = list(roots)
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in reached:
                reached[user] = None
                pending.append(user)
    return reached


def _show_in_forward(forward: fx.GraphModule, hidden: _Hidden, num_fwd_outputs: int) -> None:
    """Remove saved parameters and their views from the outputs, add the ticket, and read parameters through markers."""
    graph = forward.graph
    output = graph.output_node()
    outputs, saved = output.args[0][:num_fwd_outputs], output.args[0][num_fwd_outputs:]
    saved_nodes = {node for node in saved if isinstance(node, fx.Node)}
    for node in saved:
        chain = _view_chain(node, hidden.keys, saved_nodes)
        if chain is not None:
            hidden.saved_views[node.name] = chain
    kept = [node for node in saved if getattr(node, "name", None) not in hidden.saved_views]
    keys = tuple(dict.fromkeys(hidden.keys[chain[0].name] for chain in hidden.saved_views.values()))
    with graph.inserting_before(output):
        stamp = marker_node(graph, ticket, (keys,), {"val": _ticket_example(graph, len(keys))})
    output.args = ((*outputs, stamp, *kept),)
    _replace_inputs(graph, hidden)


def _show_in_backward(backward: fx.GraphModule, hidden: _Hidden) -> None:
    """Do the same as `_show_in_forward` to the inputs, and turn the extra gradient outputs into `gradient` markers."""
    graph = backward.graph
    placeholders = graph.find_nodes(op="placeholder")
    sizes = {node.name: node for node in placeholders if is_number(node)}
    first = first_op(graph)
    for node in placeholders:
        if node.name in hidden.saved_views:
            first = _rebuild_view(graph, node, hidden, first, sizes)
    first_tensor = next(node for node in placeholders if not isinstance(node.meta.get("val"), torch.SymInt))
    keys = {hidden.keys[chain[0].name] for chain in hidden.saved_views.values()}
    example = _ticket_example(graph, len(keys))
    with graph.inserting_before(first_tensor):
        graph.placeholder(TICKET).meta = {"val": example}
    for node in placeholders:
        if node.name in hidden.saved_views:
            graph.erase_node(node)
    _replace_inputs(graph, hidden)
    output = graph.output_node()
    outputs, num_gradients = list(output.args[0]), len(hidden.gradient_keys)
    kept, gradients = outputs[: len(outputs) - num_gradients], outputs[len(outputs) - num_gradients :]
    output.args = (tuple(kept),)
    if "desc" in output.meta:
        output.meta["desc"] = list(output.meta["desc"])[: len(kept)]
    _insert_gradients(graph, gradients, hidden)


def _view_chain(node: object, names: Collection[str], saved: Collection[fx.Node]) -> list[fx.Node] | None:
    """Return a hidden parameter's placeholder and the views that lead from it to the saved `node`.

    Return None if `node` is no such view, or if the views take an unsaved dynamic size, because the backward could
    not make the views again.
    """
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node):
        if node.op == "placeholder":
            return [node, *reversed(chain)] if node.name in names else None
        base = viewed(node)
        is_known = all(source is base or source in saved for source in node.all_input_nodes)
        if not getattr(node.target, "is_view", False) or base is None or not is_known:
            return None
        chain.append(node)
        node = base
    return None


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


def first_op(graph: fx.Graph) -> fx.Node:
    """Return the first node behind the placeholders."""
    return next(node for node in graph.nodes if node.op != "placeholder")


def _insert_gradients(graph: fx.Graph, gradients: Sequence[fx.Node | None], hidden: _Hidden) -> None:
    """Put a marker behind each gradient.

    The marker gets a contiguous copy if the gradient shares its storage, or if its strides are not the parameter's.
    """
    claimed: set[int] = {compat.storage_key(n.meta["val"]) for n in graph.find_nodes(op="placeholder") if _is_tensor(n)}
    for grad, key in zip(gradients, hidden.gradient_keys, strict=True):
        if grad is None:
            continue
        value = grad.meta["val"]
        storage = compat.storage_key(value)
        owns = compat.evaluate_size(value.untyped_storage().nbytes(), {}) == value.numel() * value.element_size()
        before = first_op(graph) if grad.op == "placeholder" else grad.next
        with graph.inserting_before(before):
            if storage in claimed or not owns or value.stride() != hidden.strides[key]:
                grad = _own_copy(graph, grad)
            marker_node(graph, gradient, (grad, key), {"val": None})
        claimed.add(storage)


def _own_copy(graph: fx.Graph, grad: fx.Node) -> fx.Node:
    value = grad.meta["val"]
    with value.fake_mode:
        example = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    copy = graph.call_function(torch.ops.aten.clone.default, (grad,), {"memory_format": torch.contiguous_format})
    copy.meta = {**grad.meta, "val": example}
    return copy


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


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


def merge_markers(graph: fx.Graph) -> None:
    """Merge the `parameter` markers of each key into one, and move the markers in front of all ops."""
    first: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=parameter):
        kept = first.setdefault(node.args[0], node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    op = next((node for node in graph.nodes if node.op != "placeholder" and node.target is not parameter), None)
    for key in sorted(first):
        op.prepend(first[key])


def marker_node(graph: fx.Graph, marker: Callable, args: tuple, meta: dict) -> fx.Node:
    """Add a marker with a copy of `meta` at the insertion point of `graph`, and return it."""
    node = graph.call_function(marker, args)
    node.meta = dict(meta)
    return node


def _ticket_example(graph: fx.Graph, num_keys: int) -> torch.Tensor:
    example = next(node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    with example.fake_mode:
        return torch.empty(1 + num_keys, dtype=torch.int64, device="cpu")
