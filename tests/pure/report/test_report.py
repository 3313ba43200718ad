"""The views: what they print, and what they refuse."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.kinds import BucketId, GroupId, Kind, OpId, Saving, StorageId, Verb
from elixir_compile.ir.plan import Plan, Prediction
from elixir_compile.ir.record import Origin, Record
from elixir_compile.ir.schedule import Action, BucketRef, Schedule
from elixir_compile.session.line import measured_line, plan_line
from elixir_compile.step.timeline import MemoryTimeline
from elixir_compile.tools.report.tables import curve_text, table_text, timeline_text

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
