"""Measure the seconds and bytes of a compiled region on random inputs.

Inputs have the shapes, strides and dtypes of the capture: random floats, and zeros for other dtypes, so that an index
is always in range. Only the inputs of one region are on the device at a time, so regions of a model that does not fit
can be measured. The states of random generators are restored. The effect of warm caches from the previous region is not
measured.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from elixir_compile import compat
from elixir_compile.compat.platforms import PeakRecord, platform_of
from elixir_compile.graph.rewrite.regions import RegionGraph
from elixir_compile.runtime.lanes import Lanes, lanes_for
from elixir_compile.runtime.lowering import CompiledRegion
from elixir_compile.runtime.measure.step import peak_bytes

_MIN_RUNS = 3
_ENOUGH_S = 0.1  # of runs: many runs of a short region, `_MIN_RUNS` of a long region
_QUEUED_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTime:
    """The seconds and bytes of a region."""

    run_s: float
    """Median of several runs, without the first."""
    peak_bytes: int | None
    """The most bytes that the region allocated at once, without inputs; None if a profiler of the user is on,
    or reads the history of an accelerator's allocator."""


def measure_region(
    region: RegionGraph, compiled: CompiledRegion, device: torch.device, sizes: Mapping[str, int]
) -> RegionTime:
    """Run `compiled`, the compiled form of `region`, several times and return its seconds and bytes.

    `sizes` has the values of the symbols of dynamic shapes. Raises `torch.OutOfMemoryError` if the inputs of the region
    alone do not fit the device.
    """
    devices = [device] if platform_of(device).has_own_memory else []
    with (
        compat.real_tensors(),
        torch.no_grad(),
        torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
    ):
        # No seed is set: `torch.manual_seed` would change the generators of all devices, also of those not kept here.
        inputs = [random_input(node.meta["val"], sizes) for node in region.inputs]
        compiled.run(list(inputs))
        region_bytes = _peak_bytes(compiled, inputs, device)
        runs_s: list[float] = []
        lanes, ends_s = lanes_for(device), time.perf_counter() + _ENOUGH_S
        while len(runs_s) < _MIN_RUNS or time.perf_counter() < ends_s:
            runs_s += _device_runs_s(compiled, inputs, lanes) if lanes.has_clock else _host_runs_s(compiled, inputs)
    return RegionTime(run_s=statistics.median(runs_s), peak_bytes=region_bytes)


def random_input(example: Any, sizes: Mapping[str, int]) -> Any:
    """Return a real value for `example`, a value of the capture; `sizes` has the values of the symbols."""
    if not isinstance(example, torch.Tensor):
        return compat.evaluate_size(example, sizes) if isinstance(example, torch.SymInt) else example
    shape = [compat.evaluate_size(size, sizes) for size in example.shape]
    strides = [compat.evaluate_size(stride, sizes) for stride in example.stride()]
    made = random_tensor(shape, strides, dtype=example.dtype, device=example.device)
    return compat.with_bits(made, compat.lazy_bits(example))


def random_tensor(
    shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor of random floats, or of zeros in another dtype."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    # Filled before it gets its strides: the elements of an expanded tensor share memory, and cannot be written.
    made = torch.empty(extent, dtype=dtype, device=device)
    made = made.normal_() if made.is_floating_point() or made.is_complex() else made.zero_()
    return made.as_strided(shape, strides)


def _host_runs_s(compiled: CompiledRegion, inputs: Sequence[Any]) -> list[float]:
    """Return the seconds of a run by the clock of the host, on a device that computes before a call returns."""
    box = list(inputs)
    began_s = time.perf_counter()
    compiled.run(box)
    return [time.perf_counter() - began_s]


def _device_runs_s(compiled: CompiledRegion, inputs: Sequence[Any], lanes: Lanes) -> list[float]:
    """Return the seconds of several runs by the clock of the device of `lanes`.

    They are queued one behind the other, as regions of a step are, so the launches of a run may hide behind the kernels
    of the run before. A host that waited for each run would add the launch of its first kernel.
    """
    lanes.synchronize()
    marks = [lanes.timed_event()]
    for _ in range(_QUEUED_RUNS):
        compiled.run(list(inputs))
        marks.append(lanes.timed_event())
    lanes.synchronize()
    return [first.elapsed_time(last) / 1e3 for first, last in pairwise(marks)]


def _peak_bytes(compiled: CompiledRegion, inputs: Sequence[Any], device: torch.device) -> int | None:
    box = list(inputs)
    platform = platform_of(device)
    if platform.has_own_memory:
        platform.synchronize(device)
        before_bytes = platform.tensor_bytes(device)
        with PeakRecord(platform, device) as record:
            compiled.run(box)
        return None if record.peak_bytes is None else record.peak_bytes - before_bytes
    if compat.is_profiling():
        return None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        compiled.run(box)
    return peak_bytes({}, (), compat.cpu_allocations(profiler))
