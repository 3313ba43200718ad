"""Figures of a simulated step: exposed and hidden transfers, the critical path, and the prediction for a plan."""

from bisect import bisect_right
from dataclasses import replace

from elixir_compile.ir.kinds import Lane, OpId
from elixir_compile.ir.plan import Prediction
from elixir_compile.ir.record import Record, Span

_TRANSFERS = frozenset({Lane.H2D, Lane.D2H, Lane.GATHER, Lane.REDUCE, Lane.P2P})


def exposed_s(record: Record) -> float:
    """Return the seconds of transfers during which the compute lane is idle; simultaneous transfers count each."""
    compute = sorted(
        (span for span in record.spans if span.lane is Lane.COMPUTE and span.end_s > span.start_s),
        key=lambda span: span.start_s,
    )
    starts_s = [span.start_s for span in compute]
    total_s = 0.0
    for span in record.spans:
        if span.lane in _TRANSFERS:
            total_s += span.end_s - span.start_s - _covered_s(span, compute, starts_s)
            if span.end_s > record.step_s:
                # The end of this span runs in the next step, beside compute as at the beginning of this step.
                total_s -= _covered_s(_before(span, record.step_s), compute, starts_s)
    return max(0.0, total_s)  # rounded, what covers a transfer may be longer than it


def exposed_by_lane(record: Record) -> dict[Lane, float]:
    """Return the seconds of each lane's transfers during which the compute lane is idle."""
    lanes = sorted({span.lane for span in record.spans} & _TRANSFERS)
    compute = tuple(span for span in record.spans if span.lane is Lane.COMPUTE)
    return {
        lane: exposed_s(replace(record, spans=(*compute, *(span for span in record.spans if span.lane is lane))))
        for lane in lanes
    }


def critical_path(record: Record) -> tuple[Span, ...]:
    """Return the spans of a simulated step that lead without a gap to its end.

    The step gets shorter only if a span among them gets shorter.
    """
    ends: dict[float, Span] = {}
    for span in record.spans:
        # If a span of compute ends together with another, it is on the path.
        is_first = span.end_s not in ends or span.lane is Lane.COMPUTE
        if span.end_s > span.start_s and is_first:
            ends[span.end_s] = span
    path: list[Span] = []
    at_s = max(ends, default=0.0)
    while at_s in ends:
        path.append(ends[at_s])
        at_s = path[-1].start_s
    return tuple(reversed(path))


def hidden_share(record: Record) -> float:
    """Return the share of transfer seconds beside compute, 0 to 1; 1 if nothing is transferred."""
    total_s = sum(span.end_s - span.start_s for span in record.spans if span.lane in _TRANSFERS)
    return 1.0 if total_s == 0 else min(1.0, max(0.0, 1.0 - exposed_s(record) / total_s))


def hidden_update_share(record: Record) -> float:
    """Return the share of the host's update seconds beside compute, 0 to 1; 1 if the host updates nothing."""
    updates = (replace(span, lane=Lane.H2D) for span in record.spans if span.lane is Lane.HOST)
    compute = (span for span in record.spans if span.lane is Lane.COMPUTE)
    return hidden_share(replace(record, spans=(*compute, *updates)))


def _before(span: Span, step_s: float) -> Span:
    """Return the part of `span` after the end of the step, with times of the next step."""
    return replace(span, start_s=max(span.start_s - step_s, 0.0), end_s=span.end_s - step_s)


def _covered_s(span: Span, compute: list[Span], starts_s: list[float]) -> float:
    """Return the seconds of `span` beside `compute`, which are sorted spans without overlap."""
    covered_s = 0.0
    i = max(bisect_right(starts_s, span.start_s) - 1, 0)
    while i < len(compute) and compute[i].start_s < span.end_s:
        covered_s += max(0.0, min(span.end_s, compute[i].end_s) - max(span.start_s, compute[i].start_s))
        i += 1
    return covered_s


def prediction_of(record: Record, device_peak_bytes: int, device_peak_at: OpId) -> Prediction:
    """Return the prediction of `record`, with the device peak and its op from the timeline."""
    return Prediction(
        step_s=record.step_s,
        exposed_s=exposed_s(record),
        hidden_share=hidden_share(record),
        device_peak_bytes=device_peak_bytes,
        device_peak_at=device_peak_at,
        host_peak_bytes=record.host_peak_bytes,
    )
