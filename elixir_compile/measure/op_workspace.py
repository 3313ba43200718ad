"""Measure the bytes that an op allocates beside its results, by one run on random inputs."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.measure.regions import random_input
from elixir_compile.platforms import PeakRecord, platform_of

log = logging.getLogger("elixir_compile")


def op_workspace_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Run the op of `node` once, and return the most bytes that it allocated at once beside its results.

    Inputs have the shapes, strides and dtypes of the capture; `sizes` has the values of the symbols of dynamic shapes.
    The states of random generators are restored. Returns 0 on a device in host memory, and, with a line in the log, if
    the workspace is not known: the op does not run on such inputs, or not in the memory that is free, or somebody else
    reads the history of the allocator.
    """
    examples = [source.meta.get("val") for source in node.all_input_nodes]
    device = next((value.device for value in examples if isinstance(value, torch.Tensor)), torch.device("cpu"))
    if not platform_of(device).has_own_memory:
        return 0
    try:
        return _run(node, sizes, device)
    # Libraries raise what they like, and a plan without this figure is better than no plan.
    except Exception as error:
        log.info("the workspace of %s is not known: %s", node.target, str(error).partition("\n")[0])
        return 0


def _run(node: fx.Node, sizes: Mapping[str, int], device: torch.device) -> int:
    """Return the workspace of one run of the op of `node`. Raises RuntimeError if the peak of the run is not known."""
    target: Any = node.target
    platform = platform_of(device)
    with (
        compat.real_tensors(),
        torch.no_grad(),
        torch.random.fork_rng(devices=[device], device_type=device.type),
    ):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: random_input(n.meta["val"], sizes))
        platform.synchronize(device)
        before_bytes = platform.tensor_bytes(device)
        with PeakRecord(platform, device) as record:
            results = target(*args, **kwargs)
            platform.synchronize(device)
        if record.peak_bytes is None:
            raise RuntimeError("somebody else reads the history of the allocator")
        return max(record.peak_bytes - before_bytes - _nbytes(results, device), 0)


def _nbytes(results: Any, device: torch.device) -> int:
    """Return the bytes of the storages of `results` on `device`."""
    found = results if isinstance(results, tuple | list) else (results,)
    tensors = [value for value in found if isinstance(value, torch.Tensor) and value.device == device]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
