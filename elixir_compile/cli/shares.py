"""`elixir-compile plan MODEL --batch 64 --hardware "2 x l4-24g + 1 x p40-24g"`: the shares of ranks that differ."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elixir_compile.api.shares import budgets_of, search_of
from elixir_compile.cli.plan import Request, run_plan
from elixir_compile.cli.reports import fail
from elixir_compile.errors import ElixirError, InvalidOption
from elixir_compile.hardware import Fleet
from elixir_compile.ir.share import shares_to_json
from elixir_compile.problem.machine import named_fleet
from elixir_compile.search.shares.choose import Choice, RankOutlook, ShareSearch
from elixir_compile.units import format_bytes, format_s

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
    """Share out the batch of `request` among the ranks of its fleet, print the shares, write them to `output`; return
    the exit code: 2 if nothing fits, 1 on errors.

    If `as_json`, stdout gets the JSON of the shares and nothing else.
    """
    try:
        fleet = named_fleet(request.hardware or "")
        assert fleet is not None
        if request.ranks not in (1, fleet.num_ranks):
            raise InvalidOption("ranks", request.ranks, f"{fleet.num_ranks}, as {fleet.name} has devices")
        options = request.parsed_options()
        capture = request.capture()
        search = search_of(capture, fleet, budgets_of(fleet, capture, options), request.batch, options)
        choice = search.best()
    except ElixirError as error:
        return fail(error, as_json=as_json)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if output is not None:
            output.write_text(shares_to_json(choice.shares), encoding="utf-8")
            notes.print(f"shares: {output}", markup=False)
    except OSError as error:
        notes.print(f"error: cannot write {output}: {error.strerror}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(shares_to_json(choice.shares) + "\n")
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(shares_table(choice, fleet, capture.graph.name))
    for name, value in comparison(choice, search):
        console.print(f"{name:<13} {value}", markup=False)
    return 0


def shares_table(choice: Choice, fleet: Fleet, model: str) -> Table:
    """Return a table with a row for the ranks of each class with equal shares."""
    batch = sum(choice.rows)
    table = Table(title=f"{model}, {batch} rows on {fleet.name}", title_justify="left")
    for name in ("rank", "device"):
        table.add_column(name)
    for name in ("rows", "micro-batches", "state", "peak", "host", "busy"):
        table.add_column(name, justify="right")
    table.add_column("activations")
    labels = [(share.num_rows, share.micro_batches, share.state) for share in choice.shares]
    for ranks in fleet.classes(labels):
        share, outlook = choice.shares[ranks[0]], choice.ranks[ranks[0]]
        table.add_row(
            _ranks_text(ranks),
            fleet.seats[ranks[0]].cluster.device.name,
            str(share.num_rows),
            str(share.micro_batches),
            f"{share.state:.1%}",
            format_bytes(outlook.peak_bytes),
            format_bytes(outlook.host_bytes),
            f"{_busy(outlook, choice):.0%}",
            outlook.treatment,
        )
    return table


def comparison(choice: Choice, search: ShareSearch) -> list[tuple[str, str]]:
    """Return (name, text) of the seconds of `choice` by the formula of the search, and of the shares of other rules."""
    figures = [("step", f"{format_s(choice.step_s)}, by the formula of the search")]
    for name, other in (("equal rows", search.even()), ("by speed", search.greedy()), ("Cephalo's", search.cephalo())):
        if other is None:
            figures.append((name, "do not fit"))
        else:
            times = other.step_s / choice.step_s
            figures.append((name, f"{format_s(other.step_s)}, {times:.2f} times as long: {_rows_text(other)} rows"))
    return figures


def _rows_text(choice: Choice) -> str:
    rows = choice.rows
    return "/".join(map(str, rows)) if len(rows) <= 16 else f"{min(rows)} to {max(rows)}"


def _busy(outlook: RankOutlook, choice: Choice) -> float:
    return outlook.busy_s / choice.step_s if choice.step_s else 1.0


def _ranks_text(ranks: tuple[int, ...]) -> str:
    """Return `ranks` as text: `0-1, 4`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][-1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
