"""Trace a prepared model on example inputs to the forward and backward of its training step, with the graphs of nested
regions put in place. Compile nothing.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.node import Argument, map_arg

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.base.process import collector_off
from elixir_compile.graph.capture.batch import mark_inputs_of_modules
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.graph.capture.joint import partition_hidden, reads_parameters
from elixir_compile.graph.capture.node_facts import (
    bodies_of,
    example_of,
    is_number,
    key_of,
    module_path,
    outputs_of,
    parameter,
    tensors_of,
)
from elixir_compile.graph.capture.rewire import gathers_to_inputs, renewed, split_gathers
from elixir_compile.graph.ops.registry import slot_by_key

# ----------------------------------------------------------------------------------------------------------------------
# Put the graph of each nested region in place of the node that runs it.
#
#     before   y = invoke_subgraph(body, "body", x, w)[0]         body   a = placeholder;  b = placeholder;  linear(a,
# b)
#     after    y = linear(x, w)
#
# `torch.compiler.nested_compile_region` keeps the graph of a function apart, so that a compiler compiles it once for
# all its calls. A plan acts on the ops inside: it places their parameters, and saves or recomputes their results. Equal
# layers are compiled once by `rewrite` too, whether or not the user marked them.
#
# Dynamo may trace such a function once and let several nodes run its graph, whose example values and module paths are
# those of the first call. Each call gets its own here.


_INVOKE = torch.ops.higher_order.invoke_subgraph
_Stack = Mapping[str, tuple[str, Any]]
"""The modules around a node as Dynamo notes them, outermost first: by id, the path and the class of each."""


def inline_regions(gm: fx.GraphModule) -> None:
    """Inline each nested region in Dynamo's graph `gm`, and in the graphs that its nodes run, in place."""
    for body in dict.fromkeys(body for node in gm.graph.nodes for body in bodies_of(gm, node)):
        inline_regions(body)
    paths: dict[fx.GraphModule, str] = {}
    calls = gm.graph.find_nodes(op="call_function", target=_INVOKE)
    for call in calls:
        (body,) = bodies_of(gm, call)
        stack: _Stack | None = call.meta.get("nn_module_stack")
        path = [path for path, _ in stack.values()][-1] if stack else ""
        _inline(gm, call, body, _Renewal(memory={}, old_path=paths.setdefault(body, path), path=path))
    if calls:
        gm.recompile()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renewal:
    """How the facts about the nodes of a region become those of one of its calls."""

    memory: dict[int, torch.Tensor]
    """By storage of an example value inside, a tensor in the memory that is in its place."""
    old_path: str
    """The path of the module in whose forward the region was traced."""
    path: str
    """The path of the module in whose forward it is called."""

    def meta_of(self, node: fx.Node) -> dict[str, Any]:
        """Return the facts that differ from those of `node`."""
        found: dict[str, Any] = {"example_value": renewed(example_of(node), self.memory)}
        stack: _Stack | None = node.meta.get("nn_module_stack")
        if stack and self.path != self.old_path:
            found["nn_module_stack"] = {
                key: (self.path + path.removeprefix(self.old_path), kind)
                if f"{path}.".startswith(f"{self.old_path}.")
                else (path, kind)
                for key, (path, kind) in stack.items()
            }
        return found


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, renewal: _Renewal) -> None:
    """Replace `call` by copies of the nodes of `body`."""
    inputs, results = body.graph.find_nodes(op="placeholder"), outputs_of(body.graph)
    values: dict[fx.Node, Argument] = dict(zip(inputs, call.args[2:], strict=True))
    taken: dict[fx.Node, Argument] = {}
    for user in call.users:  # Dynamo takes each result by itself
        place = user.args[1] if user.target is operator.getitem else None
        if not isinstance(place, int):
            raise AssertionError(f"{user.name} takes all results of a nested region together")
        taken[user] = results[place]
    # Results first: an input that is a result too lies in the memory of the input.
    for outer, inner in [*taken.items(), *((outer, inner) for inner, outer in values.items())]:
        if isinstance(inner, fx.Node) and isinstance(outer, fx.Node):
            for old, new in zip(tensors_of(inner), tensors_of(outer), strict=False):
                # The storage of the new one has fewer bytes if the old one is a view of a part.
                sizes = [compat.evaluate_size(own.untyped_storage().nbytes(), {}) for own in (new, old)]
                if sizes[0] == sizes[1]:
                    renewal.memory[compat.storage_key(old)] = new
    # What the graph of the body reads by name becomes an attribute of `gm`.
    names: dict[str, str] = {}
    for node in body.graph.find_nodes(op="get_attr"):
        inside = str(node.target)
        value, stem = operator.attrgetter(inside)(body), inside.replace(".", "_")
        candidates = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count()))
        names[inside] = next(name for name in candidates if getattr(gm, name, value) is value)
        setattr(gm, names[inside], value)
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copied = values[node] = gm.graph.node_copy(node, values.__getitem__)
                copied.target = names[str(node.target)] if node.op == "get_attr" else node.target
                copied.meta |= renewal.meta_of(node)
    for outer, result in taken.items():
        new = values[result] if isinstance(result, fx.Node) else result
        for user in list(outer.users):
            user.args, user.kwargs = map_arg(
                (user.args, user.kwargs), lambda source, outer=outer, new=new: new if source is outer else source
            )
        gm.graph.erase_node(outer)
    gm.graph.erase_node(call)


# ----------------------------------------------------------------------------------------------------------------------
# Trace a prepared model on example inputs to the forward and backward of its training step; compile nothing.


T = TypeVar("T")
_HALF_BYTES = 512 * 1024
"""Two thousand nested calls take less."""
_STACK_ENTRY_BYTES = 8


def with_deep_calls(run: Callable[[], T]) -> T:
    """Call `run` with memory for the frames of its calls already mapped, and return its result.

    CPython, from 3.11 on, keeps frames in chunks of 16 KB. It maps a chunk if a call does not fit the last chunk, and
    unmaps it as soon as the call returns. If the calls of a loop just cross the end of a chunk, each of them maps and
    unmaps a chunk, in about ten microseconds. A loop crosses or not by the depth at which it is called: below the
    frames of this package, torch's partitioner and the passes before it crossed 198,000 times for 16 layers of Llama,
    with 270,000 page faults; `torch.compile` alone did not. So `run` is called from a frame of more than `_HALF_BYTES`.
    CPython maps a chunk of twice that for the frame, and the calls inside use the rest of the chunk.
    """
    return _in_wide_frame(run)


_in_wide_frame = FunctionType((lambda run: run()).__code__.replace(co_stacksize=_HALF_BYTES // _STACK_ENTRY_BYTES), {})


class _Stopped(BaseException):
    """Carries the capture, or the error, out of the compiler. It is no `Exception` because Dynamo would wrap that."""

    def __init__(self, found: "Captured | UnsupportedModel") -> None:
        super().__init__()
        self.found = found


Edit = Callable[[fx.GraphModule, Sequence[Any]], Sequence[Any]]


def trace_step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str, inner: str, edit: Edit
) -> Captured:
    """Return the training step of the prepared `model` as `torch.compile(..., backend="elixir")` captures it.

    `edit` is called with Dynamo's graph and its inputs, may change the graph, and returns the inputs to compile it
    with. Raises UnsupportedModel if Dynamo cannot trace the model as one graph, or if no parameter of it is trained.
    """
    compat.trace_past_logging()
    # If a backend raises, Dynamo forgets the compilation, so the user's next call of this model is compiled as usual.
    # torch 2.11 to 2.13 never frees a backend that has raised, not even in a reset: it must not hold the model.
    edits = [edit]
    compiled = torch.compile(model, backend=_backend(name, inner, edits), fullgraph=True)
    with (
        torch.enable_grad(),
        compat.shapes_apart(),
        collector_off(),
        compat.no_collection_at_end(),
        compat.no_names_of_lines(),
    ):
        try:
            with_deep_calls(lambda: compiled(*args, **kwargs))
        except _Stopped as stopped:
            found = stopped.found
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[:3]) or type(error).__name__
            raise UnsupportedModel(name, f"its forward cannot be traced as one graph. {reason}") from error
        else:
            found = UnsupportedModel(name, "its forward computes nothing from its parameters")
        finally:
            edits.clear()
    if isinstance(found, UnsupportedModel):
        raise found.renewed()
    return found


_LSTM_FOR_INFERENCE = (
    "torch captures an LSTM on a CPU whose input needs no gradient as for inference, and its kernel mkldnn_rnn_layer "
    "then keeps nothing for the backward (torch 2.11 to 2.13; `aot_eager` fails too). Leave "
    "`torch._dynamo.config.allow_rnn` False, which runs the LSTM between graphs, or train under "
    "`torch.backends.mkldnn.flags(enabled=False)`"
)


def captured_step(
    name: str, forward: fx.GraphModule, backward: fx.GraphModule | None, *, num_outputs: int, inner: str
) -> Captured:
    """Return the capture of `forward` and `backward`, with the names of their parameters.

    Raises UnsupportedModel if the backward needs what a kernel of the forward does not make.
    """
    halves = [half for half in (forward, backward) if half is not None]
    lstms = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer.default)
    for node in lstms if backward is not None else ():
        if not node.args[-1]:
            raise UnsupportedModel(module_path(node) or name, _LSTM_FOR_INFERENCE)
    # Number the tensors among the inputs without counting the sizes among the inputs: ranks with different batches may
    # have different sizes as inputs.
    names: dict[str, str] = {}
    taken = {node.name for half in halves for node in half.graph.nodes}
    num_sizes = 0
    for node in forward.graph.find_nodes(op="placeholder"):
        stem, _, number = node.name.rpartition("_")
        if is_number(node):
            num_sizes += 1
            names[node.name] = next(own for i in itertools.count(num_sizes) if (own := f"size_{i}") not in taken)
            taken.add(names[node.name])
        elif num_sizes and stem == "primals":
            names[node.name] = f"{stem}_{int(number) - num_sizes}"
    for half in halves if num_sizes else ():
        half.graph = _renamed(half.graph, names)
    markers = [node for half in halves for node in half.graph.find_nodes(op="call_function", target=parameter)]
    return Captured(
        name=name,
        forward=forward,
        backward=backward,
        num_outputs=num_outputs,
        param_names={key: slot_by_key(key).name for key in dict.fromkeys(map(key_of, markers))},
        fused=inner == "inductor",
    )


def _renamed(graph: fx.Graph, names: Mapping[str, str]) -> fx.Graph:
    """Return `graph` with its inputs renamed by `names`. A new name may be the present name of another input."""
    renamed = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in names:
            values[node] = renamed.placeholder(names[node.name])
            values[node].meta = dict(node.meta)
        else:
            values[node] = renamed.node_copy(node, values.__getitem__)
    return renamed


def _backend(name: str, inner: str, edits: Sequence[Edit]) -> Callable[..., Any]:
    """Return a backend of `torch.compile` that stops as soon as the training graph is partitioned.

    The last of `edits` changes Dynamo's graph; the caller may empty them afterwards.
    """

    def lower(gm: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        raise _Stopped(UnsupportedModel(name, "none of its outputs depends on a parameter that requires a gradient"))

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        inline_regions(gm)
        inputs = edits[-1](gm, inputs)
        split_gathers(gm)
        given = gathers_to_inputs(gm, inputs)

        def partition(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
            if not reads_parameters(joint.graph, given.keys):
                raise _Stopped(UnsupportedModel(name, "its forward reads no parameter that requires a gradient"))
            num_outputs = options["num_fwd_outputs"]
            mark_inputs_of_modules(joint.graph, given.of_modules)
            halves = partition_hidden(joint, joint_inputs, compat.min_cut_partition, given.keys, **options)
            raise _Stopped(captured_step(name, *halves, num_outputs=num_outputs, inner=inner))

        front_end = compat.compile_with_inductor if inner == "inductor" else compat.compile_with_aot_eager
        return front_end(given.module, given.example_inputs, partition, lower)

    return compile_graph
