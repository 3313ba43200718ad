"""The parameters of a bucket in training: their home, their gathered copy, memory for gradients and state, and the
slabs of host memory from which it is cut.
"""

import bisect
import contextlib
import itertools
import mmap
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from elixir_compile import compat
from elixir_compile.base.errors import ElixirWarning
from elixir_compile.compat.platforms import PinningError, accelerator_platform, cores_beside, on_cores
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import own_shard, rehome, rehome_grad
from elixir_compile.ir import Bucket, Placement, Tier, Update, Verb
from elixir_compile.runtime.awaited import QueuedUpdates
from elixir_compile.runtime.lanes import Event

# ----------------------------------------------------------------------------------------------------------------------
# Slabs: large mappings of host memory, page-locked if an accelerator is there, and the tensors cut from them.
#
# Each tensor cut from a slab has a storage of its own, which keeps the mapping alive.


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
        self._files_at: set[int] = set()
        """Ranges that map files, which take no memory of their own."""

    def add(self, address: int, nbytes: int, *, is_file: bool = False) -> None:
        with self._lock:
            self._nbytes_at[address] = nbytes
            self._serial_at[address] = next(self._serials)
            self._starts = tuple(sorted(self._nbytes_at))
            if is_file:
                self._files_at.add(address)
            else:
                self._live_bytes += nbytes
                self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def note_pinned(self, address: int) -> None:
        with self._lock:
            self._pinned_at.add(address)

    def remove(self, address: int) -> None:
        with self._lock:
            nbytes = self._nbytes_at.pop(address, 0)
            if address in self._files_at:
                self._files_at.discard(address)
            else:
                self._live_bytes -= nbytes
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

    With `file`, the descriptor of a file of that many whole pages, the slab is the file: its pages are those of the
    page cache, which the kernel writes back and drops, and it is not counted as memory.
    """

    def __init__(self, nbytes: int, *, pin: bool, file: int | None = None) -> None:
        if nbytes < 0:
            raise ValueError(f"a slab of {nbytes} bytes: needs 0 or more")
        self.nbytes = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        if file is None:
            self._mapping = _Mapping(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._mapping = _Mapping(file, self.nbytes, flags=mmap.MAP_SHARED)
        if hasattr(mmap, "MADV_HUGEPAGE") and file is None:
            # The call is advice only: a kernel without transparent huge pages answers EINVAL.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping.address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        # Bound here and not looked up in `__del__`, because module globals are cleared first when the interpreter ends.
        self._mapping.forget = _mapped.remove
        _mapped.add(self._mapping.address, self.nbytes, is_file=file is not None)
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


class MappedByOthers:
    """Memory that somebody else's mapping of a file has, while it is the home of parameters: counted as a file's."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """`ranges` has the addresses and bytes of the parameters."""
        for address, nbytes in ranges:
            _mapped.add(address, nbytes, is_file=True)
            weakref.finalize(self, _mapped.remove, address).atexit = False


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


# ----------------------------------------------------------------------------------------------------------------------
# The parameters of a bucket in training: their home, their gathered copy, and memory for gradients and state.
#
# home DEVICE   param.data is an ordinary device tensor; `gathered` is an alias of it
# home HOST     param.data is cut from a slab; a gather copies the slab into one flat device tensor, and `gathered`
#               is cut from this tensor
# home DISK     param.data maps a file, which a gather reads: see `disk_params`


class RunningBucket:
    """A bucket of an executor.

    Only `queued` and `home_read` are used by several threads; the executor calls the methods from the thread of the
    step. It has more than 15 attributes: 4 are set by the plan, and the others belong to one of its memories: home,
    gathered copy, gradients.
    """

    def __init__(self, spec: Bucket, placement: Placement, slots: Sequence[Slot], *, pin: bool) -> None:
        self.spec = spec
        self.placement = placement
        self.slots = tuple(slots)
        self.pin = pin
        self.disk: tuple[Path, bool] | None = None
        """The folder for state on disk, and whether reads are checked by checksums; None if the option is not set."""
        self.reads_loaded_files = True
        """Whether frozen parameters on disk may be read from the files that they were loaded from."""
        self.gathered: tuple[torch.Tensor, ...] | None = None
        """The parameters on the device, in bucket order; None while no copy of them is there."""
        self.update = Update.AFTER_BACKWARD
        """When the hybrid optimizer updates the parameters."""
        self.closes: Verb | None = None
        """The verb after which the program of the backward neither reads the parameters nor adds to their gradient:
        their reduce or offload, or the first release after it. None if unknown."""
        self.queued = QueuedUpdates(self.slots)
        """The updates on the host for which no thread has waited yet."""
        self.home_read: Event | None = None
        """Past when the last gather has read the home on the host; None if gathers are synchronous. An update on the
        host waits for it before it writes."""
        self._gathered_versions: list[int] = []
        self._offsets_bytes, self._total_bytes = self._layout()
        self._params: Slab | None = None
        self._grads: list[tuple[Slab, list[weakref.ref]]] = []
        """Slabs of gradients, each with its storages that were handed out."""
        self._totals: dict[int, tuple[Slab, weakref.ref]] = {}
        """By slot: the slab of its fp32 sum of gradients, and the storage of this slab that was handed out last."""

    @property
    def is_away(self) -> bool:
        """Whether the home of the parameters is not the device."""
        return self.placement.param is not Tier.DEVICE

    @property
    def is_gathered(self) -> bool:
        """Whether programs read a gathered copy of the parameters, and not their home."""
        return self.is_away

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of gradients; with several ranks, the dtype from their reduce on."""
        name = self.spec.reduce_dtype
        return self.slots[0].param.dtype if name is None else getattr(torch, name)

    def is_outdated(self) -> bool:
        """Whether the bucket was made of frozen parameters and one of them is trained by now."""
        return not self.spec.trainable and any(slot.param.requires_grad for slot in self.slots)

    def move_home(self, device: torch.device) -> None:
        """Move the parameters and their gradients to the home in the placement.

        No update of them is queued. Raises UnsupportedModel if a parameter was cast after its slot was made.
        """
        for slot in self.slots:
            slot.check_form()
        if self.is_away:
            slab = Slab(self._total_bytes, pin=self.pin)
            for slot, home in zip(self.slots, self._cut_slab(slab), strict=True):
                home.copy_(slot.own.detach())
                rehome(slot.param, home)
            self._params = slab
            self._address = self.flat_home().data_ptr()
            self.gathered = None
        else:
            for slot in self.slots:
                rehome(slot.param, on_device(slot.own.detach(), device))
            self._params = None
            self.gathered = tuple(slot.own.detach() for slot in self.slots)
        self.move_gradients(device)

    def move_gradients(self, device: torch.device) -> None:
        """Move gradients that came along with their parameters to the memory for gradients in the new home."""
        found = ((i, slot.param.grad) for i, slot in enumerate(self.slots))
        grads = [(i, own_shard(grad)) for i, grad in found if grad is not None and grad.layout is torch.strided]
        if self.is_away:
            moving = [(i, grad) for i, grad in grads if not is_slab_memory(grad.data_ptr())]
            buffers = self.gradient_buffers() if moving else ()
            for i, grad in moving:
                slot, is_sum = self.slots[i], grad.dtype != self.grad_dtype
                home = self.fp32_sum_buffer(slot) if is_sum else buffers[i]
                rehome_grad(slot.param, home.copy_(grad))
        else:
            for i, grad in grads:
                moved = on_device(grad, device)
                if moved is not grad:
                    rehome_grad(self.slots[i].param, moved)

    def has_drifted(self) -> bool:
        """Whether user code replaced the data of a parameter since `move_home`: `model.to(...)`, `param.data = ...`."""
        if self.is_away:
            return self._params is None or any(
                has_moved(slot.own, self._address + offset)
                for slot, offset in zip(self.slots, self._offsets_bytes, strict=True)
            )
        return self.gathered is None or any(
            has_moved(slot.own, t.data_ptr()) for slot, t in zip(self.slots, self.gathered, strict=True)
        )

    @property
    def flat_bytes(self) -> int:
        """The bytes of `flat_home`, and of a flat copy of it."""
        return self._total_bytes

    def flat_home(self) -> torch.Tensor:
        """Return the parameters in their home on the host as a single uint8 tensor, alignment gaps included."""
        assert self._params is not None, "only parameters whose home is the host have a slab"
        return self._params.tensor(torch.uint8, (self._total_bytes,), 0)

    def cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return for each parameter its view of `flat`, which is a copy of `flat_home`."""
        views = []
        for slot, offset in zip(self.slots, self._offsets_bytes, strict=True):
            own = slot.own
            piece = flat[offset : offset + slot.own_nbytes].view(own.dtype)
            views.append(piece.as_strided(own.shape, own.stride()))
        return tuple(views)

    def hold(self, copies: tuple[torch.Tensor, ...], versions: list[int]) -> None:
        """Store `copies` as the gathered copy; `versions` are the versions of the copied parameters."""
        self.gathered, self._gathered_versions = copies, versions

    def current_copy(self) -> tuple[torch.Tensor, ...] | None:
        """Return the parameters on the device if they have the same values as in their home, else None."""
        is_current = self.gathered is not None and (not self.is_gathered or self._gathered_versions == self.versions())
        return self.gathered if is_current else None

    def release(self) -> None:
        """Forget the gathered copy; parameters that are read in their home stay."""
        if self.is_gathered:
            self.gathered = None

    def gradient_buffers(self) -> tuple[torch.Tensor, ...]:
        """Return host tensors for the gradients, in bucket order.

        They share a slab, which is reused as soon as no tensor of it is alive.
        """
        # With gradient accumulation two slabs alternate. A new slab in each step would pin and unpin its pages.
        free = next((entry for entry in self._grads if all(reference() is None for reference in entry[1])), None)
        ratio = self._ratio(self.grad_dtype)
        if free is None:
            slab = Slab(ratio * self._total_bytes, pin=self.pin)
        else:
            self._grads.remove(free)
            slab = free[0]
        buffers = self._cut_slab(slab, self.grad_dtype, ratio)
        self._grads.append((slab, [weakref.ref(tensor.untyped_storage()) for tensor in buffers]))
        return buffers

    def fp32_sum_buffer(self, slot: Slot) -> torch.Tensor:
        """Return an uninitialized fp32 tensor for the sum of the gradients of the slot's parameter, in its home.

        On the host the same memory is reused as soon as no earlier tensor of it is alive.
        """
        if not self.is_away:
            return torch.empty_like(slot.own, dtype=torch.float32)
        last = self._totals.get(slot.key)
        slab = last[0] if last is not None and last[1]() is None else Slab(4 * slot.own.numel(), pin=self.pin)
        buffer = cut_slab(slab, [slot], [0], torch.float32)[0]
        self._totals[slot.key] = (slab, weakref.ref(buffer.untyped_storage()))
        return buffer

    def state_buffers(self, dtype: torch.dtype, block: int = 1) -> tuple[torch.Tensor, ...]:
        """Return zeroed host tensors in `dtype` for a statistic of the optimizer, one for each parameter.

        If `block` is 1, they have the shapes of the parameters; else each is flat, with a value for each `block`
        elements. With a value for each element, at least as large as the parameter's, each tensor starts at the same
        element of its slab as its parameter does in the slab of the parameters.
        """
        if block == 1 and dtype.itemsize % self.slots[0].param.dtype.itemsize == 0:
            ratio = self._ratio(dtype)
            return self._cut_slab(Slab(ratio * self._total_bytes, pin=self.pin), dtype, ratio)
        counts = [-(-slot.own.numel() // block) for slot in self.slots]
        ends_bytes = [*itertools.accumulate(aligned_bytes(count * dtype.itemsize) for count in counts)]
        slab, starts_bytes = Slab(ends_bytes[-1], pin=self.pin), [0, *ends_bytes[:-1]]
        if block == 1:
            return cut_slab(slab, self.slots, starts_bytes, dtype)
        return tuple(slab.tensor(dtype, (count,), start) for count, start in zip(counts, starts_bytes, strict=True))

    def host_tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a flat zeroed host tensor for a statistic that is not shaped like its parameter."""
        return Slab(numel * dtype.itemsize, pin=self.pin).tensor(dtype, (numel,), 0)

    def _ratio(self, dtype: torch.dtype | None) -> int:
        """Return the element size of `dtype` over the element size of the parameters."""
        return 1 if dtype is None else dtype.itemsize // self.slots[0].param.dtype.itemsize

    def versions(self) -> list[int]:
        """Return the versions of the parameters in bucket order."""
        return [slot.version for slot in self.slots]

    def _layout(self) -> tuple[tuple[int, ...], int]:
        """Return the offset of each parameter in a slab, and the size of the slab, all in bytes; buckets of several
        ranks have another layout."""
        *offsets, end = itertools.accumulate((aligned_bytes(slot.own_nbytes) for slot in self.slots), initial=0)
        return tuple(offsets), end

    def _cut_slab(self, slab: Slab, dtype: torch.dtype | None = None, ratio: int = 1) -> tuple[torch.Tensor, ...]:
        """Return a tensor for each parameter, in `dtype` with elements `ratio` times as large as the parameter's."""
        return cut_slab(slab, self.slots, [ratio * offset for offset in self._offsets_bytes], dtype)


def cut_slab(
    slab: Slab, slots: Sequence[Slot], offsets_bytes: Sequence[int], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Return a tensor for each slot, with the shape and strides of its parameter and a storage of its own in `slab`.

    The tensors have the dtype of their parameter if `dtype` is None.
    """
    tensors = []
    for slot, offset in zip(slots, offsets_bytes, strict=True):
        own = slot.own
        flat = slab.tensor(dtype or own.dtype, (own.numel(),), offset)
        tensors.append(flat.as_strided(own.shape, own.stride()))
    return tuple(tensors)


_KERNEL_ALIGN_BYTES = 16
"""The bytes that Inductor's kernels load at once. It checks the alignment of inputs, but not of parameters."""


def has_moved(own: torch.Tensor, address: int) -> bool:
    """Return whether the values of `own` are no longer those in memory at `address`."""
    return own.data_ptr() != address or compat.is_lazy(own)


def on_device(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `data` on `device`, in memory of torch's allocator: a copy if `data` is elsewhere, in a slab, at an
    address that kernels of an accelerator cannot load from, or if it has a lazy bit."""
    data = compat.settled(data)
    if data.device != device:
        return data.to(device)
    if data.device.type == "cpu":
        must_copy = is_slab_memory(data.data_ptr())
    else:
        must_copy = data.data_ptr() % _KERNEL_ALIGN_BYTES != 0
    return torch.empty_like(data, memory_format=torch.preserve_format).copy_(data) if must_copy else data
