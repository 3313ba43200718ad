"""Check that full and lean calls of a step move the same buckets.

The first call of a step gathers a bucket, and the last releases and reduces it, and either may be a full or a lean one.
So both programs gather, release, reduce and offload the same buckets in each half. Ranks that share buckets gather and
reduce them in one order, although a forward may be full on one rank and lean on another, which has not freed a forward
that was dropped.
"""

from collections import Counter
from collections.abc import Sequence

from elixir_compile.ir import Action, GroupRef, Phase, Plan, RegionRef, Verb
from elixir_compile.step.structure import illegal
from elixir_compile.step.works import num_forward

_ORDERED = (Verb.GATHER, Verb.REDUCE)
"""The actions that may be collectives."""


def check_lean_moves(plan: Plan) -> None:
    """Raise IllegalSchedule unless the full and the lean calls of `plan` act on the same buckets in each half, and
    gather and reduce in the same order."""
    lean = plan.of_lean_calls()
    for phase, full, other in zip((Phase.FORWARD, Phase.BACKWARD), _halves(plan), _halves(lean), strict=True):
        missing = Counter(full) - Counter(other) or Counter(other) - Counter(full)
        if missing:
            action = next(iter(missing))
            kinds = ("full", "lean") if action in full else ("lean", "full")
            sentence = f"`{action.verb} {action.target}` is in the {phase} of {kinds[0]} calls, not of {kinds[1]} ones."
            raise illegal(sentence, f"{phase} of lean calls", [str(own) for own in other])
        ordered = ([own for own in half if own.verb in _ORDERED] for half in (full, other))
        for at, (own, expected) in enumerate(zip(*reversed(list(ordered)), strict=True)):
            if own != expected:
                sentence = f"`{own.verb} {own.target}` comes before `{expected.verb} {expected.target}` in lean calls."
                shown = [str(found) for found in other if found.verb in _ORDERED]
                raise illegal(sentence, f"{phase} of lean calls", shown, at)


def _halves(plan: Plan) -> tuple[Sequence[Action], Sequence[Action]]:
    actions = plan.schedules[0].actions
    end = num_forward(plan.regions, [(action.verb, action.target) for action in actions])
    return _of_buckets(actions[:end]), _of_buckets(actions[end:])


def _of_buckets(actions: Sequence[Action]) -> Sequence[Action]:
    return [own for own in actions if not isinstance(own.target, RegionRef | GroupRef)]
