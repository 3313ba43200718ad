"""Write a plan and a measured step as a line each: the two lines in the log of a run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.kinds import GroupId, Saving
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Record

SAID: Mapping[Saving, str] = {
    Saving.KEEP: "kept",
    Saving.RECOMPUTE: "recomputed",
    Saving.OFFLOAD: "offloaded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingAnswer:
    """The sum of all activations with the same treatment."""

    saving: Saving
    nbytes: int
    num_layers: int
    """Number of layers with such activations."""


def plan_line(plan: Plan) -> str:
    """Return the line of a plan: peak, budget, host bytes, step seconds, hidden share of transfers, and bytes of
    activations by treatment unless all are kept; and for each dtype of moments that is narrower than fp32, its share of
    the trained parameters."""
    expected = plan.prediction
    moves = (action.verb in ("gather", "offload", "prefetch") for own in plan.schedules for action in own.actions)
    hidden = f"{expected.hidden_share:.0%} of transfers hidden, {format_s(expected.exposed_s)} exposed"
    parts = [
        f"planned   peak {format_bytes(expected.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}",
        f"host {format_bytes(expected.host_peak_bytes)}",
        f"step {format_s(expected.step_s)}",
        hidden if any(moves) else "nothing to move",
        *([str(plan.calls)] if plan.calls.num > 1 else []),
    ]
    parts += [f"activations {savings_text(plan)}"] if plan.activations else []
    parts += [f"lean {lean_text(plan)}"] if plan.lean is not None else []
    trained = [bucket for bucket in plan.buckets if bucket.trainable]
    total = sum(bucket.numel for bucket in trained)
    narrower: Counter[str] = Counter()
    for bucket in trained:
        if bucket.state_dtype is not None:
            narrower[bucket.state_dtype] += bucket.numel
    parts += [f"moments of {numel / total:.0%} in {dtype}" for dtype, numel in narrower.items()]
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


def layer_of_group(group: GroupId) -> str:
    """Return the layer of a group: `transformer.h.3` for `transformer.h.3.matmul`. Without a dot it is the whole
    name."""
    return group.rpartition(".")[0] or group


def saving_answers(plan: Plan) -> tuple[SavingAnswer, ...]:
    """Return bytes and layers of activations by treatment; empty for a plan that keeps all."""
    found: list[SavingAnswer] = []
    for saving in Saving if plan.activations else ():
        own = [group for group in plan.activations if group.saving is saving]
        nbytes = sum(group.nbytes for group in own)
        num_layers = len({layer_of_group(group.id) for group in own})
        found.append(SavingAnswer(saving=saving, nbytes=nbytes, num_layers=num_layers))
    return tuple(found)


def savings_text(plan: Plan) -> str:
    """Return the bytes by treatment, as `210 MiB kept, 400 MiB recomputed`; empty for a plan that keeps all."""
    return ", ".join(
        f"{format_bytes(found.nbytes)} {SAID[found.saving]}" for found in saving_answers(plan) if found.nbytes
    )


def lean_text(plan: Plan) -> str:
    """Return how many outstanding forwards are lean, and their bytes by treatment; empty if none is."""
    if plan.lean is None:
        return ""
    number = f"{plan.calls.outstanding - plan.lean.num_full} of {plan.calls.outstanding} outstanding forwards"
    return f"{number}: {savings_text(plan.of_lean_calls()) or 'all kept'}"
