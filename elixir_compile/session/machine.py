"""Find the machine to plan for and the memory that training may use, and time every distinct region once before
anything is planned.
"""

import functools
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.base.errors import ElixirWarning, InvalidOption, ProfileFileError
from elixir_compile.base.folders import cache_dir, read_cached, write_cached
from elixir_compile.base.options import Options
from elixir_compile.base.process import num_usable_cores
from elixir_compile.base.units import GIB, format_bytes, format_s
from elixir_compile.compat.platforms import (
    available_host_bytes,
    host_memory_bytes,
    memory_sizes_bytes,
    num_local_ranks,
    platform_of,
)
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.graph.capture.node_facts import is_collective, reads_seed_on_host
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.rewrite.regions import RegionGraph, partition_of, split_regions
from elixir_compile.ir import OpId, Phase, Region, StepGraph
from elixir_compile.ir.cost import Measured, Stretch
from elixir_compile.ir.hardware import (
    Cluster,
    Fleet,
    cluster_from_json,
    cluster_to_json,
    fleet_from_json,
    is_fleet,
    parse_fleet,
    parse_hardware,
    profile_for,
)
from elixir_compile.runtime.distributed.control import Peers
from elixir_compile.runtime.lowering import RegionCompiler, region_key
from elixir_compile.runtime.measure import RegionTime, measure_region
from elixir_compile.search import Problem
from elixir_compile.search.schedule import cut_regions, regions
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step.as_run import as_run
from elixir_compile.step.liveness import liveness

# ----------------------------------------------------------------------------------------------------------------------
# The machine to plan for, measured earlier or roughly known, and the memory of its device and host for training.


log = logging.getLogger("elixir_compile")


def cached_machine(device: torch.device) -> Cluster | None:
    """Return the machine as measured earlier with `device`, with its present memory sizes; None if it was not measured.

    A file that cannot be read counts as not measured, with an `ElixirWarning`.
    """

    def with_present_memory(text: str) -> Cluster:
        return with_memory(cluster_from_json(text), *memory_sizes_bytes(device))

    def warn(path: Path, error: Exception) -> None:
        warnings.warn(
            f"the measured profile {path} cannot be used and is ignored: {error} "
            "Run `elixir-compile measure` to replace it.",
            ElixirWarning,
            stacklevel=5,
        )

    return read_cached(machine_path(device), with_present_memory, warn)


def store_machine(cluster: Cluster, device: torch.device, *, is_own: bool = False) -> Path:
    """Write the measured `cluster` to the file for `device`, and return its path. The file is replaced atomically.

    If `is_own`, the file is for this rank alone: ranks that differ may have devices of equal names. Otherwise it is for
    all ranks, and a file for this rank alone is removed.
    """
    path = _own_path(device) if is_own else _common_path(device)
    write_cached(path, cluster_to_json(cluster))
    if not is_own:
        forget_own_machine(device)
    return path


def forget_own_machine(device: torch.device) -> None:
    """Remove the file for this rank alone, if there is one: ranks were measured again, and are equal."""
    _own_path(device).unlink(missing_ok=True)


def machine_path(device: torch.device) -> Path:
    """Return the path of the file with the measured machine for `device`, which need not exist: the file for this rank
    alone if there is one, else the file for all ranks."""
    own = _own_path(device)
    return own if own.exists() else _common_path(device)


def _own_path(device: torch.device) -> Path:
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    common = _common_path(device)
    return common.with_name(f"{common.stem}.{rank}.json")


def _common_path(device: torch.device) -> Path:
    device_bytes, _ = memory_sizes_bytes(device)
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    parts = (
        device.type,
        platform_of(device).name(device),
        num_usable_cores(),
        torch.__version__,  # a public name
        torch.get_num_threads(),
        # In GiB: the bytes that a driver keeps for itself change from start to start. The memory of the host is no part
        # of the key, as some virtual machines grow and shrink it; `with_present_memory` has it as it is now.
        round(device_bytes / GIB) if platform_of(device).has_own_memory else 0,
        world,
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_dir() / "machines" / f"{key}.json"


def with_memory(cluster: Cluster, device_bytes: int, host_bytes: int) -> Cluster:
    """Return `cluster` with these memory sizes; its limit of pinned memory and its reserves shrink with them."""
    node = cluster.nodes[0]
    device = replace(
        node.device, memory_bytes=device_bytes, reserve_bytes=min(node.device.reserve_bytes, device_bytes // 10)
    )
    host = replace(
        node.host,
        memory_bytes=host_bytes,
        pinned_bytes=min(node.host.pinned_bytes, host_bytes),
        reserve_bytes=min(node.host.reserve_bytes, host_bytes // 10),
    )
    return replace(cluster, nodes=(replace(node, device=device, host=host),) * len(cluster.nodes))


_HANDLES = 2
"""Handles of each parameter: one in its module, another in the first graph of a plain model."""
_STEP_COUNT_BYTES = 4
_VERSION_BYTES = 8


def machine(device: torch.device, hardware: str | None = None, host_bytes: int | None = None) -> Cluster:
    """Return the machine to plan for; nothing is measured.

    `hardware` is the path of a profile, or a name such as "4 x a100-40g"; it has its own memory sizes. The budget of
    the host, `host_bytes`, says whether a GeForce chip is in a desktop, see `preset`. If `hardware` is None, the
    machine is the result of `elixir-compile measure` for `device`, or a rough profile if there is none, with the total
    memory of this machine.

    Raises `UnknownHardware` for an unknown name, `ProfileFileError` for a file without a profile, and `InvalidOption`
    for a fleet of another number of devices.
    """
    if hardware is None:
        cached = cached_machine(device)
        if cached is not None:
            return cached
        return profile_for(device.type, *memory_sizes_bytes(device), platform_of(device).name(device))
    fleet = named_fleet(hardware)
    if fleet is not None:
        has_ranks = distributed.is_available() and distributed.is_initialized()
        num_ranks = distributed.get_world_size() if has_ranks else 1
        if fleet.num_ranks != num_ranks:
            raise InvalidOption("hardware", hardware, f"a fleet of {num_ranks} devices")
        return fleet.as_cluster() or fleet.seen_by(distributed.get_rank() if has_ranks else 0)
    text = _text_of_file(hardware)
    return parse_hardware(hardware, host_bytes) if text is None else cluster_from_json(text)


def named_fleet(hardware: str) -> Fleet | None:
    """Return the fleet that `hardware` names, such as "2 x l4-24g + 1 x p40-24g" or the path of a file of
    `elixir-compile measure`; None if it names the equal devices of one kind.

    Raises UnknownHardware, InvalidOption, and ProfileFileError for a file without a fleet or a profile.
    """
    text = _text_of_file(hardware)
    if text is None:
        return parse_fleet(hardware) if is_fleet(hardware) else None
    return fleet_from_json(text) if '"elixir": "fleet"' in text[:100] else None


def _text_of_file(hardware: str) -> str | None:
    """Return the text of the file `hardware`; None if it is the name of a machine."""
    path = Path(hardware)
    if not (path.suffix == ".json" or path.is_file()):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileFileError(hardware, "a file that can be read", error.strerror) from error
    except UnicodeDecodeError as error:
        raise ProfileFileError(hardware, "a text file", "bytes that are not UTF-8") from error


def device_budget_bytes(
    options: Options, cluster: Cluster, device: torch.device, held_bytes: int, peers: Peers | None = None
) -> int:
    """Return the device budget: the option, or else the free bytes plus `held_bytes` less the reserve.

    `held_bytes` are the bytes of the model that are on the device already. Workspaces of libraries count as free,
    because every plan has `library_bytes` for them. Warns ElixirWarning if the option names more than the device has.
    """
    if options.device_memory is not None:
        total_bytes, _ = memory_sizes_bytes(device)
        _warn_of_missing("device_memory", options.device_memory, total_bytes, platform_of(device).name(device))
        return options.device_memory
    platform = platform_of(device)
    platform.drop_workspaces()
    memory = platform.memory(device)
    if memory is not None:
        # The allocator refuses to hold more than its limit, even if more is free.
        reusable_bytes = memory.free_bytes + memory.reserved_bytes - memory.allocated_bytes
        available_bytes = min(reusable_bytes, memory.limit_bytes - memory.allocated_bytes)
        return max(available_bytes + held_bytes - cluster.device.reserve_bytes, 1)
    return _free_host_bytes(peers) + held_bytes


@functools.cache
def library_bytes(device: torch.device) -> int:
    """Return the bytes of the workspaces that matrix products leave allocated on `device`.

    cuBLAS keeps a workspace for each thread and stream, cuBLASLt (products with a bias) may keep another, and a step
    has two threads: the caller's and autograd's. They are measured at the first capture, while torch traces with fake
    tensors: a fake product would allocate nothing.
    """
    platform = platform_of(device)
    if not platform.has_own_memory:
        return 0
    with compat.real_tensors(), torch.no_grad():
        platform.drop_workspaces()
        before_bytes = platform.tensor_bytes(device)
        _multiply(torch.float32, device)
        try:
            _multiply(torch.bfloat16, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a device without bfloat16 needs no workspace for it
            log.info("%s has no products in bfloat16: %s", device, str(error).partition("\n")[0])
        left_bytes = platform.tensor_bytes(device) - before_bytes
    return 2 * max(0, left_bytes)


def _multiply(dtype: torch.dtype, device: torch.device) -> None:
    """Run a product without a bias and one with a bias on `device`."""
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    torch.mm(factor, factor)
    torch.addmm(factor[0], factor, factor)


def scalar_bytes(slots: Collection[Slot], device: torch.device) -> int:
    """Return the bytes on `device` of the small tensors that training keeps for the parameters of `slots`.

    Each parameter has `_HANDLES` handles, and its optimizer counts its steps in fp32. On a CPU the ticket of a forward
    counts too: its number, and the version of each parameter that its backward may read.
    """
    handles_bytes = _HANDLES * sum(slot.param.element_size() for slot in slots)
    ticket_bytes = _VERSION_BYTES * (1 + len(slots)) if device.type == "cpu" else 0
    return handles_bytes + _STEP_COUNT_BYTES * sum(slot.param.requires_grad for slot in slots) + ticket_bytes


def host_budget_bytes(options: Options, peers: Peers | None = None) -> int:
    """Return the host budget of one rank: the option, or else its part of the free host memory.

    Warns ElixirWarning if the option names more than this process may use of the host.
    """
    if options.host_memory is None:
        return _free_host_bytes(peers)
    _warn_of_missing("host_memory", options.host_memory, host_memory_bytes(), "this host")
    return options.host_memory


def _warn_of_missing(option: str, asked_bytes: int, total_bytes: int, place: str) -> None:
    """Warn if the budget in `option` is more than all memory of `place`, free or not."""
    if asked_bytes > total_bytes:
        warnings.warn(
            f"the option {option} is {format_bytes(asked_bytes)}, and {place} has {format_bytes(total_bytes)}: a plan "
            "may need memory that is not there. Leave the option out to plan for the free memory.",
            ElixirWarning,
            stacklevel=3,
        )


def num_sharing_host(peers: Peers | None) -> int:
    """Return the number of ranks on this host, or on the host with the most ranks; it is equal on all `peers`."""
    if peers is None or peers.control.is_echo:
        return num_local_ranks()
    # Ranks of another model may run on this host too.
    return max(peers.num_local, num_local_ranks(1))


def _free_host_bytes(peers: Peers | None) -> int:
    return available_host_bytes() // num_sharing_host(peers)


# ----------------------------------------------------------------------------------------------------------------------
# Time every distinct region once before anything is planned.
#
#     every possible cut -> finest regions -> distinct regions -> compiled, run on made-up inputs -> stretches
#
# Every cut of a plan is one of these cuts, so the seconds of a plan's region are the sum over its finest regions.
# Seconds that fusion across a cut would save are not included. Measurements are cached on disk by region and machine: a
# second start measures nothing.


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
        facts = gather_facts(replace(problem, micro_batches=1))
        levels = facts.furthest_levels
        finest = regions(facts, cut_regions(facts, levels, moves_at_use(facts, levels)))  # with every possible cut
        halves, step = partition_of(captured, problem.graph, ()), as_run(problem.graph)
        graphs: dict[str, RegionGraph] = {}
        for phase, source in ((Phase.FORWARD, halves.captured.forward), (Phase.BACKWARD, halves.captured.backward)):
            graphs |= {} if source is None else split_regions(source, finest, phase, inline=halves.inline)
        for region, graph in ((region, graphs[region.id]) for region in finest if region.id in graphs):
            key = hashlib.sha256(f"{self._machine}\n{sorted(sizes.items())}\n{region_key(graph)}".encode()).hexdigest()
            if any(map(is_collective, graph.module.graph.nodes)):
                num_joined += 1
                continue  # ranks measure for as long as their own clocks say
            if any(reads_seed_on_host(node) for node in graph.module.graph.nodes):
                num_skipped += 1
                continue  # made-up inputs are on the device, where the kernel must not read its seed
            if key not in self._known and (known := _cached(_path(key))) is not None:
                self._known[key] = known
            if key in self._known or (time.perf_counter() - began_s < LIMIT_S and self._measure(key, graph, sizes)):
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
        # Parameters and inputs exist before the first op.
        is_made = life is not None and first <= life.first <= last and storage.id in graph.ops[life.first].writes
        if life is not None and is_made:
            live[life.first - first] += storage.nbytes
            live[min(life.last, last) - first + 1] -= storage.nbytes
    most = now = 0
    for change in live:
        now += change
        most = max(most, now)
    return most


def _path(key: str) -> Path:
    return cache_dir() / "profiles" / f"{key[:32]}.json"
