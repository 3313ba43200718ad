"""Reports of the profiler and of the allocators, and the workspaces of cuBLAS."""

import torch


def is_profiling() -> bool:
    """Return whether torch.profiler is on. It cannot be started a second time.

    `torch.autograd._profiler_enabled`: torch 2.11 to 2.13. Gone: AttributeError with `profile_regions` on a CPU.
    """
    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def cpu_allocations(profiler: torch.profiler.profile) -> list[tuple[int, int, int]]:
    """Return (time, address, bytes) for each block allocated or freed on the CPU under `profiler`, in order.

    Times are ns on the clock of `time.time_ns`. Bytes are negative if the block was freed. The profiler sees only
    threads that inherited it: the caller's and autograd's.

    `profiler.kineto_results`, `torch._C._profiler._ExtraFields_Allocation`: torch 2.11 to 2.13. Gone:
    AttributeError or ImportError in `measure_step` on a CPU.
    """
    from torch._C._profiler import _ExtraFields_Allocation

    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise RuntimeError("the profiler has not run")
    found: list[tuple[int, int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        block = event.extra_fields
        if isinstance(block, _ExtraFields_Allocation) and block.device.type == "cpu":
            found.append((event.start_time_ns, block.ptr, block.alloc_size))
    return sorted(found, key=lambda allocation: allocation[0])


def drop_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS. Each thread allocates a new workspace at its next matrix product.

    `torch._C._cuda_clearCublasWorkspaces`: torch 2.11 to 2.13. Gone: AttributeError at the first capture on CUDA.
    """
    torch._C._cuda_clearCublasWorkspaces()
