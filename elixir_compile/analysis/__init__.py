"""Facts about a graph and a plan: what is live when, which buckets are used where, and whether a plan is legal."""

from elixir_compile.analysis.formula import peak_formula, plan_at
from elixir_compile.analysis.liveness import Life, Liveness, liveness
from elixir_compile.analysis.timeline import MemoryTimeline, Peak, host_bytes, keep_everything_timeline, plan_timeline
from elixir_compile.analysis.verify import verify
from elixir_compile.analysis.windows import Window, use_windows

__all__ = [
    "Life",
    "Liveness",
    "MemoryTimeline",
    "Peak",
    "Window",
    "host_bytes",
    "keep_everything_timeline",
    "liveness",
    "peak_formula",
    "plan_at",
    "plan_timeline",
    "use_windows",
    "verify",
]
