"""Time every distinct region once before anything is planned.

    every possible cut -> finest regions -> distinct regions -> compiled, run on made-up inputs -> stretches

Every cut of a plan is one of these cuts, so the seconds of a plan's region are the sum over its finest regions. Seconds
that fusion across a cut would save are not included. Measurements are cached on disk by region and machine: a second
start measures nothing.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from elixir_compile.base.folders import cache_dir, write_cached
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.graph.capture.node_facts import reads_seed_on_host
from elixir_compile.graph.capture.rings import is_collective
from elixir_compile.graph.rewrite.recompute import Partition, partition_of
from elixir_compile.graph.rewrite.regions import RegionGraph, split_regions
from elixir_compile.ir import OpId, Phase, Region, StepGraph
from elixir_compile.ir.cost import Measured, Stretch
from elixir_compile.runtime.lowering import RegionCompiler, region_key
from elixir_compile.runtime.measure.regions import RegionTime, measure_region
from elixir_compile.search import Problem
from elixir_compile.search.schedule import cut_regions, regions
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.residency import moves_at_use
from elixir_compile.session.machine import machine_path
from elixir_compile.step.liveness import liveness
from elixir_compile.step.recompute import as_run

log = logging.getLogger("elixir_compile")

LIMIT_S = 120.0
"""Seconds after which the remaining regions are not measured, but priced by the machine's profile."""
_MOST_RUN_S = 1e6
"""A file with a longer time is wrong."""
_TOLERANCE_BYTES = 1 << 16
"""Bytes by which an allocator rounds up the tensors of a region in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRegion:
    """One region of the step, with the measurements of all equal regions."""

    key: str
    """A digest, equal for equal regions."""
    first: OpId
    last: OpId
    run_s: float
    peak_bytes: int | None
    """Most bytes that the region allocated at once, without its inputs, by the allocator; None if unknown."""
    live_bytes: int
    """The same bytes by the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionProfile:
    """The measured regions of a step, in its order."""

    regions: tuple[ProfiledRegion, ...]
    num_regions: int
    """Finest regions of the step, including the regions not measured for lack of time or memory, and those of
    `num_skipped`."""
    num_joined: int = 0
    """Regions that are never run alone: the other ranks would not take part in their collectives. Their seconds are
    predicted instead."""
    num_skipped: int = 0
    """Regions that are never run alone: their attention with dropout reads the seed of its random numbers on the host,
    and made-up inputs are on the device. Their seconds are predicted instead."""
    num_run: int
    """Distinct regions that were run; the others were measured in an earlier run."""
    took_s: float

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that a region allocated beside its tensors, above what an allocator rounds up."""
        beside = ((own.peak_bytes or 0) - own.live_bytes for own in self.regions)
        most_bytes = max(beside, default=0)
        return most_bytes if most_bytes > _TOLERANCE_BYTES else 0

    @property
    def measured(self) -> Measured:
        """The measurements in the form of a `Problem`."""
        stretches = tuple(Stretch(first=own.first, last=own.last, run_s=own.run_s) for own in self.regions)
        return Measured(stretches=stretches)

    def __str__(self) -> str:
        num_distinct = len({region.key for region in self.regions})
        line = f"profiled {num_distinct} distinct regions of {self.num_regions} in {format_s(self.took_s)}"
        if self.num_run < num_distinct:
            line += f", {num_distinct - self.num_run} of them in an earlier run"
        if self.num_joined:
            line += f", {self.num_joined} not run, as their collectives take all ranks"
        if self.num_skipped:
            line += f", {self.num_skipped} not run, as their dropout in attention reads its seed on the host"
        above = {own.key: own for own in self.regions if (own.peak_bytes or 0) > own.live_bytes + _TOLERANCE_BYTES}
        for region in above.values():
            line += (
                f"\n  {region.first} to {region.last} allocates {format_bytes(region.peak_bytes or 0)}, "
                f"{format_bytes(region.live_bytes)} in the graph"
            )
        return line


class Profiler:
    """Measures the regions of a capture that neither it nor an earlier run has measured."""

    def __init__(self, compiler: RegionCompiler, device: torch.device, inner: str) -> None:
        self._compiler = compiler
        self._device = device
        # The name of the machine's file is a digest of the machine and of the version of torch.
        self._machine = f"{machine_path(device).stem} {inner}"
        self._known: dict[str, RegionTime] = {}
        self._num_run = 0

    def profile(self, captured: Captured, problem: Problem, sizes: Mapping[str, int]) -> RegionProfile:
        """Return the measurements of the finest regions of `problem`, the problem of `captured`.

        `sizes` are the values of the symbols of `captured`.
        """
        began_s = time.perf_counter()
        found: list[ProfiledRegion] = []
        num_skipped = num_joined = 0
        finest = _finest_regions(problem)
        step = as_run(problem.graph)
        for region, graph in _with_graphs(partition_of(captured, problem.graph, ()), finest):
            key = hashlib.sha256(f"{self._machine}\n{sorted(sizes.items())}\n{region_key(graph)}".encode()).hexdigest()
            if any(map(is_collective, graph.module.graph.nodes)):
                num_joined += 1
                continue  # ranks measure for as long as their own clocks say
            if any(reads_seed_on_host(node) for node in graph.module.graph.nodes):
                num_skipped += 1
                continue  # made-up inputs are on the device, where the kernel must not read its seed
            if self._is_known(key) or (time.perf_counter() - began_s < LIMIT_S and self._measure(key, graph, sizes)):
                took = self._known[key]
                found.append(
                    ProfiledRegion(
                        key=key[:16],
                        first=region.first,
                        last=region.last,
                        run_s=took.run_s,
                        peak_bytes=took.peak_bytes,
                        live_bytes=made_bytes(step, region),
                    )
                )
        return RegionProfile(
            regions=tuple(found),
            num_regions=len(finest),
            num_joined=num_joined,
            num_skipped=num_skipped,
            num_run=self._num_run,
            took_s=time.perf_counter() - began_s,
        )

    def _measure(self, key: str, graph: RegionGraph, sizes: Mapping[str, int]) -> bool:
        """Run the region `graph` and keep its measurements as `key`; return False if it does not fit the device."""
        compiled = self._compiler.lower(graph, range(len(graph.outputs)))
        try:
            took = measure_region(graph, compiled, self._device, sizes)
        except torch.OutOfMemoryError:
            log.warning("region %s does not fit the device alone, so it was not profiled", graph.id)
            return False
        self._known[key] = took
        self._num_run += 1
        with suppress(OSError):  # the folder is read-only: the next start measures again
            write_cached(_path(key), json.dumps(asdict(took)))
        return True

    def _is_known(self, key: str) -> bool:
        if key not in self._known:
            known = _cached(_path(key))
            if known is None:
                return False
            self._known[key] = known
        return True


def _cached(path: Path) -> RegionTime | None:
    """Return the measurements of an earlier run in the file `path`; None if there is no file or it is not valid."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("measured again, as %s cannot be read: %s", path, error)
        return None
    if isinstance(fields, dict) and fields.keys() == {"run_s", "peak_bytes"}:
        run_s, peak_bytes = fields["run_s"], fields["peak_bytes"]
        is_time = type(run_s) in (int, float) and 0 <= run_s <= _MOST_RUN_S
        is_peak = peak_bytes is None or (type(peak_bytes) is int and 0 <= peak_bytes < 1 << 63)
        if is_time and is_peak:
            return RegionTime(run_s=float(run_s), peak_bytes=peak_bytes)
    log.warning("measured again, as %s does not hold what a region took", path)
    return None


def made_bytes(graph: StepGraph, region: Region) -> int:
    """Return the most bytes of storages allocated by `region` that are live at once, by `graph`."""
    lives = liveness(graph)
    index = {op: i for i, op in enumerate(lives.ops)}
    first, last = index[region.first], index[region.last]
    live = [0] * (last - first + 2)
    for storage in graph.storages:
        life = lives.lives.get(storage.id)
        if life is not None and first <= life.first <= last and _is_made(graph, storage.id, life.first):
            live[life.first - first] += storage.nbytes
            live[min(life.last, last) - first + 1] -= storage.nbytes
    most = now = 0
    for change in live:
        now += change
        most = max(most, now)
    return most


def _is_made(graph: StepGraph, name: str, at: int) -> bool:
    """Return whether op `at` allocates the storage `name`: parameters and inputs exist before the first op."""
    return name in graph.ops[at].writes


def _finest_regions(problem: Problem) -> tuple[Region, ...]:
    """Return the regions of a plan of the whole batch with every possible cut."""
    facts = gather_facts(replace(problem, micro_batches=1))
    levels = facts.furthest_levels
    return regions(facts, cut_regions(facts, levels, moves_at_use(facts, levels)))


def _with_graphs(halves: Partition, spans: tuple[Region, ...]) -> Iterator[tuple[Region, RegionGraph]]:
    captured = halves.captured
    for phase, source in ((Phase.FORWARD, captured.forward), (Phase.BACKWARD, captured.backward)):
        if source is not None:
            graphs = split_regions(source, spans, phase, inline=halves.inline)
            yield from ((region, graphs[region.id]) for region in spans if region.phase is phase)


def _path(key: str) -> Path:
    return cache_dir() / "profiles" / f"{key[:32]}.json"
