"""The step of one number of rows to the step of another, without a new capture.

```text
  storage    EACH         bytes x b / B        one slice for each micro-batch, so also for each row
             SUM, SAME    bytes                sums over the batch, and what is equal for all rows
  op         writes EACH or SUM   flops x b / B
             else                 flops
             its moved bytes are shared among the storages that it touches, by their bytes; the part of EACH is
             x b / B
```

`B` are the rows of the capture, `b` the rows asked for. A graph with a dynamic number of rows is computed from its
sizes, exactly; one with a constant number is scaled, and each product is rounded up.
"""

from dataclasses import replace

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Batched, Op, StepGraph, graph_at


def graph_of_rows(graph: StepGraph, rows: int) -> StepGraph:
    """Return `graph` as it is with a batch of `rows` rows, 1 or more.

    Raises InvalidPlan if the graph does not say which storages and ops belong to the rows of a batch.
    """
    require_rows(graph)
    if rows < 1:
        raise InvalidPlan(f"graph {graph.name} is asked for {rows} rows; expected 1 or more.")
    if rows == graph.batch:
        return graph
    if graph.batch_size:
        return graph_at(graph, {graph.batch_size: rows})
    each = {storage.id: storage.nbytes for storage in graph.storages if storage.batched is Batched.EACH}
    shares = moved_shares(graph)
    counted = counted_by_rows(graph)
    storages = tuple(
        replace(storage, nbytes=_scaled(storage.nbytes, rows, graph.batch)) if storage.id in each else storage
        for storage in graph.storages
    )

    def at_rows(op: Op) -> Op:
        moved_each = round(op.moved_bytes * shares[op.id])
        flops = _scaled(op.flops, rows, graph.batch) if op.id in counted else op.flops
        return replace(
            op, flops=flops, moved_bytes=op.moved_bytes - moved_each + _scaled(moved_each, rows, graph.batch)
        )

    return replace(graph, ops=tuple(map(at_rows, graph.ops)), storages=storages, batch=rows)


def require_rows(graph: StepGraph) -> None:
    """Raise InvalidPlan unless `graph` says which storages and ops belong to the rows of its batch."""
    if graph.undivided or (graph.batch == 1 and not graph.batch_size):
        because = graph.undivided or "its inputs share no batch of two rows or more"
        raise InvalidPlan(f"graph {graph.name} cannot be priced for another number of rows: {because}.")


def counted_by_rows(graph: StepGraph) -> frozenset[str]:
    """Return the ids of the ops whose flops are proportional to the rows: they write slices of the batch, or sums."""
    batched = {storage.id for storage in graph.storages if storage.batched is not Batched.SAME}
    return frozenset(op.id for op in graph.ops if not batched.isdisjoint(op.writes))


def moved_shares(graph: StepGraph) -> dict[str, float]:
    """Return, by op, the share of its moved bytes that is proportional to the rows, 0 to 1."""
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    each = {storage.id for storage in graph.storages if storage.batched is Batched.EACH}
    found: dict[str, float] = {}
    for op in graph.ops:
        touched = dict.fromkeys((*op.reads, *op.writes))
        total_bytes = sum(nbytes[name] for name in touched)
        found[op.id] = sum(nbytes[name] for name in touched if name in each) / total_bytes if total_bytes else 0.0
    return found


def _scaled(number: int, rows: int, batch: int) -> int:
    return -(-number * rows // batch)
