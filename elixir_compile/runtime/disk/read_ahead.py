"""Pieces of regions through a ring of staging buffers: read before they are asked for, written behind.

    announce   piece 0    piece 1    piece 2    ...         in the order in which they will be taken
    disk       |-read 0-|-read 1-|-read 2-|-write 0-|       as far ahead as there are buffers
    take             |== 0 ==|== 1 ==|== 2 ==|

A piece is read again where its buffer was given to another one meanwhile, so the order is a hint: a wrong one costs
time, nothing else.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from elixir_compile.errors import DiskFailed
from elixir_compile.runtime.disk.disk_queue import DiskTransfer
from elixir_compile.runtime.disk.disk_store import DiskRegion
from elixir_compile.runtime.disk.staging import StagingBuffer, StagingBuffers

Done = Callable[[BaseException | None], object]
"""What is told that a write is done, on a thread of the disk, with what failed in it. It must not raise."""


class Piece:
    """The same elements of several regions, beside one another in one buffer while they are there."""

    def __init__(self, columns: Sequence[tuple[DiskRegion, int]], start: int, end: int, stride: int) -> None:
        """`columns` are regions and the bytes that one element has there; `stride` elements, at least as many as there
        are, are whole pages in each."""
        self.columns = tuple(columns)
        self.start = start
        self.end = end
        self._stride = stride
        self.buffer: StagingBuffer | None = None
        self.reads: tuple[DiskTransfer, ...] = ()

    def views(self, buffer: StagingBuffer) -> list[torch.Tensor]:
        """Return the part of `buffer` that each region has, in uint8."""
        found, at_bytes = [], 0
        for _, size_bytes in self.columns:
            found.append(buffer.tensor[at_bytes : at_bytes + (self.end - self.start) * size_bytes])
            at_bytes += self._stride * size_bytes
        return found

    def transfers(self, buffer: StagingBuffer) -> Iterator[tuple[DiskRegion, torch.Tensor, int]]:
        """Yield each region, its part of `buffer`, and the byte of the region that it begins with."""
        for (region, size_bytes), view in zip(self.columns, self.views(buffer), strict=True):
            yield region, view, self.start * size_bytes


class ReadAhead:
    """A ring of `num_buffers` buffers of `nbytes`, and the pieces that are on their way through it."""

    def __init__(self, num_buffers: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ring = StagingBuffers(num_buffers, nbytes)
        self._announced: deque[Piece] = deque()
        self._num_writing = 0
        self._num_waiting = 0
        self._num_taken = 0
        """Buffers that are read into, used, or written from."""
        self._pid = os.getpid()
        # Re-entrant: a transfer that is done already calls back at once.
        self._changed = threading.Condition(threading.RLock())

    def announce(self, pieces: Iterable[Piece]) -> None:
        """Read `pieces` as soon as there is room, behind those announced before."""
        with self._changed:
            self._announced.extend(pieces)
            self._read_on()

    def take(self, piece: Piece) -> list[torch.Tensor]:
        """Return the bytes of `piece`, one uint8 tensor per region, to read and write until it is given back.

        Raises what failed in reading them; the piece is given back then.
        """
        if os.getpid() != self._pid:
            paths = ", ".join(region.path for region, _ in piece.columns)
            raise DiskFailed(paths, "read", "the store belongs to the parent process")
        with self._changed:
            if piece in self._announced:
                # What stands before it was never taken: its update failed, or was dropped.
                while (earlier := self._announced.popleft()) is not piece:
                    self._let_go(earlier)
            buffer = piece.buffer or self._read_now(piece)
        try:
            for read in piece.reads:
                read.wait()
        except BaseException:
            self.give_back(piece)
            raise
        return piece.views(buffer)

    def give_back(self, piece: Piece) -> None:
        """Let go of the bytes of a piece that was taken; what was written into them is lost."""
        with self._changed:
            self._let_go(piece)
            self._read_on()

    def write(self, piece: Piece, done: Done) -> None:
        """Begin to write the bytes of a piece that was taken, which must not change any more; then call `done`."""
        buffer, piece.buffer, piece.reads = piece.buffer, None, ()
        if buffer is None:
            raise ValueError("a piece is written that was not taken, or was given back")
        with self._changed:
            self._num_writing += 1
        writes: list[DiskTransfer] = []
        failure: BaseException | None = None
        try:
            for region, view, start_bytes in piece.transfers(buffer):
                writes.append(region.write_from(view, start_bytes))
        except BaseException as error:
            failure = error
        _when_done(writes, lambda: self._wrote(buffer, failure or _failure_of(writes), done))

    def wait_for_writes(self) -> None:
        """Return when no write is in flight."""
        with self._changed:
            # The threads of the disk do not live on in a forked child.
            self._changed.wait_for(lambda: self._num_writing == 0 or os.getpid() != self._pid)

    def stop(self) -> None:
        """Return when nothing is in flight: let go of what is announced, and wait for what was taken and is written."""
        with self._changed:
            while self._announced:
                self._let_go(self._announced.popleft())
            self._changed.wait_for(lambda: self._num_taken == 0 or os.getpid() != self._pid)

    def _read_now(self, piece: Piece) -> StagingBuffer:
        self._num_waiting += 1  # so that nothing is read ahead into what comes free
        try:
            while (buffer := self._acquire()) is None:
                if not self._let_go_of_last():
                    self._changed.wait()
        finally:
            self._num_waiting -= 1
        self._begin(piece, buffer)
        return buffer

    def _wrote(self, buffer: StagingBuffer, failure: BaseException | None, done: Done) -> None:
        done(failure)
        with self._changed:
            self._num_writing -= 1
            self._release(buffer)

    def _release(self, buffer: StagingBuffer) -> None:
        with self._changed:
            self._free(buffer)
            self._read_on()

    def _acquire(self) -> StagingBuffer | None:
        buffer = self._ring.try_acquire()
        self._num_taken += buffer is not None
        return buffer

    def _free(self, buffer: StagingBuffer) -> None:
        with self._changed:
            buffer.release()
            self._num_taken -= 1
            self._changed.notify_all()

    def _read_on(self) -> None:
        """Begin to read what is announced, as far as there are buffers."""
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
            except BaseException:  # it is told when the piece is taken, and read again
                return

    def _begin(self, piece: Piece, buffer: StagingBuffer) -> None:
        reads: list[DiskTransfer] = []
        try:
            for region, view, start_bytes in piece.transfers(buffer):
                reads.append(region.read_into(view, start_bytes))
        except BaseException:
            _when_done(reads, lambda: self._free(buffer))
            raise
        piece.buffer, piece.reads = buffer, tuple(reads)

    def _let_go(self, piece: Piece) -> None:
        buffer, reads, piece.buffer, piece.reads = piece.buffer, piece.reads, None, ()
        if buffer is not None:
            _when_done(reads, lambda: self._release(buffer))

    def _let_go_of_last(self) -> bool:
        """Let go of the piece that is wanted last among those that are read ahead; whether there was one."""
        for piece in reversed(self._announced):
            if piece.buffer is not None:
                self._announced.remove(piece)
                self._let_go(piece)
                return True
        return False


def _failure_of(transfers: Iterable[DiskTransfer]) -> BaseException | None:
    return next((transfer.error for transfer in transfers if transfer.error is not None), None)


def _when_done(transfers: Sequence[DiskTransfer], call: Callable[[], object]) -> None:
    """Call `call` once all `transfers` are done, failed ones too, on the thread of the last; at once for none."""
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
