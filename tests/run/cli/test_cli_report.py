"""`elixir-compile report`: a page or a picture from a plan and its question, and what a browser makes of the page."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner, Result

import elixir_compile as elixir
from elixir_compile.base.options import Options
from elixir_compile.base.units import GIB
from elixir_compile.ir import Origin, Plan, Record, record_to_json
from elixir_compile.search import Problem, plan
from elixir_compile.search.question import question_of
from elixir_compile.session import saved as saved_files
from elixir_compile.step import plan_timeline
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.report import figures as charts
from tests.pure.report.pages import evil, tight

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
needs_charts = pytest.mark.skipif(not charts.can_draw(), reason="needs Altair and vl-convert")


def saved(folder: Path, made: Plan, problem: Problem) -> Path:
    elixir.save_plan(made, folder / "plan.json", question_of(problem, Options()))
    return folder / "plan.json"


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, args)])


def test_the_page_is_written_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    done = run(saved(tmp_path, *tight()))
    assert (done.exit_code, charts.EXTRA in done.stderr) == (0, True)
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    done = run(tmp_path / "plan.json", "-o", tmp_path / "other.html")
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "plan.html").read_bytes()
    assert "other.html" in done.stdout


def test_the_data_of_the_page_is_json(tmp_path: Path) -> None:
    made, problem = tight()
    data = json.loads(run(saved(tmp_path, made, problem), "--json").stdout)
    assert data["device_peak_bytes"] == plan_timeline(problem.graph, made).peak.nbytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.question.json.gz"]


def test_a_record_is_read_as_the_measured_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    path = saved(tmp_path, *tight())
    record = Record(origin=Origin.MEASURED, step_s=1.0, device_peak_bytes=1, host_peak_bytes=1)
    (tmp_path / "record.json").write_text(record_to_json(record))
    assert run(path, tmp_path / "record.json").exit_code == 0
    assert "Planned and measured" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_a_curve_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, problem = tight()
    elixir.save_plan(made, tmp_path / "plan.json", question_of(problem, Options(planner="greedy")))
    done = run(tmp_path / "plan.json", "--curve", 2, "--json")
    points = json.loads(done.stdout)["curve"]
    assert [point["is_own"] for point in points] == [False, True, False]
    assert "budget 3 of 3" in done.stderr
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    assert "--curve beside it" in run(tmp_path / "plan.json", "--figure", "curve").stderr


def test_a_second_plan_is_read_with_its_question_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = saved_files.plan_from_json

    def counted(text: str) -> Plan:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(saved_files, "plan_from_json", counted)
    made, problem = tight()
    path = saved(tmp_path, made, problem)
    roomy = replace(problem, budget_bytes=GIB)
    wide = plan(roomy, "greedy")
    elixir.save_plan(wide, tmp_path / "wide.json", question_of(roomy, Options()))
    data = json.loads(run(path, tmp_path / "wide.json", "--json").stdout)
    assert data["second"]["device_peak_bytes"] == wide.prediction.device_peak_bytes
    assert len(parsed) == 2
    again = run(path, tmp_path / "wide.json", path)
    assert "at most one second plan and one record" in again.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["alone.json"], "alone.question.json.gz: expected the question of the plan"),
        (["nowhere.json"], "a file that can be read"),
        (["plan.json", "alone.json"], "alone.question.json.gz: expected the question of the plan"),
        (["plan.json", "--figure", "pie"], "one of memory, lanes, step, curve"),
        (["plan.json", "-o", "no/folder/page.html"], "cannot write"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    made, problem = tight()
    saved(tmp_path, made, problem)
    elixir.save_plan(made, tmp_path / "alone.json")
    done = run(*[tmp_path / arg if "." in arg else arg for arg in args])
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_figure_without_the_libraries_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    assert charts.EXTRA in run(saved(tmp_path, *tight()), "--figure", "memory").stderr


@needs_charts
@pytest.mark.parametrize("figure", ["lanes", "step"])
def test_a_figure_is_a_picture(figure: str, tmp_path: Path) -> None:
    assert run(saved(tmp_path, *tight()), "--figure", figure).exit_code == 0
    assert (tmp_path / f"plan.{figure}.svg").read_text(encoding="utf-8").startswith("<svg")


# What follows runs the page in a browser. A script at its end does what a reader would do and writes down what is seen.

READER = """<script>
window.addEventListener("load", () => setTimeout(async () => {
  const press = (key) => document.getElementById("step-chart").dispatchEvent(new KeyboardEvent("keydown", { key }));
  const seen = {};
  const said = () => document.getElementById("cursor").textContent;
  const chart = document.getElementById("step-chart");
  if (chart !== null) {
    for (let tries = 0; tries < 100 && chart.dataset.drawn !== "yes"; tries++) {
      await new Promise((done) => setTimeout(done, 50));
    }
    seen.drawn = chart.dataset.drawn;
    press("p"); seen.peak = said();
    press("Home"); seen.first = said();
    press("ArrowRight"); seen.second = said();
    press("End"); seen.last = said();
    const box = (selector) => document.querySelector(selector).getBoundingClientRect();
    const ends = [...chart.querySelectorAll(".mark-rule line")].map((line) => line.getBoundingClientRect().top);
    seen.budget = Math.min(...ends);
    const areas = [...chart.querySelectorAll(".mark-area path")].map((path) => path.getBoundingClientRect().top);
    seen.peak_top = Math.min(...areas);
    seen.areas = [...chart.querySelectorAll(".mark-area path")].map((path) => path.getAttribute("d"));
    const ticks = () => [...chart.querySelectorAll(".role-axis-label")].map((group) => group.textContent)
      .filter((text) => /^[0-9.]+$/.test(text));
    const view = chart.querySelector("svg"), at = view.getBoundingClientRect();
    seen.ticks = ticks();
    const mark = box(".mark-symbol.role-mark path");
    const over = { clientX: mark.left + mark.width / 2, clientY: mark.top + mark.height + 20 };
    for (const kind of ["pointerover", "pointermove", "mouseover", "mousemove"]) {
      document.elementFromPoint(over.clientX, over.clientY).dispatchEvent(
        new PointerEvent(kind, { bubbles: true, cancelable: true, view: window, ...over }));
    }
    await new Promise((done) => setTimeout(done, 100));
    seen.hover = [...document.querySelectorAll("#vg-tooltip-element tr")]
      .map((row) => [...row.cells].map((cell) => cell.textContent));
    const place = { clientX: at.left + 500, clientY: at.top + 100 };
    scrollTo(0, 0);
    document.elementFromPoint(place.clientX, place.clientY).dispatchEvent(
      new WheelEvent("wheel", { deltaY: -400, bubbles: true, cancelable: true, view: window, ...place }));
    await new Promise((done) => setTimeout(done, 500));
    seen.zoomed = ticks();
  }
  if (window.axe !== undefined) {
    const found = await window.axe.run();
    seen.axe = found.violations.map((rule) => [rule.id, rule.impact, rule.nodes.map((node) => node.html)]);
    seen.rules = found.passes.length;
  }
  const table = document.getElementById("layer-table");
  const layers = () => [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
  seen.layers = layers();
  table.tHead.rows[0].cells[5].querySelector("button").click();
  seen.sorted = [...table.tBodies[0].rows].map((row) => Number(row.cells[5].dataset.value));
  const filter = document.querySelector("label[data-filters] input");
  filter.value = seen.layers[1]; filter.dispatchEvent(new Event("input"));
  seen.filtered = layers();
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.images = document.images.length; seen.title = document.title;
  document.body.setAttribute("data-seen", encodeURIComponent(JSON.stringify(seen)));
}, 1500));
</script>"""


def browse(page: Path, *flags: str) -> tuple[str, str]:
    """Return the page as a browser has it after its scripts, and the console of the browser."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1200", *flags]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def outline(path: str) -> list[tuple[str, str]]:
    """Return the points of an SVG path in hundredths of a pixel, as a picture has them, without repeated ones."""
    points = re.findall(r"[ML](-?\d+(?:\.\d\d?)?)\d*,(-?\d+(?:\.\d\d?)?)", path)
    return [point for at, point in enumerate(points) if at == 0 or point != points[at - 1]]


def read_in_browser(page: Path, *flags: str) -> dict[str, Any]:
    """Return what the reader in the page has seen; nothing may be wrong in the eyes of the browser."""
    text, _, end = page.read_text(encoding="utf-8").rpartition("</body>")
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.write_text(f"{text}<script>{axe}</script>{READER}</body>{end}", encoding="utf-8")
    dom, console = browse(page, *flags)
    assert console == ""  # no error, and nothing that the policy of the page had to refuse
    (seen,) = re.findall(r'data-seen="([^"]*)"', dom)
    return json.loads(unquote(seen))


@pytest.mark.browser
@pytest.mark.slow
@needs_browser
@needs_charts
def test_in_a_browser_the_page_draws_walks_sorts_and_filters(tmp_path: Path) -> None:
    made, problem = tight()
    assert run(saved(tmp_path, made, problem)).exit_code == 0
    seen = read_in_browser(tmp_path / "plan.html")
    assert seen["drawn"] == "yes"
    peak = plan_timeline(problem.graph, made).peak
    assert f"{peak.nbytes / GIB:.2f} GiB at {peak.op}" in seen["peak"]
    assert dict(seen["hover"])["op"] == peak.op
    assert seen["requests"] == []  # the page alone was read, and it is a file
    regions = [region.id for region in made.regions]
    walked = [seen[name].split()[0] for name in ("first", "second", "last")]
    assert walked == [*(["update", *regions][:2] if walked[0] == "update" else regions[:2]), walked[2]]
    assert walked[2] in (regions[-1], "update")
    assert seen["budget"] <= seen["peak_top"]  # the plan is within its budget, so is the picture
    assert seen["sorted"] == sorted(seen["sorted"], reverse=True)
    assert seen["filtered"] == [seen["layers"][1]]
    assert seen["images"] == 0


@pytest.mark.browser
@pytest.mark.slow
@needs_browser
@needs_charts
@pytest.mark.parametrize("has_second", [False, True])
def test_in_a_browser_the_charts_are_those_of_the_picture_and_zoom_as_one(tmp_path: Path, has_second: bool) -> None:
    made, problem = tight()
    files = [saved(tmp_path, made, problem)]
    if has_second:
        roomy = replace(problem, budget_bytes=GIB)
        elixir.save_plan(plan(roomy, "greedy"), tmp_path / "wide.json", question_of(roomy, Options()))
        files.append(tmp_path / "wide.json")
    assert run(*files).exit_code == 0
    picture = re.findall("<svg.*?</svg>", (tmp_path / "plan.html").read_text(encoding="utf-8"), re.DOTALL)[0]
    seen = read_in_browser(tmp_path / "plan.html")
    drawn = re.findall('mark-area.*?<path d="([^"]*)"', picture, re.DOTALL)
    assert [outline(path) for path in seen["areas"]] == [outline(path) for path in drawn]
    assert drawn
    for axis in ("ticks", "zoomed"):
        assert seen[axis].count(seen[axis][0]) == 3  # the seconds of memory, of the lanes and of the link's rates
    assert (seen["drawn"], seen["ticks"][0] != seen["zoomed"][0]) == ("yes", True)


@pytest.mark.browser
@pytest.mark.slow
@needs_browser
@needs_charts
@pytest.mark.parametrize("flags", [(), ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")])
def test_in_a_browser_nothing_serious_stops_a_screen_reader(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert run(saved(tmp_path, *tight())).exit_code == 0
    seen = read_in_browser(tmp_path / "plan.html", *flags)
    assert seen["rules"] > 20
    assert [found for found in seen["axe"] if found[1] in ("serious", "critical")] == []


@pytest.mark.browser
@pytest.mark.slow
@needs_browser
def test_in_a_browser_names_are_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    made, problem = evil()
    assert run(saved(tmp_path, made, problem)).exit_code == 0
    seen = read_in_browser(tmp_path / "plan.html")
    assert (seen["images"], seen["title"]) == (0, f"{made.name} on {made.cluster}")


@pytest.mark.browser
@pytest.mark.slow
@needs_browser
@needs_charts
def test_in_a_browser_without_scripts_the_picture_and_the_tables_are_there(tmp_path: Path) -> None:
    made, problem = tight()
    assert run(saved(tmp_path, made, problem)).exit_code == 0
    page = tmp_path / "plan.html"
    stopped = page.read_text(encoding="utf-8").replace("script-src 'unsafe-inline'", "script-src 'none'")
    page.write_text(stopped, encoding="utf-8")
    dom, _ = browse(page)
    assert "<svg" in dom
    assert 'data-drawn="yes"' not in dom
    assert made.prediction.device_peak_at in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
