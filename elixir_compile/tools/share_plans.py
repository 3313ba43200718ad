"""The plans of the ranks of a fleet for given shares, searched and simulated together, without any rank.

```text
  capture, share of each rank --rows of each class--> problems --search, one order of collectives--> plans
```
"""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.ir import Plan
from elixir_compile.ir.hardware import Fleet
from elixir_compile.ir.share import Share
from elixir_compile.search import Problem
from elixir_compile.search.clock import deadline_in
from elixir_compile.search.joint.classes import plan_classes
from elixir_compile.search.question import Question, question_of
from elixir_compile.search.shares.choose import Choice, ShareSearch
from elixir_compile.search.shares.costs import LEAST_ROWS
from elixir_compile.search.shares.offers import Budget
from elixir_compile.search.shares.refine import FoundChoice, SimulatedStep, by_formula, refined
from elixir_compile.session.cache import plan_for
from elixir_compile.step.rows import graph_of_rows
from elixir_compile.tools.preview.capture import Capture

log = logging.getLogger("elixir_compile")


def found_choice(search: ShareSearch, plans: "SharePlans", simulate_s: float = math.inf) -> FoundChoice:
    """Return the shares that `search` finds: the shortest in the simulation of all ranks with `plans`.

    No simulation begins after `simulate_s` seconds; if that is 0, the shares have the shortest step by the formula of
    the search. Raises NoFeasibleShares if nothing fits.
    """
    if not simulate_s:
        return by_formula(search.best())
    return refined(search, plans.simulated, None if math.isinf(simulate_s) else deadline_in(simulate_s))


def simulated_step(plans: Sequence[Plan]) -> SimulatedStep:
    """Return the step of all ranks that follow `plans`, one for each class, as the plans predict it together."""
    step_s = plans[0].prediction.step_s
    busy_s = {rank: line.busy_share * step_s for line in plans[0].classes for rank in line.ranks}
    return SimulatedStep(step_s=step_s, busy_s=tuple(busy_s[rank] for rank in sorted(busy_s)))


class SharePlans:
    """The plans of the ranks of a fleet for any shares of one captured step; each question is searched once."""

    def __init__(self, capture: Capture, fleet: Fleet, budgets: Sequence[Budget], options: Options) -> None:
        """`budgets` are the memory of each rank."""
        self._capture, self._fleet, self._options = capture, fleet, options
        self._budgets = tuple(budgets)
        self._found: dict[tuple[Share, ...], tuple[Plan, ...] | None] = {}
        self._by_class: dict[Hashable, Plan | NoFeasiblePlan] = {}

    def simulated(self, choice: Choice) -> SimulatedStep | None:
        """Return the step of all ranks with the shares of `choice`, or None if they have no plans."""
        plans = self.of(choice.shares)
        return None if plans is None else simulated_step(plans)

    def of(self, shares: tuple[Share, ...]) -> tuple[Plan, ...] | None:
        """Return the plan of each class of like ranks, or None if a class has none, or if the plans cannot follow one
        sequence of collectives.

        These are the plans that the ranks would agree on; their prediction is that of all ranks together. A rank
        without rows runs two. The field `classes` of each plan says which ranks follow which.
        """
        if shares not in self._found:
            try:
                self._found[shares] = self._searched(shares)
            except (NoFeasiblePlan, InvalidPlan) as error:
                log.info("shares of %s rows have no plans: %s", [share.num_rows for share in shares], error)
                self._found[shares] = None
        return self._found[shares]

    def questions(self, shares: tuple[Share, ...]) -> tuple[Question, ...]:
        """Return what the plans of `shares` answer, in their order."""
        return tuple(question_of(*self._asked(shares, ranks[0])) for ranks in self._members(shares))

    def _members(self, shares: tuple[Share, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each class."""
        pairs = zip(shares, self._budgets, strict=True)
        return self._fleet.classes([(share.num_rows, share.state, budget) for share, budget in pairs])

    def _searched(self, shares: tuple[Share, ...]) -> tuple[Plan, ...]:
        members = self._members(shares)
        asked = [self._asked(shares, ranks[0]) for ranks in members]
        options = {problem.rank: own for problem, own in asked}

        def each(work: Callable[[int], Plan]) -> list[Plan]:
            return [work(number) for number in range(len(asked))]

        problems = [problem for problem, _ in asked]
        return plan_classes(problems, members, lambda problem: self._plan_of(problem, options[problem.rank]), each)

    def _plan_of(self, problem: Problem, options: Options) -> Plan:
        """Return the plan for `problem`, that of a class of ranks; other choices may have asked for it already.

        It depends on the rows of the class and the dtypes of moments, and where parts of the state are unequal, on the
        parts of all ranks.
        """
        dtypes = tuple(sorted(problem.state_dtypes.items()))
        key = (problem.rank, problem.graph.batch, problem.state, problem.released, dtypes)
        if key not in self._by_class:
            try:
                self._by_class[key] = plan_for(problem, options)
            except NoFeasiblePlan as error:
                self._by_class[key] = error.renewed()
        found = self._by_class[key]
        if isinstance(found, NoFeasiblePlan):
            raise found.renewed()
        return replace(found, shares=problem.shares)

    def _asked(self, shares: tuple[Share, ...], rank: int) -> tuple[Problem, Options]:
        """Return the problem of `rank` with the rows of its share, and the options with its memory."""
        rows = shares[rank].num_rows or LEAST_ROWS
        own = replace(self._capture, graph=graph_of_rows(self._capture.graph, rows))
        problem = replace(own.problem(self._fleet.seen_by(rank), self._options), rank=rank, shares=shares)
        budget = self._budgets[rank]
        memory = {"device_memory": budget.device_bytes + self._capture.base_bytes, "host_memory": budget.host_bytes}
        own_budgets = {"budget_bytes": memory["device_memory"], "host_budget_bytes": budget.host_bytes}
        return replace(problem, **own_budgets), replace(self._options, **memory, hardware=None)
