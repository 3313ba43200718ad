"""The bytes of a step by kind over time: of hand-made events, and of real steps against the allocator and the plan."""

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.ir import Kind, Lane, Phase, Span
from elixir_compile.tools.measure.memory import live_by_kind
from elixir_compile.tools.observed import FullStep, Interval
from tests.run.models import Stack, seeded, vectors

MS = 1e-3
PHASES = (
    Interval(phase=Phase.FORWARD, start_s=0, end_s=10 * MS),
    Interval(phase=Phase.BACKWARD, start_s=10 * MS, end_s=20 * MS),
    Interval(phase=None, start_s=20 * MS, end_s=25 * MS),
    Interval(phase=Phase.UPDATE, start_s=25 * MS, end_s=30 * MS),
)


def span(label: str, start: float, end: float, lane: Lane = Lane.COMPUTE) -> Span:
    return Span(lane=lane, label=label, start_s=start * MS, end_s=end * MS)


SPANS = (
    span("gather b0", 1, 2, Lane.H2D),
    span("run fwd.0", 3, 9),
    span("prefetch g0", 11, 12, Lane.H2D),
    span("run bwd.0", 13, 16),
    span("offload b0.grad", 17, 18, Lane.D2H),
    span("run bwd.1", 18.5, 19),
)


@pytest.mark.parametrize(
    ("born", "died", "kind"),
    [
        (1.5, 9.5, Kind.GATHERED),
        (4, 5, Kind.TEMP),
        (4, 14, Kind.SAVED),
        (4, None, Kind.SAVED),
        (11.5, 14, Kind.SAVED),
        (14, 15, Kind.TEMP),
        (14, 19.5, Kind.TEMP),
        (14, 18.2, Kind.TEMP),
        (14, 26, Kind.GRAD),
        (14, None, Kind.GRAD),
        (22, 23, "other"),
        (22, None, "other"),
        (26, 27, Kind.TEMP),
        (26, None, Kind.MOMENT),
    ],
)
def test_phase_lifetime_and_label_tell_the_kind(born: float, died: float | None, kind: str) -> None:
    events = [(born * MS, 64, 100)] + ([] if died is None else [(died * MS, 64, -100)])
    live = live_by_kind({}, events, PHASES, SPANS)
    assert live.at_peak() == {kind: 100}


@pytest.mark.parametrize(("action", "kind"), [("gather b0", Kind.GATHERED), ("prefetch g0", Kind.SAVED)])
def test_memory_for_a_copy_is_taken_before_its_span(action: str, kind: Kind) -> None:
    """An activation that follows at once, in the same microsecond, is not taken for the copy."""
    events = [(0.5 * MS, 64, 100), (0.5 * MS, 32, 10), (9 * MS, 32, -10), (9 * MS, 64, -100)]
    taken = [(0.501 * MS, 64, action)]
    assert live_by_kind({}, events, PHASES, SPANS, taken).at_peak() == {kind: 100, Kind.TEMP: 10}
    assert live_by_kind({}, events, PHASES, SPANS).at_peak() == {Kind.TEMP: 110}


def test_a_block_that_became_a_gradient_is_one_whenever_it_is_freed() -> None:
    """The second block at the address did not, nor did the activation."""
    events = [(14 * MS, 64, 100), (19.5 * MS, 64, -100), (19.8 * MS, 64, 10), (19.9 * MS, 64, -10)]
    taken = [(15 * MS, 64, "reduce"), (15 * MS, 32, "reduce")]
    live = live_by_kind({}, [(4 * MS, 32, 1), *events], PHASES, SPANS, taken)
    assert {kind: max(values) for kind, values in live.by_kind.items()} == {
        Kind.GRAD: 100,
        Kind.TEMP: 10,
        Kind.SAVED: 1,
    }
    late = live_by_kind({}, events, PHASES, SPANS, taken=[(12 * MS, 64, "reduce")])
    assert Kind.GRAD not in late.by_kind


def test_a_block_ends_where_another_takes_its_address() -> None:
    resident = {1: (10, "param"), 2: (20, "buffer")}
    events = [(1 * MS, 3, 5), (2 * MS, 1, 7), (3 * MS, 1, 0), (4 * MS, 9, -4), (5 * MS, 2, 0), (6 * MS, 3, -5)]
    live = live_by_kind(resident, events, PHASES, ())
    # The late news that the block at 1 is gone, and the end of a block that nobody knows, change nothing.
    assert live.at_s == (0.0, 1 * MS, 2 * MS, 5 * MS, 6 * MS)
    assert live.totals_bytes == [30, 35, 32, 12, 7]
    assert live.by_kind["param"] == (10, 10, 0, 0, 0)


def recorded(planner: str, num_steps: int = 4) -> tuple[FullStep, torch.nn.Module, torch.Tensor, elixir.HybridAdamW]:
    model = seeded(Stack, 64, 2)
    options = {"inner": "aot_eager", "report": False, "replan": False, "planner": planner, "update": "after_backward"}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    batch = vectors(1, rows=256)[0]
    with elixir.observe(compiled, full=(num_steps - 2,), memory_events=True, counters_hz=0) as study:
        for _ in range(num_steps):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    record = elixir.measure_step(lambda: (compiled(batch).backward(), optimizer.step(), optimizer.zero_grad()))
    (full,) = study.full_steps
    assert full.live is not None
    assert full.record.device_peak_bytes == full.live.peak_bytes == record.device_peak_bytes
    return full, model, batch, optimizer


KINDS = (Kind.PARAM, Kind.GRAD, Kind.MOMENT, Kind.SAVED, Kind.GATHERED)
MOST_APART_BYTES = 512
"""Scalars that plans leave out: the step counts of the optimizer, the loss, numbers of random generators."""


def assert_most_as_planned(full: FullStep, model: torch.nn.Module, kinds: tuple[Kind, ...]) -> None:
    """Fail unless the most bytes of each of `kinds` over the step are those of the plan."""
    planned = elixir.compilations(model)[0].timeline.live_bytes_by_kind
    assert full.live is not None
    for kind in kinds:
        most_bytes = max(full.live.by_kind.get(kind, (0,)))
        assert most_bytes == pytest.approx(max(planned.get(kind, (0,))), abs=MOST_APART_BYTES), kind


@pytest.mark.parametrize("planner", ["keep_all", "zero3_offload", pytest.param("zero_offload", marks=pytest.mark.slow)])
def test_the_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan(planner: str) -> None:
    full, model, _, _ = recorded(planner)
    assert_most_as_planned(full, model, KINDS)
    if planner == "zero3_offload":  # the plan's peak is elsewhere: it counts temporaries that a CPU does not have
        return
    planned = elixir.compilations(model)[0].timeline.peak.by_kind
    assert full.live is not None
    found = full.live.at_peak()
    assert all(found.get(kind, 0) == pytest.approx(planned.get(kind, 0), abs=MOST_APART_BYTES) for kind in KINDS)
