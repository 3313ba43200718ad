"""`elixir-compile plan gpt2-4b --hardware a100-40g`: search a plan for any machine, print it and save it."""

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
from elixir_compile.report.line import plan_line
from elixir_compile.search import Problem
from elixir_compile.search.joint.loss import Chunks
from elixir_compile.search.planner import largest_feasible
from elixir_compile.units import format_bytes, format_s


def run_plan(request: Request, *, state_bytes: int | None, is_largest: bool, output: Path | None, as_json: bool) -> int:
    """Search the plan of `request`, print it, write it to `output`; return the exit code: 2 if none fits, 1 on errors.

    `state_bytes` is the optimizer state per element in bytes; None stands for the state of `HybridAdamW`. If
    `is_largest`, the batch of the captured step is symbolic and the plan is for the largest batch with a plan. If
    `as_json`, stdout gets the JSON of the plan and nothing else.
    """
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        made, batch = _search(request, notes, state_bytes=state_bytes, is_largest=is_largest)
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


def _search(request: Request, notes: Console, *, state_bytes: int | None, is_largest: bool) -> tuple[Plan, int]:
    # Options and machine are checked before the capture, which takes seconds.
    options, cluster = request.parsed_options(), request.cluster()

    def plan_of(capture: Capture) -> Plan:
        with _status_line(notes, "planning"), _nothing_on_stdout():
            return plan_for(*question(capture, options, cluster, state_bytes_per_element=state_bytes))

    def capture_with(chunks: Chunks | None) -> Capture:
        with _status_line(notes, f"capturing {request.model}"):
            return request.capture(dynamic=is_largest, chunks=chunks)

    if not is_largest:
        return plan_with_loss(capture_with, plan_of), request.batch
    capture = capture_with(None)

    def problem_at(size: int) -> Problem:
        return question(capture.at_batch(size), options, cluster, state_bytes_per_element=state_bytes)[0]

    with _status_line(notes, "looking for the largest batch"), _nothing_on_stdout():
        # If not even a batch of 1 fits, planning it raises NoFeasiblePlan with the missing bytes.
        batch = max(largest_feasible(problem_at), 1)
    return plan_of(capture.at_batch(batch)), batch


@contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Drop output to stdout during the block.

    HiGHS prints a line in some searches, even if its output is switched off, and the JSON of the plan must be alone.
    """
    sys.stdout.flush()
    stdout, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # the buffer of C's stdout
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nothing)


@contextmanager
def _status_line(notes: Console, what: str) -> Iterator[None]:
    """Show `what ...` on a terminal during the block.

    The line does not move: a drawing thread would take time from the process that captures at the same time.
    """
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
    """Return a table with a row per placement in `plan`: how many buckets, their parameters and state in bytes."""
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
    """Return (name, text) of the predicted figures of `plan`, and of its bound if it has a bound."""
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
