"""A store for optimizer state too large for the host: regions of bytes in files, and the buffers of its transfers.

    store = DiskStore("/mnt/nvme")
    region = store.allocate("b3.exp_avg", nbytes)        raises DiskFull if the disk is full
    region.write_from(buffer).wait()
    region.read_into(buffer, offset_bytes)               a transfer in flight: wait() before the buffer is used

The files serve as memory and are no checkpoint. They are removed when the process ends; after `kill -9`, when the next
store in the same folder starts.

The host buffers between the disk and the optimizer are a ring:

    acquire -> read_into(...).wait() -> update -> release_after(write_from(...)) -> free again when written

They are cut from one slab, starting at a multiple of 2 MiB, because private huge pages were written to disk twice as
fast as shared pages.
"""

import os
import re
import threading
import weakref

import torch

from elixir_compile.base.errors import DiskFailed
from elixir_compile.ir.staging import HUGE_PAGE_BYTES
from elixir_compile.runtime.disk.disk_file import (
    DISK_BLOCK_BYTES,
    DISK_PAGE_BYTES,
    READ,
    WRITE,
    DiskFile,
    PrivateFolder,
)
from elixir_compile.runtime.disk.disk_queue import DiskQueue, DiskTransfer
from elixir_compile.runtime.slab import Slab

_NUM_THREADS = 4
"""Four threads of 4 MiB reached the rate of libaio and io_uring; eight were no faster."""


class DiskRegion:
    """`nbytes` of a store, at first zeros. Operations on the same bytes take effect in the order of their calls.

    After a failed write every later operation raises DiskFailed, because the bytes on disk may be a mix of old and new.
    """

    def __init__(self, store: "DiskStore", label: str, file: DiskFile, queue: DiskQueue) -> None:
        self.label = label
        self.nbytes = file.nbytes
        self._store = store  # keeps the store open: it closes when its last reference goes
        self.file = file
        self._queue = queue

    @property
    def path(self) -> str:
        """The file with the bytes."""
        return self.file.path

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.file.is_direct

    def read_into(self, buffer: torch.Tensor, offset_bytes: int = 0) -> DiskTransfer:
        """Start reading the bytes at `offset_bytes` into `buffer`; they are there when the transfer's `wait` returns.

        `buffer` must be contiguous uint8 on the host, at an address that is a multiple of `DISK_PAGE_BYTES`, in memory
        that no forked child shares, such as memory of `StagingBuffers`. Offset and size must be multiples of
        `DISK_BLOCK_BYTES`; the size may be any if it ends at the end of the region.

        Raises ValueError if a condition is not met, and DiskFailed as `DiskQueue.submit` does.
        """
        return self._begin(READ, buffer, offset_bytes)

    def write_from(self, buffer: torch.Tensor, offset_bytes: int = 0) -> DiskTransfer:
        """Start writing `buffer` at `offset_bytes`; `buffer` must not change before the transfer's `wait` returns.

        The conditions on arguments and the errors are those of `read_into`.
        """
        return self._begin(WRITE, buffer, offset_bytes)

    def _begin(self, operation: str, buffer: torch.Tensor, offset_bytes: int) -> DiskTransfer:
        view = buffer.detach().numpy().data
        end_bytes = offset_bytes + view.nbytes
        if view.format != "B" or not view.c_contiguous:
            raise ValueError(f"{self.label}: needs a contiguous uint8 buffer, got {view.format!r} of {view.shape}")
        if view.nbytes and buffer.data_ptr() % DISK_PAGE_BYTES:
            raise ValueError(f"{self.label}: needs a buffer at a multiple of {DISK_PAGE_BYTES}, as O_DIRECT does")
        is_whole = view.nbytes % DISK_BLOCK_BYTES == 0 or end_bytes == self.nbytes
        if offset_bytes < 0 or offset_bytes % DISK_BLOCK_BYTES or end_bytes > self.nbytes or not is_whole:
            raise ValueError(
                f"{self.label}: bytes {offset_bytes} to {end_bytes} of {self.nbytes} are not whole blocks of "
                f"{DISK_BLOCK_BYTES}"
            )
        view = view.cast("B") if view.nbytes else memoryview(b"")
        transfer = DiskTransfer(self.file, operation, view, offset_bytes, owner=self)
        self._queue.submit(transfer)
        return transfer


class DiskStore:
    """Regions in files, in a new folder of this process inside the existing folder `path`.

    With `check`, each block that is read is compared with the checksum of the block that was written; checksums take 4
    bytes of memory per block. `rank` is used in the name of the folder; None if one process trains the model.

    Raises DiskFailed if `path` does not exist or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], check: bool = False, rank: int | None = None) -> None:
        self._check = check
        self._folder = PrivateFolder(os.fspath(path), rank)
        self._files: list[DiskFile] = []
        self._num_named = 0
        self._queue = DiskQueue(_NUM_THREADS)
        self._lock = threading.Lock()
        # Runs at the latest when the interpreter exits. A reference to the store here would keep the store alive.
        self._finalizer = weakref.finalize(self, _close, self._queue, self._files, self._folder)

    @property
    def path(self) -> str:
        """The folder of this process."""
        return self._folder.path

    def allocate(self, label: str, nbytes: int) -> DiskRegion:
        """Return a region of `nbytes` zeros whose space on disk is allocated; `label` names it in errors.

        Raises DiskFull if the disk has too little space, and DiskFailed if the store is closed.
        """
        if nbytes < 0:
            raise ValueError(f"{label}: a region of {nbytes} bytes: needs 0 or more")
        with self._lock:
            if not self._finalizer.alive:
                raise DiskFailed(self.path, "allocation", "the store was closed")
            name = f"{self._num_named:04d}-{re.sub(r'[^A-Za-z0-9_.-]', '_', label)[:80]}"
            self._num_named += 1
            file = DiskFile(os.path.join(self.path, name), label, nbytes, check=self._check)
            self._files.append(file)
        return DiskRegion(self, label, file, self._queue)

    def free(self, region: DiskRegion) -> None:
        """Free the disk space of `region`. No transfer of it may be in flight; later operations on it fail."""
        with self._lock:
            if region.file in self._files:
                self._files.remove(region.file)
                region.file.close()
                os.unlink(region.path)

    def close(self) -> None:
        """Fail transfers in flight, end the threads and remove the files. Does nothing on a second call."""
        with self._lock:
            self._finalizer()


def _close(queue: DiskQueue, files: list[DiskFile], folder: PrivateFolder) -> None:
    if queue.is_worker():  # the last transfer held the last reference to the store, and a thread cannot join itself
        threading.Thread(target=_close, args=(queue, files, folder), daemon=True).start()
        return
    # A thread stuck in the kernel still uses its descriptor; after a close its bytes could go to another file.
    if queue.close():
        for file in files:
            file.close()
    folder.remove()


class StagingBuffer:
    """A buffer of a ring, held by the thread of its `acquire`; as a context manager it releases itself at the end."""

    def __init__(self, ring: "StagingBuffers", tensor: torch.Tensor) -> None:
        self.tensor = tensor
        """A uint8 tensor of the ring's `nbytes`."""
        self._ring = ring

    def release(self) -> None:
        """Give the buffer back to the ring. Does nothing after an earlier `release` or `release_after`."""
        self._ring._release(self)

    def release_after(self, transfer: DiskTransfer) -> None:
        """Give the buffer back to the ring when `transfer` is done.

        If the transfer fails, the buffer stays taken, because it has the only copy of its bytes, and `acquire` raises
        the exception of the transfer from then on. Raises ValueError if the buffer was given back already.
        """
        self._ring._release_after(self, transfer)

    def __enter__(self) -> "StagingBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StagingBuffers:
    """`num_buffers` buffers of `nbytes` each, at addresses that O_DIRECT accepts."""

    def __init__(self, num_buffers: int, nbytes: int, *, pin: bool = False) -> None:
        if num_buffers < 1 or nbytes < 0:
            raise ValueError(
                f"{num_buffers} staging buffers of {nbytes} bytes: needs at least 1 buffer of 0 bytes or more"
            )
        self.num_buffers = num_buffers
        self.nbytes = nbytes
        unit_bytes = DISK_PAGE_BYTES if nbytes < HUGE_PAGE_BYTES else HUGE_PAGE_BYTES
        stride_bytes = max(-(-nbytes // unit_bytes), 1) * unit_bytes
        slab = Slab(num_buffers * stride_bytes + unit_bytes, pin=pin)
        slab.keep_from_children()
        first_bytes = -slab.tensor(torch.uint8, (1,), 0).data_ptr() % unit_bytes
        self._free = [
            slab.tensor(torch.uint8, (nbytes,), first_bytes + index * stride_bytes) for index in range(num_buffers)
        ]
        self._held: dict[StagingBuffer, int] = {}
        self._returning: set[StagingBuffer] = set()
        self._waiting: set[int] = set()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def acquire(self) -> StagingBuffer:
        """Return a free buffer, which holds the bytes of its last use; wait if all buffers are taken.

        Raises RuntimeError if every thread with a buffer waits here as well. Raises the exception of a failed transfer
        that `release_after` got.
        """
        me = threading.get_ident()
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._free:
                    break
                if not self._returning and set(self._held.values()) <= self._waiting | {me}:
                    num_mine = sum(holder == me for holder in self._held.values())
                    raise RuntimeError(
                        f"this thread holds {num_mine} of {self.num_buffers} staging buffers and asks for one more, "
                        f"and no other thread is left to release one. Release a buffer first, or make more of them."
                    )
                self._waiting.add(me)
                try:
                    self._changed.wait()
                finally:
                    self._waiting.discard(me)
            buffer = StagingBuffer(self, self._free.pop())
            self._held[buffer] = me
            return buffer

    def try_acquire(self) -> StagingBuffer | None:
        """Return a free buffer, which holds the bytes of its last use, or None if all buffers are taken."""
        with self._changed:
            if self._failure is not None or not self._free:
                return None
            buffer = StagingBuffer(self, self._free.pop())
            self._held[buffer] = threading.get_ident()
            return buffer

    def _release(self, buffer: StagingBuffer) -> None:
        with self._changed:
            if buffer in self._held and buffer not in self._returning:
                self._free_again(buffer)

    def _release_after(self, buffer: StagingBuffer, transfer: DiskTransfer) -> None:
        with self._changed:
            if buffer not in self._held or buffer in self._returning:
                raise ValueError("this staging buffer was given back already")
            self._returning.add(buffer)
        transfer.then(lambda done: self._returned(buffer, done))

    def _returned(self, buffer: StagingBuffer, transfer: DiskTransfer) -> None:
        with self._changed:
            if transfer.error is None:
                self._returning.discard(buffer)
                self._free_again(buffer)
            else:
                self._failure = transfer.error
                self._changed.notify_all()

    def _free_again(self, buffer: StagingBuffer) -> None:
        del self._held[buffer]
        self._free.append(buffer.tensor)
        self._changed.notify_all()
