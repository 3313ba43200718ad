"""When a step updates its parameters, and which updates may be streamed."""

from collections.abc import Iterable

from elixir_compile.ir import Bucket, Placement, Tier, Update
from elixir_compile.search.problem import Problem


def update_time(problem: Problem, placements: Iterable[Placement]) -> Update:
    """Return when buckets at `placements` are updated: as asked, else across steps where the host updates any.

    Only the hybrid optimizer can do otherwise than after the backward.
    """
    asked = asked_time(problem)
    if asked is not Update.ACROSS_STEPS or problem.update is not None:
        return asked
    is_any_on_host = any(placement.update is Tier.HOST for placement in placements)
    return Update.ACROSS_STEPS if is_any_on_host else Update.AFTER_BACKWARD


def asked_time(problem: Problem) -> Update:
    """Return when a bucket that the host updates is updated."""
    if not problem.hybrid:
        return Update.AFTER_BACKWARD
    return Update.ACROSS_STEPS if problem.update is None else problem.update


def may_stream(problem: Problem, bucket: Bucket) -> bool:
    """Return whether the planner may stream updates of `bucket`: where the device and the host have memories of their
    own, and the updates of other buckets run on the host meanwhile."""
    has_memory_apart = problem.cluster.h2d.overlaps_compute and problem.cluster.d2h.overlaps_compute
    is_across = asked_time(problem) is Update.ACROSS_STEPS
    return is_across and has_memory_apart and bucket.trainable and bucket.state_nbytes > 0
