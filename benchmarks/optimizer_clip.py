"""Measure `clip_grad_norm_` with norms computed in the backward, and with norms computed in the call.

GPT-2 124M with parameters and state on the host, on one thread. In the first way, called "landed", the backward
computes the norm of each gradient on its way to the host; in the second the call reads all gradients again. The two
ways take turns in one training: a round is a step of each, with gradients of the same batch. Seconds are CPU seconds of
the process, because other work on the machine hardly changes them. The backward's extra work counts in the seconds of a
step.
"""

import statistics
import time
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from gpt2_124m import build

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime.published import GradNormCache

WAYS = ("landed", "read again")
BATCH, LENGTH = 1, 128
SHARE = 1.6
"""The device budget, as a share of the parameters' bytes."""
DTYPES = (None, "bfloat16")


def measured(rounds: int) -> list[dict[str, Any]]:
    """Return, by parameter dtype, the seconds of the call and of a step, their ratios, and differences of norms."""
    torch.set_num_threads(1)
    return [_measured(dtype, rounds) for dtype in DTYPES]


def table(figures: list[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| parameters | norm | `clip_grad_norm_` | against read again | step | against read again |"]
    lines.append("|---|---|---|---|---|---|")
    for own in figures:
        for way in WAYS:
            clip_s, step_s = own["clip_s"][way], own["step_s"][way]
            lines.append(
                f"| {own['dtype']} | {way} | {1e3 * clip_s:.1f} ms | {own['clip_ratio'][way]:.3f} "
                f"| {step_s:.3f} s | {own['step_ratio'][way]:.3f} |"
            )
    most = max(own["most_apart"] for own in figures)
    return "\n".join([*lines, "", f"Norms differ by at most {most:.1e} of themselves.", ""])


def missed(figures: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each claim that does not hold: a shorter call, no longer step, and the same norm."""
    wrong = [f"{own['dtype']}: norms are {own['most_apart']:.1e} apart" for own in figures if own["most_apart"] > 1e-6]
    for own in figures:
        if own["clip_ratio"]["landed"] > 0.7:
            wrong.append(f"{own['dtype']}: the call takes {own['clip_ratio']['landed']:.2f}, wanted 0.7")
        if own["step_ratio"]["landed"] > 1.02:
            wrong.append(f"{own['dtype']}: a step takes {own['step_ratio']['landed']:.3f}, wanted 1.02")
    return wrong


def _measured(dtype: str | None, rounds: int) -> dict[str, Any]:
    model = elixir.prepare(build("gpt2", "cpu"), param_dtype=dtype)
    parameter_bytes = sum(param.nbytes for param in model.parameters())
    options = {"device_memory": int(SHARE * parameter_bytes), "planner": "greedy", "replan": False}
    compiled = torch.compile(
        model, backend="elixir", options={**options, "param_dtype": dtype, "update": "after_backward"}
    )
    optimizer = elixir.HybridAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> tuple[float, float, float]:
        began_s = time.process_time()
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        clip_began_s = time.process_time()
        norm = float(optimizer.clip_grad_norm_(1.0))
        clip_ended_s = time.process_time()
        optimizer.step()
        optimizer.zero_grad()
        return clip_ended_s - clip_began_s, time.process_time() - began_s, norm

    executor, landed = executor_of(model), GradNormCache()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 2):
        for way in WAYS:
            # A new cache was never asked for norms, so the backward computes none.
            executor.gradients.norm_cache = landed if way == "landed" else GradNormCache()
            figures = step()
            if number > 1:  # the first rounds compile, and ask for norms
                found[way].append(figures)
    clip_s, step_s, norms = ({way: [figures[i] for figures in found[way]] for way in WAYS} for i in range(3))
    return {
        "dtype": dtype or "float32",
        "rounds": rounds,
        "clip_s": {way: statistics.median(clip_s[way]) for way in WAYS},
        "step_s": {way: statistics.median(step_s[way]) for way in WAYS},
        "clip_ratio": _ratios(clip_s),
        "step_ratio": _ratios(step_s),
        "most_apart": max(abs(a - b) / b for a, b in zip(*(norms[way] for way in WAYS), strict=True)),
    }


def _ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {way: statistics.median(a / b for a, b in zip(seconds[way], seconds[WAYS[1]], strict=True)) for way in WAYS}
