"""`elixir-compile plan` and `verify`: search a plan for a model on any machine, or check a saved plan for a model."""

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from elixir_compile.base.errors import ElixirError, InvalidOption, InvalidPlan
from elixir_compile.base.options import Options, parse_options
from elixir_compile.base.process import collector_off
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Bucket, Plan, fingerprint, plan_from_json, plan_to_json
from elixir_compile.ir.hardware import Cluster, preset_of_ranks
from elixir_compile.ir.plan import plan_line
from elixir_compile.search import Problem
from elixir_compile.search.joint.variants import Chunks, chosen_number
from elixir_compile.search.planner import largest_feasible
from elixir_compile.search.problem import Question, question_of
from elixir_compile.session.cache import plan_for
from elixir_compile.session.plan_files import load_answered, load_plan, require_same_machine, save_plan
from elixir_compile.step import plan_at, verify
from elixir_compile.step.legality import require_same_graph
from elixir_compile.tools.cli.report import fail
from elixir_compile.tools.plan import named_cluster, plan_with_loss, question
from elixir_compile.tools.preview.capture import Capture, PlannedClass
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import TextBatch, cached_capture, capture_key, find_model, store_capture
from elixir_compile.tools.report.explain import plan_answer

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a command line, as typed."""

    model: str
    batch: int
    seq: int
    dtype: str
    recompute: bool
    hardware: str | None
    ranks: int
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the backend by name; a value of None stands for the default."""
    optimizer: str | None = None
    """The optimizer class by name; None for HybridAdamW."""

    def given_options(self) -> Mapping[str, object]:
        """Return the options without those of value None."""
        return {name: value for name, value in self.options.items() if value is not None}

    def parsed_options(self) -> Options:
        """Return the parsed options; the folder `disk_path` need not exist if a machine is named. Raises
        InvalidOption."""
        given = dict(self.given_options())
        folder = given.pop("disk_path", None) if self.hardware is not None else None
        options = parse_options(given)
        return options if folder is None else replace(options, disk_path=Path(str(folder)))

    def cluster(self) -> Cluster | None:
        """Return the machine to plan for, or None for this machine.

        Raises UnknownHardware, ProfileFileError, or InvalidOption if `ranks` contradicts the hardware.
        """
        host_bytes = self.parsed_options().host_memory
        if self.hardware is None or self.ranks == 1:
            if self.ranks != 1:
                raise InvalidOption("ranks", self.ranks, "1 without --hardware: this machine is planned for alone")
            return named_cluster(self.hardware, host_bytes)
        is_counted = self.hardware.lstrip()[:1].isdecimal()
        if Path(self.hardware).suffix != ".json" and not is_counted:
            return preset_of_ranks(self.hardware, self.ranks, host_bytes)
        cluster = named_cluster(self.hardware, host_bytes)
        if cluster is not None and cluster.num_ranks != self.ranks:
            raise InvalidOption("ranks", self.ranks, f"{cluster.num_ranks}, as {self.hardware} has devices")
        return cluster

    def capture(self, *, dynamic: bool = False, chunks: Chunks | None = None) -> Capture:
        """Return the captured step of the model; its batch is symbolic if `dynamic`.

        `chunks` splits the loss. Raises UnknownModel, UnsupportedModel, or InvalidOption for an unknown dtype, or an
        optimizer whose state plans do not place.
        """
        if self.dtype not in DTYPES:
            raise InvalidOption("dtype", self.dtype, "one of " + ", ".join(DTYPES))
        # Torch never makes a dimension of size 1 symbolic.
        batch = max(self.batch, 2) if dynamic else self.batch
        text = TextBatch(batch=batch, seq=self.seq, dtype=DTYPES[self.dtype], recompute=self.recompute)
        options = self.parsed_options()
        optimizer = None if self.optimizer is None else PlannedClass.of_name(self.optimizer)
        with collector_off():  # imports of transformers and new models make many objects
            key = capture_key(self.model, text, options, dynamic=dynamic, chunks=chunks, optimizer=self.optimizer)
            capture = None if key is None else cached_capture(key)
            if capture is None:
                model, inputs = find_model(self.model, text)
                asked = {"options": options, "dynamic": dynamic, "chunks": chunks, "optimizer": optimizer}
                capture = capture_model(model, inputs, **asked, may_fork=True)
                if key is not None:
                    store_capture(key, capture)
            gc.freeze()  # keeps the collector off torch's leftovers: 5 MB per layer, 1 s per collection
        # The name of a shape, or the last part of a path without its suffix.
        title = Path(self.model.rpartition(":")[0] or self.model).stem or self.model
        return replace(capture, graph=replace(capture.graph, name=title))


def run_plan(request: Request, *, state_bytes: int | None, is_largest: bool, output: Path | None, as_json: bool) -> int:
    """Search the plan of `request`, print it, write it to `output`; return the exit code: 2 if none fits, 1 on errors.

    `state_bytes` is the optimizer state per element in bytes; None stands for the state of `HybridAdamW`. If
    `is_largest`, the batch of the captured step is symbolic and the plan is for the largest batch with a plan. If
    `as_json`, stdout gets the JSON of the plan and nothing else.
    """
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        made, asked, batch = _search(request, notes, state_bytes=state_bytes, is_largest=is_largest)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    try:
        if output is not None:
            save_plan(made, output, asked)
    except OSError as error:
        notes.print(f"error: cannot write {output}: {error.strerror}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(plan_to_json(made) + "\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(placement_table(made))
        for name, value in _figures(made) + ([("largest batch", str(batch))] if is_largest else []):
            console.print(f"{name:<13} {value}", markup=False)
        console.print(plan_line(made), markup=False)
    if output is not None:
        notes.print(f"plan: {output}", markup=False)
    return 0


def _search(
    request: Request, notes: Console, *, state_bytes: int | None, is_largest: bool
) -> tuple[Plan, Question, int]:
    """Return the plan of `request`, the question that it answers, and the batch."""
    # Options and machine are checked before the capture, which takes seconds.
    options, cluster = request.parsed_options(), request.cluster()

    def ask(capture: Capture, options: Options) -> tuple[Problem, Options]:
        return question(capture, options, cluster, state_bytes_per_element=state_bytes)

    def search(problem: Problem, options: Options) -> Plan:
        with status_line(notes, "planning"):
            return plan_for(problem, options)

    def capture_with(chunks: Chunks | None) -> Capture:
        with status_line(notes, f"capturing {request.model}"):
            return request.capture(dynamic=is_largest, chunks=chunks)

    if not is_largest:
        made, problem = plan_with_loss(capture_with, ask, search, options)
        return made, question_of(problem, options), request.batch
    capture = capture_with(None)

    def problem_at(size: int) -> Problem:
        return ask(capture.at_batch(size), options)[0]

    with status_line(notes, "looking for the largest batch"):
        # If not even a batch of 1 fits, planning it raises NoFeasiblePlan with the missing bytes.
        batch = max(largest_feasible(problem_at), 1)
    problem, own = ask(capture.at_batch(batch), options)
    return search(problem, own), question_of(problem, options), batch


@contextmanager
def status_line(notes: Console, what: str = "") -> Iterator[Callable[[str], None]]:
    """Show `what ...` on a terminal during the block, or the line with which the function that is yielded was called
    last; the line disappears with the block.

    It does not move: a drawing thread would take time from the process that captures at the same time.
    """
    if not notes.is_terminal:
        yield lambda line: None
        return
    with Live(f"{what} ..." if what else "", console=notes, transient=True, auto_refresh=False) as live:
        yield lambda line: live.update(f"{line} ...", refresh=True)


def placement_table(plan: Plan) -> Table:
    """Return a table with a row per placement in `plan`: how many buckets, their parameters and state in bytes."""
    groups: dict[tuple[str, str, str], list[Bucket]] = {}
    for bucket, placement in zip(plan.buckets, plan.placements, strict=True):
        copy = "stays" if placement.resident else "released"
        optim = f"{placement.optim}{', streamed' if placement.streamed else ''}"
        key = (str(placement.param), optim, copy if bucket.is_gathered_from(placement.param) else "")
        groups.setdefault(key, []).append(bucket)
    table = Table(title=f"{plan.name} on {plan.cluster}", title_justify="left")
    for name in ("parameters", "optimizer state", "gathered copy"):
        table.add_column(name)
    for name in ("buckets", "parameters", "state"):
        table.add_column(name, justify="right")
    for key, buckets in sorted(groups.items()):
        sizes = (sum(bucket.nbytes for bucket in buckets), sum(bucket.state_nbytes for bucket in buckets))
        table.add_row(*key, str(len(buckets)), *(format_bytes(nbytes) for nbytes in sizes))
    return table


def _figures(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, text) of the predicted figures of `plan`, and of its bound if it has a bound."""
    made = plan.prediction
    figures = [
        ("peak", f"{format_bytes(made.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}, {made.device_peak_at}"),
        ("host", format_bytes(made.host_peak_bytes)),
        ("step", f"{format_s(made.step_s)}, {format_s(made.exposed_s)} of it exposed transfers"),
    ]
    if any(bucket.trainable for bucket in plan.buckets):
        figures.append(("update", str(plan.update)))
    figures += [("disk", f"{each.choice}, {each.because}") for each in plan.decisions if each.subject == "disk"]
    chosen = chosen_number(plan)
    if chosen is not None:
        figures.append(("micro-batches", f"{chosen.choice}, as {chosen.because}"))
    if plan.bound_s is not None and plan.gap is not None:
        figures.append(
            ("bound", f"{format_s(plan.bound_s)}: no plan is more than {plan.gap:.1%} faster{plan.on_share}")
        )
    if plan.binding:
        figures.append(("binding", ", ".join(plan.binding)))
    gib_saves = plan_answer(plan).gib_saves
    if gib_saves:
        figures.append(("1 GiB more", gib_saves))
    if plan.formula:
        figures.append(("peak(sizes)", plan.formula))
    return figures


def run_verify(plan: Path, *, model: str | None, param_dtype: str | None, as_json: bool, **asked: Any) -> int:
    """Check the file `plan`, print the result, and return the exit code: 0 if all checks pass, else 1.

    With a `model`, it is captured again with what else is `asked`, and the plan is checked for its step; if this names
    a machine, the machine is compared too. Without one, the plan is checked for the step in the question file beside
    it; if there is no such file, only the file of the plan is checked.
    """
    checked = "file"
    try:
        made = load_plan(plan)
        expected = made.prediction
        if expected.device_peak_bytes > made.budget_bytes:
            peak, budget = format_bytes(expected.device_peak_bytes), format_bytes(made.budget_bytes)
            raise InvalidPlan(f"plan {made.name} expects a peak of {peak}, over its budget of {budget}.")
        if plan_from_json(plan_to_json(made)) != made:
            raise InvalidPlan(f"plan {made.name} does not read back from its own JSON.")
        if model is not None:
            _require_legal(made, Request(model=model, options={"param_dtype": param_dtype}, **asked))
            checked = "file and graph"
        elif load_answered(plan)[1] is not None:
            checked = "file, question and graph"
    except ElixirError as error:
        return fail(error, as_json=as_json)
    if as_json:
        fields = {"plan": made.name, "graph": made.graph, "cluster": made.cluster, "checked": checked}
        typer.echo(json.dumps(fields, indent=1))
        return 0
    hold = "holds" if checked == "file" else "hold"
    typer.echo(f"{plan}: {checked} {hold}. {made.name} on {made.cluster}, graph {made.graph}")
    if checked == "file":
        typer.echo("Add --model to check its actions too: they are legal for some graphs only.")
    return 0


def _require_legal(plan: Plan, request: Request) -> None:
    cluster = request.cluster()
    if cluster is not None:
        require_same_machine(plan, cluster)
    capture = request.capture()
    if plan.loss_chunks > 1 and capture.chunks is not None:
        capture = request.capture(chunks=replace(capture.chunks, num_chunks=plan.loss_chunks))
    graph = capture.graph
    if plan.graph != fingerprint(graph) and plan.symbols:
        graph = request.capture(dynamic=True).graph  # with a symbolic batch, as for --largest-batch
    require_same_graph(plan, graph)
    verify(graph, plan_at(graph, plan))
