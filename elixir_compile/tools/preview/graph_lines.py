"""Turn a graph into a line of records, see `linear`, and back.

A name without a number is number 0 of its kind, as fx counts: `mm`, `mm_1`, `mm_2`.
"""

import re
from collections.abc import Iterable, Mapping

from elixir_compile.ir import Op, OpId, StepGraph, Storage, StorageId
from elixir_compile.tools.preview.linear import Line, Record, names_of, record, sized

_NODE = re.compile(r"((?:fwd|bwd)\.[^.]*)(.*)")
_NUMBER = re.compile(r"_\d+$")
_FIRST = "_0"


def line_of(graph: StepGraph) -> list[Record]:
    """Return `graph` as a line: each storage, op, read, write, output and alias is a record.

    The record of a storage also names the module of the op writing it. So layers of an encoder differ from layers
    of a decoder, and the last layer differs from the ops after it.
    """
    modules = {name: op.module for op in reversed(graph.ops) for name in op.writes}
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    line = [record(("graph", graph.name, graph.symbols, graph.batch, graph.batch_size, graph.undivided))]
    for storage in graph.storages:
        slices = (storage.batched, storage.consecutive)
        fixed = ("storage", storage.kind, storage.dtype, storage.size, storage.of is None, *slices)
        names = (_counted(storage.id), storage.of or "", modules.get(storage.id, ""))
        line.append(sized(record(fixed, *names), storage.nbytes))
    for op in graph.ops:
        touched_bytes = sum(nbytes[name] for name in (*op.reads, *op.writes))
        moved_bytes = None if op.moved_bytes == touched_bytes else op.moved_bytes  # the update op moves no bytes
        costs = (op.flops, moved_bytes, op.flops_size, op.kernel, op.once, op.mixes, op.ring, op.launches)
        line.append(record(("op", op.target, op.phase, op.source, *costs), _counted(op.id), op.module))
        line += [record(("read",), _counted(name)) for name in op.reads]
        line += [record(("write",), _counted(name)) for name in op.writes]
    line += [record(("output",), _counted(name)) for name in graph.outputs]
    line += [
        record(("alias",), _counted(value), _counted(name), modules.get(name, "")) for value, name in graph.aliases
    ]
    return line


def graph_of_line(line: Line) -> StepGraph:
    """Return the graph in `line`; records of other kinds are ignored.

    If the names `mm` and `mm_0` both occur, which `line_of` cannot tell apart, the result is another graph than before.
    Raises InvalidPlan if the graph contradicts itself.
    """
    kinds: dict[object, list[Record]] = {}
    ops: list[tuple[Record, list[Record], list[Record]]] = []
    for entry in line:
        kind = entry.fixed[0]
        if kind == "op":
            ops.append((entry, [], []))
        elif kind == "read":
            ops[-1][1].append(entry)
        elif kind == "write":
            ops[-1][2].append(entry)
        else:
            kinds.setdefault(kind, []).append(entry)
    _, name, symbols, batch, batch_size, undivided = kinds["graph"][0].fixed
    storages = tuple(_storage(entry) for entry in kinds.get("storage", []))
    nbytes = {storage.id: storage.nbytes for storage in storages}
    return StepGraph(
        name=name,
        ops=tuple(_op(*parts, nbytes) for parts in ops),
        storages=storages,
        outputs=tuple(_storage_id(entry) for entry in kinds.get("output", [])),
        aliases=tuple(_alias(entry) for entry in kinds.get("alias", [])),
        symbols=symbols,
        batch=batch,
        batch_size=batch_size,
        undivided=undivided,
    )


def _op(entry: Record, reads: Iterable[Record], writes: Iterable[Record], nbytes: Mapping[StorageId, int]) -> Op:
    _, target, phase, source, flops, moved_bytes, flops_size, kernel, once, mixes, ring, launches = entry.fixed
    name, module = names_of(entry)
    touched = [[_storage_id(other) for other in others] for others in (reads, writes)]
    if moved_bytes is None:
        moved_bytes = sum(nbytes.get(other, 0) for others in touched for other in others)
    return Op(
        id=OpId(_uncounted(name)),
        target=target,
        phase=phase,
        reads=tuple(touched[0]),
        writes=tuple(touched[1]),
        flops=flops,
        moved_bytes=moved_bytes,
        module=module,
        source=source,
        flops_size=flops_size,
        kernel=kernel,
        once=once,
        mixes=mixes,
        ring=ring,
        launches=launches,
    )


def _storage(entry: Record) -> Storage:
    _, kind, dtype, size, is_of_none, batched, consecutive = entry.fixed
    name, of, _ = names_of(entry)
    return Storage(
        id=StorageId(_uncounted(name)),
        nbytes=entry.numbers[-1],
        kind=kind,
        dtype=dtype,
        of=None if is_of_none else StorageId(of),
        size=size,
        batched=batched,
        consecutive=consecutive,
    )


def _alias(entry: Record) -> tuple[str, StorageId]:
    value, name, _ = names_of(entry)
    return _uncounted(value), StorageId(_uncounted(name))


def _storage_id(entry: Record) -> StorageId:
    return StorageId(_uncounted(names_of(entry)[0]))


def _counted(name: str) -> str:
    """Return the name of a node or of its result, with `_0` added for the first of its kind."""
    if (node := _NODE.match(name)) is None or _NUMBER.search(node[1]):
        return name
    return node[1] + _FIRST + node[2]


def _uncounted(name: str) -> str:
    node = _NODE.match(name)
    return name if node is None else node[1].removesuffix(_FIRST) + node[2]
