"""Host memory that updates take besides parameters, gradients and state.

State on disk passes through one ring of buffers per optimizer, there and back:

    buffer   the same elements of each statistic, at least one block of the narrowest:  4 MiB / 2 B * (4 + 4 + 2) B
    ring     `NUM_DISK_STAGING` of them, each from a huge page on, and one more page for the first to begin at

The widths of statistics are guessed from what one element has of all: the largest power of two that divides it, at most
4 bytes, is the narrowest. Not counted: what `state_dict()` reads, and what a step is told by a state dict.
"""

from collections.abc import Iterable

from elixir_compile.ir import Bucket, Tier
from elixir_compile.units import MIB

NUM_DISK_STAGING = 3
"""One is read, one updated, one written."""
DISK_STAGING_BYTES = 16 * MIB
"""A buffer, unless its blocks need more: 4 blocks for 4 threads, 2 M elements of Adam's two statistics in fp32."""
DISK_BLOCK_BYTES = 4 * MIB
"""What one call of a disk's worker moves, and what one checksum covers. Larger blocks were no faster."""
HUGE_PAGE_BYTES = 2 * MIB
_WIDEST_BYTES = 4


def sum_host_bytes(bucket: Bucket, param: Tier, optim: Tier) -> int:
    """Return the bytes on the host that fp32 sums of the gradients of `bucket` take there, beside its gradients.

    Of parameters on the host: the sums, and a second room, for gradients that arrive while the first ones are what they
    are added to. Of parameters on the device whose state is not: the sums on their way to the update. What several
    ranks reduce in fp32 is the sums; it is the second room that comes on top.
    """
    if optim is Tier.DEVICE:
        return 0
    if bucket.reduce_dtype is not None:
        return 0 if param is Tier.DEVICE else bucket.shard_grad_nbytes()
    if not bucket.sum_nbytes:
        return 0
    return bucket.sum_nbytes + (0 if param is Tier.DEVICE else bucket.nbytes)


def disk_staging_bytes(buckets: Iterable[Bucket]) -> int:
    """Return the bytes of the ring where the state of `buckets` is on disk; 0 where none has any."""
    widths = [-(-bucket.state_nbytes // max(bucket.numel, 1)) for bucket in buckets if bucket.state_nbytes]
    if not widths:
        return 0
    least_bytes = max(DISK_BLOCK_BYTES // min(width & -width, _WIDEST_BYTES) * width for width in widths)
    buffer_bytes = -(-max(DISK_STAGING_BYTES, least_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return NUM_DISK_STAGING * buffer_bytes + HUGE_PAGE_BYTES
