"""Shares of mixed fleets: ours beside equal rows, rows by speed, and Cephalo's program. By the search's formula.

    python benchmarks/unequal_ranks.py [-o benchmarks/results/unequal_ranks.md]

No device is used: the step is captured with fake tensors and priced on data sheets. Each rule gets the same machines,
memory and ways to run its rows; a rule whose rows do not fit a device has no figure. The first fleet is the example of
Cephalo (arXiv 2411.01075); the next two follow the two clusters of its evaluation, of 8 and of 64 devices.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from elixir_compile.api.preview.few_layers import capture_model
from elixir_compile.api.preview.models import TextBatch, find_model
from elixir_compile.api.shares import budgets_of, search_of
from elixir_compile.hardware import parse_fleet
from elixir_compile.options import parse_options
from elixir_compile.search.shares.choose import Choice
from elixir_compile.units import format_s
from elixir_compile.version import __version__

FLEETS = {
    "2 x l4-24g + 1 x a6000-48g + 1 x p40-24g": (64, 128),
    "2 x l4-24g + 1 x a6000-48g + 1 x p40-24g | 2 x p40-24g + 2 x p100-16g": (64, 128),
    "4 x 8 x a10g-24g | 2 x 8 x v100-16g | 2 x 8 x t4-16g": (512,),
}
"""Batches in rows, by the text of a fleet."""
MODELS = {"gpt2-1.5b": 512, "llama-7b": 512}
"""Tokens of a row, by model."""
HOST_MEMORIES = ("1MB", "100GiB")
"""Host memory of each rank: none, as Cephalo has it, and some."""


def main() -> None:
    """Write the table, and its figures as JSON beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "unequal_ranks.md")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    rows = [row for model in args.models for row in rows_of(model, MODELS[model])]
    args.output.write_text(table(rows), encoding="utf-8")
    found = {"benchmark": "unequal_ranks", "version": __version__, "by": "formula of the search", "rows": rows}
    args.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


def rows_of(name: str, seq: int) -> list[dict[str, object]]:
    """Return the figures of one model on all fleets, with float32 parameters."""
    model, inputs = find_model(name, TextBatch(batch=8, seq=seq, dtype=torch.float32, recompute=False))
    capture = capture_model(model, inputs, options=parse_options({}))
    found: list[dict[str, object]] = []
    for text, batches in FLEETS.items():
        fleet = parse_fleet(text)
        for host_memory in HOST_MEMORIES:
            options = parse_options({"host_memory": host_memory})
            for batch in batches:
                search = search_of(capture, fleet, budgets_of(fleet, capture, options), batch, options)
                rules = {"even": search.even(), "greedy": search.greedy(), "cephalo": search.cephalo()}
                ours = attempt(search.best)
                row: dict[str, object] = {"model": name, "fleet": text, "batch": batch, "host_memory": host_memory}
                row |= {"ours_s": None if ours is None else ours.step_s, "rows": None if ours is None else ours.rows}
                row |= {f"{rule}_s": None if made is None else made.step_s for rule, made in rules.items()}
                for made in rules.values():
                    assert made is None or (ours is not None and ours.step_s <= made.step_s * (1 + 1e-9)), row
                found.append(row)
                print(row, flush=True)
    return found


def attempt(best: Callable[[], Choice]) -> Choice | None:
    """Return the choice of `best`, or None if nothing fits."""
    try:
        return best()
    except MemoryError:
        return None


def table(rows: list[dict[str, object]]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# Shares of mixed fleets",
        "",
        "Seconds of a step by the formula of the search, on data sheets: nothing was run. `python",
        "benchmarks/unequal_ranks.py` writes this file. A dash says that the rows of a rule do not fit.",
        "Rows of 512 tokens, float32; `host` is the memory of the host that each rank may use.",
        "",
        "| model | fleet | rows | host | ours | equal rows | by speed | Cephalo's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fleet = str(row["fleet"]).replace("|", "\\|")
        ours_s = row["ours_s"]
        others = " | ".join(_cell(row[f"{rule}_s"], ours_s) for rule in ("even", "greedy", "cephalo"))
        own = "-" if not isinstance(ours_s, float) else format_s(ours_s)
        lines.append(f"| {row['model']} | {fleet} | {row['batch']} | {row['host_memory']} | {own} | {others} |")
    return "\n".join(lines) + "\n"


def _cell(seconds: object, ours_s: object) -> str:
    if not isinstance(seconds, float) or not isinstance(ours_s, float):
        return "-"
    return f"{format_s(seconds)} ({seconds / ours_s:.2f})"


if __name__ == "__main__":
    main()
