"""A step graph as a line of records, see `linear`, and back.

An op without a number in its name is the first of its kind, as fx counts: `mm`, `mm_1`, `mm_2`.
"""

import re
from collections.abc import Iterable

from elixir_compile.analysis.linear import Line, Record, names_of, record
from elixir_compile.ir import Op, OpId, StepGraph, Storage, StorageId

_NODE = re.compile(r"((?:fwd|bwd)\.[^.]*)(.*)")
_NUMBER = re.compile(r"_\d+$")
_FIRST = "_0"


def line_of(graph: StepGraph) -> list[Record]:
    """Return `graph` as a line: each storage, op, read, write, output and alias is a record."""
    line = [record(("graph", graph.name, graph.symbols))]
    for storage in graph.storages:
        fixed = ("storage", storage.nbytes, storage.kind, storage.dtype, storage.size, storage.of is None)
        line.append(record(fixed, _counted(storage.id), storage.of or ""))
    for op in graph.ops:
        costs = (op.flops, op.moved_bytes, op.flops_size, op.kernel, op.once)
        line.append(record(("op", op.target, op.phase, op.source, *costs), _counted(op.id), op.module))
        line += [record(("read",), _counted(name)) for name in op.reads]
        line += [record(("write",), _counted(name)) for name in op.writes]
    line += [record(("output",), _counted(name)) for name in graph.outputs]
    line += [record(("alias",), _counted(value), _counted(name)) for value, name in graph.aliases]
    return line


def graph_of_line(line: Line) -> StepGraph:
    """Return the graph that `line` says; records of other kinds are passed over. A graph with names that `line_of`
    cannot tell apart, as `mm_0` from `mm`, comes back as another one.

    Raises InvalidPlan for a graph that cannot be.
    """
    kinds: dict[object, list[Record]] = {}
    ops: list[tuple[Record, list[Record], list[Record]]] = []
    for entry in line:
        kind = entry.fixed[0]
        if kind == "op":
            ops.append((entry, [], []))
        elif kind in ("read", "write"):
            ops[-1][1 if kind == "read" else 2].append(entry)
        else:
            kinds.setdefault(kind, []).append(entry)
    _, name, symbols = kinds["graph"][0].fixed
    return StepGraph(
        name=name,
        ops=tuple(_op(*parts) for parts in ops),
        storages=tuple(_storage(entry) for entry in kinds.get("storage", [])),
        outputs=tuple(_storage_id(entry) for entry in kinds.get("output", [])),
        aliases=tuple(_alias(entry) for entry in kinds.get("alias", [])),
        symbols=symbols,
    )


def _op(entry: Record, reads: Iterable[Record], writes: Iterable[Record]) -> Op:
    _, target, phase, source, flops, moved_bytes, flops_size, kernel, once = entry.fixed
    name, module = names_of(entry)
    return Op(
        id=OpId(_uncounted(name)),
        target=target,
        phase=phase,
        reads=tuple(_storage_id(read) for read in reads),
        writes=tuple(_storage_id(write) for write in writes),
        flops=flops,
        moved_bytes=moved_bytes,
        module=module,
        source=source,
        flops_size=flops_size,
        kernel=kernel,
        once=once,
    )


def _storage(entry: Record) -> Storage:
    _, nbytes, kind, dtype, size, is_of_none = entry.fixed
    name, of = names_of(entry)
    return Storage(
        id=StorageId(_uncounted(name)),
        nbytes=nbytes,
        kind=kind,
        dtype=dtype,
        of=None if is_of_none else StorageId(of),
        size=size,
    )


def _alias(entry: Record) -> tuple[str, StorageId]:
    value, name = names_of(entry)
    return _uncounted(value), StorageId(_uncounted(name))


def _storage_id(entry: Record) -> StorageId:
    return StorageId(_uncounted(names_of(entry)[0]))


def _counted(name: str) -> str:
    """Return the name of a node, or of what it made, with a number also for the first of its kind."""
    if (node := _NODE.match(name)) is None or _NUMBER.search(node[1]):
        return name
    return node[1] + _FIRST + node[2]


def _uncounted(name: str) -> str:
    node = _NODE.match(name)
    return name if node is None else node[1].removesuffix(_FIRST) + node[2]
