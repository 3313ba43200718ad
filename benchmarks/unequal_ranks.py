"""Shares of mixed fleets: ours beside equal rows, rows by speed, and Cephalo's program. All are simulated.

    python benchmarks/unequal_ranks.py [-o benchmarks/results/unequal_ranks.md] [--only 1]

No device is used: the step is captured with fake tensors and priced on data sheets. For each rule every class of ranks
is planned, and all ranks are simulated together; each rule gets the same machines, memory and ways to run its rows. The
first fleet is the example of Cephalo (arXiv 2411.01075); the next two follow the two clusters of its evaluation, of 8
and of 64 devices.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from machine import machine

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import format_s
from elixir_compile.ir.hardware import parse_fleet
from elixir_compile.search.shares.choose import RULES
from elixir_compile.tools.plan import SharePlans, budgets_of, found_choice, search_of
from elixir_compile.tools.preview.capture import Capture
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import TextBatch, find_model

FOUR = "2 x l4-24g + 1 x a6000-48g + 1 x p40-24g"
EIGHT = "2 x l4-24g + 1 x a6000-48g + 1 x p40-24g | 2 x p40-24g + 2 x p100-16g"
MANY = "4 x 8 x a10g-24g | 2 x 8 x v100-16g | 2 x 8 x t4-16g"
NO_HOST = "1MB"
"""The least that a budget may be: the state is on devices alone, as Cephalo has it."""
TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step on one fleet."""

    model: str
    fleet: str
    batch: int
    host_memory: str
    """Of each rank."""


CASES = (
    Case(model="gpt2-1.5b", fleet=FOUR, batch=64, host_memory="100GiB"),
    Case(model="gpt2-1.5b", fleet=FOUR, batch=64, host_memory=NO_HOST),
    Case(model="gpt2-1.5b", fleet=FOUR, batch=128, host_memory="100GiB"),
    Case(model="gpt2-1.5b", fleet=EIGHT, batch=128, host_memory="100GiB"),
    Case(model="gpt2-1.5b", fleet=EIGHT, batch=128, host_memory=NO_HOST),
    Case(model="gpt2-1.5b", fleet=MANY, batch=512, host_memory="100GiB"),
    Case(model="llama-7b", fleet=MANY, batch=512, host_memory="100GiB"),
)


def main() -> None:
    """Simulate the cases, and write the table with its figures as JSON beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "unequal_ranks.md")
    parser.add_argument("--only", type=int, nargs="*", help="places of cases, from 0 on")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for place, case in enumerate(CASES):
        if args.only is None or place in args.only:
            rows.append(row_of(case))
            found = {"benchmark": "unequal_ranks", "machine": machine(), "simulated": True, "rows": rows}
            args.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            args.output.write_text(table(rows), encoding="utf-8")
    print(table(rows))


@cache
def captured(model: str) -> Capture:
    """Return the step of `model` with float32 parameters."""
    built, inputs = find_model(model, TextBatch(batch=8, seq=TOKENS, dtype=torch.float32, recompute=False))
    return capture_model(built, inputs, options=parse_options({}))


def row_of(case: Case) -> dict[str, Any]:
    """Return the seconds and rows of all rules in `case`."""
    began_s = time.process_time()
    fleet, capture = parse_fleet(case.fleet), captured(case.model)
    options = parse_options({"host_memory": case.host_memory, "plan_cache": False})
    budgets = budgets_of(fleet, capture, options)
    search = search_of(capture, fleet, budgets, case.batch, options)
    plans = SharePlans(capture, fleet, budgets, options)
    row: dict[str, Any] = {
        "model": case.model,
        "fleet": case.fleet,
        "batch": case.batch,
        "host_memory": case.host_memory,
    }
    try:
        ours = found_choice(search, plans)
    except NoFeasiblePlan as error:
        return row | {"ours": None, "why": str(error), "cpu_s": time.process_time() - began_s}
    step = plans.simulated(ours.choice)
    assert step is not None, case
    row["ours"] = {"step_s": step.step_s, "busy_s": step.busy_s, "rows": ours.choice.rows}
    row["found"] = {"how": str(ours.outcome), "cpu_s": time.process_time() - began_s}
    row["formula"] = {"step_s": search.best().step_s, "rows": search.best().rows}
    for rule in RULES:
        choice = search.of_rule(rule)
        step = None if choice is None else plans.simulated(choice)
        row[rule] = None
        if choice is not None and step is not None:
            row[rule] = {"step_s": step.step_s, "rows": choice.rows, "formula_s": choice.step_s}
            assert ours.outcome.step_s <= step.step_s, (case, rule)
            assert search.least_s(choice.rows) <= 1.05 * step.step_s, (case, rule)
    row["cpu_s"] = time.process_time() - began_s
    print(row, flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# Shares of mixed fleets",
        "",
        "Seconds of a step **by simulation** on data sheets: nothing was run. `python benchmarks/unequal_ranks.py`",
        "writes this file. Behind the seconds of a rule is how many times as long they are as ours; a dash says that",
        f"its rows do not fit. Rows of {TOKENS} tokens, float32; `host` is the host memory of each rank.",
        "",
        "| model | fleet | rows | host | ours | our rows | equal rows | by speed | Cephalo's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["model"], row["fleet"].replace("|", "\\|"), str(row["batch"]), row["host_memory"]]
        ours = row["ours"]
        cells += ["-", "-"] if ours is None else [format_s(ours["step_s"]), rows_text(ours["rows"])]
        cells += ["-" if ours is None else cell(row[rule], ours["step_s"]) for rule in RULES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(figures: dict[str, Any] | None, ours_s: float) -> str:
    """Return the seconds of a rule as a cell."""
    return "-" if figures is None else f"{format_s(figures['step_s'])} ({figures['step_s'] / ours_s:.2f})"


def rows_text(rows: list[int] | tuple[int, ...]) -> str:
    """Return the rows of all ranks, equal ones in a row together: `17 x 2, 23, 7`."""
    runs: list[list[int]] = []
    for count in rows:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ", ".join(str(count) if times == 1 else f"{count} x {times}" for count, times in runs)


if __name__ == "__main__":
    main()
