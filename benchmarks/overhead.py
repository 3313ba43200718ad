"""Measure the overhead of a step without a budget against `torch.compile(backend="inductor")`.

    python benchmarks/overhead.py [--layers 12] [--rounds 11]

Without a budget no bucket moves. Two copies of the same GPT-2 take steps in turn, so that both see the same noise. The
figure is the median over the rounds of the ratio of the two steps of a round; the median step of each backend is
reported as well. Exit code 1 if the ratio is above 1.05.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import quiet  # noqa: F401  before torch
import torch
from machine import save
from transformers import GPT2Config, GPT2LMHeadModel

import elixir_compile as elixir

LIMIT = 1.05


def stepper(backend: str, layers: int, device: str) -> Callable[[], float]:
    """Return a function that takes one training step and returns its seconds."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).to(device).train()
    compiled = torch.compile(model, backend=backend)
    if backend == "elixir":
        optimizer: torch.optim.Optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, 50257, (2, 256), device=device)

    def step() -> float:
        began_s = time.perf_counter()
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    return step


def main() -> int:
    """Measure, print, save; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = {backend: stepper(backend, arguments.layers, device) for backend in ("inductor", "elixir")}
    for step in steps.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {backend: [] for backend in steps}
    for index in range(arguments.rounds):
        order = list(steps) if index % 2 == 0 else list(reversed(steps))
        for backend in order:
            seconds[backend].append(steps[backend]())
    ratios = [ours / theirs for ours, theirs in zip(seconds["elixir"], seconds["inductor"], strict=True)]
    ratio = statistics.median(ratios)
    medians = {backend: statistics.median(values) for backend, values in seconds.items()}
    print(
        f"inductor {medians['inductor']:.3f} s   elixir {medians['elixir']:.3f} s   ratio {ratio:.3f} (limit {LIMIT})"
    )
    quartiles = statistics.quantiles(ratios, n=4)
    path = save(
        f"overhead_{device}",
        {"median_ratio": ratio, "ratio_quartiles": quartiles, "median_s": medians, "seconds": seconds},
    )
    print(f"saved {path}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
