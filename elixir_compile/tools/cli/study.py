"""`elixir-compile study`: the same training under several placements, each in a process of its own, side by side."""

import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import ElixirError, InvalidOption, NoFeasiblePlan, TraceFileError
from elixir_compile.base.folders import write_whole
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import format_bytes, parse_bytes
from elixir_compile.base.version import __version__
from elixir_compile.compat.platforms import accelerator_type
from elixir_compile.ir.kinds import Phase
from elixir_compile.ir.schedule import Origin, Record
from elixir_compile.session.cache import plan_for
from elixir_compile.session.machine import machine
from elixir_compile.tools.cli.plan import DTYPES, Request
from elixir_compile.tools.cli.report import fail
from elixir_compile.tools.observed import (
    FullStep,
    Interval,
    StepSummary,
    Study,
    StudyRow,
    seconds_by_phase,
    study_to_json,
)
from elixir_compile.tools.plan import named_cluster, question
from elixir_compile.tools.preview.capture import Inputs
from elixir_compile.tools.preview.models import TextBatch, load_model, require_model
from elixir_compile.tools.report.page import study_page
from elixir_compile.tools.report.runs import planned_row, study_text

# ----------------------------------------------------------------------------------------------------------------------
# The rows of a study: placements of the training state, each as options of the backend.


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A way to train: where the state is, and when it is updated."""

    name: str
    what: str
    options: Mapping[str, object] = field(default_factory=dict)
    backend: str = "elixir"
    clips: bool = True
    """Whether gradients are clipped by their norm, which an update within the backward cannot be."""
    on_disk: bool = False


def _offloaded(update: str) -> Mapping[str, object]:
    return {"planner": "zero_offload", "update": update}


PLACEMENTS: Mapping[str, Placement] = {
    row.name: row
    for row in (
        Placement(name="device", what="everything on the device", options={"planner": "keep_all"}),
        Placement(
            name="after_backward",
            what="optimizer state on the host, updated within optimizer.step() (ZeRO-Offload)",
            options=_offloaded("after_backward"),
        ),
        Placement(
            name="across_steps",
            what="optimizer state on the host, updated beside the next forward",
            options=_offloaded("across_steps"),
        ),
        Placement(
            name="in_backward",
            what="optimizer state on the host, updated beside the backward, without clipping",
            options=_offloaded("in_backward"),
            clips=False,
        ),
        Placement(
            name="disk",
            what="as much optimizer state on disk as there may be",
            options=_offloaded("across_steps"),
            on_disk=True,
        ),
        Placement(name="plan", what="the plan of a search within the budget", options={"planner": "milp"}),
        Placement(name="inductor", what="torch.compile with its own backend and torch's AdamW", backend="inductor"),
    )
}
"""By name, in the order of the rows."""


def placements_named(names: str | None) -> tuple[Placement, ...]:
    """Return the placements in `names`, separated by commas; all if it is None. Raises InvalidOption for another."""
    if names is None:
        return tuple(PLACEMENTS.values())
    chosen = [name.strip() for name in names.split(",")]
    wrong = next((name for name in chosen if name not in PLACEMENTS), None)
    if wrong is not None:
        raise InvalidOption("placements", wrong, "names of " + ", ".join(PLACEMENTS) + ", separated by commas")
    return tuple(PLACEMENTS[name] for name in dict.fromkeys(chosen))


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget of device memory, as typed."""

    text: str

    @property
    def is_share(self) -> bool:
        """Whether the budget is a percentage."""
        return self.text.endswith("%")

    def nbytes(self, whole_bytes: int) -> int:
        """Return the bytes; a percentage is of `whole_bytes`. Raises InvalidOption if the text is no budget."""
        try:
            if not self.is_share:
                return parse_bytes(self.text)
            share = float(self.text[:-1]) / 100
            if not 0 < share <= 10:
                raise ValueError(f"{share} is no share of the memory")
            return int(share * whole_bytes)
        except ValueError as error:
            raise InvalidOption("budgets", self.text, "percentages such as 60%, or bytes such as 2GiB") from error


def budgets_named(text: str) -> tuple[Budget, ...]:
    """Return the budgets in `text`, separated by commas. Raises InvalidOption if a part is no budget."""
    budgets = tuple(Budget(part.strip()) for part in text.split(",") if part.strip())
    for budget in budgets:
        budget.nbytes(whole_bytes=1)  # rows of minutes run before the row that has the budget
    return budgets


# ----------------------------------------------------------------------------------------------------------------------
# Train one row of a study in a process of its own, which then has an allocator and peaks of its own.
#
#   steps   0 .. 8     settle: compile, time, plan again
#           9 .. 16    timed, with a summary each
#           17         in full: every span
#           18, 19     memory: every allocation, of the second of them
#           20         its peak, from the allocator


SETTLING = 9
"""Steps before the first that is timed."""
_MEMORY_STEPS = 2
_SEED = 0
_LEARNING_RATE = 3e-4
_MOST_ATTEMPTS = 6
"""Of a row with state on disk, whose least host memory is told piece by piece."""
_CASE = Form(what="case of a study", version=1, error=TraceFileError)
_ROW = Form(what="row of a study", version=1, error=TraceFileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The training of one process."""

    name: str
    placement: str
    model: str
    batch: int
    seq: int
    dtype: str
    num_timed: int
    budget_bytes: int | None = None
    disk_path: str = ""


def run_case(case: Case) -> StudyRow:
    """Train `case`, and return its row; a row that does not fit has the reason and no figures."""
    placement = PLACEMENTS[case.placement]
    row = StudyRow(name=case.name, what=placement.what, budget_bytes=case.budget_bytes)
    options: dict[str, object] = {**placement.options, "replan": False, "report": False}
    if case.budget_bytes is not None and placement.backend == "elixir":
        options["device_memory"] = case.budget_bytes
    try:
        if not placement.on_disk:
            return _trained(case, placement, row, options)
        with tempfile.TemporaryDirectory(dir=case.disk_path or None) as folder:
            # With the least host memory that has a plan: each refusal tells bytes that are missing.
            options |= {"disk_path": folder, "host_memory": 1 << 20}
            for _ in range(_MOST_ATTEMPTS):
                try:
                    return _trained(case, placement, row, options)
                except NoFeasiblePlan as error:
                    if error.memory != "host":
                        raise
                    options["host_memory"] = error.needed_bytes
                    torch.compiler.reset()
        return replace(row, reason=f"no plan within {options['host_memory']} bytes of host memory")
    except (NoFeasiblePlan, torch.OutOfMemoryError) as error:
        return replace(row, reason=str(error))


def _trained(case: Case, placement: Placement, row: StudyRow, options: Mapping[str, object]) -> StudyRow:
    device = accelerator_type() or "cpu"
    torch.manual_seed(_SEED)
    text = TextBatch(batch=case.batch, seq=case.seq, dtype=DTYPES[case.dtype])
    model, inputs = load_model(case.model, text, device="cpu")
    without_dropout(model)
    loop = _Loop(model, inputs, placement, options, device)
    if placement.backend != "elixir":
        # Without plans of ours: phases by the clock of the loop, and no lanes.
        alone: list[StepSummary] = []
        for number in range(SETTLING + case.num_timed):
            loop.step()
            if number >= SETTLING:
                seconds_s, period_s = seconds_by_phase(loop.phases), loop.phases[-1].end_s
                alone.append(StepSummary(step=number, rank=0, plans=(), period_s=period_s, seconds_s=seconds_s))
        intervals, peak_bytes = tuple(loop.phases), elixir.measure_step(loop.step).device_peak_bytes
        spanless = Record(
            origin=Origin.MEASURED, step_s=alone[-1].period_s, device_peak_bytes=peak_bytes, host_peak_bytes=0
        )
        full = FullStep(summary=alone[-1], intervals=intervals, record=spanless)
        return replace(row, losses=tuple(loop.losses), timed=tuple(alone), full=full, peak_bytes=peak_bytes)
    with elixir.observe(model, full=(SETTLING + case.num_timed,)) as study:
        for _ in range(SETTLING + case.num_timed + 1):
            loop.step()
    with elixir.observe(model, full=(_MEMORY_STEPS - 1,), memory_events=True) as allocations:
        for _ in range(_MEMORY_STEPS):
            loop.step()
    record = elixir.measure_step(loop.step)
    (plan,) = [made.plan for made in elixir.compilations(model) if not made.is_superseded]
    timed = tuple(each for each in study.summaries if SETTLING <= each.step < SETTLING + case.num_timed)
    return replace(
        row,
        losses=tuple(loop.losses),
        timed=timed,
        full=study.full_steps[-1],
        memory=allocations.full_steps[-1],
        peak_bytes=record.device_peak_bytes,
        plan=plan,
    )


def without_dropout(model: nn.Module) -> None:
    """Set the probability of all dropout of `model` to 0, because losses of the rows are compared bit for bit."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            # Attention of transformers keeps the probability as a number.
            if name.endswith(("dropout", "dropout_prob", "pdrop")) and isinstance(value, float):
                setattr(module, name, 0.0)


class _Loop:
    """The training of one row: the same seed, batches and arithmetic as in the others."""

    def __init__(
        self, model: nn.Module, inputs: Inputs, placement: Placement, options: Mapping[str, object], device: str
    ) -> None:
        self._model, self._inputs, self._placement, self._device = model, inputs, placement, device
        self._vocabulary = _vocabulary(model)
        is_ours = placement.backend == "elixir"
        if is_ours and device != "cpu":
            elixir.prepare(model, device=device)
        elif not is_ours:
            model.to(device)
        given: Any = dict(options) if is_ours else None
        self._compiled = torch.compile(model, backend=placement.backend, options=given)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer = (
            elixir.HybridAdamW(parameters, lr=_LEARNING_RATE)
            if is_ours
            else torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True)
        )
        self._parameters = parameters
        self.losses: list[float] = []
        self.phases: list[Interval] = []
        """Of the last step, without a gap; the same as those that an observation tells apart."""
        self._began_s = 0.0

    def step(self) -> None:
        """Train on the next batch."""
        self.phases.clear()
        self._began_s = time.perf_counter()
        batch = self._batch(len(self.losses))
        self._phase_ends(None)
        made = self._compiled(**batch) if isinstance(batch, dict) else self._compiled(*batch)
        loss = made.loss if hasattr(made, "loss") else made
        self._phase_ends(Phase.FORWARD)
        loss.backward()
        self._phase_ends(Phase.BACKWARD)
        if self._placement.clips:
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._phase_ends(None)
        self._optimizer.step()
        self._phase_ends(Phase.UPDATE)
        self._optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self._phase_ends(None)

    def _phase_ends(self, phase: Phase | None) -> None:
        """Note that the work since the end of the phase before was that of `phase`; None for the caller's own."""
        start_s = self.phases[-1].end_s if self.phases else 0.0
        end_s = time.perf_counter() - self._began_s
        self.phases.append(Interval(phase=phase, start_s=start_s, end_s=end_s))

    def _batch(self, number: int) -> Any:
        """Return batch `number`, the same in every row: random tokens, images and classes."""
        random = torch.Generator().manual_seed(number)
        made: dict[int, torch.Tensor] = {}

        def filled(like: object) -> object:
            if not isinstance(like, torch.Tensor):
                return like
            if id(like) not in made:
                if like.is_floating_point():
                    values = torch.randn(like.shape, generator=random).to(like.dtype)
                else:
                    values = torch.randint(0, self._vocabulary, like.shape, generator=random).to(like.dtype)
                made[id(like)] = values.to(self._device)
            return made[id(like)]

        if isinstance(self._inputs, Mapping):
            return {name: filled(value) for name, value in self._inputs.items()}
        return [filled(value) for value in self._inputs]


def _vocabulary(model: nn.Module) -> int:
    """Return the number of tokens or classes that every integer input may name."""
    config = getattr(model, "config", None)
    for name in ("vocab_size", "num_labels"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(sizes, default=2)


# ----------------------------------------------------------------------------------------------------------------------
# Run the rows of a study, each in a process of its own or simulated, and write study.json and study.html.


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest(Request):
    """The arguments of `elixir-compile study`, as typed. As a request it captures the model for rows that are
    simulated."""

    placements: str | None
    budgets: str
    steps: int
    disk_path: Path | None
    recompute: bool = False
    ranks: int = 1


def run_study(*, output: Path, as_json: bool, **typed: Any) -> int:
    """Run the rows of a `StudyRequest` with the arguments `typed`, print their table and findings, and write study.json
    and study.html to `output`.

    Returns the exit code: 1 if an argument is wrong, or if no row could be run.
    """
    asked = StudyRequest(**typed)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        placements, budgets = placements_named(asked.placements), budgets_named(asked.budgets)
        cluster = named_cluster(asked.hardware)
        rows = _planned_rows if cluster is not None else _measured_rows
        here = cluster or machine(torch.device(accelerator_type() or "cpu"))
        found: list[StudyRow] = []
        for row in rows(asked, placements, budgets, lambda line: notes.print(line, markup=False)):
            found.append(row)
            notes.print(f"{row.name}: {row.reason or 'done'}", markup=False)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    study = Study(
        model=f"{asked.model}, {asked.batch} x {asked.seq}, {asked.dtype}",
        command=shlex.join(["elixir-compile", *sys.argv[1:]]),
        cluster=here,
        rows=tuple(found),
        versions={"elixir_compile": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
    )
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "study.json", study_to_json(study).encode())
    write_whole(output / "study.html", study_page(study).encode())
    if as_json:
        typer.echo(json.dumps(json.loads(study_to_json(study)), indent=1))
    else:
        typer.echo(study_text(study))
        typer.echo(f"{output / 'study.html'}", err=True)
    return 0 if any(row.full is not None for row in found) else 1


def _cases(
    placements: tuple[Placement, ...], budgets: tuple[Budget, ...]
) -> Iterator[tuple[str, Placement, Budget | None]]:
    """Yield the name, the placement and the budget of each row: a plan is searched for each budget, other rows have
    none."""
    for placement in placements:
        if placement.name != "plan":
            yield placement.name, placement, None
            continue
        for budget in budgets:
            yield f"plan {budget.text}", placement, budget


Say = Callable[[str], None]


def _measured_rows(
    asked: StudyRequest, placements: tuple[Placement, ...], budgets: tuple[Budget, ...], say: Say
) -> Iterator[StudyRow]:
    """Yield the rows, each trained in a process of its own on this machine.

    A percentage of a budget is of the peak of the row `device`. Raises InvalidOption if that row is not asked for
    before, and UnknownModel.
    """
    require_model(asked.model)  # else each row would start a process that finds nothing
    peaks: dict[str, int | None] = {}
    for name, placement, budget in _cases(placements, budgets):
        whole_bytes = peaks.get("device")
        if budget is not None and budget.is_share and whole_bytes is None:
            if "device" not in peaks:
                said = "bytes, because no row `device` has run before: add it first"
                raise InvalidOption("budgets", asked.budgets, said)
            reason = f"{budget.text} of the peak of the row `device`, which did not run"
            yield StudyRow(name=name, what=placement.what, budget_bytes=None, reason=reason)
            continue
        budget_bytes = None if budget is None else budget.nbytes(whole_bytes or 0)
        say(f"{name} ..." if budget_bytes is None else f"{name}, {format_bytes(budget_bytes)} ...")
        case = Case(
            name=name,
            placement=placement.name,
            model=asked.model,
            batch=asked.batch,
            seq=asked.seq,
            dtype=asked.dtype,
            num_timed=asked.steps,
            budget_bytes=budget_bytes,
            disk_path="" if asked.disk_path is None else str(asked.disk_path),
        )
        row = _apart(case)
        peaks[name] = row.peak_bytes
        yield row


def _apart(case: Case) -> StudyRow:
    """Return the row of `case`, trained in a new process; if the process fails, a row with its last line."""
    with tempfile.TemporaryDirectory(prefix="elixir-study-") as folder:
        case_path, row_path = Path(folder, "case.json"), Path(folder, "row.json")
        case_path.write_text(to_json(_CASE, case), encoding="utf-8")
        command = [sys.executable, "-m", "elixir_compile.tools.cli.study", str(case_path), str(row_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if row_path.is_file():
            return from_json(_ROW, StudyRow, row_path.read_text(encoding="utf-8"))
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        what = PLACEMENTS[case.placement].what
        reason = f"its process ended with {done.returncode}: {last}"
        return StudyRow(name=case.name, what=what, budget_bytes=case.budget_bytes, reason=reason)


def _planned_rows(
    asked: StudyRequest, placements: tuple[Placement, ...], budgets: tuple[Budget, ...], say: Say
) -> Iterator[StudyRow]:
    """Yield the rows as simulated on a machine that is not here. A percentage is of the peak of the row `device`."""
    say(f"capturing {asked.model} ...")
    cluster = asked.cluster()
    assert cluster is not None
    capture = asked.capture()
    peaks: dict[str, int | None] = {}
    for name, placement, budget in _cases(placements, budgets):
        whole_bytes = peaks.get("device") or cluster.device.memory_bytes - cluster.device.reserve_bytes
        budget_bytes = None if budget is None else budget.nbytes(whole_bytes)
        row = StudyRow(name=name, what=placement.what, budget_bytes=budget_bytes, is_simulated=True)
        if placement.backend != "elixir" or placement.on_disk:
            yield replace(row, reason="not simulated: it is measured on a machine that is here")
            continue
        say(f"{name} ...")
        given = dict(placement.options) | ({} if budget_bytes is None else {"device_memory": budget_bytes})
        problem, options = question(capture, parse_options(given), cluster)
        try:
            plan = plan_for(problem, options)
        except NoFeasiblePlan as error:
            yield replace(row, reason=str(error))
            continue
        made = planned_row(row, plan, problem.graph, cluster, problem.measured)
        peaks[name] = made.peak_bytes
        yield made


def main() -> None:
    """Train the case in the file that the first argument names, and write its row to the second."""
    case_path, row_path = map(Path, sys.argv[1:3])
    case = from_json(_CASE, Case, case_path.read_text(encoding="utf-8"))
    row_path.write_text(to_json(_ROW, run_case(case), indent=None), encoding="utf-8")


if __name__ == "__main__":
    main()
