"""`elixir-compile plan MODEL --batch 64 --hardware "2 x l4-24g + 1 x p40-24g"`: the shares of ranks that differ."""

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elixir_compile.base.errors import ElixirError, InvalidOption
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Plan
from elixir_compile.ir.hardware import Fleet
from elixir_compile.ir.rank_class import spans_text
from elixir_compile.ir.share import Share, Shares, shares_to_json
from elixir_compile.search.shares.choose import RULES, Choice, RankOutlook, ShareSearch
from elixir_compile.session.machine import named_fleet
from elixir_compile.session.saved import save_plan
from elixir_compile.step.laps import micro_batches_of
from elixir_compile.tools.cli.plan import Request, run_plan
from elixir_compile.tools.cli.reports import fail
from elixir_compile.tools.share_plans import SharePlans, found_choice
from elixir_compile.tools.shares import budgets_of, search_of

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
        request, rule = _without_rule(request)
        options = request.parsed_options()
        capture = request.capture()
        budgets = budgets_of(fleet, capture, options)
        search = search_of(capture, fleet, budgets, request.batch, options)
        plans = SharePlans(capture, fleet, budgets, options)
        choice, shares = _chosen(search, plans, rule)
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


def _without_rule(request: Request) -> tuple[Request, str | None]:
    """Return `request` without a rule for shares as its planner, and this rule if there is one."""
    planner = request.options.get("planner")
    if planner not in RULES:
        return request, None
    return replace(request, options={**request.options, "planner": None}), str(planner)


def _chosen(search: ShareSearch, plans: SharePlans, rule: str | None) -> tuple[Choice, tuple[Share, ...]]:
    """Return the choice of `rule` and its shares, or if it is None, those that `elixir_compile.shares` finds without a
    limit of time. Raises NoFeasibleShares if nothing fits."""
    if rule is None:
        found = found_choice(search, plans)
        return found.choice, found.shares
    choice = search.of_rule(rule)
    if choice is None:
        raise search.no_room()
    return choice, choice.shares


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
        figures = (share.micro_batches, outlook.peak_bytes, outlook.host_bytes, _busy(outlook, choice))
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


def _busy(outlook: RankOutlook, choice: Choice) -> float:
    return outlook.busy_s / choice.step_s if choice.step_s else 1.0
