"""Train the demo's byte-level GPT with moments in fp32 and in fewer bytes, several seeds each, and keep the losses.

    python benchmarks/state_precision.py                  3,000 steps of 1.5 M parameters, all precisions, three seeds
    python benchmarks/state_precision.py --model 20m      200 steps of 20 M parameters
    python benchmarks/state_precision.py --no-train       only the table, and the pictures of docs/state-precision.md

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
from elixir_compile.tools.cli.demo import BATCH, ByteGPT, Shape, batches, read_text

NAME = "state_precision_cpu"
MODELS = {
    "1.5m": (Shape(num_layers=3, width=192, num_heads=3), 3000),
    "20m": (Shape(num_layers=6, width=520, num_heads=8), 200),
}
"""By name, the dimensions of the model and the number of steps."""
PRECISIONS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
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


def table(runs: list[dict[str, Any]]) -> str:
    """Return the rows of the results: each precision beside fp32 with the same seeds."""
    lines = [
        "Mean loss on unseen text, in nats per byte, and its ratio to that of fp32 moments with the same seed, "
        "weights at the start and batches: median [least, most] over the seeds.",
        "",
        "| model | precision | bytes of moments per parameter | seeds | loss | over fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for model, precision in dict.fromkeys((run["model"], run["precision"]) for run in runs):
        own = [run for run in runs if (run["model"], run["precision"]) == (model, precision)]
        losses = [run["loss"] for run in own]
        ratios = [run["loss"] / exact["loss"] for run in own if (exact := _exact(runs, run)) is not None]
        each_bytes = own[0]["state_bytes"] / own[0]["num_params"]
        size = f"{own[0]['num_params'] / 1e6:.1f} M, {own[0]['num_steps']:,} steps"
        cells = (size, precision, f"{each_bytes:.2f}", str(len(own)), _spread(losses, 4), _spread(ratios, 4))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _exact(runs: list[dict[str, Any]], like: dict[str, Any]) -> dict[str, Any] | None:
    """Return the run with fp32 moments of the same model and seed as `like`; None if it was not made."""
    found = (run for run in runs if run["precision"] == "float32" and run["model"] == like["model"])
    return next((run for run in found if run["seed"] == like["seed"]), None)


def _spread(values: list[float], digits: int) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def picture(runs: list[dict[str, Any]], *, is_dark: bool) -> str:
    """Return as SVG the training loss of each narrower precision over that of fp32 with the same seed."""
    import altair
    import vl_convert

    rows = [
        {"step": (at + 1) * EVERY, "ratio": own / there, "moments": run["precision"]}
        for run in runs
        if run["model"] == "1.5m" and run["precision"] != "float32" and (exact := _exact(runs, run)) is not None
        for at, (own, there) in enumerate(zip(run["curve"], exact["curve"], strict=True))
    ]
    base = altair.Chart(altair.Data(values=rows)).encode(
        x=altair.X("step:Q", title="step"), color=altair.Color("moments:N", title="moments")
    )
    ratio = altair.Y("ratio:Q", title="loss over that of fp32", scale=altair.Scale(zero=False))
    line = base.mark_line(strokeWidth=1.5).encode(y=ratio.aggregate("median"))
    band = base.mark_area(opacity=0.15).encode(y=ratio.aggregate("min"), y2=altair.Y2("ratio:Q", aggregate="max"))
    chart = (band + line).properties(width=620, height=260)
    colors = {"background": "#0d1117", "view": {"stroke": "#30363d"}} if is_dark else {"background": "white"}
    text = "#c9d1d9" if is_dark else "#24292f"
    axes = {"labelColor": text, "titleColor": text, "gridColor": "#30363d" if is_dark else "#d8dee4"}
    spec = {**chart.to_dict(), "config": {**colors, "axis": axes, "legend": {"labelColor": text, "titleColor": text}}}
    return vl_convert.vegalite_to_svg(spec)


def write_tables() -> None:
    """Write the table of all finished runs, and the pictures of the docs."""
    runs = _done()
    (RESULTS / f"{NAME}.md").write_text(table(runs), encoding="utf-8")
    for scheme in ("light", "dark"):
        path = RESULTS.parents[1] / "docs" / "img" / f"state-precision-{scheme}.svg"
        path.write_text(picture(runs, is_dark=scheme == "dark"), encoding="utf-8")


def main() -> None:
    """Run what is missing, and write the results after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], default="1.5m")
    parser.add_argument("--precision", choices=[*PRECISIONS], nargs="*", default=[*PRECISIONS])
    parser.add_argument("--seed", type=int, nargs="*", default=[*SEEDS])
    parser.add_argument("--no-train", action="store_true")
    given = parser.parse_args()
    corpus = read_text(None)
    while left := [] if given.no_train else [*missing(_done(), given.model, given.precision, given.seed)]:
        precision, seed = left[0]
        run = train(given.model, precision, seed, corpus)
        save(NAME, {"runs": [*_done(), run]})  # read again: another process may train other seeds
        print(f"{run['model']}  {precision:<18} seed {seed}  loss {run['loss']:.4f}  {run['seconds']} s", flush=True)
    write_tables()


if __name__ == "__main__":
    main()
