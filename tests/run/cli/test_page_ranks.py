"""The ranks of a fleet on the page of the plan of one of them, as a browser shows and sorts them."""

from pathlib import Path

import pytest

from elixir_compile.ir.share import shares_from_json
from elixir_compile.tools.report import figures as charts
from tests.run.cli.test_cli_shares import FLEET, cli, net
from tests.run.cli.test_page_paint import DRIVER, Browser, browser

__all__ = ["browser", "net"]  # fixtures

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,  # 15 s of CPU time
    pytest.mark.skipif(DRIVER is None, reason="needs chromedriver"),
    pytest.mark.skipif(not charts.can_draw(), reason="needs Altair and vl-convert"),
]

SORTED = """
const table = document.querySelector("section[aria-labelledby=ranks] table");
const read = () => [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));
const head = [...table.tHead.rows[0].cells].find((cell) => cell.textContent.trim() === "rows");
const before = read();
(head.querySelector("button") ?? head).click();
arguments[0]([before, read()]);
"""
"""Clicks on the head of the column of rows, and returns the cells before and after."""


def test_the_classes_of_a_fleet_are_shown_and_sorted_by_their_rows(net: str, tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "shares.json"
    planned = cli("plan", net, "--batch", 64, "--dtype", "float32", "--hardware", FLEET, "-o", file)
    assert planned.exit_code == 0, planned.output
    shares = shares_from_json(file.read_text(encoding="utf-8"))
    written = cli("report", tmp_path / "shares.2.json")
    assert written.exit_code == 0, written.output
    browser.figures(tmp_path / "shares.2.html")
    before, after = browser.ask(SORTED)
    firsts = [int(row[0].partition("-")[0]) for row in before]
    assert firsts == sorted({int(file.stem.partition(".")[2]) for file in tmp_path.glob("shares.*.json")})
    for rank, row in zip(firsts, before, strict=True):
        assert (row[2], row[4]) == (str(shares[rank].num_rows), "25.0%")
    rows = [shares[rank].num_rows for rank in firsts]
    assert [int(row[2]) for row in after] == sorted(rows, reverse=True) != rows
