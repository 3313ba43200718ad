"""The page of a plan: its figures, pictures, subject and text."""

import html
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import UnknownSubject
from elixir_compile.base.units import GIB, format_bytes
from elixir_compile.ir import Kind, Lane, Origin, Plan, RankClass, Record, Saving, Span, Update
from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.kinds import BucketId, GroupId, OpId, StorageId, Verb
from elixir_compile.ir.plan import Prediction, measured_line, plan_line
from elixir_compile.ir.schedule import Action, BucketRef, Schedule
from elixir_compile.search import Problem, plan
from elixir_compile.session.plan_files import load_answered
from elixir_compile.step import plan_timeline
from elixir_compile.step.seconds import simulate
from elixir_compile.step.timeline import MemoryTimeline
from elixir_compile.tools.report import figures
from elixir_compile.tools.report.diff import change_rows, plan_diff
from elixir_compile.tools.report.page import PlanSheet, drawn_memory, page, page_data, plan_sheet
from elixir_compile.tools.report.tables import (
    Survey,
    curve_text,
    entry_text,
    find_subject,
    table_text,
    timeline_text,
    work_rows,
)
from tests.pure.mixes import group
from tests.pure.plans import bucket_of, make_plan
from tests.pure.problems import problems
from tests.pure.strategies import Layer, chain
from tests.pure.tools.pages import EVIL, evil, sheet_of, tight

# ----------------------------------------------------------------------------------------------------------------------
# `page`: one file that says everything without a script, fetches nothing, and takes no name for markup.


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
    monkeypatch.setattr(figures, "can_draw", lambda: False)
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
        figures.EXTRA,
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
    assert ">bound</text>" in figures.svg(figures.curve_chart(proved))
    assert ">bound</text>" not in figures.svg(figures.curve_chart(CURVE))
    assert figures.svg(figures.curve_chart(proved[:1])).startswith("<svg")


def test_a_second_plan_is_a_line_of_all_of_its_bytes(sheet: PlanSheet) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    _, problem = tight()
    wide = sheet_of(plan(replace(problem, budget_bytes=1 << 30), "greedy"), problem)
    budget_bytes = sheet.plan.budget_bytes
    alone, both = (
        figures.svg(figures.memory_chart(sheet.memory, budget_bytes, second)) for second in ((), wide.memory)
    )
    assert (alone.count("mark-line"), both.count("mark-line")) == (0, 1)
    assert figures.SECOND in figures.svg(figures.lanes_chart(replace(sheet, second=wide).drawn_bars))


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


# ----------------------------------------------------------------------------------------------------------------------
# `figures`: no peak and no action is lost on the way to a chart, and equal plans have equal pictures.


@given(problems(), st.sampled_from(Update))
@settings(max_examples=25)
def test_memory_covers_the_step_and_keeps_the_peak(problem: Problem, update: Update) -> None:
    problem = replace(problem, update=update if problem.hybrid else None)
    made = plan(problem, "greedy")
    record = simulate(problem.graph, made, problem.cluster)
    rows = figures.memory_rows(Survey(made, problem.graph), record)
    timeline = plan_timeline(problem.graph, made)
    assert max(row.nbytes for row in rows) == timeline.peak.nbytes
    peak = max(rows, key=lambda row: row.nbytes)
    assert {kind: nbytes for kind, nbytes in peak.live_bytes.items() if nbytes} == timeline.peak.by_kind
    regions = [region.id for region in made.regions]
    assert [row.region for row in rows if row.region != "update"] == regions
    assert rows[0].start_s == 0.0
    assert rows[-1].end_s == pytest.approx(record.step_s)
    for before, after in itertools.pairwise(rows):
        assert before.start_s <= before.end_s == after.start_s


def test_the_update_is_drawn_where_compute_has_no_region() -> None:
    _, problem = tight()
    for update, at in ((Update.ACROSS_STEPS, 0), (Update.AFTER_BACKWARD, -1)):
        other = plan(replace(problem, update=update), "greedy")
        record = simulate(problem.graph, other, problem.cluster)
        rows = figures.memory_rows(Survey(other, problem.graph), record)
        assert rows[at].region == "update"
        assert [row.region for row in rows].count("update") == 1


def many_spans(count: int) -> Record:
    """Return a record with `count` spans on each of two lanes, one after another without and with gaps."""
    compute = [Span(lane=Lane.COMPUTE, label=f"run fwd.{i}", start_s=i, end_s=i + 1.0) for i in range(count)]
    copies = [Span(lane=Lane.H2D, label=f"gather b{i}", start_s=i + 0.5, end_s=i + 0.6) for i in range(count)]
    return Record(
        origin=Origin.SIMULATED, step_s=count, device_peak_bytes=1, host_peak_bytes=1, spans=(*copies, *compute)
    )


def test_a_bar_is_an_action_unless_there_are_too_many() -> None:
    record = many_spans(50)
    found = figures.bars(record)
    assert [bar.num_spans for bar in found] == [1] * 100
    assert [bar.lane for bar in found] == [Lane.COMPUTE] * 50 + [Lane.H2D] * 50
    assert (found[0].verb, found[0].what, found[50].verb, found[50].what) == ("run", "fwd.0", "gather", "b0")
    few = figures.bars(record, most=60)
    assert len(few) <= 60
    assert sum(bar.num_spans for bar in few) == 100
    assert few[0].what == "fwd.0 and 49 more"
    assert (few[0].start_s, few[0].end_s) == (0.0, 50.0)


def test_the_data_of_a_chart_is_exact() -> None:
    made, problem = tight()
    rows = sheet_of(made, problem).memory
    table = figures.columns(rows)
    kinds = [str(kind) for kind in figures.kinds_of(rows)]
    assert max(sum(table[kind][at] for kind in kinds) for at in range(len(rows))) == made.prediction.device_peak_bytes
    assert str(Kind.PARAM) in kinds


def test_pictures_are_equal_for_equal_plans_and_hold_every_kind() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    made, problem = tight()
    sheet = sheet_of(made, problem)
    pictures = [figures.svg(figures.memory_chart(sheet.memory, made.budget_bytes)) for _ in range(2)]
    assert pictures[0] == pictures[1]
    for kind in figures.kinds_of(sheet.memory):
        assert f">{kind}</text>" in pictures[0]
        assert f"var(--{kind}, #" in pictures[0]
    assert not any(re.search(r"\.\d{3}", tag) for tag in re.findall("<[^>]*>", pictures[0]))
    lanes = figures.svg(figures.lanes_chart(sheet.bars))
    assert {str(bar.lane) for bar in sheet.bars} <= set(re.findall(r">(\w+)</text>", lanes))


def test_labels_of_the_axes_of_a_small_step_differ() -> None:
    """Two decimals are enough for coordinates, but not for labels: all seconds and GiB of a small model were 0.00."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    made, problem = tight()
    picture = figures.svg(figures.memory_chart(sheet_of(made, problem).memory, made.budget_bytes))
    labels = [float(label) for label in re.findall(r">(\d+\.\d+)</text>", picture)]
    assert sum(label > 0 for label in labels) > len(labels) - 3


def test_both_charts_zoom_as_one() -> None:
    """A zoom named in each chart would be a page without charts: `Duplicate signal name`."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    made, problem = tight()
    sheet = sheet_of(made, problem)
    spec = figures.step_chart(sheet.memory, sheet.bars, made.budget_bytes)
    assert [param["views"] for param in spec["params"]] == [["hover", "lanes"]]
    memory, lanes = spec["vconcat"]
    assert [memory["layer"][-1]["name"], lanes["name"]] == ["hover", "lanes"], "the views that zoom have these names"
    assert "params" not in figures.step_chart(sheet.memory, sheet.bars, made.budget_bytes, is_static=True)
    assert figures.svg(spec).startswith("<svg")
    assert json.dumps(spec, allow_nan=False)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 9)), min_size=2, max_size=12))
def test_stretches_that_last_cover_the_step_and_keep_the_peak(stretches: list[tuple[float, int]]) -> None:
    """A region of views takes no time, but the bytes at its ops may be the most of the step."""
    rows, at_s = [], 0.0
    for seconds, nbytes in stretches:
        live = {Kind.TEMP: nbytes}
        rows.append(
            figures.MemoryRow(
                region="", op="", module="", source="", start_s=at_s, end_s=at_s + seconds, live_bytes=live
            )
        )
        at_s += seconds
    found = figures.lasting(rows)
    assert max(row.nbytes for row in found) == max(nbytes for _, nbytes in stretches)
    assert (found[0].start_s, found[-1].end_s) == (0.0, at_s)
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(found))
    assert at_s == 0.0 or all(row.end_s > row.start_s for row in found)


# ----------------------------------------------------------------------------------------------------------------------
# The pictures of README and docs show what the stored plan says today; `make pictures` draws them again.


ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "img"
MOST_BYTES = 120_000


@cache
def stored_sheet() -> PlanSheet:
    made, asked = load_answered(PICTURES / "gpt2-124m.json")
    assert asked is not None
    problem = asked.problem
    return plan_sheet(made, problem.graph, problem.cluster, problem.measured)


def marks_and_words(svg: str) -> tuple[list[str], list[str]]:
    """Return the paths of a picture with their colours, and its text; places of text depend on the fonts at hand."""
    return re.findall(r'<path d="[^"]*" fill="[^"]*"', svg), re.findall(r"<text[^>]*>([^<]*)", svg)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_show_the_stored_plan(theme: str) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    rows, _ = drawn_memory(stored_sheet())
    specs = {
        "memory": figures.memory_chart(rows, stored_sheet().plan.budget_bytes),
        "lanes": figures.lanes_chart(stored_sheet().drawn_bars),
    }
    for figure, spec in specs.items():
        stored = (PICTURES / f"{figure}-{theme}.svg").read_text(encoding="utf-8")
        drawn = figures.picture(spec, is_dark=theme == "dark")
        assert marks_and_words(drawn) == marks_and_words(stored), "run `make pictures`"
        assert marks_and_words(drawn)[0]


def test_pictures_are_small_and_have_both_themes() -> None:
    found = sorted(path.name for path in PICTURES.glob("*.svg"))
    assert found == [
        f"{figure}-{theme}.svg"
        for figure in ("curve", "lanes", "memory", "state-precision")
        for theme in ("dark", "light")
    ]
    for path in PICTURES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert len(text) < MOST_BYTES
        assert "var(" not in text  # a viewer of pictures has no style sheet


def test_every_picture_of_a_page_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {(page, name) for page in pages for name in re.findall(r'"([^"]*\.svg)"', page.read_text(encoding="utf-8"))}
    assert len(named) >= 6
    assert all((page.parent / name).is_file() for page, name in named)


# ----------------------------------------------------------------------------------------------------------------------
# `subject`: whole parts of a path are matched, and a name that is not there suggests the nearest.


NAMES = ["model.layers.3.up", "model.layers.3.down", "model.layers.30.up"]


def plan_of_layers() -> Plan:
    """Return a plan whose bucket `b0` holds layer 3 and whose bucket `b1` holds layer 30; each has activations."""
    layers = [Layer(module=f"m{n}", params=((name, 10),), frozen=False, act_numel=4) for n, name in enumerate(NAMES)]
    graph = chain(layers)
    params = {storage.id: storage for storage in graph.storages}
    buckets = [
        bucket_of(graph, "b0", [params[name] for name in NAMES[:2]]),
        bucket_of(graph, "b1", [params[NAMES[2]]]),
    ]
    activations = (
        group(graph, "model.layers.3.matmul", Saving.KEEP, "s0"),
        group(graph, "model.layers.30.pointwise", Saving.OFFLOAD, "s1"),
    )
    return make_plan(graph, buckets, ["host", "device"], activations)


@pytest.mark.parametrize(
    ("name", "buckets", "params"),
    [
        ("b1", ["b1"], []),
        ("model.layers.3.up", ["b0"], ["model.layers.3.up"]),
        ("layers.3", ["b0"], NAMES[:2]),
        ("3", ["b0"], NAMES[:2]),
        ("up", ["b0", "b1"], [NAMES[0], NAMES[2]]),
        ("model", ["b0", "b1"], NAMES),
    ],
)
def test_a_name_finds_buckets_and_the_named_parameters(name: str, buckets: list[str], params: list[str]) -> None:
    found = find_subject(plan_of_layers(), name)
    assert [bucket.id for bucket in found.buckets] == buckets
    assert found.params == set(params)
    assert found.region is None


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("model.layers.3.matmul", [0]),
        ("layers.3", [0]),
        ("matmul", [0]),
        ("layers", [0, 1]),
        ("30.pointwise", [1]),
        ("b0", []),
        ("up", []),
    ],
)
def test_a_name_finds_activations_too(name: str, groups: list[int]) -> None:
    plan = plan_of_layers()
    assert find_subject(plan, name).groups == tuple(plan.activations[number] for number in groups)


def test_a_region_is_found_by_its_id() -> None:
    plan = plan_of_layers()
    found = find_subject(plan, plan.regions[1].id)
    assert found.region == plan.regions[1]
    assert found.buckets == ()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("layers.33", "layers.3"),
        ("b2", "b1"),
        ("fwd.9", "fwd.0"),
        ("model.layer.30", "model.layers.30"),
        ("layers.3.matmull", "layers.3.matmul"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownSubject, match=f"no bucket, region, parameter, module or activations '{name}'") as caught:
        find_subject(plan_of_layers(), name)
    assert nearest in caught.value.nearest
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "layers.", "ayers.3", "layers.3.u"])
def test_a_part_of_a_part_is_not_found(name: str) -> None:
    with pytest.raises(UnknownSubject):
        find_subject(plan_of_layers(), name)


def test_unknown_names_without_similar_ones_list_a_few() -> None:
    with pytest.raises(UnknownSubject, match="It has names such as 'b0', 'b1'"):
        find_subject(plan_of_layers(), "zzzzzzzzzz")


# ----------------------------------------------------------------------------------------------------------------------
# The views: what they print, and what they refuse.


MIB = 1024**2


def test_a_table_is_aligned() -> None:
    assert table_text(("run", "bytes"), [("a", "1"), ("half of it", "12345")]) == (
        "run         bytes\n----------  -----\na               1\nhalf of it  12345"
    )


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 cells, the table has 2"):
        table_text(("run", "bytes"), [("a",)])


def test_a_curve_spans_its_extremes() -> None:
    assert curve_text([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve_text([2.0, 2.0]) == "▁▁"
    assert curve_text([]) == ""
    assert curve_text([1.0, math.nan, 2.0, math.inf]) == "▁!█!"
    assert curve_text([math.nan]) == "!"


@given(st.lists(st.floats(), max_size=30), st.floats(-10, 10), st.floats(-10, 10))
def test_a_curve_has_a_block_per_value(values: list[float], low: float, high: float) -> None:
    assert len(curve_text(values, low, high)) == len(values)


def a_plan(*verbs: Verb) -> Plan:
    prediction = Prediction(
        step_s=0.212,
        exposed_s=0.009,
        hidden_share=0.96,
        device_peak_bytes=18 * MIB,
        device_peak_at=OpId("bwd.mm_2"),
        host_peak_bytes=41 * MIB,
    )
    bare = Plan(
        name="tiny",
        graph="0" * 12,
        cluster="1 x cpu",
        budget_bytes=20 * MIB,
        buckets=(),
        placements=(),
        regions=(),
        schedules=(),
        decisions=(),
        prediction=prediction,
    )
    return replace(
        bare,
        schedules=(
            Schedule(rank=0, actions=tuple(Action(verb=verb, target=BucketRef(BucketId("b0"))) for verb in verbs)),
        ),
    )


def test_the_plan_line_lists_the_planned_figures() -> None:
    assert plan_line(a_plan(Verb.GATHER)) == (
        "planned   peak 18.0 MiB of 20.0 MiB   host 41.0 MiB   step 212 ms   96% of transfers hidden, 9 ms exposed"
    )
    assert plan_line(a_plan(Verb.RUN)).endswith("   nothing to move")


def test_the_plan_line_lists_the_treatment_of_activations() -> None:
    groups = [
        Activations(id=GroupId(f"h.{n}.fixed"), storages=(StorageId(f"s{n}"),), nbytes=n * MIB, saving=saving)
        for n, saving in enumerate((Saving.KEEP, Saving.OFFLOAD, Saving.RECOMPUTE, Saving.OFFLOAD))
    ]
    assert plan_line(replace(a_plan(Verb.RUN), activations=tuple(groups))).endswith(
        "   nothing to move   activations 2.0 MiB recomputed, 4.0 MiB offloaded"
    )


def test_the_measured_line_lists_figures_and_counts() -> None:
    record = Record(
        origin=Origin.MEASURED,
        step_s=0.25,
        device_peak_bytes=17 * MIB,
        host_peak_bytes=0,
        counts={"gather": 4, "wait": 4, "reduce": 2, "offload": 0, "prefetch": 3},
    )
    assert measured_line(record, a_plan()) == (
        "measured  peak 17.0 MiB of 20.0 MiB   host 0 B   step 250 ms   gather 4, reduce 2, prefetch 3"
    )
    assert measured_line(replace(record, counts={})) == (
        "measured  peak 17.0 MiB   host 0 B   step 250 ms   nothing moved"
    )


def test_a_timeline_shows_every_peak_and_what_is_live_there() -> None:
    """200 ops with one of them twice as high: it shows although the row is 10 wide."""
    live = [MIB] * 200
    live[137] = 2 * MIB
    ops = tuple(OpId(f"op.{index}") for index in range(200))
    by_kind = {Kind.PARAM: (MIB,) * 200, Kind.TEMP: tuple(total - MIB for total in live)}
    timeline = MemoryTimeline(ops=ops, live_bytes_by_kind=by_kind, live_bytes=tuple(live), host_bytes=0)
    lines = timeline_text(timeline, width=10).splitlines()
    assert lines[0] == "live bytes over 200 ops, peak 2.0 MiB at op.137"
    assert lines[1] == "▅▅▅▅▅▅█▅▅▅"
    assert [line.split() for line in lines[-3:]] == [
        ["param", "1.0", "MiB", "50%"],
        ["temp", "1.0", "MiB", "50%"],
        ["all", "2.0", "MiB", "100%"],
    ]


# ----------------------------------------------------------------------------------------------------------------------
# `entry`: fields are aligned, and those without lines are left out.


def test_an_entry_is_aligned() -> None:
    fields = [("size", ["3 B"]), ("why", []), ("rejected", ["one", "two"])]
    assert entry_text("b0", fields) == "b0\n  size      3 B\n  rejected  one\n            two"


def test_an_entry_may_have_a_title_only() -> None:
    assert entry_text("b0", [("why", [])]) == "b0"
