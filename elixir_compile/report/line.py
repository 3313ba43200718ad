"""Write a plan and a measured step as a line each: the two lines in the log of a run."""

from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Record
from elixir_compile.report.activations import savings_text
from elixir_compile.units import format_bytes, format_s


def plan_line(plan: Plan) -> str:
    """Return the line of a plan: peak, budget, host bytes, step seconds, hidden share of transfers, and bytes of
    activations by treatment unless all are kept."""
    expected = plan.prediction
    parts = [
        f"planned   peak {format_bytes(expected.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}",
        f"host {format_bytes(expected.host_peak_bytes)}",
        f"step {format_s(expected.step_s)}",
        _hidden(plan),
    ]
    parts += [f"activations {savings_text(plan)}"] if plan.activations else []
    return "   ".join(parts)


def measured_line(record: Record, plan: Plan | None = None) -> str:
    """Return the line of a measured step: peak, host bytes, seconds, executed actions; with the budget of `plan` if
    given."""
    peak = f"measured  peak {format_bytes(record.device_peak_bytes)}"
    if plan is not None:
        peak += f" of {format_bytes(plan.budget_bytes)}"
    parts = [peak, f"host {format_bytes(record.host_peak_bytes)}", f"step {format_s(record.step_s)}"]
    moved = [
        f"{verb} {record.counts[verb]}"
        for verb in ("gather", "release", "reduce", "offload", "prefetch")
        if record.counts.get(verb)
    ]
    return "   ".join((*parts, ", ".join(moved) or "nothing moved"))


def _hidden(plan: Plan) -> str:
    if not any(
        action.verb in ("gather", "offload", "prefetch") for schedule in plan.schedules for action in schedule.actions
    ):
        return "nothing to move"
    expected = plan.prediction
    return f"{expected.hidden_share:.0%} of transfers hidden, {format_s(expected.exposed_s)} exposed"
