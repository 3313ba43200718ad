"""A store for optimizer state too large for the host: regions of bytes in files.

    store = DiskStore("/mnt/nvme")
    region = store.allocate("b3.exp_avg", nbytes)        raises DiskFull if the disk is full
    region.write_from(buffer).wait()
    region.read_into(buffer, offset_bytes)               a transfer in flight: wait() before the buffer is used

The files serve as memory and are no checkpoint. They are removed when the process ends; after `kill -9`, when the next
store in the same folder starts.
"""

import os
import re
import threading
import weakref
from typing import TYPE_CHECKING

from elixir_compile.errors import DiskFailed
from elixir_compile.runtime.disk.disk_file import (
    DISK_BLOCK_BYTES,
    DISK_PAGE_BYTES,
    READ,
    WRITE,
    DiskFile,
    PrivateFolder,
)
from elixir_compile.runtime.disk.disk_queue import DiskQueue, DiskTransfer

if TYPE_CHECKING:
    import torch

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

    def read_into(self, buffer: "torch.Tensor", offset_bytes: int = 0) -> DiskTransfer:
        """Start reading the bytes at `offset_bytes` into `buffer`; they are there when the transfer's `wait` returns.

        `buffer` must be contiguous uint8 on the host, at an address that is a multiple of `DISK_PAGE_BYTES`, in memory
        that no forked child shares, such as memory of `StagingBuffers`. Offset and size must be multiples of
        `DISK_BLOCK_BYTES`; the size may be any if it ends at the end of the region.

        Raises ValueError if a condition is not met, and DiskFailed as `DiskQueue.submit` does.
        """
        return self._begin(READ, buffer, offset_bytes)

    def write_from(self, buffer: "torch.Tensor", offset_bytes: int = 0) -> DiskTransfer:
        """Start writing `buffer` at `offset_bytes`; `buffer` must not change before the transfer's `wait` returns.

        The conditions on arguments and the errors are those of `read_into`.
        """
        return self._begin(WRITE, buffer, offset_bytes)

    def _begin(self, operation: str, buffer: "torch.Tensor", offset_bytes: int) -> DiskTransfer:
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
