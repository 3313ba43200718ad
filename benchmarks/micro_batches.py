"""Compare steps whose plan divides the batch with loops over the same micro-batches: seconds, gathers, bytes, peaks.

    OMP_NUM_THREADS=1 python benchmarks/micro_batches.py          # 15 minutes on two cores; the machine must be quiet
    python benchmarks/micro_batches.py --parts link               # a single part; the others are kept in the file
    python benchmarks/micro_batches.py --quick                    # two narrow layers, short sequences; saves nothing

    whole     no budget: the whole batch at once, in 2 and 8 micro-batches, and the user's loop of 8
    torch     a loop of 8 with `torch.utils.checkpoint` in each layer, compiled; Elixir within its peak, divided by 8
              and as a loop of 8
    link      parameters on the host behind an emulated link: divided by 8, and the loop of 8 in the same budget
    ranks     two gloo ranks: divided by 4; `fully_shard` (FSDP2) in a loop of 4 that reduces gradients once;
              the same on an emulated network

A small Llama with 16 rows of 128 tokens, and for ranks a small GPT-2 with 8 rows of 128 tokens each, in fp32 with one
thread. Each case is a process; compared processes take steps in turn. An emulated link has the rate at which the
parameters arrive twice in R times the seconds that one micro-batch computes. R is 2.0 for a model in 16 bits, 2,048
tokens per micro-batch, 25 GB/s and 150 TFLOP/s (an A100 on PCIe 4 at half of its peak), and twice that for 1,024
tokens. Exit code 1 if a claim does not hold.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import micro_batches_ranks
import micro_batches_worker
import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save
from micro_batches_ranks import DividedCase
from micro_batches_table import write_table
from micro_batches_worker import Case
from ranks_worker import Group
from worker import Worker, in_turn

from elixir_compile.ir.hardware import Cluster, cluster_to_json
from elixir_compile.session.machine import cached_machine, machine, store_machine
from elixir_compile.tools.measure.machine import measure_machine

NUM_ROUNDS = 4
LINK_RATIOS = (2.0, 4.0)
"""Seconds in which an emulated link brings the parameters twice, over the seconds that a micro-batch computes."""
CLAIMED_RATIO = 4.0
NETWORK_RATIO = 2.0
SLOWER_LIMIT, FASTER_LIMIT = 1.03, 1.5
LOSS_LIMIT = 1e-4
SLACK_BYTES = 4096
"""Step counters of the optimizer and losses: beside a GPU most of them are host tensors."""
SPARE = 1.05
"""Budget of the link over the smallest budget in which both trainings fit."""
LIMIT_S = 600.0
FSDP2 = "FSDP2, loop of 4"
Figures = dict[str, object]
AnyWorker = Worker | Group


@contextmanager
def started(cases: Mapping[str, Case]) -> Iterator[dict[str, AnyWorker]]:
    """Start the processes of `cases`, two at a time, and end them after the `with` block."""
    workers: dict[str, AnyWorker] = {}
    try:
        with ThreadPoolExecutor(2) as pool:
            futures = {name: pool.submit(start, name, case) for name, case in cases.items()}
            for name, future in futures.items():
                workers[name] = future.result()
        yield workers
    finally:
        for worker in workers.values():
            worker.stop()


def start(name: str, case: Case | DividedCase) -> AnyWorker:
    """Start the process or the ranks of `case`, and print the figures of their first steps."""
    began_s = time.monotonic()
    if isinstance(case, DividedCase):
        worker: AnyWorker = Group(case, micro_batches_ranks.__file__)
    else:
        worker = Worker(json.dumps(asdict(case)), script=micro_batches_worker.__file__, limit_s=LIMIT_S)
    print(f"{time.monotonic() - began_s:.0f} s  {name}: {worker.first}", flush=True)
    return worker


def raced(workers: Mapping[str, AnyWorker], base: str, num_rounds: int) -> Figures:
    """Let all workers take steps in turn; return the figures of each, with the ratio of its step to the step of `base`.

    Workers without a plan keep their figures and take no steps.
    """
    running = {name: worker for name, worker in workers.items() if "peak_bytes" in worker.first}
    in_turn(running, 1)
    seconds = in_turn(running, num_rounds)
    rows = {name: dict(worker.first) for name, worker in workers.items()}
    for name, clocks in seconds.items():
        row = rows[name]
        row |= {**clocks, "median_s": statistics.median(clocks["wall_s"])}
        row["tokens_per_s"] = row["num_tokens"] / row["median_s"]
        for clock, ratio in (("wall_s", "ratio"), ("own_s", "own_ratio")):
            pairs = zip(clocks[clock], seconds[base][clock], strict=True)
            row[ratio] = statistics.median(own_s / base_s for own_s, base_s in pairs)
    print({name: (row.get("median_s"), row.get("ratio")) for name, row in rows.items()}, flush=True)
    return rows


def whole(first: Case, num_rounds: int) -> Figures:
    """Compare the whole batch at once with micro-batches, without a budget."""
    cases = {"whole": replace(first, micro_batches=1)}
    cases |= {f"divided by {number}": replace(first, micro_batches=number) for number in (2, 8)}
    cases["loop of 8"] = replace(first, by="loop")
    with started(cases) as workers:
        return {"rows": raced(workers, "whole", num_rounds)}


def against_checkpoint(first: Case, num_rounds: int) -> Figures:
    """Compare with a loop of checkpointed layers, within its peak."""
    with started({"checkpoint": replace(first, by="checkpoint")}) as theirs:
        budget_bytes = theirs["checkpoint"].first["peak_bytes"]
        cases = {
            "divided by 8": replace(first, budget_bytes=budget_bytes),
            "loop of 8": replace(first, by="loop", budget_bytes=budget_bytes),
        }
        with started(cases) as workers:
            return {"budget_bytes": budget_bytes, "rows": raced({**theirs, **workers}, "checkpoint", num_rounds)}


def link(first: Case, num_rounds: int) -> Figures:
    """Compare with the user's loop in the same budget, on an emulated link of several rates."""
    with started({"loop": replace(first, by="loop"), "floor": replace(first, by="floor")}) as workers:
        loop = workers["loop"]
        computes_s = statistics.median(loop.steps(3)["wall_s"]) / first.micro_batches
        param_bytes, floors = loop.first["param_bytes"], workers["floor"].first
    part: Figures = {"computes_s": computes_s, "param_bytes": param_bytes, "floors": floors, "ratios": {}}
    with tempfile.TemporaryDirectory() as folder:
        for ratio in LINK_RATIOS:
            rate = 2 * param_bytes / (ratio * computes_s)
            path = Path(folder) / f"{ratio}.json"
            path.write_text(cluster_to_json(with_link(machine(torch.device("cpu")), rate)), encoding="utf-8")
            limited = replace(
                first, budget_bytes=int(SPARE * max(floors.values())), link_bytes_per_s=rate, hardware=str(path)
            )
            with started({"loop of 8": replace(limited, by="loop"), "divided by 8": limited}) as workers:
                rows = raced(workers, "loop of 8", num_rounds)
            part["ratios"][str(ratio)] = {"bytes_per_s": rate, "budget_bytes": limited.budget_bytes, "rows": rows}
    return part


def with_link(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """Return `cluster` with an emulated link of this rate, in each direction, between host and device."""
    node = cluster.nodes[0]
    copy = replace(
        node.h2d, bytes_per_s=bytes_per_s, busy_bytes_per_s=None, latency_s=0.0, overlaps_compute=True,
        source="emulated",
    )  # fmt: skip
    return replace(cluster, nodes=(replace(node, h2d=copy, d2h=copy),) * len(cluster.nodes))


def ranks(first: Case, num_rounds: int) -> Figures:
    """Compare with `fully_shard` on two ranks, as they are and on an emulated network."""
    start = DividedCase(quick=first.quick)
    rows = of_ranks(start, num_rounds)
    theirs = rows[FSDP2]
    computes_s = theirs["median_s"] / start.micro_batches
    # A rank has half of the parameters, so each gather receives the other half.
    rate = 2 * (theirs["param_bytes"] / 2) / (NETWORK_RATIO * computes_s)
    on_network = of_ranks(replace(start, network_bytes_per_s=rate), num_rounds)
    return {"computes_s": computes_s, "rows": rows, "bytes_per_s": rate, "on_network": on_network}


def of_ranks(start: DividedCase, num_rounds: int) -> Figures:
    """Return the figures of `fully_shard` and of Elixir within its peak."""
    with started({FSDP2: replace(start, by="fsdp")}) as theirs:
        (group,) = theirs.values()
        ours = replace(start, budget_bytes=group.first["peak_bytes"])
        with started({"divided by 4": ours}) as workers:
            return raced({**theirs, **workers}, FSDP2, num_rounds)


PARTS: dict[str, Callable[[Case, int], Figures]] = {
    "whole": whole, "torch": against_checkpoint, "link": link, "ranks": ranks,
}  # fmt: skip


def claims(figures: Figures) -> dict[str, bool]:
    """Return the claims on all parts in `figures`, and whether each holds."""
    found: dict[str, bool] = {}
    if "whole" in figures:
        rows = figures["whole"]["rows"]
        ratio = rows["divided by 8"]["ratio"]
        found[f"whole: {ratio:.3f} of the undivided step in 8 micro-batches"] = ratio <= SLOWER_LIMIT
        counts = [rows[name]["counts"] for name in rows if name.startswith("divided")]
        found["whole: as many transfers for each number"] = all(other == counts[0] for other in counts)
    for ratio, case in figures.get("link", {}).get("ratios", {}).items():
        ours, loop = case["rows"]["divided by 8"], case["rows"]["loop of 8"]
        if "ratio" not in ours or "ratio" not in loop:
            found[f"link {ratio}: {ours.get('shortfall')} {loop.get('shortfall')}"] = False
            continue
        speedup, spare = 1 / ours["ratio"], 1 - (ours["peak_bytes"] - SLACK_BYTES) / loop["peak_bytes"]
        least = FASTER_LIMIT if float(ratio) >= CLAIMED_RATIO else 1.0
        found[f"link {ratio} (emulated): {speedup:.2f} times the tokens per second of the loop"] = speedup >= least
        found[f"link {ratio} (emulated): peak {spare:.2%} below that of the loop"] = spare >= 0
    for part in ("torch", "ranks"):
        found |= claims_of_part(part, figures[part]["rows"]) if part in figures else {}
    if "ranks" in figures:
        found |= claims_of_part("ranks on an emulated network", figures["ranks"]["on_network"])
    return found


def claims_of_part(part: str, rows: Figures) -> dict[str, bool]:
    """Return the claims on a part that compares with torch, the first of `rows`, within its peak."""
    base, *others = rows
    found: dict[str, bool] = {}
    for name in others:
        row = rows[name]
        if "ratio" not in row:
            found[f"{part}: {name}: {row['shortfall']}"] = False
            continue
        spare = 1 - (row["peak_bytes"] - SLACK_BYTES) / rows[base]["peak_bytes"]
        pairs = zip(row["losses"], rows[base]["losses"], strict=True)
        off = max(abs(own / other - 1) for own, other in pairs)
        if name.startswith("divided"):
            found[f"{part}: {name}: {row['ratio']:.3f} of the step of {base}"] = row["ratio"] <= 1.0
        found[f"{part}: {name}: peak {spare:.2%} below theirs"] = spare >= 0
        found[f"{part}: {name}: loss off by {off:.1e}"] = off <= LOSS_LIMIT
    return found


def earlier() -> Figures:
    """Return the saved figures of earlier runs."""
    path = RESULTS / "micro_batches_cpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> int:
    """Run the parts, print the claims, save the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=tuple(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="two narrow layers, short sequences")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="measured steps of each case")
    arguments = parser.parse_args()
    figures = {} if arguments.quick else earlier()
    with tempfile.TemporaryDirectory() as folder:
        # For the workers too: the machine is measured now, not read from an earlier run on a busier day.
        os.environ.setdefault("ELIXIR_CACHE_DIR", folder)
        here = torch.device("cpu")
        if cached_machine(here) is None and not arguments.quick:
            store_machine(measure_machine(here), here)
        for name in arguments.parts:
            before, began_s = os.getloadavg(), time.monotonic()
            figures[name] = PARTS[name](Case(quick=arguments.quick), arguments.rounds)
            took = {"load_averages": [before, os.getloadavg()], "took_s": time.monotonic() - began_s}
            figures[name] |= {**took, "num_rounds": arguments.rounds}
            if not arguments.quick:
                save("micro_batches_cpu", figures)
                write_table(RESULTS / "micro_batches_cpu.md", figures, claims(figures))
    found = claims(figures)
    print("\n".join(f"{'holds' if holds else 'FAILS'}  {claim}" for claim, holds in found.items()))
    return int(not all(found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
