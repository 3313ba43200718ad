"""Host passes of the optimizer: a small C kernel, its build, its threads, and a fallback if it cannot be built."""

from elixir_compile.optim.host.kernel import HostThreads, host_threads_for
from elixir_compile.optim.host.passes import bf16_adamw, mixed_adamw, split_adamw, sum_of_squares

__all__ = ["HostThreads", "bf16_adamw", "host_threads_for", "mixed_adamw", "split_adamw", "sum_of_squares"]
