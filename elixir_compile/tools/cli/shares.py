"""`elixir-compile plan`: what its arguments ask for; and for ranks that do unequal work, the shares of a fleet whose
ranks differ or the stages of a pipeline.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from elixir_compile.base.errors import ElixirError, InvalidOption
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Plan
from elixir_compile.ir.hardware import Fleet
from elixir_compile.ir.pipeline import (
    SPLIT_BACKWARD,
    PipelinePlan,
    TorchSchedule,
    layers_text,
    parse_schedule,
    pipeline_to_json,
)
from elixir_compile.ir.plan import spans_text
from elixir_compile.ir.share import Share, Shares, shares_to_json
from elixir_compile.search.shares.choose import RULES, Choice, ShareSearch
from elixir_compile.session.machine import named_fleet
from elixir_compile.session.plan_files import save_plan
from elixir_compile.step.divide import micro_batches_of
from elixir_compile.tools.cli.plan import Request, run_plan
from elixir_compile.tools.cli.report import fail
from elixir_compile.tools.cli.tune import TuneRequest, run_tune
from elixir_compile.tools.plan import (
    SharePlans,
    budgets_of,
    fleet_of_ranks,
    found_choice,
    found_stages,
    require_divides,
    search_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile plan MODEL --batch 64 --hardware "2 x l4-24g + 1 x p40-24g"`: the shares of ranks that differ.


_LEAST_WIDTH = 120
"""Columns of the table of shares: in fewer, the names of devices would be cut."""


def is_for_fleet(hardware: str | None) -> bool:
    """Return whether `hardware` names a fleet whose ranks differ, as a text or a file. Raises the errors of
    `named_fleet`."""
    fleet = None if hardware is None else named_fleet(hardware)
    return fleet is not None and fleet.as_cluster() is None


def plan_or_share(
    request: Request, *, state_bytes: int | None, is_largest: bool, output: Path | None, as_json: bool
) -> int:
    """Print the shares of `request` if its hardware is a fleet whose ranks differ, else its plan; see `run_plan`."""
    try:
        is_shared = is_for_fleet(request.hardware)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    if is_shared:
        return run_shares(request, output=output, as_json=as_json)
    return run_plan(request, state_bytes=state_bytes, is_largest=is_largest, output=output, as_json=as_json)


def run_shares(request: Request, *, output: Path | None, as_json: bool) -> int:
    """Share out the batch of `request` among the ranks of its fleet, print the shares, write them and the plans of the
    ranks to `output`; return the exit code: 2 if nothing fits, 1 on errors.

    The planner `cephalo`, `even` or `by_speed` stands for the shares of this rule, to compare with.
    If `as_json`, stdout gets the JSON of the shares and nothing else.
    """
    try:
        fleet = named_fleet(request.hardware or "")
        assert fleet is not None
        if request.ranks not in (1, fleet.num_ranks):
            raise InvalidOption("ranks", request.ranks, f"{fleet.num_ranks}, as {fleet.name} has devices")
        planner = request.options.get("planner")
        rule = str(planner) if planner in RULES else None
        if rule is not None:
            request = replace(request, options={**request.options, "planner": None})
        options = request.parsed_options()
        capture = request.capture()
        budgets = budgets_of(fleet, capture, options)
        search = search_of(capture, fleet, budgets, request.batch, options)
        plans = SharePlans(capture, fleet, budgets, options)
        choice = None if rule is None else search.of_rule(rule)
        if rule is None:
            # Those that `elixir_compile.shares` finds without a limit of time.
            found = found_choice(search, plans)
            choice, shares = found.choice, found.shares
        elif choice is None:
            raise search.no_room()
        else:
            shares = choice.shares
    except ElixirError as error:
        return fail(error, as_json=as_json)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        for path in () if output is None else _written(output, shares, plans):
            notes.print(f"written: {path}", markup=False)
    except OSError as error:
        notes.print(f"error: cannot write {output}: {error.strerror}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(shares_to_json(shares) + "\n")
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    rows = comparison(choice, search, plans)
    console.print(shares_table(choice, fleet, capture.graph.name, plans.of(choice.shares)))
    if isinstance(shares, Shares):
        rows.append(("found", str(shares.outcome)))
    for name, value in rows:
        console.print(f"{name:<13} {value}", markup=False)
    return 0


def _written(output: Path, shares: tuple[Share, ...], plans: SharePlans) -> list[Path]:
    """Write the shares to `output`, and beside it the plan of each class of ranks with its question: `shares.json`,
    `shares.0.json`, `shares.2.json` by the first ranks. Return the files of shares and plans."""
    output.write_text(shares_to_json(shares), encoding="utf-8")
    found = [output]
    made = plans.of(shares)
    for plan, question in zip(made or (), plans.questions(shares) if made else (), strict=True):
        path = output.with_suffix(f".{plan.rank}{output.suffix}")
        save_plan(plan, path, question)
        found.append(path)
    return found


def shares_table(choice: Choice, fleet: Fleet, model: str, plans: tuple[Plan, ...] | None) -> Table:
    """Return a table with a row for the ranks of each class with equal shares.

    The bytes and the busy share are those of `plans`; without plans, those that the search expects.
    """
    batch = sum(choice.rows)
    table = Table(title=f"{model}, {batch} rows on {fleet.name}", title_justify="left")
    for name in ("rank", "device"):
        table.add_column(name)
    for name in ("rows", "micro-batches", "state", "peak", "host", "busy"):
        table.add_column(name, justify="right")
    for ranks in fleet.classes([(share.num_rows, share.state) for share in choice.shares]):
        share, outlook = choice.shares[ranks[0]], choice.ranks[ranks[0]]
        plan = next((plan for plan in plans or () if plan.rank == ranks[0]), None)
        busy = outlook.busy_s / choice.step_s if choice.step_s else 1.0
        figures = (share.micro_batches, outlook.peak_bytes, outlook.host_bytes, busy)
        if plan is not None:
            line = next(line for line in plan.classes if line.ranks == ranks)
            figures = (micro_batches_of(plan), line.device_peak_bytes, line.host_peak_bytes, line.busy_share)
        table.add_row(
            spans_text(ranks),
            fleet.seats[ranks[0]].cluster.device.name,
            str(share.num_rows),
            str(figures[0]),
            f"{share.state:.1%}",
            *map(format_bytes, figures[1:3]),
            f"{figures[3]:.0%}",
        )
    return table


def comparison(choice: Choice, search: ShareSearch, plans: SharePlans) -> list[tuple[str, str]]:
    """Return (name, text) of the seconds of a step with the shares of `choice`, and with those of the rules."""
    own = plans.simulated(choice)
    if own is None:
        figures = [("step", f"{format_s(choice.step_s)} by the formula of the search: the ranks have no plans")]
    else:
        figures = [("step", f"{format_s(own.step_s)}, all ranks simulated together")]
        bound_s = next((plan.bound_s for plan in plans.of(choice.shares) or ()), None)
        if bound_s is not None:
            figures.append(("bound", f"{format_s(bound_s)} with these rows, by the slowest rank alone"))
    for name, rule in (("equal rows", "even"), ("by speed", "by_speed"), ("Cephalo's", "cephalo")):
        other = search.of_rule(rule)
        step = None if other is None or own is None else plans.simulated(other)
        if other is None:
            figures.append((name, "do not fit"))
        elif step is None or own is None:
            figures.append((name, f"{format_s(other.step_s)} by the formula: {_rows_text(other)} rows"))
        else:
            times = step.step_s / own.step_s
            figures.append((name, f"{format_s(step.step_s)}, {times:.2f} times as long: {_rows_text(other)} rows"))
    return figures


def _rows_text(choice: Choice) -> str:
    rows = choice.rows
    return "/".join(map(str, rows)) if len(rows) <= 16 else f"{min(rows)} to {max(rows)}"


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile plan MODEL --stages 4 --schedule looped-bfs --micro-batches 16`: the stages of a pipeline.


_LEAST_STAGES_WIDTH = 140
"""Columns of the tables: in fewer, the names of layers would be cut."""
_ROWS = 8
"""Rows of a micro-batch if no batch is given: as of a forward without stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesRequest:
    """The arguments of a command line with `--stages`, as typed."""

    plan: Request
    """All other arguments; its `batch` counts only if it was typed."""
    stages: int
    schedule: str | None
    batch: int | None
    ranks: int | None
    """Whether typed or not, unlike `plan.ranks`."""
    state_bytes: int | None = None

    def micro_batches(self) -> int:
        """Return the micro-batches of a step. Raises InvalidOption unless they are a number."""
        given = self.plan.options.get("micro_batches")
        if not isinstance(given, int):
            raise InvalidOption("micro_batches", given, "a number beside --stages, such as --micro-batches 8")
        return given

    def rows(self, micro_batches: int) -> int:
        """Return the rows of a step. Raises InvalidOption unless `micro_batches` divide them."""
        rows = _ROWS * micro_batches if self.batch is None else self.batch
        require_divides(micro_batches, rows)
        return rows

    def of_torch(self) -> TorchSchedule:
        """Return the schedule: by default 1F1B with a stage per rank, else breadth-first.

        Raises UnknownSchedule, and the errors of `fleet_of_ranks`.
        """
        if self.schedule is not None:
            return parse_schedule(self.schedule)
        fleet = fleet_of_ranks(self.plan.hardware, self.stages, TorchSchedule.ONE_F_ONE_B, self.ranks)
        is_single = fleet.num_ranks == self.stages
        return TorchSchedule.ONE_F_ONE_B if is_single else TorchSchedule.LOOPED_BFS


def run_stages(asked: StagesRequest, *, output: Path | None, as_json: bool) -> int:
    """Search the stages that are `asked` for, print them and every schedule beside them, and write them to `output`;
    return the exit code: 2 if no stages fit, 1 on errors.

    If `as_json`, stdout gets the JSON of the stages and nothing else.
    """
    try:
        schedule, micro_batches = asked.of_torch(), asked.micro_batches()
        rows = asked.rows(micro_batches)
        # A micro-batch of a pipeline is a forward of its own: the options of the search for a plan have none.
        rest = replace(asked.plan, options={**asked.plan.options, "micro_batches": None})
        options = rest.parsed_options()
        fleet = fleet_of_ranks(asked.plan.hardware, asked.stages, schedule, asked.ranks)
        made = found_stages(
            lambda: (replace(rest, batch=rows // micro_batches).capture(), rows),
            schedule, asked.stages, fleet, options, micro_batches, asked.state_bytes,
        )  # fmt: skip
    except ElixirError as error:
        return fail(error, as_json=as_json)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    text = pipeline_to_json(made)
    try:
        if output is not None:
            output.write_text(text + "\n", encoding="utf-8")
            notes.print(f"written: {output}", markup=False)
    except OSError as error:
        notes.print(f"error: cannot write {output}: {error.strerror}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(text + "\n")
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_STAGES_WIDTH)
    console.print(stages_table(made))
    console.print(ranks_table(made))
    for name, value in stage_lines(made):
        console.print(f"{name:<17} {value}", markup=False)
    return 0


def stages_table(made: PipelinePlan) -> Table:
    """Return a table with a row for each stage."""
    rows = f"{made.rows} rows in {made.micro_batches} micro-batches"
    title = f"{made.name}, {len(made.stages)} stages on {made.hardware} under {made.schedule}, {rows}"
    table = Table(title=title, title_justify="left")
    for name in ("stage", "rank", "layers", "activations", "homes"):
        table.add_column(name)
    for name in ("forward", "backward", "sent", "outstanding"):
        table.add_column(name, justify="right")
    for stage in made.stages:
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            layers_text(stage.layers),
            stage.treatment,
            stage.homes,
            format_s(stage.forward_s),
            format_s(stage.backward_s),
            format_bytes(stage.sent_bytes),
            f"{stage.outstanding} x {format_bytes(stage.saved_bytes)}",
        )
    return table


def ranks_table(made: PipelinePlan) -> Table:
    """Return a table with a row for each rank."""
    table = Table(title="ranks, in a step", title_justify="left")
    for name in ("rank", "device", "stages"):
        table.add_column(name)
    for name in ("busy", "bubble", "peak", "budget", "host", "sent", "received"):
        table.add_column(name, justify="right")
    for rank in made.ranks:
        own = [str(stage.stage) for stage in made.stages if stage.rank == rank.rank]
        sizes = (rank.peak_bytes, rank.budget_bytes, rank.host_bytes, rank.sent_bytes, rank.received_bytes)
        table.add_row(
            str(rank.rank), rank.device, ", ".join(own), format_s(rank.busy_s), f"{rank.bubble:.1%}",
            *map(format_bytes, sizes),
        )  # fmt: skip
    return table


def stage_lines(made: PipelinePlan) -> list[tuple[str, str]]:
    """Return (name, text) of the step, of the split points, and of a step under every schedule of torch."""
    lines = [("step", f"{format_s(made.step_s)}, simulated"), ("split points", ", ".join(made.split_points) or "none")]
    copies = [(stage.stage, name) for stage in made.stages for name in stage.copies]
    lines += [("copy", f"stage {stage} has a copy of {name}: add up its gradients") for stage, name in copies]
    for other in made.compared:
        text = f"{other.num_stages} stages"
        if other.because:
            text += f": {other.because}"
        else:
            times = other.step_s / made.step_s if made.step_s else 1.0
            same = other.schedule is made.schedule and other.num_stages == len(made.stages)
            beside = "these stages" if same else f"{times:.2f} times as long"
            sizes = f"peak {format_bytes(other.peak_bytes)}, sent {format_bytes(other.sent_bytes)}"
            text += f": {format_s(other.step_s)}, {beside}, bubble {other.bubble:.1%}, {sizes}"
        lines.append((str(other.schedule), text))
    lines.append(("not compared", ", ".join(SPLIT_BACKWARD) + ": compiled stages have one backward"))
    return lines


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile plan`: a plan, the shares of ranks, stages, or the fastest setting, as its arguments ask.


def run_asked(**typed: Any) -> int:
    """Answer a command line with the arguments `typed`, and return the exit code."""
    states, output, as_json = tuple(typed["state_bytes"] or ()), typed["output"], typed["as_json"]
    # The options of the backend as they are typed, in the order of the arguments.
    options = {name: value for name, value in typed.items() if name in Options.__dataclass_fields__}
    options["accumulate"] = options.pop("accumulate") or None
    del options["hardware"]
    micro_batches = typed["micro_batches"]
    if micro_batches and micro_batches.isdecimal():
        options["micro_batches"] = int(micro_batches)
    names = ("model", "seq", "dtype", "recompute", "hardware", "ranks", "optimizer")
    request = Request(batch=typed["batch"] or 8, options=options, **{name: typed[name] for name in names})
    wrong = wrong_beside_plan(typed, states)
    if wrong is not None:
        return fail(wrong, as_json=as_json)
    if typed["tune"]:
        tuned = TuneRequest(plan=request, batch=typed["batch"], tokens=typed["tokens_per_step"], states=states)
        return run_tune(tuned, output=output, as_json=as_json)
    state_bytes = next(iter(states), None)
    if typed["stages"] is None:
        is_largest = typed["largest_batch"]
        return plan_or_share(request, state_bytes=state_bytes, is_largest=is_largest, output=output, as_json=as_json)
    asked = StagesRequest(
        plan=request,
        stages=typed["stages"],
        schedule=typed["schedule"],
        batch=typed["batch"],
        ranks=typed["ranks"] if typed["ranks"] > 1 else None,
        state_bytes=state_bytes,
    )
    return run_stages(asked, output=output, as_json=as_json)


def wrong_beside_plan(typed: Mapping[str, Any], states: tuple[int, ...]) -> InvalidOption | None:
    """Return the error if an argument of `plan` needs another, or cannot be given with it; else None."""
    is_tuned, is_largest, stages = typed["tune"], typed["largest_batch"], typed["stages"]
    tokens, schedule = typed["tokens_per_step"], typed["schedule"]
    if is_tuned and is_largest:
        return InvalidOption("largest_batch", True, "no --largest-batch beside --tune, which finds the fastest batch")
    if tokens is not None and not is_tuned:
        return InvalidOption("tokens_per_step", tokens, "--tune beside it; without, --batch and --seq count")
    if len(states) > 1 and not is_tuned:
        return InvalidOption("state_bytes", states, "a single number; several need --tune")
    if schedule is not None and stages is None:
        return InvalidOption("schedule", schedule, "--stages beside it, such as --stages 4")
    if typed["optimizer"] is not None and (states or is_tuned or stages is not None):
        return InvalidOption("optimizer", typed["optimizer"], "no --state-bytes, --tune or --stages beside it")
    if stages is not None and (is_tuned or is_largest):
        return InvalidOption("stages", stages, "no --tune and no --largest-batch beside --stages")
    return None
