"""A schedule -> what moves in it: the actions on one bucket or one group of activations, told by regions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elixir_compile.ir.kinds import Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Action

_COPIES = (Verb.GATHER, Verb.OFFLOAD, Verb.PREFETCH)
_BROUGHT = (Verb.GATHER, Verb.PREFETCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One action on a bucket, its gradient or a group of activations, and where in the step it is."""

    verb: Verb
    region: str
    """The region that a gather or a prefetch is for, else the last one run before; empty where there is none."""
    num_ahead: int = 0
    """Regions run between the start of a copy and the wait for it."""


def actions_of(plan: Plan) -> tuple[Action, ...]:
    """Return the actions of the first rank: all ranks do the same."""
    return plan.schedules[0].actions if plan.schedules else ()


def moves_of(plan: Plan, names: Collection[str]) -> tuple[Move, ...]:
    """Return the actions on what has one of `names`, in order; a wait is told with the copy that it ends."""
    actions = actions_of(plan)
    moves: list[Move] = []
    last = ""
    for at, action in enumerate(actions):
        if action.verb is Verb.RUN:
            last = action.what
        elif action.what in names and action.verb is not Verb.WAIT:
            end = _wait_index(actions, at) if action.verb in _COPIES else at
            num_ahead = sum(between.verb is Verb.RUN for between in actions[at:end])
            region = _next_run(actions[end:]) if action.verb in _BROUGHT else last
            moves.append(Move(verb=action.verb, region=region, num_ahead=num_ahead))
    return tuple(moves)


def _wait_index(actions: Sequence[Action], start: int) -> int:
    what = actions[start].what
    waits = (at for at in range(start, len(actions)) if actions[at].verb is Verb.WAIT and actions[at].what == what)
    return next(waits, start)


def _next_run(actions: Sequence[Action]) -> str:
    return next((action.what for action in actions if action.verb is Verb.RUN), "")
