"""What the profiler and the allocators report."""

import torch
from torch._C._profiler import _EventType


def is_profiling() -> bool:
    """Whether torch.profiler is on; it cannot be started twice.

    `torch.autograd._profiler_enabled`, torch 2.11 to 2.13. Gone: AttributeError with `profile_regions` on a CPU.
    """
    return torch.autograd._profiler_enabled()


def cpu_allocations(profiler: torch.profiler.profile) -> list[tuple[int, int, int]]:
    """Return (time, address, bytes) for all that the CPU allocator did under `profiler`, in order.

    Times are ns on the clock of `time.time_ns`; bytes are below 0 where a block was freed. Only threads that
    inherited the profiler are seen: the caller's and autograd's. `profiler.kineto_results` and `_EventType`, torch
    2.11 to 2.13. Gone: AttributeError in `measure_step` on a CPU, ImportError at the first import.
    """
    found: list[tuple[int, int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found, key=lambda allocation: allocation[0])


def drop_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps; the next matrix product of each thread allocates its own again.

    `torch._C._cuda_clearCublasWorkspaces`, torch 2.11 to 2.13. Gone: AttributeError at the first capture on CUDA.
    """
    torch._C._cuda_clearCublasWorkspaces()
