"""Notice gradients that stay through the next forward, have plans count them, and remember it for later runs.

```text
  step 0    forward backward          no gradient is there before
            forward                   gradients of the first backward are there: plan again, with sums of gradients
            forward ...               every later plan of the model counts them
  later     forward                   the plan cache remembers the problem: the first plan counts them
```

The bytes of these gradients are in the buckets of the plan, as sums (see `Bucket.sum_nbytes`).
"""

from collections.abc import Callable

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Plan
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.session.agreement import any_of_all, asked_by_all
from elixir_compile.session.cache import forget_accumulation, remember_accumulation, remembers_accumulation
from elixir_compile.session.step_profiler import Progress

_NUM_TRIED = 8
"""Forwards without gradients of an earlier backward after which a remembered accumulation is forgotten. A step of one
micro-batch leaves none, and a step of several leaves some at its second forward."""


class StayingGradients:
    """The gradients of earlier backward passes, as the forwards and backwards of one training graph find them."""

    def __init__(self, executor: Executor, options: Options, progress: Progress) -> None:
        self._executor = executor
        self._options = options
        self._progress = progress
        self._first: Problem | None = None
        """The first problem of the graph, without sums of gradients: later runs ask it again."""
        self._num_without = 0
        """Forwards that found no kept gradients, since the graph was planned from memory."""
        self._is_from_memory = False

    def notice(self, *, is_forward: bool) -> None:
        """Look for gradients of an earlier backward, before a forward or a backward of the graph."""
        gradients = self._executor.gradients
        if gradients.stay and not self._is_from_memory:
            return
        if gradients.staying_bytes(self._executor.slots.values()):
            gradients.stay, self._is_from_memory = True, False
            if self._first is not None and self._options.accumulate is None:
                remember_accumulation(self._first, self._options)
            if self._options.plan is not None:
                self._progress.say(
                    "accumulates: gradients of earlier backward passes stay. The plan of the option `plan` counts them "
                    "only if it was made with the option `accumulate`"
                )
        elif is_forward and self._is_from_memory and self._first is not None:
            self._num_without += 1
            if self._num_without == _NUM_TRIED:
                self._is_from_memory = False
                forget_accumulation(self._first, self._options)

    def is_missing_in(self, plan: Plan) -> bool:
        """Return whether gradients stay and `plan` does not count them. The user's own plan is never replaced."""
        return self._executor.gradients.stay and not plan.counts_staying_gradients and self._options.plan is None

    def take_over(self, other: "StayingGradients") -> None:
        """Take over the first problem of `other`, of an earlier capture of the same step."""
        self._first = self._first or other._first

    def answered(
        self, problem: Problem, ask: Callable[[], Problem], answer: Callable[[Problem], Plan]
    ) -> tuple[Problem, Plan]:
        """Return `problem` and its plan.

        If an earlier run of the problem found gradients that stay, return the problem that counts them, from `ask`, and
        its plan; unless no such plan fits. Raises NoFeasiblePlan if `answer` does for `problem`.
        """
        executor = self._executor
        self._is_from_memory = self._remembers(problem)
        if any_of_all(executor, self._is_from_memory, "gradients that stayed in earlier runs"):
            executor.gradients.stay = True
            with_sums = asked_by_all(executor, ask)
            try:
                return with_sums, answer(with_sums)
            except NoFeasiblePlan:
                executor.gradients.stay = self._is_from_memory = False
        return problem, answer(problem)

    def _remembers(self, problem: Problem) -> bool:
        is_first = self._first is None and not problem.accumulates and problem.trains
        if not is_first:
            return False
        self._first = problem
        is_asked = self._options.accumulate is None and self._options.plan is None
        return is_asked and remembers_accumulation(problem, self._options)

    def planned(self, before: Plan, after: Plan) -> bool:
        """Log that `after` replaces `before` because it counts gradients that stay; return whether it does."""
        is_noticed = after.counts_staying_gradients and not before.counts_staying_gradients
        if is_noticed:
            there = format_bytes(self._executor.gradients.staying_bytes(self._executor.slots.values()))
            peaks = [format_bytes(plan.prediction.device_peak_bytes) for plan in (before, after)]
            self._progress.say(
                f"accumulates: {there} of gradients of earlier backward passes stay, and are in the plan from now on: "
                f"peak planned as {peaks[1]} of {format_bytes(after.budget_bytes)}, {peaks[0]} without them. If they "
                "need not stay, call `optimizer.zero_grad()` before the forward; if they do, the option `accumulate` "
                "counts them from the first step on"
            )
        return is_noticed
