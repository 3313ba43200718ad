"""Measure what observing a run costs: a step that is observed against the same step that is not.

    python benchmarks/observe.py [--layers 6] [--seconds 140]

One compiled GPT-2 trains in blocks of six steps, each under one level. A round has six blocks, none, summary, full,
full, summary, none, so that a machine that becomes slower or faster during the round does so for each level alike. The
first three steps of a block are not counted, so that each counted step also pays for the summary of the step before it
and writes the record of the step before that. `summary` writes a line for each step to a folder and reads counters five
times per second; `full` also records the spans of every step and writes them.

The figure of a round and a level is the sum of the median steps of its two blocks over that of the blocks without
observation, and the figure of a level the median over the rounds, with quartiles. Rounds go on for `--seconds`, so a
busy machine has fewer of them and not a longer run: less than four minutes with the compilation.

`off` cannot be compared with a program that lacks the calls. Its figure is 1 plus the time of the calls that a step
makes while nothing is observed, over the step. Exit code 1 if off is above 1.001, summary above 1.01 or full above
1.05.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, machine, save
from transformers import GPT2Config, GPT2LMHeadModel

import elixir_compile as elixir
from elixir_compile.ir import Lane
from elixir_compile.runtime.recording import Ledger, Phases

LIMITS = {"off": 1.001, "summary": 1.01, "full": 1.05}
OPTIONS = {"planner": "zero3_offload", "update": "after_backward", "replan": False, "report": False}
ROUND = ("none", "summary", "full", "full", "summary", "none")
STEPS, UNCOUNTED = 6, 3
"""The steps of a block, and how many of the first are not counted."""
LEAST_ROUNDS = 4
_VOCABULARY = 8192


def stepper(layers: int) -> tuple[torch.nn.Module, Callable[[], float]]:
    """Return a compiled model that gathers and offloads, and a function that trains a step and returns its seconds."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=512, n_head=8, vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, _VOCABULARY, (1, 128))

    def step() -> float:
        began_s = time.perf_counter()
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began_s

    return model, step


def observed(level: str, model: torch.nn.Module, folder: Path) -> AbstractContextManager[Any]:
    """Return the observation of `level`; one that does nothing for `none`."""
    if level == "none":
        return nullcontext()
    return elixir.observe(model, folder, full=(), full_every=1 if level == "full" else 0)


def measured_round(model: torch.nn.Module, step: Callable[[], float], folder: Path) -> dict[str, float]:
    """Return the seconds of a step under each level, summed over the two blocks of the round."""
    found: dict[str, float] = {}
    for level in ROUND:
        with observed(level, model, folder / level):
            seconds = [step() for _ in range(STEPS)]
        found[level] = found.get(level, 0.0) + statistics.median(seconds[UNCOUNTED:])
    return found


def off_s(model: torch.nn.Module, step: Callable[[], float]) -> float:
    """Return the seconds of the calls that a step makes while nothing is observed."""
    with elixir.observe(model, full=(1,)) as study:
        for _ in range(3):
            step()
    num_spans = len(study.full_steps[0].record.spans)
    ledger: Ledger = elixir.compilations(model)[0]._planned._executor.ledger
    phases = Phases({}, ledger.lanes, ledger)
    seconds: list[float] = []
    for _ in range(20):
        began_s = time.perf_counter()
        with phases.forward(is_training=True):
            pass
        phases.begin_backward()
        for _ in range(num_spans):
            with ledger.span(Lane.COMPUTE, "run fwd.0", times=0):
                pass
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def written(figures: dict[str, Any]) -> Path:
    """Write the figures as a table in Markdown, and return its path."""
    rows = [
        f"| {level} | {figures['ratios'][level]:.4f} | "
        + (" to ".join(f"{value:.4f}" for value in figures["quartiles"][level][::2]) if level != "off" else "")
        + f" | {limit} |"
        for level, limit in LIMITS.items()
    ]
    made = machine()
    lines = [
        "# What observing a run costs",
        "",
        f"{made['processor']}, {made['cores']} cores, torch {made['torch']}, commit {made['commit']}. A step takes "
        f"{figures['step_s'] * 1e3:.0f} ms; {figures['num_rounds']} rounds of {len(ROUND)} blocks in turn. "
        "`python benchmarks/observe.py`.",
        "",
        "| level | step over one that is not observed | quartiles | goal |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]
    path = RESULTS / "observe_cpu.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def main() -> int:
    """Measure, print, save; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=140.0, help="for how long rounds begin")
    arguments = parser.parse_args()
    model, step = stepper(arguments.layers)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        measured_round(model, step, Path(folder))  # compiles, and loads what the levels need
        began_s = time.perf_counter()
        while len(rounds) < LEAST_ROUNDS or time.perf_counter() - began_s < arguments.seconds:
            rounds.append(measured_round(model, step, Path(folder)))
    none_s = statistics.median(each["none"] / ROUND.count("none") for each in rounds)
    ratios = {level: [each[level] / each["none"] for each in rounds] for level in ("summary", "full")}
    found = {"off": 1 + off_s(model, step) / none_s} | {level: statistics.median(own) for level, own in ratios.items()}
    figures = {
        "step_s": none_s,
        "num_rounds": len(rounds),
        "ratios": found,
        "quartiles": {level: statistics.quantiles(own, n=4) for level, own in ratios.items()},
        "rounds": ratios,
        "limits": LIMITS,
        "arguments": vars(arguments),
    }
    for level, ratio in found.items():
        print(f"{level:<8} {ratio:.4f}   limit {LIMITS[level]}   {figures['quartiles'].get(level, '')}")
    print(f"step {none_s:.4f} s   saved {save('observe_cpu', figures)} and {written(figures)}")
    return int(any(ratio > LIMITS[level] for level, ratio in found.items()))


if __name__ == "__main__":
    raise SystemExit(main())
