"""One compiled region -> seconds and bytes, on inputs that are made up.

Inputs have the shapes, strides and types of the capture: random floats, zeros for the rest, so that an index is always
in range. They are on the device for this one region only, so regions of a model that does not fit can be measured.
Random state is left as it was. Not seen: caches that the region before left warm.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from elixir_compile import compat
from elixir_compile.measure.memory import peak_bytes
from elixir_compile.rewrite.regions import RegionGraph
from elixir_compile.runtime.lowering import CompiledRegion

_MIN_RUNS = 3
_ENOUGH_S = 0.1  # of timed runs: many for a short region, the least for a long one


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTime:
    """What one region took."""

    run_s: float
    """Median of several runs, the first left out."""
    peak_bytes: int | None
    """Most bytes that the region itself had allocated at once, inputs not counted; None while somebody profiles."""


def measure_region(
    region: RegionGraph, compiled: CompiledRegion, device: torch.device, sizes: Mapping[str, int]
) -> RegionTime:
    """Run `compiled`, which is `region`, a few times and return what it took.

    `sizes` gives the symbols of dynamic shapes their values. Raises `torch.OutOfMemoryError` where even one region's
    inputs are too much.
    """
    devices = [device] if device.type == "cuda" else []
    with compat.real_tensors(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        inputs = [_made_up(node.meta["val"], sizes) for node in region.inputs]
        compiled.run(list(inputs))
        region_bytes = _peak_bytes(compiled, inputs, device)
        runs_s: list[float] = []
        while len(runs_s) < _MIN_RUNS or sum(runs_s) < _ENOUGH_S:
            runs_s.append(_run_s(compiled, inputs, device))
    return RegionTime(run_s=statistics.median(runs_s), peak_bytes=region_bytes)


def _made_up(example: Any, sizes: Mapping[str, int]) -> Any:
    if not isinstance(example, torch.Tensor):
        return compat.evaluate_size(example, sizes) if isinstance(example, torch.SymInt) else example
    shape = [compat.evaluate_size(size, sizes) for size in example.shape]
    strides = [compat.evaluate_size(stride, sizes) for stride in example.stride()]
    made = torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)
    return made.normal_() if made.is_floating_point() or made.is_complex() else made.zero_()


def _run_s(compiled: CompiledRegion, inputs: Sequence[Any], device: torch.device) -> float:
    box = list(inputs)
    _settle(device)
    began_s = time.perf_counter()
    compiled.run(box)
    _settle(device)
    return time.perf_counter() - began_s


def _peak_bytes(compiled: CompiledRegion, inputs: Sequence[Any], device: torch.device) -> int | None:
    box = list(inputs)
    if device.type == "cuda":
        _settle(device)
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device)
        compiled.run(box)
        return torch.cuda.max_memory_allocated(device) - before_bytes
    if compat.is_profiling():
        return None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compiled.run(box)
    return peak_bytes({}, (), compat.cpu_allocations(profiler))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
