"""Find the bytes of host memory that this process may page-lock."""

import warnings

import torch

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.base.units import GIB, MIB
from elixir_compile.compat.platforms import host_memory_bytes, platform_of
from elixir_compile.runtime.slab import Slab


def pinned_limit_bytes(device: torch.device) -> int:
    """Return the most bytes of page-locked host memory; all, if `device` is a CPU and none must be."""
    memory_bytes = host_memory_bytes()
    if not platform_of(device).has_own_memory:
        return memory_bytes
    limit_bytes = lock_limit_bytes()
    if limit_bytes is None or limit_bytes >= memory_bytes:
        return memory_bytes
    # Most CUDA drivers ignore the limit, whose default is 8 MiB: try whether more memory can be pinned.
    if limit_bytes <= GIB:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ElixirWarning)
            if Slab(limit_bytes + MIB, pin=True).is_pinned:
                return memory_bytes
    return limit_bytes


def lock_limit_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no limit
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
