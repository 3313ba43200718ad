"""The page of a plan of the size of Llama 7B is small, and a browser paints it fast: measured through chromedriver."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elixir_compile.base.units import GIB
from elixir_compile.session.saved import load_answered
from elixir_compile.step import plan_timeline
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.report import figures as charts

DRIVER = shutil.which("chromedriver")
MOST_BYTES = 1_500_000
PAINTED_MS = 1500
"""Limit for the tables and the picture of the chart. The chart that zooms takes its place later, and has no limit:
beside 18 other processes the picture was painted after 1.1 s and the chart drawn after 10 s."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1200"]
SEEN = """
const done = arguments[0], seen = {};
new PerformanceObserver((list) => { for (const entry of list.getEntries()) seen.largest = entry.startTime; })
  .observe({ type: "largest-contentful-paint", buffered: true });
const look = () => {
  if (document.getElementById("step-chart").dataset.drawn !== "yes") return setTimeout(look, 5);
  seen.drawn = performance.now();
  for (const entry of performance.getEntriesByType("paint")) seen[entry.name] = entry.startTime;
  setTimeout(() => done(seen), 50);
};
look();
"""
HOVER = """
const done = arguments[0], chart = document.getElementById("step-chart");
const look = () => {
  if (chart.dataset.drawn !== "yes") return setTimeout(look, 5);
  const mark = chart.querySelector(".mark-symbol.role-mark path").getBoundingClientRect();
  const over = { clientX: mark.left + mark.width / 2, clientY: mark.bottom + 20 };
  for (const kind of ["pointerover", "pointermove", "mouseover", "mousemove"]) {
    document.elementFromPoint(over.clientX, over.clientY).dispatchEvent(
      new PointerEvent(kind, { bubbles: true, cancelable: true, view: window, ...over }));
  }
  setTimeout(() => done([...document.querySelectorAll("#vg-tooltip-element tr")]
    .map((row) => [...row.cells].map((cell) => cell.textContent))), 100);
};
look();
"""
"""Points at the mark of the peak, and returns the rows of the tooltip."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,  # a capture and a plan of Llama 7B, and its page: 50 s
    pytest.mark.skipif(DRIVER is None, reason="needs chromedriver"),
    pytest.mark.skipif(not charts.can_draw(), reason="needs Altair and vl-convert"),
]


class Browser:
    """A session of chromedriver."""

    def __init__(self, port: str) -> None:
        self._base = f"http://127.0.0.1:{port}"
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": FLAGS}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{made['sessionId']}"

    def figures(self, page: Path) -> dict[str, float]:
        """Return the ms from the begin of the navigation to `page` to its paints and to its drawn chart."""
        self._ask("POST", "/url", {"url": "about:blank"})
        self._ask("POST", "/url", {"url": page.as_uri()})
        return self._ask("POST", "/execute/async", {"script": SEEN, "args": []})

    def hover(self) -> dict[str, str]:
        """Return what the tooltip at the peak of the page that is open says, by name."""
        return dict(self._ask("POST", "/execute/async", {"script": HOVER, "args": []}))

    def ask(self, script: str) -> Any:
        """Return what `script` gives to its first argument, a function, in the page that is open."""
        return self._ask("POST", "/execute/async", {"script": script, "args": []})

    def close(self) -> None:
        self._ask("DELETE", "")

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]


@pytest.fixture
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        found = (re.search(r"started successfully on port (\d+)", line) for line in driver.stdout)
        started = next(match for match in found if match is not None)
        session = Browser(started[1])
        yield session
        session.close()
        driver.terminate()


def test_the_page_of_llama_7b_is_small_and_painted_before_its_chart_is_drawn(tmp_path: Path, browser: Browser) -> None:
    from typer.testing import CliRunner

    plan = ["plan", "llama-7b", "--hardware", "a100-40g", "--state-bytes", "12", "--recompute"]
    for command in ([*plan, "-o", str(tmp_path / "plan.json")], ["report", str(tmp_path / "plan.json")]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    page = tmp_path / "plan.html"
    assert page.stat().st_size < MOST_BYTES
    # The fastest of three: the first loads the browser, and any may meet another process.
    seen = [browser.figures(page) for _ in range(3)]
    best = {name: min(each[name] for each in seen) for name in seen[0]}
    assert best["first-contentful-paint"] <= best["largest"] < PAINTED_MS, seen
    assert best["largest"] < best["drawn"], seen
    made, question = load_answered(tmp_path / "plan.json")
    assert question is not None
    peak = plan_timeline(question.problem.graph, made).peak
    said = browser.hover()
    assert said["op"] == peak.op
    assert said["total, GiB"] == f"{peak.nbytes / GIB:.3f}"
    by_kind = {f"{kind}, GiB": f"{nbytes / GIB:.3f}" for kind, nbytes in peak.by_kind.items() if nbytes}
    assert by_kind.items() <= said.items()
