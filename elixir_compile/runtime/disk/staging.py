"""A ring of host buffers between the disk and the optimizer.

    acquire -> read_into(...).wait() -> update -> release_after(write_from(...)) -> free again when written

The buffers are cut from one slab, starting at a multiple of 2 MiB, because private huge pages were written to disk
twice as fast as shared pages.
"""

import threading
from typing import TYPE_CHECKING

import torch

from elixir_compile.analysis.bucket_bytes import HUGE_PAGE_BYTES
from elixir_compile.runtime.disk.disk_file import DISK_PAGE_BYTES
from elixir_compile.runtime.slab import Slab

if TYPE_CHECKING:
    from elixir_compile.runtime.disk.disk_queue import DiskTransfer


class StagingBuffer:
    """A buffer of a ring, held by the thread of its `acquire`; as a context manager it releases itself at the end."""

    def __init__(self, ring: "StagingBuffers", tensor: torch.Tensor) -> None:
        self.tensor = tensor
        """A uint8 tensor of the ring's `nbytes`."""
        self._ring = ring

    def release(self) -> None:
        """Give the buffer back to the ring. Does nothing after an earlier `release` or `release_after`."""
        self._ring._release(self)

    def release_after(self, transfer: "DiskTransfer") -> None:
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

    def _release_after(self, buffer: StagingBuffer, transfer: "DiskTransfer") -> None:
        with self._changed:
            if buffer not in self._held or buffer in self._returning:
                raise ValueError("this staging buffer was given back already")
            self._returning.add(buffer)
        transfer.then(lambda done: self._returned(buffer, done))

    def _returned(self, buffer: StagingBuffer, transfer: "DiskTransfer") -> None:
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
