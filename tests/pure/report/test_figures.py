"""`figures`: no peak and no action is lost on the way to a chart, and equal plans have equal pictures."""

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.ir import Kind, Lane, Origin, Record, Span, Update
from elixir_compile.search import Problem, plan
from elixir_compile.step import plan_timeline
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.report import figures
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.tables import Survey
from tests.pure.report.pages import sheet_of, tight
from tests.pure.search.test_planner import problems


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
    pictures = [charts.svg(charts.memory_chart(sheet.memory, made.budget_bytes)) for _ in range(2)]
    assert pictures[0] == pictures[1]
    for kind in figures.kinds_of(sheet.memory):
        assert f">{kind}</text>" in pictures[0]
        assert f"var(--{kind}, #" in pictures[0]
    assert not any(re.search(r"\.\d{3}", tag) for tag in re.findall("<[^>]*>", pictures[0]))
    lanes = charts.svg(charts.lanes_chart(sheet.bars))
    assert {str(bar.lane) for bar in sheet.bars} <= set(re.findall(r">(\w+)</text>", lanes))


def test_labels_of_the_axes_of_a_small_step_differ() -> None:
    """Two decimals are enough for coordinates, but not for labels: all seconds and GiB of a small model were 0.00."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    made, problem = tight()
    picture = charts.svg(charts.memory_chart(sheet_of(made, problem).memory, made.budget_bytes))
    labels = [float(label) for label in re.findall(r">(\d+\.\d+)</text>", picture)]
    assert sum(label > 0 for label in labels) > len(labels) - 3


def test_both_charts_zoom_as_one() -> None:
    """A zoom named in each chart would be a page without charts: `Duplicate signal name`."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    made, problem = tight()
    sheet = sheet_of(made, problem)
    spec = charts.step_chart(sheet.memory, sheet.bars, made.budget_bytes)
    assert [param["views"] for param in spec["params"]] == [["hover", "lanes"]]
    memory, lanes = spec["vconcat"]
    assert [memory["layer"][-1]["name"], lanes["name"]] == ["hover", "lanes"], "the views that zoom have these names"
    assert "params" not in charts.step_chart(sheet.memory, sheet.bars, made.budget_bytes, is_static=True)
    assert charts.svg(spec).startswith("<svg")
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
