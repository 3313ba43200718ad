"""Run reads and writes of many files at the same time, block by block, on a few worker threads.

    submit --> (waits for earlier transfers of the same bytes) --> blocks --> workers --> done

Two transfers run in the order of their submission if they share bytes and at least one of them writes; other transfers
run side by side. So a read sees an earlier write, and pieces of a region are read and written at the same time.
"""

import os
import queue
import threading
import time
from collections.abc import Callable

from elixir_compile.base.errors import DiskFailed
from elixir_compile.runtime.disk.disk_file import DISK_BLOCK_BYTES, WRITE, DiskFile, scratch_page

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
                transfer.file.failure = _failure(transfer, error)
            transfer.num_blocks_left -= 1
            is_last = transfer.num_blocks_left == 0
        if is_last:
            self._finish(transfer)


def _failure(transfer: DiskTransfer, error: BaseException) -> DiskFailed:
    """Return the error for later operations on the file, without the traceback, which would keep the buffer alive."""
    because = error.because if isinstance(error, DiskFailed) else f"{type(error).__name__}: {error}"
    return DiskFailed(transfer.file.path, WRITE, because, error.errno or 0 if isinstance(error, OSError) else 0)
