"""`elixir-compile demo`: train a model twice from the same seed, the second time in half the memory, and compare."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import elixir_compile as elixir
from elixir_compile.cli.demo_model import ByteGPT, Shape, batches, read_text
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Record
from elixir_compile.report.line import measured_line, plan_line
from elixir_compile.report.text import curve_text, table_text
from elixir_compile.units import format_bytes, format_s

SHAPE = Shape()
BATCH = 4
SEED = 0
LEARNING_RATE = 3e-4
LOSS_RTOL = 1e-5
"""Largest relative difference of the losses. Both runs do the same arithmetic in fp32, but their regions differ, so
sums have another order. One rounding (6e-8) in each weight of this model grows to less than 1e-6 of the loss in 20
steps at this learning rate."""
MEASURED_STEPS = (1, 2, -1)
"""Indices of the measured steps: 1 is the first step under a plan, 2 follows it, -1 is the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The losses and the plan of a training run, and the record of its last step with the highest measured peaks."""

    losses: tuple[float, ...]
    plan: Plan
    record: Record


def run_demo(*, text: Path | None, num_steps: int) -> int:
    """Train twice, print both runs, and return the exit code: 1 if the losses differ or the peak exceeds the budget.

    `text` is a file or folder to train on; None stands for the sources of Python's standard library.
    """
    console = Console(highlight=False, soft_wrap=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = read_text(text)
    num_params = sum(parameter.numel() for parameter in ByteGPT(SHAPE).parameters())
    console.print(
        f"byte-level GPT of {num_params / 1e6:.1f} M parameters on {device}, {num_steps} steps per run, "
        f"{len(corpus) / 1e6:.1f} MB of text"
    )
    free = _train(corpus, num_steps=num_steps, device=device, budget_bytes=None, console=console)
    torch.compiler.reset()  # the second run must find neither compiled code nor tensors of the first run
    gc.collect()
    budget_bytes = free.record.device_peak_bytes // 2
    tight = _train(corpus, num_steps=num_steps, device=device, budget_bytes=budget_bytes, console=console)
    console.print(_curves(free, tight))
    console.print(_figures(free, tight, budget_bytes))
    faults = find_faults(free, tight, budget_bytes)
    for fault in faults:
        console.print(f"FAILED: {fault}", style="red")
    if not faults:
        console.print(f"Same losses in half the memory: {_largest_gap(free, tight):.1e} apart at most.")
    return 1 if faults else 0


def find_faults(free: Run, tight: Run, budget_bytes: int) -> list[str]:
    """Return a sentence for each broken promise of the demo: losses too far apart, a peak over the budget."""
    faults = []
    gap = _largest_gap(free, tight)
    if not gap <= LOSS_RTOL:  # not `gap > LOSS_RTOL`: NaN must fail
        faults.append(f"the losses differ by {gap:.1e} of their value, allowed are {LOSS_RTOL:.0e}.")
    peak_bytes = tight.record.device_peak_bytes
    if peak_bytes > budget_bytes:
        faults.append(
            f"the measured peak is {format_bytes(peak_bytes)}, the budget {format_bytes(budget_bytes)}: "
            f"{peak_bytes - budget_bytes} bytes too many."
        )
    return faults


def _train(corpus: bytes, *, num_steps: int, device: str, budget_bytes: int | None, console: Console) -> Run:
    torch.manual_seed(SEED)
    model = ByteGPT(SHAPE).to(device)
    options: dict[str, str | int | bool | Callable[..., Any]] = {"report": False}  # the same lines are printed below
    if budget_bytes is not None:
        options["device_memory"] = budget_bytes
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=LEARNING_RATE)
    source = batches(corpus, size=BATCH, context=SHAPE.context, seed=SEED, device=device)
    losses: list[float] = []

    def step() -> None:
        loss = compiled(*next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    title = "no budget" if budget_bytes is None else f"budget {format_bytes(budget_bytes)}"
    records = _measured_steps(step, num_steps=num_steps, title=title, console=console)
    plan = elixir.compilations(model)[-1].plan
    assert plan is not None  # the first step made it
    record = replace(
        records[-1],
        device_peak_bytes=max(measured.device_peak_bytes for measured in records),
        host_peak_bytes=max(measured.host_peak_bytes for measured in records),
    )
    console.print(plan_line(plan))
    console.print(measured_line(record, plan))
    return Run(losses=tuple(losses), plan=plan, record=record)


def _measured_steps(step: Callable[[], None], *, num_steps: int, title: str, console: Console) -> list[Record]:
    measured = {index % num_steps for index in MEASURED_STEPS}
    records: list[Record] = []
    columns = (TextColumn(title.ljust(18)), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=num_steps)
        for index in range(num_steps):
            if index in measured:
                records.append(elixir.measure_step(step))
            else:
                step()
            progress.advance(task)
    return records


def _largest_gap(free: Run, tight: Run) -> float:
    gaps = [abs(first - second) / abs(first) for first, second in zip(free.losses, tight.losses, strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.nan


def _curves(free: Run, tight: Run) -> str:
    low, high = min(free.losses), max(free.losses)
    last = len(free.losses) - 1
    shown = sorted({*range(0, last, max(last // 6, 1)), last})
    rows = [
        (str(index + 1), f"{first:.6f}", f"{second:.6f}", f"{abs(first - second) / first:.0e}")
        for index in shown
        for first, second in [(free.losses[index], tight.losses[index])]
    ]
    curves = (("no budget", free), ("half of it", tight))
    drawn = "\n".join(f"{name:<12}{curve_text(run.losses, low, high)}" for name, run in curves)
    return f"\n{drawn}\n\n{table_text(('loss at step', 'no budget', 'half of it', 'apart'), rows)}\n"


def _figures(free: Run, tight: Run, budget_bytes: int) -> str:
    rows = [
        (
            name,
            format_bytes(run.plan.prediction.device_peak_bytes),
            format_bytes(run.record.device_peak_bytes),
            budget,
            format_bytes(run.record.host_peak_bytes),
            format_s(run.record.step_s),
        )
        for name, run, budget in (("no budget", free, "none"), ("half of it", tight, format_bytes(budget_bytes)))
    ]
    return table_text(("device peak", "predicted", "measured", "budget", "host", "step"), rows) + "\n"
