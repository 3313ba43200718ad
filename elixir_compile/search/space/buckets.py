"""Form buckets from the parameters of a graph, and find the levels of each bucket and the quotas that the fractions of
the user allow.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction

from elixir_compile.base.errors import InvalidPlan, StateNotApart
from elixir_compile.base.options import Fractions
from elixir_compile.ir import (
    ITEM_BYTES,
    MIXED_DTYPE,
    BlockUpdate,
    Bucket,
    BucketId,
    Kind,
    Param,
    Phase,
    Placement,
    Shards,
    Storage,
    StorageId,
    Tier,
    WholeUpdate,
)
from elixir_compile.ir.graph import layer_of
from elixir_compile.ir.share import largest_remainder
from elixir_compile.search.problem import Problem
from elixir_compile.step.as_run import as_run
from elixir_compile.step.bucket_bytes import bucket_host_bytes

# ----------------------------------------------------------------------------------------------------------------------
# Levels: how far from the device a bucket is. On one rank each level needs fewer device bytes than the level before.
#
# ON_DEVICE           parameters and optimizer state on the device
# ON_DEVICE_RELEASED  like ON_DEVICE; several ranks gather the bucket for each window and release it after the window
# STATE_OFF           optimizer state on the host, parameters on the device; only if the hybrid optimizer owns them
# STATE_OFF_RELEASED  like STATE_OFF; several ranks gather the bucket for each window and release it after the window
# ALL_OFF             both on the host; one gathered copy from the first use in the forward to the last in the backward
# ALL_OFF_RELEASED    both on the host; gathered for each window, released after it
#
# On several ranks each rank owns a shard, and a bucket is gathered at every level. On one rank only buckets with
# parameters on the host are gathered.


class Level(IntEnum):
    ON_DEVICE = 0
    ON_DEVICE_RELEASED = 1
    STATE_OFF = 2
    STATE_OFF_RELEASED = 3
    ALL_OFF = 4
    ALL_OFF_RELEASED = 5

    @property
    def has_state_on_host(self) -> bool:
        return self >= Level.STATE_OFF

    @property
    def has_param_on_host(self) -> bool:
        return self >= Level.ALL_OFF

    @property
    def home(self) -> Tier:
        """The memory of parameters and gradients."""
        return Tier.HOST if self.has_param_on_host else Tier.DEVICE

    @property
    def is_released(self) -> bool:
        """Whether a gathered copy is released after each window."""
        return self in (Level.ON_DEVICE_RELEASED, Level.STATE_OFF_RELEASED, Level.ALL_OFF_RELEASED)


def is_gathered(bucket: Bucket, level: Level) -> bool:
    """Return whether `bucket` has a gathered copy at `level`."""
    return bucket.is_gathered_from(level.home)


def placement_of(bucket: Bucket, level: Level, *, streamed: bool = False) -> Placement:
    """Return the placement of `bucket` at `level`, with its update `streamed` or in the memory of its state."""
    optim = Tier.HOST if level.has_state_on_host else Tier.DEVICE
    return Placement(bucket=bucket.id, param=level.home, optim=optim, resident=not level.is_released, streamed=streamed)


def level_of(placement: Placement) -> Level:
    """Return the level of `placement`, which does not depend on `placement.streamed`."""
    if placement.param is not Tier.DEVICE:
        return Level.ALL_OFF if placement.resident else Level.ALL_OFF_RELEASED
    if placement.optim is Tier.DEVICE:
        return Level.ON_DEVICE if placement.resident else Level.ON_DEVICE_RELEASED
    return Level.STATE_OFF if placement.resident else Level.STATE_OFF_RELEASED


def levels_from(start: Level, bucket: Bucket, *, hybrid: bool, num_windows: int) -> tuple[Level, ...]:
    """Return `start` and every level further from the device that differs from the levels before it, in order."""
    splits_state = hybrid and bucket.trainable and bucket.state_nbytes > 0
    # With one window, a resident copy is a released copy.
    has_gap = num_windows > 1
    differs = {
        Level.ON_DEVICE_RELEASED: bucket.is_sharded and has_gap,
        Level.STATE_OFF: splits_state,
        Level.STATE_OFF_RELEASED: splits_state and bucket.is_sharded and has_gap,
        Level.ALL_OFF: has_gap,
        Level.ALL_OFF_RELEASED: True,
    }
    return (start, *(level for level, is_distinct in differs.items() if level > start and is_distinct))


def gathered_as(levels: Sequence[Level], *, is_released: bool) -> tuple[Level, ...]:
    """Return those of the `levels` of a sharded bucket that gather it for each window, or, if not `is_released`, those
    that gather it once; all of them if the bucket has one window, as both are the same then."""
    found = tuple(level for level in levels if level.is_released is is_released)
    has_choice = Level.ON_DEVICE_RELEASED in levels or Level.ALL_OFF in levels or levels[0].is_released
    return found if found and has_choice else tuple(levels)


def staying(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Return those of the `levels` of a bucket that have its parameters in the same memory as the first."""
    return tuple(level for level in levels if level.home is levels[0].home)


def host_bytes_of(bucket: Bucket, level: Level, *, on_disk: bool = False, with_params: bool = False) -> int:
    """Return the host bytes of `bucket` on one rank; `on_disk` if its state, or its parameters if they are frozen, are
    or may be on disk instead, and trained parameters too if `with_params`."""
    placement = placement_of(bucket, level)
    moved = moved_to_disk(bucket, placement, with_params=with_params) if on_disk else placement
    return bucket_host_bytes(bucket, moved)


def moved_to_disk(bucket: Bucket, placement: Placement, *, with_params: bool = False) -> Placement:
    """Return `placement` with what is on the host, and may be on disk, moved there: optimizer state, and the parameters
    if they are frozen, or `with_params`."""
    if placement.optim is not Tier.HOST:
        return placement
    moves = placement.param is Tier.HOST and (with_params or not bucket.trainable)
    return replace(placement, param=Tier.DISK if moves else placement.param, optim=Tier.DISK, streamed=False)


def level_text(level: Level) -> str:
    """Return `level` in the words of a decision."""
    return {
        Level.ON_DEVICE: "param device, optim device",
        Level.ON_DEVICE_RELEASED: "param device, optim device, released after each use",
        Level.STATE_OFF: "param device, optim host",
        Level.STATE_OFF_RELEASED: "param device, optim host, released after each use",
        Level.ALL_OFF: "param host, optim host, resident",
        Level.ALL_OFF_RELEASED: "param host, optim host, released after each use",
    }[level]


# ----------------------------------------------------------------------------------------------------------------------
# Form buckets from the parameters of a graph, in the order of their first use.
#
#     wte | wpe h.0 | h.1 | h.2 | ...     a bucket ends with a layer if it holds at least `min` bytes, and holds at
#                                         most `max` bytes
#
# If one of several ranks owns each parameter, a bucket goes on, up to `max`, until the share of no rank in it is more
# than 1.5 times its share of all parameters: the collectives of a bucket last as long as the rank with the most bytes.
# Where no plan fits with such buckets, they are as small as `min` allows: see `with_smaller_buckets`.
#
# A parameter larger than `max`, or used again far from its first use (a tied embedding), gets a bucket of its own. All
# parameters of a bucket have the same dtype, the same dtype for the reduction of their gradients, and the same
# parameter group in the optimizer. They are all trained or all frozen, all updated whole or all by elements, and all
# sharded over the ranks or all complete on each rank; frozen ones all lie in files of their own, or none does. Frozen
# parameters of one rank may have different dtypes, as the codes of a quantised layer and their scales have: then the
# elements of their bucket are bytes.


MIN_BUCKETS = 16
"""A model smaller than this many buckets of the minimum size gets a smaller minimum, so that it still has choices."""
_MAX_BUCKETS, _MAX_FACTOR = 192, 8
"""A model with more buckets gets larger buckets, by a factor of at most `_MAX_FACTOR`, because the time of a search
grows with about the square of their number. Llama 70B on 8 ranks has 563 buckets of 128 MiB, 16 MiB on each rank, and
161 buckets of 1 GiB."""
_RAGGED_PRICE = 1.25
"""The seconds per byte of a collective with messages of different sizes, over those of one with equal sizes: Cephalo's
measurement (arXiv 2411.01075). So a flat buffer is padded where padding costs less."""
_MOST_UNEVEN = 1.5
"""The part of a bucket that one rank owns whole, over the part of all parameters that it owns whole: buckets are filled
until they have at most so much."""
_SMALL_BYTES = 64 * 1024
"""A parameter is not sharded if its copies on all ranks take at most so many bytes; a shard would be a few elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    """A parameter of the graph, and where it is used."""

    storage: Storage
    facts: Param
    is_trained: bool
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
    if problem.is_uneven:
        in_force = tuple(bucket.seen_by(problem.rank) for bucket in in_force)
    params = _new_params(problem)
    min_bytes, max_bytes = problem.bucket_min_bytes, problem.bucket_max_bytes
    total_bytes = sum(param.storage.nbytes for param in params)
    if total_bytes < MIN_BUCKETS * min_bytes:  # both are scaled down by one factor for a small model
        scaled = max(1, total_bytes // MIN_BUCKETS)
        min_bytes, max_bytes = scaled, max(scaled, max_bytes * scaled // min_bytes)
    taken = {bucket.id for bucket in problem.buckets}
    names = (name for name in (BucketId(f"b{i}") for i in itertools.count()) if name not in taken)
    classes: dict[tuple[object, ...], list[_Used]] = {}
    for param in params:
        facts = param.facts
        is_whole = facts.whole_update is not None
        # Shards of several ranks are counted in elements, and so are gradients and state: of one dtype.
        is_of_bytes = not param.is_trained and problem.num_shards == 1
        dtype = MIXED_DTYPE if is_of_bytes else param.storage.dtype
        is_in_file = facts.in_file and not param.is_trained
        kind = (dtype, facts.reduce_dtype, facts.state_dtype, param.is_trained, facts.group, is_whole, is_in_file)
        # Of several ranks, each owns a shard of the parameter, or the complete parameter.
        is_sharded = problem.num_shards > 1 and not (facts.shard_numels and facts.shard_numels.are_all(param.numel))
        classes.setdefault((*kind, is_sharded), []).append(param)
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


def with_smaller_buckets(problem: Problem) -> Problem | None:
    """Return `problem` with buckets of the smallest size, if one of several ranks owns each of some parameters whole.

    A parameter that is larger is a bucket of its own: then the device holds a single one with its gradient, and its
    collectives last as long as if one rank had all of its elements. Return None if no bucket would be smaller.
    """
    if not _owned_numels(_new_params(problem)):
        return None
    smaller = replace(problem, bucket_max_bytes=problem.bucket_min_bytes)
    return smaller if len(form_buckets(smaller)) > len(form_buckets(problem)) else None


def _new_params(problem: Problem) -> list[_Used]:
    """Return the parameters outside of buckets in force, in the order of their first use."""
    owned = {param for bucket in problem.buckets for param in bucket.params}
    graph = as_run(problem.graph)  # with every activation kept, so that buckets do not depend on modes
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD and storage.of is not None}
    by_phase: dict[Phase, dict[StorageId, list[int]]] = {phase: {} for phase in Phase}
    for i, op in enumerate(graph.ops):
        for name in op.reads:
            by_phase[op.phase].setdefault(name, []).append(i)
    found: list[_Used] = []
    for storage in graph.storages:
        if storage.kind is Kind.PARAM and storage.id not in owned:
            uses = by_phase[Phase.FORWARD].get(storage.id) or by_phase[Phase.BACKWARD].get(storage.id, [])
            facts = problem.params.get(storage.id, Param())
            is_trained = storage.id in trained or facts.state_nbytes > 0
            layer = layer_of(graph.ops[uses[0]].module) if uses else ""
            found.append(_Used(storage=storage, facts=facts, is_trained=is_trained, layer=layer, uses=tuple(uses)))
    return sorted(found, key=lambda param: param.uses[0] if param.uses else len(graph.ops))


def _distant(params: list[_Used], min_bytes: int) -> frozenset[StorageId]:
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
    params: list[_Used], alone: frozenset[StorageId], *, min_bytes: int, max_bytes: int
) -> Iterator[list[_Used]]:
    """Split parameters of a class, in first-use order, into buckets; each parameter in `alone` is a bucket."""
    group: list[_Used] = []
    group_bytes, of_all = 0, _owned_numels(params)
    for param in params:
        nbytes = param.storage.nbytes
        is_alone = nbytes > max_bytes or param.storage.id in alone
        if is_alone:
            # The current bucket goes on behind it: else small tensors between large ones were buckets of kilobytes.
            yield [param]
            continue
        # Without module paths a bucket may end at any parameter.
        ends_layer = bool(group) and (not param.layer or param.layer != group[-1].layer)
        may_end = group_bytes >= min_bytes and ends_layer
        if may_end and of_all:
            own = _owned_numels(group)
            may_end = all(
                part * sum(of_all) <= _MOST_UNEVEN * sum(own) * most for part, most in zip(own, of_all, strict=False)
            )
        if group and (may_end or group_bytes + nbytes > max_bytes):
            yield group
            group, group_bytes = [], 0
        group.append(param)
        group_bytes += nbytes
    if group:
        yield group


def _owned_numels(params: Iterable[_Used]) -> list[int]:
    """Return for each rank the elements of the parameters that it owns whole; empty if no parameter has one owner."""
    parts = [param.facts.shard_numels for param in params if param.facts.is_uneven]
    return [sum(each) for each in zip(*(own for own in parts if own.most == own.total), strict=True)]


def is_worth_sharding(nbytes: int, num_dims: int, num_shards: int) -> bool:
    """Return whether a parameter of `nbytes` is cut into `num_shards` shards, and not kept complete on every rank."""
    return num_dims > 0 and nbytes * num_shards > _SMALL_BYTES


def _bucket(name: BucketId, group: list[_Used], problem: Problem) -> Bucket:
    dtypes = {param.storage.dtype for param in group}
    dtype = group[0].storage.dtype if len(dtypes) == 1 else MIXED_DTYPE
    if dtype not in ITEM_BYTES:
        raise InvalidPlan(f"parameter {group[0].storage.id} has dtype {dtype}, whose size is unknown.")
    nbytes = sum(param.storage.nbytes for param in group)
    numel = nbytes // ITEM_BYTES[dtype]
    num_shards = problem.num_shards
    # By default the elements are shared out as the state of ranks says, or divided by the ranks, rounded up.
    shard_numels = (
        Shards.equal(numel, 1)
        if num_shards == 1
        else Shards.added(
            param.facts.shard_numels
            or (
                Shards.of(largest_remainder(param.numel, problem.state))
                if problem.state
                else Shards.equal(-(-param.numel // num_shards), num_shards)
            )
            for param in group
        )
    )
    whole = [
        (facts.whole_update, facts) for facts in (param.facts for param in group) if facts.whole_update is not None
    ]
    in_blocks = [param.facts.block_update for param in group if param.facts.block_update is not None]
    is_sharded, is_owned = not shard_numels.are_all(numel), any(param.facts.is_uneven for param in group)
    is_uneven = is_sharded and (bool(problem.state) or is_owned)
    return Bucket(
        id=name,
        params=tuple(param.storage.id for param in group),
        numel=numel,
        nbytes=nbytes,
        state_nbytes=sum(param.facts.state_nbytes for param in group),
        sum_nbytes=sum(param.facts.sum_nbytes for param in group),
        dtype=dtype,
        trainable=group[0].is_trained,
        shard_numels=shard_numels,
        group=group[0].facts.group,
        reduce_dtype=group[0].facts.reduce_dtype,
        state_dtype=group[0].facts.state_dtype,
        whole_update=WholeUpdate.of_all([update for update, _ in whole]) if whole else None,
        block_update=BlockUpdate.of_all(in_blocks) if in_blocks else None,
        owned_updates=tuple(
            WholeUpdate.of_all(
                [replace(update, state_nbytes=own.state_nbytes) for update, own in whole if own.shard_numels[rank]]
            )
            for rank in range(num_shards if whole and is_owned else 0)
        ),
        is_ragged=is_uneven and _RAGGED_PRICE * numel < len(shard_numels) * shard_numels.most,
        rank=problem.rank if is_uneven else 0,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Turn the fractions that a user fixed into limits of the search: the levels of each bucket, and quotas over buckets.
#
#     option               elements that it counts       elements that meet it
#     shard_param_frac     of sharded buckets            released after each use
#     offload_optim_frac   with optimizer state          with their state on the host
#     offload_param_frac   all                           on the host
#
# Buckets meet an option as a whole. A fraction of 0 or 1 leaves each bucket only the levels at which it does not, or
# does, meet the option. A fraction f between them, of n elements, is a quota: at least f n elements meet the option,
# and the excess is less than the largest bucket. Gemini ends between the same limits, as it moves one chunk after
# another until at least f n elements have moved. Which buckets meet a quota is left to the search.


SHARD, OPTIM, PARAM = OPTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")


def meets(option: str, level: Level) -> bool:
    """Return whether a bucket at `level` meets `option`."""
    return {SHARD: level.is_released, OPTIM: level.has_state_on_host, PARAM: level.has_param_on_host}[option]


def fraction_of(fractions: Fractions, option: str) -> float:
    """Return the fraction that `option` fixes."""
    return {SHARD: fractions.shard_param, OPTIM: fractions.offload_optim, PARAM: fractions.offload_param}[option]


def counts(option: str, bucket: Bucket) -> bool:
    """Return whether `option` counts the elements of `bucket`."""
    return {SHARD: bucket.is_sharded, OPTIM: bucket.trainable and bucket.state_nbytes > 0, PARAM: True}[option]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A limit on the elements of the buckets that meet an option."""

    option: str
    numels: tuple[int, ...]
    """Elements of each bucket; 0 if the option does not count the bucket."""
    least: int
    most: int

    def met(self, levels: Sequence[Level]) -> int:
        """Return the elements of the buckets that meet the option at `levels`."""
        return sum(
            numel for numel, level in zip(self.numels, levels, strict=True) if numel and meets(self.option, level)
        )

    def allows(self, levels: Sequence[Level]) -> bool:
        """Return whether the buckets that meet the option at `levels` are within the limits."""
        return self.least <= self.met(levels) <= self.most


def limited(problem: Problem, bucket: Bucket, levels: Sequence[Level]) -> tuple[Level, ...]:
    """Return those of the `levels` of `bucket` at which it meets the options whose fraction is 1, and none of those
    whose fraction is 0; all `levels` if the user fixed no fractions.

    A bucket in force stays at its level if it has moved from the device, or if the graph does not train.
    """
    fractions = problem.fractions
    if fractions is None:
        return tuple(levels)
    is_in_force = any(placement.bucket == bucket.id for placement in problem.placements)
    if levels[0] is not Level.ON_DEVICE or (is_in_force and not problem.graph.is_training):
        return (levels[0],)
    found = tuple(levels)
    # Other optimizers keep the state beside the parameter, so that it says nothing of its own.
    for option in (PARAM, OPTIM) if problem.hybrid else (PARAM,):
        fraction = fraction_of(fractions, option)
        if fraction in (0.0, 1.0) and counts(option, bucket):
            found = tuple(level for level in found if meets(option, level) is (fraction == 1.0)) or found
    # On one rank a copy of a parameter on the host is the only thing to release: it is released if it is sharded.
    if fractions.shard_param == 1.0:
        return tuple(level for level in found if level.is_released or level + 1 not in found)
    if fractions.shard_param == 0.0:
        return tuple(level for level in found if not level.is_released or level - 1 not in found)
    return found


def quotas_of(problem: Problem, buckets: Sequence[Bucket], choices: Sequence[Sequence[Level]]) -> tuple[Quota, ...]:
    """Return the quotas of `problem` over `buckets` with the levels `choices`, which `limited` left.

    If buckets in force cannot meet a quota, it ends where they do. Where the plans of ranks differ, it is decided
    already which buckets are released. Raises StateNotApart if state is to leave without its parameters, but cannot.
    """
    fractions = problem.fractions
    if fractions is None:
        return ()
    is_apart = fractions.offload_optim > 0.0 and fractions.offload_param < 1.0
    if is_apart and not problem.hybrid and problem.graph.is_training:
        num_elements = sum(bucket.numel for bucket in buckets if counts(OPTIM, bucket))
        if num_elements:
            raise StateNotApart(problem.graph.name, fractions.offload_optim, num_elements)
    is_open = {SHARD: problem.released is None, OPTIM: problem.hybrid, PARAM: True}
    wanted = ((option, fraction_of(fractions, option)) for option in OPTIONS if is_open[option])
    found: list[Quota] = []
    for option, fraction in wanted:
        if 0.0 < fraction < 1.0:
            numels = tuple(bucket.numel if counts(option, bucket) else 0 for bucket in buckets)
            always, free = _split_quota(option, numels, choices)
            low = sum(numels[i] for i in always)
            high = low + sum(numels[i] for i in free)
            # Not in floating point: 0.1 of 30 elements would be more than 3.
            asked = math.ceil(Fraction(fraction).limit_denominator(10**9) * sum(numels))
            least = min(max(asked, low), high)
            most = least + max((numels[i] for i in free), default=1) - 1
            found.append(Quota(option=option, numels=numels, least=least, most=most))
    return tuple(found)


def _split_quota(option: str, numels: Sequence[int], choices: Sequence[Iterable[Level]]) -> tuple[list[int], list[int]]:
    """Return the counted buckets that meet `option` at all their levels, and those that meet it at some of them."""
    always: list[int] = []
    free: list[int] = []
    for i, levels in enumerate(choices):
        found = {meets(option, level) for level in levels} if numels[i] else {False}
        if found == {True}:
            always.append(i)
        elif len(found) == 2:
            free.append(i)
    return always, free


def level_sets(
    choices: Sequence[tuple[Level, ...]], quotas: Sequence[Quota], *, takes_most: bool
) -> Sequence[tuple[Level, ...]]:
    """Return levels for each bucket, some of its `choices`, such that any combination of them meets the `quotas`.

    Buckets are taken in order until a quota is met. If `takes_most`, others follow, the largest first, as far as the
    quota allows.
    """
    for quota in quotas:
        always, free = _split_quota(quota.option, quota.numels, choices)
        taken, numel = set[int](), sum(quota.numels[i] for i in always)
        for i in free:
            if numel < quota.least:
                taken.add(i)
                numel += quota.numels[i]
        for i in sorted(free, key=lambda i: -quota.numels[i]) if takes_most else ():
            if i not in taken and numel + quota.numels[i] <= quota.most:
                taken.add(i)
                numel += quota.numels[i]
        is_free = set(free)
        choices = [
            tuple(level for level in levels if meets(quota.option, level) is (i in taken)) if i in is_free else levels
            for i, levels in enumerate(choices)
        ]
    return choices
