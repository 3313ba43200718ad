"""Choose activations per outstanding forward: as many full calls as memory holds, and lean calls beside them.

```text
  one treatment for all      the plan of the search             8 outstanding: recompute
  two                        a lighter one, and a stronger one  5 outstanding: keep       3 outstanding: recompute
```

The search chooses one treatment of activations for all outstanding forwards. With its levels, each lighter treatment
for full calls is tried beside each stronger one for lean calls. The bytes of a pair are counted exactly for any number
of full forwards, so the most that fit are found without a further search. A lighter treatment for all is tried too: the
search may have found that it does not fit, as it counts up to one forward too many. The fastest step is taken if it is
shorter than that of the search.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, permutations, takewhile

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Decision, LeanCalls, Plan, Saving
from elixir_compile.ir.plan import MOST_CALLS_WITH_LEAN
from elixir_compile.search.evaluator import Deadline, DraftPlan, Evaluator
from elixir_compile.search.outer import Lack, Over, decision, fitting, in_words, shortfall
from elixir_compile.search.problem import Problem
from elixir_compile.search.reasons import predicted
from elixir_compile.search.schedule import cut_regions, regions, schedule, step_actions
from elixir_compile.search.space.layers import modes_by_depth
from elixir_compile.search.transfers import just_in_time
from elixir_compile.step.plan_rows import CallBytes, Halves, PlanRows, TwoPrograms, num_full_calls
from elixir_compile.step.seconds import FurtherCall, further_call
from elixir_compile.step.structure import check_lean_moves
from elixir_compile.step.timeline import away_bytes, offloaded_bytes, with_ring_traffic

_WORTH = 1e-3
"""Two treatments must make the step shorter by more than this share: they compile twice as many regions."""
_UNLIMITED_BYTES = 1 << 62
_MOST_NUMBERS = 64
"""The most numbers of full forwards that are tried for a pair."""
_MOST_WRITTEN = 8
"""So many of the fastest pairs are counted as plans, until one of them fits and is legal."""


def with_lean_calls(evaluator: Evaluator, draft: DraftPlan, made: Plan, deadline: Deadline) -> Plan:
    """Return `made`, which is `draft` written out, or a faster plan of the same levels, with or without lean calls.

    At the `deadline` the treatments that were counted until then are paired, and no further pairs tried. A step of
    4,400 ops takes 1 s.
    """
    problem = evaluator.facts.problem
    calls, is_short = problem.calls, any(group.saving is not Saving.KEEP for group in made.activations)
    # Other graphs that need memory between the halves are not counted here.
    is_counted = problem.may_have_lean_calls and not (problem.between_bytes or problem.after_bytes)
    if not (is_counted and is_short and calls.outstanding > 1 and calls.num <= MOST_CALLS_WITH_LEAN):
        return made
    programs = list(takewhile(lambda _: not deadline.is_over, _programs(evaluator, draft, made)))
    host_bytes = problem.host_budget_bytes - evaluator.at(draft.modes).host_bytes(draft.levels) + away_bytes(made)
    found = takewhile(lambda _: not deadline.is_over, _pairs(problem, host_bytes, programs))
    pairs = sorted(found, key=lambda pair: pair.step_s)
    limit_s = made.prediction.step_s * (1 - _WORTH)
    for pair in [pair for pair in pairs if pair.step_s < limit_s][:_MOST_WRITTEN]:
        plan = paired(problem, pair.full.plan, pair.lean.plan, pair.num_full)
        expected = plan.prediction
        if expected.device_peak_bytes <= problem.budget_bytes and expected.step_s < limit_s:
            with suppress(IllegalSchedule):
                if plan.lean is not None:
                    check_lean_moves(plan)
                return replace(plan, decisions=tuple(_decisions(pair, made, plan)))
    return made


def paired(problem: Problem, full: Plan, lean: Plan, num_full: int) -> Plan:
    """Return the plan `full` for `problem` with the calls of `lean`, a plan of the same placements, as lean calls.

    There are none if all outstanding forwards may be full.
    """
    calls = None
    if num_full < problem.calls.outstanding:
        parts = {"activations": lean.activations, "regions": lean.regions, "schedules": lean.schedules}
        calls = LeanCalls(num_full=num_full, **parts)
    plan = replace(full, lean=calls, formula="", bound_s=None, binding=(), gib_bound_s=None)
    found = replace(plan, prediction=predicted(problem, plan)[0])
    return with_ring_traffic(problem.graph, found, problem.cluster)


class _Program:
    """A treatment of activations, as a plan in which all calls have it."""

    def __init__(self, problem: Problem, plan: Plan, step_s: float) -> None:
        self.plan = plan
        self.once_s = step_s
        """Seconds of a step of one call."""
        self.offloaded_bytes = offloaded_bytes(plan.activations)
        self._problem = problem

    @cached_property
    def call(self) -> FurtherCall:
        """The seconds of a further call."""
        return further_call(self._problem.graph, self.plan, self._problem.cluster, self._problem.measured)

    @cached_property
    def nbytes(self) -> CallBytes:
        """The device bytes of a call."""
        return CallBytes(PlanRows(self._problem.graph, self.plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Full and lean calls, with the most full forwards that fit; all outstanding ones if all calls are full."""

    full: _Program
    lean: _Program
    num_full: int
    step_s: float
    more: tuple[int, int] = (0, 0)
    """The next larger number of full forwards that was tried, and its peak."""


def _programs(evaluator: Evaluator, draft: DraftPlan, made: Plan) -> Iterator[_Program]:
    """Yield `made`, which is `draft` written out, and plans with the same levels and other modes."""
    problem, levels = evaluator.facts.problem, draft.levels
    yield _Program(problem, made, evaluator.at(draft.modes).step_s(levels, draft.moves))
    for modes in dict.fromkeys(modes_by_depth(evaluator.facts.layers)):
        if modes == draft.modes:
            continue
        own = evaluator.at(modes)
        # How many full forwards fit decides how early transfers may be, so both ends are tried.
        times = [just_in_time(own, levels, budget_bytes=_UNLIMITED_BYTES), own.at_use(levels)]
        for moves in times if times[0] != times[1] else times[:1]:
            moves = moves._replace(streamed=draft.moves.streamed)
            cuts = cut_regions(own.facts, levels, moves)
            actions = schedule(step_actions(own.facts, levels, moves, cuts))
            groups, laps = own.facts.activations, regions(own.facts, cuts)
            plan = replace(made, activations=groups, regions=laps, schedules=(actions,))
            yield _Program(problem, plan, own.step_s(levels, moves))


def _pairs(problem: Problem, host_bytes: int, programs: Sequence[_Program]) -> Iterator[_Pair]:
    """Yield each of `programs` that fits for all calls, and each pair with the most full forwards that fit, if any do.

    `host_bytes` are left on the host for activations of all outstanding forwards.
    """
    calls, most = problem.calls, problem.calls.outstanding - 1
    some = range(most, 0, -math.ceil(most / _MOST_NUMBERS))
    beside = {num_full: Halves(calls, num_full) for num_full in (calls.outstanding, *some)}
    alone = ((own, own, (calls.outstanding,)) for own in programs)
    pairs = (
        (full, lean, some)
        for full, lean in permutations(programs, 2)
        if full.call.step_s < lean.call.step_s and full.nbytes.waiting_bytes > lean.nbytes.waiting_bytes
    )
    for full, lean, numbers in chain(alone, pairs):
        both, more = TwoPrograms(full.nbytes, lean.nbytes), (0, 0)
        for num_full in numbers:
            peak_bytes = both.peak_bytes(beside[num_full])
            away_bytes = num_full * full.offloaded_bytes + (calls.outstanding - num_full) * lean.offloaded_bytes
            if peak_bytes <= problem.budget_bytes and away_bytes <= host_bytes:
                num = num_full_calls(calls, num_full)
                step_s = full.once_s + (num - 1) * full.call.step_s + (calls.num - num) * lean.call.step_s
                yield _Pair(full=full, lean=lean, num_full=num_full, step_s=step_s, more=more)
                break
            more = num_full, peak_bytes


def _decisions(pair: _Pair, before: Plan, plan: Plan) -> Iterator[Decision]:
    """Yield the decision to make `pair` the plan `plan`, then the decisions of `before`: those on a layer say which
    calls follow them, or are left out if none do."""
    calls, full, lean = plan.calls, pair.full, pair.lean
    num_lean, num = calls.outstanding - pair.num_full, num_full_calls(calls, pair.num_full)
    others: list[tuple[str, Lack]] = [(f"all {_said(before)}", shortfall(before, plan))]
    because = fitting(plan)
    more, more_bytes = pair.more
    if more_bytes > plan.budget_bytes:
        over_bytes = more_bytes - plan.budget_bytes
        because += f", and with {more} it would be {in_words(Over(over_bytes, 'it'))}"
        others.append((f"{more} of {calls.outstanding}", Over(over_bytes)))
    choice = f"{pair.num_full} of {calls.outstanding} {_said(full.plan)}; the others {_said(lean.plan)}"
    yield decision(
        "outstanding forwards",
        choice if num_lean else f"all {_said(full.plan)}",
        because,
        others=others,
        cost_s=(calls.num - num) * (lean.call.step_s - full.call.step_s),
        saves_bytes=num_lean * (full.nbytes.waiting_bytes - lean.nbytes.waiting_bytes),
    )
    layers = {group.id.rpartition(".")[0] or group.id for group in before.activations}
    for own in before.decisions:
        if own.subject not in layers:
            yield own
        elif full is not lean and before in (full.plan, lean.plan):
            kind = "full" if before is full.plan else "lean"
            yield replace(own, choice=f"{own.choice}, in {kind} calls")


def _said(plan: Plan) -> str:
    """Return the treatment of activations in each forward of `plan`: `recompute 3.0 MiB and offload 1.0 MiB each`."""
    words = {Saving.RECOMPUTE: "recompute", Saving.OFFLOAD: "offload"}
    found = {saving: sum(own.nbytes for own in plan.activations if own.saving is saving) for saving in words}
    said = [f"{words[saving]} {format_bytes(nbytes)}" for saving, nbytes in found.items() if nbytes]
    return f"{' and '.join(said)} each" if said else "keep their activations"
