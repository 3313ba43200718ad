"""Form buckets from the parameters of a graph, in the order of their first use.

    wte | wpe h.0 | h.1 | h.2 | ...     a bucket ends with a layer if it holds at least `min` bytes, and holds at
                                        most `max` bytes

A parameter larger than `max`, or used again far from its first use (a tied embedding), gets a bucket of its own. All
parameters of a bucket have the same dtype, the same dtype for the reduction of their gradients, and the same parameter
group in the optimizer. They are all trained or all frozen, and all sharded over the ranks or all complete on each rank.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import ITEM_BYTES, Bucket, BucketId, Kind, Phase, StepGraph, Storage, StorageId
from elixir_compile.ir.graph import layer_of
from elixir_compile.ir.share import largest_remainder
from elixir_compile.search.problem import Problem
from elixir_compile.step.recompute import as_run

MIN_BUCKETS = 16
"""A model smaller than this many buckets of the minimum size gets a smaller minimum, so that it still has choices."""
_MAX_BUCKETS, _MAX_FACTOR = 192, 8
"""A model with more buckets gets larger buckets, by a factor of at most `_MAX_FACTOR`, because the time of a search
grows with about the square of their number. Llama 70B on 8 ranks has 563 buckets of 128 MiB, 16 MiB on each rank, and
161 buckets of 1 GiB."""
_RAGGED_PRICE = 1.25
"""The seconds per byte of a collective with messages of different sizes, over those of one with equal sizes: Cephalo's
measurement (arXiv 2411.01075). So a flat buffer is padded where padding costs less."""
_SMALL_BYTES = 64 * 1024
"""A parameter is not sharded if its copies on all ranks take at most so many bytes; a shard would be a few elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Param:
    storage: Storage
    is_trained: bool
    group: int
    reduce_dtype: str | None
    state_dtype: str | None
    layer: str
    uses: tuple[int, ...]
    """Indices of the forward ops that read the parameter, or of the backward ops if no forward op reads it."""

    @property
    def numel(self) -> int:
        return self.storage.nbytes // ITEM_BYTES.get(self.storage.dtype, 1)


def form_buckets(problem: Problem) -> tuple[Bucket, ...]:
    """Return the buckets in force that the graph touches, then new ones for every other parameter of the graph."""
    present = {storage.id for storage in problem.graph.storages if storage.kind is Kind.PARAM}
    in_force = tuple(bucket for bucket in problem.buckets if present.intersection(bucket.params))
    if problem.state:
        in_force = tuple(bucket.seen_by(problem.rank) for bucket in in_force)
    params = _new_params(problem)
    min_bytes, max_bytes = _size_limits(problem, sum(param.storage.nbytes for param in params))
    taken = {bucket.id for bucket in problem.buckets}
    names = (name for name in (BucketId(f"b{i}") for i in itertools.count()) if name not in taken)
    classes: dict[tuple[object, ...], list[_Param]] = {}
    for param in params:
        dtypes = (param.storage.dtype, param.reduce_dtype, param.state_dtype)
        classes.setdefault((*dtypes, param.is_trained, param.group, _is_sharded(param, problem)), []).append(param)
    distant = _distant(params, min_bytes)
    groups = [
        group
        for members in classes.values()
        for group in _split(members, distant, min_bytes=min_bytes, max_bytes=max_bytes)
    ]
    order = {param.storage.id: i for i, param in enumerate(params)}
    groups.sort(key=lambda group: order[group[0].storage.id])
    return in_force + tuple(_bucket(next(names), group, problem) for group in groups)


def with_larger_buckets(problem: Problem) -> Problem | None:
    """Return `problem` with bucket sizes doubled until at most 192 buckets remain or the sizes are 8 times as large.

    Return None if `problem` has at most 192 buckets already, or if all of its parameters are in buckets in force.
    """
    present = {storage.id for storage in problem.graph.storages if storage.kind is Kind.PARAM}
    if present.issubset({param for bucket in problem.buckets for param in bucket.params}):
        return None
    factor, larger = 1, problem
    while factor < _MAX_FACTOR and len(form_buckets(larger)) > _MAX_BUCKETS:
        factor *= 2
        low, high = factor * problem.bucket_min_bytes, factor * problem.bucket_max_bytes
        larger = replace(problem, bucket_min_bytes=low, bucket_max_bytes=high)
    return None if larger is problem else larger


def _size_limits(problem: Problem, total_bytes: int) -> tuple[int, int]:
    """Return the minimum and the maximum bytes of a bucket, both scaled down by one factor for a small model."""
    low, high = problem.bucket_min_bytes, problem.bucket_max_bytes
    if total_bytes >= MIN_BUCKETS * low:
        return low, high
    scaled = max(1, total_bytes // MIN_BUCKETS)
    return scaled, max(scaled, high * scaled // low)


def _new_params(problem: Problem) -> list[_Param]:
    owned = {param for bucket in problem.buckets for param in bucket.params}
    return [param for param in _in_first_use_order(problem) if param.storage.id not in owned]


def _in_first_use_order(problem: Problem) -> list[_Param]:
    graph = as_run(problem.graph)  # with every activation kept, so that buckets do not depend on modes
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD and storage.of is not None}
    uses = _uses(graph)
    layers = [layer_of(op.module) for op in graph.ops]
    params = [
        _Param(
            storage=storage,
            is_trained=storage.id in trained or problem.state_nbytes.get(storage.id, 0) > 0,
            group=problem.groups.get(storage.id, 0),
            reduce_dtype=problem.reduce_dtypes.get(storage.id),
            state_dtype=problem.state_dtypes.get(storage.id),
            layer=layers[uses[storage.id][0]] if uses[storage.id] else "",
            uses=tuple(uses[storage.id]),
        )
        for storage in graph.storages
        if storage.kind is Kind.PARAM
    ]
    last = len(graph.ops)
    return sorted(params, key=lambda param: param.uses[0] if param.uses else last)


def _uses(graph: StepGraph) -> Mapping[StorageId, list[int]]:
    """Return the indices of the forward ops that read each storage, or of the backward ops if no forward op does."""
    by_phase: dict[Phase, dict[StorageId, list[int]]] = {phase: {} for phase in Phase}
    for i, op in enumerate(graph.ops):
        for name in op.reads:
            by_phase[op.phase].setdefault(name, []).append(i)
    return {
        storage.id: by_phase[Phase.FORWARD].get(storage.id) or by_phase[Phase.BACKWARD].get(storage.id, [])
        for storage in graph.storages
    }


def _distant(params: list[_Param], min_bytes: int) -> frozenset[StorageId]:
    """Return the parameters between two uses of which other parameters of at least `min_bytes` are first used.

    Parameters of less than a quarter of `min_bytes` are left out.
    """
    starts = [(param.uses[0], param.storage.nbytes) for param in params if param.uses]
    found: set[StorageId] = set()
    for param in params:
        if param.storage.nbytes * 4 < min_bytes or len(param.uses) < 2:
            continue
        for before, after in itertools.pairwise(param.uses):
            if sum(nbytes for first, nbytes in starts if before < first < after) >= min_bytes:
                found.add(param.storage.id)
    return frozenset(found)


def _split(
    params: list[_Param], alone: frozenset[StorageId], *, min_bytes: int, max_bytes: int
) -> Iterator[list[_Param]]:
    """Split parameters of a class, in first-use order, into buckets; each parameter in `alone` is a bucket."""
    group: list[_Param] = []
    group_bytes = 0
    for param in params:
        nbytes = param.storage.nbytes
        is_alone = nbytes > max_bytes or param.storage.id in alone
        if is_alone:
            # The current bucket goes on behind it: else small tensors between large ones were buckets of kilobytes.
            yield [param]
            continue
        # Without module paths a bucket may end at any parameter.
        ends_layer = bool(group) and (not param.layer or param.layer != group[-1].layer)
        if group and (group_bytes + nbytes > max_bytes or (group_bytes >= min_bytes and ends_layer)):
            yield group
            group, group_bytes = [], 0
        group.append(param)
        group_bytes += nbytes
    if group:
        yield group


def is_worth_sharding(nbytes: int, num_dims: int, num_shards: int) -> bool:
    """Return whether a parameter of `nbytes` is cut into `num_shards` shards, and not kept complete on every rank."""
    return num_dims > 0 and nbytes * num_shards > _SMALL_BYTES


def _is_sharded(param: _Param, problem: Problem) -> bool:
    """Return whether each of several ranks owns a shard of the parameter, and not the complete parameter."""
    return problem.num_shards > 1 and set(problem.shards.get(param.storage.id, ())) != {param.numel}


def _shards(group: list[_Param], problem: Problem) -> tuple[int, ...]:
    """Return the elements of the bucket on each rank.

    A parameter without an entry in `problem.shards` is shared out as `problem.state` says, or in equal shards: its
    elements divided by the ranks, rounded up.
    """
    num_shards = problem.num_shards
    numels = [0] * num_shards
    for param in group:
        own = problem.shards.get(param.storage.id)
        if own is None:
            numel = param.storage.nbytes // ITEM_BYTES[param.storage.dtype]
            own = largest_remainder(numel, problem.state) if problem.state else (-(-numel // num_shards),) * num_shards
        for rank, numel in enumerate(own):
            numels[rank] += numel
    return tuple(numels)


def _bucket(name: BucketId, group: list[_Param], problem: Problem) -> Bucket:
    dtype = group[0].storage.dtype
    if dtype not in ITEM_BYTES:
        raise InvalidPlan(f"parameter {group[0].storage.id} has dtype {dtype}, whose size is unknown.")
    nbytes = sum(param.storage.nbytes for param in group)
    numel = nbytes // ITEM_BYTES[dtype]
    shard_numels = (numel,) if problem.num_shards == 1 else _shards(group, problem)
    is_uneven = bool(problem.state) and any(own != numel for own in shard_numels)
    return Bucket(
        id=name,
        params=tuple(param.storage.id for param in group),
        numel=numel,
        nbytes=nbytes,
        state_nbytes=sum(problem.state_nbytes.get(param.storage.id, 0) for param in group),
        sum_nbytes=sum(problem.sum_nbytes.get(param.storage.id, 0) for param in group),
        dtype=dtype,
        trainable=group[0].is_trained,
        shard_numels=shard_numels,
        group=group[0].group,
        reduce_dtype=group[0].reduce_dtype,
        state_dtype=group[0].state_dtype,
        is_ragged=is_uneven and _RAGGED_PRICE * numel < len(shard_numels) * max(shard_numels),
        rank=problem.rank if is_uneven else 0,
    )
