"""Train the demo's byte-level GPT with moments in fp32 and in fewer bytes, several seeds each, and keep the losses.

    python benchmarks/state_precision.py                  3,000 steps of 1.5 M parameters, all precisions, three seeds
    python benchmarks/state_precision.py --model 20m      300 steps of 20 M parameters

Runs that the file of results has already are not repeated, so the script can be stopped and started again. The same
seed means the same weights at the start and the same batches. The loss that is compared is the mean over batches of
text that no run trains on.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save

import elixir_compile as elixir
from elixir_compile.cli.demo import BATCH, ByteGPT, Shape, batches, read_text

NAME = "state_precision_cpu"
MODELS = {
    "1.5m": (Shape(num_layers=3, width=192, num_heads=3), 3000),
    "20m": (Shape(num_layers=6, width=520, num_heads=8), 300),
}
"""By name, the dimensions of the model and the number of steps."""
PRECISIONS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "float8": {"state_dtype": "float8"},
    "int8": {"state_dtype": "int8"},
    "bfloat16, nearest": {"state_dtype": "bfloat16", "state_rounding": "nearest"},
    "int8, nearest": {"state_dtype": "int8", "state_rounding": "nearest"},
}
"""By name, the arguments of HybridAdamW."""
SEEDS = (0, 1, 2)
LEARNING_RATE, WARMUP = 1e-3, 100
EVERY = 50
"""Steps of which the mean loss is a point of the curve."""
HELD_OUT, NUM_HELD_OUT = 0.1, 100
"""The share of the text that no run trains on, and the batches of it on which the final loss is measured."""


def train(model_name: str, precision: str, seed: int, corpus: bytes) -> dict[str, Any]:
    """Return the record of one training run: the curve of its loss, and its loss on text that it did not see."""
    shape, num_steps = MODELS[model_name]
    cut = int(len(corpus) * (1 - HELD_OUT))
    torch.manual_seed(seed)
    model = ByteGPT(shape)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=LEARNING_RATE, **PRECISIONS[precision])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    source = batches(corpus[:cut], size=BATCH, context=shape.context, seed=seed, device="cpu")
    losses: list[float] = []
    start_s = time.perf_counter()
    for _ in range(num_steps):
        loss = model(*next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start_s
    unseen = batches(corpus[cut:], size=BATCH, context=shape.context, seed=1234, device="cpu")
    with torch.no_grad():
        final = statistics.fmean(model(*next(unseen)).item() for _ in range(NUM_HELD_OUT))
    state_bytes = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    )
    return {
        "model": model_name,
        "precision": precision,
        "seed": seed,
        "num_params": sum(param.numel() for param in model.parameters()),
        "num_steps": num_steps,
        "state_bytes": state_bytes,
        "seconds": round(seconds, 1),
        "curve": [round(statistics.fmean(losses[at : at + EVERY]), 5) for at in range(0, num_steps, EVERY)],
        "loss": final,
    }


def _rate(step: int, num_steps: int) -> float:
    """Return the factor of the learning rate: a linear warmup, then half a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    part = (step - WARMUP) / max(num_steps - WARMUP, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * part))


def missing(
    done: list[dict[str, Any]], model: str, precisions: list[str], seeds: list[int]
) -> Iterator[tuple[str, int]]:
    """Yield the precision and the seed of each run that `done` does not have; one seed of all precisions first."""
    known = {(run["model"], run["precision"], run["seed"]) for run in done}
    for seed in seeds:
        yield from ((precision, seed) for precision in precisions if (model, precision, seed) not in known)


def _done() -> list[dict[str, Any]]:
    """Return the records of all finished runs."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text())["runs"] if path.exists() else []


def main() -> None:
    """Run what is missing, and write the results after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], default="1.5m")
    parser.add_argument("--precision", choices=[*PRECISIONS], nargs="*", default=[*PRECISIONS])
    parser.add_argument("--seed", type=int, nargs="*", default=[*SEEDS])
    given = parser.parse_args()
    corpus = read_text(None)
    while True:
        done = _done()
        left = [*missing(done, given.model, given.precision, given.seed)]
        if not left:
            return
        precision, seed = left[0]
        run = train(given.model, precision, seed, corpus)
        save(NAME, {"runs": [*_done(), run]})  # read again: another process may train other seeds
        print(f"{run['model']}  {precision:<18} seed {seed}  loss {run['loss']:.4f}  {run['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
