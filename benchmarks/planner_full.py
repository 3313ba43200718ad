"""Check plans with all choices open: within 1 % of their bound, and no slower than a rule. Quartiles over a grid.

    python benchmarks/planner_full.py                          # hours on two cores; saves the table
    python benchmarks/planner_full.py --models gpt2-4b --batches 4 --machines a100-80g --ranks 1     # prints only
    python benchmarks/planner_full.py --models gpt2-20b --every 7 --rows FILE     # a part: adds to the rows in FILE
    python benchmarks/planner_full.py --rows FILE --table "note on the cases"     # saves the table of these rows
    python benchmarks/planner_full.py --small                  # four shallow models, which the tests plan too

The grid: free choice of activations and updates, 8 and 12 bytes of optimizer state per element, GPT-2 4b to 20b and
Llama 7b to 70b, A100s, H100s and RTX 4090s, 1 to 8 ranks, batches of 1 to 16 sequences each. A row has the number of
simulated steps ("plays"), of the works that a play issues on average, and of solves, because seconds differ by machine;
the CPU milliseconds of a play and the CPU seconds of the search; and the best step after 2, 5 and 10 of these seconds.
No GPU is needed and no weight is allocated. Each model is captured once for each batch, in a process of its own, and
kept in the cache folder.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.folders import cache_dir, write_cached
from elixir_compile.base.options import Options
from elixir_compile.ir import Param, StorageId, graph_from_json, graph_to_json
from elixir_compile.ir.hardware import preset
from elixir_compile.search import Problem, best, plan, planner
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation import solver
from elixir_compile.search.greedy import RULES
from elixir_compile.step.seconds import Player
from elixir_compile.step.works import Work
from elixir_compile.tools.preview.capture import Capture, capture_step
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import TextBatch, find_model, load_model, model_named

MODELS = ("gpt2-4b", "gpt2-10b", "gpt2-15b", "gpt2-20b", "llama-7b", "llama-13b", "llama-70b")
MACHINES = ("a100-40g", "a100-80g", "h100-80g", "rtx4090-24g")
RANKS = (1, 2, 4, 8)
BATCHES = (1, 4, 16)
STATES = (8, 12)
LENGTHS = {"gpt2": 1024, "llama": 2048, "llama-70b": 4096}
TIMEOUT_S = 60.0
"""Searches end after counted work, long before this, so that a case gives the same plan on every machine."""
MARKS_S = (2.0, 5.0, 10.0)
MOST_GAP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a machine."""

    model: str
    batch: int
    """Sequences of each rank."""
    machine: str
    ranks: int
    state: int
    """Bytes of optimizer state per element."""
    layers: int = 0
    """Number of layers of the model; 0 for all of them."""

    @property
    def shape(self) -> str:
        return f"{self.model} of {self.layers} layers" if self.layers else self.model

    @property
    def name(self) -> str:
        return f"{self.shape} batch {self.batch} state {self.state} on {self.ranks} x {self.machine}"


SMALL = tuple(
    Case(model=model, layers=layers, batch=16, machine="rtx4090-24g", ranks=ranks, state=12)
    for model, layers in (("gpt2-4b", 4), ("llama-7b", 2))
    for ranks in (1, 4)
)
"""The tests plan these cases too, and compare them with the saved rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a case; `step_s` and the fields below it are empty if nothing fits."""

    case: Case
    cpu_s: float
    num_plays: int
    num_solves: int
    num_works: int = 0
    """Works that all plays of the search issued; 0 in rows that were saved before they were counted."""
    plays_s: float = 0.0
    """CPU seconds of all plays."""
    step_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    unused_bytes: int = 0
    gaps_at: dict[str, float] = field(default_factory=dict)
    """By CPU seconds of search: the gap between the best step so far and the final bound; 1 if there is no step yet."""
    rules: dict[str, float] = field(default_factory=dict)
    """Simulated step in seconds of each rule that fits."""

    @property
    def best_rule(self) -> float | None:
        """The step of the fastest rule over the plan's step."""
        return min(self.rules.values()) / self.step_s if self.rules and self.step_s else None

    @property
    def works_per_play(self) -> float:
        """The works that a play issued on average."""
        return self.num_works / max(self.num_plays, 1)

    @property
    def play_ms(self) -> float:
        """The CPU milliseconds of a play on average."""
        return 1e3 * self.plays_s / max(self.num_plays, 1)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases from the command line."""
    if arguments.small:
        return list(SMALL)
    combinations = itertools.product(
        arguments.models, arguments.batches, arguments.states, arguments.machines, arguments.ranks
    )
    found = [
        Case(model=model, batch=batch, machine=machine, ranks=ranks, state=state)
        for model, batch, state, machine, ranks in combinations
    ]
    return found[:: arguments.every]


def captured(model: str, batch: int, layers: int = 0) -> Capture:
    """Return the step of `model` with `layers` layers (0: all), from the cache folder if an earlier run saved it."""
    path = _path(model, batch, layers)
    if not path.exists():
        subprocess.run([sys.executable, __file__, "--capture", model, str(batch), str(layers)], check=True)
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


def _path(model: str, batch: int, layers: int) -> Path:
    return cache_dir() / "benchmarks" / f"full-{model}-{layers}-{batch}-torch-{torch.__version__}.json"


def capture_of(model: str, batch: int, layers: int) -> Capture:
    """Capture a step of `model` with `layers` layers, without recompute by the model itself.

    With 0 for all layers, it is captured as `elixir-compile plan` does.
    """
    length = LENGTHS.get(model) or LENGTHS[model.partition("-")[0]]
    text = TextBatch(batch=batch, seq=length, dtype=torch.bfloat16)
    if not layers:
        return capture_model(*find_model(model, text))
    shape = model_named(model)
    fields = {**shape.fields, **dict.fromkeys(shape.layer_fields, layers), "model_type": shape.model_type}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        return capture_step(*load_model(str(path), text))


def write_capture(model: str, batch: int, layers: int) -> None:
    """Capture a step and write it to the cache folder."""
    capture = capture_of(model, batch, layers)
    fields = {
        "graph": json.loads(graph_to_json(capture.graph)),
        "device": str(capture.device),
        "numels": {name: param.numel for name, param in capture.params.items()},
        "masters": [name for name, param in capture.params.items() if param.has_master],
        "base_bytes": capture.base_bytes,
    }
    write_cached(_path(model, batch, layers), json.dumps(fields))


@dataclass(slots=True)
class Counts:
    """The work of a search, counted while it runs."""

    num_plays: int = 0
    """Simulated steps."""
    num_works: int = 0
    """Works that they issued."""
    plays_s: float = 0.0
    """CPU seconds that they took."""
    num_solves: int = 0
    """Solves of LPs and MILPs."""
    best: list[tuple[float, float]] = field(default_factory=list)
    """(CPU seconds since the start, best step in seconds) after each candidate."""


@contextmanager
def counting() -> Iterator[Counts]:
    """Count the work of all searches in the `with` block, by wrappers around the planner's functions."""
    counts, began_s = Counts(), time.process_time()
    play, keep, place = Evaluator.played, best.Tries._keep, planner.place_best
    run = Player.run
    solvers: list[tuple[Any, str, Callable[..., Any]]] = [
        (solver, "linprog", solver.linprog),
        (solver, "solve_integral", solver.solve_integral),
    ]

    def counted_play(*arguments: Any) -> Any:
        counts.num_plays += 1
        since_s = time.process_time()
        try:
            return play(*arguments)
        finally:
            counts.plays_s += time.process_time() - since_s

    def counted_run(self: Player, works: Sequence[Work]) -> None:
        counts.num_works += len(works)
        run(self, works)

    def counted_place(evaluator: Evaluator, first: Any, *arguments: Any, **named: Any) -> Any:
        counts.best.append((time.process_time() - began_s, first.step_s))
        return place(evaluator, first, *arguments, **named)

    def counted_keep(self: best.Tries, draft: Any) -> None:
        keep(self, draft)
        counts.best.append((time.process_time() - began_s, self.best.step_s))

    def counted(solver: Callable[..., Any]) -> Callable[..., Any]:
        def solve(*arguments: Any, **named: Any) -> Any:
            counts.num_solves += 1
            return solver(*arguments, **named)

        return solve

    Evaluator.played, best.Tries._keep, planner.place_best = counted_play, counted_keep, counted_place
    Player.run = counted_run
    for module, name, function in solvers:
        setattr(module, name, counted(function))
    try:
        yield counts
    finally:
        Evaluator.played, best.Tries._keep, planner.place_best = play, keep, place
        Player.run = run
        for module, name, function in solvers:
            setattr(module, name, function)


def problem_of(case: Case) -> Problem:
    """Return the problem of `case`, with its step from the cache folder."""
    return problem_from(case, captured(case.model, case.batch, case.layers))


def problem_from(case: Case, capture: Capture) -> Problem:
    """Return the problem of `case` for a captured step."""
    return capture.problem(preset(case.machine, case.ranks), Options(), state_bytes_per_element=case.state)


def solve(case: Case, problem: Problem) -> Row:
    """Plan a case with the default planner and with each rule."""
    began_s = time.process_time()
    with counting() as counts:
        try:
            found = plan(problem, "milp", TIMEOUT_S)
        except NoFeasiblePlan:
            found = None
    cpu_s = time.process_time() - began_s
    row = Row(
        case=case,
        cpu_s=cpu_s,
        num_plays=counts.num_plays,
        num_solves=counts.num_solves,
        num_works=counts.num_works,
        plays_s=counts.plays_s,
    )
    rules: dict[str, float] = {}
    for rule in RULES:
        try:
            rules[rule] = plan(problem, rule).prediction.step_s  # pyright: ignore[reportArgumentType] (a name)
        except NoFeasiblePlan:
            continue
    if found is None or found.bound_s is None:
        return replace(row, rules=rules)
    bests = {mark_s: [step_s for at_s, step_s in counts.best if at_s <= mark_s] for mark_s in MARKS_S}
    return replace(
        row,
        rules=rules,
        step_s=found.prediction.step_s,
        bound_s=found.bound_s,
        gap=found.gap,
        unused_bytes=found.budget_bytes - found.prediction.device_peak_bytes,
        gaps_at={
            f"{mark_s:g} s": 1 - found.bound_s / min(steps_s) if steps_s else 1.0 for mark_s, steps_s in bests.items()
        },
    )


def failures(row: Row) -> list[str]:
    """Return a sentence for each claim on `row` that does not hold."""
    if row.step_s is None:
        return [f"no plan or no bound, but {rule} fits" for rule in row.rules]
    slower = [f"slower than {rule}" for rule, step_s in row.rules.items() if row.step_s > step_s * (1 + 1e-9)]
    below = [f"{rule} is below the bound" for rule, step_s in row.rules.items() if step_s < (row.bound_s or 0.0)]
    return slower + below + ([] if row.gap is not None and 0.0 <= row.gap <= MOST_GAP else [f"gap {row.gap}"])


def quartiles(values: Sequence[float]) -> str:
    """Return minimum, quartiles and maximum of `values`, as cells of a table in Markdown."""
    if len(values) < 2:
        return ", ".join(f"{value:.4g}" for value in values) or "none"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{min(values):.4g} | {low:.4g} | {middle:.4g} | {high:.4g} | {max(values):.4g}"


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the table of quartiles, in Markdown."""
    planned = [row for row in rows if row.gap is not None]
    columns: dict[str, list[float]] = {
        "gap": [row.gap for row in planned if row.gap is not None],
        "CPU seconds": [row.cpu_s for row in planned],
        "plays": [float(row.num_plays) for row in planned],
        "works of a play": [row.works_per_play for row in planned if row.num_works],
        "CPU ms of a play": [row.play_ms for row in planned if row.num_works],
        "solves": [float(row.num_solves) for row in planned],
        "fastest rule / step": [row.best_rule for row in planned if row.best_rule is not None],
    }
    for mark_s in MARKS_S:
        name = f"{mark_s:g} s"
        columns[f"gap after {name} of CPU"] = [row.gaps_at[name] for row in planned if name in row.gaps_at]
    head = [f"{len(planned)} of {len(rows)} cases have a plan.", "", "| | least | 1/4 | 1/2 | 3/4 | most |"]
    return [*head, "|---|---|---|---|---|---|", *(f"| {name} | {quartiles(own)} |" for name, own in columns.items())]


def line(row: Row) -> str:
    """Return `row` as a line of the table in Markdown."""
    case = row.case
    cells = [case.shape, str(case.batch), str(case.state), f"{case.ranks} x {case.machine}"]
    if row.step_s is None or row.gap is None:
        return "| " + " | ".join([*cells, "nothing fits", *[""] * 8]) + " |"
    rule = "none fits" if row.best_rule is None else f"{row.best_rule:.2f}"
    of_play = [f"{row.works_per_play:.0f}", f"{row.play_ms:.2f}"] if row.num_works else ["", ""]
    counted = [str(row.num_plays), *of_play, str(row.num_solves), f"{row.cpu_s:.1f}"]
    at = " ".join(f"{gap:.1%}" for gap in row.gaps_at.values())
    return "| " + " | ".join([*cells, f"{row.step_s:.4g}", f"{row.gap:.2%}", at, rule, *counted]) + " |"


def read_rows(path: Path) -> dict[Case, Row]:
    """Return the rows of an earlier run, by case, from a file with a row on each line; empty if there is no file.

    An incomplete last line is removed from the file, so that its case is run again.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    if text and not text.endswith("\n"):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = [Row(**{**fields, "case": Case(**fields["case"])}) for fields in map(json.loads, lines)]
    return {row.case: row for row in rows}


HEAD = (
    "| model | batch | state | machine | step in s | gap | after 2, 5, 10 s | fastest rule / step | plays "
    "| works of a play | CPU ms of a play | solves | CPU s |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def save_table(name: str, note: str, rows: Sequence[Row]) -> None:
    """Save the figures of `rows`, and their table below `note`, which names the cases."""
    wrong = [f"{row.case.name}: {why}" for row in rows for why in failures(row)]
    path = save(name, {"note": note, "failures": wrong, "rows": [asdict(row) for row in rows]})
    table = RESULTS / f"{name}.md"
    table.write_text("\n".join([note, "", *summary(rows), "", HEAD, *map(line, rows)]) + "\n", encoding="utf-8")
    print(f"saved {path} and {table}")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Return a row for each case from the command line; rows of new cases are also added to the file of rows."""
    known = {} if arguments.rows is None else read_rows(arguments.rows)
    if arguments.table:
        return list(known.values())
    rows: list[Row] = []
    print(HEAD, flush=True)
    for case in cases(arguments):
        row = known.get(case) or solve(case, problem_of(case))
        if arguments.rows is not None and case not in known:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        rows.append(row)
        print(line(row), flush=True)
    return rows


def main() -> int:
    """Run the cases, print the claims that fail, save the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--states", nargs="+", type=int, default=STATES)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--machines", nargs="+", default=MACHINES)
    every = "plan every Nth case only; N should have no divisor in common with the number of values of an option"
    parser.add_argument("--every", type=int, default=1, metavar="N", help=every)
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="file with the rows of earlier runs; new rows are added"
    )
    parser.add_argument("--table", metavar="NOTE", help="run nothing, save the table of the rows in FILE")
    parser.add_argument("--small", action="store_true", help="plan the four shallow models of the tests")
    parser.add_argument("--capture", nargs=3, metavar=("MODEL", "BATCH", "LAYERS"))
    arguments = parser.parse_args()
    if arguments.capture:
        model, batch, layers = arguments.capture
        write_capture(model, int(batch), int(layers))
        return 0
    rows = run(arguments)
    print("\n" + "\n".join(summary(rows)))
    chosen = (arguments.models, arguments.batches, arguments.states, arguments.ranks, arguments.machines)
    is_complete = tuple(map(tuple, chosen)) == (MODELS, BATCHES, STATES, RANKS, MACHINES) and arguments.every == 1
    if arguments.small:
        save_table("planner_small", "Shallow models, which the tests plan too.", rows)
    elif arguments.table or is_complete:
        save_table("planner_full", arguments.table or "All cases.", rows)
    wrong = [f"{row.case.name}: {why}" for row in rows for why in failures(row)]
    for case in wrong:
        print(f"FAILS  {case}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
