"""`elixir-compile demo`: train a model twice from the same seed, the second time in half the memory, and compare."""

import gc
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.base.errors import InvalidOption
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.compat.platforms import accelerator_type
from elixir_compile.ir.plan import Plan, measured_line, plan_line
from elixir_compile.ir.schedule import Record
from elixir_compile.session.machine import library_bytes
from elixir_compile.tools.report.tables import curve_text, table_text


def read_text(path: Path | None) -> bytes:
    """Return the bytes of the file `path`, or of the `*.py` files in the folder `path`.

    None stands for the folder of Python's standard library. Raises InvalidOption if there are no bytes.
    """
    place = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise InvalidOption("text", str(place), "a file that is not empty, or a folder with Python files")
    return text


def batches(
    text: bytes, *, size: int, context: int, seed: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs (bytes, following bytes) without end, each int64[size, context], from random places of `text`.

    `text` stays a Python object, because a tensor on a CPU would count as device memory. Raises InvalidOption if `text`
    is too short.
    """
    if len(text) <= context + 1:
        raise InvalidOption("text", f"{len(text)} bytes", f"more than {context + 1} bytes")
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=random, device="cpu").tolist()
        window = b"".join(text[start : start + context + 1] for start in starts)
        both = torch.frombuffer(bytearray(window), dtype=torch.uint8).view(size, context + 1).long()
        yield both[:, :-1].contiguous().to(device), both[:, 1:].contiguous().to(device)


NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of the model; the defaults give 14.8 million parameters."""

    num_layers: int = 6
    width: int = 448
    num_heads: int = 7
    context: int = 128


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class ByteGPT(nn.Module):
    """A GPT over bytes; `forward` returns the mean cross entropy of the following bytes in nats."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


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


def run_demo(*, text: Path | None, steps: int) -> int:
    """Train twice, print both runs, and return the exit code: 1 if the losses differ or the peak exceeds the budget.

    `text` is a file or folder to train on; None stands for the sources of Python's standard library.
    """
    console = Console(highlight=False, soft_wrap=True)
    device = accelerator_type() or "cpu"
    corpus = read_text(text)
    num_params = sum(parameter.numel() for parameter in ByteGPT(SHAPE).parameters())
    console.print(
        f"byte-level GPT of {num_params / 1e6:.1f} M parameters on {device}, {steps} steps per run, "
        f"{len(corpus) / 1e6:.1f} MB of text"
    )
    free = _train(corpus, num_steps=steps, device=device, budget_bytes=None, console=console)
    torch.compiler.reset()  # the second run must find neither compiled code nor tensors of the first run
    gc.collect()
    fixed_bytes = library_bytes(torch.device(device))  # workspaces of libraries stay at every budget
    budget_bytes = fixed_bytes + (free.record.device_peak_bytes - fixed_bytes) // 2
    tight = _train(corpus, num_steps=steps, device=device, budget_bytes=budget_bytes, console=console)
    console.print(_curves(free, tight))
    console.print(_figures(free, tight, budget_bytes))
    faults = find_faults(free, tight, budget_bytes)
    for fault in faults:
        console.print(f"FAILED: {fault}", style="red")
    if not faults:
        beside = f" beside {format_bytes(fixed_bytes)} of libraries' workspaces" if fixed_bytes else ""
        console.print(f"Same losses in half the memory{beside}: {_largest_gap(free, tight):.1e} apart at most.")
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
    with torch.device("cpu"):  # whatever the default device is, so that the same seed gives the same weights
        model = ByteGPT(SHAPE)
    model.to(device)
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
    plan = elixir.compilations(model)[-1].plan
    assert plan is not None  # the first step made it
    record = replace(
        records[-1],
        device_peak_bytes=max(each.device_peak_bytes for each in records),
        host_peak_bytes=max(each.host_peak_bytes for each in records),
    )
    console.print(plan_line(plan))
    console.print(measured_line(record, plan))
    return Run(losses=tuple(losses), plan=plan, record=record)


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
