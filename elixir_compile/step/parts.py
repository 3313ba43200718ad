"""Find the values that stay in parts, one tensor per micro-batch, instead of filling a tensor of the whole batch.

```text
  lap that makes it    run @0    run @1    run @2    run @3        the body of micro-batch j makes part j
  device               0         0 1       0 1 2     0 1 2 3       part j stays as the body has made it
  lap that reads it    run @0    run @1    run @2    run @3        the body of micro-batch j reads part j
```

A value stays in parts if only divided laps touch it, all in the same number of micro-batches. It may be saved for the
backward, but not returned to the caller, nor offloaded: its copy to the host is one transfer. The parts must be
consecutive pieces of the storage.

A lap into which activations arrive in slices makes no parts. It counts the next slice during the whole lap, but in the
last micro-batch, which has all parts, no slice is next: the plan would count more than there is.

A step as it runs in micro-batches names the parts of all micro-batches but the last apart until the last is made:
`h.earlier`.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from elixir_compile.ir import Activations, Batched, Kind, Op, Phase, StepGraph, StorageId
from elixir_compile.step.laps import Lap
from elixir_compile.step.slices import Slices, offloaded_names

EARLIER = ".earlier"
"""Suffix of the storage that stands for the parts of a value before the part of the last micro-batch is made."""
_MADE = (Kind.TEMP, Kind.SAVED)


def earlier_name(name: StorageId) -> StorageId:
    """Return the storage that stands for the parts of `name` before the part of the last micro-batch is made."""
    return StorageId(f"{name}{EARLIER}")


def tangents_of_step(step: StepGraph) -> frozenset[StorageId]:
    """Return the storages that the backward of `step` gets from the caller."""
    first = next((op for op in step.ops if op.phase is Phase.BACKWARD), None)
    return frozenset(() if first is None else tangents_of(first))


def tangents_of(first: Op) -> tuple[StorageId, ...]:
    """Return the storages of the tangents among the writes of `first`, the first op of the backward.

    They come before its own result, whose storage has the name of the op.
    """
    results = {first.id, *(f"{first.id}.{place}" for place in range(1, len(first.writes)))}
    return first.writes[: next((place for place, name in enumerate(first.writes) if name in results), 0)]


def parts_of(
    step: StepGraph, laps: Sequence[Lap], activations: Sequence[Activations], slices: Slices
) -> frozenset[StorageId]:
    """Return the storages of `step` that stay in parts between `laps`, and storages that one of `laps` alone touches.

    `step` is the step as it runs with `activations`, before it is divided. `slices` are the offloaded storages that
    pass the link in slices.
    """
    may_stay = {s.id for s in step.storages if s.batched is Batched.EACH and s.consecutive and s.kind in _MADE}
    may_stay -= {*step.outputs, *offloaded_names(activations), *tangents_of_step(step)}
    if step.batch_size or not may_stay:
        return frozenset()
    numbers = _micro_batches(step, laps)
    touched: dict[StorageId, set[int]] = {}
    for op, number in zip(step.ops, numbers, strict=True):
        for name in (*op.reads, *op.writes):
            touched.setdefault(name, set()).add(number)
    times_written = Counter(name for op in step.ops for name in op.writes)
    found = {name for name in may_stay if times_written[name] == 1 and len(touched[name]) == 1}
    index = {op.id: i for i, op in enumerate(step.ops)}
    for lap in laps if slices.arriving else ():
        ops = step.ops[index.get(lap.first, len(step.ops)) : index.get(lap.last, -1) + 1]
        if any(op.phase is Phase.BACKWARD and not slices.arriving.isdisjoint(op.reads) for op in ops):
            found.difference_update(chain.from_iterable(op.writes for op in ops))
    return frozenset(name for name in found if touched[name] != {1})


def _micro_batches(step: StepGraph, laps: Sequence[Lap]) -> list[int]:
    """Return the number of micro-batches of each op of `step`."""
    index = {op.id: i for i, op in enumerate(step.ops)}
    found = [1] * len(step.ops)
    for lap in laps:
        first, end = index.get(lap.first, len(step.ops)), index.get(lap.last, -1) + 1
        found[first:end] = [lap.micro_batches] * max(end - first, 0)
    return found
