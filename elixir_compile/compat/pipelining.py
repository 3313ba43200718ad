"""The schedules of torch.distributed.pipelining: their stages, and the order in which they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStage:
    """A stage on this rank, as its schedule runs it."""

    module: torch.nn.Module
    index: int
    is_first: bool
    is_last: bool
    num_micro_batches: int
    order: str
    """A letter for each forward (`F`), backward (`B`) or half of a backward (`S`) of the stage, in order."""
    micro_batches: Sequence[int]
    """The micro-batch of each letter of `order`."""
    num_sent: int
    """How many outputs, and gradients of inputs, the schedule holds after it has sent them: all, if it keeps the
    handles of its sends until the step ends."""
    scales: bool
    """Whether the schedule divides the gradients by the number of micro-batches after the last backward."""


def scheduled_stages(schedule: object) -> Sequence[ScheduledStage] | None:
    """Return the stages of this rank in `schedule`; None if it is no schedule of torch.distributed.pipelining.

    `PipelineScheduleSingle` and `PipelineScheduleMulti` with `_stage`, `_stages`, `_n_microbatches`, `scale_grads` and
    `pipeline_order`, whose actions have `stage_index`, `microbatch_index`, `computation_type` and `sub_actions`, of
    which the types "F", "B", "I", "W" and "OVERLAP_F_B" are read; `submod`, `stage_index`, `num_stages`, `is_first` and
    `is_last` of a stage: torch 2.11 and 2.13. Gone: AttributeError when a module is prepared for a schedule.
    """
    from torch.distributed.pipelining import schedules

    if isinstance(schedule, schedules.PipelineScheduleSingle):
        stage, number = schedule._stage, schedule._n_microbatches
        warm_up = min(number, stage.num_stages - stage.stage_index)
        is_1f1b = isinstance(schedule, schedules.Schedule1F1B)
        order = "F" * warm_up + "BF" * (number - warm_up) + "B" * warm_up if is_1f1b else "F" * number + "B" * number
        turns = [(letter, order[:at].count(letter)) for at, letter in enumerate(order)]
        return [_stage(schedule, stage, turns, number, num_sent=1 if is_1f1b else number)]
    if not isinstance(schedule, schedules.PipelineScheduleMulti):
        return None
    number = schedule._n_microbatches
    actions = [action for action in schedule.pipeline_order[schedule.rank] if action is not None]
    return [
        _stage(schedule, own, _turns(actions, own.stage_index), number, num_sent=number) for own in schedule._stages
    ]


def scheduled_runs(schedule: object) -> Sequence[tuple[int, str, int]]:
    """Return the forwards (`F`) and backward passes (`B`) of this rank in a step of `schedule`, in order: the place of
    the stage among `scheduled_stages`, the letter, and the micro-batch.

    For a schedule of which `scheduled_stages` returns the stages, and not None.
    """
    stages = scheduled_stages(schedule)
    assert stages is not None, "it is no schedule of torch"
    if len(stages) == 1:
        return [(0, *turn) for turn in zip(stages[0].order, stages[0].micro_batches, strict=True)]
    rank_order: Any = schedule
    actions = [action for action in rank_order.pipeline_order[rank_order.rank] if action is not None]
    found: list[tuple[int, str, int]] = []
    for action in actions:
        for place, own in enumerate(stages):
            found += [(place, *turn) for turn in _turns([action], own.index)]
    return found


def _stage(
    schedule: Any, stage: Any, turns: Sequence[tuple[str, int]], number: int, *, num_sent: int
) -> ScheduledStage:
    return ScheduledStage(
        module=stage.submod,
        index=stage.stage_index,
        is_first=stage.is_first,
        is_last=stage.is_last,
        num_micro_batches=number,
        order="".join(letter for letter, _ in turns),
        micro_batches=tuple(micro_batch for _, micro_batch in turns),
        num_sent=num_sent,
        scales=schedule.scale_grads,
    )


def _turns(actions: Sequence[Any], index: int) -> Sequence[tuple[str, int]]:
    """Return the letter and the micro-batch of each of `actions` on the stage `index`."""
    letters = {"F": "F", "B": "B", "I": "S", "W": "S"}
    parts = (part for action in actions for part in action.sub_actions or (action,) if part.stage_index == index)
    found = ((letters.get(part.computation_type.value, ""), part.microbatch_index) for part in parts)
    return [(letter, micro_batch) for letter, micro_batch in found if letter]
