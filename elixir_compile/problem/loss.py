"""Decide whether the loss of a captured graph is computed in chunks over its tokens, without all logits at once.

The step is first planned as captured. If this plan keeps everything on the device, chunks gain nothing. If it moves or
drops something, or if nothing fits, the step with a chunked loss is captured and planned too, and the plan with the
shorter step is taken. Computing the logits a second time in the backward costs a matrix product, and saves their bytes
two or three times.
"""

from dataclasses import dataclass, replace

from torch import fx

from elixir_compile.capture.loss import LossRegion, find_loss
from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Decision, Plan, Saving, Tier
from elixir_compile.options import Options
from elixir_compile.units import MIB, format_bytes, format_s

_LEAST_BYTES = 16 * MIB
"""Logits with fewer bytes are not chunked: they are not the peak of any step."""
_CHUNK_BYTES = 64 * MIB
"""Bytes of the logits of a chunk: a matrix product with so many results is as fast as a larger product."""
_MIN_CHUNKS, _MAX_CHUNKS = 8, 64
_SHARED_CHUNKS, _LEAST_CLASSES = 16, 1024
"""Chunks, and the fewest classes, on several ranks. Batches, and so logits, may differ in size between ranks, so the
number of classes decides: logits of fewer classes are rarely the peak."""
LOSS = "loss"
"""The subject of the decision about chunks."""
_GAIN = 0.01
"""Share of the step that a chunked loss must save to be taken."""
Unchunked = Plan | NoFeasiblePlan
"""The plan of the step with its loss as the model computes it, or the error if nothing fits."""


class Pressed(BaseException):
    """Ends a compilation with a plan that is not used yet; no `Exception`, as the compiler would wrap it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The loss region of a graph, and the number of chunks into which it could be split."""

    region: LossRegion
    num_chunks: int


def chunks_of(gm: fx.GraphModule, options: Options, *, is_dtensor: bool = False) -> Chunks | None:
    """Return how the loss of `gm`, a graph of Dynamo, could be chunked; None if chunks would save little.

    If parameters are sharded (`is_dtensor`), the answer is the same for all graphs that differ in sizes alone.
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
    """Return whether `plan` keeps optimizer state off the device, or offloads or recomputes activations."""
    is_moved = any(home.optim is not Tier.DEVICE for home in plan.placements)
    return is_moved or any(group.saving is not Saving.KEEP for group in plan.activations)


def raise_smaller_need(unchunked: Unchunked, chunked: NoFeasiblePlan) -> None:
    """If the step fits neither unchunked nor chunked, raise the error of the step that needs fewer bytes."""
    if isinstance(unchunked, NoFeasiblePlan):
        is_chunked_less = chunked.memory == unchunked.memory and chunked.needed_bytes < unchunked.needed_bytes
        raise chunked if is_chunked_less else unchunked


def if_better(chunks: Chunks, chunked: Plan, unchunked: Unchunked) -> Plan | None:
    """Return the plan `chunked` with the decision for it if its step is shorter than `unchunked`; else None."""
    if chunked.loss_chunks > 1:
        return chunked  # in force since an earlier capture of the same step
    if isinstance(unchunked, NoFeasiblePlan):
        other = f"whole: needs {format_bytes(unchunked.needed_bytes)}"
    else:
        saved_s = unchunked.prediction.step_s - chunked.prediction.step_s
        if saved_s <= _GAIN * unchunked.prediction.step_s:
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
    """Return `plan`, a later plan of the graph of `before`, with the decision of `before` about the loss."""
    if before.loss_chunks == 1 or plan.loss_chunks > 1:
        return plan
    decided = tuple(decision for decision in before.decisions if decision.subject == LOSS)
    return replace(plan, decisions=(*plan.decisions, *decided), loss_chunks=before.loss_chunks)
