"""Cut a step into laps: runs of consecutive ops that go through the batch together, one micro-batch after another.

```text
  op       embed  | mm  gelu  mm  add | mm  gelu  mm  add | norm  mm  loss || ...
  module   wte    | h.0  h.0  h.0 h.0 | h.1 h.1  h.1  h.1 | ln_f  head
  lap      0      | 1                 | 2                 | 3              || the backward begins with a lap of its own
```

Between two laps every value is the value of the whole batch. Within a lap, each micro-batch passes all ops before the
next micro-batch begins (layered gradient accumulation, arXiv 2106.02679). An op that mixes the rows of the batch is a
lap of its own and runs on the whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan
from elixir_compile.ir import Batched, Op, OpId, Phase, Plan, StepGraph
from elixir_compile.ir.graph import is_numbered, layer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """Consecutive ops of one phase, from `first` to `last` (included), that run in `micro_batches` micro-batches."""

    first: OpId
    last: OpId
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise InvalidPlan(f"the lap from {self.first} has {self.micro_batches} micro-batches; expected 1 or more.")


def laps(step: StepGraph, micro_batches: int) -> tuple[Lap, ...]:
    """Return the laps of the forward and the backward of `step`, in order, each in `micro_batches` if it can be
    divided, else in 1.

    `step` is a step as it runs, recomputed ops included. A lap begins at each phase, at each layer with a number, at
    the first op behind the last such layer that belongs to a module, and before and behind an op that mixes the batch.
    """
    firsts = _firsts(step.ops)
    ends = [*firsts[1:], sum(op.phase is not Phase.UPDATE for op in step.ops)]
    each = {storage.id for storage in step.storages if storage.batched is Batched.EACH}
    found: list[Lap] = []
    for first, end in zip(firsts, ends, strict=True):
        ops = step.ops[first:end]
        is_divided = not any(op.mixes for op in ops) and any(
            not each.isdisjoint(op.reads) or not each.isdisjoint(op.writes) for op in ops
        )
        found.append(Lap(first=ops[0].id, last=ops[-1].id, micro_batches=micro_batches if is_divided else 1))
    return tuple(found)


def divided_laps(step: StepGraph, micro_batches: int) -> tuple[Lap, ...]:
    """Return the laps of `step` that run in more than one micro-batch if the batch is divided by `micro_batches`."""
    if micro_batches == 1:
        return ()
    return tuple(lap for lap in laps(step, micro_batches) if lap.micro_batches > 1)


def laps_of(plan: Plan) -> tuple[Lap, ...]:
    """Return the regions of `plan` that run in more than one micro-batch, as laps."""
    return tuple(
        Lap(first=region.first, last=region.last, micro_batches=region.micro_batches)
        for region in plan.regions
        if region.micro_batches > 1
    )


def _firsts(ops: Sequence[Op]) -> list[int]:
    """Return the index of the first op of each lap."""
    behind = {op.phase: i for i, op in enumerate(ops) if is_numbered(layer_of(op.module))}
    found: list[int] = []
    layer, is_behind, phase, mixed = "", False, None, False
    for i, op in enumerate(ops):
        if op.phase is Phase.UPDATE:
            break
        own = layer_of(op.module)
        is_new = op.phase is not phase or mixed or bool(op.mixes)
        if op.phase is not phase:
            layer, is_behind, phase = "", False, op.phase
        if is_numbered(own) and own != layer:
            is_new, layer = True, own
        elif own and not is_behind and i > behind.get(op.phase, len(ops)):
            is_new, is_behind = True, True
        mixed = bool(op.mixes)
        if is_new:
            found.append(i)
    return found
