"""What torch tells about the devices of one type, and does for them: memory, names, pinning, random generators.

    platform_of(device)     the `Platform` of the device's type
    accelerator()           the current accelerator of the calling thread, or None

No room but `compat` names `torch.cuda`. Streams and events are in `runtime.lanes`.
"""

from elixir_compile.compat.platforms.host import (
    available_host_bytes,
    bind_thread,
    cores_beside,
    host_memory_bytes,
    memory_sizes_bytes,
    num_local_ranks,
    on_cores,
)
from elixir_compile.compat.platforms.platform import (
    BlockRecord,
    Memory,
    PeakRecord,
    PinningError,
    Platform,
    accelerator,
    accelerator_platform,
    accelerator_type,
    is_accelerator_in_use,
    lane_stream,
    platform_of,
)

__all__ = [
    "BlockRecord",
    "Memory",
    "PeakRecord",
    "PinningError",
    "Platform",
    "accelerator",
    "accelerator_platform",
    "accelerator_type",
    "available_host_bytes",
    "bind_thread",
    "cores_beside",
    "host_memory_bytes",
    "is_accelerator_in_use",
    "lane_stream",
    "memory_sizes_bytes",
    "num_local_ranks",
    "on_cores",
    "platform_of",
]
