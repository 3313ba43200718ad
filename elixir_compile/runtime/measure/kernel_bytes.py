"""Measure the bytes that the kernel of an op allocates, by one run on made-up inputs."""

import logging
import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.compat.platforms import PeakRecord, available_host_bytes, platform_of
from elixir_compile.compat.platforms.platform import Platform
from elixir_compile.graph.capture.kernel_bytes import INDICES_OF, KernelBytes, KernelCall
from elixir_compile.graph.capture.node_facts import leaves_of, value_of
from elixir_compile.graph.rewrite.local_args import local_args
from elixir_compile.graph.rewrite.own_memory import in_own_memory
from elixir_compile.runtime.measure.regions import random_input, random_tensor

log = logging.getLogger("elixir_compile")

_MOST_OF_HOST = 0.5
"""Share of the free host memory that the tensors of an op may have: the system ends a process that takes too much, with
no error to catch."""
_SMALL_BYTES = 16 << 20
"""So many bytes are there always: reading what is free takes 0.1 ms."""


def measured_bytes(call: KernelCall) -> KernelBytes | None:
    """Run the op of `call` once on the device of its inputs, and return the bytes that its kernel allocated.

    Inputs have the shapes, strides and dtypes of the capture. The states of random generators are restored. Returns
    None if the op does not run on such inputs, or not in the memory that is free. On a CPU, blocks that the threads of
    a parallel kernel allocate are not seen.
    """
    node = call.node
    examples = [leaf for source in (*node.all_input_nodes, node) for leaf in leaves_of(value_of(source))]
    tensors = [leaf for leaf in examples if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    platform = platform_of(device)
    target: Any = node.target
    with (
        compat.real_tensors(),
        torch.no_grad(),
        torch.random.fork_rng(
            devices=[device] if platform.has_own_memory else [],
            device_type=device.type if platform.has_own_memory else "cuda",
        ),
    ):
        try:
            _require_host_memory(tensors, call)
            made = {source: _made_up(source, call) for source in node.all_input_nodes}
            given = local_args(node, call.result_dim, call.parts, int) if call.parts > 1 else (node.args, node.kwargs)
            args, kwargs = fx.map_arg((given[0], dict(given[1])), made.__getitem__)
            if target in INDICES_OF:
                indices, num = (args[place] for place in INDICES_OF[target])
                _make_different(indices, num)
            run = _on_device if platform.has_own_memory else _on_host
            kernel = in_own_memory(target)
            results, peak_bytes = run(lambda: kernel(*args, **kwargs), platform, device)
            return _bytes_of(node, results, (args, kwargs), peak_bytes)
        except Exception as error:  # what kernels say of made-up inputs: indices, shapes, values, and no memory
            log.info("the bytes that %s allocates are not known: %s", target, str(error).partition("\n")[0])
            return None


def _make_different(indices: Any, num: Any) -> None:
    """Let all `indices` below `num` differ, as far as there are as many: then the kernel allocates most."""
    indices.copy_((torch.arange(indices.numel()) % num).view(indices.shape))


def _require_host_memory(tensors: list[torch.Tensor], call: KernelCall) -> None:
    """Raise MemoryError if `tensors`, the inputs and results of an op, would take most of the free host memory."""
    sized = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    nbytes = sum(compat.evaluate_size(tensor.numel(), call.sizes) * tensor.element_size() for tensor in sized)
    if nbytes > _SMALL_BYTES and nbytes > _MOST_OF_HOST * available_host_bytes():
        raise MemoryError(f"its tensors have {nbytes} bytes, most of the host memory that is free")


def _made_up(node: fx.Node, call: KernelCall) -> Any:
    """Return a value for the input `node` of `call`.

    Raises ValueError if it is empty in the trace and nobody knows its bytes: a kernel that expects more would read the
    memory of others.
    """
    if call.node.target is torch.ops.higher_order.run_with_rng_state and node is call.node.args[0]:
        return torch.get_rng_state()
    value = value_of(node)
    if isinstance(value, (list, tuple)):
        return [_made(leaf, node, call) for leaf in value]
    made = _made(value, node, call)
    if isinstance(made, torch.Tensor) and not made.numel():
        if node not in call.unlike:
            raise ValueError(f"its input {node.name} is empty in the trace")
        return torch.zeros(call.unlike[node] // made.element_size(), dtype=made.dtype, device=made.device)
    return made


def _made(value: object, node: fx.Node, call: KernelCall) -> Any:
    if not isinstance(value, torch.Tensor):
        return random_input(value, call.sizes)
    return random_tensor(*call.layout_of(node, value), dtype=value.dtype, device=value.device)


def _on_device(call: Callable[[], Any], platform: Platform, device: torch.device) -> tuple[Any, int]:
    """Return the results of `call`, and the most bytes that it allocated at once on `device`.

    It is called twice: the first call of a library may also allocate what it keeps for later calls.
    """
    call()
    platform.synchronize(device)
    before_bytes = platform.tensor_bytes(device)
    with PeakRecord(platform, device) as record:
        results = call()
    if record.peak_bytes is None:
        raise RuntimeError("somebody else reads the history of the allocator")
    return results, record.peak_bytes - before_bytes


def _on_host(call: Callable[[], Any], platform: Platform, device: torch.device) -> tuple[Any, int]:
    """Return the results of `call`, and the most bytes that it allocated at once on the CPU.

    It runs on a thread of its own, because a thread has one profiler, and the user's may be on.
    """
    found: list[Any] = []
    errors: list[Exception] = []

    def work() -> None:
        with torch.no_grad():
            try:
                found.extend(compat.with_cpu_blocks(call))
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=work, name="elixir-kernel-bytes")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    results, blocks = found
    return results, max(accumulate(blocks), default=0)


def _bytes_of(node: fx.Node, results: Any, given: Any, peak_bytes: int) -> KernelBytes:
    """Return the bytes of `results` of the op of `node` on the arguments `given`, which allocated `peak_bytes`."""
    inputs = {part.untyped_storage().data_ptr() for part in _dense(given)}
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in _dense(results)}
    own = {address: nbytes for address, nbytes in storages.items() if address not in inputs}
    if len(_dense(results)) != len(_dense(value_of(node))):
        raise ValueError("it returned more or fewer tensors than it was traced with")
    return KernelBytes(
        results_bytes=tuple(own.get(part.untyped_storage().data_ptr()) for part in _dense(results)),
        workspace_bytes=max(peak_bytes - sum(own.values()), 0),
    )


def _dense(values: Any) -> list[torch.Tensor]:
    leaves = leaves_of(list(values) if isinstance(values, tuple) else values)
    return [part for leaf in leaves if isinstance(leaf, torch.Tensor) for part in compat.dense_parts(leaf)]
