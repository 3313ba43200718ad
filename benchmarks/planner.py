"""Check that plans are within 1 % of their bound in 10 s, and no slower than a rule: GPT-2 4b to 20b on A100s.

    python benchmarks/planner.py                       # half an hour on two cores; saves the table
    python benchmarks/planner.py --models gpt2-4b --batches 4 --ranks 1 --machines a100-40g      # prints, saves nothing

No GPU is needed and no weight is allocated. Shapes, batches and the formula of TFLOPS come from the benchmark of the
Elixir paper (arXiv 2212.05339): sequences of 1024, bfloat16 with 12 bytes of optimizer state per element, recomputed
layers. Each model is captured once per batch, in a process of its own, and kept in the cache folder; `--fresh` captures
again. Then Llama-7B is captured and planned in a new process. Exit code 1 if a claim does not hold.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.folders import cache_dir, write_cached
from elixir_compile.base.options import Options
from elixir_compile.base.units import GIB, format_bytes, format_s
from elixir_compile.ir import Param, Plan, StorageId, graph_from_json, graph_to_json
from elixir_compile.ir.hardware import Cluster, preset
from elixir_compile.search import plan
from elixir_compile.search.greedy import RULES
from elixir_compile.tools.preview.capture import Capture, capture_step
from elixir_compile.tools.preview.models import TextBatch, load_model

MODELS = ("gpt2-4b", "gpt2-10b", "gpt2-15b", "gpt2-20b")
BATCHES = (4, 8, 12, 16)
MACHINES = ("a100-40g", "a100-80g")
RANKS = (1, 2, 4)
LENGTH = 1024
STATE_BYTES_PER_ELEMENT = 12  # fp32 master weights and two moments
TIMEOUT_S = 10.0
MOST_S = 12.0  # the search stops after TIMEOUT_S; the plan is then written out and verified
MOST_GAP = 0.01
LLAMA_LENGTH, LLAMA_MOST_S, LLAMA_MOST_BYTES = 2048, 30.0, 3 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a case: a plan with its bound, or the shortfall."""

    model: str
    batch: int
    machine: str
    ranks: int
    seconds: float
    """Wall seconds until the plan was verified, or until NoFeasiblePlan was raised."""
    cpu_s: float
    """CPU seconds within `seconds`; far fewer if other processes held the cores."""
    rules: dict[str, float | None]
    """Simulated step of each rule planner in seconds; None if its placement does not fit."""
    shortfall: str = ""
    """The text of NoFeasiblePlan; empty if there is a plan."""
    step_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    tflops: float | None = None
    """Per device, 8 x parameters x tokens / step: forward, backward and the forward again."""
    peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    gib_saves_s: float | None = None
    binding: tuple[str, ...] = ()
    placements: dict[str, int] = field(default_factory=dict)
    """Number of buckets by the homes of parameters and optimizer state."""

    @property
    def name(self) -> str:
        return f"{self.model} batch {self.batch} on {self.ranks} x {self.machine}"


def captured(model: str, batch: int, *, is_fresh: bool) -> Capture:
    """Return the training step of `model`, from the cache folder if an earlier run saved it and not `is_fresh`."""
    path = cache_dir() / "benchmarks" / f"{model}-{batch}-torch-{torch.__version__}.json"
    if is_fresh or not path.exists():
        subprocess.run([sys.executable, __file__, "--capture", model, str(batch), str(path)], check=True)
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Capture(
        graph=graph_from_json(json.dumps(fields["graph"])),
        device=torch.device(fields["device"]),
        params={
            StorageId(name): Param(is_trained=True, numel=numel, has_master=name in fields["masters"])
            for name, numel in fields["numels"].items()
        },
        held_bytes=0,
        base_bytes=fields["base_bytes"],
    )


def capture_to(model: str, batch: int, path: Path) -> None:
    """Capture a step of `model` and write it to `path`."""
    text = TextBatch(batch=batch, seq=LENGTH, dtype=torch.bfloat16, recompute=True)
    capture = capture_step(*load_model(model, text))
    fields = {
        "graph": json.loads(graph_to_json(capture.graph)),
        "device": str(capture.device),
        "numels": {name: param.numel for name, param in capture.params.items()},
        "masters": [name for name, param in capture.params.items() if param.has_master],
        "base_bytes": capture.base_bytes,
    }
    write_cached(path, json.dumps(fields))


def solve(model: str, batch: int, machine: str, ranks: int, capture: Capture) -> Row:
    """Plan a case with the default planner and with each rule."""
    cluster = preset(machine, ranks)
    problem = capture.problem(cluster, Options(), state_bytes_per_element=STATE_BYTES_PER_ELEMENT)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    try:
        found, shortfall = plan(problem, "milp", TIMEOUT_S), ""
    except NoFeasiblePlan as error:
        found, shortfall = None, str(error)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    rules: dict[str, float | None] = {}
    for rule in RULES:
        try:
            rules[rule] = plan(problem, rule).prediction.step_s
        except NoFeasiblePlan:
            rules[rule] = None
    case = {"model": model, "batch": batch, "machine": machine, "ranks": ranks}
    tokens = 0 if found is None else batch * LENGTH / found.prediction.step_s
    proof = (
        {}
        if found is None
        else proof_of(found, tflops=8 * sum(param.numel for param in capture.params.values()) * tokens / 1e12)
    )
    return Row(**case, seconds=seconds, cpu_s=cpu_s, rules=rules, shortfall=shortfall, **proof)


def proof_of(found: Plan, tflops: float) -> dict:
    """Return the fields of a row that come from its plan."""
    homes = (f"{p.param}/{p.optim}{' resident' if p.resident else ''}" for p in found.placements)
    return {
        "step_s": found.prediction.step_s,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "tflops": tflops,
        "peak_bytes": found.prediction.device_peak_bytes,
        "host_peak_bytes": found.prediction.host_peak_bytes,
        "gib_saves_s": found.gib_saves_s,
        "binding": found.binding,
        "placements": dict(sorted(Counter(homes).items())),
    }


def failures(row: Row, budget_bytes: int) -> list[str]:
    """Return a sentence for each claim on `row` that does not hold."""
    fitting = {rule: step_s for rule, step_s in row.rules.items() if step_s is not None}
    if row.step_s is None:
        wrong = [f"no plan, but {rule} takes {format_s(step_s)}" for rule, step_s in fitting.items()]
        return wrong + ([] if "short by" in row.shortfall else ["no plan, and no shortfall named"])
    # The last bits of a sum of seconds depend on the order of the sum.
    slower = [
        f"slower than {rule}: {row.step_s} s, {s} s" for rule, s in fitting.items() if row.step_s > s * (1 + 1e-9)
    ]
    wrong = [] if row.gap is not None and row.gap <= MOST_GAP else [f"gap {row.gap}"]
    wrong += [] if row.seconds <= MOST_S else [f"took {row.seconds:.1f} s, {row.cpu_s:.1f} s of them its own"]
    wrong += [] if row.peak_bytes <= budget_bytes else [f"peak {row.peak_bytes} above {budget_bytes}"]
    return wrong + slower


def budget_of(cluster: Cluster) -> int:
    """Return the device budget of a plan: the memory of a device without its reserve."""
    return cluster.device.memory_bytes - cluster.device.reserve_bytes


def line(row: Row) -> str:
    """Return `row` as a line of the table in Markdown."""
    cells = [row.model, str(row.batch), f"{row.ranks} x {row.machine}"]
    if row.step_s is None:
        short = row.shortfall.partition("short by ")[2].partition(";")[0].partition(". ")[0]
        memory = "host" if "of host memory" in row.shortfall else "device"
        return "| " + " | ".join([*cells, f"short by {short} of {memory}", *[""] * 6, f"{row.seconds:.1f} s"]) + " |"
    gap = "none" if row.gap is None else f"{row.gap:.2%}"
    best = min(((s, rule) for rule, s in row.rules.items() if s is not None), default=None)
    rule = "none fits" if best is None else f"{best[1]} {format_s(best[0])}"
    homes = ", ".join(f"{count} {home}" for home, count in row.placements.items())
    peak, bound = format_bytes(row.peak_bytes), format_s(row.bound_s) if row.bound_s is not None else "none"
    cells += [format_s(row.step_s), bound, gap, f"{row.tflops:.0f}", peak, rule, homes, f"{row.seconds:.1f} s"]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| model | batch | machine | step | bound | gap | TFLOPS | peak | fastest rule | buckets: param/state | search |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def llama() -> dict[str, float]:
    """Plan Llama-7B, 1 x 2048, on an A100 with 80 GB; return seconds and the peak of resident memory."""
    began_s = time.perf_counter()
    model, inputs = load_model("llama-7b", TextBatch(batch=1, seq=LLAMA_LENGTH, dtype=torch.bfloat16))
    capture = capture_step(model, inputs)
    captured_s = time.perf_counter()
    problem = capture.problem(preset("a100-80g"), Options(), state_bytes_per_element=STATE_BYTES_PER_ELEMENT)
    found = plan(problem, "milp", TIMEOUT_S)
    return {
        "capture_s": captured_s - began_s,
        "plan_s": time.perf_counter() - captured_s,
        # In KiB on Linux, in bytes on macOS.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "num_ops": len(capture.graph.ops),
        "step_s": found.prediction.step_s,
        "gap": found.gap,
    }


def llama_apart() -> dict[str, float]:
    """Run `llama` in a new process; `process_s` counts from its start, imports included."""
    began_s = time.perf_counter()
    result = subprocess.run([sys.executable, __file__, "--llama"], stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(result.stdout.splitlines()[-1]), "process_s": time.perf_counter() - began_s}


def write_table(rows: Sequence[Row]) -> Path:
    """Write the grid as Markdown and return its path."""
    note = (
        f"GPT-2, sequences of {LENGTH}, bfloat16, {STATE_BYTES_PER_ELEMENT} bytes of optimizer state per element, "
        "layers recompute. Seconds of a step are simulated. TFLOPS are per device, by the paper's formula.\n"
    )
    path = RESULTS / "planner_grid.md"
    path.write_text("\n".join([note, HEAD, *map(line, rows)]) + "\n", encoding="utf-8")
    return path


def run_grid(arguments: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Plan the cases from the command line; return their rows, and a sentence for each claim that does not hold."""
    rows: list[Row] = []
    wrong: list[str] = []
    print(HEAD, flush=True)
    for model, batch in itertools.product(arguments.models, arguments.batches):
        capture = captured(model, batch, is_fresh=arguments.fresh)
        for machine, ranks in itertools.product(arguments.machines, arguments.ranks):
            row = solve(model, batch, machine, ranks, capture)
            rows.append(row)
            print(line(row), flush=True)
            wrong += [f"{row.name}: {why}" for why in failures(row, budget_of(preset(machine, ranks)))]
    return rows, wrong


def main() -> int:
    """Run the grid and Llama-7B, print the claims that fail, save the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--machines", nargs="+", default=MACHINES)
    parser.add_argument("--fresh", action="store_true", help="capture again")
    parser.add_argument("--capture", nargs=3, metavar=("MODEL", "BATCH", "PATH"))
    parser.add_argument("--llama", action="store_true", help="only Llama-7B, in this process")
    arguments = parser.parse_args()
    if arguments.capture:
        model, batch, path = arguments.capture
        capture_to(model, int(batch), Path(path))
        return 0
    if arguments.llama:
        print(json.dumps(llama()))
        return 0
    rows, wrong = run_grid(arguments)
    asked = (arguments.models, arguments.batches, arguments.ranks, arguments.machines)
    if tuple(map(tuple, asked)) == (MODELS, BATCHES, RANKS, MACHINES):
        figures = llama_apart()
        print("Llama-7B " + "  ".join(f"{name} {value:.6g}" for name, value in figures.items()))
        if figures["capture_s"] + figures["plan_s"] > LLAMA_MOST_S or figures["peak_rss_bytes"] > LLAMA_MOST_BYTES:
            wrong.append(f"Llama-7B: more than {LLAMA_MOST_S} s or {format_bytes(LLAMA_MOST_BYTES)}")
        saved = {"failures": wrong, "load_average": os.getloadavg(), "llama_7b": figures}
        path = save("planner_grid", {**saved, "rows": [asdict(row) for row in rows]})
        print(f"saved {path} and {write_table(rows)}")
    for case in wrong:
        print(f"FAILS  {case}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
