"""One plan for all ranks, made by one of them.

```text
  facts       every rank: sizes, and a digest of what must be equal
  plan        the leader searches, for the smallest budgets and the largest floors of all; its plan as JSON
  agreement   every rank: a digest of the plan that it took over, verified for its own graph
```

Each step is one exchange, and carries what went wrong before it on any rank: then all ranks raise, in the same step.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import TypeVar

import torch

from elixir_compile.analysis import resized, verify
from elixir_compile.errors import ElixirError, InvalidPlan, NoFeasiblePlan
from elixir_compile.ir import Plan, StepGraph, Tier, fingerprint, plan_from_json, plan_to_json
from elixir_compile.managed.agreement.rank_facts import (
    Divide,
    RankFacts,
    differences,
    digest_of,
    facts_from_text,
    facts_of,
    facts_to_text,
    for_all,
    leader_of,
    lines_of,
    ops_of,
    plan_digest,
)
from elixir_compile.options import Options
from elixir_compile.runtime.distributed.control import ControlChannel
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer, ranks_text
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.version import __version__

_Made = TypeVar("_Made")

_FAULT = "!"
"""What begins the text of a rank that cannot go on; digests have digits only, and roll calls begin with a letter."""
_ROLL = "graphs to run"
_DIGITS = 24
"""Of each digest in a roll call: two of them and a letter are one short text."""
_ALIKE = "-"
"""What stands for ranks whose graphs are equal."""


def agreed_plan(
    control: ControlChannel,
    problem: Problem | None,
    search: Callable[[Problem], Plan],
    *,
    settings: Mapping[str, str] | None = None,
    failure: Exception | None = None,
) -> Plan:
    """Return the plan that all ranks of `talk` follow, verified for the graph of this one; all of them must call this.

    `settings` are options, beyond those in `problem`, that must be equal on all ranks. `failure` is why this rank has
    no problem; it is raised here. Where any rank fails, all raise: NoFeasiblePlan as the failing rank has it, what else
    as PeerFailed on the others. Raises RanksDiffer where parameters, settings or versions differ, or ops such that a
    rank cannot follow the plan.
    """
    ops, facts = agreed_facts(control, problem, settings, failure)
    leader = control.rank if control.is_echo else leader_of(facts)

    def own_answer() -> str:
        return plan_to_json(search(for_all(problem, facts))) if leader == control.rank else ""

    _, answers = run_on_all_ranks(control, "the plan", own_answer, str)
    return _taken_over(control, problem.graph, answers[leader], ops, [fact.ops_digest for fact in facts])


def agreed_facts(
    control: ControlChannel,
    problem: Problem | None,
    settings: Mapping[str, str] | None = None,
    failure: Exception | None = None,
) -> tuple[tuple[str, ...], list[RankFacts]]:
    """Return the ops of this rank and the facts of all, once what must be equal is; see `agreed_plan`."""
    same = {**(settings or {}), **_versions()}
    lines: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()

    def own_facts() -> RankFacts:
        nonlocal lines, ops
        if failure is not None:
            raise failure
        lines, ops = lines_of(problem, same), ops_of(problem.graph)
        return facts_of(problem, lines, ops)

    _, texts = run_on_all_ranks(control, "facts to plan with", own_facts, facts_to_text)
    facts = _facts_of_all(control, texts)
    _require_same(control, lines, [fact.digest for fact in facts])
    return ops, facts


def _taken_over(
    control: ControlChannel, graph: StepGraph, planned: str, ops: Sequence[str], ops_digests: Sequence[str]
) -> Plan:
    """Return the plan that `planned` is, for `graph`, once every rank has it for its own."""

    def own_plan() -> Plan | InvalidPlan:
        try:
            return _as_own(graph, planned)
        except InvalidPlan as fault:
            if len(set(ops_digests)) == 1:
                raise
            return fault

    plan, said = run_on_all_ranks(control, "plans taken over", own_plan, _digest_or_fault)
    faults = [
        f"{ranks_text([rank])} cannot follow the plan: {text.removeprefix(_FAULT)}"
        for rank, text in zip(control.ranks, said, strict=True)
        if text.startswith(_FAULT)
    ]
    if faults:
        _require_same(control, ops, ops_digests, faults)
    divide = Divide.of(said)
    if divide.odd:
        odd = ranks_at(control, divide.odd)
        raise RanksDiffer(odd, [f"{ranks_text(odd)} took over other buckets, placements or actions than were planned"])
    return plan


def asked_by_all(executor: Executor, ask: Callable[[], _Made]) -> _Made:
    """Return what `ask` does; what it raises is told to the other ranks of `executor`, which go to `plan_for_all`."""
    try:
        return ask()
    except Exception as error:
        if executor.ranks is not None:
            with suppress(ElixirError):
                agreed_plan(executor.ranks.control, None, _never, failure=error)
        raise


def plan_for_all(executor: Executor, problem: Problem, search: Callable[[Problem], Plan], options: Options) -> Plan:
    """Return the plan that all ranks of `executor` follow: see `agreed_plan`; of one rank, what it finds."""
    if executor.ranks is None:
        return search(problem)
    return agreed_plan(executor.ranks.control, problem, search, settings=settings_of(options))


def adopt_by_all(executor: Executor, plan: Plan, *, for_training: bool, is_new: bool) -> None:
    """Put the buckets of `plan` in force. Where `is_new`, on all ranks at once, and it keeps state on disk, all raise
    where one has no room for its own: DiskFull there, PeerFailed on the others."""

    def adopt() -> None:
        executor.adopt(plan.buckets, plan.placements, for_training=for_training)

    if executor.ranks is None or not is_new or all(home.optim is not Tier.DISK for home in plan.placements):
        adopt()
    else:
        run_on_all_ranks(executor.ranks.control, "room on the disk", adopt, lambda _: "")


def settings_of(options: Options) -> Mapping[str, str]:
    """Return the options, beyond those in a problem, that must be equal on all ranks."""
    own = {"planner": options.planner, "plan": str(options.plan), "inner": options.inner}
    return {**own, "reduce_dtype": str(options.reduce_dtype)}


def any_of_all(executor: Executor, is_so: bool, what: str) -> bool:
    """Return whether it `is_so` on any rank of `executor`; all of them must ask. `what` says in a few words what is."""
    if executor.ranks is None:
        return is_so
    return "yes" in executor.ranks.control.exchange("yes" if is_so else "no", what)


def call_the_roll(executor: Executor, key: str, graph_set_digest: str, *, wants_plan: bool, doing: str) -> "RollCall":
    """Return what all ranks of `executor` do next, where this one is about to run the graph `key`: see `roll_call`.

    What failed in an update of this rank is raised here, and is PeerFailed on the others.
    """
    if executor.ranks is None:
        return RollCall(step=Step.PLAN if wants_plan else Step.RUN, graph_set_digest=graph_set_digest)
    control = executor.ranks.control
    try:
        executor.check_updates()
    except Exception as error:
        with suppress(ElixirError):  # this rank's own error says more than that a peer is gone too
            control.exchange(f"{_FAULT}{type(error).__name__}: {error}", _ROLL, doing)
        raise
    found = roll_call(control, key, graph_set_digest, wants_plan=wants_plan, doing=doing)
    executor.num_calls += 1
    return found


def meet_in_backward(executor: Executor, name: str, ticket: torch.Tensor) -> None:
    """Return when all ranks of `executor` are about to run the backward of the same call, this one that of the graph
    `name`, whose forward has `ticket`; RanksDiffer where one runs that of another, or a forward, as behind a graph
    break that others do not have."""
    if executor.ranks is not None:
        what = f"backward of {executor.saved.call_of(ticket)}"
        executor.ranks.control.exchange("", what, f"begins the backward of {name}")


def _never(problem: Problem) -> Plan:
    raise AssertionError("a rank that has no problem is not asked for a plan")


class Step(StrEnum):
    """What all ranks do next."""

    RUN = "run"
    PLAN = "plan"
    JOIN = "join"
    """Look for what was planned for these graphs, and call again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCall:
    """What a roll call says."""

    step: Step
    graph_set_digest: str
    """A digest of the graphs that all ranks are about to run; empty where they are equal."""


def roll_call(
    control: ControlChannel, key: str, graph_set_digest: str, *, wants_plan: bool, doing: str = ""
) -> RollCall:
    """Return what all ranks of `talk` do before the graph `key` can run; all of them must call this.

    `graph_set_digest` names the graphs for which this rank has a plan at hand. It is one collective of 96 bytes per
    rank. Raises RanksDiffer, with what each rank is `doing`, if a rank does something else.
    """
    here = graph_set_digest or _ALIKE
    calls = control.exchange(f"{'p' if wants_plan else 'r'}{digest_of([key])[:_DIGITS]}{here}", _ROLL, doing)
    failed = [place for place, call in enumerate(calls) if call.startswith(_FAULT)]
    if failed:
        raise PeerFailed(ranks_at(control, failed), _ROLL, calls[failed[0]].removeprefix(_FAULT))
    keys = [call[1 : 1 + _DIGITS] for call in calls]
    found = "" if len(set(keys)) == 1 else digest_of(keys)[:_DIGITS]
    if any(call[1 + _DIGITS :] != (found or _ALIKE) for call in calls):
        return RollCall(step=Step.JOIN, graph_set_digest=found)
    plans = any(call.startswith("p") for call in calls)
    return RollCall(step=Step.PLAN if plans else Step.RUN, graph_set_digest=found)


def _versions() -> dict[str, str]:
    # A public name, underscores and all.
    return {"elixir_compile": __version__, "torch": str(torch.__version__)}


def _as_own(graph: StepGraph, text: str) -> Plan:
    """Return the plan in `text` for `graph`, of this rank, whose sizes may be others."""
    plan = resized(graph, replace(plan_from_json(text), graph=fingerprint(graph)))
    verify(graph, plan)
    return plan


def _digest_or_fault(plan: Plan | InvalidPlan) -> str:
    return f"{_FAULT}{plan.sentence}" if isinstance(plan, InvalidPlan) else plan_digest(plan)


def run_on_all_ranks(
    control: ControlChannel, what: str, make: Callable[[], _Made], text_of: Callable[[_Made], str]
) -> tuple[_Made, tuple[str, ...]]:
    """Return what `make` returns, and the text of it from every rank; raise on all ranks where any of them fails."""
    return control.run_on_all_ranks(what, make, text_of, {NoFeasiblePlan: attrgetter("args")})


def _facts_of_all(control: ControlChannel, texts: Sequence[str]) -> list[RankFacts]:
    """Read the facts of every rank; RanksDiffer where another version of the package wrote them in another form."""
    found: list[RankFacts] = []
    for place, text in enumerate(texts):
        try:
            found.append(facts_from_text(text))
        except ElixirError as error:
            odd = ranks_at(control, [place])
            raise RanksDiffer(odd, [f"{ranks_text(odd)} has another version of elixir_compile: {error}"]) from error
    return found


def _require_same(
    control: ControlChannel, lines: Sequence[str], digests: Sequence[str], faults: Sequence[str] = ()
) -> None:
    """Raise RanksDiffer on all ranks, with `faults` and what differs, where `lines` do; all have the same `digests`."""
    divide = Divide.of(digests)
    if not divide.odd:
        return
    said = [json.loads(text) for text in control.exchange(json.dumps(lines), "what differs")]
    usual_name = ranks_text([control.ranks[divide.usual]])
    found = dict.fromkeys(faults)
    for place in divide.odd:
        odd_name = ranks_text([control.ranks[place]])
        found |= dict.fromkeys(differences(said[divide.usual], said[place], usual_name, odd_name))
    raise RanksDiffer(ranks_at(control, divide.odd), list(found))


def ranks_at(control: ControlChannel, places: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks at `places` of `talk`, as the default group counts them."""
    return tuple(control.ranks[place] for place in places)
