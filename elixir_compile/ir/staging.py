"""Count the memory of the buffers through which optimizer state passes: to and from disk, or through the device.

State on disk is read and written through a ring of buffers, shared by all buckets of an optimizer:

    buffer   the same elements of each statistic, at least one block of the narrowest:  4 MiB / 2 B * (4 + 4 + 2) B
    ring     `NUM_DISK_STAGING` buffers, each aligned to huge pages, and one huge page to align the first buffer

The narrowest statistic is guessed from the bytes of all statistics of one element: its width is the largest power of
two that divides them, at most 4 bytes. Not counted: tensors held by `state_dict()` or `load_state_dict()`.
"""

from collections.abc import Iterable

from elixir_compile.base.units import MIB
from elixir_compile.ir import Bucket

NUM_DISK_STAGING = 3
"""Buffers of the ring: one is read, one updated, one written."""
DISK_STAGING_BYTES = 16 * MIB
"""Bytes of a buffer, unless its blocks need more: 4 blocks for 4 threads, or 2 M elements of Adam's two fp32
moments."""
DISK_BLOCK_BYTES = 4 * MIB
"""Bytes of one read or write, and of one checksum. Larger blocks were no faster."""
HUGE_PAGE_BYTES = 2 * MIB
_WIDEST_BYTES = 4


def disk_staging_bytes(buckets: Iterable[Bucket]) -> int:
    """Return the bytes of the ring for `buckets` with their state on disk, or 0 if they have no state."""
    widths = [-(-bucket.state_nbytes // max(bucket.numel, 1)) for bucket in buckets if bucket.state_nbytes]
    if not widths:
        return 0
    least_bytes = max(DISK_BLOCK_BYTES // min(width & -width, _WIDEST_BYTES) * width for width in widths)
    buffer_bytes = -(-max(DISK_STAGING_BYTES, least_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return NUM_DISK_STAGING * buffer_bytes + HUGE_PAGE_BYTES


MOST_STREAMED_ROOMS = 4
"""Rooms on the device for pieces of a streamed update: one piece arrives, one is updated, one leaves, and one more
evens out lanes of unequal speed."""
LEAST_STREAMED_ROOM_BYTES = MIB
"""Bytes below which a bucket is not cut into more pieces: their copies would take less time than their launches."""
MOST_STREAMED_ROOM_BYTES = 32 * MIB
"""Larger pieces would only make the first copy in and the last copy out longer, beside which no other lane works."""


def streamed_rooms(nbytes: int) -> tuple[int, int]:
    """Return the number of rooms for streamed updates of buckets of at most `nbytes`, and the bytes of each room.

    All rooms together take at most `nbytes`.
    """
    num_rooms = min(max(nbytes // LEAST_STREAMED_ROOM_BYTES, 1), MOST_STREAMED_ROOMS)
    room_bytes = nbytes if num_rooms == 1 else nbytes // num_rooms // 256 * 256
    return num_rooms, min(room_bytes, MOST_STREAMED_ROOM_BYTES)
