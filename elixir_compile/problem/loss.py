"""Whether the loss of a captured graph is computed in chunks over its tokens, so that its logits never exist whole.

A plan of the step as captured comes first. Where it keeps everything there is nothing to gain. Where it has to move or
drop something, or nothing fits, the step with a chunked loss is captured too, and the plan with the shorter step is
taken: computing the logits a second time in the backward costs a matrix product, and saves their bytes two or three
times.
"""

from dataclasses import dataclass, replace

from torch import fx

from elixir_compile.capture.loss import LossRegion, find_loss
from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Decision, Plan, Saving, Tier
from elixir_compile.options import Options
from elixir_compile.units import MIB, format_bytes, format_s

_LEAST_BYTES = 16 * MIB
"""Smaller logits are no one's peak."""
_CHUNK_BYTES = 64 * MIB
"""Logits of one chunk: a matrix product of so many results is as fast as a larger one."""
_MIN_CHUNKS, _MAX_CHUNKS = 8, 64
_SHARED_CHUNKS, _LEAST_CLASSES = 16, 1024
"""On several ranks, whose batches, and so whose logits, may differ in size: fewer classes are rarely the peak."""
LOSS = "loss"
"""What the decision about chunks is about."""
_GAIN = 0.01
"""A chunked loss has to make the step shorter by this share."""
Whole = Plan | NoFeasiblePlan
"""What was planned for the step with its loss as the model has it."""


class Pressed(BaseException):
    """Leaves the compiler with a plan that is not to be used yet; no `Exception`, which it would wrap."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The loss region of a graph and into how many chunks it could be split."""

    region: LossRegion
    num_chunks: int


def chunks_of(gm: fx.GraphModule, options: Options, *, is_dtensor: bool = False) -> Chunks | None:
    """Return how the loss of `gm`, a graph of Dynamo, could be chunked; None where that would save little.

    Where it `is_dtensor` by several ranks, it is the same for graphs that differ in sizes alone.
    """
    if options.activations not in ("any", "recompute"):
        return None
    region = find_loss(gm)
    if region is not None and is_dtensor:
        is_large = region.num_classes >= _LEAST_CLASSES
        return Chunks(region=region, num_chunks=_SHARED_CHUNKS) if is_large else None
    if region is None or region.logits_bytes < _LEAST_BYTES:
        return None
    wanted = max(_MIN_CHUNKS, -(-region.logits_bytes // _CHUNK_BYTES))
    num_chunks = min(1 << (wanted - 1).bit_length(), _MAX_CHUNKS, region.num_tokens)
    return Chunks(region=region, num_chunks=num_chunks) if num_chunks > 1 else None


def is_pressed(plan: Plan) -> bool:
    """Return whether `plan` moves or drops anything for want of memory."""
    is_moved = any(home.optim is not Tier.DEVICE for home in plan.placements)
    return is_moved or any(group.saving is not Saving.KEEP for group in plan.activations)


def least_short(whole: Whole, chunked: NoFeasiblePlan) -> None:
    """Raise, where the step fits neither whole nor chunked, the error that asks for fewer bytes."""
    if isinstance(whole, NoFeasiblePlan):
        is_chunked_less = chunked.memory == whole.memory and chunked.needed_bytes < whole.needed_bytes
        raise chunked if is_chunked_less else whole


def better(chunks: Chunks, chunked: Plan, whole: Whole) -> Plan | None:
    """Return the plan of the chunked step with the reason why it is taken instead of `whole`; None where it is not."""
    if chunked.loss_chunks > 1:
        return chunked  # in force since an earlier capture of the same step
    if isinstance(whole, NoFeasiblePlan):
        other = f"whole: needs {format_bytes(whole.needed_bytes)}"
    else:
        saved_s = whole.prediction.step_s - chunked.prediction.step_s
        if saved_s <= _GAIN * whole.prediction.step_s:
            return None
        other = f"whole: {format_s(saved_s)} longer"
    at = f" at {chunks.region.source}" if chunks.region.source else ""
    decision = Decision(
        subject=LOSS,
        choice=f"{chunks.num_chunks} chunks over tokens",
        because=f"the {format_bytes(chunks.region.logits_bytes)} of logits{at} never exist whole",
        rejected=(other,),
    )
    return replace(chunked, decisions=(*chunked.decisions, decision), loss_chunks=chunks.num_chunks)


def as_decided(plan: Plan, before: Plan) -> Plan:
    """Return `plan`, a later one of the same graph, with what the first plan `before` decided about the loss."""
    if before.loss_chunks == 1 or plan.loss_chunks > 1:
        return plan
    decided = tuple(decision for decision in before.decisions if decision.subject == LOSS)
    return replace(plan, decisions=(*plan.decisions, *decided), loss_chunks=before.loss_chunks)
