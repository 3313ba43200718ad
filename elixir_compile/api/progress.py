"""The pair of lines that a run shows: what was planned, and after some steps what was measured."""

import logging
import statistics
import sys
import time
from itertools import pairwise

import torch

from elixir_compile.ir import Plan
from elixir_compile.report.line import plan_line
from elixir_compile.units import format_bytes, format_s

log = logging.getLogger("elixir_compile")

_STEPS_SKIPPED = 2  # the first compiles, the second captures the prepared model again
_STEPS_TIMED = 5


class Progress:
    """What one compilation tells its user, on rank 0."""

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0)
        self._began_s: list[float] = []
        if self._is_on:
            _show_when_nobody_listens()

    def planned(self, plan: Plan) -> None:
        """Log the planned line."""
        if self._is_on:
            log.info("%s   %s", plan_line(plan), plan.name)

    def forward_begins(self, plan: Plan) -> None:
        """Note the beginning of a step; log the measured line once, when enough steps went by."""
        if not self._is_on:
            return
        self._began_s.append(time.perf_counter())
        if len(self._began_s) > _STEPS_SKIPPED + _STEPS_TIMED:
            self._is_on = False
            log.info("%s   %s", self._measured(plan), plan.name)

    def _measured(self, plan: Plan) -> str:
        began = self._began_s[_STEPS_SKIPPED:]
        step_s = statistics.median(later - earlier for earlier, later in pairwise(began))
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
            peak = f"peak {format_bytes(peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        else:
            peak = "peak: see elixir_compile.measure_step"
        return f"measured  {peak}   step {format_s(step_s)}"


def _show_when_nobody_listens() -> None:
    """Let the lines reach the terminal in a program that has not set up logging."""
    if not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("elixir: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
