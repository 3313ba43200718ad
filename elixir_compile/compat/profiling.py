"""Reports of the profiler and of the allocators, and the workspaces of cuBLAS."""

import torch


def is_profiling() -> bool:
    """Return whether torch.profiler is on. It cannot be started a second time.

    `torch.autograd._profiler_enabled`: torch 2.11 to 2.13. Gone: AttributeError with `profile_regions` on a CPU.
    """
    return torch.autograd._profiler_enabled()


def cpu_allocations(profiler: torch.profiler.profile) -> list[tuple[int, int, int]]:
    """Return (time, address, bytes) for each block allocated or freed on the CPU under `profiler`, in order.

    Times are ns on the clock of `time.time_ns`. Bytes are negative if the block was freed. The profiler sees only
    threads that inherited it: the caller's and autograd's.

    `profiler.kineto_results`, `torch._C._profiler._EventType`: torch 2.11 to 2.13. Gone: AttributeError or ImportError
    in `measure_step` on a CPU.
    """
    from torch._C._profiler import _EventType

    found: list[tuple[int, int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found, key=lambda allocation: allocation[0])


def drop_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS. Each thread allocates a new workspace at its next matrix product.

    `torch._C._cuda_clearCublasWorkspaces`: torch 2.11 to 2.13. Gone: AttributeError at the first capture on CUDA.
    """
    torch._C._cuda_clearCublasWorkspaces()
