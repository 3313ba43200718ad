"""Agree on a common plan of all ranks, searched by a leader.

```text
  facts       every rank: sizes, and a digest of the shared lines, which must be equal
  plan        the leader searches, for the smallest budgets and the largest external usage of all; its plan as JSON
  agreement   every rank: a digest of the plan as converted to and verified for its own graph
```

Ranks that differ in memory get plans of their own: see `unequal`.

Each step is one exchange over the control channel. If a rank fails before an exchange, it sends its error instead, and
all ranks raise after that exchange.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

import torch

from elixir_compile.base.errors import ElixirError, InvalidPlan, NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.version import __version__
from elixir_compile.ir import Plan, StepGraph, fingerprint, plan_from_json, plan_to_json
from elixir_compile.runtime.distributed.control import ControlChannel
from elixir_compile.runtime.distributed.errors import RanksDiffer, ranks_text
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.session.agreement.rank_facts import (
    Divide,
    RankFacts,
    classes_of,
    differences,
    facts_from_text,
    facts_of,
    facts_to_text,
    for_all,
    homes_of,
    leader_of,
    lines_of,
    ops_of,
    plan_digest,
)
from elixir_compile.session.agreement.unequal import plan_of_class
from elixir_compile.step import resized, verify

_Made = TypeVar("_Made")

_FAULT = "!"
"""First character of the text of a rank that cannot follow a plan; digests are hex digits."""


def agreed_plan(
    control: ControlChannel,
    problem: Problem | None,
    search: Callable[[Problem], Plan],
    *,
    settings: Mapping[str, str] | None = None,
    may_differ: bool = False,
    failure: Exception | None = None,
) -> Plan:
    """Return the plan of all ranks of `control`, verified for the graph of this rank; all ranks must call this.

    `settings` are further options, not in `problem`, to be equal on all ranks. If plans `may_differ`, ranks that differ
    in memory get plans of their own. If this rank has no problem, `failure` is the error it raised instead, and it is
    raised here again.

    If a rank fails, all raise: NoFeasiblePlan as raised on the failing rank, another error as PeerFailed on the other
    ranks. Raises RanksDiffer if parameters, settings or versions differ, or if ops differ so much that a rank cannot
    follow the plan.
    """
    ops, facts = agreed_facts(control, problem, settings, failure)
    leader = control.rank if control.is_echo else leader_of(facts)
    assert problem is not None  # without a problem, `agreed_facts` has raised `failure`
    classes = classes_of(facts)
    if may_differ and len(classes) > 1:
        own_plan = plan_of_class(control, problem, facts, classes, search)
        if own_plan is not None:
            return own_plan
    _require_same(control, homes_of(problem), [fact.homes_digest for fact in facts])

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
    """Return the lines of ops of this rank and the facts of all ranks, after a check of their equality.

    Arguments and errors are as in `agreed_plan`.
    """
    same = {**(settings or {}), **_versions()}
    lines: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()

    def own_facts() -> RankFacts:
        nonlocal lines, ops
        if failure is not None:
            raise copy.copy(failure)  # see `ElixirError.renewed`
        assert problem is not None
        lines, ops = lines_of(problem, same), ops_of(problem.graph)
        return facts_of(problem, lines, ops, control.rank)

    _, texts = run_on_all_ranks(control, "facts to plan with", own_facts, facts_to_text)
    facts = _facts_of_all(control, texts)
    _require_same(control, lines, [fact.digest for fact in facts])
    return ops, facts


def _taken_over(
    control: ControlChannel, graph: StepGraph, planned: str, ops: Sequence[str], ops_digests: Sequence[str]
) -> Plan:
    """Return the plan in the JSON `planned`, converted to `graph`, once every rank has converted it to its own graph.

    `ops` are the lines of ops of this rank, `ops_digests` the digests of all. Raises RanksDiffer if a rank cannot.
    """

    def own_plan() -> Plan | InvalidPlan:
        try:
            return _as_own(graph, planned)
        except InvalidPlan as fault:
            if len(set(ops_digests)) == 1:
                raise
            return fault.renewed()

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
    assert isinstance(plan, Plan)  # for a rank with a fault, `_require_same` has raised
    return plan


def asked_by_all(executor: Executor, ask: Callable[[], _Made]) -> _Made:
    """Return the result of `ask`. If it raises, send the error to the other ranks of `executor`, and raise it.

    The other ranks receive the error in `plan_for_all`.
    """
    try:
        return ask()
    except Exception as error:
        if executor.peers is not None:
            with suppress(ElixirError):
                agreed_plan(executor.peers.control, None, _never, failure=error)
        raise


def plan_for_all(executor: Executor, problem: Problem, search: Callable[[Problem], Plan], options: Options) -> Plan:
    """Return the plan of all ranks of `executor` by `agreed_plan`; on one rank, the result of `search`."""
    if executor.peers is None:
        return search(problem)
    # Collectives in the graph must be as many on all ranks, so their plans must recompute and divide the same ops.
    may_differ = options.plan is None and executor.tensor_axis is None
    return agreed_plan(executor.peers.control, problem, search, settings=settings_of(options), may_differ=may_differ)


def adopt_by_all(executor: Executor, plan: Plan, *, for_training: bool, is_new: bool) -> None:
    """Put the buckets of `plan` in force.

    If the plan `is_new`, on all ranks together, and state may be on disk, all ranks raise if any disk is full: DiskFull
    on this rank, PeerFailed on the others.
    """

    def adopt() -> None:
        executor.buckets.adopt(plan.buckets, plan.placements, for_training=for_training)

    # Not asked of the plan: other ranks may have state on disk.
    if executor.peers is None or not is_new or executor.buckets.disk is None:
        adopt()
    else:
        run_on_all_ranks(executor.peers.control, "room on the disk", adopt, lambda _: "")


def settings_of(options: Options) -> Mapping[str, str]:
    """Return the options outside of a problem whose values must be equal on all ranks."""
    own = {"planner": options.planner, "plan": str(options.plan), "inner": options.inner}
    own |= {"micro_batches": str(options.micro_batches)}
    return {**own, "reduce_dtype": str(options.reduce_dtype)}


def any_of_all(executor: Executor, is_so: bool, what: str) -> bool:
    """Return whether `is_so` is True on any rank of `executor`; all ranks must call this. `what` names the question."""
    if executor.peers is None:
        return is_so
    return "yes" in executor.peers.control.exchange("yes" if is_so else "no", what)


def _never(problem: Problem) -> Plan:
    raise AssertionError("a rank that has no problem is not asked for a plan")


def _versions() -> dict[str, str]:
    # `__version__` of torch is a public name.
    return {"elixir_compile": __version__, "torch": str(torch.__version__)}


def _as_own(graph: StepGraph, text: str) -> Plan:
    """Return the plan in `text` for `graph`, the graph of this rank, whose sizes may differ from the leader's."""
    plan = resized(graph, replace(plan_from_json(text), graph=fingerprint(graph)))
    verify(graph, plan)
    return plan


def _digest_or_fault(plan: Plan | InvalidPlan) -> str:
    return f"{_FAULT}{plan.sentence}" if isinstance(plan, InvalidPlan) else plan_digest(plan)


def run_on_all_ranks(
    control: ControlChannel, what: str, make: Callable[[], _Made], text_of: Callable[[_Made], str]
) -> tuple[_Made, tuple[str, ...]]:
    """Return the result of `make`, and from every rank the `text_of` its result; raise on all ranks if any fails.

    `what` names the exchange in error texts.
    """
    return control.run_on_all_ranks(what, make, text_of, {NoFeasiblePlan: attrgetter("args")})


def _facts_of_all(control: ControlChannel, texts: Sequence[str]) -> list[RankFacts]:
    """Return the facts of every rank. Raises RanksDiffer if a rank has a version of the package with another form."""
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
    """Raise RanksDiffer on all ranks if `digests`, the digests of every rank's `lines`, differ.

    The text has `faults` and the differing lines.
    """
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
    """Return the ranks at `places` of `control`, as the default group counts them."""
    return tuple(control.ranks[place] for place in places)
