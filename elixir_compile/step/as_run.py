"""Change a captured graph to what runs under a plan, without storages that a fusing compiler never writes, and with the
forward ops that the backward recomputes; or to the step of another number of rows.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from types import MappingProxyType

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import (
    Activations,
    Batched,
    Kernel,
    Kind,
    Op,
    OpId,
    Phase,
    Saving,
    StepGraph,
    Storage,
    StorageId,
    graph_at,
)
from elixir_compile.step.divide import Lap, divided, laps, parts_of, slices_of, tangents_of

# ----------------------------------------------------------------------------------------------------------------------
# Find the storages that a fusing compiler never writes to memory, and remove them from a graph.
#
# A pointwise result is computed inside the kernels that read it. It needs memory only if it is read by an opaque kernel
# (a matrix product, an attention kernel), by the other half of the step, or by the caller. This is a model of Inductor,
# not a copy of its scheduler: `docs/memory.md` has the measured error.
#
#   op                 reads   writes            as it is run
#   fwd.mm             x w     h                 reads x w    writes h
#   fwd.gelu           h       g     pointwise   computed inside `sum`: reads and writes nothing
#   fwd.sum            g       s     reduction   reads h      writes s


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
            # Without its fused result, it is opaque, so fusing again changes nothing. Not made by `replace`, which
            # takes three times as long: a search fuses 40,000 ops.
            ops.append(
                known
                if known is not None and is_known
                else Op(
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
            )
        elif reads == op.reads:
            ops.append(op)
        elif known is not None and known.reads == reads and known.writes == writes:
            ops.append(known)
        else:
            ops.append(op.touching(reads, writes, sum(nbytes[name] for name in (*reads, *writes))))
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
        # Readers may run in another number of micro-batches, in which a random number is another.
        and not (is_divided and (op.mixes or is_drawn(op)))
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


# ----------------------------------------------------------------------------------------------------------------------
# Insert into a graph the forward ops to run again in the backward, for the activations recomputed by a plan.
#
#   saved      h g                   `fwd.mm` writes h, `fwd.gelu` writes g; `bwd.mm_1` reads g, `bwd.gelu_1` reads h
#   recompute  g                     bwd.re_gelu, right before bwd.mm_1, reads h and writes bwd.re_g
#   recompute  g h                   bwd.re_mm and bwd.re_gelu, right before bwd.mm_1
#
# The inputs of a repeated op are available (inputs of the step, parameters, kept or offloaded activations), or are
# recomputed too. A storage that the step overwrites after the forward op read it is no longer available. The repeated
# ops follow from the graph and the groups of activations; this module decides nothing.


AGAIN = "re_"
"""The prefix of the name of a repeated op, after its phase: `bwd.re_mm`."""
_GIVEN = (Kind.PARAM, Kind.INPUT, Kind.BUFFER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A forward op to run again, right before the op `before` of the backward."""

    op: OpId
    before: OpId


_Names = frozenset[StorageId]
_NUM_GRAPHS = 4
"""The number of graphs whose facts are kept. A search asks for those of one graph a hundred times."""


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def first_equal(graph: StepGraph) -> StepGraph:
    """Return the first of the last few graphs that is equal to `graph`.

    The caches of this module find this graph by its identity. To find another equal graph, they compare all ops, which
    takes 20 ms for 3,000: a second search for Llama 7B in one process took 1.1 s longer than the first.
    """
    return graph


def as_run(
    graph: StepGraph, activations: tuple[Activations, ...] = (), divided_into: tuple[Lap, ...] = ()
) -> StepGraph:
    """Return the ops run by a plan with `activations`: `graph` with repeated ops, without fused storages, and with the
    laps `divided_into` micro-batches.

    Raises InvalidPlan if an op to repeat may run only once.
    """
    dropped, extra = _dropped(activations), _extra(graph, activations)
    if not divided_into:
        return _as_run(graph, dropped, extra)
    offloaded = tuple(group for group in activations if group.saving is Saving.OFFLOAD)
    return _as_divided(graph, dropped, extra, divided_into, offloaded)


@functools.lru_cache(maxsize=8)
def _as_run(graph: StepGraph, dropped: _Names, extra: _Names) -> StepGraph:
    # The ops do not depend on the storages that are offloaded, so activations with the same recomputation share them.
    return fused(_repeated_step(graph, dropped, extra), like=_fused_ops(graph) if dropped or extra else {})


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def _fused_ops(graph: StepGraph) -> Mapping[OpId, Op]:
    """Return the ops that run if nothing is recomputed, by id."""
    return {op.id: op for op in fused(graph).ops}


@functools.lru_cache(maxsize=8)
def _as_divided(
    graph: StepGraph,
    dropped: _Names,
    extra: _Names,
    divided_into: tuple[Lap, ...],
    offloaded: tuple[Activations, ...],
) -> StepGraph:
    return divided(_divisible(graph, dropped, extra), divided_into, offloaded)


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def _divisible(graph: StepGraph, dropped: _Names, extra: _Names) -> StepGraph:
    """Return the ops run with recomputation, fused as far as they are if laps are divided, in whatever number."""
    return fused(_repeated_step(graph, dropped, extra), is_divided=True)


def stays_in_parts(
    graph: StepGraph, activations: tuple[Activations, ...], divided_into: tuple[Lap, ...]
) -> frozenset[StorageId]:
    """Return the storages of `as_run` with the same arguments that stay in parts; see `step.divide`."""
    step = _divisible(graph, _dropped(activations), _extra(graph, activations))
    return parts_of(step, divided_into, activations, slices_of(step, divided_into, activations))


def laps_at(graph: StepGraph, activations: tuple[Activations, ...], micro_batches: int) -> tuple[Lap, ...]:
    """Return the laps of a plan with `activations` that run in `micro_batches`; empty if that is 1."""
    if micro_batches == 1:
        return ()
    return _laps_at(graph, _dropped(activations), _extra(graph, activations), micro_batches)


@functools.lru_cache(maxsize=8)
def _laps_at(graph: StepGraph, dropped: _Names, extra: _Names, micro_batches: int) -> tuple[Lap, ...]:
    step = _divisible(graph, dropped, extra)
    return tuple(lap for lap in laps(step, micro_batches) if lap.micro_batches > 1)


def _repeated_step(graph: StepGraph, dropped: _Names, extra: _Names) -> StepGraph:
    """Return `graph` with the ops that recompute `dropped` from `extra` and all else that is stored, before fusion."""
    return _with_repeats(graph, dropped, extra) if dropped or extra else graph


def repeats(graph: StepGraph, activations: Sequence[Activations]) -> tuple[Repeat, ...]:
    """Return the ops to run again under `activations`, in order."""
    dropped = _dropped(activations)
    return _repeats(graph, dropped, _missing(graph, dropped, _extra(graph, activations)))


def _repeats(graph: StepGraph, dropped: _Names, missing: Callable[[Op], Sequence[StorageId]]) -> tuple[Repeat, ...]:
    if not dropped:
        return ()
    maker = makers(graph)
    made: set[StorageId] = set()
    found: list[Repeat] = []
    for at in _reading(graph, dropped):
        before = graph.ops[at]
        targets = [name for name in before.reads if name in dropped]
        found += [Repeat(op=op.id, before=before.id) for op in _chain(targets, missing, made, maker)]
    return tuple(found)


def _reading(graph: StepGraph, names: _Names) -> list[int]:
    """Return the indices of the backward ops that read any of `names`, in order."""
    readers = _backward_readers(graph)
    return sorted({at for name in names for at in readers.get(name, ())})


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def _backward_readers(graph: StepGraph) -> Mapping[StorageId, Sequence[int]]:
    """Return the indices of the backward ops that read each storage."""
    found: dict[StorageId, list[int]] = {}
    for at, op in enumerate(graph.ops):
        for name in op.reads if op.phase is Phase.BACKWARD else ():
            found.setdefault(name, []).append(at)
    return found


def repeats_each(graph: StepGraph, choices: Iterable[Sequence[Activations]]) -> Iterator[tuple[Repeat, ...]]:
    """Yield `repeats` of each of `choices`; faster than single calls, because facts of the graph are computed once."""
    stale, saved = stale_reads(graph), saved_storages(graph)
    available = given_storages(graph) | saved
    for activations in choices:
        dropped = _dropped(activations)
        listed = {s for group in activations if group.saving is not Saving.RECOMPUTE for s in group.storages}
        usable = (available | (listed - saved)) - dropped

        def missing(op: Op, usable: frozenset[StorageId] = usable) -> Sequence[StorageId]:
            return [name for name in op.reads if name not in usable or (op.id, name) in stale]

        yield _repeats(graph, dropped, missing)


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def makers(graph: StepGraph) -> Mapping[StorageId, Op | None]:
    """Return the forward op that writes each storage, or None if several ops of the step write it."""
    found: dict[StorageId, Op | None] = {}
    for op in graph.ops:
        for name in op.writes:
            if name in found:
                found[name] = None
            elif op.phase is Phase.FORWARD:
                found[name] = op
    return found


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def given_storages(graph: StepGraph) -> frozenset[StorageId]:
    """Return the storages of the whole step: parameters, inputs and buffers."""
    return frozenset(storage.id for storage in graph.storages if storage.kind in _GIVEN)


def given_bytes(graph: StepGraph) -> int:
    """Return the bytes of inputs that the backward reads, such as outputs of another graph, which stay live until
    then."""
    read = {name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.reads}
    return sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT and storage.id in read)


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def saved_storages(graph: StepGraph) -> frozenset[StorageId]:
    """Return the storages saved by the forward for the backward."""
    read = {name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.reads}
    return frozenset(s.id for s in graph.storages if s.kind is Kind.SAVED and s.id in read)


def stored(graph: StepGraph, activations: Sequence[Activations]) -> frozenset[StorageId]:
    """Return the storages available to the backward without recomputing them."""
    return _stored(graph, _dropped(activations), _extra(graph, activations))


def _stored(graph: StepGraph, dropped: _Names, extra: _Names) -> _Names:
    return (given_storages(graph) | saved_storages(graph) | extra) - dropped


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def stale_reads(graph: StepGraph) -> frozenset[tuple[OpId, StorageId]]:
    """Return pairs of op and storage it reads that it or a later op overwrites: run again, it would read other
    values."""
    last_write = {name: at for at, op in enumerate(graph.ops) for name in op.writes}
    return frozenset(
        (op.id, name) for at, op in enumerate(graph.ops) for name in op.reads if last_write.get(name, -1) >= at
    )


def _missing(graph: StepGraph, dropped: _Names, extra: _Names) -> Callable[[Op], Sequence[StorageId]]:
    """Return a function from a forward op to the storages to recompute before it runs again."""
    available, stale = _stored(graph, dropped, extra), stale_reads(graph)
    return lambda op: [name for name in op.reads if name not in available or (op.id, name) in stale]


def repeated_storage(name: StorageId) -> StorageId:
    """Return the name of the recomputed copy of the storage `name`."""
    return StorageId(_again(name))


def repeated_op(op: OpId) -> OpId:
    """Return the id under which the forward op `op` runs again."""
    return OpId(_again(op))


def _again(name: str) -> str:
    phase, _, rest = name.partition(".")
    return f"bwd.{AGAIN}{rest}" if phase == "fwd" else f"bwd.{AGAIN}{name}"


def _dropped(activations: Sequence[Activations]) -> _Names:
    return frozenset(s for group in activations if group.saving is Saving.RECOMPUTE for s in group.storages)


def _extra(graph: StepGraph, activations: Sequence[Activations]) -> _Names:
    """Return the storages saved in addition to the capture: inputs of recomputed layers."""
    listed = {s for group in activations if group.saving is not Saving.RECOMPUTE for s in group.storages}
    return frozenset(listed - saved_storages(graph))


def _chain(
    targets: Sequence[StorageId],
    missing: Callable[[Op], Sequence[StorageId]],
    made: set[StorageId],
    maker: Mapping[StorageId, Op | None],
) -> Iterator[Op]:
    """Yield the forward ops to repeat for `targets`, each after its inputs; their results are added to `made`."""
    pending = [(name, False) for name in reversed(targets)]
    while pending:
        name, is_ready = pending.pop()
        if name in made:
            continue
        op = maker.get(name)
        if op is None or op.once:
            cannot = "no single op computes it" if op is None else f"{op.id} must not run twice"
            raise InvalidPlan(f"the storage {name} is to be recomputed, but {cannot}.")
        if is_ready:
            # If a later op changes a result of this op, this op alone does not recompute it.
            made.update(result for result in op.writes if maker[result] is op)
            yield op
            continue
        pending.append((name, True))
        pending.extend((read, False) for read in reversed(missing(op)) if read not in made)


def with_repeats(graph: StepGraph, activations: Sequence[Activations]) -> StepGraph:
    """Return `graph` with repeated ops, before fusion. Raises InvalidPlan as `as_run` does."""
    return _with_repeats(graph, _dropped(activations), _extra(graph, activations))


def _with_repeats(graph: StepGraph, dropped: _Names, extra: _Names) -> StepGraph:
    missing = _missing(graph, dropped, extra)
    found = _repeats(graph, dropped, missing)
    by_id = _ops_by_id(graph)
    storages = {storage.id: storage for storage in graph.storages}
    renamed = {name: repeated_storage(name) for repeat in found for name in by_id[repeat.op].writes}
    again: dict[OpId, list[Op]] = {}
    for repeat in found:
        again.setdefault(repeat.before, []).append(_repeated(by_id[repeat.op], renamed, missing))
    first = next((op.id for op in graph.ops if op.phase is Phase.BACKWARD), None)
    ops: list[Op] = []
    done = 0
    for at in _reading(graph, dropped):
        ops += graph.ops[done:at]
        op, done = graph.ops[at], at + 1
        if op.id == first and op.id in again:
            # The tangents arrive when the backward begins.
            repeat, tangents = again[op.id][0], tangents_of(op)
            again[op.id][0] = replace(repeat, writes=(*tangents, *repeat.writes))
            op = replace(op, writes=op.writes[len(tangents) :])
        ops += again.get(op.id, ())
        read_again = {name: renamed[name] for name in op.reads if name in dropped}
        ops.append(op.touching(_named(op.reads, read_again), op.writes))
    ops += graph.ops[done:]
    kinds = {**dict.fromkeys(dropped, Kind.TEMP), **dict.fromkeys(extra, Kind.SAVED)}
    kept = (replace(own, kind=kinds[own.id]) if own.id in kinds else own for own in graph.storages)
    copies: list[Storage] = []
    for name, new in renamed.items():
        kind = Kind.WORKSPACE if storages[name].kind is Kind.WORKSPACE else Kind.TEMP
        copies.append(replace(storages[name], id=new, kind=kind))
    return replace(graph, ops=tuple(ops), storages=(*kept, *copies))


@functools.lru_cache(maxsize=_NUM_GRAPHS)
def _ops_by_id(graph: StepGraph) -> Mapping[OpId, Op]:
    return {op.id: op for op in graph.ops}


def _repeated(op: Op, renamed: Mapping[StorageId, StorageId], missing: Callable[[Op], Sequence[StorageId]]) -> Op:
    # Available storages are read directly, even if their op is repeated later for another of its results.
    read_again = {name: renamed[name] for name in missing(op)}
    return op.touching(
        _named(op.reads, read_again), _named(op.writes, renamed), new_id=repeated_op(op.id), phase=Phase.BACKWARD
    )


def _named(names: Sequence[StorageId], renamed: Mapping[StorageId, StorageId]) -> tuple[StorageId, ...]:
    return tuple(renamed.get(name, name) for name in names)


# ----------------------------------------------------------------------------------------------------------------------
# The step of one number of rows to the step of another, without a new capture.
#
#   storage    EACH         bytes x b / B        one slice for each micro-batch, so also for each row
#              SUM, SAME    bytes                sums over the batch, and what is equal for all rows
#   op         writes EACH or SUM   flops x b / B
#              else                 flops
#              its moved bytes are shared among the storages that it touches, by their bytes; the part of EACH is
#              x b / B
#
# `B` are the rows of the capture, `b` the rows asked for. A graph with a dynamic number of rows is computed from its
# sizes, exactly; one with a constant number is scaled, and each product is rounded up.


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
    shares, counted = moved_shares(graph), counted_by_rows(graph)

    def scaled(number: int) -> int:
        return -(-number * rows // graph.batch)

    def at_rows(op: Op) -> Op:
        moved_each = round(op.moved_bytes * shares[op.id])
        flops = scaled(op.flops) if op.id in counted else op.flops
        return replace(op, flops=flops, moved_bytes=op.moved_bytes - moved_each + scaled(moved_each))

    storages = tuple(
        replace(storage, nbytes=scaled(storage.nbytes)) if storage.batched is Batched.EACH else storage
        for storage in graph.storages
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
