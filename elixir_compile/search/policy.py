"""Decisions of a plan whose user fixed fractions: the fractions that place each bucket, and how exactly they fit."""

from collections.abc import Iterator, Sequence

from elixir_compile.ir import Decision
from elixir_compile.search.evaluator import DraftPlan
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, level_text
from elixir_compile.search.space.quotas import OPTIM, OPTIONS, PARAM, SHARD, counts, fraction_of, meets

SUBJECT = "placement_policy"
_DONE = {SHARD: "released after each use", OPTIM: "with their state on the host", PARAM: "on the host"}


def policy_decisions(facts: Facts, draft: DraftPlan) -> tuple[Decision, ...]:
    """Return the decisions of `draft`, and why each bucket is where it is, if the user fixed fractions.

    The reasons, costs and rejected options that the search found for a bucket stay, unless there is a quota: they
    compare a move of the bucket alone, which a quota seldom allows.
    """
    fractions = facts.problem.fractions
    if fractions is None:
        return draft.decisions
    found = {decision.subject: decision for decision in draft.decisions}
    for i, bucket in enumerate(facts.buckets):
        name = str(bucket.id)
        before = None if facts.quotas else found.get(name)
        because = f"by {SUBJECT} static: {_reason(facts, draft.levels, i)}"
        found[name] = Decision(
            subject=name,
            choice=level_text(draft.levels[i]),
            because=because if before is None else f"{because}; {before.because}",
            cost_s=0.0 if before is None else before.cost_s,
            saves_bytes=0 if before is None else before.saves_bytes,
            rejected=() if before is None else before.rejected,
        )
    because = f"the options fix it; in whole buckets: {', '.join(_totals(facts, draft.levels))}"
    return (Decision(subject=SUBJECT, choice=f"static, {fractions}", because=because), *found.values())


def _totals(facts: Facts, levels: Sequence[Level]) -> Iterator[str]:
    """Yield, for each option that counts any element, how many of them meet it at `levels`."""
    for option in OPTIONS:
        counted = [i for i, bucket in enumerate(facts.buckets) if counts(option, bucket)]
        total = sum(facts.buckets[i].numel for i in counted)
        met = sum(facts.buckets[i].numel for i in counted if meets(option, levels[i]))
        if total:
            yield f"{met / total:.1%} of {total} elements {_DONE[option]}"


def _reason(facts: Facts, levels: Sequence[Level], i: int) -> str:
    """Return how each option bears on bucket number i: the option fixes it, or chose it, or did not choose it."""
    fractions = facts.problem.fractions
    assert fractions is not None, "only plans with fractions have these decisions"
    quotas = {quota.option: quota for quota in facts.quotas}
    parts: list[str] = []
    for option in OPTIONS:
        if not counts(option, facts.buckets[i]):
            continue
        text = f"{option} {fraction_of(fractions, option)}"
        quota = quotas.get(option)
        if quota is not None:
            num_counted = sum(numel > 0 for numel in quota.numels)
            num_met = sum(numel > 0 and meets(option, level) for numel, level in zip(quota.numels, levels, strict=True))
            which = "one" if meets(option, levels[i]) else "not one"
            text += f" ({which} of the {num_met} of {num_counted} buckets {_DONE[option]})"
        parts.append(text)
    return ", ".join(parts)
