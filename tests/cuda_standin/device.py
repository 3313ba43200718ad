"""What tests say to the CUDA stand-in of this process and ask it; the same names as in `tests.device.fakegpu`.

A process has the stand-in if it was started by `python -m tests.cuda_standin.build`.
"""

import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

NAME = "cuda"
EARLY, LATE, RANDOM = range(3)
"""When asynchronous copies run: at once, when a wait forces them, or at random moments between."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library that the loader put before all others, None if there is none."""
    found = ctypes.CDLL(None)
    if not hasattr(found, "standin_count"):
        return None
    for name, arguments, result in (
        ("standin_set_policy", [ctypes.c_int, ctypes.c_uint64], None),
        ("standin_set_capacity", [ctypes.c_int, ctypes.c_size_t], None),
        ("standin_capacity", [ctypes.c_int], ctypes.c_size_t),
        ("standin_count", [ctypes.c_char_p], ctypes.c_int64),
        ("standin_num_pending", [], ctypes.c_int64),
        ("standin_host_access", [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_char_p], None),
    ):
        getattr(found, name).argtypes, getattr(found, name).restype = arguments, result
    return found


def is_here() -> bool:
    """Whether the devices of this process are those of the stand-in."""
    return _library() is not None


def is_gpu() -> bool:
    """Whether the process has a GPU: CUDA, and not over the stand-in."""
    return torch.cuda.is_available() and not is_here()


def start() -> ctypes.CDLL:
    """Return the library. The update kernel of the host, which is no op of torch, says what it reads and writes."""
    from elixir_compile.runtime.lanes import Accelerator

    found = _library()
    assert found is not None, "start this process by `python -m tests.cuda_standin.build`"
    Accelerator.touches = _host_touches
    return found


def _host_touches(lanes: object, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor] = ()) -> None:
    """Check what the host is about to read and write, in the place of `Accelerator.touches`."""
    for tensors, is_write in ((reads, False), (writes, True)):
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.numel():
                start().standin_host_access(tensor.data_ptr(), tensor.nbytes, is_write, b"an update on the host")


@contextmanager
def policy(kind: int, seed: int = 0) -> Iterator[None]:
    """Run asynchronous copies by `kind` in the block, and at once after it."""
    start().standin_set_policy(kind, seed)
    try:
        yield
    finally:
        start().standin_set_policy(EARLY, 0)


@contextmanager
def capacity(nbytes: int, device: int = 0) -> Iterator[None]:
    """Let the device have memory for `nbytes` of tensors in the block, besides what the allocator holds in gaps."""
    torch.cuda.empty_cache()
    before = start().standin_capacity(device)
    held_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    start().standin_set_capacity(device, nbytes + held_bytes)
    try:
        yield
    finally:
        start().standin_set_capacity(device, before)


def count(what: str) -> int:
    """Return how often something happened: "races", "refused kernels", "cudaMalloc", or the bytes of "bytes h2d"."""
    return start().standin_count(what.encode())


def num_pending() -> int:
    """Return how many copies, waits and events wait in queues."""
    return start().standin_num_pending()


def num_async_copies() -> int:
    """Return how many copies between host and device were asynchronous so far."""
    return count("late copies")


@contextmanager
def ordered() -> Iterator[None]:
    """Fail if two accesses to the same memory in the block had no order."""
    before = count("races")
    yield
    torch.cuda.synchronize()
    assert count("races") == before, "races, named on stderr by the stand-in"
