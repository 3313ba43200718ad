"""What a study leaves: rows of the same training under other placements, and their JSON.

```text
  row       period   losses        timed steps     a step in full     memory
  device    1.31 s   10.9, 10.8,   8 summaries     spans, phases      bytes by kind over a step
  disk      2.20 s   10.9, 10.8,   ...
```
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import TraceFileError
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.plan import Plan
from elixir_compile.tools.study.observed import FullStep, StepSummary
from elixir_compile.tools.study.trace_files import parsed

STUDY_FORMAT = 1
_STUDY = Form(what="study", version=STUDY_FORMAT, error=TraceFileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One placement under one budget: what was measured or simulated, or why it was not run."""

    name: str
    """The placement, as `across_steps`, and the budget if it is not the first: `plan 60%`."""
    what: str
    """Where the training state is and when it is updated, as a sentence."""
    budget_bytes: int | None
    """Bytes of device memory that the row may use; None if nothing limits it."""
    is_simulated: bool = False
    reason: str = ""
    """Why the row has no figures, such as the bytes by which it does not fit; empty if it has."""
    losses: tuple[float, ...] = ()
    """The loss of each step, from the first."""
    timed: tuple[StepSummary, ...] = ()
    """The summaries of the timed steps."""
    full: FullStep | None = None
    """A step with all of its spans."""
    memory: FullStep | None = None
    """A step with the bytes on the device over it. It is another one, because the events of an allocator slow a step
    down."""
    peak_bytes: int | None = None
    """The most bytes on the device in a step, as its allocator tells, or as planned; None if that is not known."""
    plan: Plan | None = None
    """None for a row without a plan of ours, `inductor`."""

    @property
    def period_s(self) -> float | None:
        """The median seconds from one step to the next; None if the row was not run."""
        return statistics.median(each.period_s for each in self.timed) if self.timed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The same training under several placements on one machine."""

    model: str
    command: str
    """The command that repeats the study."""
    cluster: Cluster
    rows: tuple[StudyRow, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    def equal_losses(self) -> Mapping[str, int | None]:
        """Return, for each row with losses, the number of the first loss that differs from the first such row in any
        bit; None if all are equal."""
        rows = [row for row in self.rows if row.losses]
        found: dict[str, int | None] = {}
        for row in rows:
            pairs = zip(rows[0].losses, row.losses, strict=False)
            found[row.name] = next((at for at, (first, own) in enumerate(pairs) if first != own), None)
        return found


def study_to_json(study: Study) -> str:
    """Return `study` as JSON."""
    return to_json(_STUDY, study, indent=None)


def study_from_json(text: str) -> Study:
    """Return the study in `text`. Raises TraceFileError with the wrong field if there is none."""
    return from_json(_STUDY, Study, text)


def study_path(folder: "str | Path") -> Path:
    """Return the path of the study in `folder`."""
    return Path(folder) / "study.json"


def read_study(folder: "str | Path") -> Study:
    """Return the study in `folder`. Raises TraceFileError with the file and the wrong field if there is none."""
    return parsed(study_path(folder), study_from_json)
