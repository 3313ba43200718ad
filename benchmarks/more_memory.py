"""Count the budgets at which more memory, and the links at which more bandwidth, give a slower plan.

    python benchmarks/more_memory.py                     # ten shallow models; saves the table
    python benchmarks/more_memory.py --models gpt2-4b    # prints only
    python benchmarks/more_memory.py --models gpt2-4b --rows FILE    # adds to the rows in FILE
    python benchmarks/more_memory.py --rows FILE --table             # saves the table of these rows

For each model, 64 random budgets between the smallest that fits and everything on the device are asked for in random
order, with a plan cache that is empty at first, and again in another order. A rise is a budget whose plan is slower
than that of some smaller budget. Counted are the rises of the searches alone, of the answers as they came, where a
smaller budget may have been asked later, and of the answers to the second round. The same for 16 links between half
and twice the rates of the machine, under one budget. Searches end after a second: short searches rise more often. No
GPU is needed and no weight is allocated.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.ir import Plan
from elixir_compile.ir.hardware import preset
from elixir_compile.search import Problem, plan
from elixir_compile.session import cache
from elixir_compile.tools.preview.capture import capture_step
from elixir_compile.tools.preview.models import TextBatch, load_model, model_named

MODELS = {
    "gpt2-4b": 4,
    "gpt2-20b": 2,
    "llama-7b": 2,
    "llama-70b": 2,
    "llama-3-8b": 2,
    "llama-3.2-1b": 4,
    "qwen3-0.6b": 4,
    "qwen3-8b": 3,
    "qwen3-32b": 2,
    "bert-large": 4,
}
"""Models by name, each with so many of its layers."""
MACHINE, BATCH, SEQ = "rtx4090-24g", 8, 512
NUM_BUDGETS, NUM_LINKS, SEARCH_S = 64, 16, 1.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rises:
    """Rises of as many answers as were asked for, and the largest share by which a step is longer than before it."""

    num: int
    worst: float


@dataclass(frozen=True, slots=True)
class Row:
    """The rises of a model, by the question (`budgets`, `links`) and by who answers (`search`, `first`, `again`)."""

    model: str
    least_bytes: int
    most_bytes: int
    rises: Mapping[str, Mapping[str, Rises]]
    cpu_s: float


def rises(steps_s: Mapping[float, float]) -> Rises:
    """Return the rises of `steps_s`, by what was asked for."""
    num, worst, best_s = 0, 0.0, float("inf")
    for _, step_s in sorted(steps_s.items()):
        if step_s > best_s * (1 + _ROUNDING):
            num, worst = num + 1, max(worst, step_s / best_s - 1)
        best_s = min(best_s, step_s)
    return Rises(num, worst)


def asked(problems: Mapping[float, Problem], seed: int) -> dict[str, Rises]:
    """Ask for a plan of each of `problems` twice, in random orders, and return the rises."""
    found: dict[str, dict[float, float]] = {"search": {}, "first": {}, "again": {}}
    search = cache.plan_as_asked
    order = random.Random(seed)
    for name in ("first", "again"):
        keys = list(problems)
        order.shuffle(keys)
        for key in keys:

            def searched(problem: Problem, options: Options, key: float = key) -> Plan:
                made = search(problem, options)
                found["search"][key] = made.prediction.step_s
                return made

            cache.plan_as_asked = searched
            problem = problems[key]
            options = Options(
                device_memory=problem.budget_bytes, host_memory=problem.host_budget_bytes, search_timeout=SEARCH_S
            )
            try:
                found[name][key] = cache.plan_for(problem, options).prediction.step_s
            finally:
                cache.plan_as_asked = search
    return {name: rises(steps_s) for name, steps_s in found.items()}


def with_rates(problem: Problem, factor: float) -> Problem:
    """Return `problem` on a machine whose links between host and device have `factor` times the bandwidth."""
    node = problem.cluster.nodes[0]
    links = {
        name: replace(link, bytes_per_s=factor * link.bytes_per_s)
        for name, link in (("h2d", node.h2d), ("d2h", node.d2h))
    }
    return replace(problem, cluster=replace(problem.cluster, nodes=(replace(node, **links),)))


def solve(model: str, layers: int) -> Row:
    """Return the rises of `model` with `layers` layers."""
    began_s = time.process_time()
    shape = model_named(model)
    fields = {**shape.fields, **dict.fromkeys(shape.layer_fields, layers), "model_type": shape.model_type}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        capture = capture_step(*load_model(str(path), TextBatch(batch=BATCH, seq=SEQ, dtype=torch.bfloat16)))
    problem = capture.problem(preset(MACHINE, 1), Options(), state_bytes_per_element=12)
    most = plan(replace(problem, budget_bytes=1 << 50), "keep_all").prediction.device_peak_bytes
    try:
        plan(replace(problem, budget_bytes=0))
    except NoFeasiblePlan as error:
        least = error.needed_bytes
    draw = random.Random(model)
    budgets = {budget: replace(problem, budget_bytes=budget) for budget in draw.sample(range(least, most), NUM_BUDGETS)}
    middle = replace(problem, budget_bytes=(least + most) // 2)
    links = {2 ** draw.uniform(-1, 1): None for _ in range(NUM_LINKS)}
    found: dict[str, dict[str, Rises]] = {}
    questions: dict[str, Callable[[], Mapping[float, Problem]]] = {
        "budgets": lambda: budgets,
        "links": lambda: {factor: with_rates(middle, factor) for factor in links},
    }
    for name, problems in questions.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ELIXIR_CACHE_DIR"] = folder
            found[name] = asked(problems(), seed=len(name))
    return Row(model, least, most, found, time.process_time() - began_s)


def line(row: Row) -> str:
    """Return `row` as a row of the table."""
    cells = [
        f"{own.num} ({own.worst:.1%})" if own.num else "0"
        for name in ("budgets", "links")
        for own in (row.rises[name][who] for who in ("search", "first", "again"))
    ]
    return f"| {row.model}, {MODELS[row.model]} layers | {' | '.join(cells)} |"


def save_table(rows: Sequence[Row]) -> None:
    """Save `rows` and their table in the folder of results."""
    heads = [
        f"{what}: {who}" for what in ("budgets", "links") for who in ("search alone", "first asked", "asked again")
    ]
    lines = [
        f"Rises (and the worst) of {NUM_BUDGETS} budgets and {NUM_LINKS} links for each model, after {SEARCH_S:g} s of "
        f"search, for {BATCH} x {SEQ} tokens on {MACHINE}.",
        "",
        f"| model | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
        *map(line, rows),
    ]
    totals = [
        sum(row.rises[what][who].num for row in rows) for what in ("budgets", "links") for who in rows[0].rises[what]
    ]
    lines.append(f"| all | {' | '.join(map(str, totals))} |")
    save("more_memory", {"rows": [asdict(row) for row in rows]})
    (RESULTS / "more_memory.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_rows(path: Path) -> dict[str, Row]:
    """Return the rows in `path` by their model; none if the file is not there."""
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    for row in rows:
        row["rises"] = {what: {who: Rises(**own) for who, own in each.items()} for what, each in row["rises"].items()}
    return {row["model"]: Row(**row) for row in rows}


def main() -> int:
    """Run as the command line says; return 1 if a budget or a link that was asked for again has a rise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=Path, help="file of rows, one for each line, to which new ones are added")
    parser.add_argument("--table", action="store_true", help="save the table of the rows in the file, without a run")
    arguments = parser.parse_args()
    rows = {} if arguments.rows is None else read_rows(arguments.rows)
    for model in () if arguments.table else arguments.models:
        if model in rows:
            continue
        rows[model] = solve(model, MODELS[model])
        print(line(rows[model]), f"{rows[model].cpu_s:.0f} CPU s", flush=True)
        if arguments.rows is not None:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(rows[model])) + "\n")
    if arguments.table or (arguments.rows is None and set(rows) == set(MODELS)):
        save_table([rows[model] for model in MODELS if model in rows])
    return int(any(row.rises[what]["again"].num for row in rows.values() for what in row.rises))


if __name__ == "__main__":
    sys.exit(main())
