"""Observed steps as values: every one reads back from its JSON, wrong ones are refused, scalars are finite."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, TraceFileError
from elixir_compile.ir import Lane, Origin, Phase, Record, Span
from elixir_compile.tools.observed import (
    Counters,
    FullStep,
    Interval,
    Live,
    StepSummary,
    full_step_from_json,
    full_step_to_json,
    seconds_by_phase,
    summaries_from_lines,
    summary_from_json,
    summary_to_json,
)

SECONDS = st.floats(0, 1e6, allow_nan=False)
BYTES = st.integers(0, 1 << 50)
NAMES = st.sampled_from(["forward", "backward", "update", "caller"])
PHASES = st.sampled_from([None, *Phase])
ANY = st.floats(allow_nan=False, allow_infinity=False)
SUMMARIES = st.builds(
    StepSummary,
    step=st.integers(0, 1 << 40),
    rank=st.integers(0, 4096),
    plans=st.lists(st.text(max_size=12), max_size=3).map(tuple),
    period_s=SECONDS,
    seconds_s=st.dictionaries(NAMES, SECONDS),
    moved_bytes=st.dictionaries(st.sampled_from([str(lane) for lane in Lane]), st.dictionaries(NAMES, BYTES)),
    host_update_s=st.none() | SECONDS,
    waited_s=st.none() | SECONDS,
    device_peak_bytes=st.none() | BYTES,
    alloc_retries=st.none() | st.integers(0, 100),
    host_slab_bytes=BYTES,
    energy_j=st.none() | SECONDS,
    device_busy_share=st.none() | st.floats(0, 1),
    notes=st.dictionaries(st.text(max_size=8), ANY),
)
INTERVALS = st.lists(st.tuples(PHASES, SECONDS, SECONDS), max_size=5).map(
    lambda found: tuple(Interval(phase=phase, start_s=min(a, b), end_s=max(a, b)) for phase, a, b in found)
)
SPANS = st.lists(st.tuples(st.sampled_from(list(Lane)), SECONDS, SECONDS, BYTES), max_size=5).map(
    lambda found: tuple(
        Span(lane=lane, label="run fwd.0", start_s=min(a, b), end_s=max(a, b), nbytes=nbytes)
        for lane, a, b, nbytes in found
    )
)


@st.composite
def full_steps(draw: st.DrawFn) -> FullStep:
    times = tuple(sorted(draw(st.lists(SECONDS, max_size=4))))
    columns = st.lists(BYTES, min_size=len(times), max_size=len(times)).map(tuple)
    values = st.lists(st.none() | ANY, min_size=len(times), max_size=len(times)).map(tuple)
    record = Record(
        origin=Origin.MEASURED,
        step_s=draw(SECONDS),
        device_peak_bytes=draw(BYTES),
        host_peak_bytes=draw(BYTES),
        spans=draw(SPANS),
        counts=draw(st.dictionaries(st.sampled_from(["run", "gather"]), st.integers(0, 9))),
    )
    return FullStep(
        summary=draw(SUMMARIES),
        intervals=draw(INTERVALS),
        record=record,
        live=draw(st.none() | st.dictionaries(NAMES, columns).map(lambda found: Live(at_s=times, by_kind=found))),
        counters=draw(st.none() | st.dictionaries(NAMES, values).map(lambda found: Counters(at_s=times, values=found))),
    )


@given(SUMMARIES)
def test_a_summary_reads_back_from_one_line(summary: StepSummary) -> None:
    line = summary_to_json(summary)
    assert "\n" not in line
    assert summary_from_json(line) == summary


@settings(max_examples=30)
@given(full_steps())
def test_a_full_step_reads_back(full: FullStep) -> None:
    assert full_step_from_json(full_step_to_json(full)) == full


@settings(max_examples=30)
@given(st.lists(SUMMARIES, max_size=4), st.integers(0, 200))
def test_lines_that_end_in_the_middle_give_the_whole_ones(summaries: list[StepSummary], kept: int) -> None:
    text = "".join(summary_to_json(summary) + "\n" for summary in summaries)
    assert summaries_from_lines(text) == summaries
    assert summaries_from_lines(text[:kept]) == summaries[: text[:kept].count("\n")]


@given(SUMMARIES)
def test_scalars_are_finite_floats_under_one_prefix(summary: StepSummary) -> None:
    scalars = summary.scalars()
    assert all(name.startswith("elixir/") and type(value) is float for name, value in scalars.items())
    assert all(map(math.isfinite, scalars.values()))
    assert ("elixir/energy_j" in scalars) == (summary.energy_j is not None)


def summary(**changes: object) -> StepSummary:
    fields: Mapping[str, object] = {"step": 1, "rank": 0, "plans": (), "period_s": 1.0, "seconds_s": {}} | changes
    return StepSummary(**fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: summary(period_s=math.nan),
        lambda: summary(seconds_s={"forward": -1.0}),
        lambda: summary(moved_bytes={"h2d": {"forward": -1}}),
        lambda: Interval(phase=None, start_s=2.0, end_s=1.0),
        lambda: Counters(at_s=(1.0,), values={"device_power_w": ()}),
        lambda: Live(at_s=(1.0,), by_kind={"param": ()}),
        lambda: Live(at_s=(1.0,), by_kind={"param": (-1,)}),
    ],
)
def test_contradictions_are_refused(make) -> None:
    with pytest.raises(InvalidPlan):
        make()


def test_another_file_is_refused_with_its_field() -> None:
    with pytest.raises(TraceFileError, match="elixir: expected 'step', got 'full step'"):
        summary_from_json(summary_to_json(summary()).replace('"step"', '"full step"', 1))


def test_seconds_by_phase_are_the_sums_of_its_intervals() -> None:
    parts = [(Phase.FORWARD, 0.0, 1.0), (None, 1.0, 1.5), (Phase.FORWARD, 1.5, 3.5)]
    found = seconds_by_phase(Interval(phase=phase, start_s=start, end_s=end) for phase, start, end in parts)
    assert found == {"forward": 3.0, "caller": 0.5}


def test_live_bytes_tell_their_peak_and_its_kinds() -> None:
    live = Live(at_s=(0.0, 1.0, 2.0), by_kind={"param": (4, 4, 4), "temp": (0, 9, 2)})
    assert (live.totals_bytes, live.peak_bytes, live.at_peak()) == ([4, 13, 6], 13, {"param": 4, "temp": 9})
    assert Live(at_s=(), by_kind={}).at_peak() == {}
