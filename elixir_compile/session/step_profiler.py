"""Time and record the first steps of a compilation, log them, and exchange the seconds in which each rank computes."""

import logging
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import torch

from elixir_compile import compat
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.compat.platforms import PeakRecord, platform_of
from elixir_compile.ir import Lane, Phase, Plan, StepGraph, Verb, verb_of
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.plan import plan_line
from elixir_compile.ir.schedule import Span
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.recording import Recording
from elixir_compile.search import Problem
from elixir_compile.search.joint.replan import StepStats
from elixir_compile.search.joint.variants import chosen_number
from elixir_compile.search.shares.assign import balance_line, balanced_rows, fixed_share
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.neighbours import device_bytes

# ----------------------------------------------------------------------------------------------------------------------
# The seconds in which each rank computes, exchanged once after the first steps.
#
# The step takes as long on every rank, since ranks wait for each other; what a rank computes tells how fast it is.


class RankBalance:
    """Keeps the seconds of this rank until every rank has its own."""

    def __init__(self) -> None:
        self._own: tuple[int, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether this rank has seconds that it has not exchanged."""
        return self._own is not None

    def note(self, spans: Sequence[Span], num_steps: int, graph: StepGraph, cluster: Cluster, ranks: Ranks) -> None:
        """Keep the seconds of compute in `spans`, recorded in `num_steps` steps of `graph` on `cluster`."""
        busy_s = sum(span.end_s - span.start_s for span in spans if span.lane is Lane.COMPUTE)
        if busy_s > 0:
            # A rank without rows runs two that count 0.
            rows = ranks.shares[ranks.control.rank].num_rows if ranks.shares else graph.batch
            self._own = (rows, busy_s / num_steps, fixed_share(graph, cluster))

    def suggested_line(self, ranks: Ranks) -> str | None:
        """Return a line that suggests other rows, if one of `ranks` is slower; all of them, with their seconds known,
        must call this. `ranks` then keep the rows."""
        assert self._own is not None, "`is_known` comes first"
        text = " ".join(f"{number:.9g}" for number in self._own)
        self._own = None
        said = [list(map(float, own.split())) for own in ranks.control.exchange(text, "seconds of ranks")]
        rows, busy_s, fixed = zip(*said, strict=True)
        before = [int(own) for own in rows]
        line = balance_line(before, busy_s, fixed)
        ranks.suggested_rows = () if line is None else balanced_rows(before, busy_s, fixed)
        return line


# ----------------------------------------------------------------------------------------------------------------------
# Time and record the first steps of a compilation, and log them.


STEPS_SKIPPED = 2  # the first compiles; the second may still warm up caches and allocators
STEPS_TIMED = 5
_MOST_DROPPED = 3
"""Measurements that other forwards ended before they had enough steps; no other begins after so many. On an accelerator
each reads the history of its allocator twice."""


class StepProfiler:
    """Measures the first steps of a compilation, which calls it at the first forward of every step."""

    def __init__(self, executor: Executor, name: str, options: Options, *, records: bool) -> None:
        """`name` is that of the graph whose steps are measured. Spans are recorded if `records`, or on several ranks.

        Nothing is measured unless `options` ask for a report or for new plans.
        """
        self._executor = executor
        self._name = name
        self._device = executor.device
        self._platform = platform_of(executor.device)
        self._is_on = options.report or options.replan
        self._num_dropped = 0
        self._is_again = False
        self._records = records or executor.ranks is not None
        self.balance = RankBalance()
        """The seconds of compute, if there are several ranks."""
        self._shares_step = False
        """Whether other graphs run in the same steps, or between them."""
        self._reads_memory = self._platform.has_own_memory
        self._recording: Recording | None = None
        self._began_s: list[float] = []
        self._foreign_bytes = 0
        self._peak: PeakRecord | None = None
        """Of the steps so far, while they are measured."""

    def forward_begins(self, problem: Problem, outstanding: Collection[str] = ()) -> StepStats | None:
        """Note a forward that solves `problem`; return the measurements, once, if enough steps have passed.

        `outstanding` are the names of the graphs of outstanding forwards. If the graph itself is among them, or an
        earlier call of the step has had its backward, this is no new step. If another is, that graph reads the peak of
        the step.
        """
        if not self._is_on or self._name in outstanding or self._executor.calls.is_under_way:
            return None
        self._reads_memory &= not outstanding
        self._began_s.append(time.perf_counter())
        if len(self._began_s) == STEPS_SKIPPED + 1:
            if self._reads_memory:
                self._foreign_bytes = foreign_bytes(self._executor)
                # Compiling allocates more than a step does, and the figure is for the steps.
                self._peak = PeakRecord(self._platform, self._device)
            if self._records:
                self._recording = self._executor.ledger.start_recording()
            self._began_s[-1] = time.perf_counter()
        if len(self._began_s) <= STEPS_SKIPPED + STEPS_TIMED:
            return None
        self._is_on = False
        spans = () if self._recording is None else self._recording.stop()
        peak_bytes = None if self._peak is None else self._peak.stop()
        self._recording = self._peak = None
        # Regions of the graph, each with the seconds of a span.
        own_s = [
            span.end_s - span.start_s
            for span in spans
            if span.graph == self._name and span.lane is Lane.COMPUTE and verb_of(span.label) == Verb.RUN
        ]
        stats = StepStats(
            period_s=statistics.median(b - a for a, b in pairwise(self._began_s[STEPS_SKIPPED:])),
            is_shared=self._shares_step,
            graph_s=sum(own_s) / STEPS_TIMED if own_s else None,
            spans=() if self._shares_step else spans,
            device_peak_bytes=peak_bytes if self._reads_memory else None,
            foreign_bytes=self._foreign_bytes,
            reserved_bytes=self._platform.reserved_bytes(self._device) if self._reads_memory else None,
        )
        ranks = self._executor.ranks
        # Shares are for one axis, and ranks along a tensor axis have the same rows.
        if ranks is not None and ranks.tensor_axis is None and not self._shares_step:
            self.balance.note(stats.spans, STEPS_TIMED, problem.graph, problem.cluster, ranks)
        return stats

    def share_step(self) -> None:
        """Note that other graphs run in the same steps: spans of theirs are told apart by the name of the graph."""
        self._shares_step = True

    def restart(self) -> None:
        """Forget the steps so far: spans of another graph had the same labels, or inputs had another size."""
        if len(self._began_s) > STEPS_SKIPPED and self._is_on and not self._is_again:
            self._num_dropped += 1
            if self._num_dropped == _MOST_DROPPED:
                log.info("no step is measured: other forwards run between any %d steps   %s", STEPS_TIMED, self._name)
                self._is_on = False
        self._drop()
        del self._began_s[STEPS_SKIPPED:]

    def measure_again(self) -> None:
        """Time as many steps once more, without spans and peaks, unless other graphs run in or between the steps."""
        self._drop()
        self._records = self._reads_memory = False
        self._began_s, self._is_again = [], True
        self._is_on = not self._shares_step

    def stop(self) -> None:
        """Stop measuring: steps of this compilation alternate with steps of another, so their periods hold both."""
        self._is_on, self._shares_step = False, True
        self._drop()

    def _drop(self) -> None:
        """Stop the records without a result."""
        if self._recording is not None:
            self._recording.stop()
        if self._peak is not None:
            self._peak.stop()
        self._recording = self._peak = None


def own_bytes(executor: Executor) -> int:
    """Return the bytes between steps on the device of parameters, gradients, optimizer state and workspaces."""
    grads = (slot.param.grad for slot in executor.slots.values())
    grads_bytes = sum(grad.nbytes for grad in grads if grad is not None and grad.device == executor.device)
    return device_bytes(executor) + grads_bytes + library_bytes(executor.device)


def foreign_bytes(executor: Executor, own: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of tensors on the device that no plan counts; tensors in `own`, as inputs are, are planned."""
    device = executor.device
    storages = {compat.storage_key(each): each.untyped_storage().nbytes() for each in own if each.device == device}
    planned_bytes = own_bytes(executor) + executor.saved.held_bytes() + sum(storages.values())
    return max(0, platform_of(device).tensor_bytes(device) - planned_bytes)


log = logging.getLogger("elixir_compile")

QUIET_S, EVERY_S = 10.0, 5.0
"""Seconds of a compilation after which it says how far it is, and between two such lines."""


class Progress:
    """The log lines about a compilation; only rank 0 writes them."""

    def __init__(self, *, is_on: bool, warns_of_division: bool = False) -> None:
        """If `warns_of_division`, a number of micro-batches that the planner chose is a warning, also if not `is_on`:
        the user did not ask for another number than 1."""
        writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.is_on = is_on and writes
        self._warns_of_division = warns_of_division and writes
        if self.is_on and not log.hasHandlers():  # in a script without logging set up
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("elixir: %(message)s"))
            log.addHandler(handler)
            log.setLevel(logging.INFO)
            log.propagate = False
        self._began_s: float | None = time.monotonic()
        """When the current compilation began; None from a forward until the next compilation."""
        self._next_s = self._began_s + QUIET_S
        self._micro_batches = ""
        """The last choice of micro-batches that was logged."""

    def compiling(self, phase: Phase, number: int, total: int) -> None:
        """Log that region `number` of `total` of `phase` is compiled, if it takes long and stderr is a terminal."""
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s, self._next_s = now_s, now_s + QUIET_S
        if self.is_on and now_s >= self._next_s and sys.stderr.isatty():
            self._next_s = now_s + EVERY_S
            self.say(f"compiling   region {number} of {total} of the {phase}   {format_s(now_s - self._began_s)}")

    def compiled(self) -> None:
        """Note that a forward was run: the seconds of later compilations are counted from their own beginning."""
        self._began_s = None

    def planned(self, plan: Plan) -> None:
        """Log the planned line, and once for each number of micro-batches that the planner chooses, the reason.

        The plan goes to torch's structured trace too.
        """
        compat.trace_artifact("elixir_plan", lambda: str(plan))
        self.say(f"{plan_line(plan)}   {plan.name}")
        decision = chosen_number(plan)
        if decision is not None and decision.choice != self._micro_batches:
            self._micro_batches = decision.choice
            line = (
                f"in micro-batches: {decision.choice}, as {decision.because}; dropout draws other numbers than on the "
                "whole batch, and smaller kernels may round differently; micro_batches=1 forbids it"
            )
            if self._warns_of_division:
                log.warning("%s", line)
            else:
                self.say(line)

    def measured(self, plan: Plan, stats: StepStats) -> None:
        """Log the measured line."""
        if stats.device_peak_bytes is None:
            peak = "peak: see elixir_compile.measure_step"
        else:
            peak = f"peak {format_bytes(stats.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        if stats.reserved_bytes is not None:
            peak += f"   reserved {format_bytes(stats.reserved_bytes)}"
        own = "" if stats.graph_s is None or not stats.is_shared else f", {format_s(stats.graph_s)} of it in this graph"
        self.say(f"measured  {peak}   step {format_s(stats.period_s)}{own}   {plan.name}")

    def say(self, line: str) -> None:
        """Log `line`."""
        if self.is_on:
            log.info("%s", line)
