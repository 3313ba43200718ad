"""Plans for ranks that differ in memory: one for each class of like ranks, with collectives in one order.

```text
  problems    the first rank of each class: its problem as JSON, with the smallest budgets of its class
  plans       the first rank of each class searches; its plan as JSON; once more where others release more buckets
  taken over  every rank: a digest of the skeleton of the plan of its class, verified for its own graph
```

From the same problems and plans every rank makes the same sequence of collectives (see `search.joint.classes`), so the
sequence itself is not sent.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan, PlanFileError
from elixir_compile.ir import Plan, StepGraph, fingerprint, plan_from_json, plan_to_json
from elixir_compile.runtime.distributed.control import ControlChannel
from elixir_compile.runtime.distributed.errors import RanksDiffer, ranks_text
from elixir_compile.search import Problem
from elixir_compile.search.joint.classes import plan_classes
from elixir_compile.session.agreement.rank_facts import Divide, RankFacts, for_all, skeleton_digest
from elixir_compile.step import resized, verify

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
            "plans of classes", lambda: _attempt(work, own) if is_first else None, _text_of, {}
        )
        plans = [_plan_or_error(said[first]) for first in firsts]
        errors = [plan for plan in plans if isinstance(plan, NoFeasiblePlan)]
        if errors:
            worst = max(errors, key=lambda error: (error.memory == "device", error.needed_bytes - error.budget_bytes))
            raise made if isinstance(made, NoFeasiblePlan) and made.args == worst.args else worst
        return [plan for plan in plans if isinstance(plan, Plan)]

    try:
        plans = plan_classes(problems, classes, search, each)
    except InvalidPlan as error:
        log.info("%s: one plan for all ranks, because %s", problem.name, error.sentence)
        return None
    return _taken_over(control, problem.graph, plans[own])


def _attempt(work: Callable[[int], Plan], number: int) -> Plan | NoFeasiblePlan:
    try:
        return work(number)
    except NoFeasiblePlan as error:
        return error.renewed()


def _text_of(made: Plan | NoFeasiblePlan | None) -> str:
    """Return `made` as text: JSON of a plan, or of the arguments of the error."""
    if made is None:
        return ""
    return json.dumps(made.args, default=int) if isinstance(made, NoFeasiblePlan) else plan_to_json(made)


def _plan_or_error(text: str) -> Plan | NoFeasiblePlan:
    return NoFeasiblePlan(*json.loads(text)) if text.startswith("[") else plan_from_json(text)


def _taken_over(control: ControlChannel, graph: StepGraph, planned: Plan) -> Plan:
    """Return `planned`, the plan of the class of this rank, for `graph`, once all skeletons are found to be equal."""

    def own_plan() -> Plan:
        found = replace(planned, graph=fingerprint(graph), rank=control.rank)
        found = found if planned.graph == found.graph else resized(graph, found)
        verify(graph, found)
        return found

    plan, digests = control.run_on_all_ranks("plans of classes taken over", own_plan, skeleton_digest, {})
    divide = Divide.of(digests)
    if divide.odd:
        odd = tuple(control.ranks[place] for place in divide.odd)
        raise RanksDiffer(odd, [f"{ranks_text(odd)} would gather and reduce in another order than the other ranks"])
    return plan
