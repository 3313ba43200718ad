"""Facts about graphs and plans: live bytes, windows of buckets, legality, and the record of a simulated step."""

from elixir_compile.step.as_run import Repeat, as_run, fused, repeats
from elixir_compile.step.legality import plan_at, resized, verify
from elixir_compile.step.liveness import (
    Depth,
    Group,
    Life,
    Liveness,
    Window,
    activation_groups,
    closing_verbs,
    liveness,
    use_windows,
)
from elixir_compile.step.timeline import (
    MemoryTimeline,
    Peak,
    host_bytes,
    keep_everything_timeline,
    peak_formula,
    plan_timeline,
    with_peaks,
)

__all__ = [
    "Depth",
    "Group",
    "Life",
    "Liveness",
    "MemoryTimeline",
    "Peak",
    "Repeat",
    "Window",
    "activation_groups",
    "as_run",
    "closing_verbs",
    "fused",
    "host_bytes",
    "keep_everything_timeline",
    "liveness",
    "peak_formula",
    "plan_at",
    "plan_timeline",
    "repeats",
    "resized",
    "use_windows",
    "verify",
    "with_peaks",
]
