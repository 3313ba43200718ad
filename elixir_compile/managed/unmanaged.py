"""Parameters that a captured graph shows to be no gathers: they stay whole on the device, as inputs of their graphs.

plain model      they get no slot, and their modules no property
prepared model   what the graph gathers of them becomes inputs; the executor lets go of them. Where another graph
                 has gathered them, their modules read them plainly again, and Dynamo captures that graph again
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from elixir_compile.capture.modules import find_roots, is_swapped, read_plainly
from elixir_compile.capture.rewire import fake_parameter, pass_unmanaged
from elixir_compile.capture.written import gathered_among, written_parameters
from elixir_compile.errors import UnsupportedModel
from elixir_compile.managed.compilation import Compilation
from elixir_compile.ops.registry import Slot, forget, slot_by_key, slot_of
from elixir_compile.ops.shards import rehome
from elixir_compile.runtime.bucket import on_device
from elixir_compile.runtime.executor import Executor

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def stop_managing(executor: Executor, whole: Iterable[tuple[Slot, str]]) -> list[Slot]:
    """Take the parameters of slots out of the charge of `executor`, each for a reason; return the slots that another
    graph gathers.

    Raises UnsupportedModel where several ranks share one, and where a forward waits for a backward that may read it.
    """
    records: list[Compilation] = [record for record in executor.compilations if not record.is_superseded]
    gathered: list[Slot] = []
    for slot, reason in whole:
        if slot.is_dtensor:
            raise UnsupportedModel(slot.name, f"{reason}, and several ranks share it. Do that outside of the forward")
        readers = [record for record in records if slot.name in record.reads]
        if readers and executor.saved.outstanding_owners():
            raise UnsupportedModel(
                slot.name,
                f"{reason}, and another graph, which waits for its backward, gathers it. Call the compiled model once "
                "under `torch.no_grad()` before it is trained",
            )
        for record in readers:
            record.is_superseded = True
        if readers or executor.running(slot) is not None:
            gathered.append(slot)
            executor.drop_buckets_of([slot])
        executor.unmanaged_because[slot.name] = reason
        del executor.slots[slot.name]
        forget(slot)
    return gathered


def compile_unmanaged(
    gm: fx.GraphModule, inputs: Sequence[Any], whole: Mapping[Slot, str], compile_graph: Compile
) -> Callable[..., Any]:
    """Compile `gm`, which gathers the parameters of the slots `whole`, by `compile_graph` with these as inputs."""
    passed = pass_unmanaged(gm, inputs, whole)
    gathered: list[Slot] = []
    for slot, reason in whole.items():
        if slot_of(slot.param) is slot:
            gathered += stop_managing(slot.sink, [(slot, reason)])
    compiled = compile_graph(gm, passed.example_inputs)
    keys = [slot.key for slot in whole]
    passed_keys = passed.keys  # and not `passed`: the first batch would live as long as `run`
    lock, is_first = threading.Lock(), True

    def run(*args: Any) -> Any:
        nonlocal is_first
        values = list(args)
        for place, key in passed_keys.items():
            values[place] = slot_by_key(key).param
        with lock:
            if is_first:  # and not before: Dynamo compares devices and classes again when the backend returns
                is_first = False
                _bring(map(slot_by_key, keys))
                _capture_again(gathered)
                gathered.clear()
        return compiled(*values)

    return run


def trace_unmanaged(gm: fx.GraphModule, inputs: Sequence[Any], executor: Executor) -> Sequence[Any]:
    """Let parameters be inputs of `gm` that can be no gathers; return the inputs to compile it with. The model is a
    stand-in, which `executor` prepared and nobody runs."""
    whole = gathered_among(gm, written_parameters(gm, inputs))
    passed = pass_unmanaged(gm, inputs, whole)
    stop_managing(executor, whole.items())
    # All parameters of a stand-in are views of one memory, so a write to one would be a write to each.
    return [
        fake_parameter(gm, value, value.device) if isinstance(value, torch.nn.Parameter) else value
        for value in passed.example_inputs
    ]


@torch.no_grad()
def _bring(slots: Iterable[Slot]) -> None:
    """Move the parameters of `slots` to the compute device, into memory of their own."""
    for slot in slots:
        rehome(slot.param, on_device(slot.own.detach(), slot.device))


def _capture_again(slots: Sequence[Slot]) -> None:
    """Let every module read the parameters of `slots` plainly, so that no guard of a graph that gathers them holds."""
    wanted = {id(slot.param) for slot in slots}
    for root in find_roots([slot.param for slot in slots]) if slots else ():
        for module in root.modules():
            names = [name for name, param in module._parameters.items() if id(param) in wanted]
            if names and is_swapped(module):
                read_plainly(module, names)
