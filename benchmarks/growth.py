"""Measure how the seconds of planning grow with the layers of a model and with the ranks that train it.

    python benchmarks/growth.py            # some minutes; saves the table
    python benchmarks/growth.py --quick    # two sizes of each; prints only

Llama 405B is planned with 16 to 126 of its layers on 16,384 ranks, and Llama 8B on 1 to 16,384 ranks. The law is the
exponent of a straight line through the logarithms, by least squares: 1 is linear, 0 is flat. CPU seconds are those of
planning alone, without the capture. No GPU is needed and no weight is allocated.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save

from elixir_compile.base.options import Options
from elixir_compile.ir import plan_to_json
from elixir_compile.ir.hardware.presets import preset_of_ranks
from elixir_compile.search import plan
from elixir_compile.tools.preview.capture import Capture
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import TextBatch, find_model, model_named

DEEP, WIDE = "llama-3-405b", "llama-3-8b"
LAYERS, RANKS = (16, 32, 64, 126), (1, 8, 64, 512, 4096, 16384)
MACHINE, RANKS_OF_DEEP = "h100-80g", 16384
BATCH, SEQ, STATE, TIMEOUT_S = 1, 4096, 12, 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """A model with so many layers on so many ranks, and what planning takes."""

    model: str
    layers: int
    ranks: int
    cpu_s: float
    num_buckets: int
    gap: float | None
    plan_nbytes: int


def captured(model: str, layers: int) -> Capture:
    """Return the step of `model` with `layers` layers, captured from few of them."""
    shape = model_named(model)
    fields = {**shape.fields, **dict.fromkeys(shape.layer_fields, layers), "model_type": shape.model_type}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        return capture_model(*find_model(str(path), TextBatch(batch=BATCH, seq=SEQ, dtype=torch.bfloat16)))


def solve(model: str, layers: int, ranks: int, capture: Capture) -> Row:
    """Plan `capture` for `ranks` ranks, and print the row."""
    problem = capture.problem(preset_of_ranks(MACHINE, ranks), Options(), state_bytes_per_element=STATE)
    began_s = time.process_time()
    made = plan(problem, "milp", TIMEOUT_S)
    cpu_s = time.process_time() - began_s
    row = Row(model, layers, ranks, cpu_s, len(made.buckets), made.gap, len(plan_to_json(made)))
    print(line(row), flush=True)
    return row


def line(row: Row) -> str:
    """Return `row` as a row of the table."""
    gap = "-" if row.gap is None else f"{row.gap:.1%}"
    return (
        f"| {row.model} | {row.layers} | {row.ranks:,} | {row.cpu_s:.1f} | {row.num_buckets} | {gap} | "
        f"{row.plan_nbytes / 1e6:.1f} |"
    )


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of the line through the logarithms of `seconds` over those of `sizes`."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes of each")
    is_quick = parser.parse_args().quick
    deep = [
        solve(DEEP, layers, RANKS_OF_DEEP, captured(DEEP, layers)) for layers in (LAYERS[:2] if is_quick else LAYERS)
    ]
    capture = captured(WIDE, 32)
    wide = [solve(WIDE, 32, ranks, capture) for ranks in (RANKS[1:3] if is_quick else RANKS)]
    by_layers = exponent([row.layers for row in deep], [row.cpu_s for row in deep])
    # A single rank has no shards, so its search is another one.
    by_ranks = exponent([row.ranks for row in wide if row.ranks > 1], [row.cpu_s for row in wide if row.ranks > 1])
    laws = f"Exponents: {by_layers:.2f} in layers, {by_ranks:.2f} in ranks."
    print(laws)
    if not is_quick:
        heads = ["model", "layers", "ranks", "CPU s of planning", "buckets", "gap", "MB of the plan"]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *map(line, (*deep, *wide)), "", laws]
        save("growth", {"by_layers": by_layers, "by_ranks": by_ranks, "rows": [asdict(row) for row in (*deep, *wide)]})
        (RESULTS / "growth.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
