"""Parameters of a graph into buckets: tensors that travel together, in the order of their first use.

    wte | wpe h.0 | h.1 | h.2 | ...     a bucket ends where a layer ends, once it holds `min` bytes, and never
                                        exceeds `max`

A tensor larger than `max`, or used again far away (a tied embedding), travels alone. Data types, and frozen and trained
parameters, are never mixed, nor are param groups of the optimizer, dtypes that gradients are reduced in, nor what ranks
cut and what each of them has whole.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elixir_compile.analysis.recompute import as_run
from elixir_compile.errors import InvalidPlan
from elixir_compile.ir import ITEM_BYTES, Bucket, BucketId, Kind, Phase, StepGraph, Storage, StorageId
from elixir_compile.ir.graph import layer_of
from elixir_compile.search.problem import Problem

MIN_BUCKETS = 16
"""A model smaller than this many buckets of the minimum size gets a smaller minimum, so that it still has choices."""
_MOST_BUCKETS, _MOST_TIMES = 192, 8
"""A model of more buckets than these gets larger ones, up to so many times: a search takes about as long as the square
of their number. Llama 70B on 8 ranks has 563 of 128 MiB, of which a rank owns 16, and 161 of 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Param:
    storage: Storage
    is_trained: bool
    group: int
    reduce_dtype: str | None
    layer: str
    uses: tuple[int, ...]
    """Indices of the forward ops that read it; of the backward ops where the forward never does."""


def form_buckets(problem: Problem) -> tuple[Bucket, ...]:
    """Return the buckets in force that the graph touches, then new ones for every other parameter of the graph."""
    present = {storage.id for storage in problem.graph.storages if storage.kind is Kind.PARAM}
    kept = tuple(bucket for bucket in problem.buckets if present.intersection(bucket.params))
    owned = {param for bucket in kept for param in bucket.params}
    params = [param for param in _in_first_use_order(problem) if param.storage.id not in owned]
    min_bytes, max_bytes = _bounds(problem, sum(param.storage.nbytes for param in params))
    taken = {bucket.id for bucket in problem.buckets}
    names = (name for name in (BucketId(f"b{i}") for i in itertools.count()) if name not in taken)
    classes: dict[tuple[str, bool, int, bool, str | None], list[_Param]] = {}
    for param in params:
        kind = (param.storage.dtype, param.is_trained, param.group, _is_cut(param, problem), param.reduce_dtype)
        classes.setdefault(kind, []).append(param)
    distant = _distant(params, min_bytes)
    groups = [
        group
        for members in classes.values()
        for group in _cut(members, distant, min_bytes=min_bytes, max_bytes=max_bytes)
    ]
    order = {param.storage.id: i for i, param in enumerate(params)}
    groups.sort(key=lambda group: order[group[0].storage.id])
    return kept + tuple(_bucket(next(names), group, problem) for group in groups)


def with_larger_buckets(problem: Problem) -> Problem | None:
    """Return the problem with buckets large enough that they are not too many to search; None where they are few."""
    present = {storage.id for storage in problem.graph.storages if storage.kind is Kind.PARAM}
    if present.issubset({param for bucket in problem.buckets for param in bucket.params}):
        return None
    times, larger = 1, problem
    while times < _MOST_TIMES and len(form_buckets(larger)) > _MOST_BUCKETS:
        times *= 2
        low, high = times * problem.bucket_min_bytes, times * problem.bucket_max_bytes
        larger = replace(problem, bucket_min_bytes=low, bucket_max_bytes=high)
    return None if larger is problem else larger


def _bounds(problem: Problem, total_bytes: int) -> tuple[int, int]:
    """The smallest and largest bucket, in bytes, both scaled down together for a small model."""
    low, high = problem.bucket_min_bytes, problem.bucket_max_bytes
    if total_bytes >= MIN_BUCKETS * low:
        return low, high
    scaled = max(1, total_bytes // MIN_BUCKETS)
    return scaled, max(scaled, high * scaled // low)


def _in_first_use_order(problem: Problem) -> list[_Param]:
    graph = as_run(problem.graph)  # its readers of a parameter, whatever is recomputed
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD and storage.of is not None}
    uses = _uses(graph)
    layers = [layer_of(op.module) for op in graph.ops]
    params = [
        _Param(
            storage=storage,
            is_trained=storage.id in trained or problem.state_nbytes.get(storage.id, 0) > 0,
            group=problem.groups.get(storage.id, 0),
            reduce_dtype=problem.reduce_dtypes.get(storage.id),
            layer=layers[uses[storage.id][0]] if uses[storage.id] else "",
            uses=tuple(uses[storage.id]),
        )
        for storage in graph.storages
        if storage.kind is Kind.PARAM
    ]
    last = len(graph.ops)
    return sorted(params, key=lambda param: param.uses[0] if param.uses else last)


def _uses(graph: StepGraph) -> Mapping[StorageId, list[int]]:
    """The forward ops that read each parameter, or the backward ops where no forward op does."""
    by_phase: dict[Phase, dict[StorageId, list[int]]] = {phase: {} for phase in Phase}
    for i, op in enumerate(graph.ops):
        for name in op.reads:
            by_phase[op.phase].setdefault(name, []).append(i)
    return {
        storage.id: by_phase[Phase.FORWARD].get(storage.id) or by_phase[Phase.BACKWARD].get(storage.id, [])
        for storage in graph.storages
    }


def _distant(params: list[_Param], min_bytes: int) -> frozenset[StorageId]:
    """Parameters of a quarter of the minimum or more that have `min_bytes` of others first used between their uses."""
    starts = [(param.uses[0], param.storage.nbytes) for param in params if param.uses]
    found: set[StorageId] = set()
    for param in params:
        if param.storage.nbytes * 4 < min_bytes or len(param.uses) < 2:
            continue
        for before, after in itertools.pairwise(param.uses):
            if sum(nbytes for first, nbytes in starts if before < first < after) >= min_bytes:
                found.add(param.storage.id)
    return frozenset(found)


def _cut(
    params: list[_Param], alone: frozenset[StorageId], *, min_bytes: int, max_bytes: int
) -> Iterator[list[_Param]]:
    """Cut parameters of one class, in first-use order, into buckets."""
    group: list[_Param] = []
    group_bytes = 0
    for param in params:
        nbytes = param.storage.nbytes
        is_alone = nbytes > max_bytes or param.storage.id in alone
        if is_alone:
            # What travels alone ends no bucket: small tensors between large ones would be buckets of kilobytes.
            yield [param]
            continue
        # Without module paths every tensor may end a bucket.
        ends_layer = bool(group) and (not param.layer or param.layer != group[-1].layer)
        if group and (group_bytes + nbytes > max_bytes or (group_bytes >= min_bytes and ends_layer)):
            yield group
            group, group_bytes = [], 0
        group.append(param)
        group_bytes += nbytes
    if group:
        yield group


def _is_cut(param: _Param, problem: Problem) -> bool:
    """Whether several ranks have a part each of a parameter, and not all of it each."""
    numel = param.storage.nbytes // ITEM_BYTES.get(param.storage.dtype, 1)
    return problem.num_shards > 1 and set(problem.shards.get(param.storage.id, ())) != {numel}


def _shards(group: list[_Param], problem: Problem) -> tuple[int, ...]:
    """Elements of the bucket per rank; a parameter of which nothing is known in equal shards, the last rank pads."""
    num_shards = problem.num_shards
    numels = [0] * num_shards
    for param in group:
        even = -(-(param.storage.nbytes // ITEM_BYTES[param.storage.dtype]) // num_shards)
        for rank, numel in enumerate(problem.shards.get(param.storage.id, (even,) * num_shards)):
            numels[rank] += numel
    return tuple(numels)


def _bucket(name: BucketId, group: list[_Param], problem: Problem) -> Bucket:
    dtype = group[0].storage.dtype
    if dtype not in ITEM_BYTES:
        raise InvalidPlan(f"parameter {group[0].storage.id} has dtype {dtype}, whose size is unknown.")
    nbytes = sum(param.storage.nbytes for param in group)
    numel = nbytes // ITEM_BYTES[dtype]
    return Bucket(
        id=name,
        params=tuple(param.storage.id for param in group),
        numel=numel,
        nbytes=nbytes,
        state_nbytes=sum(problem.state_nbytes.get(param.storage.id, 0) for param in group),
        sum_nbytes=sum(problem.sum_nbytes.get(param.storage.id, 0) for param in group),
        dtype=dtype,
        trainable=group[0].is_trained,
        shard_numels=(numel,) if problem.num_shards == 1 else _shards(group, problem),
        group=group[0].group,
        reduce_dtype=group[0].reduce_dtype,
    )
