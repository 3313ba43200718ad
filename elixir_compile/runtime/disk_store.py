"""A store for what is too large for the host: regions of bytes in files, and the staging buffers through which pieces
are read ahead and written behind.
"""

import contextlib
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import distributed

from elixir_compile.base.errors import DiskFailed
from elixir_compile.ir import BucketRef, InnerVerb, Lane, StateRef, label
from elixir_compile.ir.cost import HUGE_PAGE_BYTES
from elixir_compile.runtime.bucket import Slab
from elixir_compile.runtime.disk_file import (
    DISK_BLOCK_BYTES,
    DISK_PAGE_BYTES,
    READ,
    WRITE,
    DiskFile,
    DiskQueue,
    DiskTransfer,
    PrivateFolder,
)
from elixir_compile.runtime.recording import Ledger

# ----------------------------------------------------------------------------------------------------------------------
# A store for what is too large for the host: regions of bytes in files, and the buffers of its transfers.
#
#     store = DiskStore("/mnt/nvme")
#     region = store.allocate("b3.exp_avg", nbytes)        raises DiskFull if the disk is full
#     region.write_from(buffer).wait()
#     region.read_into(buffer, offset_bytes)               a transfer in flight: wait() before the buffer is used
#
# The files serve as memory and are no checkpoint. They are removed when the process ends; after `kill -9`, when the
# next store in the same folder starts.


_NUM_THREADS = 4
"""Four threads of 4 MiB reached the rate of libaio and io_uring; eight were no faster."""


class DiskRegion:
    """`nbytes` of a store, at first zeros. Operations on the same bytes take effect in the order of their calls.

    After a failed write every later operation raises DiskFailed, because the bytes on disk may be a mix of old and new.
    """

    def __init__(self, store: object, label: str, file: DiskFile, queue: DiskQueue, unit_bytes: int) -> None:
        """`store` closes the file when its last reference goes; offsets and sizes are multiples of `unit_bytes`."""
        self.label = label
        self.nbytes = file.nbytes
        self.unit_bytes = unit_bytes
        self.store = store
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
        that no forked child shares, such as `staging_buffers`. Offset and size must be multiples of `unit_bytes`; the
        size may be any if it ends at the end of the region.

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
        is_whole = view.nbytes % self.unit_bytes == 0 or end_bytes == self.nbytes
        if offset_bytes < 0 or offset_bytes % self.unit_bytes or end_bytes > self.nbytes or not is_whole:
            raise ValueError(
                f"{self.label}: bytes {offset_bytes} to {end_bytes} of {self.nbytes} are not whole blocks of "
                f"{self.unit_bytes}"
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
        self._finalizer = weakref.finalize(self, _end, self._queue, self._files, self._folder)

    @property
    def path(self) -> str:
        """The folder of this process."""
        return self._folder.path

    @property
    def is_closed(self) -> bool:
        """Whether the files are gone."""
        return not self._finalizer.alive

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
        return DiskRegion(self, label, file, self._queue, DISK_BLOCK_BYTES)

    def free(self, file: DiskFile) -> None:
        """Free the disk space of a region's `file`. None of its transfers may be in flight; later ones fail."""
        with self._lock:
            if file in self._files:
                self._files.remove(file)
                file.close()
                with contextlib.suppress(FileNotFoundError):  # somebody else may have removed it
                    os.unlink(file.path)

    def close(self) -> None:
        """Fail transfers in flight, end the threads and remove the files. Does nothing on a second call."""
        with self._lock:
            self._finalizer()


_stores: "weakref.WeakValueDictionary[tuple[str, bool], DiskStore]" = weakref.WeakValueDictionary()
_open_files: "weakref.WeakValueDictionary[tuple[int, int], DiskRegion]" = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def store_at(path: str | os.PathLike[str], *, check: bool) -> DiskStore:
    """Return the store of this process in the folder `path`; all whose reads are checked alike share it.

    Raises DiskFailed as `DiskStore` does.
    """
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None
    key = os.path.abspath(path), check
    with _shared_lock:
        found = _stores.get(key)
        if found is None or found.is_closed:
            found = _stores[key] = DiskStore(path, check=check, rank=rank)
        return found


class _Reader:
    """The threads that read files of others; they end with the last region of such a file."""

    def __init__(self) -> None:
        self.queue = DiskQueue(_NUM_THREADS)
        self.files: list[DiskFile] = []
        weakref.finalize(self, _end, self.queue, self.files)


def open_file(path: str) -> DiskRegion:
    """Return the bytes of the existing file `path` as a region that is only read, in units of `DISK_PAGE_BYTES`.

    Raises DiskFailed if the file cannot be read.
    """
    file = DiskFile.opened(path)
    with _shared_lock:
        found = _open_files.get(file.identity)
        if found is not None:
            file.close()
            return found
        reader = next((region.store for region in _open_files.values()), None)
        reader = reader if isinstance(reader, _Reader) else _Reader()
        reader.files.append(file)
        region = _open_files[file.identity] = DiskRegion(reader, path, file, reader.queue, DISK_PAGE_BYTES)
        return region


def _end(queue: DiskQueue, files: list[DiskFile], folder: PrivateFolder | None = None) -> None:
    if queue.is_worker():  # the last transfer held the last reference to the store, and a thread cannot join itself
        threading.Thread(target=_end, args=(queue, files, folder), daemon=True).start()
        return
    # A thread stuck in the kernel still uses its descriptor; after a close its bytes could go to another file.
    if queue.close():
        for file in files:
            file.close()
    if folder is not None:
        folder.remove()


def staging_buffers(num_buffers: int, nbytes: int, *, pin: bool = False) -> list[torch.Tensor]:
    """Return `num_buffers` uint8 tensors of `nbytes` on the host, at addresses that O_DIRECT accepts, in memory that no
    forked child shares.

    They are cut from one slab, starting at a multiple of 2 MiB, because private huge pages were written to disk twice
    as fast as shared pages. With `pin`, an accelerator copies from them beside compute. Raises ValueError without a
    buffer, or for a negative size.
    """
    if num_buffers < 1 or nbytes < 0:
        raise ValueError(f"{num_buffers} staging buffers of {nbytes} bytes: needs at least 1 buffer of 0 bytes or more")
    unit_bytes = DISK_PAGE_BYTES if nbytes < HUGE_PAGE_BYTES else HUGE_PAGE_BYTES
    stride_bytes = max(-(-nbytes // unit_bytes), 1) * unit_bytes
    slab = Slab(num_buffers * stride_bytes + unit_bytes, pin=pin)
    slab.keep_from_children()
    first_bytes = -slab.tensor(torch.uint8, (1,), 0).data_ptr() % unit_bytes
    return [slab.tensor(torch.uint8, (nbytes,), first_bytes + index * stride_bytes) for index in range(num_buffers)]


# ----------------------------------------------------------------------------------------------------------------------
# Read pieces of disk regions ahead of their use, and write them behind it, through a ring of staging buffers.
#
#     announce   piece 0    piece 1    piece 2    ...         in the order in which they will be taken
#     disk       |-read 0-|-read 1-|-read 2-|-write 0-|       as far ahead as there are buffers
#     take             |== 0 ==|== 1 ==|== 2 ==|
#
# The announced order is only a hint. If a piece is taken out of order its buffer may serve another piece first, and the
# piece is read again: this costs time and changes no result.


Done = Callable[[BaseException | None], object]
"""Called when a write is done, on a worker of the disk queue, with the exception of the write or None. It must not
raise."""


class Piece:
    """Elements `start` to `end` of several regions, one after another in one buffer while they are read in."""

    def __init__(self, columns: Sequence[tuple[DiskRegion, int, int]], start: int, end: int, stride: int) -> None:
        """`columns` holds each region with the bytes of a value and the elements for which there is a value, a divisor
        of `start`. In the buffer each region has space for `stride` elements: at least `end - start`, and a whole
        number of pages in every region."""
        self.columns = tuple(columns)
        self.start = start
        self.end = end
        self._stride = stride
        self.buffer: torch.Tensor | None = None
        self.reads: tuple[DiskTransfer, ...] = ()
        self.begins: Callable[[InnerVerb], Callable[[], object]] = lambda verb: lambda: None
        """Begins to time a read or a write, and returns the function that ends it, which any thread may call."""

    def time_in(self, ledger: Ledger, target: StateRef | BucketRef, nbytes: int, number: int) -> None:
        """Let `ledger` time the reads and writes of this piece, `nbytes` of `target`, of which it has `number`."""
        self.begins = lambda verb: ledger.begin(Lane.DISK, label(verb, target), nbytes, piece=number)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return for each region its part of `buffer`, as uint8."""
        found, at_bytes = [], 0
        for _, size_bytes, block in self.columns:
            num_values = -(-(self.end - self.start) // block)
            found.append(buffer[at_bytes : at_bytes + num_values * size_bytes])
            at_bytes += self._stride // block * size_bytes
        return found

    def transfers(self, buffer: torch.Tensor) -> Iterator[tuple[DiskRegion, torch.Tensor, int]]:
        """Yield each region, its part of `buffer`, and the offset of this part in the region, in bytes."""
        for (region, size_bytes, block), view in zip(self.columns, self.views(buffer), strict=True):
            yield region, view, self.start // block * size_bytes


class ReadAhead:
    """A ring of `num_buffers` buffers of `nbytes`, and the pieces announced, read, used or written in it."""

    def __init__(self, num_buffers: int, nbytes: int, *, pin: bool = False) -> None:
        self.nbytes = nbytes
        self._free = staging_buffers(num_buffers, nbytes, pin=pin)
        self._announced: deque[Piece] = deque()
        self._num_writing = 0
        self._num_waiting = 0
        self._num_taken = 0
        """The number of buffers that are read into, used, or written from."""
        self._pid = os.getpid()
        # Re-entrant: a transfer that is done already runs its callback at once, on this thread.
        self._changed = threading.Condition(threading.RLock())

    def announce(self, pieces: Iterable[Piece]) -> None:
        """Read `pieces` as soon as buffers are free, after all pieces announced before."""
        with self._changed:
            self._announced.extend(pieces)
            self._read_on()

    def take(self, piece: Piece) -> list[torch.Tensor]:
        """Return the bytes of `piece`, one uint8 tensor per region, for use until `give_back` or `write`.

        If reading the bytes failed, gives the piece back and raises the exception.
        """
        if os.getpid() != self._pid:
            paths = ", ".join(region.path for region, *_ in piece.columns)
            raise DiskFailed(paths, "read", "the store belongs to the parent process")
        with self._changed:
            if piece in self._announced:
                # Earlier pieces were never taken, because their update failed or was dropped.
                while (earlier := self._announced.popleft()) is not piece:
                    self._drop(earlier)
            buffer = piece.buffer
            if buffer is None:  # read it into the next free buffer, which the last announced piece may have
                self._num_waiting += 1  # keeps `_read_on` from taking that buffer
                try:
                    while (buffer := self._acquire()) is None:
                        last = next((other for other in reversed(self._announced) if other.buffer is not None), None)
                        if last is None:
                            self._changed.wait()
                        else:
                            self._announced.remove(last)
                            self._drop(last)
                finally:
                    self._num_waiting -= 1
                self._begin(piece, buffer)
        try:
            for read in piece.reads:
                read.wait()
        except BaseException:
            self.give_back(piece)
            raise
        return piece.views(buffer)

    def give_back(self, piece: Piece) -> None:
        """Free the buffer of `piece`, which was taken, without writing it: changes to its bytes are lost."""
        with self._changed:
            self._drop(piece)
            self._read_on()

    def write(self, piece: Piece, done: Done) -> None:
        """Start writing the bytes of `piece`, which was taken; call `done` when they are written.

        The bytes must not change from this call on. Raises ValueError if the piece was not taken, or was given back.
        """
        writes: list[DiskTransfer] = []
        failure: BaseException | None = None
        # The lock is held until all writes are submitted. Else a worker of the disk queue that frees a buffer could
        # read the piece, if it is announced again, after the write of one region and before the write of the next.
        with self._changed:
            buffer, piece.buffer, piece.reads = piece.buffer, None, ()
            if buffer is None:
                raise ValueError("cannot write a piece that was not taken, or that was given back")
            self._num_writing += 1
            end = piece.begins(InnerVerb.WRITE)
            try:
                for region, view, start_bytes in piece.transfers(buffer):
                    writes.append(region.write_from(view, start_bytes))
            except BaseException as error:
                failure = error

        def written() -> None:
            end()
            done(failure or next((write.error for write in writes if write.error is not None), None))
            with self._changed:
                self._num_writing -= 1
                self._release(buffer)

        _when_done(writes, written)

    def wait_for_writes(self) -> None:
        """Wait until no write is in flight."""
        with self._changed:
            # In a forked child the threads of the disk queue do not exist, so no write would ever end.
            self._changed.wait_for(lambda: self._num_writing == 0 or os.getpid() != self._pid)

    def stop(self) -> None:
        """Drop all announced pieces, and wait until no piece is read, used or written."""
        with self._changed:
            while self._announced:
                self._drop(self._announced.popleft())
            self._changed.wait_for(lambda: self._num_taken == 0 or os.getpid() != self._pid)

    def _acquire(self) -> torch.Tensor | None:
        """Return a free buffer, which holds the bytes of its last use, or None if all buffers are taken."""
        if not self._free:
            return None
        self._num_taken += 1
        return self._free.pop()

    def _release(self, buffer: torch.Tensor, *, reads_on: bool = True) -> None:
        """Make `buffer` free again, and, if `reads_on`, read the next announced piece into it."""
        with self._changed:
            self._free.append(buffer)
            self._num_taken -= 1
            self._changed.notify_all()
            if reads_on:
                self._read_on()

    def _read_on(self) -> None:
        """Start reading announced pieces, in order, while buffers are free."""
        if self._num_waiting:
            return
        for piece in self._announced:
            if piece.buffer is not None:
                continue
            buffer = self._acquire()
            if buffer is None:
                return
            try:
                self._begin(piece, buffer)
            except BaseException:  # `take` reads the piece again and raises its exception then
                return

    def _begin(self, piece: Piece, buffer: torch.Tensor) -> None:
        reads: list[DiskTransfer] = []
        end = piece.begins(InnerVerb.READ)
        try:
            for region, view, start_bytes in piece.transfers(buffer):
                reads.append(region.read_into(view, start_bytes))
        except BaseException:
            _when_done(reads, lambda: self._release(buffer, reads_on=False))
            raise
        finally:
            _when_done(reads, end)
        piece.buffer, piece.reads = buffer, tuple(reads)

    def _drop(self, piece: Piece) -> None:
        """Free the buffer of `piece`, if it has one, once its reads are done."""
        buffer, reads, piece.buffer, piece.reads = piece.buffer, piece.reads, None, ()
        if buffer is not None:
            _when_done(reads, lambda: self._release(buffer))


def _when_done(transfers: Sequence[DiskTransfer], call: Callable[[], object]) -> None:
    """Call `call` once, when all `transfers` are done or failed, on the thread of the last; now if there are none."""
    if not transfers:
        call()
        return
    lock, left = threading.Lock(), len(transfers)

    def one_done(_: DiskTransfer) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            call()

    for transfer in transfers:
        transfer.then(one_done)
