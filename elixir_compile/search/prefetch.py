"""Gathers moved ahead of their waits as far as memory allows: first every gather one window, then every gather two."""

from collections.abc import Sequence

from elixir_compile.search.judge import MAX_AHEAD, Ahead, Judge
from elixir_compile.search.levels import Level
from elixir_compile.search.stays import stays


def raise_prefetch(judge: Judge, levels: Sequence[Level]) -> Ahead:
    """Return the windows that each gather can be ahead within the budget, `levels` fitting with gathers at use."""
    facts, memory = judge.facts, judge.memory
    budget_bytes = facts.problem.budget_bytes
    placed = stays(facts, levels, 0)
    live_bytes = memory.live_bytes(levels, placed)
    ahead = {(stay.bucket, stay.first): 0 for stay in placed}
    # Where a gather stands depends on its own distance only, so each can be raised on its own.
    now = {(stay.bucket, stay.first): stay.gather for stay in placed}
    for distance in range(1, MAX_AHEAD + 1):
        for stay in stays(facts, levels, distance):
            key = (stay.bucket, stay.first)
            earlier = slice(memory.segment_of(stay.gather), memory.segment_of(now[key]))
            nbytes = facts.buckets[stay.bucket].nbytes
            is_next = ahead[key] == distance - 1
            if is_next and (live_bytes[earlier] + nbytes <= budget_bytes).all():
                live_bytes[earlier] += nbytes
                ahead[key] = distance
                now[key] = stay.gather
    return ahead
