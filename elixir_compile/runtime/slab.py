"""Slabs: large mappings of host memory, page-locked if an accelerator is there, and the tensors cut from them.

Each tensor cut from a slab has a storage of its own, which keeps the mapping alive.
"""

import bisect
import contextlib
import itertools
import mmap
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence

import torch

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.compat.platforms import PinningError, accelerator_platform, cores_beside, on_cores


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of their memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


ALIGN_BYTES = 256
"""Offset of tensors in slabs. cuBLAS chooses kernels by alignments up to this, so a gathered matrix runs the kernel
that a matrix in an allocation of its own would run."""


_IDLE_STEPS = 4
"""A free slab is unmapped after this many backward passes without use. More than one, because the micro-batches of one
accumulation may use different slabs in turn."""


class _Mapping(mmap.mmap):
    """An anonymous private mapping that unpins itself before it is unmapped."""

    # Not `weakref.finalize`: mmap's deallocator unmaps the memory before it clears weak references, and CUDA refuses to
    # unregister an unmapped range. `__del__` of a subclass runs before the memory is unmapped.
    address: int = 0
    unpin: Callable[[int], object] | None = None
    forget: Callable[[int], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin(self.address)
        if self.forget is not None:
            self.forget(self.address)


class _MappedRanges:
    """The address ranges of all slabs, their bytes, and the most bytes ever mapped at once."""

    def __init__(self) -> None:
        # Re-entrant: a garbage collection inside a locked section may run `_Mapping.__del__` on the same thread.
        self._lock = threading.RLock()
        self._nbytes_at: dict[int, int] = {}
        # Always replaced, never edited, because a garbage collection may remove a slab between any two lines here. An
        # address that stays in the tuple after such a removal counts 0 bytes.
        self._starts: tuple[int, ...] = ()
        self._serials = itertools.count()
        self._serial_at: dict[int, int] = {}
        self._live_bytes = 0
        self._peak_bytes = 0
        self._pinned_at: set[int] = set()

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._nbytes_at[address] = nbytes
            self._serial_at[address] = next(self._serials)
            self._starts = tuple(sorted(self._nbytes_at))
            self._live_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def note_pinned(self, address: int) -> None:
        with self._lock:
            self._pinned_at.add(address)

    def remove(self, address: int) -> None:
        with self._lock:
            self._live_bytes -= self._nbytes_at.pop(address, 0)
            self._pinned_at.discard(address)
            self._starts = tuple(sorted(self._nbytes_at))

    def reset_peak(self) -> None:
        with self._lock:
            self._peak_bytes = self._live_bytes

    def figures(self) -> tuple[int, int]:
        with self._lock:
            return self._live_bytes, self._peak_bytes

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            # A copy, because a garbage collection in the sum may remove a slab.
            return sum(self._nbytes_at.get(address, 0) for address in tuple(self._pinned_at))

    def at(self, address: int) -> tuple[int, int] | None:
        with self._lock:
            starts = self._starts
            before = bisect.bisect_right(starts, address)
            start = starts[before - 1] if before else address
            is_inside = address < start + self._nbytes_at.get(start, 0)
            return (start, self._serial_at[start]) if is_inside else None


_mapped = _MappedRanges()


class Slab:
    """`nbytes` of host memory, rounded up to whole pages and filled with zeros.

    With `pin`, the pages are locked for the accelerator so that copies run asynchronously. The slab is pageable if
    there is no accelerator, and, with an `ElixirWarning`, if the driver refuses because of a locked-memory limit.
    Processes forked from now on do not have a pinned slab.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        if nbytes < 0:
            raise ValueError(f"a slab of {nbytes} bytes: needs 0 or more")
        self.nbytes = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        self._mapping = _Mapping(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The call is advice only: a kernel without transparent huge pages answers EINVAL.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping.address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        # Bound here and not looked up in `__del__`, because module globals are cleared first when the interpreter ends.
        self._mapping.forget = _mapped.remove
        _mapped.add(self._mapping.address, self.nbytes)
        if pin:
            self._mapping.unpin = _pin(self._mapping.address, self.nbytes)
        if self.is_pinned:
            _mapped.note_pinned(self._mapping.address)
            # A fork copies page-locked pages at once: every DataLoader worker would copy every slab.
            self.keep_from_children()

    @property
    def is_pinned(self) -> bool:
        """Whether copies between this slab and an accelerator can run asynchronously."""
        return self._mapping.unpin is not None

    def keep_from_children(self) -> None:
        """Exclude this memory from processes forked from now on; a child gets a segmentation fault if it touches it.

        If a process forks while O_DIRECT reads into memory that parent and child share, the bytes may end up in the
        child's copy: open(2), Notes.
        """
        if hasattr(mmap, "MADV_DONTFORK"):
            self._mapping.madvise(mmap.MADV_DONTFORK)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset_bytes: int) -> torch.Tensor:
        """Return a contiguous tensor of `shape` at `offset_bytes`, a multiple of `ALIGN_BYTES`, in its own storage.

        Raises ValueError if the offset is not aligned, or if the tensor does not fit the slab.
        """
        numel = 1
        for size in shape:
            numel *= size
        needed_bytes = numel * dtype.itemsize
        if offset_bytes < 0 or offset_bytes % ALIGN_BYTES:
            raise ValueError(f"offset {offset_bytes} in a slab: needs a multiple of {ALIGN_BYTES}, 0 or more")
        if offset_bytes + needed_bytes > self.nbytes:
            raise ValueError(f"{needed_bytes} bytes at offset {offset_bytes} do not fit a slab of {self.nbytes} bytes")
        if numel == 0:  # `frombuffer` refuses empty tensors, which need no memory.
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        # `frombuffer` holds a reference to the mapping for as long as the storage lives.
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset_bytes).view(tuple(shape))


def aligned_bytes(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGN_BYTES`, the offset at which another tensor may start."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def live_slab_bytes() -> int:
    """Return the bytes of all mapped slabs."""
    return _mapped.figures()[0]


def pinned_slab_bytes() -> int:
    """Return the bytes of the mapped slabs that are page-locked for an accelerator."""
    return _mapped.pinned_bytes


def peak_slab_bytes() -> int:
    """Return the most bytes of slabs that were mapped at once since `reset_peak_slab_bytes`."""
    return _mapped.figures()[1]


def reset_peak_slab_bytes() -> None:
    """Reset `peak_slab_bytes` to the bytes of all mapped slabs."""
    _mapped.reset_peak()


def is_slab_memory(data_ptr: int) -> bool:
    """Return whether the address lies in a slab."""
    return _mapped.at(data_ptr) is not None


def slab_at(data_ptr: int) -> tuple[int, int] | None:
    """Return the start of the slab in which the address lies, and the number of the slab; None if it is in no slab."""
    return _mapped.at(data_ptr)


def _pin(address: int, nbytes: int) -> Callable[[int], object] | None:
    """Page-lock `nbytes` at `address`, and return the function that unlocks the memory at an address.

    Return None without an accelerator, and, after an ElixirWarning, if the driver refuses.
    """
    platform = accelerator_platform()
    if platform is None:
        return None
    device = platform.current()

    def pin() -> Callable[[int], object] | None:
        platform.make_current(device)  # a new thread begins with device 0: the driver would open a context there
        return platform.pin(address, nbytes)

    try:
        # Linux takes a page from the memory node of the thread that touches it first, here by locking it.
        return on_cores(cores_beside(device), pin)
    except PinningError as refused:
        warnings.warn(
            f"the driver refused to pin {nbytes} bytes of host memory ({refused}): copies from it block. "
            "Raise the locked-memory limit (`ulimit -l`), or lower `host_memory`.",
            ElixirWarning,
            stacklevel=3,
        )
        return None


class SlabPool:
    """Slabs for repeated use, so that their pages are mapped and pinned only once.

    `give_back` may be called from any thread, and from inside a garbage collection.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._now = 0
        self._free: list[tuple[Slab, int]] = []
        self._returned: deque[Slab] = deque()  # appended to without a lock

    def take(self, nbytes: int) -> Slab:
        """Return the smallest free slab of at least `nbytes`, or a new slab."""
        self._collect()
        fitting = [entry for entry in self._free if entry[0].nbytes >= nbytes]
        if not fitting:
            return Slab(nbytes, pin=self._pin)
        entry = min(fitting, key=lambda entry: entry[0].nbytes)
        self._free.remove(entry)
        return entry[0]

    def give_back(self, slab: Slab) -> None:
        """Make `slab` free for the next `take`."""
        self._returned.append(slab)

    def end_step(self) -> bool:
        """Count a backward pass; return whether a slab has been free for more than `_IDLE_STEPS` of them."""
        self._now += 1
        self._collect()
        return any(self._is_idle(since) for _, since in self._free)

    def drop(self, *, only_idle: bool) -> None:
        """Unmap free slabs; with `only_idle`, only those idle for too long. No copy may still use a free slab."""
        self._collect()
        self._free = [entry for entry in self._free if only_idle and not self._is_idle(entry[1])]

    def _is_idle(self, since: int) -> bool:
        return self._now - since > _IDLE_STEPS

    def _collect(self) -> None:
        while self._returned:
            self._free.append((self._returned.popleft(), self._now))
