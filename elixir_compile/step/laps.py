"""Cut a step into laps: runs of consecutive ops that go through the batch together, one micro-batch after another.

```text
  op       embed  | mm  gelu  mm  add | mm  gelu  mm  add | norm  mm  loss || ...
  module   wte    | h.0  h.0  h.0 h.0 | h.1 h.1  h.1  h.1 | ln_f  head
  lap      0      | 1                 | 2                 | 3              || the backward begins with a lap of its own
```

Between two laps every value is the value of the whole batch, as one tensor or in parts (see `parts`). Within a lap,
each micro-batch passes all ops before the next micro-batch begins (layered gradient accumulation, arXiv 2106.02679). An
op that mixes the rows of the batch is a lap of its own and runs on the whole batch.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Batched, Op, OpId, Phase, Plan, Region, StepGraph
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
    the first op of another module behind the last such layer, and before and behind an op that mixes the batch.
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
    return laps_in(plan.regions)


def laps_in(regions: Iterable[Region]) -> tuple[Lap, ...]:
    """Return those of `regions` that run in more than one micro-batch, as laps."""
    return tuple(
        Lap(first=region.first, last=region.last, micro_batches=region.micro_batches)
        for region in regions
        if region.micro_batches > 1
    )


def micro_batches_of(plan: Plan) -> int:
    """Return the largest number of micro-batches of a region of `plan`: that of all its divided laps."""
    return max((region.micro_batches for region in plan.regions), default=1)


def _firsts(ops: Sequence[Op]) -> list[int]:
    """Return the index of the first op of each lap."""
    found: set[int] = set()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        places = [i for i, op in enumerate(ops) if op.phase is phase]
        found |= {*places[:1], *_layer_firsts(ops, places)}
        for i in places:
            found |= {i, i + 1} if ops[i].mixes else set()
    num_run = sum(op.phase is not Phase.UPDATE for op in ops)
    return sorted(i for i in found if i < num_run)


def _layer_firsts(ops: Sequence[Op], places: Sequence[int]) -> set[int]:
    """Return where the layers of a phase begin, and where the ops behind the last layer begin; `places` are the indices
    of the ops of the phase.

    A layer begins with the ops of the layer before its first matrix product. A compiler may move single pointwise ops
    of a layer to another place in the phase: they begin no lap.
    """
    by_layer: dict[str, list[int]] = {}
    for i in places:
        if is_numbered(layer := layer_of(ops[i].module)):
            by_layer.setdefault(layer, []).append(i)
    found: set[int] = set()
    end = -1
    for layer, indices in by_layer.items():
        products = [i for i in indices if ops[i].flops] or indices
        first = products[0]
        while first > places[0] and layer_of(ops[first - 1].module) == layer:
            first -= 1
        found.add(first)
        end = max(end, products[-1])
    if end >= 0:
        behind = (i for i in places if i > end and ops[i].module and not is_numbered(layer_of(ops[i].module)))
        found |= set(itertools.islice(behind, 1))
    return found
