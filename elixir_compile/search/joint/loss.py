"""Decide whether the loss of a captured graph is computed in chunks over its tokens, without all logits at once.

The step is first planned with its loss whole. If this plan keeps everything on the device, chunks gain nothing. If it
moves or drops something, or if nothing fits, the step with a chunked loss is captured and planned too, and the plan
with the shorter step is taken. Computing the logits a second time in the backward costs a matrix product, and saves
their bytes two or three times.

`with_chosen_loss` takes the decision; `session.backend` compiles the forms of the loss that it asks for, and `tools.plan`
plans them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import MIB, format_bytes, format_s
from elixir_compile.ir import Decision, Plan, Saving, Tier
from elixir_compile.ir.graph import LossRegion

Made = TypeVar("Made")
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


class NotTaken(BaseException):
    """Ends a compilation with a plan that is not used; no `Exception`, as the compiler would wrap it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The loss region of a graph, and the number of chunks into which it could be split."""

    region: LossRegion
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAttempt:
    """A form of the loss, with which the caller captures and plans the step."""

    chunks: Chunks | None = None
    """The loss region and its number of chunks, 1 for a whole loss; None if the graph has no loss to chunk."""
    review: Callable[[Plan], Plan] | None = None
    """Given the first plan, returns the plan to use, or raises NotTaken; None if any plan is used as it is."""
    instead_of: Unchunked | None = None
    """The plan with the loss whole that a plan in chunks would replace, or the error if nothing fits."""
    is_last: bool = False
    """Whether no other attempt follows, so that the captured graph may be changed."""
    keeps_whole: bool = False
    """Whether the batch may not be divided into micro-batches under the option micro_batches="fit"."""

    @property
    def num_chunks(self) -> int | None:
        """The number of chunks, 1 for a whole loss; None if the graph has no loss to chunk."""
        return None if self.chunks is None else self.chunks.num_chunks

    def options_of(self, options: Options) -> Options:
        """Return `options` with `keeps_whole` applied."""
        return replace(options, micro_batches=1) if self.keeps_whole else options

    @property
    def cut(self) -> Chunks | None:
        """The chunks into which the loss has to be cut; None if it stays whole."""
        return self.chunks if self.chunks is not None and self.chunks.num_chunks > 1 else None


def possible_chunks(region: LossRegion | None, options: Options, *, is_shared: bool = False) -> Chunks | None:
    """Return how `region`, the loss of a graph, could be chunked; None if chunks would save little.

    If parameters are sharded over several ranks (`is_shared`), the answer is the same for all graphs that differ in
    sizes alone.
    """
    if region is None or options.activations not in ("any", "recompute"):
        return None
    if is_shared:
        is_large = region.num_classes >= _LEAST_CLASSES
        return Chunks(region=region, num_chunks=_SHARED_CHUNKS) if is_large else None
    if region.logits_bytes < _LEAST_BYTES:
        return None
    wanted = max(_MIN_CHUNKS, -(-region.logits_bytes // _CHUNK_BYTES))
    num_chunks = min(1 << (wanted - 1).bit_length(), _MAX_CHUNKS, region.num_tokens)
    return Chunks(region=region, num_chunks=num_chunks) if num_chunks > 1 else None


def decided_chunks(asked: Plan | None, alike: Iterable[int | None]) -> int | None:
    """Return the number of chunks of the loss if it is decided already, else None.

    It is the number of `asked`, the plan given by the user, or else the first number in `alike`: the numbers of earlier
    graphs of several ranks, as the other ranks may not compile again.
    """
    if asked is not None:
        return asked.loss_chunks
    return next((count for count in alike if count is not None), None)


def with_chosen_loss(
    chunks: Chunks | None,
    make: Callable[[LossAttempt], Made],
    *,
    decided: int | None = None,
    is_training: bool = True,
    is_whole_first: bool = False,
) -> Made:
    """Return the result of `make` with the loss whole, or with its loss in `chunks` if that plan is better.

    `make` captures and plans the step with the loss of an attempt, and calls the `review` of the attempt with the plan.
    `decided` is the number of chunks if it is decided already. If the whole batch comes first (`is_whole_first`), it
    is divided into micro-batches only if it fits with neither form of the loss. Raises NoFeasiblePlan if nothing fits.
    """
    if chunks is None:
        return make(LossAttempt(is_last=True))
    if decided is not None:
        own = replace(chunks, num_chunks=decided)
        return make(LossAttempt(chunks=own, review=partial(replace, loss_chunks=decided), is_last=True))
    if is_whole_first and is_training:

        def make_whole(attempt: LossAttempt) -> Made:
            return make(replace(attempt, keeps_whole=True, is_last=False))

        try:
            return _with_better_loss(chunks, make_whole, is_training=is_training)
        except NoFeasiblePlan as error:
            if error.because or error.memory != "device":
                raise
    return _with_better_loss(chunks, make, is_training=is_training)


def _with_better_loss(chunks: Chunks, make: Callable[[LossAttempt], Made], *, is_training: bool) -> Made:
    whole = replace(chunks, num_chunks=1)
    try:
        # Without a backward, chunks never make the step shorter; they are tried only if the step does not fit.
        return make(LossAttempt(chunks=whole, review=_unpressed if is_training else None))
    except NoFeasiblePlan as error:
        if error.because:  # other ranks run other graphs, and do not try chunks
            raise
        # Compiled code keeps `review`, and with it this error; the frames of its traceback hold the failed capture.
        unchunked: Unchunked = error.renewed()
    except NotTaken as refused:
        unchunked = refused.plan
    try:
        review = partial(_taken_if_better, chunks, unchunked)
        return make(LossAttempt(chunks=chunks, review=review, instead_of=unchunked))
    except NoFeasiblePlan as error:
        _raise_smaller_need(unchunked, error)
    except NotTaken:
        pass
    if isinstance(unchunked, NoFeasiblePlan):
        raise unchunked.renewed()
    return make(LossAttempt(chunks=whole, is_last=True))


def _unpressed(plan: Plan) -> Plan:
    """Return `plan` if it keeps all activations and optimizer state on the device; else raise NotTaken."""
    if is_pressed(plan):
        raise NotTaken(plan)
    return plan


def _taken_if_better(chunks: Chunks, unchunked: Unchunked, plan: Plan) -> Plan:
    """Return `plan`, of the step with its loss in `chunks`, if it is better than `unchunked`; else raise NotTaken."""
    found = if_better(chunks, plan, unchunked)
    if found is None:
        raise NotTaken(plan)
    return found


def is_pressed(plan: Plan) -> bool:
    """Return whether `plan`, or that of a rank with another, keeps optimizer state off the device, or offloads or
    recomputes activations. So all ranks answer alike."""
    if any(line.is_pressed for line in plan.classes):
        return True
    is_moved = any(home.optim is not Tier.DEVICE for home in plan.placements)
    return is_moved or any(group.saving is not Saving.KEEP for group in plan.activations)


def _raise_smaller_need(unchunked: Unchunked, chunked: NoFeasiblePlan) -> None:
    """If the step fits neither unchunked nor chunked, raise the error of the step that needs fewer bytes."""
    if isinstance(unchunked, NoFeasiblePlan):
        is_chunked_less = chunked.memory == unchunked.memory and chunked.needed_bytes < unchunked.needed_bytes
        raise (chunked if is_chunked_less else unchunked).renewed()


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
