"""`page`: one file that says everything without a script, fetches nothing, and takes no name for markup."""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from elixir_compile.base.units import GIB, format_bytes
from elixir_compile.ir import Lane, Origin, RankClass, Record, Span
from elixir_compile.search import plan
from elixir_compile.tools.report import figures
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.diff import change_rows, plan_diff
from elixir_compile.tools.report.page import PlanSheet, page, page_data, plan_sheet
from elixir_compile.tools.report.tables import work_rows
from tests.pure.report.pages import EVIL, evil, sheet_of, tight


class Reader(HTMLParser):
    """Reads a page: its tags, its text, and its blocks of JSON by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.blocks: dict[str, object] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._open.append(dict(attrs).get("id") or tag if tag == "script" else tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        within = self._open[-1] if self._open else ""
        if within.startswith("elixir-"):
            self.blocks[within] = json.loads(data)
        elif within not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def sheet() -> PlanSheet:
    return sheet_of(*tight())


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    return


@pytest.mark.usefixtures("without_charts")
def test_the_page_says_the_figures_of_the_plan(sheet: PlanSheet) -> None:
    found = Reader(page(sheet))
    made = sheet.plan.prediction
    for said in (
        f"peak {format_bytes(made.device_peak_bytes)} of {format_bytes(sheet.plan.budget_bytes)}",
        made.device_peak_at,
        *(row.layer for row in sheet.layers),
        *(row.region for row in sheet.memory),
        *(name for name, _, _ in sheet.largest),
        *(decision.because for decision in sheet.plan.decisions),
        *(other for decision in sheet.plan.decisions for other in decision.rejected),
        sheet.cluster.device.source,
        charts.EXTRA,
    ):
        assert said in found.text
    assert sheet.layers
    assert any(decision.rejected for decision in sheet.plan.decisions)


@pytest.mark.usefixtures("without_charts")
def test_the_data_of_the_page_reads_back(sheet: PlanSheet) -> None:
    data = Reader(page(sheet)).blocks["elixir-report"]
    assert data == json.loads(json.dumps(page_data(sheet)))
    assert (data["elixir"], data["format"]) == ("report", 1)


@pytest.mark.usefixtures("without_charts")
def test_equal_plans_have_equal_pages(sheet: PlanSheet) -> None:
    assert page(sheet) == page(sheet_of(*tight()))


@pytest.mark.usefixtures("without_charts")
def test_names_stay_text() -> None:
    text = page(sheet_of(*evil()))
    found = Reader(text)
    assert EVIL in found.text
    assert "img" not in found.tags
    assert EVIL in json.dumps(found.blocks["elixir-report"]).replace('\\"', '"')
    assert "<img" not in text


@pytest.mark.usefixtures("without_charts")
def test_nothing_can_be_fetched(sheet: PlanSheet) -> None:
    text = page(sheet)
    found = Reader(text)
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"]
    assert not [value for name, value in found.attributes if name in ("src", "href", "srcset", "action")]
    assert "link" not in found.tags
    assert "url(" not in text


def test_a_measured_step_is_shown_beside_the_plan(sheet: PlanSheet) -> None:
    made, problem = tight()
    spans = (Span(lane=Lane.COMPUTE, label="run fwd.0", start_s=0.0, end_s=0.5),)
    record = Record(origin=Origin.MEASURED, step_s=9.0, device_peak_bytes=7, host_peak_bytes=0, spans=spans)
    both = plan_sheet(made, problem.graph, problem.cluster, problem.measured, record)
    assert {bar.of for bar in both.bars} == {figures.PLANNED, figures.MEASURED}
    said = Reader(page(both)).text
    assert "Planned and measured" in said
    rows = work_rows(both.planned, record)
    run = next(row for row in rows if row.verb == "run")
    num_runs = len(made.regions)
    assert (run.lane, run.planned, run.measured, run.measured_s) == (Lane.COMPUTE, (num_runs, 0), (1, 0), 0.5)
    moved = sum(row.planned.nbytes for row in rows if row.lane is Lane.H2D)
    assert moved == sum(span.nbytes for span in both.planned.spans if span.lane is Lane.H2D) > 0
    assert all(row.is_off for row in rows)
    assert not any(row.is_off for row in work_rows(both.planned, both.planned))


def test_a_record_shows_one_graph_and_the_updates() -> None:
    of = ("GPT", "GPT.1", "")
    spans = tuple(Span(lane=Lane.COMPUTE, label="run fwd.0", start_s=0.0, end_s=0.5, graph=name) for name in of)
    record = Record(origin=Origin.MEASURED, step_s=9.0, device_peak_bytes=7, host_peak_bytes=0, spans=spans)
    assert [span.graph for span in record.of_graph("GPT.1").spans] == ["GPT.1", ""]
    assert record.of_graph("Llama") is record


def test_without_a_measured_step_a_page_shows_none(sheet: PlanSheet) -> None:
    assert "Planned and measured" not in Reader(page(sheet)).text


@pytest.mark.usefixtures("without_charts")
def test_two_plans_share_a_page(sheet: PlanSheet) -> None:
    _, problem = tight()
    wide = plan(replace(problem, budget_bytes=1 << 30), "greedy")
    second = sheet_of(wide, problem)
    both = replace(sheet, second=second)
    found = Reader(page(both))
    for row in change_rows(plan_diff(sheet.plan, wide)):
        assert all(text in found.text for text in row)
    assert f"Second plan, {wide.name} on {wide.cluster}: fits: peak" in found.text
    assert found.blocks["elixir-report"]["second"] == json.loads(json.dumps(page_data(second)))
    assert {bar.of for bar in both.drawn_bars} == {figures.PLANNED, figures.SECOND}
    assert "Equal." in Reader(page(replace(sheet, second=sheet))).text


CURVE = (
    figures.CurvePoint(budget_bytes=1 << 20, step_s=3.0, planned_s=3.0, bound_s=2.5, is_own=False),
    figures.CurvePoint(budget_bytes=2 << 20, step_s=2.0, planned_s=2.0, bound_s=None, is_own=True),
    figures.CurvePoint(budget_bytes=4 << 20, step_s=2.0, planned_s=2.5, bound_s=None, is_own=False),
)


@pytest.mark.usefixtures("without_charts")
def test_a_curve_is_a_table_too(sheet: PlanSheet) -> None:
    found = Reader(page(replace(sheet, curve=CURVE)))
    for said in (
        "A step takes 3 s in 1.0 MiB, the least that has a plan, and 2 s in 4.0 MiB",
        "the budget of this plan",
        "its own plan takes 2.5 s; a plan for less memory is faster",
        "not proved",
    ):
        assert said in found.text
    assert [point["budget_bytes"] for point in found.blocks["elixir-report"]["curve"]] == [1 << 20, 2 << 20, 4 << 20]
    assert "curve" not in Reader(page(sheet)).blocks["elixir-report"]


def test_a_curve_is_drawn_with_its_bound_where_all_of_it_is_proved() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    proved = [replace(point, bound_s=1.0) for point in CURVE]
    assert ">bound</text>" in charts.svg(charts.curve_chart(proved))
    assert ">bound</text>" not in charts.svg(charts.curve_chart(CURVE))
    assert charts.svg(charts.curve_chart(proved[:1])).startswith("<svg")


def test_a_second_plan_is_a_line_of_all_of_its_bytes(sheet: PlanSheet) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    _, problem = tight()
    wide = sheet_of(plan(replace(problem, budget_bytes=1 << 30), "greedy"), problem)
    budget_bytes = sheet.plan.budget_bytes
    alone, both = (charts.svg(charts.memory_chart(sheet.memory, budget_bytes, second)) for second in ((), wide.memory))
    assert (alone.count("mark-line"), both.count("mark-line")) == (0, 1)
    assert figures.SECOND in charts.svg(charts.lanes_chart(replace(sheet, second=wide).drawn_bars))


def test_a_plan_without_a_bound_or_an_update_has_a_page() -> None:
    made, problem = tight()
    bare = sheet_of(replace(made, bound_s=None, gib_bound_s=None), problem)
    assert "not proved" in Reader(page(bare)).text


def test_with_charts_the_picture_is_there_before_any_script(sheet: PlanSheet) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    text = page(sheet)
    found = Reader(text)
    assert "svg" in found.tags
    assert found.blocks["elixir-step"]["params"][0]["name"] == "zoom"
    assert page(sheet) == text
    assert len(text) < 1_300_000
    assert text.count("</script>") == found.tags.count("script") == 4


def test_ranks_that_differ_have_a_row_for_each_class() -> None:
    made, problem = tight()
    fast = RankClass(
        ranks=(0, 1),
        device=EVIL,
        budget_bytes=8 * GIB,
        device_peak_bytes=7 * GIB,
        host_peak_bytes=GIB,
        busy_share=0.98,
        is_pressed=False,
        num_rows=17,
        micro_batches=4,
        state=0.25,
    )
    slow = replace(fast, ranks=(2,), device="p40-24g", num_rows=None, micro_batches=1, state=None, busy_share=0.5)
    assert "Ranks" not in Reader(page(sheet_of(made, problem))).text
    text = page(sheet_of(replace(made, classes=(fast, slow)), problem))
    section = text.partition('aria-labelledby="ranks"')[2].partition("</section>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in section.split("<tr>")[2:]]
    assert [html.unescape(cell) for cell in cells[0]] == [
        "0-1",
        EVIL,
        "17",
        "4",
        "25.0%",
        "7.0 GiB",
        "8.0 GiB",
        "1.0 GiB",
        "98%",
    ]
    assert [cells[1][place] for place in (0, 1, 2, 3, 4, 8)] == ["2", "p40-24g", "unknown", "1", "unknown", "50%"]
