"""When a step updates its parameters."""

from collections.abc import Iterable

from elixir_compile.ir import Placement, Tier, Update
from elixir_compile.search.problem import Problem


def update_time(problem: Problem, placements: Iterable[Placement]) -> Update:
    """Return when buckets at `placements` are updated: as asked, else across steps where the host updates any.

    Only the hybrid optimizer can do otherwise than after the backward.
    """
    if not problem.hybrid:
        return Update.AFTER_BACKWARD
    if problem.update is not None:
        return problem.update
    is_any_on_host = any(placement.update is Tier.HOST for placement in placements)
    return Update.ACROSS_STEPS if is_any_on_host else Update.AFTER_BACKWARD
