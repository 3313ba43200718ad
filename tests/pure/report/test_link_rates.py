"""The rate of the link over a step: the bins hold the bytes of the copies, and the chart draws them on its seconds."""

import json
from dataclasses import replace

import pytest

from elixir_compile.ir import Lane, Origin, Record, Span
from elixir_compile.ir.hardware import preset
from elixir_compile.tools.observed import Counters
from elixir_compile.tools.report import figures
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.figures import NUM_BINS, LinkRates, link_rates, rate_columns
from elixir_compile.tools.report.page import PlanSheet, page, page_data
from tests.pure.report.pages import sheet_of, tight

CLUSTER = preset("a100-40g")
STEP_S = 2.0
BIN_S = STEP_S / NUM_BINS


def copy(lane: Lane, start_s: float, end_s: float, nbytes: int) -> Span:
    return Span(lane=lane, label="gather b0", start_s=start_s, end_s=end_s, nbytes=nbytes)


def sheet() -> PlanSheet:
    return sheet_of(*tight())


def rates_of(*spans: Span, counters: Counters | None = None) -> dict[Lane, LinkRates]:
    record = Record(origin=Origin.MEASURED, step_s=STEP_S, device_peak_bytes=0, host_peak_bytes=0, spans=spans)
    return {each.lane: each for each in link_rates(record, figures.MEASURED, CLUSTER, counters)}


def test_a_copy_counts_in_each_bin_by_its_seconds_there() -> None:
    found = rates_of(copy(Lane.H2D, 0.5 * BIN_S, 2.5 * BIN_S, 1000), copy(Lane.H2D, BIN_S, 2 * BIN_S, 100))
    up = found[Lane.H2D]
    assert up.bytes_per_s[:4] == pytest.approx([250 / BIN_S, 600 / BIN_S, 250 / BIN_S, 0])
    assert up.nbytes == pytest.approx(1100)
    assert not any(found[Lane.D2H].bytes_per_s)


def test_all_bytes_are_in_the_bins_whatever_the_times() -> None:
    spans = [copy(Lane.H2D, 0.013 * place, 0.021 * place, 10 + place) for place in range(90)]
    spans += [copy(Lane.D2H, STEP_S, STEP_S, 77), copy(Lane.D2H, 3 * BIN_S, 3 * BIN_S, 5)]
    found = rates_of(*spans, copy(Lane.GATHER, 0, 1, 10**9))
    for lane in (Lane.H2D, Lane.D2H):
        assert found[lane].nbytes == pytest.approx(sum(span.nbytes for span in spans if span.lane is lane))
    assert found[Lane.D2H].bytes_per_s[3] == pytest.approx(5 / BIN_S)
    assert found[Lane.D2H].bytes_per_s[-1] == pytest.approx(77 / BIN_S)


def test_a_step_without_copies_has_no_rates() -> None:
    assert rates_of(Span(lane=Lane.COMPUTE, label="run fwd.0", start_s=0, end_s=1)) == {}


def test_the_driver_counts_what_the_device_receives_as_what_goes_to_it() -> None:
    counters = Counters(
        at_s=(0.5, 1.0), values={"link_rx_bytes_per_s": (3.0, None), "link_tx_bytes_per_s": (None, 4.0)}
    )
    found = rates_of(copy(Lane.H2D, 0, 1, 1), counters=counters)
    assert (found[Lane.H2D].counted, found[Lane.D2H].counted) == (((0.5, 3.0),), ((1.0, 4.0),))


def test_the_table_has_a_row_where_a_rate_changes() -> None:
    table = rate_columns(tuple(rates_of(copy(Lane.H2D, 0.5, 1.0, 10**9)).values()))
    rows = list(zip(*table.values(), strict=True))
    up = [(at_s, rate) for _, link, at_s, rate in rows if link == "h2d"]
    assert up == [(0.0, 0.0), (0.5, 2.0), (1.0, 0.0), (2.0, 0.0)]
    assert [row for row in rows if row[1] == "d2h"] == [("measured", "d2h", 0.0, 0.0), ("measured", "d2h", 2.0, 0.0)]


@pytest.mark.skipif(not charts.can_draw(), reason="needs Altair and vl-convert")
def test_the_chart_stands_below_the_lanes_on_their_seconds_and_zooms_with_them() -> None:
    made = sheet()
    assert {each.lane for each in made.rates} == {Lane.H2D, Lane.D2H}
    args = (made.memory, made.bars, made.plan.budget_bytes, (), made.rates)
    spec = charts.step_chart(*args)
    assert [spec["vconcat"][1]["name"], spec["vconcat"][2]["layer"][0]["name"]] == ["lanes", "rates"]
    assert [param["views"] for param in spec["params"]] == [["hover", "lanes", "rates"]]
    assert spec["datasets"]["rates"] == [rate_columns(made.rates)]
    assert spec["resolve"]["scale"]["x"] == "shared"
    drawn = charts.svg(charts.step_chart(*args, is_static=True))
    assert ">GB/s</text>" in drawn
    assert ">h2d</text>" in drawn
    without = charts.svg(charts.lanes_chart(made.bars))
    assert ">GB/s</text>" not in without
    counted = tuple(replace(each, counted=((made.planned.step_s / 2, 1e9),)) for each in made.rates)
    dotted = charts.lanes_chart(made.bars, counted)
    assert len(dotted["vconcat"][1]["layer"]) == len(spec["vconcat"][2]["layer"]) + 1
    assert charts.svg(dotted) != charts.svg(charts.lanes_chart(made.bars, made.rates))


def test_the_data_of_the_page_has_the_rates_once() -> None:
    made = sheet()
    data = page_data(made)
    assert data["rates"] == rate_columns(made.rates)
    text = page(made)
    assert text.count(json.dumps(data["rates"], separators=(",", ":"))) == 1
    up = next(each for each in made.rates if each.lane is Lane.H2D)
    assert up.nbytes == pytest.approx(sum(span.nbytes for span in made.planned.spans if span.lane is Lane.H2D))
    assert "of what the link could carry" in text
