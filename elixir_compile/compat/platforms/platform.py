"""The platform of each device type: its memory, its peaks and the history of its blocks, for a CPU, for CUDA and for
any other accelerator of torch.
"""

import contextlib
import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from elixir_compile import compat

# ----------------------------------------------------------------------------------------------------------------------
# The blocks of an accelerator's allocator while a step runs, from the history that torch keeps of it.
#
#   snapshot["segments"]        the blocks that are there                      nbytes_at
#   entry "snapshot"            the moment of that snapshot, or of another's   entries before it are in nbytes_at
#   entry "alloc"               a tensor asked for a block                     (time, address, bytes)
#   entry "free_requested"      its last tensor is gone                        nothing: a stream may still use it
#   entry "free_completed"      the block is free                              (time, address, -bytes)
#
# Bytes are those that tensors asked for, which is what `Platform.peak_bytes` counts. Several records may run at a time,
# over one history.


MOST_ENTRIES = 200_000
"""The most entries of a history: a step of Llama 7B has about 20,000. If there are more, the first are lost."""


_lock = threading.RLock()  # the collector may end a record while this thread begins another
_running: Counter[str] = Counter()
"""The number of records that run, by device type: the first starts the history, the last ends it."""


class BlockRecord:
    """The blocks of the allocator of a device from the creation of the record to `stop`."""

    def __init__(self, device: torch.device) -> None:
        """The history of the allocator must be on. Raises AttributeError if torch has none for the type."""
        self._device = device
        self._index = device.index or 0
        snapshot = compat.allocator_snapshot(device.type)
        self.nbytes_at = live_blocks(snapshot, self._index)
        """Bytes of the blocks at the creation, by address."""
        entries = snapshot["device_traces"][self._index]
        is_marked = bool(entries) and entries[-1]["action"] == "snapshot"
        self._mark = sum(entry["action"] == "snapshot" for entry in entries) - is_marked
        """The number of snapshots in the history before that of the creation."""
        self._end = weakref.finalize(self, _end, device.type)  # its owner may be gone before it stops the record
        self._end.atexit = False

    def stop(self) -> Sequence[tuple[int, int, int]] | None:
        """End the record; return (time, address, bytes) of each block that came or went, in order.

        Times are ns on the clock of `time.time_ns`, in steps of a microsecond. Bytes are negative if the block was
        freed. None if there were more entries than the allocator keeps, or somebody else began a new history.
        """
        with _lock:
            snapshot = compat.allocator_snapshot(self._device.type)
            if self._end.detach() is not None:
                _end(self._device.type, snapshot)
        return block_events(snapshot, self._index, MOST_ENTRIES, self._mark)


def record_blocks(device: torch.device) -> BlockRecord | None:
    """Return a record of the blocks of `device` that runs; None if torch keeps no history, or keeps one for others."""
    with _lock:
        if not _running[device.type] and not compat.start_allocator_history(device.type, MOST_ENTRIES):
            return None
        _running[device.type] += 1
        try:
            return BlockRecord(device)
        except BaseException:
            _end(device.type)
            raise


def _end(device_type: str, snapshot: Mapping[str, Any] | None = None) -> None:
    """End one record of devices of the type, and the history with the last, unless somebody else began it anew.

    The history of others has stacks, as that of torch's own functions by default: this package records none. A history
    that somebody else began just now, or without stacks, is not told apart. `snapshot` is one of now; None if there is
    none yet.
    """
    with _lock:
        _running[device_type] -= 1
        if _running[device_type]:
            return
        traces = (snapshot or compat.allocator_snapshot(device_type))["device_traces"]
        if not any(entry.get("frames") for entries in traces for entry in entries):
            compat.stop_allocator_history(device_type)


def live_blocks(snapshot: Mapping[str, Any], index: int) -> dict[int, int]:
    """Return the bytes that were asked for of each block in use on the device with `index`, by address.

    A block that a stream still uses after its last tensor is gone is in use.
    """
    return {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        if segment["device"] == index
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }


def block_events(
    snapshot: Mapping[str, Any], index: int, most_entries: int, mark: int = 0
) -> list[tuple[int, int, int]] | None:
    """Return (time in ns, address, bytes) of the blocks that came or went on the device with `index`, in order.

    Entries up to the snapshot with the number `mark` in the history are left out. Bytes are negative if the block was
    freed. None if the history has `most_entries`, so that its first may be lost, or if it began after that snapshot.
    """
    entries = snapshot["device_traces"][index]
    marks = [place for place, entry in enumerate(entries) if entry["action"] == "snapshot"]
    if len(entries) >= most_entries or mark > len(marks):
        return None
    return [
        (entry["time_us"] * 1000, entry["addr"], entry["size"] if entry["action"] == "alloc" else -entry["size"])
        for entry in entries[marks[mark] + 1 if mark < len(marks) else 0 :]
        if entry["action"] in ("alloc", "free_completed")
    ]


# ----------------------------------------------------------------------------------------------------------------------
# The platform of a device type: the answers for a CPU, which the platforms of accelerators override.


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes of a device's memory."""

    free_bytes: int
    """Bytes that no process uses."""
    allocated_bytes: int
    """Bytes of the tensors of this process."""
    reserved_bytes: int
    """Bytes that torch's allocator holds: `allocated_bytes` and what it keeps for later tensors."""
    limit_bytes: int
    """The most bytes that the allocator of this process may hold."""


class Platform:
    """The devices of one type, here the CPU: it computes in the memory of the host, and copies are synchronous.

    It has more than 20 methods, because each answer of torch about a device is one.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    @property
    def has_own_memory(self) -> bool:
        """Whether devices have memory apart from the host's, and streams that copy and compute at the same time."""
        return False

    def missing(self, device: torch.device) -> Sequence[str]:
        """Return what torch lacks for `device` and Elixir cannot do without; empty for a device in host memory."""
        return ()

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used a device of this type, which takes memory there and forbids forks."""
        return False

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return 1

    def current(self) -> torch.device:
        """Return the current device of the calling thread."""
        return torch.device(self.device_type)

    def make_current(self, device: torch.device) -> None:
        """Make `device` the current device of the calling thread; a new thread begins with device 0."""

    def name(self, device: torch.device) -> str:
        """Return the name of `device`: `NVIDIA A100-SXM4-40GB`, or `cpu`."""
        return self.device_type

    def total_bytes(self, device: torch.device) -> int | None:
        """Return the bytes of the memory of `device`; None if it has none of its own, or torch does not tell."""
        return None

    def memory(self, device: torch.device) -> Memory | None:
        """Return how the memory of `device` is used; None if it has none of its own, or torch does not tell."""
        return None

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the bytes of this process's tensors in the memory of `device`; 0 if it has no memory of its own."""
        return 0

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes that tensors asked for at once since the user reset torch's statistics; 0 without
        memory of its own. `PeakRecord` has the peak of a part of a program."""
        return 0

    def tensor_bytes(self, device: torch.device) -> int:
        """Return the bytes that the tensors on `device` asked for, without rounding; 0 without memory of its own."""
        return 0

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the bytes that the allocator holds on `device`; 0 without memory of its own."""
        return 0

    def record_blocks(self, device: torch.device) -> BlockRecord | None:
        """Return a record that runs of the blocks of the allocator on `device`.

        None without memory of its own, if torch keeps no history of the allocator, or if somebody else reads it.
        """
        return None

    def alloc_retries(self, device: torch.device) -> int | None:
        """Return how often the allocator freed its cache to satisfy an allocation; None if torch does not tell."""
        return None

    def empty_cache(self) -> None:
        """Give memory that the allocator holds without tensors back to the driver."""

    def hold(self, device: torch.device, nbytes: int, *, spare_bytes: int) -> None:
        """Let the allocator take what it lacks of `nbytes` as one segment, of which later tensors are parts, if
        `spare_bytes` more are free. Nothing happens without memory of its own."""

    def drop_workspaces(self) -> None:
        """Free the workspaces that libraries keep for later matrix products; the next product allocates a new one.

        Their memory stays with the allocator, in the order of the streams that used it.
        """

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until all work issued on `device` is done."""

    def synchronize_compute(self, device: torch.device) -> None:
        """Block the calling thread until the work issued on the current stream of `device` is done."""

    def pin(self, address: int, nbytes: int) -> Callable[[int], object] | None:
        """Page-lock host memory for copies by every device; return the function that unlocks the memory at an address.

        Return None if no copy is faster from locked memory. Raises PinningError if the driver refuses.
        """
        return None

    def pci_address(self, device: torch.device) -> str | None:
        """Return the address of `device` on the PCI bus, `0000:17:00.0`; None if torch tells of none."""
        return None

    def uuid(self, device: torch.device) -> str | None:
        """Return the number of `device` that no other device has, `GPU-8f6e...`; None if torch tells of none."""
        return None

    def random_states(self) -> Sequence[torch.Tensor]:
        """Return the state of the random generator of each device; empty if no device was used."""
        return ()

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Set the random generator of the device with `index` to `state`."""


class PinningError(Exception):
    """The driver refused to page-lock host memory, with the driver's `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"error {code}")
        self.code = code


# ----------------------------------------------------------------------------------------------------------------------
# The peak of a device's memory in a part of a program.
#
# The peak statistics of torch's allocator are the user's, so they are read and never reset, and no tensor is allocated
# to raise them again.
#
#     a history of blocks           the bytes at the begin, and of each block that came or went: exact
#     none, and the peak rose       the statistic: it rose in this part of the program, so it is exact
#     none, and it did not rise     not known: an earlier moment needed as much or more


log = logging.getLogger("elixir_compile")
T = TypeVar("T")


class PeakRecord:
    """The most bytes that tensors on a device with memory of its own asked for at once, from its creation to `stop`."""

    def __init__(self, platform: "Platform", device: torch.device) -> None:
        """`platform` is that of `device`."""
        self._platform, self._device = platform, device
        self._earlier_bytes = platform.peak_bytes(device)
        self._blocks = _or_none(lambda: record_blocks(device))
        self.peak_bytes: int | None = None
        """The peak, once the record is stopped; None if it is not known."""

    def stop(self) -> int | None:
        """End the record; return the peak, None if it is not known."""
        events = None if self._blocks is None else _or_none(self._blocks.stop)
        if self._blocks is not None and events is not None:
            self.peak_bytes = most_bytes(self._blocks.nbytes_at.values(), (nbytes for *_, nbytes in events))
        else:
            risen_bytes = self._platform.peak_bytes(self._device)
            self.peak_bytes = risen_bytes if risen_bytes > self._earlier_bytes else None
        return self.peak_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _or_none(ask: Callable[[], T]) -> T | None:
    """Return the result of `ask`, a question about the history; None, with a line in the log, if it fails.

    Histories are private to torch, and no figure is worth a training.
    """
    try:
        return ask()
    except Exception as error:
        log.warning("torch's history of the allocator cannot be read: %s: %s", type(error).__name__, error)
        return None


def most_bytes(before: Iterable[int], changes: Iterable[int]) -> int:
    """Return the most of the sum of `before` and the first of `changes`, for any number of changes."""
    live = most = sum(before)
    for nbytes in changes:
        live += nbytes
        most = max(most, live)
    return most


# ----------------------------------------------------------------------------------------------------------------------
# The platform of an accelerator, by `torch.accelerator` and the module that torch has for the device type.
#
# A figure of 0 bytes that stands for a function of another name would look like a device that needs nothing. So
# functions are called by name, `missing` tells which are lacking before a model is trained, and only what a device type
# may do without (its name, the size of its memory, a limit) has a default.


_NEEDED = (
    "device_count",
    "empty_cache",
    "get_rng_state_all",
    "is_initialized",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "set_rng_state",
)
"""Functions of torch's module for the type that every device type must have."""
_TOTAL = ("mem_get_info", "get_device_properties")
"""Functions that tell the size of the memory; one suffices."""

_SMALL_NOW, _SMALL_PEAK = "reserved_bytes.small_pool.current", "reserved_bytes.small_pool.peak"
"""The bytes of segments for tensors of up to 1 MiB, in torch's statistics."""
_LEAST_OWN_BYTES, _ROUNDING_BYTES = 10 << 20, 2 << 20
"""A tensor of so many bytes has a segment of its own size, in which others follow it; that size is a multiple of the
second."""


@functools.cache
def lane_stream(device: torch.device, lane: str) -> torch.Stream:
    """Return the stream of `device` that belongs to `lane`, the same for all models: torch has a pool of 32 streams for
    each device, and deals them out again after those, so that lanes which must not wait would share one."""
    return torch.Stream(device)


class AcceleratorPlatform(Platform):
    """Accelerators of a type for which torch has streams, such as XPU.

    It has more than 20 methods, because each answer of torch about a device is one.
    """

    needed: Sequence[str] = _NEEDED
    """The functions of torch's module for the type that are called without asking whether they are there."""

    @property
    def has_own_memory(self) -> bool:
        """Return True."""
        return True

    @property
    def _module(self) -> Any:
        """The module that torch has for the type, such as `torch.cuda`."""
        return getattr(torch, self.device_type)

    def missing(self, device: torch.device) -> Sequence[str]:
        """Return the functions that torch lacks for `device` and Elixir needs: streams, events, figures of memory."""
        module = getattr(torch, self.device_type, None)
        names = [name for name in self.needed if not callable(getattr(module, name, None))]
        found = [f"torch.{self.device_type}.{name}" for name in names]
        if not any(callable(getattr(module, name, None)) for name in _TOTAL):
            found.append(" or ".join(f"torch.{self.device_type}.{name}" for name in _TOTAL))
        try:
            placed = device if device.index is not None else self.current()
            torch.Event(placed).record(lane_stream(placed, "h2d"))
        except RuntimeError as error:  # torch has no guard for the type, or a guard without streams
            line = str(error).partition("\n")[0]
            found.insert(0, f"streams and events ({line})")
        return found

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used a device of this type."""
        return bool(self._module.is_initialized())

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return int(self._module.device_count())

    def current(self) -> torch.device:
        """Return the current device of the calling thread."""
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def make_current(self, device: torch.device) -> None:
        """Make `device` the current device of the calling thread, if it is not."""
        if device.index is not None and torch.accelerator.current_device_index() != device.index:
            torch.accelerator.set_device_index(device.index)

    def name(self, device: torch.device) -> str:
        """Return the name of `device`, or its type if torch does not tell."""
        ask = self._optional("get_device_name")
        return self.device_type if ask is None else str(ask(device))

    def total_bytes(self, device: torch.device) -> int | None:
        """Return the bytes of the memory of `device`; None if torch does not tell."""
        ask = self._optional("get_device_properties")
        return None if ask is None else getattr(ask(device), "total_memory", None)

    def memory(self, device: torch.device) -> Memory | None:
        """Return how the memory of `device` is used; None if torch does not tell."""
        ask, ask_fraction = self._optional("mem_get_info"), self._optional("get_per_process_memory_fraction")
        if ask is None:
            return None
        free_bytes, total_bytes = ask(device)
        return Memory(
            free_bytes=free_bytes,
            allocated_bytes=self.allocated_bytes(device),
            reserved_bytes=self.reserved_bytes(device),
            limit_bytes=total_bytes if ask_fraction is None else int(ask_fraction(device) * total_bytes),
        )

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the bytes of this process's tensors on `device`."""
        return int(self._module.memory_allocated(device))

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes that tensors asked for at once since the user reset the statistics.

        A plan counts the same bytes. The allocator rounds up to more: 512 bytes for a scalar, up to 1 MiB for a
        large tensor in a block that it does not split.
        """
        return self._requested_bytes("peak", device)

    def tensor_bytes(self, device: torch.device) -> int:
        """Return the bytes that the tensors on `device` asked for, without rounding."""
        return self._requested_bytes("current", device)

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the bytes that the allocator holds on `device`."""
        ask = self._optional("memory_stats_as_nested_dict")  # 8 us, where `memory_reserved` takes 200
        found = {} if ask is None else ask(device)
        return int(found["reserved_bytes"]["all"]["current"] if found else self._module.memory_reserved(device))

    def record_blocks(self, device: torch.device) -> BlockRecord | None:
        """Return a record that runs of the blocks on `device`; None if torch keeps no history, or one for others."""
        return record_blocks(device)

    def alloc_retries(self, device: torch.device) -> int | None:
        """Return how often the allocator freed its cache to satisfy an allocation; None if torch does not tell."""
        ask = self._optional("memory_stats_as_nested_dict") or self._module.memory_stats
        found = ask(device).get("num_alloc_retries")
        return None if found is None else int(found)

    def _requested_bytes(self, when: str, device: torch.device) -> int:
        """Return the bytes that tensors asked for, `when` is "current" or "peak"."""
        statistics = self._module.memory_stats(device)
        if not statistics:
            return 0  # torch has none before the first tensor on a device
        # CUDA's own allocator, `backend:cudaMallocAsync`, counts no requests: their statistic stays 0.
        return int(statistics[f"requested_bytes.all.{when}"] or statistics[f"allocated_bytes.all.{when}"])

    def empty_cache(self) -> None:
        """Give memory that the allocator holds without tensors back to the driver."""
        self._module.empty_cache()

    def hold(self, device: torch.device, nbytes: int, *, spare_bytes: int) -> None:
        """Let the allocator take what it lacks of `nbytes` as one segment, if `spare_bytes` more are free.

        The segment is for tensors of more than 1 MiB; those below have segments of their own, for which room is left.
        """
        memory, stats = self.memory(device), self._module.memory_stats(device)
        if memory is None or _SMALL_PEAK not in stats:
            return
        small_bytes = stats[_SMALL_PEAK] - stats[_SMALL_NOW]
        lacking_bytes = (nbytes - memory.reserved_bytes - small_bytes) // _ROUNDING_BYTES * _ROUNDING_BYTES
        free_bytes = min(memory.free_bytes, memory.limit_bytes - memory.reserved_bytes)
        if lacking_bytes >= _LEAST_OWN_BYTES and lacking_bytes + spare_bytes <= free_bytes:
            torch.empty(lacking_bytes, dtype=torch.uint8, device=device)

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until all work issued on `device` is done."""
        torch.accelerator.synchronize(device)

    def synchronize_compute(self, device: torch.device) -> None:
        """Block the calling thread until the work issued on the current stream of `device` is done."""
        torch.accelerator.current_stream(device).synchronize()

    def random_states(self) -> Sequence[torch.Tensor]:
        """Return the state of the random generator of each device; empty if no device was used."""
        return self._module.get_rng_state_all() if self.is_in_use else ()

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Set the random generator of the device with `index` to `state`."""
        self._module.set_rng_state(state, index)

    def _optional(self, name: str) -> Callable[..., Any] | None:
        """Return the function `name` of torch's module for the type, None if the module has no such function."""
        return getattr(self._module, name, None)


# ----------------------------------------------------------------------------------------------------------------------
# The platform of CUDA: pinned memory and the place on the PCI bus, which `torch.accelerator` does not serve.


_PORTABLE = 1
"""`cudaHostRegisterPortable`: page-locked for every device, not only for the current device."""


class CudaPlatform(AcceleratorPlatform):
    """GPUs by CUDA, or by ROCm, which torch also calls CUDA."""

    needed = (
        *AcceleratorPlatform.needed,
        "get_device_name",
        "get_device_properties",
        "get_per_process_memory_fraction",
        "mem_get_info",
    )

    def drop_workspaces(self) -> None:
        """Free the workspaces of cuBLAS and cuBLASLt on all devices."""
        compat.drop_cublas_workspaces()

    def pin(self, address: int, nbytes: int) -> Callable[[int], object] | None:
        """Page-lock host memory. Return the function that unlocks it, or None without a GPU."""
        if not torch.cuda.is_available():
            return None
        cudart: Any = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            # CUDA keeps the error, and torch would raise it after the next kernel launch. This launch takes it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            raise PinningError(code)
        return cudart.cudaHostUnregister

    def uuid(self, device: torch.device) -> str | None:
        """Return the number of `device` as NVML writes it, `GPU-8f6e...`; None if torch tells of none."""
        found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return None if found is None else f"GPU-{str(found).removeprefix('GPU-')}"

    def pci_address(self, device: torch.device) -> str:
        """Return the address of `device` on the PCI bus."""
        found = torch.cuda.get_device_properties(device)
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


# ----------------------------------------------------------------------------------------------------------------------
# Find the platform of a device, and the accelerator of this process.


_IN_HOST_MEMORY = ("cpu", "mps", "meta")
"""Device types without memory of their own that a plan could fill. On `mps`, the CPU and the GPU share one memory."""


def platform_of(device: torch.device) -> Platform:
    """Return the platform of the type of `device`."""
    if device.type in _IN_HOST_MEMORY:
        return Platform(device.type)
    return CudaPlatform(device.type) if device.type == "cuda" else AcceleratorPlatform(device.type)


def accelerator_type() -> str | None:
    """Return the type of the accelerators of this machine that have memory of their own, or None. Initialises none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _IN_HOST_MEMORY else found.type


def accelerator_platform() -> Platform | None:
    """Return the platform of the accelerators of this machine that have memory of their own, or None."""
    found = accelerator_type()
    return None if found is None else platform_of(torch.device(found))


def is_accelerator_in_use() -> bool:
    """Return whether this process has used an accelerator, which forbids forks."""
    platform = accelerator_platform()
    return platform is not None and platform.is_in_use


def accelerator() -> torch.device | None:
    """Return the current accelerator of the calling thread, or None if there is none with memory of its own."""
    platform = accelerator_platform()
    return None if platform is None else platform.current()
