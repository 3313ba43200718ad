"""Measure a training step: its device bytes by graph, the spans and counts of its executors, the seconds of its
compiled regions, and the bytes of its kernels.
"""

import atexit
import gc
import heapq
import logging
import statistics
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import NestedMeasurement
from elixir_compile.compat.platforms import BlockRecord, PeakRecord, accelerator, available_host_bytes, platform_of
from elixir_compile.compat.platforms.platform import Platform
from elixir_compile.graph.capture.captured import INDICES_OF, KernelBytes, KernelCall
from elixir_compile.graph.capture.node_facts import leaves_of, value_of
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.graph.rewrite.micro_batches import local_args
from elixir_compile.graph.rewrite.regions import RegionGraph
from elixir_compile.ir.schedule import Origin, Record, Span
from elixir_compile.runtime.bucket import is_slab_memory, peak_slab_bytes, reset_peak_slab_bytes
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.lowering import CompiledRegion, in_own_memory
from elixir_compile.runtime.recording import StepClock, all_ledgers
from elixir_compile.runtime.updates import finish_updates

# ----------------------------------------------------------------------------------------------------------------------
# Measure the device bytes of a running training step by place: each graph, and the code between graphs.
#
#   start     mark(A)      mark(after A)   mark(B) ...   mark(None)    stop
#   |  None   |  A.fwd     |  eager code   |  B.fwd      |  user code  |           the peak of each place
#
# On a CPU the blocks come from the events of the allocator, and the tensors that are there at the start are named by
# the caller: memory of others does not count. On an accelerator they come from the history of the allocator, and memory
# of others is what is allocated at the start beyond the named tensors.


_Event = tuple[int, int | None, int]
_running: "_EventBytes | None" = None
"""What holds torch.profiler."""


class StepBytes(Protocol):
    """The bytes of a step from its creation to `stop`."""

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count `tensors`, inputs of a graph, from now on if they are not counted yet."""
        ...

    def mark(self, place: int | None) -> None:
        """Note that `place` runs from now on; None for code whose bytes do not matter."""
        ...

    def stop(self) -> Mapping[int, int]:
        """End the measurement, and return the peak in bytes of each place."""
        ...

    def drop(self) -> None:
        """End the measurement without a result: nothing reads its events."""
        ...


def start_step_bytes(device: torch.device, own: Iterable[torch.Tensor], more_bytes: int) -> StepBytes | None:
    """Begin to measure on `device`; None if that is not possible: torch.profiler cannot be started, or torch keeps no
    history.

    `own` are the tensors that count from the start. `more_bytes` are added to all figures, for tensors that are not
    among `own`.
    """
    global _running
    tensors = [tensor for tensor in map(own_shard, own) if tensor.device == device]
    if platform_of(device).has_own_memory:
        blocks = platform_of(device).record_blocks(device)
        return None if blocks is None else _HistoryBytes(blocks, tensors, more_bytes)
    end_idle_profiler()
    if _running is not None or not compat.can_profile() or compat.backward_pass_id() >= 0:
        return None
    _running = made = _EventBytes(tensors, more_bytes)
    return made


def drop_running_step_bytes() -> bool:
    """End the measurement of a step that holds torch.profiler, without a result: somebody else needs it.

    Returns whether none holds it now: see `_EventBytes.release`.
    """
    global _running
    running = _running
    if running is not None:
        running.drop()
        running.release()
        if running.is_released or not running.thread.is_alive():
            _running = None
    return _running is None


def end_idle_profiler() -> None:
    """Stop torch.profiler if the measurement that holds it has ended where it could not be stopped."""
    if _running is not None and _running.is_over:
        drop_running_step_bytes()


atexit.register(drop_running_step_bytes)  # torch 2.13 crashes if its profiler is on when the interpreter ends


def nbytes_at(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of `tensors` by address, without slabs, which are host memory."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for dense in compat.dense_parts(tensor):
            if dense.layout is torch.strided:
                storage = dense.untyped_storage()
                found[storage.data_ptr()] = storage
    return {address: each for address, each in found.items() if each.nbytes() and not is_slab_memory(address)}


class _EventBytes:
    """A `StepBytes` of the CPU."""

    def __init__(self, own: Sequence[torch.Tensor], more_bytes: int) -> None:
        self._more_bytes = more_bytes
        self.thread = threading.current_thread()
        """The thread that holds torch.profiler."""
        self._places: list[int | None] = []
        """The place of each mark."""
        self._events: list[_Event] = []
        """(time, address, bytes) of each adopted block, and of each block that was freed, with 0 bytes."""
        self._known: set[int] = set()
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._peaks: Mapping[int, int] | None = None
        self.is_released = False
        """Whether torch.profiler has been stopped."""
        self._profile = compat.AllocatorProfile()
        self.adopt(own)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        now_ns = time.time_ns()
        for address, storage in nbytes_at(map(own_shard, tensors)).items():
            if address not in self._known:
                self._known.add(address)
                self._events.append((now_ns, address, storage.nbytes()))
                self._watches.append(weakref.ref(storage, self._on_death(address)))

    def _on_death(self, address: int) -> Callable[[object], None]:
        events, known = self._events, self._known

        def note(_: object) -> None:
            known.discard(address)
            events.append((time.time_ns(), address, 0))

        return note

    def mark(self, place: int | None) -> None:
        if self._peaks is None and threading.current_thread() is self.thread:
            self._profile.mark(len(self._places))
            self._places.append(place)

    @property
    def is_over(self) -> bool:
        """Whether the measurement has ended."""
        return self._peaks is not None

    def stop(self) -> Mapping[int, int]:
        if self._peaks is None:
            self.drop()
            if self.is_released:
                merged = sorted([*self._events, *self._profile.events()], key=lambda event: event[0])
                self._peaks = _peaks(merged, self._places, {}, self._more_bytes)
        return self._peaks or {}

    def drop(self) -> None:
        global _running
        if self._peaks is None:
            self._peaks = {}
            self._watches.clear()
            self.release()
            if self.is_released and _running is self:
                _running = None

    def release(self) -> None:
        """Stop torch.profiler, if it is not stopped and may be stopped here.

        A measurement may end anywhere: the garbage collector may end it with its model. Only the thread that started
        the profiler may stop it (torch 2.13 crashes), and not in a backward pass, whose end turns it on again: it
        restores the state of the thread.
        """
        if not self.is_released and threading.current_thread() is self.thread and compat.backward_pass_id() < 0:
            self.is_released = True
            self._profile.stop()


def _peaks(
    events: Iterable[_Event], places: Sequence[int | None], nbytes_of: dict[int, int], live: int
) -> Mapping[int, int]:
    """Return the peak in bytes of each of `places`.

    `events` are in order: (time, address, bytes) of each block that came, or of one that went if the bytes are not
    positive, and (time, None, number) of each mark. `nbytes_of` has the blocks at the start, of which `live` bytes
    count.
    """
    place: int | None = None
    peaks: dict[int, int] = {}
    for _, address, nbytes in events:
        if address is None:
            place = places[nbytes]
        elif nbytes > 0:
            live += nbytes - nbytes_of.get(address, 0)
            nbytes_of[address] = nbytes
        else:
            live -= nbytes_of.pop(address, 0)
        if place is not None:
            peaks[place] = max(peaks.get(place, 0), live)
    return peaks


class _HistoryBytes:
    """A `StepBytes` of an accelerator."""

    def __init__(self, blocks: BlockRecord, own: Sequence[torch.Tensor], more_bytes: int) -> None:
        self._blocks = blocks
        self._own_bytes = sum(storage.nbytes() for storage in nbytes_at(own).values()) + more_bytes
        self._marks: list[_Event] = []
        self._places: list[int | None] = []
        self._peaks: Mapping[int, int] | None = None

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: inputs are in the history if they were made after the start."""

    def mark(self, place: int | None) -> None:
        self._marks.append((time.time_ns(), None, len(self._places)))
        self._places.append(place)

    def stop(self) -> Mapping[int, int]:
        if self._peaks is None:
            events = self._blocks.stop() or ()
            live_bytes = min(self._own_bytes, sum(self._blocks.nbytes_at.values()))
            merged = sorted([*self._marks, *events], key=lambda event: event[0])
            self._peaks = _peaks(merged, self._places, dict(self._blocks.nbytes_at), live_bytes) if events else {}
        return self._peaks

    def drop(self) -> None:
        if self._peaks is None:
            self._peaks = {}
            self._blocks.stop()


# ----------------------------------------------------------------------------------------------------------------------
# Measure a training step: bytes from the allocators, spans and counts from the executors.
#
# On a CPU the bytes before the step are those of all storages, and the peak is counted from the events of the
# allocator. No figure of the planner is used.


_measuring = threading.Lock()
_PATIENCE_S = 60.0
"""Seconds to wait for writes to the disk that the step has started. The next step would wait for them too."""


def measure_step(fn: Callable[[], object], *, device: str | None = None) -> Record:
    """Run `fn`, a training step, once, and return its seconds, bytes, spans and counts.

    `device_peak_bytes` counts all tensors on the device, also those from before the step, but no garbage, which is
    collected first. On an accelerator it is the most bytes that tensors asked torch's allocator for; the peak
    statistics that you read yourself stay. If somebody else reads the history of the allocator, it may be a higher peak
    since you reset these statistics. On a CPU it is computed from the storages of all live tensors and the memory
    events of torch.profiler, without slabs, which are host memory. `host_peak_bytes` are the slabs. On a CPU `step_s`
    includes the profiler, so time steps without it.

    `device` is `cpu` or `cuda`; None means the accelerator if any tensor is there. An exception of `fn` passes
    through. Raises NestedMeasurement if another measurement is running, or if another thread trains on the CPU and its
    step is measured against its budget.

    Example:
        record = elixir.measure_step(lambda: compiled(batch).backward())
        print(record.device_peak_bytes, record.step_s)
    """
    if not _measuring.acquire(blocking=False):
        raise NestedMeasurement()
    try:
        if not drop_running_step_bytes():  # it holds the profiler
            raise NestedMeasurement("", True)
        found = accelerator() if device is None else None
        if found is None or not platform_of(found).allocated_bytes(found):  # no tensor is there
            named = torch.device(device or "cpu")
            found = named if named.index is not None else platform_of(named).current()

        def step() -> None:
            fn()
            finish_updates()  # that it left to the host, because they are part of the step

        finish_updates()  # of the previous step
        reset_peak_slab_bytes()
        with _observed_ledgers() as (spans, counts):
            step_s, device_peak_bytes = _measured(step, found)
        return Record(
            origin=Origin.MEASURED,
            step_s=step_s,
            device_peak_bytes=device_peak_bytes,
            host_peak_bytes=peak_slab_bytes(),
            spans=tuple(spans),
            counts={verb: times for verb, times in counts.items() if times},
        )
    finally:
        _measuring.release()


def _measured(fn: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Run `fn`, and return its seconds and its peak on `device` in bytes."""
    platform = platform_of(device)
    if not platform.has_own_memory:
        with Resident() as resident:
            with compat.AllocatorProfile() as blocks:
                began_s = time.perf_counter()
                fn()
                step_s = time.perf_counter() - began_s
            return step_s, peak_bytes(resident.nbytes_at, resident.freed, blocks.allocations())
    # As `Resident` does: frames of a compilation hold the outputs of the first call of a model in cycles (torch 2.13).
    gc.collect()
    platform.synchronize(device)
    with PeakRecord(platform, device) as record:
        began_s = time.perf_counter()
        fn()
        platform.synchronize(device)
        step_s = time.perf_counter() - began_s
    return step_s, platform.peak_bytes(device) if record.peak_bytes is None else record.peak_bytes


@contextmanager
def _observed_ledgers() -> Iterator[tuple[list[Span], Counter[str]]]:
    """Record on all ledgers, and yield what will have their spans, in order, and their counts.

    A ledger that is made during the step, by a first compilation, has counts but no spans.
    """
    spans: list[Span] = []
    counts: Counter[str] = Counter()
    counts_before = {ledger: ledger.counts for ledger in all_ledgers()}
    clock = StepClock(ledger.lanes for ledger in counts_before)
    recordings = [ledger.start_recording(clock) for ledger in counts_before]
    try:
        yield spans, counts
    finally:
        clock.end()
        for recording in recordings:
            spans.extend(recording.stop(_PATIENCE_S))
        for ledger in {*counts_before, *all_ledgers()}:
            counts.update(ledger.counts)
            counts.subtract(counts_before.get(ledger, {}))
        spans.sort(key=lambda span: (span.start_s, span.end_s))


def peak_bytes(
    resident: Mapping[int, int], freed: Iterable[tuple[int, int]], allocations: Iterable[tuple[int, int, int]]
) -> int:
    """Return the peak of live bytes in a step.

    `resident` has the bytes of the blocks at the start of the step, by address, and `freed` (time, address) for each
    freed resident block. `allocations` are (time, address, bytes) in order, on the same clock; bytes are
    negative if the block was freed.

    A block is known only by its address. torch reports the end of a resident block only if an earlier profiler saw its
    allocation, and then it may report a stale size.
    """
    before, during = dict(resident), dict[int, int]()
    live = most = sum(before.values())
    deaths = sorted((at, address, 0) for at, address in freed)
    for _, address, nbytes in heapq.merge(deaths, allocations, key=lambda event: event[0]):
        if nbytes > 0:
            # An earlier block at this address was freed, whether or not torch reported it.
            live += nbytes - during.pop(address, 0) - before.pop(address, 0)
            during[address] = nbytes
            most = max(most, live)
        elif nbytes < 0 and address in during:
            live -= during.pop(address)
        else:
            live -= before.pop(address, 0)
    return most


class Resident:
    """The storages of all CPU tensors alive at its creation, without slabs.

    Until `close` it records freed storages.
    """

    def __init__(self) -> None:
        self.nbytes_at: dict[int, int] = {}
        """Bytes of each block, by its address."""
        self.freed: list[tuple[int, int]] = []
        """(time on the clock of `time.time_ns`, address) of each block that was freed since."""
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        gc.collect()
        for tensor in _tensors():
            try:
                # The memory of a DTensor is the memory of its local tensor.
                storage = compat.unwrapped(own_shard(tensor)).untyped_storage()
            except (RuntimeError, NotImplementedError):  # sparse and opaque tensors have no storage
                continue
            if storage.device.type != "cpu":  # the storage of a fake tensor is on `meta`, whatever its device says
                continue
            address = compat.memory_address(storage)
            is_new = address is not None and storage.nbytes() and address not in self.nbytes_at
            if address is not None and is_new and not is_slab_memory(address):
                self.nbytes_at[address] = storage.nbytes()
                self._watches.append(weakref.ref(storage, self._on_death(address)))

    @property
    def nbytes(self) -> int:
        """Bytes of all storages at the start."""
        return sum(self.nbytes_at.values())

    def close(self) -> None:
        """Stop recording freed storages."""
        self._watches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_death(self, address: int) -> Callable[[object], None]:
        freed = self.freed
        return lambda _: freed.append((time.time_ns(), address))


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # Not `isinstance`: it reads `__class__`, and lazy modules import themselves at this read.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:  # a gradient may have no Python object among those of `gc` yet
                yield thing.grad


# ----------------------------------------------------------------------------------------------------------------------
# Measure the seconds and bytes of a compiled region on random inputs.
#
# Inputs have the shapes, strides and dtypes of the capture: random floats, and zeros for other dtypes, so that an index
# is always in range. Only the inputs of one region are on the device at a time, so regions of a model that does not fit
# can be measured. The states of random generators are restored. The effect of warm caches from the previous region is
# not measured.


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
            if not lanes.has_clock:  # the device computes before a call returns
                box = list(inputs)
                began_s = time.perf_counter()
                compiled.run(box)
                runs_s.append(time.perf_counter() - began_s)
                continue
            # By the clock of the device. The runs are queued one behind the other, as regions of a step are, so the
            # launches of a run may hide behind the kernels of the run before. A host that waited for each run would add
            # the launch of its first kernel.
            lanes.synchronize()
            marks = [lanes.timed_event()]
            for _ in range(_QUEUED_RUNS):
                compiled.run(list(inputs))
                marks.append(lanes.timed_event())
            lanes.synchronize()
            runs_s += [first.elapsed_time(last) / 1e3 for first, last in pairwise(marks)]
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
    with compat.AllocatorProfile() as blocks:
        compiled.run(box)
    return peak_bytes({}, (), blocks.allocations())


# ----------------------------------------------------------------------------------------------------------------------
# Measure the bytes that the kernel of an op allocates, by one run on made-up inputs.


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
            sized = [tensor for tensor in tensors if tensor.device.type == "cpu"]
            nbytes = sum(compat.evaluate_size(tensor.numel(), call.sizes) * tensor.element_size() for tensor in sized)
            if nbytes > _SMALL_BYTES and nbytes > _MOST_OF_HOST * available_host_bytes():
                raise MemoryError(f"its tensors have {nbytes} bytes, most of the host memory that is free")
            made = {source: _made_up(source, call) for source in node.all_input_nodes}
            given = local_args(node, call.result_dim, call.parts, int) if call.parts > 1 else (node.args, node.kwargs)
            args, kwargs = fx.map_arg((given[0], dict(given[1])), made.__getitem__)
            if target in INDICES_OF:
                # All indices differ, as far as there are as many: then the kernel allocates most.
                taken: list[Any] = [args[place] for place in INDICES_OF[target]]
                indices, num = taken
                indices.copy_((torch.arange(indices.numel()) % num).view(indices.shape))
            run = _on_device if platform.has_own_memory else _on_host
            kernel = in_own_memory(target)
            results, peak_bytes = run(lambda: kernel(*args, **kwargs), platform, device)
            inputs = {part.untyped_storage().data_ptr() for part in _dense((args, kwargs))}
            parts = [(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in _dense(results)]
            if len(parts) != len(_dense(value_of(node))):
                raise ValueError("it returned more or fewer tensors than it was traced with")
            own = {address: nbytes for address, nbytes in parts if address not in inputs}
            return KernelBytes(
                results_bytes=tuple(own.get(address) for address, _ in parts),
                workspace_bytes=max(peak_bytes - sum(own.values()), 0),
            )
        except Exception as error:  # what kernels say of made-up inputs: indices, shapes, values, and no memory
            log.info("the bytes that %s allocates are not known: %s", target, str(error).partition("\n")[0])
            return None


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


def _dense(values: Any) -> list[torch.Tensor]:
    leaves = leaves_of(list(values) if isinstance(values, tuple) else values)
    return [part for leaf in leaves if isinstance(leaf, torch.Tensor) for part in compat.dense_parts(leaf)]
