"""Agree among all ranks on a common plan that a leader searches, also if their graphs differ, and call the roll before
each forward.
"""

import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import TypeVar

import torch

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import ElixirError, InvalidPlan, NoFeasiblePlan, PlanFileError
from elixir_compile.base.options import Options
from elixir_compile.base.version import __version__
from elixir_compile.graph.capture.additions import trained_keys, with_absent
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.ir import Bucket, Plan, StepGraph, fingerprint, plan_from_json, plan_to_json
from elixir_compile.runtime.distributed.control import ControlChannel
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer, ranks_text
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.saved import number_of
from elixir_compile.search import Problem
from elixir_compile.search.joint.ranks import Homes, homes_in_step, plan_classes, plan_in_step
from elixir_compile.search.outer import answer
from elixir_compile.search.space.buckets import form_buckets
from elixir_compile.session.planning import ExternalUsage, graph_of, problem_of
from elixir_compile.session.rank_facts import (
    Divide,
    RankFacts,
    classes_of,
    differences,
    digest_of,
    facts_from_text,
    facts_of,
    facts_to_text,
    for_all,
    homes_of,
    leader_of,
    lines_of,
    ops_of,
    plan_digest,
    skeleton_digest,
)
from elixir_compile.step import resized, verify
from elixir_compile.step.structure import collectives_of

# ----------------------------------------------------------------------------------------------------------------------
# The roll call before each forward: all ranks run the same graphs, plan anew together, or raise together.


_FAULT = "!"
"""First character of the text of a rank that failed, or that cannot follow a plan; roll calls begin with a letter, and
digests are hex digits."""
_ROLL = "graphs to run"
_DIGITS = 24
"""Digits of each digest in a roll call: a letter, two digests and a number fit into one short text of the control
channel."""
_ALIKE = "-"
"""Sent in place of a digest if the graphs of all ranks are equal."""
_FIX = (
    "Catch an exception in the middle of a step on all ranks, or on none. The calls so far are dropped on all of them, "
    "and the next forward begins a new step: call `optimizer.zero_grad()` before it."
)


class Step(StrEnum):
    """The next step of all ranks."""

    RUN = "run"
    PLAN = "plan"
    JOIN = "join"
    """Look up the plan for these graphs, and call again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCall:
    """The result of a roll call, equal on all ranks."""

    step: Step
    graph_set_digest: str
    """A digest of the graphs that all ranks are about to run; empty if these are equal."""
    is_measured: bool = False
    """Whether every rank knows its seconds of a step, which can be exchanged now."""


def roll_call(
    control: ControlChannel,
    key: str,
    graph_set_digest: str,
    *,
    wants_plan: bool,
    is_measured: bool = False,
    number: int = 0,
    doing: str = "",
) -> RollCall:
    """Return the next step of all ranks of `control` before the graph `key` can run; all ranks must call this.

    `graph_set_digest` names the graphs for which this rank has a plan at hand. If the graphs are others, the step is
    JOIN. Else it is PLAN if a rank `wants_plan`, and RUN if none does. `is_measured` says that this rank knows its
    seconds of a step. `number` is the number of the forward in a step of several calls, else 0. Takes one collective of
    96 bytes per rank.

    Raises RanksDiffer if a rank calls something else or has another `number`, with the text `doing` of each rank, and
    PeerFailed if a rank failed.
    """
    here = graph_set_digest or _ALIKE
    letter = "p" if wants_plan else "m" if is_measured else "r"
    texts = control.exchange(f"{letter}{digest_of([key])[:_DIGITS]}{here} {number}", _ROLL, doing)
    failed = [place for place, text in enumerate(texts) if text.startswith(_FAULT)]
    if failed:
        raise PeerFailed([control.ranks[place] for place in failed], _ROLL, texts[failed[0]].removeprefix(_FAULT))
    calls, numbers = zip(*(text.split(" ") for text in texts), strict=True)
    control.require_same(numbers, doing, _FIX)
    keys = [call[1 : 1 + _DIGITS] for call in calls]
    found = "" if len(set(keys)) == 1 else digest_of(keys)[:_DIGITS]
    if any(call[1 + _DIGITS :] != (found or _ALIKE) for call in calls):
        return RollCall(step=Step.JOIN, graph_set_digest=found)
    plans = any(call.startswith("p") for call in calls)
    step = Step.PLAN if plans else Step.RUN
    return RollCall(step=step, graph_set_digest=found, is_measured=all(call.startswith("m") for call in calls))


def call_the_roll(
    executor: Executor,
    key: str,
    graph_set_digest: str,
    *,
    wants_plan: bool,
    is_measured: bool,
    number: int,
    doing: str,
) -> RollCall:
    """Return the next step of all ranks of `executor` before this rank runs the graph `key`: see `roll_call`.

    If a queued update of this rank failed, its error is raised here, and PeerFailed on the other ranks. If ranks
    differ, all of them drop the calls of the running step.
    """
    if executor.peers is None:
        return RollCall(step=Step.PLAN if wants_plan else Step.RUN, graph_set_digest=graph_set_digest)
    control = executor.peers.control
    try:
        executor.buckets.check_updates()
    except Exception as error:
        with suppress(ElixirError):  # this rank's own error says more than an error about a lost peer
            control.exchange(f"{_FAULT}{type(error).__name__}: {error}", _ROLL, doing)
        raise
    asked = {"wants_plan": wants_plan, "is_measured": is_measured, "number": number, "doing": doing}
    try:
        found = roll_call(control, key, graph_set_digest, **asked)
    except RanksDiffer:
        executor.abandon()
        raise
    executor.saved.num_calls += 1
    return found


def meet_in_backward(executor: Executor, graph: object, name: str, ticket: torch.Tensor) -> None:
    """Wait until all ranks of `executor` are about to run the backward of the same call.

    This rank runs the backward of the graph `name`, for the forward of `ticket`; the calls of a step are counted for
    `graph`. Raises RanksDiffer if a rank is about to run the backward of another call, or a forward, as after a graph
    break that no other rank has.
    """
    if executor.peers is None:
        return
    control, number = executor.peers.control, executor.calls.number_of_backward(graph, number_of(ticket))
    doing = f"begins the backward of {name}{executor.calls.words(number)}"
    numbers = control.exchange(str(number), f"backward of {executor.saved.call_of(ticket)}", doing)
    control.require_same(numbers, doing, _FIX)


# ----------------------------------------------------------------------------------------------------------------------
# Plans for ranks that differ in memory: one for each class of like ranks, with collectives in one order.
#
#   problems    the first rank of each class: its problem as JSON, with the smallest budgets of its class
#   plans       the first rank of each class searches; its plan as JSON; once more where others release more buckets
#   taken over  every rank: a digest of the skeleton of the plan of its class, verified for its own graph
#
# From the same problems and plans every rank makes the same sequence of collectives (see `search.joint.ranks`), so
# the sequence itself is not sent.


log = logging.getLogger("elixir_compile")

_PROBLEM = Form(what="problem", version=1, error=PlanFileError)


def plan_of_class(
    control: ControlChannel,
    problem: Problem,
    facts: Sequence[RankFacts],
    classes: Sequence[Sequence[int]],
    search: Callable[[Problem], Plan],
) -> Plan | None:
    """Return the plan of the class of this rank, verified for `problem`; None if the plans of `classes` cannot follow
    one sequence of collectives.

    `facts` are those of all ranks, and `classes` the places of the ranks of each class. All ranks must call this.

    Raises NoFeasiblePlan, as raised for the class that is the most short of memory, on all ranks if a class has no
    plan, and RanksDiffer if the skeletons of the plans differ.
    """
    own = next(number for number, members in enumerate(classes) if control.rank in members)
    firsts = [members[0] for members in classes]
    is_first = firsts[own] == control.rank
    asked = replace(for_all(problem, [facts[place] for place in classes[own]]), rank=firsts[own])
    _, texts = control.run_on_all_ranks(
        "problems of classes", lambda: to_json(_PROBLEM, asked, indent=None) if is_first else "", str, {}
    )
    problems = [from_json(_PROBLEM, Problem, texts[first]) for first in firsts]

    def each(work: Callable[[int], Plan]) -> Sequence[Plan]:
        made, said = control.run_on_all_ranks(
            "plans of classes", lambda: answer(work, own) if is_first else None, _text_of, {}
        )
        plans = [
            NoFeasiblePlan(*json.loads(text)) if text.startswith("[") else plan_from_json(text)
            for text in (said[first] for first in firsts)
        ]
        errors = [plan for plan in plans if isinstance(plan, NoFeasiblePlan)]
        if errors:
            worst = _shortest(errors)
            raise made if isinstance(made, NoFeasiblePlan) and made.args == worst.args else worst
        return [plan for plan in plans if isinstance(plan, Plan)]

    try:
        plans = plan_classes(problems, classes, search, each)
    except InvalidPlan as error:
        log.info("%s: one plan for all ranks, because %s", problem.name, error.sentence)
        return None
    return _own_plan(control, problem.graph, plans[own])


def _shortest(errors: Iterable[NoFeasiblePlan]) -> NoFeasiblePlan:
    """Return the error with the largest shortage of device memory, or if there is none, of host memory."""
    return max(errors, key=lambda error: (error.memory == "device", error.needed_bytes - error.budget_bytes))


def _text_of(made: Plan | NoFeasiblePlan | None) -> str:
    """Return `made` as text: JSON of a plan, or of the arguments of the error."""
    if made is None:
        return ""
    return json.dumps(made.args, default=int) if isinstance(made, NoFeasiblePlan) else plan_to_json(made)


def _own_plan(control: ControlChannel, graph: StepGraph, planned: Plan) -> Plan:
    """Return `planned`, the plan of the class of this rank, for `graph`, once all skeletons are found to be equal."""

    def own_plan() -> Plan:
        found = replace(planned, graph=fingerprint(graph), rank=control.rank)
        found = found if planned.graph == found.graph else resized(graph, found)
        verify(graph, found)
        return found

    plan, digests = control.run_on_all_ranks("plans of classes taken over", own_plan, skeleton_digest, {})
    _refuse_odd(control, digests, "would gather and reduce in another order than the other ranks")
    return plan


# ----------------------------------------------------------------------------------------------------------------------
# Agree on a common plan of all ranks, searched by a leader.
#
#   facts       every rank: sizes, and a digest of the shared lines, which must be equal
#   plan        the leader searches, for the smallest budgets and the largest external usage of all; its plan as JSON
#   agreement   every rank: a digest of the plan as converted to and verified for its own graph
#
# Ranks that differ in memory get plans of their own: see `rank_facts`.
#
# Each step is one exchange over the control channel. If a rank fails before an exchange, it sends its error instead,
# and all ranks raise after that exchange.


_Made = TypeVar("_Made")


def agreed_plan(
    control: ControlChannel,
    problem: Problem,
    search: Callable[[Problem], Plan],
    *,
    settings: Mapping[str, str] | None = None,
    may_differ: bool = False,
) -> Plan:
    """Return the plan of all ranks of `control`, verified for the graph of this rank; all ranks must call this.

    `settings` are further options, not in `problem`, to be equal on all ranks. If plans `may_differ`, ranks that differ
    in memory get plans of their own.

    If a rank fails, all raise: NoFeasiblePlan as raised on the failing rank, another error as PeerFailed on the other
    ranks. Raises RanksDiffer if parameters, settings or versions differ, or if ops differ so much that a rank cannot
    follow the plan.
    """
    ops, facts = agreed_facts(control, problem, settings)
    leader = control.rank if control.is_echo else leader_of(facts)
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

    Arguments and errors are as in `agreed_plan`. If this rank has no problem, `failure` is the error it raised instead,
    and it is raised here again.
    """
    same = {**(settings or {}), "elixir_compile": __version__, "torch": str(torch.__version__)}
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
    facts: list[RankFacts] = []
    for place, text in enumerate(texts):
        try:
            facts.append(facts_from_text(text))
        except ElixirError as error:
            odd = ranks_at(control, [place])
            raise RanksDiffer(odd, [f"{ranks_text(odd)} has another version of elixir_compile: {error}"]) from error
    _require_same(control, lines, [fact.digest for fact in facts])
    return ops, facts


def _taken_over(
    control: ControlChannel, graph: StepGraph, planned: str, ops: Sequence[str], ops_digests: Sequence[str]
) -> Plan:
    """Return the plan in the JSON `planned`, converted to `graph`, whose sizes may differ from the leader's, once every
    rank has converted it to its own graph.

    `ops` are the lines of ops of this rank, `ops_digests` the digests of all. Raises RanksDiffer if a rank cannot.
    """

    def own_plan() -> Plan | InvalidPlan:
        try:
            found = resized(graph, replace(plan_from_json(planned), graph=fingerprint(graph)))
            verify(graph, found)
            return found
        except InvalidPlan as fault:
            if len(set(ops_digests)) == 1:
                raise
            return fault.renewed()

    def said_of(plan: Plan | InvalidPlan) -> str:
        return f"{_FAULT}{plan.sentence}" if isinstance(plan, InvalidPlan) else plan_digest(plan)

    plan, said = run_on_all_ranks(control, "plans taken over", own_plan, said_of)
    faults = [
        f"{ranks_text([rank])} cannot follow the plan: {text.removeprefix(_FAULT)}"
        for rank, text in zip(control.ranks, said, strict=True)
        if text.startswith(_FAULT)
    ]
    if faults:
        _require_same(control, ops, ops_digests, faults)
    _refuse_odd(control, said, "took over other buckets, placements or actions than were planned")
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
                agreed_facts(executor.peers.control, None, failure=error)
        raise


def plan_for_all(executor: Executor, problem: Problem, search: Callable[[Problem], Plan], options: Options) -> Plan:
    """Return the plan of all ranks of `executor` by `agreed_plan`; on one rank, the result of `search`."""
    if executor.peers is None:
        return search(problem)
    # Collectives in the graph must be as many on all ranks, so their plans must recompute and divide the same ops.
    has_collectives = any(op.ring is not None for op in problem.graph.ops)
    may_differ = options.plan is None and executor.tensor_axis is None and not has_collectives
    settings = {**settings_of(options), "collectives in the graph": "some" if has_collectives else "none"}
    return agreed_plan(executor.peers.control, problem, search, settings=settings, may_differ=may_differ)


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
    own |= {"plan_use": options.plan_use, "micro_batches": str(options.micro_batches)}
    return {**own, "reduce_dtype": str(options.reduce_dtype)}


def any_of_all(executor: Executor, is_so: bool, what: str) -> bool:
    """Return whether `is_so` is True on any rank of `executor`; all ranks must call this. `what` names the question."""
    if executor.peers is None:
        return is_so
    return "yes" in executor.peers.control.exchange("yes" if is_so else "no", what)


def run_on_all_ranks(
    control: ControlChannel, what: str, make: Callable[[], _Made], text_of: Callable[[_Made], str]
) -> tuple[_Made, tuple[str, ...]]:
    """Return the result of `make`, and from every rank the `text_of` its result; raise on all ranks if any fails.

    `what` names the exchange in error texts.
    """
    return control.run_on_all_ranks(what, make, text_of, {NoFeasiblePlan: attrgetter("args")})


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


def _refuse_odd(control: ControlChannel, digests: Sequence[str], what_they_do: str) -> None:
    """Raise RanksDiffer on all ranks if `digests`, one of every rank, differ; `what_they_do` is a sentence without the
    ranks that have another one than most."""
    odd = ranks_at(control, Divide.of(digests).odd)
    if odd:
        raise RanksDiffer(odd, [f"{ranks_text(odd)} {what_they_do}"])


def ranks_at(control: ControlChannel, places: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks at `places` of `control`, as the default group counts them."""
    return tuple(control.ranks[place] for place in places)


# ----------------------------------------------------------------------------------------------------------------------
# Plan for ranks whose graphs differ, for instance by a branch of the forward that depends on data.
#
#   uses       every rank: which parameters its graph reads and trains
#   capture    every rank: parameters of other ranks' graphs are added to its graph by `graph.capture.additions`
#   facts      as for any plan, see above
#   buckets    the leader forms buckets of the parameters of all ranks
#   homes      every rank: under which placements its own step fits; the first that fit on all are taken
#
# Ranks that use the same parameters first try one plan for all: ops may differ a little, see `rank_facts`.


_MOST_NAMED = 3
"""Parameters that the reason of a decision names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buckets:
    """The buckets of all ranks, as a value with a JSON form."""

    buckets: tuple[Bucket, ...]


_BUCKETS = Form(what="buckets", version=1, error=PlanFileError)


def planned_in_step(
    executor: Executor,
    captured: Captured,
    options: Options,
    sizes: Mapping[str, int],
    search: Callable[[Problem], Plan],
) -> tuple[Captured, Problem, Plan]:
    """Return `captured` with the parameters of other ranks' graphs added, its problem, and its plan.

    `sizes` are the values of its symbols. `search` is called if all ranks use the same parameters. All ranks of
    `executor` must call this.

    Raises RanksDiffer if models or settings differ, or if some ranks train and others do not, and NoFeasiblePlan on all
    ranks if the step of any rank does not fit.
    """
    assert executor.peers is not None
    control = executor.peers.control
    uses = _uses_of_all(control, executor, captured)

    def ask() -> tuple[Captured, Problem]:
        """Return the capture with the parameters of all ranks, and its problem."""
        read, trained = ({name for use in uses for name in use[kind]} for kind in ("reads", "trains"))
        both = ([slot for slot in executor.slots.values() if slot.name in names] for names in (read, trained))
        joint = with_absent(captured, *both)
        external = ExternalUsage(outstanding_bytes=executor.saved.held_bytes())
        return joint, problem_of(joint, graph_of(joint, executor, sizes), executor, options, external)

    joint, problem = asked_by_all(executor, ask)
    if all(use == uses[0] for use in uses):
        try:
            return joint, problem, agreed_plan(control, problem, search, settings=settings_of(options))
        except RanksDiffer as error:
            log.debug("%s: %s", captured.name, error)
    _, facts = agreed_facts(control, problem, settings_of(options))
    buckets = _buckets_of_all(control, problem, leader_of(facts))
    because = _because(control, uses, facts) + ("" if options.plan is None else "; the plan asked for is not followed")
    log.log(logging.INFO if options.plan is None else logging.WARNING, "%s: %s", captured.name, because)
    return joint, problem, _fitting(control, problem, buckets, because)


def _uses_of_all(control: ControlChannel, executor: Executor, captured: Captured) -> list[Mapping[str, list[str]]]:
    """Return the names of the parameters read and trained by the graph of each rank."""
    trained = trained_keys(captured)
    slots = executor.slots.values()
    model = digest_of(f"{slot.name} {slot.param.dtype} {tuple(slot.param.shape)}" for slot in slots)
    own = {
        "kind": "inference" if captured.backward is None else "training",
        "model": model,
        "reads": sorted(captured.param_names.values()),
        "trains": sorted(slot.name for slot in slots if slot.key in trained),
    }
    said = [json.loads(text) for text in control.exchange(json.dumps(own), "parameters in use")]
    for name, sentence in (("model", "{} another model than {}"), ("kind", "{} a graph of {odd}, {} one of {usual}")):
        divide = Divide.of([use[name] for use in said])
        if divide.odd:
            odd = ranks_at(control, divide.odd)
            have = f"{ranks_text(odd)} {'has' if len(odd) == 1 else 'have'}"
            usual, kinds = ranks_text(ranks_at(control, [divide.usual])), {"odd": said[divide.odd[0]][name]}
            raise RanksDiffer(odd, [sentence.format(have, usual, **kinds, usual=said[divide.usual][name])])
    return [{name: use[name] for name in ("reads", "trains")} for use in said]


def _buckets_of_all(control: ControlChannel, problem: Problem, leader: int) -> tuple[Bucket, ...]:
    """Return the buckets of the leader: each rank may use the parameters in another order."""

    def own_buckets() -> str:
        return to_json(_BUCKETS, _Buckets(buckets=form_buckets(problem))) if control.ranks[leader] == own_rank else ""

    own_rank = control.ranks[control.rank]
    _, texts = run_on_all_ranks(control, "buckets", own_buckets, str)
    return tuple(bucket.seen_by(problem.rank) for bucket in from_json(_BUCKETS, _Buckets, texts[leader]).buckets)


def _fitting(control: ControlChannel, problem: Problem, buckets: Sequence[Bucket], because: str) -> Plan:
    """Return the plan of this rank under the first placements at which the steps of all ranks fit."""

    def attempts() -> list[Plan | NoFeasiblePlan]:
        def within(homes: Homes) -> Plan:
            return plan_in_step(problem, buckets, homes, because)

        return [answer(within, homes) for homes in homes_in_step(problem, buckets)]

    def fits(found: Sequence[Plan | NoFeasiblePlan]) -> str:
        return "".join("-" if isinstance(made, NoFeasiblePlan) else "+" for made in found)

    found, said = run_on_all_ranks(control, "placements that fit", attempts, fits)
    tried = zip(found, zip(*said, strict=True), strict=True)
    fitting = [made for made, all_fit in tried if isinstance(made, Plan) and "-" not in all_fit]
    if not fitting:
        # The error is that of the rank which lacks the most memory under the last placements.
        own = found[-1].args if isinstance(found[-1], NoFeasiblePlan) else None
        texts = control.exchange(json.dumps(own, default=int), "room of ranks")
        raise _shortest(NoFeasiblePlan(*facts) for facts in map(json.loads, texts) if facts is not None)

    def digest(plan: Plan) -> str:
        """Regions, and perhaps homes, differ between ranks."""
        return digest_of([*map(repr, plan.buckets), *map(str, collectives_of(plan))])

    _, digests = run_on_all_ranks(control, "plans in step", lambda: fitting[0], digest)
    _refuse_odd(control, digests, "would move other buckets than were planned")
    return fitting[0]


def _because(control: ControlChannel, uses: Sequence[Mapping[str, list[str]]], facts: Sequence[RankFacts]) -> str:
    """Return in words which ranks have another graph than most, and the parameters that not all ranks use."""
    divide = Divide.of([fact.ops_digest for fact in facts])
    odd = ranks_at(control, divide.odd)
    everywhere = set.intersection(*(set(use["reads"]) for use in uses))
    apart = sorted({name for use in uses for name in use["reads"]} - everywhere)
    more = f" and {len(apart) - _MOST_NAMED} more" if len(apart) > _MOST_NAMED else ""
    named = f", not all read {', '.join(apart[:_MOST_NAMED])}{more}" if apart else ""
    usual = ranks_text([control.ranks[divide.usual]])
    return f"{ranks_text(odd)} and {usual} run different graphs{named}; nothing is searched and no transfer hides"
