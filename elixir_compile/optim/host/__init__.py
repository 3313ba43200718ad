"""The optimizer's passes over host memory: one small C kernel, its threads, and what runs where it cannot be built."""

from elixir_compile.optim.host.passes import mixed_adamw, split_adamw, sum_of_squares
from elixir_compile.optim.host.threads import HostThreads, host_threads_for

__all__ = ["HostThreads", "host_threads_for", "mixed_adamw", "split_adamw", "sum_of_squares"]
