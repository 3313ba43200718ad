"""Summaries of observed steps to text."""

from collections.abc import Sequence

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.tools.study.observed import CALLER, StepSummary

_NUM_UNSETTLED = 3
_PHASES = ("forward", "backward", "update", CALLER)


def observed_text(summaries: Sequence[StepSummary]) -> str:
    """Return a table of the mean seconds of each phase, which add up to the period, and of the bytes moved."""
    if not summaries:
        return "observed no step: no training step of the model has ended yet"
    settled = settled_steps(summaries)
    count = len(settled)
    period_s = sum(each.period_s for each in settled) / count
    lines = [
        f"observed {len(summaries)} step{'s' * (len(summaries) > 1)}, means of steps {settled[0].step} to "
        f"{settled[-1].step}   rank {settled[-1].rank}",
        f"  {'period':<10}{format_s(period_s):>12}",
    ]
    for phase in _PHASES:
        seconds_s = sum(each.seconds_s.get(phase, 0.0) for each in settled) / count
        lines.append(f"  {phase:<10}{format_s(seconds_s):>12}{_share(seconds_s, period_s):>8}")
    for lane in sorted({lane for each in settled for lane in each.moved_bytes}):
        nbytes = sum(each.lane_bytes(lane) for each in settled) / count
        rate = f"{format_bytes(round(nbytes / period_s))} per s" if period_s else ""
        lines.append(f"  {lane:<10}{format_bytes(round(nbytes)):>12}   {rate}")
    return "\n".join([*lines, *_memory_lines(settled)])


def settled_steps(summaries: Sequence[StepSummary]) -> Sequence[StepSummary]:
    """Return `summaries` without the first three if as many others are there: the first steps compile and fill
    caches."""
    return summaries[_NUM_UNSETTLED:] if len(summaries) >= 2 * _NUM_UNSETTLED else summaries


def _memory_lines(settled: Sequence[StepSummary]) -> list[str]:
    figures = {
        "device peak": [each.device_peak_bytes for each in settled],
        "host slabs": [each.host_slab_bytes or None for each in settled],
        "process": [each.rss_bytes for each in settled],
    }
    most = {
        name: max((value for value in values if value is not None), default=None) for name, values in figures.items()
    }
    return [f"  {name:<10}{format_bytes(value):>12}" for name, value in most.items() if value is not None]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""
