"""Write a study as text: the rows side by side, the phases of each, and what was found."""

from collections.abc import Iterator, Sequence

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.tools.report.findings import Finding, find, observed_row
from elixir_compile.tools.report.phase_table import PhaseFigures, Traffic
from elixir_compile.tools.report.text import table_text
from elixir_compile.tools.study.study import Study, StudyRow

NONE = ""
"""The text of a figure that is not known."""


def study_text(study: Study) -> str:
    """Return the table of the rows, and for each row its phases and findings."""
    parts = [f"study of {study.model} on {study.cluster.name}", table_text(ROW_HEADS, row_cells(study))]
    for row in study.rows:
        seen = observed_row(row, study.cluster)
        if seen is None:
            continue
        badge = "planned" if row.is_simulated else "measured"
        parts.append(f"{row.name}, {badge}: {row.what}")
        parts.append(table_text(PHASE_HEADS, [phase_cells(each) for each in seen.phases.values()]))
        parts.append("\n".join(f"  {line}" for line in finding_lines(find(seen))))
    return "\n\n".join(part for part in parts if part)


ROW_HEADS = ("row", "step", "of the first", "device peak", "budget", "losses", "")


def row_cells(study: Study) -> list[list[str]]:
    """Return a line of cells for each row of `study`."""
    known = [row.period_s for row in study.rows if row.period_s is not None]
    apart = study.equal_losses()
    return [_cells(row, known[0] if known else None, apart.get(row.name, -1)) for row in study.rows]


def _cells(row: StudyRow, first_s: float | None, differs_at: int | None) -> list[str]:
    losses = "equal" if differs_at is None else f"differ at step {differs_at}" if differs_at >= 0 else NONE
    note = row.reason or ("planned" if row.is_simulated else "")
    return [
        row.name,
        NONE if row.period_s is None else format_s(row.period_s),
        NONE if row.period_s is None or not first_s else f"{row.period_s / first_s:.2f}",
        NONE if row.peak_bytes is None else format_bytes(row.peak_bytes),
        NONE if row.budget_bytes is None else format_bytes(row.budget_bytes),
        losses,
        note,
    ]


PHASE_HEADS = (
    "phase", "seconds", "share", "device most", "least", "unused", "up", "rate", "idle", "down", "rate", "idle",
    "compute", "waits", "host updates",
)  # fmt: skip


def phase_cells(figures: PhaseFigures) -> list[str]:
    """Return the cells of a phase, in the order of `PHASE_HEADS`."""
    nbytes = (figures.most_bytes, figures.least_bytes, figures.unused_bytes)
    return [
        figures.phase,
        format_s(figures.seconds_s),
        f"{figures.share:.0%}",
        *(NONE if each is None else format_bytes(each) for each in nbytes),
        *_traffic_cells(figures.up),
        *_traffic_cells(figures.down),
        *(format_s(each) for each in (figures.compute_s, figures.waited_s, figures.host_s)),
    ]


def _traffic_cells(traffic: Traffic) -> Sequence[str]:
    if not traffic.nbytes or traffic.bytes_per_s is None:
        return ("0 B", NONE, NONE)
    rate = f"{traffic.bytes_per_s / 1e9:.2f} GB/s, {traffic.share_of_rate:.0%}"
    return (format_bytes(traffic.nbytes), rate, f"{traffic.idle_share:.0%}")


def finding_lines(found: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each finding: its code, its sentence and where it comes from."""
    for each in found:
        evidence = f" [{', '.join(each.evidence)}]" if each.evidence else ""
        yield f"{each.code} {each.text}{evidence}"
