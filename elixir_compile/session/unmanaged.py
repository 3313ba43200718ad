"""Make parameters unmanaged if a captured graph uses them in a way that a gather does not allow.

plain model      the parameters get no slot, and their modules no property
prepared model   their gathers become inputs of the graph, and the executor drops their slots. If another graph gathers
                 them, their modules read them plainly again, and Dynamo captures that graph again
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.capture.modules import find_roots, is_swapped, read_plainly
from elixir_compile.graph.capture.rewire import fake_parameter, pass_unmanaged
from elixir_compile.graph.capture.written import gathered_among, written_parameters
from elixir_compile.graph.ops.registry import Slot, forget, slot_by_key, slot_of
from elixir_compile.graph.ops.shards import rehome
from elixir_compile.runtime.bucket import on_device
from elixir_compile.session.model import ManagedModel, managed_model_of_slot

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def stop_managing(model: ManagedModel, unmanaged: Iterable[tuple[Slot, str]]) -> list[Slot]:
    """Make the parameters of slots of `model` unmanaged, each with a reason; return the slots that another graph
    gathers.

    Raises UnsupportedModel if a parameter is sharded, or if the backward of an outstanding forward may read it.
    """
    executor = model.executor
    graphs = [graph for graph in model.graphs if not graph.is_superseded]
    gathered: list[Slot] = []
    for slot, reason in unmanaged:
        if slot.is_dtensor:
            raise UnsupportedModel(slot.name, f"{reason}, and several ranks share it. Do that outside of the forward")
        readers = [graph for graph in graphs if slot.name in graph.param_names]
        if readers and executor.saved.outstanding_owners():
            raise UnsupportedModel(
                slot.name,
                f"{reason}, and another graph, which waits for its backward, gathers it. Call the compiled model once "
                "under `torch.no_grad()` before it is trained",
            )
        for graph in readers:
            graph.is_superseded = True
        if readers or executor.buckets.of(slot) is not None:
            gathered.append(slot)
            executor.buckets.drop([slot])
        model.note_unmanaged(slot.name, slot.param, reason)
        del executor.slots[slot.name]
        forget(slot)
    return gathered


def compile_unmanaged(
    gm: fx.GraphModule, inputs: Sequence[Any], unmanaged: Mapping[Slot, str], compile_graph: Compile
) -> Callable[..., Any]:
    """Compile `gm` by `compile_graph`, with the parameters of the slots `unmanaged` as inputs instead of gathers.

    `unmanaged` has the reason for each slot.
    """
    passed = pass_unmanaged(gm, inputs, unmanaged)
    gathered: list[Slot] = []
    for slot, reason in unmanaged.items():
        if slot_of(slot.param) is slot:
            gathered += stop_managing(managed_model_of_slot(slot), [(slot, reason)])
    compiled = compile_graph(gm, passed.example_inputs)
    keys = [slot.key for slot in unmanaged]
    passed_keys = passed.keys  # `run` must not keep `passed`, which holds the first batch
    lock, is_first = threading.Lock(), True

    def run(*args: Any) -> Any:
        nonlocal is_first
        values = list(args)
        for place, key in passed_keys.items():
            values[place] = slot_by_key(key).param
        with lock:
            if is_first:  # no earlier: Dynamo compares devices and classes again when the backend returns
                is_first = False
                _move_to_device(map(slot_by_key, keys))
                _capture_again(gathered)
                gathered.clear()
        return compiled(*values)

    return run


def trace_unmanaged(gm: fx.GraphModule, inputs: Sequence[Any], model: ManagedModel) -> Sequence[Any]:
    """Replace gathers by inputs of `gm` for parameters that cannot be gathers, and return all inputs for its trace.

    `gm` is a graph of a stand-in, which belongs to `model` and which nobody runs.
    """
    unmanaged = gathered_among(gm, written_parameters(gm, inputs))
    passed = pass_unmanaged(gm, inputs, unmanaged)
    stop_managing(model, unmanaged.items())
    # All parameters of a stand-in are views of one memory, so a write to a parameter would be a write to all of them.
    return [
        fake_parameter(gm, value, model.executor.device) if isinstance(value, torch.nn.Parameter) else value
        for value in passed.example_inputs
    ]


@torch.no_grad()
def _move_to_device(slots: Iterable[Slot]) -> None:
    """Move the parameters of `slots` to the compute device, into memory of their own."""
    for slot in slots:
        rehome(slot.param, on_device(slot.own.detach(), slot.device))


def _capture_again(slots: Sequence[Slot]) -> None:
    """Let every module read the parameters of `slots` plainly, so that the guards of graphs that gather them fail."""
    wanted = {id(slot.param) for slot in slots}
    for root in find_roots([slot.param for slot in slots]) if slots else ():
        for module in root.modules():
            names = [name for name, param in module._parameters.items() if id(param) in wanted]
            if names and is_swapped(module):
                read_plainly(module, names)
