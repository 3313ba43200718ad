"""`elixir-compile plan gpt2-4b --hardware a100-40g`: the plan for a machine that is elsewhere, shown and saved."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from elixir_compile.api.plan import plan_with_loss, question
from elixir_compile.api.preview.capture import Capture
from elixir_compile.cli.failure import fail
from elixir_compile.cli.request import Request
from elixir_compile.errors import ElixirError
from elixir_compile.ir import Bucket, Plan, Tier, plan_to_json
from elixir_compile.managed.saved import save_plan
from elixir_compile.problem.cache import plan_for
from elixir_compile.problem.loss import Chunks
from elixir_compile.report.line import plan_line
from elixir_compile.search import Problem
from elixir_compile.search.largest import largest_feasible
from elixir_compile.units import format_bytes, format_s


def run_plan(request: Request, *, state_bytes: int | None, is_largest: bool, output: Path | None, as_json: bool) -> int:
    """Print the plan, write it to `output`, and return the exit code: 2 where none fits, 1 for other errors.

    With `as_json` the plan's own JSON is all that stdout gets. With `is_largest` it is the plan for the largest batch
    that has one, of a step whose batch is symbolic.
    """
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        made, batch = _made(request, notes, state_bytes=state_bytes, is_largest=is_largest)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    try:
        if output is not None:
            save_plan(made, output)
    except OSError as error:
        notes.print(f"error: cannot write {output}: {error.strerror}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(plan_to_json(made) + "\n")
    else:
        _show(made, batch if is_largest else None, Console(highlight=False, soft_wrap=True))
    if output is not None:
        notes.print(f"plan: {output}", markup=False)
    return 0


def _made(request: Request, notes: Console, *, state_bytes: int | None, is_largest: bool) -> tuple[Plan, int]:
    # What is quick to refuse comes before the capture, which takes seconds.
    options, cluster = request.parsed_options(), request.cluster()

    def plan_of(capture: Capture) -> Plan:
        with _shown(notes, "planning"), _nothing_on_stdout():
            return plan_for(*question(capture, options, cluster, state_bytes_per_element=state_bytes))

    def capture_with(chunks: Chunks | None) -> Capture:
        with _shown(notes, f"capturing {request.model}"):
            return request.capture(dynamic=is_largest, chunks=chunks)

    if not is_largest:
        return plan_with_loss(capture_with, plan_of), request.batch
    capture = capture_with(None)

    def problem_at(size: int) -> Problem:
        return question(capture.at_batch(size), options, cluster, state_bytes_per_element=state_bytes)[0]

    with _shown(notes, "looking for the largest batch"), _nothing_on_stdout():
        # Where not even one fits, planning for one says what is missing.
        batch = max(largest_feasible(problem_at), 1)
    return plan_of(capture.at_batch(batch)), batch


@contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Drop what is written to stdout meanwhile: HiGHS, told to be silent, prints a line of its own in some searches,
    which would stand before the plan's JSON."""
    sys.stdout.flush()
    stdout, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C has not written yet
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nothing)


@contextmanager
def _shown(notes: Console, what: str) -> Iterator[None]:
    """Say what takes its time, where somebody watches. Nothing moves: a thread that draws would be in the way of the
    process that captures beside this one."""
    if not notes.is_terminal:
        yield
        return
    with Live(f"{what} ...", console=notes, transient=True, auto_refresh=False):
        yield


def _show(plan: Plan, largest_batch: int | None, console: Console) -> None:
    console.print(placement_table(plan))
    for name, value in _figures(plan):
        console.print(f"{name:<13} {value}", markup=False)
    if largest_batch is not None:
        console.print(f"{'largest batch':<13} {largest_batch}")
    console.print(plan_line(plan), markup=False)


def placement_table(plan: Plan) -> Table:
    """Return one row per placement that buckets of `plan` have: how many, their parameters and their state."""
    groups: dict[tuple[str, str, str], list[Bucket]] = {}
    for bucket, placement in zip(plan.buckets, plan.placements, strict=True):
        copy = "stays" if placement.resident else "released"
        optim = f"{placement.optim}{', streamed' if placement.streamed else ''}"
        key = (str(placement.param), optim, copy if placement.param is Tier.HOST or bucket.is_sharded else "")
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
    """Return what the plan promises, and how good it is where that is proved, by name."""
    made = plan.prediction
    figures = [
        ("peak", f"{format_bytes(made.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}, {made.device_peak_at}"),
        ("host", format_bytes(made.host_peak_bytes)),
        ("step", f"{format_s(made.step_s)}, {format_s(made.exposed_s)} of it exposed transfers"),
    ]
    if any(bucket.trainable for bucket in plan.buckets):
        figures.append(("update", str(plan.update)))
    if plan.bound_s is not None and plan.gap is not None:
        figures.append(("bound", f"{format_s(plan.bound_s)}: no plan is more than {plan.gap:.1%} faster"))
    if plan.binding:
        figures.append(("binding", ", ".join(plan.binding)))
    if plan.gib_saves_s is not None:
        figures.append(("1 GiB more", f"would save up to {format_s(plan.gib_saves_s)} per step"))
    if plan.formula:
        figures.append(("peak(sizes)", plan.formula))
    return figures
