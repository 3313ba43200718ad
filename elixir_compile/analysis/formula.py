"""The device peak of a plan as a formula of the graph's symbols: `Max(4*s0*s1 + 1024, 8*s0 + 2048)`.

```text
  op         1     s0    s0*s1      one row of coefficients per op, by running sums as in `timeline`
  fwd.mm   1024     8      4
  bwd.mm   2048     8      0        rows that are nowhere the largest, for symbols of 0 or more, are left out
```

The constant of a row is what the timeline counts at that op less what the symbolic storages have there. Ops are those
that run: repeated ones have rows, and what is offloaded is in no row while it is away.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.analysis.recompute import as_run
from elixir_compile.analysis.structure import check_activations, check_regions
from elixir_compile.analysis.timeline import device_stays, plan_timeline, with_peaks
from elixir_compile.ir import Plan, StepGraph, sizes


def peak_formula(graph: StepGraph, plan: Plan) -> str:
    """Return the highest device bytes of any op under `plan`, as text that sympy reads; empty where no size is
    symbolic."""
    step = as_run(graph, plan.activations)
    growing = [storage for storage in step.storages if storage.size]
    if not growing:
        return ""
    products = list(dict.fromkeys(name for storage in growing for name, _ in sizes.terms(storage.size) if name))
    column = {name: number for number, name in enumerate(products, start=1)}
    stays = device_stays(graph, plan)
    changes = np.zeros((len(step.ops) + 1, len(products) + 1), dtype=np.int64)
    numbers = np.zeros(len(step.ops) + 1, dtype=np.int64)
    for storage in growing:
        for stay in stays.get(storage.id, ()):
            if stay.last < stay.first:
                continue
            for name, coefficient in sizes.terms(storage.size):
                changes[stay.first, column.get(name, 0)] += coefficient
                changes[stay.last + 1, column.get(name, 0)] -= coefficient
            numbers[stay.first] += storage.nbytes
            numbers[stay.last + 1] -= storage.nbytes
    rows = np.cumsum(changes[:-1], axis=0)
    # Bytes that are not symbolic; the constants of symbolic sizes are in the first column already.
    rows[:, 0] += np.array(plan_timeline(graph, plan).live_bytes, dtype=np.int64) - np.cumsum(numbers[:-1])
    highest = _undominated(rows)
    texts = [sizes.sum_text([*zip(products, row[1:].tolist(), strict=True), ("", int(row[0]))]) for row in highest]
    return texts[0] if len(texts) == 1 else f"Max({', '.join(texts)})"


def plan_at(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with the bytes that it has at the sizes of `graph`, a graph of the same fingerprint.

    Its seconds stay those of the sizes that it was planned for.
    """
    return plan if plan.symbols == graph.symbols else resized(graph, plan)


def resized(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with the bytes that it has in `graph`.

    Its seconds stay those that it was planned with. Raises IllegalSchedule where its regions or activations name what
    the graph does not have.
    """
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    groups = (replace(group, nbytes=sum(nbytes.get(name, 0) for name in group.storages)) for group in plan.activations)
    plan = replace(plan, activations=tuple(groups))
    check_activations(graph, plan)
    check_regions(as_run(graph, plan.activations), plan)
    plan = with_peaks(graph, plan)
    return replace(plan, formula=peak_formula(graph, plan), symbols=graph.symbols)


def _undominated(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the distinct rows that no other row is at least as large as in every column, the largest first."""
    found: list[NDArray[np.int64]] = []
    # In falling order a row is dominated, if at all, by one before it.
    for row in np.unique(rows, axis=0)[::-1]:
        if not found or not (np.array(found) >= row).all(axis=1).any():
            found.append(row)
    return found
