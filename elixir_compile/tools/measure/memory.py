"""Record the device bytes of a step over time, by kind, from the blocks of the allocator and the phases of the step, on
a CPU or an accelerator.
"""

import bisect
import heapq
import importlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.compat import AllocatorProfile
from elixir_compile.compat.platforms import BlockRecord
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir.kinds import Kind, Lane, Phase, Verb
from elixir_compile.ir.schedule import Span, verb_of
from elixir_compile.runtime.lanes import Lanes, TimedEvent
from elixir_compile.runtime.measure import Resident
from elixir_compile.runtime.recording import Anchor, Taken, anchor
from elixir_compile.tools.observed import OTHER, Interval, Live

# ----------------------------------------------------------------------------------------------------------------------
# The phases of a step by moments of the host's clock, and of the device's clock if it has one.
#
#   begin FORWARD   end FORWARD   begin UPDATE   begin FORWARD   end FORWARD   end UPDATE
#        |  forward     |  caller     |  update       |  forward     |  update     |
#
# Where phases are nested, the innermost counts. Lightning runs the forward and the backward within `optimizer.step()`.


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on the clock of the host, and of the device if it has one."""

    host_s: float
    """On the clock of `time.perf_counter`."""
    event: TimedEvent | None = None
    """The same moment in the order of the device's work; None if the host computes."""

    def seconds_to(self, later: "Moment") -> float:
        """Return the seconds to `later`, on the clock of the device if both moments have an event that is past."""
        if self.event is None or later.event is None:
            return later.host_s - self.host_s
        return self.event.elapsed_time(later.event) / 1e3


def moment_now(lanes: Lanes | None) -> Moment:
    """Return the present moment, with an event if `lanes` have a clock."""
    is_timed = lanes is not None and lanes.has_clock
    return Moment(time.perf_counter(), lanes.timed_event() if lanes is not None and is_timed else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The phases of a step that has ended, on the clock of the device if it has one, and on that of the host."""

    began_s: float
    """When the step began, on the clock of `time.perf_counter`."""
    intervals: tuple[Interval, ...]
    """The phases, in seconds since the step began."""
    asked: tuple[Interval, ...]
    """The same phases by the moments at which the host asked for them; equal to `intervals` if the host computes."""
    moments: tuple[tuple[float, float], ...]
    """For each change of phases, seconds since the step began on the clock of the host, and of `intervals`."""


class PhaseChanges:
    """The changes of the innermost phase since a step began."""

    def __init__(self, began: Moment, phase: Phase | None) -> None:
        """`phase` is the innermost phase at the moment `began`."""
        self.changes: list[tuple[Moment, Phase | None]] = [(began, phase)]

    @property
    def began(self) -> Moment:
        """The moment at which the step began."""
        return self.changes[0][0]

    def change(self, at: Moment, phase: Phase | None) -> None:
        """Note that `phase` is the innermost phase from the moment `at` on."""
        self.changes.append((at, phase))

    def intervals(self, ended: Moment) -> tuple[Interval, ...]:
        """Return the parts of the step, which ended at the moment `ended`. They leave no gap, and none is empty."""
        return intervals_between(self._times_s(ended), [phase for _, phase in self.changes])

    def times(self, ended: Moment) -> StepTimes:
        """Return the phases of the step, which ended at the moment `ended`, on both clocks."""
        moments = (*(at for at, _ in self.changes), ended)
        asked_s = [at.host_s - self.began.host_s for at in moments]
        return StepTimes(
            began_s=self.began.host_s,
            intervals=self.intervals(ended),
            asked=intervals_between(asked_s, [phase for _, phase in self.changes]),
            moments=tuple(zip(asked_s, self._times_s(ended), strict=True)),
        )

    def _times_s(self, ended: Moment) -> list[float]:
        began = self.began
        return [began.seconds_to(at) for at, _ in self.changes] + [began.seconds_to(ended)]


def intervals_between(times_s: Sequence[float], phases: Sequence[Phase | None]) -> tuple[Interval, ...]:
    """Return the intervals between `times_s`, one time more than `phases`; neighbours of one phase are joined.

    A time before its predecessor counts as equal to it: events of two streams may be out of order by microseconds.
    """
    found: list[Interval] = []
    latest_s, ordered_s = 0.0, list[float]()
    for time_s in times_s:
        latest_s = max(latest_s, time_s)
        ordered_s.append(latest_s)
    for (start_s, end_s), phase in zip(pairwise(ordered_s), phases, strict=True):
        if start_s == end_s:
            continue
        if found and found[-1].phase is phase:
            start_s = found.pop().start_s
        found.append(Interval(phase=phase, start_s=start_s, end_s=end_s))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# The record of the device bytes of a step on any device, and the kinds of the blocks that are there before it.


class StepMemory(Protocol):
    """The blocks of the allocator of a device from `start` to `stop`."""

    def start(self) -> None:
        """Begin to record."""
        ...

    def stop(self) -> None:
        """End the recording."""
        ...

    def live(self, times: StepTimes, spans: Sequence[Span], taken: Iterable[Taken]) -> Live | None:
        """Return the bytes by kind over the step; None if events of the allocator were lost."""
        ...


def kinds_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> dict[int, str]:
    """Return the kinds of the blocks of parameters, gradients, buffers and optimizer state on `device`, by address.

    Does not wait for queued updates: nothing reads a value.
    """
    found: dict[int, str] = {}

    def add(value: object, kind: str) -> None:
        for own in compat.plain_inside(own_shard(value)).values() if isinstance(value, torch.Tensor) else ():
            if own.device == device and own.layout is torch.strided:
                found[own.untyped_storage().data_ptr()] = kind

    with torch.DisableTorchFunctionSubclass():
        for optimizer in optimizers:
            for state in vars(optimizer)["state"].values():
                for name, value in state.items():
                    add(value, Kind.MASTER if name == "master" else Kind.MOMENT)
        for buffer in model.buffers():
            add(buffer, Kind.BUFFER)
        for param in model.parameters():
            add(param.grad, Kind.GRAD)
            add(param, Kind.PARAM)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The device bytes of a step over time, by kind: from blocks of the allocator, phases, and the work that was running.
#
#   there before the step          param, master, moment, buffer, grad, gathered by address, else other
#   taken for or under a gather    gathered              taken in the forward, freed within it            temp
#   taken for or under a prefetch  saved                 taken in the forward, alive at its end           saved
#   taken in the backward, and     grad                  in the backward, else                            temp
#     reduced, or alive at its end
#   taken in the update, freed     temp                  in the update, alive at its end                  moment
#     within it                                          in no phase of ours                              other
#
# Nothing is read from a plan. The order of the allocator's events is exact; labels refine what phase and lifetime tell,
# because ops between two regions run under no label. The executor says by address which blocks it took for its copies,
# and which it reduced.


_UNTHREADED = frozenset({Lane.COMPUTE, Lane.GATHER, Lane.REDUCE, Lane.H2D, Lane.D2H})
"""The lanes whose work the thread of the step issues."""


@dataclass(slots=True)
class _Block:
    """A block of the allocator from its allocation to its end."""

    nbytes: int
    born_s: float
    address: int = 0
    kind: str = ""
    """The kind if it was there before the step, else empty until its end is known."""
    died_s: float | None = None
    taken_for: str = ""
    """The verb of the action for which the executor took it; empty if it took it for none."""


def live_by_kind(
    resident: Mapping[int, tuple[int, str]],
    events: Iterable[tuple[float, int, int]],
    intervals: Sequence[Interval],
    spans: Sequence[Span],
    taken: Iterable[tuple[float, int, str]] = (),
) -> Live:
    """Return the bytes by kind over a step.

    `resident` has bytes and kind of the blocks before the step, by address. `events` are (seconds since the step began,
    address, bytes) in order: bytes are positive for a new block, negative or 0 for one that was freed. `taken` are
    (seconds, address, label) of blocks that were taken for an action; for a reduce, they are gradients of parameters.
    """
    before = [_Block(nbytes, 0.0, kind=kind) for nbytes, kind in resident.values()]
    blocks, changes = _blocks(dict(zip(resident, before, strict=True)), events)
    by_address: dict[int, list[_Block]] = {}
    for block in blocks:
        by_address.setdefault(block.address, []).append(block)

    def apart_s(block: _Block, at_s: float) -> float:
        died_s = at_s if block.died_s is None else block.died_s
        return max(block.born_s - at_s, at_s - died_s, 0.0)

    # Of the blocks at the address, the executor has taken the one that was alive, or nearly so.
    for at_s, address, label in taken:
        nearest = min(by_address.get(address, ()), key=lambda block: apart_s(block, at_s), default=None)
        if nearest is not None and apart_s(nearest, at_s) <= CLOCKS_APART_S:
            nearest.taken_for = verb_of(label)
    running = _Running(spans)
    for block in blocks:
        block.kind = _kind_of(block, intervals, running)
    now = Counter[str]()
    for block in before:
        now[block.kind] += block.nbytes
    times_s, rows = [0.0], [dict(now)]  # the sums by kind after each change, in order; times may repeat
    for change in changes:
        for block, sign in ((change.died, -1), (change.born, 1)):
            if block is not None:
                now[block.kind] += sign * block.nbytes
        times_s.append(change.at_s)
        rows.append(dict(now))
    return Live(at_s=tuple(times_s), by_kind={kind: tuple(row.get(kind, 0) for row in rows) for kind in sorted(now)})


def _live(
    resident: Mapping[int, tuple[int, str]],
    events: Iterable[tuple[int, int, int]],
    began: Anchor,
    times: StepTimes,
    intervals: Sequence[Interval],
    spans: Sequence[Span],
    taken: Iterable[Taken],
) -> Live:
    """Return the bytes by kind of `events` whose times are those of an allocator, in nanoseconds of `time.time_ns`;
    `began` is the moment at which its record began."""

    def at_s(time_ns: int) -> float:
        return (time_ns - began.time_ns) / 1e9 + began.perf_s - times.began_s

    changes = [(at_s(at_ns), address, nbytes) for at_ns, address, nbytes in events]
    blocks = [(at_s(block.at_ns), block.address, block.label) for block in taken]
    return live_by_kind(resident, changes, intervals, spans, blocks)


@dataclass(frozen=True, slots=True)
class _Change:
    """A block comes, a block goes, or one takes the address of another."""

    at_s: float
    born: _Block | None
    died: _Block | None


def _blocks(alive: dict[int, _Block], events: Iterable[tuple[float, int, int]]) -> tuple[list[_Block], list[_Change]]:
    """Return the blocks of the step, and all changes in order. `alive` are the blocks before the step, by address."""
    found: list[_Block] = []
    changes: list[_Change] = []
    at_s = 0.0
    for time_s, address, nbytes in events:
        at_s = max(at_s, time_s)
        died = alive.get(address)
        if nbytes == 0 and died is not None and not died.kind:
            continue  # an end of a block from before the step that was told late: its address is in use again
        if died is not None:
            died.died_s = at_s
            del alive[address]
        born = _Block(nbytes, at_s, address) if nbytes > 0 else None
        if born is not None:
            alive[address] = born
            found.append(born)
        if born is not None or died is not None:
            changes.append(_Change(at_s, born, died))
    return found, changes


CLOCKS_APART_S = 1e-4
"""How far the profiler's times of allocations may be from the clock of the host: it converts them from a counter of the
processor. Two gathers are further apart."""


class _Running:
    """Which work the thread of the step was doing at a time."""

    def __init__(self, spans: Sequence[Span]) -> None:
        own = sorted((span for span in spans if span.lane in _UNTHREADED), key=lambda span: span.start_s)
        self._starts_s = [span.start_s for span in own]
        self._spans = own

    def verb_at(self, time_s: float) -> str:
        """Return the verb of the innermost span around `time_s`; empty if there is none."""
        for place in range(bisect.bisect_right(self._starts_s, time_s) - 1, -1, -1):
            span = self._spans[place]
            if span.end_s >= time_s:
                return verb_of(span.label)
            if place < bisect.bisect_right(self._starts_s, time_s) - _DEEPEST:
                break
        return ""


_DEEPEST = 4
"""The most spans of one thread that are open at once, with one to spare: a copy in a gather in a region."""


def _kind_of(block: _Block, intervals: Sequence[Interval], running: _Running) -> str:
    """Return the kind of a block of the step."""
    place = bisect.bisect_right(intervals, block.born_s, key=lambda interval: interval.start_s) - 1
    if place < 0 or block.born_s > intervals[place].end_s or intervals[place].phase is None:
        return OTHER
    interval = intervals[place]
    is_gone = block.died_s is not None and block.died_s <= interval.end_s
    if interval.phase is Phase.UPDATE:
        return Kind.TEMP if is_gone else Kind.MOMENT
    verb = block.taken_for or running.verb_at(block.born_s)
    if verb == Verb.GATHER:
        return Kind.GATHERED
    if verb == Verb.PREFETCH:
        return Kind.SAVED
    if interval.phase is Phase.FORWARD:
        return Kind.TEMP if is_gone else Kind.SAVED
    return Kind.GRAD if block.taken_for == Verb.REDUCE or not is_gone else Kind.TEMP


# ----------------------------------------------------------------------------------------------------------------------
# Record the blocks of the CPU's allocator in a step, and tell their kinds.
#
# torch.profiler sees the threads that inherit it: the caller's and autograd's. What the worker of host updates
# allocates is not in the figures, nor are slabs, which are host memory.


class CpuMemory:
    """The blocks of the CPU's allocator from `start` to `stop`: a `StepMemory`."""

    def __init__(self, kinds: dict[int, str]) -> None:
        """`kinds` are the kinds of blocks that are there before the step, by address."""
        self._kinds = kinds
        self._blocks: AllocatorProfile | None = None
        self._resident = Resident()
        self._began = anchor()

    def start(self) -> None:
        """Begin to record."""
        self._blocks = AllocatorProfile()
        self._began = anchor()

    def stop(self) -> None:
        """End the recording."""
        if self._blocks is not None:
            self._blocks.stop()
        self._resident.close()

    def live(self, times: StepTimes, spans: Sequence[Span], taken: Iterable[Taken]) -> Live:
        """See `StepMemory`."""
        resident = {
            address: (nbytes, self._kinds.get(address, OTHER)) for address, nbytes in self._resident.nbytes_at.items()
        }
        freed = sorted((at_ns, address, 0) for at_ns, address in self._resident.freed)
        during = [] if self._blocks is None else self._blocks.allocations()
        merged = heapq.merge(freed, during, key=lambda event: event[0])
        return _live(resident, merged, self._began, times, times.intervals, spans, taken)


# ----------------------------------------------------------------------------------------------------------------------
# Tell the kinds of the blocks of an accelerator's allocator in a step, and draw them on the clock of the device.
#
#   host      asks for fwd.0   allocates   asks for fwd.1                the order of the allocator, the phases of kinds
#                  |               |            |
#   device         |   starts fwd.0    ... starts fwd.1                  the axis of the spans
#
# The allocator gives a block when the host asks, long before the device writes to it. So kinds are told on the clock of
# the host: its phases, and the moments at which it asked for the work. A block is drawn between the starts on the
# device of what was asked for before it and after it, in the order of the allocator, which is exact.


class DeviceMemory:
    """The blocks of an accelerator's allocator from `start` to `stop`: a `StepMemory`."""

    def __init__(self, blocks: BlockRecord, kinds: dict[int, str]) -> None:
        """`kinds` are the kinds of blocks that are there before the step, by address. `blocks` are recorded already."""
        self._blocks = blocks
        self._resident = {address: (nbytes, kinds.get(address, OTHER)) for address, nbytes in blocks.nbytes_at.items()}
        self._began = anchor()
        self._events: Sequence[tuple[int, int, int]] | None = None

    def start(self) -> None:
        """Do nothing: the allocator records already."""

    def stop(self) -> None:
        """End the recording."""
        self._events = self._blocks.stop()

    def live(self, times: StepTimes, spans: Sequence[Span], taken: Iterable[Taken]) -> Live | None:
        """See `StepMemory`."""
        if self._events is None:
            return None
        # Each span at the moment at which the host asked for its work; nobody knows how long the asking took.
        asked = [
            span if span.issued_s is None else replace(span, start_s=span.issued_s, end_s=span.issued_s)
            for span in spans
        ]
        live = _live(self._resident, self._events, self._began, times, times.asked, asked, taken)
        return drawn_by_device(live, times, spans)


def drawn_by_device(live: Live, times: StepTimes, spans: Iterable[Span]) -> Live:
    """Return `live`, whose times are those of the host, at times of the device, in the same order.

    Between two moments that are known on both clocks, times are in proportion.
    """
    known = [*times.moments]
    known += [
        (span.issued_s, span.start_s) for span in spans if span.issued_s is not None and span.lane is Lane.COMPUTE
    ]
    asked_s, device_s = [0.0], [0.0]
    for asked, device in sorted(known):
        if asked > asked_s[-1]:
            asked_s.append(asked)
            device_s.append(max(device, device_s[-1]))
    drawn_s: list[float] = []
    for at_s in live.at_s:
        after = bisect.bisect_right(asked_s, at_s)
        if after in (0, len(asked_s)):  # outside of the known moments: the nearest
            drawn_s.append(device_s[min(after, len(device_s) - 1)])
            continue
        share = (at_s - asked_s[after - 1]) / (asked_s[after] - asked_s[after - 1])
        drawn_s.append(device_s[after - 1] + share * (device_s[after] - device_s[after - 1]))
    return replace(live, at_s=tuple(drawn_s))


# ----------------------------------------------------------------------------------------------------------------------
# Counters of a GPU by NVML, the module `pynvml`: memory, power, energy, and bytes over the PCIe link.
#
# Only calls that take less than a millisecond and need no privilege are made. NVML's `nvmlDeviceGetPcieThroughput`
# blocks for 21 ms in each direction and its lists of processes take 4.5 ms, so neither is asked.


log = logging.getLogger("elixir_compile")

_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
"""Bytes per second of one PCIe lane in one direction, by generation."""
_WRAP = {1: 1 << 32}
"""By NVML's type of a value, the number at which a counter starts again: 2^32 for an unsigned int."""


_METRICS = {
    "device_sm_share": "NVML_GPM_METRIC_SM_UTIL",
    "device_tensor_share": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "device_dram_share": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
"""Exact means between two samples on Hopper and newer, with NVML's names: shares of the time in which multiprocessors
and tensor cores work, and of the rate of the device's memory."""


class _Metrics:
    """NVML's GPM figures of a GPU, as means since the reading before."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Raises an `NVMLError`, or AttributeError with an old `pynvml`, if the GPU has none."""
        self._nvml = nvml
        self._handle = handle
        self._samples: list[Any] = []
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise AttributeError("the GPU has no GPM, which begins with Hopper")
        for _ in range(2):
            self._samples.append(nvml.nvmlGpmSampleAlloc())
        nvml.nvmlGpmSampleGet(handle, self._samples[0])

    def close(self) -> None:
        """Free the samples."""
        while self._samples:
            self._nvml.nvmlGpmSampleFree(self._samples.pop())

    def read(self) -> dict[str, float | None]:
        """Return the figures since the last call; raises an `NVMLError` if the driver stops to tell them."""
        nvml, (before, now) = self._nvml, self._samples
        nvml.nvmlGpmSampleGet(self._handle, now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_METRICS)
        asked.sample1, asked.sample2 = before, now
        for place, name in enumerate(_METRICS.values()):
            asked.metrics[place].metricId = getattr(nvml, name)
        nvml.nvmlGpmMetricsGet(asked)
        self._samples = [now, before]
        known = [asked.metrics[place] for place in range(len(_METRICS))]
        return {
            name: metric.value / 100 if metric.nvmlReturn == nvml.NVML_SUCCESS else None
            for name, metric in zip(_METRICS, known, strict=True)
        }


class GpuCounters:
    """The counters of one GPU; all calls must come from one thread."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """Use `nvml`, the module `pynvml`, for the GPU with `uuid`. Raises its `NVMLError` if there is none."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._is_missing: set[str] = set()
        self._most_width: float | None = None
        self._metrics: _Metrics | None = None
        self._linked: dict[str, tuple[float, int]] = {}
        """By direction, the time and the value of the last reading of the counter of bytes."""

    def close(self) -> None:
        """End the use of NVML."""
        if self._metrics is not None:
            self._metrics.close()
        self._nvml.nvmlShutdown()

    def read(self, now_s: float) -> dict[str, float | None]:
        """Return the figures at `now_s`, None for each that the GPU does not tell."""
        ask, nvml = self._ask, self._nvml
        generation = ask("link_generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(self._handle))
        width = ask("link_width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(self._handle))
        energy_mj = ask("device_energy_j", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        busy_percent = ask("device_busy_share", lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        if self._most_width is None:  # it does not change
            self._most_width = ask("link_most_width", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(self._handle))
        # The first version of the call also counts the bytes that the driver reserves for itself.
        used_bytes = ask(
            "device_used_bytes",
            lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2).used,
        )
        # The GPM figures are means since the last reading: none in the first, or if the GPU has none.
        means: dict[str, float | None] | None = None
        if self._metrics is None:
            self._metrics = ask("GPM figures", lambda: _Metrics(nvml, self._handle))
        else:
            means = ask("GPM figures", self._metrics.read)
        found: dict[str, float | None] = {
            "device_used_bytes": used_bytes,
            "device_busy_share": None if busy_percent is None else busy_percent / 100,
            "device_energy_j": None if energy_mj is None else energy_mj / 1e3,
            "device_clock_reasons": ask(
                "device_clock_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
            ),
            "link_generation": generation,
            "link_width": width,
            "link_most_width": self._most_width,
        }
        most_per_s = _LANE_BYTES_PER_S.get(int(generation or 0), max(_LANE_BYTES_PER_S.values())) * (width or 16)
        return found | self._fields(now_s, most_per_s) | (means or dict.fromkeys(_METRICS))

    def _fields(self, now_s: float, most_per_s: float) -> dict[str, float | None]:
        """Return power and the rates of the link, of one call; `most_per_s` is the rate that the link cannot exceed."""
        nvml = self._nvml
        power = nvml.NVML_FI_DEV_POWER_INSTANT
        directions = {
            "link_tx_bytes_per_s": nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
            "link_rx_bytes_per_s": nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
        }
        names = {"device_power_w": power, **directions}
        values = self._ask("fields", lambda: nvml.nvmlDeviceGetFieldValues(self._handle, list(names.values())))
        found: dict[str, float | None] = dict.fromkeys(names)
        for name, value in zip(names, () if values is None else values, strict=False):
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                self._note_missing(name, f"error {value.nvmlReturn}")
            elif name in directions:
                # Bytes per second since the last reading; unknown in the first, and if the counter may have begun
                # again more than once since.
                count, wrap = _number(value), _WRAP.get(value.valueType)
                before, self._linked[name] = self._linked.get(name), (now_s, count)
                seconds_s = 0.0 if before is None else now_s - before[0]
                if before is None or seconds_s <= 0 or (wrap is not None and seconds_s * most_per_s >= wrap):
                    continue
                moved_bytes = count - before[1] if wrap is None else (count - before[1]) % wrap
                found[name] = moved_bytes / seconds_s if moved_bytes >= 0 else None
            else:
                found[name] = _number(value) / 1e3
        return found

    def _ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return the answer of NVML; None if the GPU or its driver does not support the question."""
        if name in self._is_missing:
            return None
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError) as error:  # an old `pynvml` lacks a function
            self._note_missing(name, str(error))
            return None

    def _note_missing(self, name: str, why: str) -> None:
        if name not in self._is_missing:
            self._is_missing.add(name)
            log.info("NVML tells no %s of this GPU: %s", name, why)


def _number(value: Any) -> int:
    """Return the content of a field value of NVML, a union of types."""
    member = {1: "uiVal", 2: "ulVal", 3: "ullVal"}.get(value.valueType, "ullVal")
    return int(getattr(value.value, member))


def gpu_counters(uuid: str) -> GpuCounters | None:
    """Return the counters of the GPU with `uuid`; None, with one line in the log, if NVML does not tell of it."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        log.info("no counters of the device: %s", error)
        return None
    try:
        return GpuCounters(nvml, uuid)
    except nvml.NVMLError as error:
        log.info("no counters of the device: NVML says %s", error)
        return None
