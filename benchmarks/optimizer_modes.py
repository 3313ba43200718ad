"""Compare the three update modes on GPT-2 124M with parameters and state on the host.

Three trainings take turns in a process with a thread for the step and a thread for the updates. A round is `STEPS`
steps of each, including the wait for the last update. The hidden share is the share of the host's update seconds that
pass while a region runs.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from gpt2_124m import build

import elixir_compile as elixir
from elixir_compile.ir import Lane, Record

MODES = ("after_backward", "across_steps", "in_backward")
BATCH, LENGTH, STEPS = 1, 128, 4
SHARE = 1.6
"""The device budget, as a share of the parameters' bytes. With less than 1.5, nothing but gradients fits."""


def measured(rounds: int) -> dict[str, Any]:
    """Return, by mode, the seconds of a step, ratios by round, and hidden shares; and whether all losses are equal."""
    torch.set_num_threads(1)
    trainings = {mode: _training(mode) for mode in MODES}
    losses: dict[str, list[float]] = {mode: [] for mode in MODES}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for mode, steps in trainings.items():
            began_s = time.perf_counter()
            losses[mode] += steps()
            if number:  # the first compiles
                seconds[mode].append((time.perf_counter() - began_s) / STEPS)
    hidden = {mode: _hidden_share(elixir.measure_step(steps)) for mode, steps in trainings.items()}
    return {
        "rounds": rounds,
        "batch": [BATCH, LENGTH],
        "step_s": {mode: statistics.median(found) for mode, found in seconds.items()},
        "against_after_backward": {
            mode: statistics.median(a / b for a, b in zip(found, seconds["after_backward"], strict=True))
            for mode, found in seconds.items()
        },
        "hidden_share": hidden,
        "same_losses": all(found == losses["after_backward"] for found in losses.values()),
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| update | step | against after_backward | updates under compute |", "|---|---|---|---|"]
    lines += [
        f"| {mode} | {figures['step_s'][mode]:.3f} s | {figures['against_after_backward'][mode]:.3f} "
        f"| {figures['hidden_share'][mode]:.0%} |"
        for mode in MODES
    ]
    same = "the same, bit for bit" if figures["same_losses"] else "DIFFERENT"
    return "\n".join([*lines, "", f"Losses of all steps are {same}.", ""])


def missed(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each claim that does not hold: equal losses, and no slower steps than `after_backward`."""
    wrong = [] if figures["same_losses"] else ["the losses differ between update modes"]
    return wrong + [
        f"{mode} takes {figures['against_after_backward'][mode]:.3f} of the seconds of after_backward, wanted 1.02"
        for mode in MODES
        if figures["against_after_backward"][mode] > 1.02
    ]


def _training(mode: str) -> Callable[[], list[float]]:
    """Return a function that takes `STEPS` steps of a training with everything on the host and returns their losses."""
    model = build("gpt2", "cpu")
    parameter_bytes = sum(param.nbytes for param in model.parameters())
    options = {"update": mode, "device_memory": int(SHARE * parameter_bytes), "planner": "greedy", "replan": False}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def steps() -> list[float]:
        losses = [step() for _ in range(STEPS)]
        optimizer.wait()
        return losses

    return steps


def _hidden_share(record: Record) -> float:
    """Return the share of the host's seconds that a span of the compute lane covers."""
    compute = [span for span in record.spans if span.lane is Lane.COMPUTE and not span.label.startswith("update")]
    host = [span for span in record.spans if span.lane is Lane.HOST]
    covered_s = sum(max(0.0, min(h.end_s, c.end_s) - max(h.start_s, c.start_s)) for h in host for c in compute)
    total_s = sum(span.end_s - span.start_s for span in host)
    return covered_s / total_s if total_s else 1.0
