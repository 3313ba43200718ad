"""Preallocated files whose blocks are read and overwritten in place, and the worker threads that run reads and writes
of many files at the same time.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import re
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable

from elixir_compile.base.errors import DiskCorrupted, DiskFailed, DiskFull, FrozenFileChanged
from elixir_compile.ir.cost import DISK_BLOCK_BYTES
from elixir_compile.runtime.bucket import Slab

# ----------------------------------------------------------------------------------------------------------------------
# Preallocated files whose blocks are read and overwritten in place, and the folder for the files of one process.


_LOCK = ".lock"
_LOCK_NAME = re.compile(r"elixir-disk-(rank\d+-)?\d+-[0-9a-f]{8}\.lock")


class PrivateFolder:
    """A new, empty folder inside `parent`; folders that dead processes left in `parent` are removed first.

    Raises DiskFailed if `parent` does not exist or cannot be written. `parent` is never created, because if its disk is
    not mounted the files would silently go to another disk.
    """

    def __init__(self, parent: str, rank: int | None = None) -> None:
        """`rank` is the rank of this process, used in the folder's name; None if one process trains the model."""
        self._pid = os.getpid()
        parent = os.path.abspath(parent)  # the process may change its directory before the folder is removed
        try:
            for name in filter(_LOCK_NAME.fullmatch, os.listdir(parent)):
                path = os.path.join(parent, name)
                # On an error the lock is gone, is in use, or belongs to another user: leave the folder.
                with contextlib.suppress(OSError), open(path, "r+b") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.removesuffix(_LOCK), ignore_errors=True)
                    os.unlink(path)
            self._lock_fd, self._lock_path = _make_lock(parent, "" if rank is None else f"rank{rank}-")
            self.path = self._lock_path.removesuffix(_LOCK)
            os.mkdir(self.path, 0o700)
        except OSError as error:
            because = os.strerror(error.errno or 0)
            raise DiskFailed(parent, "new folder", because, error.errno or 0) from error

    def remove(self) -> None:
        """Remove the folder with its files. Does nothing on a second call, and in a forked child."""
        if self._lock_fd < 0 or os.getpid() != self._pid:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # the user may have removed it
            os.unlink(self._lock_path)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _make_lock(parent: str, prefix: str) -> tuple[int, str]:
    while True:
        path = os.path.join(parent, f"elixir-disk-{prefix}{os.getpid()}-{secrets.token_hex(4)}{_LOCK}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.fstat(fd).st_nlink > 0
        except BlockingIOError:
            is_ours = False
        except OSError:  # a filesystem without locks, such as some Lustre: no process can find the folder stale there
            is_ours = True
        if is_ours:
            return fd, path
        os.close(fd)  # a process that started meanwhile found this lock stale before we held it: try again


DISK_PAGE_BYTES = 4096
"""O_DIRECT takes addresses, offsets and sizes that are multiples of the device's logical block: at most 4096 bytes."""

READ = "read"
WRITE = "write"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only; elsewhere 0 sets no flag, and reads and writes are buffered


class DiskFile:
    """A new file at `path` with `nbytes` zeros, whose space on disk is allocated at once.

    `label` names the file in errors. With `check`, the checksum of each block is kept in memory when the block is
    written, and compared when the block is read.

    Raises DiskFull if the filesystem, a quota or a limit of the process has too little space, and DiskFailed for other
    errors.
    """

    def __init__(self, path: str, label: str, nbytes: int, *, check: bool) -> None:
        whole, rest_bytes = divmod(nbytes if check else 0, DISK_BLOCK_BYTES)
        sums = [zlib.crc32(bytes(DISK_BLOCK_BYTES))] * whole if whole else []
        sums += [zlib.crc32(bytes(rest_bytes))] if rest_bytes else []
        self._take(path, nbytes, _preallocate(path, label, whole_pages_bytes(nbytes)), sums if check else None)

    @classmethod
    def opened(cls, path: str) -> "DiskFile":
        """Return the existing file `path`, which is only read. Raises DiskFailed if it cannot be opened."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskFailed(path, "open", os.strerror(error.errno or 0), error.errno or 0) from error
        self = cls.__new__(cls)
        self._take(path, os.fstat(fd).st_size, fd, None)
        self._before = _fingerprint(fd)
        return self

    def _take(self, path: str, nbytes: int, fd: int, checksums: list[int] | None) -> None:
        self.path = path
        self.nbytes = nbytes
        self.failure: DiskFailed | None = None
        self._checksums = checksums
        self._fd = fd
        self._before: tuple[int, ...] | None = None
        """What `check_unchanged` compares; None for a file that nobody else writes."""
        self.is_direct = _set_direct(fd, True)
        """Whether reads and writes bypass the page cache; False if the filesystem refused O_DIRECT."""

    @property
    def identity(self) -> tuple[int, int]:
        """The device and the inode of the file."""
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino

    def check_unchanged(self) -> None:
        """Raise FrozenFileChanged if somebody wrote to a file that was opened to be read."""
        if self._before is not None and _fingerprint(self._fd) != self._before:
            raise FrozenFileChanged(self.path)

    def check_whole(self, operation: str) -> None:
        """Raise DiskFailed, which names `operation`, if somebody truncated the file: a write behind its end would fill
        what is gone with zeros, and a read of its mapping would kill the process."""
        end_bytes = os.fstat(self._fd).st_size
        if end_bytes < self.nbytes:
            because = f"the file ends at byte {end_bytes}, expected {self.nbytes}: somebody truncated it"
            raise DiskFailed(self.path, operation, because, errno.EIO)

    def map(self) -> Slab:
        """Return a mapping of the whole file as host memory: reads see earlier writes, and writes reach later reads."""
        return Slab(whole_pages_bytes(self.nbytes), pin=False, file=self._fd)

    def close(self) -> None:
        """Close the file. No thread may be reading or writing it, because the descriptor may soon name another file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def move(self, operation: str, block: memoryview, offset_bytes: int, page: memoryview) -> None:
        """Read or write `block` at `offset_bytes`, a multiple of `DISK_BLOCK_BYTES`; `operation` is READ or WRITE.

        `page` is scratch memory of `DISK_PAGE_BYTES`. Raises DiskFailed if the operation fails, and DiskCorrupted if
        the checksum of a read block differs from its checksum when it was written.
        """
        if operation == WRITE:
            self.check_whole(operation)
        index = offset_bytes // DISK_BLOCK_BYTES
        tail_bytes = len(block) % DISK_PAGE_BYTES
        tail_start = len(block) - tail_bytes
        if tail_bytes and operation == WRITE:
            page[:] = bytes(DISK_PAGE_BYTES)
            page[:tail_bytes] = block[tail_start:]
        # Computed before the write: if the caller changes the buffer during the write, the next read finds it.
        checksum = zlib.crc32(block) if self._checksums is not None and operation == WRITE else 0
        parts = [part for part in (block[:tail_start], page if tail_bytes else page[:0]) if len(part)]
        # A file that was opened to be read may end inside of a page.
        needed_bytes = len(block) if operation == READ else sum(map(len, parts))
        self._move_parts(operation, parts, offset_bytes, needed_bytes)
        if operation == READ and tail_bytes:
            block[tail_start:] = page[:tail_bytes]
        if self._checksums is None:
            return
        if operation == WRITE:
            self._checksums[index] = checksum
        elif zlib.crc32(block) != self._checksums[index]:
            raise DiskCorrupted(self.path, index, DISK_BLOCK_BYTES)

    def _move_parts(self, operation: str, parts: list[memoryview], offset_bytes: int, needed_bytes: int) -> None:
        call = os.preadv if operation == READ else os.pwritev
        start_bytes, size_bytes = offset_bytes, sum(map(len, parts))
        while offset_bytes < start_bytes + needed_bytes:
            was_direct = self.is_direct  # read before the call, because another worker may change it during the call
            try:
                moved_bytes = call(self._fd, parts, offset_bytes)
            except OSError as error:
                # EINVAL: the filesystem accepts the flag and refuses the call, or a short transfer ended inside a page.
                if error.errno == errno.EINVAL and was_direct:
                    _set_direct(self._fd, False)
                    self.is_direct = False
                    continue
                raise DiskFailed(self.path, operation, os.strerror(error.errno or 0), error.errno or 0) from error
            if moved_bytes == 0:
                end = f"the file ends at byte {offset_bytes}, expected {start_bytes + needed_bytes}"
                raise DiskFailed(self.path, operation, end, errno.EIO)
            offset_bytes += moved_bytes
            while parts and moved_bytes >= len(parts[0]):
                moved_bytes -= len(parts.pop(0))
            if moved_bytes:
                parts[0] = parts[0][moved_bytes:]
        if operation == READ and not self.is_direct:
            # Otherwise the page cache would hold the state a second time, without use: it is read once per step.
            os.posix_fadvise(self._fd, start_bytes, size_bytes, os.POSIX_FADV_DONTNEED)


def _fingerprint(fd: int) -> tuple[int, ...]:
    """Return numbers that change if the open file is written to; not if another takes its name."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def whole_pages_bytes(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages, which is the size of a file for `nbytes`."""
    return -(-nbytes // DISK_PAGE_BYTES) * DISK_PAGE_BYTES


def scratch_page() -> memoryview:
    """Return an aligned page of memory that forked children do not share; see `Slab.keep_from_children`."""
    page = mmap.mmap(-1, DISK_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        page.madvise(mmap.MADV_DONTFORK)
    return memoryview(page)


def _preallocate(path: str, label: str, nbytes: int) -> int:
    """Return the descriptor of a new file of `nbytes` zeros; remove the file if the allocation fails."""
    folder = os.path.dirname(path)
    free_bytes, fd = 0, -1
    try:
        disk = os.statvfs(folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if nbytes > free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)  # new extents read as zeros
    except OSError as error:
        if fd >= 0:
            os.close(fd)
            os.unlink(path)
        because = os.strerror(error.errno or 0)
        if error.errno in _FULL:
            raise DiskFull(folder, label, nbytes, free_bytes, because) from error
        raise DiskFailed(path, "allocation", because, error.errno or 0) from error
    return fd


def _set_direct(fd: int, is_direct: bool) -> bool:
    """Set or clear O_DIRECT on an open file; return whether it is set now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if is_direct else flags & ~_O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return is_direct and bool(_O_DIRECT)


# ----------------------------------------------------------------------------------------------------------------------
# Run reads and writes of many files at the same time, block by block, on a few worker threads.
#
#     submit --> (waits for earlier transfers of the same bytes) --> blocks --> workers --> done
#
# Two transfers run in the order of their submission if they share bytes and at least one of them writes; other
# transfers run side by side. So a read sees an earlier write, and pieces of a region are read and written at the same
# time.


_CLOSED = "the store was closed"
_JOIN_S = 5.0
"""How long `close` waits for the threads. At most four blocks are in flight then, which take milliseconds unless the
disk is gone."""


class DiskTransfer:
    """A read or a write in flight."""

    def __init__(self, file: DiskFile, operation: str, view: memoryview, offset_bytes: int, owner: object) -> None:
        """`view` is the buffer: its bytes move to or from `offset_bytes` of `file`; `owner` is kept alive meanwhile."""
        self.file = file
        self.operation = operation
        self.view: memoryview | None = view
        self.owner: object = owner
        self.start_bytes = offset_bytes
        self.end_bytes = offset_bytes + len(view)
        self.error: BaseException | None = None
        self.num_before = 0
        self.num_blocks_left = 0
        self.later: list[DiskTransfer] = []
        self._done = threading.Event()
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[DiskTransfer], object]] = []

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the transfer is done. Raises DiskFailed or DiskCorrupted if it failed."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def then(self, callback: "Callable[[DiskTransfer], object]") -> None:
        """Call `callback(self)` on a worker when the transfer is done, or now if it is done; it must not raise."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self) -> None:
        """Drop the references to buffer and owner, wake waiting threads, and run callbacks; the queue calls this."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
            self.view = self.owner = None
            self._done.set()
        for callback in callbacks:
            callback(self)

    def is_before(self, other: "DiskTransfer") -> bool:
        """Whether `other`, which was submitted later, has to wait for this transfer."""
        if self.file is not other.file or WRITE not in (self.operation, other.operation):
            return False
        return self.start_bytes < other.end_bytes and other.start_bytes < self.end_bytes


class DiskQueue:
    """`num_threads` daemon threads, which move the blocks of submitted transfers."""

    def __init__(self, num_threads: int) -> None:
        # Re-entrant: a garbage collection inside a locked section may close a store without references.
        self._lock = threading.RLock()
        self._unfinished: set[DiskTransfer] = set()
        self._blocks: queue.SimpleQueue[tuple[DiskTransfer, int] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._serve, name=f"elixir-disk-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: DiskTransfer) -> None:
        """Start `transfer`, after earlier transfers of the same bytes.

        Raises DiskFailed if an earlier write of the file failed, if the queue is closed, or in a forked child.
        """
        if os.getpid() != self._pid:
            raise DiskFailed(transfer.file.path, transfer.operation, "the store belongs to the parent process")
        with self._lock:
            refusal = self._refusal(transfer)
            if refusal is not None:
                raise refusal.renewed()
            for earlier in self._unfinished:
                if earlier.is_before(transfer):
                    earlier.later.append(transfer)
                    transfer.num_before += 1
            self._unfinished.add(transfer)
            is_running = transfer.num_before > 0 or self._start(transfer)
        if not is_running:
            self._finish(transfer)

    def close(self) -> bool:
        """Fail all unfinished transfers and end the threads; return whether all threads ended within `_JOIN_S`."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for transfer in self._unfinished:
                    transfer.error = transfer.error or DiskFailed(transfer.file.path, transfer.operation, _CLOSED)
                for _ in self._threads:
                    self._blocks.put(None)
        end_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        with self._lock:
            left, self._unfinished = self._unfinished, set()
        for transfer in left:
            transfer.finish()
        return not any(thread.is_alive() for thread in self._threads)

    def is_worker(self) -> bool:
        """Whether the calling thread is a worker of this queue; such a thread cannot close the queue."""
        return threading.current_thread() in self._threads

    def _refusal(self, transfer: DiskTransfer) -> DiskFailed | None:
        if self._is_closed:
            return DiskFailed(transfer.file.path, transfer.operation, _CLOSED)
        failure = transfer.file.failure
        if failure is None:
            return None
        because = f"an earlier {failure.operation} failed: {failure.because}"
        return DiskFailed(failure.path, transfer.operation, because, failure.errno or 0)

    def _start(self, transfer: DiskTransfer) -> bool:
        """Queue the blocks of `transfer`, which waits for no other transfer; return whether there are any blocks."""
        transfer.error = transfer.error or self._refusal(transfer)
        starts = range(transfer.start_bytes, transfer.end_bytes, DISK_BLOCK_BYTES)
        if transfer.error is not None or not starts:
            return False
        transfer.num_blocks_left = len(starts)
        for start_bytes in starts:
            self._blocks.put((transfer, start_bytes))
        return True

    def _finish(self, transfer: DiskTransfer) -> None:
        finished = [transfer]
        with self._lock:
            for done in finished:  # grows: transfers that waited for a failed write fail with it
                self._unfinished.discard(done)
                for later in done.later:
                    later.num_before -= 1
                    if not later.num_before and not self._start(later):
                        finished.append(later)
                done.later.clear()
        for done in finished:
            done.finish()

    def _serve(self) -> None:
        page = scratch_page()
        while (block := self._blocks.get()) is not None:
            self._move(*block, page)

    def _move(self, transfer: DiskTransfer, start_bytes: int, page: memoryview) -> None:
        error: BaseException | None = None
        view = transfer.view
        if transfer.error is None and view is not None:  # otherwise another block failed, and this block is skipped
            at_bytes = start_bytes - transfer.start_bytes
            try:
                block = view[at_bytes : at_bytes + DISK_BLOCK_BYTES]
                transfer.file.move(transfer.operation, block, start_bytes, page)
            except BaseException as raised:  # of any class: if the worker ended here, waits would never return
                error = raised
        with self._lock:
            transfer.error = transfer.error or error
            if error is not None and transfer.operation == WRITE and transfer.file.failure is None:
                # For later operations on the file, without the traceback, which would keep the buffer alive.
                because = error.because if isinstance(error, DiskFailed) else f"{type(error).__name__}: {error}"
                number = error.errno or 0 if isinstance(error, OSError) else 0
                transfer.file.failure = DiskFailed(transfer.file.path, WRITE, because, number)
            transfer.num_blocks_left -= 1
            is_last = transfer.num_blocks_left == 0
        if is_last:
            self._finish(transfer)
