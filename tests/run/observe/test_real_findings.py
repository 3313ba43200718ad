"""Findings of a run agree with its raw spans: each value is counted a second way, on a fine grid of moments."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Lane, Span
from elixir_compile.tools.observed import StudyRow
from elixir_compile.tools.report.findings import WHOLE, Observed, find, host_update_bytes, observed_row
from tests.run.models import Stack, seeded, vectors

NUM_STEPS = 7
NUM_MOMENTS = 200_000
NAP_S = 0.01


def trained(update: str) -> Observed:
    """Return a step of a run on a machine whose link is told to be a hundred times faster than it is."""
    model = seeded(Stack, 128, 4)
    options = {"inner": "aot_eager", "report": False, "replan": False, "planner": "zero3_offload", "update": update}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    batch = vectors(1, rows=64, width=128)[0]
    with elixir.observe(compiled, full=(NUM_STEPS - 2,), counters_hz=0) as study:
        for _ in range(NUM_STEPS):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(NAP_S)
    (full,) = study.full_steps
    active = model_of(model).graphs[-1].active
    row = StudyRow(name="row", what="", budget_bytes=None, full=full, timed=study.summaries[2:], plan=active.plan)
    seen = observed_row(row, active.problem.cluster)
    assert seen is not None
    return seen


def share_of(seen: Observed, wanted: Callable[[Span], bool]) -> float:
    """Return the share of the moments of the step at which a span that is `wanted` runs."""
    moments = (np.arange(NUM_MOMENTS) + 0.5) * seen.period_s / NUM_MOMENTS
    is_busy = np.zeros(NUM_MOMENTS, bool)
    for span in seen.full.record.spans:
        if wanted(span):
            is_busy |= (moments >= span.start_s) & (moments < span.end_s)
    return is_busy.mean()


def by_hand(code: str, seen: Observed) -> float:
    """Return the value of a finding from the raw spans, intervals and summaries of the step."""
    spans = seen.full.record.spans
    if code == "F1":
        return 1 - share_of(seen, lambda span: span.lane is Lane.H2D)
    if code == "F2":
        return share_of(seen, lambda span: span.lane is Lane.HOST and span.label.split()[0] == "update")
    if code == "F4":
        return share_of(seen, lambda span: span.lane is Lane.CALLER)
    if code == "F5":
        rates = []
        for lane, link in ((Lane.H2D, seen.cluster.h2d), (Lane.D2H, seen.cluster.d2h)):
            nbytes = sum(span.nbytes for span in spans if span.lane is lane)
            busy_s = seen.period_s * share_of(seen, lambda span, lane=lane: span.lane is lane)
            rates += [nbytes / busy_s / link.bytes_per_s] if nbytes else []
        return min(rates)
    if code == "F7":
        return sum(one.end_s - one.start_s for one in seen.full.intervals if one.phase is None) / seen.period_s
    assert code == "F8"
    assert seen.plan is not None
    made, record = seen.plan.prediction, seen.full.record
    peaks = [record.host_peak_bytes / made.host_peak_bytes] if made.host_peak_bytes else []
    step_s = float(np.median([each.period_s for each in seen.timed]))
    return max([step_s / made.step_s, *peaks], key=lambda ratio: abs(ratio - 1))


@pytest.mark.parametrize("update", ["after_backward", pytest.param("across_steps", marks=pytest.mark.slow)])
def test_each_finding_of_a_run_is_what_its_raw_spans_tell(update: str) -> None:
    seen = trained(update)
    found = {finding.code: finding for finding in find(seen)}
    assert {"F1", "F7", "F8"} <= found.keys()
    for code, finding in found.items():
        assert finding.value == pytest.approx(by_hand(code, seen), rel=0.01, abs=1e-3), code
    whole = seen.phases[WHOLE]
    spans = seen.full.record.spans
    for lane, busy_s in ((Lane.COMPUTE, whole.compute_s), (Lane.HOST, whole.host_s), (Lane.CALLER, whole.waited_s)):
        assert busy_s / seen.period_s == pytest.approx(
            share_of(seen, lambda span, lane=lane: span.lane is lane), abs=1e-3
        )
    for lane, traffic in ((Lane.H2D, whole.up), (Lane.D2H, whole.down)):
        assert traffic.nbytes == sum(span.nbytes for span in spans if span.lane is lane) > 0
    assert seen.plan is not None
    own = [
        bucket for bucket, home in zip(seen.plan.buckets, seen.plan.placements, strict=True) if home.optim != "device"
    ]
    assert host_update_bytes(seen.plan) > 3 * 4 * sum(bucket.numel for bucket in own)
