"""Facts about graphs and plans: live bytes, windows of buckets, groups of activations, and whether a plan is legal."""

from elixir_compile.step.activations import Depth, Group, activation_groups
from elixir_compile.step.formula import peak_formula, plan_at, resized
from elixir_compile.step.fusion import fused
from elixir_compile.step.liveness import Life, Liveness, liveness
from elixir_compile.step.recompute import Repeat, as_run, repeats
from elixir_compile.step.timeline import (
    MemoryTimeline,
    Peak,
    host_bytes,
    keep_everything_timeline,
    plan_timeline,
    with_peaks,
)
from elixir_compile.step.verify import verify
from elixir_compile.step.windows import Window, closing_verbs, use_windows

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
