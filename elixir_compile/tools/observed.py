"""The figures that an observed run or a study leaves, as values with their JSON: phases, summaries and counters of
steps, the rows of a study, and the names of files.
"""

import gzip
import math
import re
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elixir_compile.base.codec import LEFT_OUT, Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan, TraceFileError
from elixir_compile.base.folders import write_whole
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.kinds import Phase
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Record

# ----------------------------------------------------------------------------------------------------------------------
# An observed run leaves the phases of a step, a summary of every step, counters of the machine, and their JSON.
#
#   period   |<---- forward ---->|<------ backward ------>|caller|<- update ->| caller |
#            the first training forward of the step                   the first training forward of the next step


SUMMARY_FORMAT = 1
FULL_STEP_FORMAT = 1
_SUMMARY = Form(what="step", version=SUMMARY_FORMAT, error=TraceFileError)
_FULL_STEP = Form(what="full step", version=FULL_STEP_FORMAT, error=TraceFileError)
CALLER = "caller"
"""The name of the time in no phase: data, logging, eager code, clipping."""
OTHER = "other"
"""The kind of bytes that no phase of ours took, such as a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A part of a step, in seconds since the step began, that belongs to one phase."""

    phase: Phase | None
    """The innermost phase; None if the caller's own code runs."""
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s) and self.start_s <= self.end_s):
            raise InvalidPlan(f"an interval of {name_of(self.phase)} lasts from {self.start_s} s to {self.end_s} s.")


def name_of(phase: Phase | None) -> str:
    """Return the name of `phase` in tables and files: `forward`, or `caller` for None."""
    return CALLER if phase is None else str(phase)


def seconds_by_phase(intervals: Iterable[Interval]) -> dict[str, float]:
    """Return the seconds of each phase that occurs in `intervals`, by name. They add up to the period."""
    seconds_s: dict[str, float] = {}
    for interval in intervals:
        name = name_of(interval.phase)
        seconds_s[name] = seconds_s.get(name, 0.0) + interval.end_s - interval.start_s
    return seconds_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Figures of the machine over time. The names end in their units: `device_power_w`, `link_tx_bytes_per_s`."""

    at_s: tuple[float, ...]
    values: Mapping[str, tuple[float | None, ...]]
    """By name, a value for each time in `at_s`; None where the machine did not tell."""

    def __post_init__(self) -> None:
        for name, values in self.values.items():
            if len(values) != len(self.at_s):
                raise InvalidPlan(f"counter {name} has {len(values)} values at {len(self.at_s)} times.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The seconds, bytes and memory of a step of an observed run. Figures that are not known are None.

    It has more than 15 fields, because it is one row of a table.
    """

    step: int
    """The number of the step since the observation began, from 0."""
    rank: int
    plans: tuple[str, ...]
    """The keys of the plans in force at the end of the step, one for each captured training graph."""
    period_s: float
    """Seconds from the first training forward of the step to that of the next step: what a user waits for."""
    seconds_s: Mapping[str, float]
    """Seconds in each phase: `forward`, `backward`, `update` and `caller`. They add up to `period_s`."""
    moved_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes that each lane moved, by the phase in which the move was asked for: `moved_bytes["h2d"]["forward"]`."""
    host_update_s: float | None = None
    """Seconds in which the host updated parameters, also beside other phases."""
    host_update_elements: int | None = field(default=None, metadata=LEFT_OUT)
    """Elements of parameters that the host updated in the step; an update beside later phases counts where it ends."""
    waited_s: float | None = None
    """Seconds in which the thread of the step was blocked by a wait of ours."""
    device_peak_bytes: int | None = None
    """The most bytes of tensors on the device since the process began, or since its statistics were reset last."""
    device_reserved_bytes: int | None = None
    """Bytes that torch's allocator holds on the device at the end of the step."""
    alloc_retries: int | None = None
    """How often the allocator had to free its cache in this step before an allocation fit."""
    host_slab_bytes: int = 0
    """The most bytes of our host memory for parameters, state and activations at a change of phases."""
    host_pinned_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Bytes of our host memory that are page-locked at the end of the step, so that copies do not block."""
    rss_bytes: int | None = None
    """Resident bytes of the process at the end of the step."""
    energy_j: float | None = None
    """Joules that the device drew in the step."""
    device_busy_share: float | None = None
    """The share of the step, 0 to 1, in which the device ran any kernel, as the driver samples it."""
    notes: Mapping[str, float] = field(default_factory=dict)
    """The user's own figures by name, of `study.note(loss=...)`."""

    def __post_init__(self) -> None:
        seconds = (self.period_s, *self.seconds_s.values())
        if not all(math.isfinite(value) and value >= 0 for value in seconds):
            raise InvalidPlan(f"step {self.step} has seconds that are negative or not finite: {seconds}.")
        if min((nbytes for by_phase in self.moved_bytes.values() for nbytes in by_phase.values()), default=0) < 0:
            raise InvalidPlan(f"step {self.step} says that a negative number of bytes was moved.")

    def lane_bytes(self, lane: str) -> int:
        """Return the bytes that `lane` moved in all phases; 0 if it moved none."""
        return sum(self.moved_bytes.get(lane, {}).values())

    @property
    def host_update_elements_per_s(self) -> float | None:
        """Elements that the host updates per second of its updates; None if it updated none."""
        if not self.host_update_elements or not self.host_update_s:
            return None
        return self.host_update_elements / self.host_update_s

    def scalars(self) -> dict[str, float]:
        """Return the finite figures of the step under names for loggers, `elixir/period_s`; unknown ones are absent.

        `elixir/of_step` is the number of the step, which may be two steps before the step that logs it.
        """
        found: dict[str, float | None] = {"of_step": self.step, "period_s": self.period_s}
        found |= {f"{phase}_s": seconds_s for phase, seconds_s in self.seconds_s.items()}
        for lane in self.moved_bytes:
            nbytes = self.lane_bytes(lane)
            found[f"{lane}_bytes"] = nbytes
            found[f"{lane}_bytes_per_s"] = nbytes / self.period_s if self.period_s else None
        found |= {name: getattr(self, name) for name in _PLAIN_FIGURES}
        found["host_update_elements_per_s"] = self.host_update_elements_per_s
        known = {name: float(value) for name, value in found.items() if value is not None}
        return {f"elixir/{name}": value for name, value in known.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes on the device over a step, by kind: a step function of time."""

    at_s: tuple[float, ...]
    """The times, in seconds since the step began, at which bytes change. The first is 0."""
    by_kind: Mapping[str, tuple[int, ...]]
    """By kind, a `Kind` of the plan or `other`, the bytes from each time on."""

    def __post_init__(self) -> None:
        for kind, values in self.by_kind.items():
            if len(values) != len(self.at_s):
                raise InvalidPlan(f"{kind} has {len(values)} byte counts at {len(self.at_s)} times.")
            if min(values, default=0) < 0:
                raise InvalidPlan(f"{kind} has {min(values)} bytes at some time.")

    @property
    def totals_bytes(self) -> list[int]:
        """Bytes of all kinds together, from each time on."""
        return [sum(column) for column in zip(*self.by_kind.values(), strict=True)]

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once."""
        return max(self.totals_bytes, default=0)

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by kind at the first time of the peak."""
        totals = self.totals_bytes
        place = totals.index(max(totals)) if totals else 0
        return {kind: values[place] for kind, values in self.by_kind.items() if values}


@dataclass(frozen=True, slots=True, kw_only=True)
class FullStep:
    """The summary of a step, its phases, its spans and, if they were recorded, its memory and counters."""

    summary: StepSummary
    intervals: tuple[Interval, ...]
    record: Record
    live: Live | None = None
    """None if the memory of the step was not recorded."""
    counters: Counters | None = None
    """Figures of the machine in the step; None if none were read."""


_PLAIN_FIGURES = (
    "host_update_s", "host_update_elements", "waited_s", "device_peak_bytes", "device_reserved_bytes", "alloc_retries",
    "host_slab_bytes", "host_pinned_bytes", "rss_bytes", "energy_j", "device_busy_share",
)  # fmt: skip


def summary_to_json(summary: StepSummary) -> str:
    """Return `summary` as one line of JSON, without the end of the line."""
    return to_json(_SUMMARY, summary, indent=None)


def summary_from_json(text: str) -> StepSummary:
    """Return the summary in `text`. Raises TraceFileError with the wrong field if the text is not a summary."""
    return from_json(_SUMMARY, StepSummary, text)


def summaries_from_lines(text: str) -> list[StepSummary]:
    """Return the summaries in `text`, one on each line.

    A last line without its end is ignored: the process ended while it wrote. Raises TraceFileError if another line is
    not a summary.
    """
    lines = text.split("\n")[:-1]
    return [summary_from_json(line) for line in lines]


def full_step_to_json(full: FullStep) -> str:
    """Return `full` as one line of JSON."""
    return to_json(_FULL_STEP, full, indent=None)


def full_step_from_json(text: str) -> FullStep:
    """Return the recorded step in `text`. Raises TraceFileError with the wrong field if the text is none."""
    return from_json(_FULL_STEP, FullStep, text)


# ----------------------------------------------------------------------------------------------------------------------
# The folder of an observed run: names of its files, and their content as values.
#
#   meta.json                  the observation
#   steps-r0.jsonl             a summary on each line, in order of the steps of rank 0
#   record-r0-8.json.gz        all that was recorded of step 8 of rank 0
#   plan-<key>.json            the plan that summaries name, and beside it plan-<key>.question.json.gz
#
# Each rank writes its own files. A line is on disk when its step is known, so a process that is killed leaves whole
# lines, and at most a part of one behind them.


TRACE_FORMAT = 1
Value = TypeVar("Value")
_META = Form(what="trace", version=TRACE_FORMAT, error=TraceFileError)
_STEPS, _RECORD = re.compile(r"steps-r(\d+)\.jsonl"), re.compile(r"record-r(\d+)-(\d+)\.json\.gz")
_MOST_BYTES = 1 << 28
"""The most bytes that are read of one file, unpacked: 256 MiB, a summary of a million steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """The facts about an observation as a whole, with the versions."""

    model: str
    """The class of the model."""
    num_ranks: int
    device: str
    """The type of the device: `cpu`, `cuda`."""
    versions: Mapping[str, str]
    """By library: `torch`, `elixir_compile`, `python`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The figures in a folder: summaries by rank, and the paths of the full records by rank and step."""

    meta: TraceMeta
    steps: Mapping[int, tuple[StepSummary, ...]]
    records: Mapping[tuple[int, int], Path]


def meta_path(folder: Path) -> Path:
    """Return the path of the file with the `TraceMeta`."""
    return folder / "meta.json"


def steps_path(folder: Path, rank: int) -> Path:
    """Return the path of the summaries of `rank`."""
    return folder / f"steps-r{rank}.jsonl"


def record_path(folder: Path, rank: int, step: int) -> Path:
    """Return the path of the full record of `step` of `rank`."""
    return folder / f"record-r{rank}-{step}.json.gz"


def plan_path(folder: Path, key: str) -> Path:
    """Return the path of the plan with `key`."""
    return folder / f"plan-{key}.json"


def own_files(folder: Path, rank: int) -> Iterator[Path]:
    """Yield the files in `folder` that an observation on `rank` has written: summaries and records."""
    for path in folder.iterdir():
        found = _STEPS.fullmatch(path.name) or _RECORD.fullmatch(path.name)
        if found is not None and int(found.group(1)) == rank:
            yield path


def write_meta(folder: Path, meta: TraceMeta) -> None:
    """Write `meta` to `folder`."""
    write_whole(meta_path(folder), to_json(_META, meta).encode())


def write_full_step(folder: Path, full: FullStep) -> None:
    """Write the full record of a step to `folder`, as a whole or not at all."""
    content = gzip.compress(full_step_to_json(full).encode(), compresslevel=1, mtime=0)
    write_whole(record_path(folder, full.summary.rank, full.summary.step), content)


def read_trace(folder: "str | Path") -> Trace:
    """Return the figures in `folder`.

    Raises TraceFileError with the file and the wrong field if a file is damaged, and if the folder holds no meta.json.
    """
    place = Path(folder)
    meta = parsed(meta_path(place), lambda text: from_json(_META, TraceMeta, text))
    steps: dict[int, tuple[StepSummary, ...]] = {}
    records: dict[tuple[int, int], Path] = {}
    for path in sorted(place.iterdir()):
        if found := _STEPS.fullmatch(path.name):
            steps[int(found.group(1))] = tuple(parsed(path, summaries_from_lines))
        elif found := _RECORD.fullmatch(path.name):
            records[int(found.group(1)), int(found.group(2))] = path
    return Trace(meta=meta, steps=dict(sorted(steps.items())), records=dict(sorted(records.items())))


def read_full_step(path: "str | Path") -> FullStep:
    """Return the full record of a step in the file at `path`. Raises TraceFileError if there is none."""
    return parsed(Path(path), full_step_from_json)


def parsed(path: Path, parse: Callable[[str], Value]) -> Value:
    """Return `parse` of the text in the file at `path`, unpacked if its name ends in `.gz`.

    Raises TraceFileError with the name of the file if it cannot be read, or if `parse` raises it.
    """
    try:
        return parse(_text(path))
    except TraceFileError as error:
        raise TraceFileError(f"{path}, {error.field}", error.expected, error.got) from error.__cause__


def _text(path: Path) -> str:
    try:
        with path.open("rb") as packed:
            file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise TraceFileError("the whole file", f"at most {_MOST_BYTES} bytes", "more")
        return content.decode()
    except UnicodeDecodeError as error:
        raise TraceFileError("the whole file", "text in UTF-8", f"byte {error.start} that is no UTF-8") from error
    except (EOFError, zlib.error) as error:
        raise TraceFileError("the whole file", "a whole gzip file", str(error)) from error
    except OSError as error:
        raise TraceFileError("the whole file", "a file that can be read", error.strerror or str(error)) from error


# ----------------------------------------------------------------------------------------------------------------------
# A study leaves rows of the same training under other placements, and their JSON.
#
#   row       period   losses        timed steps     a step in full     memory
#   device    1.31 s   10.9, 10.8,   8 summaries     spans, phases      bytes by kind over a step
#   disk      2.20 s   10.9, 10.8,   ...


STUDY_FORMAT = 1
_STUDY = Form(what="study", version=STUDY_FORMAT, error=TraceFileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One placement under one budget: its measured or simulated figures, or why it was not run."""

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
