"""Trace a prepared model on example inputs to the forward and backward of its training step; compile nothing."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import fx, nn

from elixir_compile import compat
from elixir_compile.base.collector import collector_off
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.capture.batch import mark_inputs_of_modules
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.graph.capture.joint import partition_hidden, reads_parameters
from elixir_compile.graph.capture.markers import key_of, parameter
from elixir_compile.graph.capture.nested import inline_regions
from elixir_compile.graph.capture.node_facts import is_number, module_path
from elixir_compile.graph.capture.rewire import gathers_to_inputs, split_gathers
from elixir_compile.graph.ops.registry import slot_by_key

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


def _call(run: Callable[[], Any]) -> Any:
    return run()


_in_wide_frame = FunctionType(_call.__code__.replace(co_stacksize=_HALF_BYTES // _STACK_ENTRY_BYTES), {})


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
    _name_inputs(halves)
    markers = [node for half in halves for node in half.graph.find_nodes(op="call_function", target=parameter)]
    return Captured(
        name=name,
        forward=forward,
        backward=backward,
        num_outputs=num_outputs,
        param_names={key: slot_by_key(key).name for key in dict.fromkeys(map(key_of, markers))},
        fused=inner == "inductor",
    )


def _name_inputs(halves: Sequence[fx.GraphModule]) -> None:
    """Number the tensors among the inputs without counting the sizes among the inputs.

    If ranks have different batches, they may have different sizes as inputs.
    """
    names: dict[str, str] = {}
    taken = {node.name for half in halves for node in half.graph.nodes}
    num_sizes = 0
    for node in halves[0].graph.find_nodes(op="placeholder"):
        stem, _, number = node.name.rpartition("_")
        if is_number(node):
            num_sizes += 1
            names[node.name] = next(name for i in itertools.count(num_sizes) if (name := f"size_{i}") not in taken)
            taken.add(names[node.name])
        elif num_sizes and stem == "primals":
            names[node.name] = f"{stem}_{int(number) - num_sizes}"
    for half in halves if num_sizes else ():
        half.graph = _renamed(half.graph, names)


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
