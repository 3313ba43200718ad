"""Measure GPT-2 124M, batch 4 x 512, on a CPU under smaller and smaller budgets, and against torch's own budgets.

    OMP_NUM_THREADS=1 python benchmarks/activations.py          # 45 minutes on one thread; the machine must be quiet
    python benchmarks/activations.py --parts torch --minutes 20 # one part; the others stay in the file
    python benchmarks/activations.py --quick                    # two layers, short sequences; saves nothing

    budgets   100, 80, 60, 45, 35 % of the keep-everything peak: peaks, gradients, seconds in turn with 100 %
    eager     60 %, op by op: gradients bitwise
    floor     the smallest budget with a plan; a byte less is refused
    torch     at the peaks of torch's `activation_memory_budget` of 0, 0.25, 0.5, 0.75: seconds, step by step in turn
    logits    131072 classes, 2,048 tokens: the peak with the loss in chunks

Each case trains in a process of its own; compared processes keep running and take steps in turn. Exit code 1 if a claim
does not hold.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

import activations_worker
import quiet  # noqa: F401  before torch
import torch
from activations_table import write_table
from activations_worker import Case
from machine import RESULTS, save
from worker import Worker, in_turn

from elixir_compile.session.machine import cached_machine, store_machine
from elixir_compile.tools.measure.machine import measure_machine

SHARES = (100, 80, 60, 45, 35)
TORCH_SHARES = (0.0, 0.25, 0.5, 0.75)
NUM_ROUNDS = 3
PEAK_LIMIT, GRADIENT_LIMIT, NOISE = 0.03, 1e-5, 0.03
LOGITS_BYTES = 2048 * 131072 * 4
LIMIT_S = 900.0
Figures = dict[str, object]


@contextmanager
def started(case: Case) -> Iterator[Worker]:
    """Start the process of `case`, print the figures of its first steps, and end it after the `with` block."""
    began_s = time.monotonic()
    worker = Worker(json.dumps(asdict(case)), script=activations_worker.__file__, limit_s=LIMIT_S)
    print(f"{time.monotonic() - began_s:.0f} s  {asdict(case)}\n      {worker.first}", flush=True)
    try:
        yield worker
    finally:
        worker.stop()


def once(case: Case) -> Figures:
    """Return the figures of the first steps of `case`."""
    with started(case) as worker:
        return worker.first


def budgets(start: Case, known: Figures, num_rounds: int) -> Figures:
    """Measure each share of the keep-everything peak, and the smallest sufficient budget, in turn with the largest."""
    part: Figures = {"keep": once(start), "rows": {}}
    known["budgets"] = part
    min_bytes = once(replace(start, budget_bytes=1))["needed_bytes"]
    budgets_bytes = {f"{share} %": share * part["keep"]["peak_bytes"] // 100 for share in SHARES}
    with started(replace(start, budget_bytes=budgets_bytes["100 %"], compares=True)) as largest:
        for name, budget_bytes in {**budgets_bytes, "smallest": min_bytes}.items():
            with ExitStack() as stack:
                case = replace(start, budget_bytes=budget_bytes, compares=True)
                worker = largest if name == "100 %" else stack.enter_context(started(case))
                rows = compared({"100 %": largest, name: worker}, "100 %", num_rounds)
                part["rows"][name] = {"budget_bytes": budget_bytes, **rows[name]}
            keep(known, start)
    return part


def eager(start: Case, known: Figures, num_rounds: int) -> Figures:
    """Measure 60 % of the keep-everything peak, both with regions run op by op."""
    op_by_op = replace(start, inner="aot_eager")
    budget_bytes = 60 * once(op_by_op)["peak_bytes"] // 100
    return {"budget_bytes": budget_bytes, **once(replace(op_by_op, budget_bytes=budget_bytes, compares=True))}


def floor(start: Case, known: Figures, num_rounds: int) -> Figures:
    """Find the smallest budget, by `elixir.plan` and by a compiled call."""
    return once(replace(start, by="floor"))


def against_torch(start: Case, known: Figures, num_rounds: int) -> Figures:
    """Measure Elixir at the peak of each of torch's own budgets: with any choice, and with recomputation only."""
    rows = {}
    for share in TORCH_SHARES:
        theirs = replace(start, by="inductor", torch_share=share)
        with started(theirs) as worker:
            limit_bytes = worker.first["peak_bytes"]
            ours = {
                name: replace(start, budget_bytes=limit_bytes, activations=name, compares=False)
                for name in ("any", "recompute")
            }
            with ExitStack() as stack:
                workers = {"torch": worker}
                workers |= {name: stack.enter_context(started(case)) for name, case in ours.items()}
                rows[str(share)] = compared(workers, "torch", num_rounds)
        known["torch"] = rows
        keep(known, start)
    return rows


def compared(workers: dict[str, Worker], base: str, num_rounds: int) -> Figures:
    """Let all workers take steps in turn; return the figures of each, with the ratio of its step to the step of `base`.

    Workers without a plan keep their figures and take no steps.
    """
    running = {name: worker for name, worker in workers.items() if "peak_bytes" in worker.first}
    seconds = in_turn(running, num_rounds)
    rows = {name: dict(worker.first) for name, worker in workers.items()}
    for name, clocks in seconds.items():
        rows[name] |= {
            **clocks,
            "median_s": statistics.median(clocks["wall_s"]),
            "ratio": median_ratio(clocks["wall_s"], seconds[base]["wall_s"]),
            "own_ratio": median_ratio(clocks["own_s"], seconds[base]["own_s"]),
        }
    return rows


def median_ratio(ours_s: list[float], theirs_s: list[float]) -> float:
    """Return the median over the rounds of the ratio of `ours_s` to `theirs_s`."""
    return statistics.median(ours / theirs for ours, theirs in zip(ours_s, theirs_s, strict=True))


def logits(start: Case, known: Figures, num_rounds: int) -> Figures:
    """Measure the loss unchunked and in chunks, the latter under a budget smaller by half of the logits' bytes."""
    narrow = replace(start, model="logits")
    whole = once(replace(narrow, activations="keep"))
    limit_bytes = whole["peak_bytes"] - LOGITS_BYTES // 2
    chunked = once(replace(narrow, budget_bytes=limit_bytes, activations="recompute", compares=True))
    return {"logits_bytes": LOGITS_BYTES, "budget_bytes": limit_bytes, "whole": whole, "chunked": chunked}


PARTS: dict[str, Callable[[Case, Figures, int], Figures]] = {
    "budgets": budgets, "eager": eager, "torch": against_torch, "floor": floor, "logits": logits,
}  # fmt: skip


def claims_of_run(name: str, row: Figures, is_bitwise: bool = False) -> dict[str, bool]:
    """Return the claims on one budget, by text, and whether each holds."""
    if "shortfall" in row:
        return {f"{name}: {row['shortfall']}": False}
    peak_bytes, off = row["peak_bytes"], row["off"]
    peak_off = row["plan"]["peak_bytes"] / peak_bytes - 1
    spare = 1 - peak_bytes / row["budget_bytes"]
    gradients = f"{name}: gradients off by {off['gradient_off']:.1e}, loss by {off['loss_off']:.1e}"
    return {
        f"{name}: measured peak {spare:.2%} below the budget": spare >= 0,
        f"{name}: predicted peak off by {peak_off:+.2%}": abs(peak_off) <= PEAK_LIMIT,
        gradients: off["is_bitwise"] if is_bitwise else max(off["gradient_off"], off["loss_off"]) <= GRADIENT_LIMIT,
    }


def claims_of_budgets(part: Figures) -> dict[str, bool]:
    """Return the claims on all budgets, and whether each holds."""
    found: dict[str, bool] = {}
    slowest = 0.0
    for name, row in part["rows"].items():
        found |= claims_of_run(name, row)
        if "ratio" in row:
            longer = f"{name}: {row['ratio']:.3f} of the step at 100 %, no shorter than with more memory"
            found[longer] = row["ratio"] >= (1 - NOISE) * slowest
            slowest = max(slowest, row["ratio"])
    return found


def claims_of_torch(part: Figures) -> dict[str, bool]:
    """Return the claims at each of torch's peaks, and whether each holds."""
    found = {}
    for share, rows in part.items():
        for name in ("any", "recompute"):
            row = rows[name]
            if "shortfall" in row:
                found[f"torch {share}, {name}: {row['shortfall']}"] = False
                continue
            spare = 1 - row["peak_bytes"] / rows["torch"]["peak_bytes"]
            found[f"torch {share}, {name}: {row['ratio']:.3f} of its step"] = row["ratio"] <= 1 + NOISE
            found[f"torch {share}, {name}: peak {spare:.2%} below its own"] = spare >= 0
    return found


def claims(figures: Figures) -> dict[str, bool]:
    """Return the claims on all parts in `figures`, and whether each holds."""
    found: dict[str, bool] = {}
    if "budgets" in figures:
        found |= claims_of_budgets(figures["budgets"])
    if "eager" in figures:
        found |= claims_of_run("60 %, op by op", figures["eager"], is_bitwise=True)
    if "torch" in figures:
        found |= claims_of_torch(figures["torch"])
    for way, row in figures.get("floor", {}).items():
        needed_bytes = row["needed_bytes"]
        found[f"{way}: {needed_bytes} bytes are enough"] = row["is_planned"]
        found[f"{way}: one byte less is refused"] = row["one_byte_less_needs"] == needed_bytes
    if "logits" in figures:
        part = figures["logits"]
        fall = (part["whole"]["peak_bytes"] - part["chunked"]["peak_bytes"]) / part["logits_bytes"]
        found[f"logits: the peak falls by {fall:.2f} of their bytes"] = fall >= 0.5
        found |= claims_of_run("logits", {**part["chunked"], "budget_bytes": part["budget_bytes"]})
    return found


def keep(figures: Figures, start: Case) -> None:
    """Save the figures and their table, so that an interrupted run loses only its last case."""
    if not start.quick:
        save("activations_cpu", figures)
        write_table(RESULTS / "activations_cpu.md", figures, claims(figures))


def earlier() -> Figures:
    """Return the saved figures of earlier runs."""
    path = RESULTS / "activations_cpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> int:
    """Run the parts, print the claims, save the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=tuple(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="two layers, short sequences")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no part after so many minutes")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="measured steps of each case")
    arguments = parser.parse_args()
    until_s = time.monotonic() + 60 * arguments.minutes
    start = Case(quick=arguments.quick)
    figures = {} if arguments.quick else earlier()
    with tempfile.TemporaryDirectory() as folder:
        # For the workers too: the machine is measured now, not read from an earlier run on a busier day.
        os.environ.setdefault("ELIXIR_CACHE_DIR", folder)
        device = torch.device("cpu")
        if cached_machine(device) is None:
            store_machine(measure_machine(device), device)
        for name in arguments.parts:
            if time.monotonic() < until_s:
                before = os.getloadavg()
                figures[name] = PARTS[name](start, figures, arguments.rounds)
                figures["load_averages"] = {**figures.get("load_averages", {}), name: [before, os.getloadavg()]}
                figures["num_rounds"] = {**figures.get("num_rounds", {}), name: arguments.rounds}
                keep(figures, start)
    found = claims({name: figures[name] for name in PARTS if name in figures})
    for claim, holds in found.items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    return int(not all(found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
