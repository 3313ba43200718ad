"""Why each bucket is where it is: what every other level of it would cost, in seconds or in bytes over a budget.

Seconds are by the longest paths (`flow`), bytes by the segments (`memory`), one bucket changed and all others as they
are. Both are lower bounds, and quick: a plan has a thousand of such alternatives.
"""

from elixir_compile.ir import Decision
from elixir_compile.search.draft import Draft
from elixir_compile.search.levels import Level, level_text
from elixir_compile.search.program import Program, Vector
from elixir_compile.units import format_bytes, format_s


def decisions(program: Program, draft: Draft) -> tuple[Decision, ...]:
    """Return a decision on every bucket of `draft` that is not where it was."""
    facts = program.judge.facts
    x = program.vector(draft.levels)
    step_s, peak_bytes = program.lower_s(x), program.peak_bytes(x)
    found: list[Decision] = []
    for i, (bucket, level, start) in enumerate(zip(facts.buckets, draft.levels, facts.start_levels, strict=True)):
        if level is start:
            continue
        at_start = _moved(program, x, i, level, start)
        saves_bytes = program.peak_bytes(at_start) - peak_bytes
        found.append(
            Decision(
                subject=bucket.id,
                choice=level_text(level),
                because=f"the peak would be {format_bytes(saves_bytes)} higher with {level_text(start)}",
                cost_s=max(0.0, step_s - program.lower_s(at_start)),
                saves_bytes=saves_bytes,
                rejected=tuple(
                    _rejected(program, _moved(program, x, i, level, other), other, step_s)
                    for other in facts.choices[i]
                    if other is not level
                ),
            )
        )
    return tuple(found)


def _moved(program: Program, x: Vector, bucket: int, before: Level, after: Level) -> Vector:
    moved = x.copy()
    moved[program.choices[bucket, before]] = 0.0
    moved[program.choices[bucket, after]] = 1.0
    return moved


def _rejected(program: Program, x: Vector, level: Level, step_s: float) -> str:
    problem = program.judge.facts.problem
    over_bytes = program.peak_bytes(x) - problem.budget_bytes
    if over_bytes > 0:
        return f"{level_text(level)}: {format_bytes(over_bytes)} over the budget"
    host_over_bytes = program.host_bytes(x) - problem.host_budget_bytes
    if host_over_bytes > 0:
        return f"{level_text(level)}: {format_bytes(host_over_bytes)} over the host's memory"
    added_s = program.lower_s(x) - step_s
    if added_s > 0:
        return f"{level_text(level)}: {format_s(added_s)} longer"
    return f"{level_text(level)}: no shorter, once what is early and late is played"
