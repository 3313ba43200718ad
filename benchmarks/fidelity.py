"""Check that steps take the bytes and seconds of their plans, and that no rule's plan is faster than the chosen plan.

    python benchmarks/fidelity.py                          # CPU, half an hour on one thread; the machine must be quiet
    python benchmarks/fidelity.py --models llama --shares 60          # one budget; saves nothing

GPT-2 124M and a small Llama, each under 100, 80, 60 and 45 % of its peak without a budget. The machine is measured
first, into a cache of this run's own. Each plan trains in a process of its own, which runs until its budget is done:

    worker milp     compile, measure the peak, 5 steps, re-plan, 5 steps | step         step
    worker elixir   compile, 2 steps                                     |      step         step     in turn
    ...

So each rule is timed beside the chosen plan in the same minute, and each process holds the memory of one training only.
A step is forward, backward, HybridAdamW and zero_grad. Exit code 1 if a claim does not hold.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import quiet  # noqa: F401  before torch
import torch
from machine import save
from worker import Worker, in_turn

from elixir_compile.session.machine import store_machine
from elixir_compile.tools.measure.machine import measure_machine

MODELS = ("llama", "gpt2")
SHARES = (100, 80, 60, 45)
NUM_ROUNDS = 5
PEAK_LIMIT, STEP_LIMIT, BEATEN_LIMIT = 0.03, 0.15, 1.03


def off(predicted: float, measured: float) -> float:
    """Return the error of a prediction as a share of the measured number; negative if the prediction is too low."""
    return predicted / measured - 1


def phase_row(phase: dict) -> dict[str, object]:
    """Return the errors of a plan's prediction, and the quartiles of the measured steps."""
    wall_s = phase["steps"]["wall_s"]
    median_s = statistics.median(wall_s)
    return {
        **phase,
        "median_s": median_s,
        "quartiles_s": statistics.quantiles(wall_s, n=4),
        "peak_off": off(phase["plan"]["peak_bytes"], phase["peak_bytes"]),
        "step_off": off(phase["plan"]["step_s"], median_s),
    }


def against_rules(model: str, budget_bytes: int, chosen: Worker) -> dict[str, object]:
    """Return, by rule, the comparison of its step with the chosen plan's.

    "same_as" names an earlier plan if the rule's plan equals it; "shortfall" is there if the rule does not fit.
    """
    found: dict[str, object] = {}
    rivals: dict[str, Worker] = {}
    known = {chosen.first["phases"][-1]["plan"]["does"]: "milp"}
    try:
        for rule, does in chosen.first["rules"].items():
            if does is None or does in known:
                found[rule] = {"shortfall": "does not fit"} if does is None else {"same_as": known[does]}
                continue
            known[does] = rule
            rivals[rule] = Worker(model, rule, budget_bytes)
        return {**found, **ratios_of(chosen, rivals)}
    finally:
        for worker in rivals.values():
            worker.stop()


def ratios_of(chosen: Worker, rivals: dict[str, Worker]) -> dict[str, object]:
    """Let all workers take steps in turn; return, by rule, the ratios of the chosen plan's step to the rule's step."""
    taken = in_turn({"milp": chosen, **rivals}, NUM_ROUNDS if rivals else 0)
    seconds = {name: clocks["wall_s"] for name, clocks in taken.items()}
    ratios = {
        rule: [ours / theirs for ours, theirs in zip(seconds["milp"], seconds[rule], strict=True)] for rule in rivals
    }
    return {
        rule: {
            "ratio": statistics.median(ratios[rule]),
            "ratio_quartiles": statistics.quantiles(ratios[rule], n=4),
            "wall_s": seconds[rule],
            "chosen_wall_s": seconds["milp"],
            "plan": worker.first["phases"][0]["plan"],
        }
        for rule, worker in rivals.items()
    }


def run_budget(model: str, share: int | None, budget_bytes: int | None, until_s: float) -> dict[str, object]:
    """Return the figures of one budget, without rules if the monotonic clock is past `until_s`.

    If a worker fails or hangs, only the row of this budget is lost.
    """
    row: dict[str, object] = {"model": model, "share": share, "budget_bytes": budget_bytes}
    try:
        chosen = Worker(model, "milp", budget_bytes)
        try:
            return {**row, **budget_figures(model, budget_bytes, chosen, until_s)}
        finally:
            chosen.stop()
    except (RuntimeError, TimeoutError) as error:
        return {**row, "shortfall": str(error)}


def budget_figures(model: str, budget_bytes: int | None, chosen: Worker, until_s: float) -> dict[str, object]:
    """Return the figures of the chosen plan and of each rule, or the shortfall if there is no plan."""
    if "shortfall" in chosen.first:
        return chosen.first
    before, after = map(phase_row, chosen.first["phases"])
    figures = {"num_threads": chosen.first["num_threads"], "before": before, "after": after}
    if budget_bytes is not None and time.monotonic() < until_s:
        figures["rules"] = against_rules(model, budget_bytes, chosen)
    return figures


def claims(row: dict) -> dict[str, bool]:
    """Return the claims on one budget, and whether each holds."""
    name = f"{row['model']} {'free' if row['share'] is None else str(row['share']) + ' %'}"
    if "shortfall" in row:
        return {f"{name}: {row['shortfall']}": False}
    found = {}
    for phase in ("before", "after"):
        peak_off, step_off = row[phase]["peak_off"], row[phase]["step_off"]
        found[f"{name}: peak {phase} correction off by {peak_off:+.1%}"] = abs(peak_off) <= PEAK_LIMIT
        found[f"{name}: step {phase} correction off by {step_off:+.1%}"] = abs(step_off) <= STEP_LIMIT
    for rule, figures in row.get("rules", {}).items():
        if "ratio" in figures:
            found[f"{name}: {figures['ratio']:.3f} of the step of {rule}"] = figures["ratio"] <= BEATEN_LIMIT
    return found


def show(row: dict) -> None:
    """Print the claims and the figures of one budget."""
    for claim, holds in claims(row).items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    if "shortfall" not in row:
        for phase in ("before", "after"):
            low_s, median_s, high_s = row[phase]["quartiles_s"]
            predicted = row[phase]["plan"]
            print(
                f"       {phase}: planned {predicted['step_s']:.3f} s, took {median_s:.3f} s ({low_s:.3f} to "
                f"{high_s:.3f}); planned {predicted['peak_bytes'] / 1e6:.1f} MB, took "
                f"{row[phase]['peak_bytes'] / 1e6:.1f} MB"
            )
        for rule, figures in row.get("rules", {}).items():
            if "ratio" not in figures:
                print(f"       {rule}: " + (figures.get("shortfall") or f"the same plan as {figures['same_as']}"))
    sys.stdout.flush()


def run_all(models: Sequence[str], shares: Sequence[int], minutes: float) -> Iterator[dict]:
    """Measure the machine, then each budget of each model; yield a row for each."""
    until_s = time.monotonic() + 60 * minutes
    device = torch.device("cpu")
    store_machine(measure_machine(device), device)
    for model in models:
        free = run_budget(model, None, None, until_s)
        yield free
        for share in shares if "after" in free else ():
            yield run_budget(model, share, share * free["after"]["peak_bytes"] // 100, until_s)


def main() -> int:
    """Run every budget, print the claims, save the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES)
    parser.add_argument("--minutes", type=float, default=25.0, help="run no more rules after so many minutes")
    arguments = parser.parse_args()
    is_complete = (tuple(arguments.models), tuple(arguments.shares)) == (MODELS, SHARES)
    rows: list[dict] = []
    loads = [os.getloadavg()]
    with tempfile.TemporaryDirectory() as folder:
        # For the workers too: the machine is measured now, not read from an earlier run on a busier day.
        os.environ["ELIXIR_CACHE_DIR"] = folder
        for row in run_all(arguments.models, arguments.shares, arguments.minutes):
            show(row)
            rows.append(row)
            loads.append(os.getloadavg())
            if is_complete:  # saved after each row, so that an interrupted run keeps its rows
                save("fidelity_cpu", {"load_averages": loads, "rows": rows})
    left_out = [f"{row['model']} {row['share']} %" for row in rows if row["share"] is not None and "rules" not in row]
    print(f"rules left out for lack of time: {', '.join(left_out) or 'none'}")
    return int(not all(all(claims(row).values()) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
