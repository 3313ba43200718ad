"""Write the device peak of a plan as a formula of the graph's symbols: `Max(4*s0*s1 + 1024, 8*s0 + 2048)`.

```text
  op         1     s0    s0*s1      a row of coefficients per op, by running sums as in `timeline`
  fwd.mm   1024     8      4
  bwd.mm   2048     8      0        rows never the largest, for symbols of 0 or more, are left out
```

The constant of a row is the plan's bytes at the op less the bytes of live storages with symbolic sizes. There is a
row for each op that runs, recomputed ops included, and for each reduce with buffers. Offloaded activations are in no
row of the ops while they are away.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Activations, Plan, StepGraph, kernels_digest, sizes
from elixir_compile.step.as_run import as_run
from elixir_compile.step.divide import laps_of
from elixir_compile.step.plan_rows import PlanRows
from elixir_compile.step.structure import check_activations, check_regions
from elixir_compile.step.timeline import with_peaks


def peak_formula(graph: StepGraph, plan: Plan) -> str:
    """Return the device peak under `plan` as an expression in sympy's form, or `""` if no size is symbolic, or if the
    step has several calls."""
    if plan.calls.num > 1:
        return ""
    step = as_run(graph, plan.activations, laps_of(plan))
    growing = [storage for storage in step.storages if storage.size]
    if not growing:
        return ""
    products = list(dict.fromkeys(name for storage in growing for name, _ in sizes.terms(storage.size) if name))
    column = {name: number for number, name in enumerate(products, start=1)}
    plan_rows = PlanRows(graph, plan)
    num = plan_rows.axis.ops.num
    changes = np.zeros((num + 1, len(products) + 1), dtype=np.int64)
    numbers = np.zeros(num + 1, dtype=np.int64)
    for storage in growing:
        for life in plan_rows.lives.get(storage.id, ()):
            if life.last < life.first:
                continue
            for name, coefficient in sizes.terms(storage.size):
                changes[life.first, column.get(name, 0)] += coefficient
                changes[life.last + 1, column.get(name, 0)] -= coefficient
            numbers[life.first] += storage.nbytes
            numbers[life.last + 1] -= storage.nbytes
    rows = np.cumsum(changes[:-1], axis=0)
    # Bytes of constant sizes. The constants of symbolic sizes are in the first column already.
    rows[:, 0] += plan_rows.nbytes - np.cumsum(numbers[:-1])
    # The distinct rows that no other row equals or exceeds in every column, largest first. In falling order a row can
    # only be dominated by an earlier row.
    highest: list[NDArray[np.int64]] = []
    for row in np.unique(rows, axis=0)[::-1]:
        if not highest or not (np.array(highest) >= row).all(axis=1).any():
            highest.append(row)
    texts = [sizes.sum_text([*zip(products, row[1:].tolist(), strict=True), ("", int(row[0]))]) for row in highest]
    return texts[0] if len(texts) == 1 else f"Max({', '.join(texts)})"


def plan_at(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with bytes at the sizes of `graph`, which has the same fingerprint, and as its kernels allocate.

    The predicted seconds stay those at the planned sizes.
    """
    is_same = plan.symbols == graph.symbols and plan.kernels == kernels_digest(graph)
    return plan if is_same else resized(graph, plan)


def resized(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with its bytes, peaks and formula computed for `graph`; the predicted seconds stay.

    Raises IllegalSchedule if regions or groups of activations do not fit the graph.
    """
    plan = replace(plan, activations=_resized_groups(graph, plan.activations))
    if plan.lean is not None:
        plan = replace(plan, lean=replace(plan.lean, activations=_resized_groups(graph, plan.lean.activations)))
    for own in (plan,) if plan.lean is None else (plan, plan.of_lean_calls()):
        check_activations(graph, own)
        check_regions(as_run(graph, own.activations, laps_of(own)), own)
    plan = with_peaks(graph, plan)
    formula = peak_formula(graph, plan)
    return replace(plan, formula=formula, symbols=graph.symbols, kernels=kernels_digest(graph))


def _resized_groups(graph: StepGraph, groups: Iterable[Activations]) -> tuple[Activations, ...]:
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    return tuple(replace(group, nbytes=sum(nbytes.get(name, 0) for name in group.storages)) for group in groups)
