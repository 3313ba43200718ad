"""Compare steps and peaks of Elixir and `fully_shard` (FSDP2) on GPT-2 124M with two ranks of the same CPU.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py          # 20 minutes on two cores; the machine must be quiet
    python benchmarks/ranks.py --parts host               # a single part; the other part is kept in the file
    python benchmarks/ranks.py --quick                    # three narrow layers, short sequences; saves nothing

    device    `fully_shard` on each block and on the model, eager and compiled, with torch's fused AdamW; Elixir within
              the smaller of their peaks, with nothing on the host
    host      `fully_shard` with `CPUOffloadPolicy`, compiled; Elixir within its peak and its host bytes

Gloo, one thread and a batch of 2 x 256 per rank, fp32. Each rank of each case is a process. The two cases of
`fully_shard` take steps in turn, then the faster of them and Elixir. Exit code 1 if a claim does not hold.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save
from ranks_worker import Case, Group
from worker import in_turn

from elixir_compile.session.machine import cached_machine, store_machine
from elixir_compile.tools.measure.machine import measure_machine

NUM_ROUNDS = 5
LOSS_LIMIT = 1e-5
MB = 1e6
Figures = dict[str, object]


@contextmanager
def started(case: Case) -> Iterator[Group]:
    """Start the ranks of `case`, print the figures of their first steps, and end them after the `with` block."""
    group = Group(case)
    print(case, group.first, flush=True)
    try:
        yield group
    finally:
        group.stop()


def device(start: Case, num_rounds: int) -> Figures:
    """Compare with everything on the device."""
    theirs = {
        "FSDP2": replace(start, by="fsdp", compiles=False),
        "FSDP2, compiled": replace(start, by="fsdp"),
    }
    return compared(theirs, start, num_rounds)


def host(start: Case, num_rounds: int) -> Figures:
    """Compare with parameters, gradients and state on the host."""
    return compared({"FSDP2, compiled": replace(start, by="fsdp", offloads=True)}, start, num_rounds)


PARTS: dict[str, Callable[[Case, int], Figures]] = {"device": device, "host": host}


def compared(theirs: dict[str, Case], ours: Case, num_rounds: int) -> Figures:
    """Let `theirs` take steps in turn, then the fastest of them and `ours`.

    The budgets of `ours` are the smallest peak of `theirs` and the host bytes of their fastest case. Only two cases run
    at a time, because the memory of the machine holds no more.
    """
    with ExitStack() as stack:
        first = {name: stack.enter_context(started(case)) for name, case in theirs.items()}
        budget_bytes = min(group.first["peak_bytes"] for group in first.values())
        fastest = next(iter(first))
        rows: Figures = {}
        if len(first) > 1:
            rows = raced(first, fastest, num_rounds)
            fastest = min(rows, key=lambda name: rows[name]["median_s"])
        for name in first:
            if name != fastest:
                first[name].stop()
        # A budget must be positive; in a single byte nothing fits.
        host_bytes = max(1, first[fastest].first["host_bytes"])
        group = stack.enter_context(started(replace(ours, budget_bytes=budget_bytes, host_bytes=host_bytes)))
        last = raced({fastest: first[fastest], "ours": group}, fastest, num_rounds)
    return {"budget_bytes": budget_bytes, "fastest": fastest, "theirs": rows, "rows": last}


def raced(groups: dict[str, Group], base: str, num_rounds: int) -> Figures:
    """Let `groups` take steps in turn; return the figures of each, with the ratio of its step to the step of `base`."""
    in_turn(groups, 1)
    seconds = in_turn(groups, num_rounds)
    rows = {name: {**group.first, **seconds[name]} for name, group in groups.items()}
    for row in rows.values():
        row["median_s"] = statistics.median(row["wall_s"])
        for clock, ratio in (("wall_s", "ratio"), ("own_s", "own_ratio")):
            pairs = zip(row[clock], rows[base][clock], strict=True)
            row[ratio] = statistics.median(seconds / base_s for seconds, base_s in pairs)
    print({name: (row["wall_s"], row["ratio"]) for name, row in rows.items()}, flush=True)
    return rows


def claims(figures: Figures) -> dict[str, bool]:
    """Return the claims on all parts in `figures`, and whether each holds."""
    found: dict[str, bool] = {}
    for part in (part for part in PARTS if part in figures):
        fastest, own = figures[part]["fastest"], figures[part]["rows"]["ours"]
        spare = 1 - own["peak_bytes"] / figures[part]["budget_bytes"]
        pairs = zip(own["losses"], figures[part]["rows"][fastest]["losses"], strict=True)
        off = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        found[f"{part}: {own['ratio']:.3f} of the step of {fastest}"] = own["ratio"] <= 1.0
        found[f"{part}: peak {spare:.2%} below theirs"] = spare >= 0
        more_bytes = own["host_bytes"] - figures[part]["rows"][fastest]["host_bytes"]
        found[f"{part}: {more_bytes / MB:+.1f} MB on the host"] = more_bytes <= 0
        found[f"{part}: loss off by {off:.1e}"] = off <= LOSS_LIMIT
    return found


def table(figures: Figures) -> str:
    """Return a table in Markdown for each part in `figures`, and the claims."""
    machine = "GPT-2 124M on 2 gloo ranks of one CPU, each with one thread and a batch of 2 x 256, fp32."
    texts = [f"{machine} MB are 10^6 bytes of one rank; seconds are medians of steps taken in turn."]
    for part in (part for part in PARTS if part in figures):
        lines = [
            f"| {part} | peak MB | host MB | step s | of the first of the two | own s, of it | loss |",
            "| --- " * 7 + "|",
        ]
        for rows in (figures[part]["theirs"], figures[part]["rows"]):
            for name, row in rows.items():
                cells = [name, f"{row['peak_bytes'] / MB:.1f}", f"{row['host_bytes'] / MB:.1f}"]
                cells += [f"{row['median_s']:.3f}", f"{row['ratio']:.3f}", f"{row['own_ratio']:.3f}"]
                lines.append("| " + " | ".join([*cells, f"{row['losses'][-1]:.6f}"]) + " |")
        before, after = figures["load_averages"][part]
        num_rounds = len(figures[part]["rows"]["ours"]["wall_s"])
        lines.append(f"\n{num_rounds} rounds; load average {before[0]:.1f} before, {after[0]:.1f} after.")
        texts.append("\n".join(lines))
    texts.append("\n".join(f"- {'holds' if holds else 'FAILS'}: {claim}" for claim, holds in claims(figures).items()))
    return "\n\n".join(texts) + "\n"


def earlier() -> Figures:
    """Return the saved figures of earlier runs."""
    path = RESULTS / "ranks_cpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> int:
    """Run the parts, print the table, save the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=tuple(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="three narrow layers, short sequences")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="measured steps of each case")
    arguments = parser.parse_args()
    figures = {} if arguments.quick else earlier()
    with tempfile.TemporaryDirectory() as folder:
        # For the workers too: the machine is measured now, not read from an earlier run on a busier day.
        os.environ.setdefault("ELIXIR_CACHE_DIR", folder)
        here = torch.device("cpu")
        if cached_machine(here) is None:
            store_machine(measure_machine(here), here)
        for name in arguments.parts:
            before = os.getloadavg()
            figures[name] = PARTS[name](Case(quick=arguments.quick), arguments.rounds)
            figures["load_averages"] = {**figures.get("load_averages", {}), name: [before, os.getloadavg()]}
            if not arguments.quick:
                save("ranks_cpu", figures)
                (RESULTS / "ranks_cpu.md").write_text(table(figures), encoding="utf-8")
    print(table(figures))
    return int(not all(claims(figures).values()))


if __name__ == "__main__":
    raise SystemExit(main())
