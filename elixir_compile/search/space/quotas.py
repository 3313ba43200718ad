"""Turn the fractions that a user fixed into limits of the search: the levels of each bucket, and quotas over buckets.

    option               elements that it counts       elements that meet it
    shard_param_frac     of sharded buckets            released after each use
    offload_optim_frac   with optimizer state          with their state on the host
    offload_param_frac   all                           on the host

Buckets meet an option as a whole. A fraction of 0 or 1 leaves each bucket only the levels at which it does not, or
does, meet the option. A fraction f between them, of n elements, is a quota: at least f n elements meet the option, and
the excess is less than the largest bucket. Gemini ends between the same limits, as it moves one chunk after another
until at least f n elements have moved. Which buckets meet a quota is left to the search.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from elixir_compile.base.errors import StateNotApart
from elixir_compile.base.options import Fractions
from elixir_compile.ir import Bucket, Phase
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.levels import Level

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
    if levels[0] is not Level.ON_DEVICE or (is_in_force and not _trains(problem)):
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


def _trains(problem: Problem) -> bool:
    return any(op.phase is Phase.UPDATE for op in problem.graph.ops)


def quotas_of(problem: Problem, buckets: Sequence[Bucket], choices: Sequence[Sequence[Level]]) -> tuple[Quota, ...]:
    """Return the quotas of `problem` over `buckets` with the levels `choices`, which `limited` left.

    If buckets in force cannot meet a quota, it ends where they do. Where the plans of ranks differ, it is decided
    already which buckets are released. Raises StateNotApart if state is to leave without its parameters, but cannot.
    """
    fractions = problem.fractions
    if fractions is None:
        return ()
    is_apart = fractions.offload_optim > 0.0 and fractions.offload_param < 1.0
    if is_apart and not problem.hybrid and _trains(problem):
        num_elements = sum(bucket.numel for bucket in buckets if counts(OPTIM, bucket))
        if num_elements:
            raise StateNotApart(problem.graph.name, fractions.offload_optim, num_elements)
    is_open = {SHARD: problem.released is None, OPTIM: problem.hybrid, PARAM: True}
    wanted = ((option, fraction_of(fractions, option)) for option in OPTIONS if is_open[option])
    return tuple(_quota(option, fraction, buckets, choices) for option, fraction in wanted if 0.0 < fraction < 1.0)


def _quota(option: str, fraction: float, buckets: Sequence[Bucket], choices: Sequence[Sequence[Level]]) -> Quota:
    numels = tuple(bucket.numel if counts(option, bucket) else 0 for bucket in buckets)
    always, free = _split(option, numels, choices)
    low = sum(numels[i] for i in always)
    high = low + sum(numels[i] for i in free)
    # Not in floating point: 0.1 of 30 elements would be more than 3.
    asked = math.ceil(Fraction(fraction).limit_denominator(10**9) * sum(numels))
    least = min(max(asked, low), high)
    return Quota(option=option, numels=numels, least=least, most=least + max((numels[i] for i in free), default=1) - 1)


def _split(option: str, numels: Sequence[int], choices: Sequence[Iterable[Level]]) -> tuple[list[int], list[int]]:
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
        always, free = _split(quota.option, quota.numels, choices)
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
