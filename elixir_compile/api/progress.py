"""The lines that a run shows: what was planned, what some steps took, and what was planned again.

On a terminal they also say how far a long compilation is.
"""

import logging
import sys
import time

import torch

from elixir_compile.api.watch import StepStats
from elixir_compile.ir import Phase, Plan
from elixir_compile.report.line import plan_line
from elixir_compile.units import format_bytes, format_s

log = logging.getLogger("elixir_compile")

QUIET_S, EVERY_S = 10.0, 5.0
"""Seconds of a compilation after which it says how far it is, and between two such lines."""


class Progress:
    """What one compilation tells its user, on rank 0."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0)
        if self.is_on:
            _show_when_nobody_listens()
        self._began_s: float | None = time.monotonic()
        """When the compilation began, of which the first program is a part; None for later programs."""
        self._next_s = self._began_s + QUIET_S

    def compiling(self, phase: Phase, number: int, total: int) -> None:
        """Log that region `number` of `total` of `phase` is compiled, if that takes long and a person is looking."""
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s, self._next_s = now_s, now_s + QUIET_S
        if self.is_on and now_s >= self._next_s and sys.stderr.isatty():
            self._next_s = now_s + EVERY_S
            self.say(f"compiling   region {number} of {total} of the {phase}   {format_s(now_s - self._began_s)}")

    def compiled(self) -> None:
        """Note that a step was run: what is compiled from now on is counted from its own beginning."""
        self._began_s = None

    def planned(self, plan: Plan) -> None:
        """Log the planned line."""
        self.say(f"{plan_line(plan)}   {plan.name}")

    def measured(self, plan: Plan, stats: StepStats) -> None:
        """Log the measured line."""
        if stats.device_peak_bytes is None:
            peak = "peak: see elixir_compile.measure_step"
        else:
            peak = f"peak {format_bytes(stats.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        self.say(f"measured  {peak}   step {format_s(stats.period_s)}   {plan.name}")

    def say(self, line: str) -> None:
        """Log `line`."""
        if self.is_on:
            log.info("%s", line)


def _show_when_nobody_listens() -> None:
    """Let the lines reach the terminal in a program that has not set up logging."""
    if not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("elixir: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
