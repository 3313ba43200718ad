"""Find the storages that a fusing compiler never writes to memory, and remove them from a graph.

A pointwise result is computed inside the kernels that read it. It needs memory only if it is read by an opaque kernel
(a matrix product, an attention kernel), by the other half of the step, or by the caller. This is a model of Inductor,
not a copy of its scheduler: `docs/memory.md` has the measured error.

```text
  op                 reads   writes            as it is run
  fwd.mm             x w     h                 reads x w    writes h
  fwd.gelu           h       g     pointwise   computed inside `sum`: reads and writes nothing
  fwd.sum            g       s     reduction   reads h      writes s
```
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import MappingProxyType

from elixir_compile.ir import Kernel, Kind, Op, OpId, StepGraph, StorageId

_MOST_READS = 4
"""The value of Inductor's `realize_reads_threshold`."""
_NO_OPS: Mapping[OpId, Op] = MappingProxyType({})


def fused(graph: StepGraph, *, is_divided: bool = False, like: Mapping[OpId, Op] = _NO_OPS) -> StepGraph:
    """Return `graph` as a fusing compiler runs it: readers of an unwritten storage read its inputs
    instead.

    If the graph `is_divided` into micro-batches, results of ops that mix the batch and random numbers are always
    written. `like` are the fused ops of the same graph with other recomputed ops, by id: they are used again if they
    are the same, because it takes longer to make an op than to find it.
    """
    absorbed = absorbed_storages(graph, is_divided=is_divided)
    if not absorbed:
        return graph
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    inputs: dict[StorageId, tuple[StorageId, ...]] = {}
    ops: list[Op] = []
    for op in graph.ops:
        reads = op.reads
        if not absorbed.isdisjoint(reads):
            reads = tuple(dict.fromkeys(name for read in reads for name in inputs.get(read, (read,))))
        writes, known = op.writes, like.get(op.id)
        if writes and writes[-1] in absorbed:
            inputs[writes[-1]] = reads
            is_known = known is not None and not known.reads and known.writes == writes[:-1]
            ops.append(known if known is not None and is_known else _emptied(op))
        elif reads == op.reads:
            ops.append(op)
        elif known is not None and known.reads == reads and known.writes == writes:
            ops.append(known)
        else:
            ops.append(reading(op, reads, sum(nbytes[name] for name in (*reads, *writes))))
    storages = tuple(storage for storage in graph.storages if storage.id not in absorbed)
    aliases = tuple(alias for alias in graph.aliases if alias[1] not in absorbed)
    return replace(graph, ops=tuple(ops), storages=storages, aliases=aliases)


def absorbed_storages(graph: StepGraph, *, is_divided: bool = False) -> frozenset[StorageId]:
    """Return the storages that are never written: temporaries of a single pointwise op, read only by fusible
    kernels; if the graph `is_divided`, without results of ops that mix the batch and without random numbers."""
    makers: dict[StorageId, Op] = {}
    rewritten: set[StorageId] = set()
    for op in graph.ops:
        for name in op.writes:
            if name in makers:
                rewritten.add(name)
            makers[name] = op
    kind_of = {storage.id: storage.kind for storage in graph.storages}
    candidates = {
        op.writes[-1]  # earlier writes of the first op are tangents
        for op in graph.ops
        if op.kernel is Kernel.POINTWISE
        and op.writes
        and kind_of[op.writes[-1]] is Kind.TEMP
        and op.writes[-1] not in rewritten
        and not (is_divided and _stays_apart(op))
    }
    if not candidates:
        return frozenset()
    candidates.difference_update(graph.outputs)
    for op in graph.ops:
        if op.kernel is Kernel.OPAQUE:
            candidates.difference_update(op.reads)
            continue
        for name in op.reads:
            if name in candidates and op.phase is not makers[name].phase:
                candidates.discard(name)
    return frozenset(candidates - _written_for_reuse(graph, candidates))


def _stays_apart(op: Op) -> bool:
    """Return whether the result of `op` must not be computed again by each reader, which may run in another number of
    micro-batches: the op mixes the batch, or it draws random numbers, others for another number."""
    return bool(op.mixes) or is_drawn(op)


def is_drawn(op: Op) -> bool:
    """Return whether `op` draws random numbers from a seed, so that it may run twice."""
    return op.target.startswith("prims.inductor_rand")


def _written_for_reuse(graph: StepGraph, absorbed: AbstractSet[StorageId]) -> set[StorageId]:
    """Return the storages of `absorbed` written by Inductor nevertheless.

    Several ops read such a storage, and each would have to read more than `_MOST_READS` storages instead. So a residual
    sum over layers is written once every few layers.
    """
    num_readers = Counter(itertools.chain.from_iterable(op.reads for op in graph.ops))
    written: set[StorageId] = set()
    leaves: dict[StorageId, frozenset[StorageId]] = {}
    for op in graph.ops:
        if not op.writes or (made := op.writes[-1]) not in absorbed:
            continue
        read = frozenset(leaf for name in op.reads for leaf in leaves.get(name, (name,)))
        if len(read) > _MOST_READS and num_readers[made] > 1:
            written.add(made)
        else:
            leaves[made] = read
    return written


def _emptied(op: Op) -> Op:
    """Return `op` without its fused result. It is opaque, so fusing again changes nothing."""
    # Not `replace`, which takes three times as long: a search fuses 40,000 ops.
    return Op(
        id=op.id,
        target=op.target,
        phase=op.phase,
        reads=(),
        writes=op.writes[:-1],
        module=op.module,
        source=op.source,
        once=op.once,
        mixes=op.mixes,
    )


def reading(op: Op, reads: tuple[StorageId, ...], moved_bytes: int | None = None) -> Op:
    """Return `op`, an op that runs once in a step, with other `reads` and, if it is given, other `moved_bytes`."""
    return Op(
        id=op.id,
        target=op.target,
        phase=op.phase,
        reads=reads,
        writes=op.writes,
        flops=op.flops,
        moved_bytes=op.moved_bytes if moved_bytes is None else moved_bytes,
        module=op.module,
        source=op.source,
        flops_size=op.flops_size,
        kernel=op.kernel,
        once=op.once,
        mixes=op.mixes,
        ring=op.ring,
        launches=op.launches,
    )
