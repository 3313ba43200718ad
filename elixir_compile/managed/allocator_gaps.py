"""Hold what the allocator of the device has taken at the budget, not only what tensors ask for.

```text
  step n    begins: the allocator has taken more than the budget, or step n - 1 had to free its cache for room
            -> the cache is freed, because what compilation and earlier plans left is no need of a step, and the peak
               of the tensors is measured
  step n+1  begins: the same again, and there are gaps between tensors
            -> the graphs are planned again with the gaps in `base_bytes`: no tensor fits in them
```

The allocator rounds sizes up, keeps tensors of up to 1 MiB apart from others, and takes memory in segments, of which a
tensor may need another than the one that is free. What that adds depends on the order of sizes in a step, so it is
measured and not predicted.
"""

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Plan
from elixir_compile.managed.step_profiler import STEPS_SKIPPED, STEPS_TIMED, foreign_bytes
from elixir_compile.platforms import PeakRecord, platform_of
from elixir_compile.runtime.executor import Executor
from elixir_compile.units import MIB, format_bytes

log = logging.getLogger("elixir_compile")

SEGMENT_BYTES = 22 * MIB
"""What the allocator holds if it has just begun a segment of each kind: 2 MiB for tensors of up to 1 MiB, and 20 MiB
for larger ones. Elixir allocates on one stream."""
_COARSE = 20
"""Budgets of fewer than so many times `SEGMENT_BYTES` may be exceeded by them: segments are that coarse."""
_MOST_PLANS = 4
"""So many times a model is planned again because of gaps."""
_MOST_FREED = 3
"""So many times the cache is freed under one plan before the gaps count as the plan's own."""
_SETTING = "expandable_segments:True"


def tolerated_bytes(budget_bytes: int) -> int:
    """Return the bytes by which the allocator may hold more than `budget_bytes`."""
    return SEGMENT_BYTES if budget_bytes < _COARSE * SEGMENT_BYTES else 0


class Held(NamedTuple):
    """What the allocator held when a step had to be planned again."""

    reserved_bytes: int
    peak_bytes: int
    """The most bytes that tensors asked for."""
    gap_bytes: int
    """Those for which plans leave room from now on."""


class AllocatorGaps:
    """Compares what the allocator holds with the budget of a model before each of its steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._platform = platform_of(executor.device)
        self.nbytes = 0
        """Bytes of gaps for which plans leave room."""
        self._plans: Sequence[Plan] = ()
        """The plans of the last step."""
        self._num_steps = 0
        self._retries: int | None = None
        """How often the allocator had freed its cache for room before the last step."""
        self._num_freed = 0
        """How often its cache was freed here under the plans of the last step."""
        self._num_plans = 0
        self._is_over = False
        """Whether nothing more can be done, which was said."""
        self._peak: PeakRecord | None = None
        """Of the tensors in the last step, which began without a cache."""

    def found(self, plans: Sequence[Plan], *, is_given: bool, may_replan: bool) -> Held | None:
        """Return what the allocator held in the step before if `plans`, which it followed, are to leave more room for
        gaps; None if they need not.

        `is_given` says whether the user chose the budget. One that is measured is all free memory, and the allocator
        frees its cache where it is too little: then only the first steps are watched.
        """
        record, self._peak = self._peak, None
        peak_bytes = None if record is None else record.stop()
        if self._is_over or not self._platform.has_own_memory:
            return None
        if len(plans) != len(self._plans) or any(a is not b for a, b in zip(plans, self._plans, strict=True)):
            self._plans, self._num_freed = plans, 0
        self._num_steps += 1
        if not is_given and self._num_steps > STEPS_SKIPPED + STEPS_TIMED:
            return None
        if not self._is_too_much(plans, is_given=is_given):
            return None
        if peak_bytes is None and self._num_freed < _MOST_FREED:
            self._num_freed += 1
            self._platform.empty_cache()
            self._peak = PeakRecord(self._platform, self._executor.device)
            return None
        own_bytes = max(plan.prediction.device_peak_bytes for plan in plans) - self.nbytes
        if peak_bytes is not None:
            own_bytes = peak_bytes - foreign_bytes(self._executor)
        return self._judged(own_bytes, plans[0].budget_bytes, may_replan=may_replan)

    def _is_too_much(self, plans: Sequence[Plan], *, is_given: bool) -> bool:
        """Return whether the allocator holds more for this model than a budget that `is_given`, or had to free its
        cache since the step before."""
        device, budget_bytes = self._executor.device, min(plan.budget_bytes for plan in plans)
        reserved_bytes, retries = self._platform.reserved_bytes(device), self._platform.alloc_retries(device) or 0
        was_short = self._retries is not None and retries > self._retries
        self._retries = retries
        excess_bytes = reserved_bytes - budget_bytes - tolerated_bytes(budget_bytes)
        return was_short or (is_given and excess_bytes > 0 and excess_bytes > foreign_bytes(self._executor))

    def _judged(self, peak_bytes: int, budget_bytes: int, *, may_replan: bool) -> Held | None:
        """Return what to leave room for if there are more gaps beside `peak_bytes` of tensors than plans leave room
        for; say it."""
        held_bytes = self._platform.reserved_bytes(self._executor.device) - foreign_bytes(self._executor)
        # One segment of each kind more than was seen, where it matters little: each new plan is compiled.
        gap_bytes = held_bytes - peak_bytes + SEGMENT_BYTES - tolerated_bytes(budget_bytes)
        if gap_bytes <= max(self.nbytes, SEGMENT_BYTES):
            return None  # tensors took more than planned, which `over_budget` sees
        found = Held(held_bytes, peak_bytes, gap_bytes)
        words = (
            f"torch's allocator holds {format_bytes(held_bytes)} for {format_bytes(peak_bytes)} of tensors of "
            f"{self._executor.name}, whose budget is {format_bytes(budget_bytes)}"
        )
        if not may_replan or self._num_plans == _MOST_PLANS:
            self._is_over = True
            log.warning("%s. It is not planned again; %s", words, fix(held_bytes))
            return None
        self._num_plans += 1
        log.warning("%s. It is planned again with %s for gaps; %s", words, format_bytes(gap_bytes), fix(held_bytes))
        return found

    def give_up(self, held: Held, error: NoFeasiblePlan) -> None:
        """Note that no plan leaves room for the gaps of `held`; `error` says what it lacks."""
        self._is_over = True
        log.warning(
            "no plan of %s leaves %s for gaps: it needs %s of %s memory. The plan stays, although the allocator holds "
            "more than the budget; %s",
            self._executor.name,
            format_bytes(held.gap_bytes),
            format_bytes(error.needed_bytes),
            error.memory,
            fix(held.reserved_bytes),
        )


def fix(held_bytes: int) -> str:
    """Return how a user gets by with fewer gaps, or with `held_bytes`, which the allocator holds."""
    enough = f"device_memory={held_bytes} is enough for what it holds"
    if _SETTING in ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return enough
    return f"PYTORCH_ALLOC_CONF={_SETTING}, set before the process starts, leaves fewer, or {enough}"
