"""Measure what observing a run costs: a step that is observed against the same step that is not.

    python benchmarks/observe.py [--layers 4] [--rounds 15] [--steps 6]

One compiled GPT-2 trains in blocks of steps, each block under another level, in turns. The first step of a block is not
counted. `summary` writes a line for each step to a folder and reads counters five times per second; `full` also records
the spans of every step. The figure of a level is the median over rounds of its median step over that without
observation.

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
from machine import save
from transformers import GPT2Config, GPT2LMHeadModel

import elixir_compile as elixir
from elixir_compile.ir import Lane
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.phases import Phases

LIMITS = {"off": 1.001, "summary": 1.01, "full": 1.05}
OPTIONS = {"planner": "zero3_offload", "update": "after_backward", "replan": False, "report": False}


def stepper(layers: int) -> tuple[torch.nn.Module, Callable[[], float]]:
    """Return a compiled model that gathers and offloads, and a function that trains a step and returns its seconds."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=256, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).train()
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, 50257, (2, 128))

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


def main() -> int:
    """Measure, print, save; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6, help="steps in a block, of which the first is not counted")
    arguments = parser.parse_args()
    model, step = stepper(arguments.layers)
    for _ in range(4):
        step()
    levels = ["none", "summary", "full"]
    medians_s: dict[str, list[float]] = {level: [] for level in levels}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for level in levels if number % 2 == 0 else reversed(levels):
                with observed(level, model, Path(folder) / level):
                    seconds = [step() for _ in range(arguments.steps)]
                medians_s[level].append(statistics.median(seconds[1:]))
    none_s = statistics.median(medians_s["none"])
    ratios = {
        level: [one / other for one, other in zip(medians_s[level], medians_s["none"], strict=True)]
        for level in levels[1:]
    }
    found = {"off": 1 + off_s(model, step) / none_s} | {level: statistics.median(own) for level, own in ratios.items()}
    for level, ratio in found.items():
        print(f"{level:<8} {ratio:.4f}   limit {LIMITS[level]}")
    quartiles = {level: statistics.quantiles(own, n=4) for level, own in ratios.items()}
    figures = {
        "step_s": none_s,
        "ratios": found,
        "quartiles": quartiles,
        "limits": LIMITS,
        "arguments": vars(arguments),
    }
    print(f"step {none_s:.4f} s   saved {save('observe_cpu', figures)}")
    return int(any(ratio > LIMITS[level] for level, ratio in found.items()))


if __name__ == "__main__":
    raise SystemExit(main())
