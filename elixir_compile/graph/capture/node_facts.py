"""Read one FX node: its values, its arguments, its place in the user's code, the facts about its ATen op, and the
parameter that it stands for.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import Argument, has_side_effect, map_arg
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from elixir_compile import compat
from elixir_compile.graph.ops.gather import GATHER, REDUCE
from elixir_compile.ir import Kernel
from elixir_compile.ir.graph import Ring

OF_MODULE = "elixir_of_module"
"""The key in `node.meta` that marks the inputs that are tensors of modules, such as buffers. They are no batch, even if
they have as many rows."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_STEP = re.compile(r"\['?([^'\]]+)'?\]|\.?(\w+)")
_DROPPED = {"L", "G", "self", "_modules", "_parameters", "_buffers", "_orig_mod"}


def value_of(node: fx.Node) -> object:
    """Return the value of `node` as AOTAutograd traced it, with fake tensors for tensors; None if it has none."""
    return node.meta.get("val")


def has_tensor(node: fx.Node) -> bool:
    """Return whether the value of `node` is one tensor."""
    return isinstance(value_of(node), torch.Tensor)


def tensor_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that is the value of `node`. Raises TypeError if its value is no tensor."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the value of {node.name} is no tensor, but {value!r}")
    return value


_SUMS_OVER_RANKS = ("_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default")
"""Ops that add up the same element of each rank, and so compute each element by itself."""


def is_number(node: fx.Node) -> bool:
    """Return whether the value of `node` is a symbolic number, not a tensor."""
    return isinstance(value_of(node), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_tangent(node: fx.Node) -> bool:
    """Whether the placeholder is the gradient of an output of the forward, by the name that AOTAutograd gives it: torch
    2.11 to 2.13."""
    return "tangents" in str(node.target)


def is_pure(node: fx.Node) -> bool:
    """Return whether `node` is an operator of torch that writes none of its inputs."""
    if not compat.is_op_overload(node.target):
        return is_number(node)
    is_sum = str(node.target) in _SUMS_OVER_RANKS
    return (is_sum or node.target.namespace in ("aten", "prims")) and not compat.schema_of(node.target).is_mutable


def size_of(node: fx.Node) -> "int | torch.SymInt":
    """Return the value of `node`, a size. Raises TypeError if its value is no integer, constant or symbolic."""
    value = value_of(node)
    if not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"the value of {node.name} is no size, but {value!r}")
    return value


def source_of(node: fx.Node, place: int = 0) -> fx.Node:
    """Return the node that is the argument of `node` at `place`. Raises TypeError if the argument is a constant."""
    return as_node(node.args[place])


def as_node(argument: object) -> fx.Node:
    """Return `argument`, which is a node. Raises TypeError if it is a constant."""
    if not isinstance(argument, fx.Node):
        raise TypeError(f"an argument must be a node, but is {argument!r}")
    return argument


def int_of(node: fx.Node, place: int) -> int:
    """Return the argument of `node` at `place`, a constant integer. Raises TypeError if it is something else."""
    number = node.args[place]
    if not isinstance(number, int):
        raise TypeError(f"argument {place} of {node.name} must be an integer, but is {number!r}")
    return number


def ints_of(node: fx.Node, place: int) -> list[int]:
    """Return the argument of `node` at `place`, a list of integers. Raises TypeError if it is something else."""
    numbers = node.args[place]
    if isinstance(numbers, (list, tuple)):
        found = [number for number in numbers if isinstance(number, int)]
        if len(found) == len(numbers):
            return found
    raise TypeError(f"argument {place} of {node.name} must be a list of integers, but is {numbers!r}")


def values_of_arguments(node: fx.Node, value: Callable[[fx.Node], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments of `node`, with `value(source)` for each node among them."""
    read = cast("Callable[[fx.Node], Argument]", value)  # fx passes on any value, but declares those of a graph
    return map_arg(node.args, read), map_arg(dict(node.kwargs), read)


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return those of `args` and `kwargs` that `op` writes, by its schema; none if it has none."""
    schema = compat.schema_of(op)
    if schema is None or not schema.is_mutable:
        return []
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def outputs_of(graph: fx.Graph) -> tuple[Argument, ...]:
    """Return the outputs of `graph`: nodes and constants, such as None for a value that nobody reads.

    The condition of a `while_loop` is a graph that returns one node, and no tuple.
    """
    outputs = graph.output_node().args[0]
    if isinstance(outputs, fx.Node):
        return (outputs,)
    if not isinstance(outputs, (tuple, list)):
        raise TypeError(f"a captured graph returns a tuple, but this graph returns {outputs!r}")
    return tuple(outputs)


def set_outputs(graph: fx.Graph, outputs: Iterable[Argument]) -> None:
    """Make `graph` return the tuple `outputs`."""
    graph.output_node().args = (tuple(outputs),)


@functools.lru_cache(maxsize=4096)
def dotted(path: str) -> str:
    """Return Dynamo's `L['self']._modules['h'][0].attn` as `h.0.attn`.

    A model of a class of torch, as `nn.Sequential`, is the argument `fn` of a function of Dynamo that calls it.
    """
    names = [quoted or plain for quoted, plain in _STEP.findall(path)]
    if names[:2] == ["L", "fn"]:
        del names[:2]
    return ".".join(name for name in names if name not in _DROPPED)


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the innermost module whose forward made `node`, empty if tracing kept no module."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return dotted(path)


def source_line(node: fx.Node) -> str:
    """Return `file.py:line` of the innermost frame of the user's code, empty if tracing kept no stack."""
    trace = node.meta.get("stack_trace") or ""
    end = len(trace)
    while (begin := trace.rfind('File "', 0, end)) >= 0:  # the innermost frame is the last of dozens
        if frame := _FRAME.match(trace, begin):
            return f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}"
        end = begin
    return ""


def example_of(node: fx.Node) -> object:
    """Return Dynamo's example value of `node`, with fake tensors for tensors; None if it has none."""
    return node.meta.get("example_value")


def tensor_example_of(node: fx.Node) -> torch.Tensor:
    """Return Dynamo's example value of `node`, a fake tensor. Raises TypeError if it is no tensor."""
    example = example_of(node)
    if not isinstance(example, torch.Tensor):
        raise TypeError(f"the example value of {node.name} is no tensor, but {example!r}")
    return example


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the dense tensors in the value of `node`; within a function transform, those inside of its wrappers."""
    leaves = map(compat.unwrapped, leaves_of(example_of(node)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def storages_of(node: fx.Node) -> set[int]:
    """Return the keys of the storages of the dense tensors in the value of `node`."""
    return {compat.storage_key(leaf) for leaf in tensors_of(node)}


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs run by `node` of `gm`, such as the inside of a `checkpoint`."""
    found = [getattr(gm, str(source.target), None) for source in node.all_input_nodes if source.op == "get_attr"]
    return [body for body in found if isinstance(body, fx.GraphModule)]


def op_of(node: fx.Node) -> Any:
    """Return the op that `node` runs: its target, or the random op that it repeats with a saved state of the generator,
    which the partitioner makes of random ops in a `checkpoint`."""
    if node.target is torch.ops.higher_order.run_and_save_rng_state:
        return node.args[0]
    return node.args[1] if node.target is torch.ops.higher_order.run_with_rng_state else node.target


def leaves_of(value: object) -> list[object]:
    """Return the leaves of nested lists, tuples and dictionaries `value`, or `[value]` if it is itself a leaf."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves_of(item)] if isinstance(value, (list, tuple)) else [value]


_aten = torch.ops.aten
_SAME_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
"""Kernels without a formula in torch, each with a kernel that has one and takes the same first arguments."""


def flops_of(node: fx.Node) -> "int | torch.SymInt":
    """Return the floating-point operations of one ATen call, 0 if torch has no formula for it."""
    if not compat.is_op_overload(node.target):
        return 0
    packet = node.target.overloadpacket
    formula = flop_registry.get(_SAME_AS.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = values_of_arguments(node, value_of)
    return formula(*args, **kwargs, out_val=value_of(node))


def may_return_input(node: fx.Node) -> bool:
    """Return whether a result of `node` may be in the memory of one of its inputs.

    Functions of torch that run graphs, as `cond` and `scan` do, return no input: Dynamo refuses it, or copies it.
    """
    return not compat.is_higher_order(node.target)


_ALLOCATES_NOTHING = {
    torch.ops.aten.full.default,
    torch.ops.aten.full_like.default,
    torch.ops.prims.iota.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.gather.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
}

_WRITES_INTO_FIRST = {
    torch.ops.aten.index_put.default,
    torch.ops.aten._unsafe_index_put.default,
    torch.ops.aten._unsafe_masked_index_put_accumulate.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter.value,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter_reduce.two,
    torch.ops.aten.index_add.default,
}


_SEEDED_ON_HOST = {
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._efficient_attention_backward.default,
}
"""Backward ops of CUDA kernels that read the seed of the forward's dropout in host memory."""
_PURE = ("aten", "prims")
"""Operator libraries whose tags and schemas tell whether an op draws random numbers or writes an input."""


def kernel_of(node: fx.Node) -> Kernel:
    """Return the kind of Inductor's kernel for `node`, by which it can be fused or not."""
    return _kernel_of_op(node.target) if compat.is_op_overload(node.target) else Kernel.OPAQUE


@functools.cache
def _kernel_of_op(op: Any) -> Kernel:
    if op in _ALLOCATES_NOTHING or op in compat.inductor_random_ops() or torch.Tag.pointwise in op.tags:
        return Kernel.POINTWISE
    return Kernel.REDUCTION if torch.Tag.reduction in op.tags else Kernel.OPAQUE


@functools.cache
def _may_be_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def may_run_again(node: fx.Node) -> bool:
    """Return whether `node`, an operator of any library, gives the same result from the same inputs and writes none."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    return (
        compat.is_op_overload(node.target)
        and not compat.schema_of(node.target).is_mutable
        and not _may_be_random(node.target)
    )


def runs_once(node: fx.Node) -> bool:
    """Return whether `node` must not be recomputed.

    It must not if it draws random numbers, writes an input, is no operator of `aten` or `prims`, or is saved by the
    user's checkpoint policy. Inductor's random ops may run again, because they read saved seeds. A node with a
    dynamic size among its inputs is not recomputed either.
    """
    if not compat.is_op_overload(node.target):
        return not is_number(node)
    if node.target.namespace not in _PURE:
        return True
    schema = compat.schema_of(node.target)
    is_random = _may_be_random(node.target) and _dropout_p(node) != 0.0
    is_saved = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    return is_random or is_saved or schema.is_mutable or any(is_number(source) for source in node.all_input_nodes)


def _dropout_p(node: fx.Node) -> object:
    """Return the dropout probability of an attention kernel, None if the op has no such argument."""
    for place, argument in enumerate(compat.schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            return node.args[place] if place < len(node.args) else default
    return None


def reads_seed_on_host(node: fx.Node) -> bool:
    """Return whether the kernel of `node` reads a tensor in host memory, although its meta kernel says the device.

    Memory-efficient attention with dropout saves the seed of its random numbers as tensors of the CPU, and its backward
    reads them there: a tensor on the device ends the process.
    """
    return node.op == "call_function" and node.target in _SEEDED_ON_HOST and _dropout_p(node) != 0.0


def overwritten_input(node: fx.Node) -> fx.Node | None:
    """Return the input into whose memory Inductor writes the result of a functional scatter; None if it allocates.

    Inductor writes into the input if no other node reads it.
    """
    if node.target not in _WRITES_INTO_FIRST or not isinstance(node.args[0], fx.Node):
        return None
    base = node.args[0]
    return base if len(base.users) == 1 and base.op == "call_function" else None


def dense_tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors of the value of `node`; of a sparse tensor its indices and its values."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [part for v in values if isinstance(v, torch.Tensor) for part in compat.dense_parts(v)]


def storage_keys_of(node: fx.Node) -> list[int]:
    """Return the key of the storage of each of `dense_tensors_of(node)`."""
    return [compat.storage_key(value) for value in dense_tensors_of(node)]


# ----------------------------------------------------------------------------------------------------------------------
# Collectives in captured graphs: what torch's tensor-parallel styles put between the ops of a model.
#
#   y = all_reduce(x, "sum", group)      an op: it allocates y, and sends it twice round the ranks of the group
#   z = wait_tensor(y)                   a view of y: torch waits for the sum at once, where z is first read
#
# torch starts a collective and waits for it as two ops. No plan puts anything between them: the wait is a view, so it
# stays in the region of its collective, and the seconds of both are those of the collective on the lane of compute.
# Collectives are never recomputed, because `runs_once` says so of every op outside of `aten` and `prims`. So
# all ranks of the axis run the same ones in the same order.


_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_WAIT = "_c10d_functional.wait_tensor.default"


def is_wait(target: Any) -> bool:
    """Return whether the op `target` waits for a collective: its result is the memory of the collective's result."""
    return compat.is_op_overload(target) and target.namespace == "_c10d_functional" and str(target) == _WAIT


def is_collective(node: fx.Node) -> bool:
    """Return whether `node` is a collective of several ranks."""
    is_op = node.op == "call_function" and compat.is_op_overload(node.target)
    return is_op and _group_place(node.target) is not None


def ring_of(node: fx.Node, count: Any) -> Ring | None:
    """Return what `node` sends if it is a collective, else None; `count(size)` is a size as a number and as text."""
    if not is_collective(node):
        return None
    place = _group_place(node.target)
    assert place is not None, "a collective names its group"
    operands = [tensor for source in node.all_input_nodes for tensor in dense_tensors_of(source)]
    results, given = (
        sum(math.prod(value.shape) * value.element_size() for value in tensors)
        for tensors in (dense_tensors_of(node), operands)
    )
    passes = 2 if "all_reduce" in str(node.target) else 1
    is_gather = "all_gather" in str(node.target)
    nbytes, size = count(results if is_gather or not operands else given)
    return Ring(num_ranks=compat.group_size(node.args[place]), nbytes=nbytes, passes=passes, size=size)


def _group_place(target: Any) -> int | None:
    """Return the place of the group among the arguments of `target`; None if it is no collective."""
    if target.namespace not in _NAMESPACES or is_wait(target):
        return None
    names = [argument.name for argument in compat.schema_of(target).arguments]
    return next((place for place, name in enumerate(names) if name in ("group_name", "group")), None)


# ----------------------------------------------------------------------------------------------------------------------
# The nodes that stand for a parameter in captured graphs, and the parameter of each.
#
#     Dynamo's and joint graphs        gather(handle, size, stride, key)      reduce(grad, key)
#     forward and backward             parameter(key)                         gradient(grad, key)     ticket(keys)
#
# `parameter`, `gradient` and `ticket` are markers: functions that no graph calls, because `rewrite` replaces them by
# the actions of the schedule. `key` is the key of the parameter in the registry.


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

has_side_effect(gradient)
has_side_effect(ticket)

MARKERS = (gradient, parameter, ticket)
_KEY_PLACE: dict[Any, int] = {GATHER: 3, REDUCE: 1, parameter: 0, gradient: 1}


def key_of(node: fx.Node) -> int:
    """Return the key of the parameter that `node` reads, or whose gradient it takes. `node` is a gather, a reduce or a
    marker."""
    return int_of(node, _KEY_PLACE[node.target])


def gather_keys(graph: fx.Graph) -> list[int]:
    """Return the keys of the parameters gathered in `graph`, in order of first use."""
    return list(dict.fromkeys(key_of(node) for node in graph.find_nodes(op="call_function", target=GATHER)))


def merge_markers(graph: fx.Graph) -> None:
    """Merge the `parameter` markers of each key into one, and move the markers in front of all ops."""
    first: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=parameter):
        marker = first.setdefault(key_of(node), node)
        if marker is not node:
            node.replace_all_uses_with(marker)
            graph.erase_node(node)
    op = next(node for node in graph.nodes if node.op != "placeholder" and node.target is not parameter)
    for key in sorted(first):
        op.prepend(first[key])


def marker_node(
    graph: fx.Graph, marker: Callable[..., object], args: tuple[Argument, ...], meta: Mapping[str, object]
) -> fx.Node:
    """Add a marker with a copy of `meta` at the insertion point of `graph`, and return it."""
    node = graph.call_function(marker, args)
    node.meta = dict(meta)
    return node


def first_op(graph: fx.Graph) -> fx.Node:
    """Return the first node behind the placeholders."""
    return next(node for node in graph.nodes if node.op != "placeholder")
