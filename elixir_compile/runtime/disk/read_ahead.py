"""Read pieces of disk regions ahead of their use, and write them behind it, through a ring of staging buffers.

    announce   piece 0    piece 1    piece 2    ...         in the order in which they will be taken
    disk       |-read 0-|-read 1-|-read 2-|-write 0-|       as far ahead as there are buffers
    take             |== 0 ==|== 1 ==|== 2 ==|

The announced order is only a hint. If a piece is taken out of order its buffer may serve another piece first, and the
piece is read again: this costs time and changes no result.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from elixir_compile.base.errors import DiskFailed
from elixir_compile.ir import InnerVerb
from elixir_compile.runtime.disk.disk_queue import DiskTransfer
from elixir_compile.runtime.disk.disk_store import DiskRegion, StagingBuffer, StagingBuffers

Done = Callable[[BaseException | None], object]
"""Called when a write is done, on a worker of the disk queue, with the exception of the write or None. It must not
raise."""


def _untimed(verb: InnerVerb) -> Callable[[], object]:
    return _nothing


def _nothing() -> None:
    """Do nothing."""


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
        self.buffer: StagingBuffer | None = None
        self.reads: tuple[DiskTransfer, ...] = ()
        self.begins: Callable[[InnerVerb], Callable[[], object]] = _untimed
        """Begins to time a read or a write, and returns the function that ends it, which any thread may call."""

    def views(self, buffer: StagingBuffer) -> list[torch.Tensor]:
        """Return for each region its part of `buffer`, as uint8."""
        found, at_bytes = [], 0
        for _, size_bytes, block in self.columns:
            num_values = -(-(self.end - self.start) // block)
            found.append(buffer.tensor[at_bytes : at_bytes + num_values * size_bytes])
            at_bytes += self._stride // block * size_bytes
        return found

    def transfers(self, buffer: StagingBuffer) -> Iterator[tuple[DiskRegion, torch.Tensor, int]]:
        """Yield each region, its part of `buffer`, and the offset of this part in the region, in bytes."""
        for (region, size_bytes, block), view in zip(self.columns, self.views(buffer), strict=True):
            yield region, view, self.start // block * size_bytes


class ReadAhead:
    """A ring of `num_buffers` buffers of `nbytes`, and the pieces announced, read, used or written in it."""

    def __init__(self, num_buffers: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ring = StagingBuffers(num_buffers, nbytes)
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
            buffer = piece.buffer or self._read_now(piece)
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
        _when_done(writes, lambda: self._wrote(buffer, failure or _failure_of(writes), done, end))

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

    def _read_now(self, piece: Piece) -> StagingBuffer:
        """Start reading `piece` into the next free buffer, and return the buffer."""
        self._num_waiting += 1  # keeps `_read_on` from taking the next free buffer
        try:
            while (buffer := self._acquire()) is None:
                if not self._drop_last():
                    self._changed.wait()
        finally:
            self._num_waiting -= 1
        self._begin(piece, buffer)
        return buffer

    def _wrote(
        self, buffer: StagingBuffer, failure: BaseException | None, done: Done, end: Callable[[], object]
    ) -> None:
        end()
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

    def _begin(self, piece: Piece, buffer: StagingBuffer) -> None:
        reads: list[DiskTransfer] = []
        end = piece.begins(InnerVerb.READ)
        try:
            for region, view, start_bytes in piece.transfers(buffer):
                reads.append(region.read_into(view, start_bytes))
        except BaseException:
            _when_done(reads, lambda: self._free(buffer))
            raise
        finally:
            _when_done(reads, end)
        piece.buffer, piece.reads = buffer, tuple(reads)

    def _drop(self, piece: Piece) -> None:
        """Free the buffer of `piece`, if it has one, once its reads are done."""
        buffer, reads, piece.buffer, piece.reads = piece.buffer, piece.reads, None, ()
        if buffer is not None:
            _when_done(reads, lambda: self._release(buffer))

    def _drop_last(self) -> bool:
        """Drop the last announced piece with a buffer; return whether there was such a piece."""
        for piece in reversed(self._announced):
            if piece.buffer is not None:
                self._announced.remove(piece)
                self._drop(piece)
                return True
        return False


def _failure_of(transfers: Iterable[DiskTransfer]) -> BaseException | None:
    return next((transfer.error for transfer in transfers if transfer.error is not None), None)


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
