"""An observed run as a page shows it: its steps by rank, one step in full, and one with its memory.

```text
  folder of observe()    steps of each rank      the last full step       the last with bytes by kind
                         table, seconds, loss    phases, lanes, findings  memory over the step
```
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.plan import Plan
from elixir_compile.tools.report.observed_text import settled_steps
from elixir_compile.tools.study.observed import FullStep, StepSummary
from elixir_compile.tools.study.study import StudyRow
from elixir_compile.tools.study.trace_files import TraceMeta

_MOST_POINTS = 300
"""The most points of a line over the steps: more cannot be told apart."""
_LOSS = "loss"
Points = tuple[tuple[int, float], ...]
"""Pairs of a step and a value, in order of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """What the folder of an observed run holds, as far as a page shows it."""

    name: str
    """The name of the folder."""
    meta: TraceMeta
    steps: Mapping[int, tuple[StepSummary, ...]]
    """By rank, the summaries in order; the first rank has at least one."""
    row: StudyRow
    """The settled steps of the first rank, and its steps in full, as the row of a study."""
    cluster: Cluster | None = None
    """The machine that the plan was made for; None if the folder has no question."""

    @property
    def first_rank(self) -> int:
        """The rank of which steps are shown in full."""
        return min(self.steps)

    @property
    def losses(self) -> Points:
        """The loss that the first rank noted, by step: the note `loss`, or else the first whose name holds the word."""
        found = ((each.step, loss_of(each)) for each in self.steps[self.first_rank])
        return tuple((step, loss) for step, loss in found if loss is not None)


def observed_run(
    name: str,
    meta: TraceMeta,
    steps: Mapping[int, tuple[StepSummary, ...]],
    full: Sequence[FullStep],
    plan: Plan | None,
    cluster: Cluster | None,
) -> ObservedRun:
    """Return the run in a folder called `name`. `full` are steps in full of the first rank, in order.

    A step with its memory takes up to twice as long, so seconds come from the last step without, if there is one.
    """
    first = min(steps)
    timed = tuple(settled_steps(steps[first]))
    plain = [each for each in full if each.live is None]
    shown = (plain or [*full] or [None])[-1]
    memory = ([each for each in full if each.live is not None] or [None])[-1]
    row = StudyRow(
        name=f"rank {first}",
        what=f"step {shown.summary.step}" if shown is not None else "no step in full",
        budget_bytes=None if plan is None else plan.budget_bytes,
        timed=timed,
        full=shown,
        memory=memory,
        peak_bytes=_peak_bytes(memory, timed),
        plan=plan,
    )
    return ObservedRun(name=name, meta=meta, steps=steps, row=row, cluster=cluster)


def _peak_bytes(memory: FullStep | None, timed: Sequence[StepSummary]) -> int | None:
    if memory is not None and memory.live is not None:
        return memory.live.peak_bytes
    return timed[-1].device_peak_bytes if timed else None


def loss_of(summary: StepSummary) -> float | None:
    """Return the loss among the user's notes of a step: `loss`, or else the first whose name holds the word."""
    if _LOSS in summary.notes:
        return summary.notes[_LOSS]
    return next((value for name, value in summary.notes.items() if _LOSS in name), None)


def loss_difference(first: ObservedRun, second: ObservedRun) -> str:
    """Return a sentence that says whether the losses of two runs are equal in every bit."""
    others = dict(second.losses)
    pairs = [(step, loss, others[step]) for step, loss in first.losses if step in others]
    if not pairs:
        return f"{first.name} and {second.name} have no step of which both noted a loss."
    apart = next((pair for pair in pairs if pair[1] != pair[2]), None)
    if apart is None:
        return f"The losses of {first.name} and {second.name} are equal in every bit over {len(pairs)} steps."
    step, own, other = apart
    return f"The losses of {first.name} and {second.name} differ first at step {step}: {own!r} and {other!r}."


def thinned(points: Points) -> Points:
    """Return at most 300 points: beyond that, the median of neighbours stands for them, at the first of their steps."""
    size = max(1, math.ceil(len(points) / _MOST_POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return tuple((group[0][0], statistics.median(value for _, value in group)) for group in groups)


def run_data(run: ObservedRun) -> dict[str, Any]:
    """Return the figures of a run as columns by rank, exact, for the data of a page."""
    return {
        "name": run.name,
        "model": run.meta.model,
        "device": run.meta.device,
        "num_ranks": run.meta.num_ranks,
        "steps": {
            str(rank): {
                "step": [each.step for each in steps],
                "period_s": [each.period_s for each in steps],
                "loss": [loss_of(each) for each in steps],
            }
            for rank, steps in run.steps.items()
        },
    }
