"""Measure a plan once against the plan of the fastest simple rule, and keep the faster of both.

A search tries the rules too, so no rule has a shorter step than its plan at the prices of the first steps. But only the
works that ran have measured prices: those that the plan avoids, as copies or recomputation, have the prices of the
machine's profile. The guard asks the clock whether these are wrong by so much that a simple rule is faster.

```text
  settled    the first steps have corrected the plan, or not
  watched    2 steps skipped, 5 timed: the period of the plan       at most 10 % above its prediction: no trial
  waited     until a trial takes at most 1 % of the seconds so far; short runs have none
  rivalled   the rule with the shortest step at these prices        at least 0.97 of the period: no trial
  tried      2 steps skipped, 5 timed: the period of the rule       2 % shorter: the rule stays; else the plan is back
```

A trial compiles the programs of the rule and takes seven steps. The first seven steps, in which the plan was searched
and compiled, stand for its seconds. Homes change no bits; other regions may be rounded in another way by Inductor, as
after each new plan.
"""

import math
import time
from collections.abc import Callable, Generator

from elixir_compile.base.options import GuardMode
from elixir_compile.base.units import format_s
from elixir_compile.ir import Plan
from elixir_compile.search.joint.replan import TOLERANCE
from elixir_compile.session.step_profiler import StepProfiler

MOST_SHARE = 0.01
"""The most of the seconds of a run that a trial may take."""
RIVAL_SHARE, KEPT_SHARE = 0.97, 0.98
"""Shares of the period of the plan: a rule is tried if its prediction, and stays if its period is below them."""


class Guard:
    """Times the plan of a graph, and perhaps that of a rule."""

    def __init__(
        self,
        mode: GuardMode,
        profiler: StepProfiler,
        rival: Callable[[], Plan | None],
        say: Callable[[str], None],
    ) -> None:
        """`profiler` times the steps of the graph. `rival` returns the plan of the fastest rule with other homes than
        the plan in use, None if there is none. `say` logs a line."""
        self._mode, self._profiler, self._rival, self._say = mode, profiler, rival, say
        self._made_at_s = time.perf_counter()
        self._comparison: Generator[Plan | None] | None = None
        self._plan: Plan | None = None
        """The plan whose steps are timed."""
        self.period_s: float | None = None
        """The seconds of the steps that were timed last, until they are read."""
        self._due_after_s = math.inf
        """Seconds of the run after which a trial is due; infinite while steps are timed."""

    @property
    def is_on(self) -> bool:
        """Whether a plan is being compared."""
        return self._comparison is not None

    @property
    def is_due(self) -> bool:
        """Whether the comparison goes on: steps were timed, or a trial is due."""
        return self.is_on and (self.period_s is not None or self._run_s >= self._due_after_s)

    @property
    def _run_s(self) -> float:
        return time.perf_counter() - self._made_at_s

    def begin(self, plan: Plan) -> None:
        """Compare `plan` with a rule from the next forward on, if the mode is not `off`."""
        if self._mode != "off":
            self._plan, self._comparison = plan, self._compare(plan)
            next(self._comparison)

    def next_plan(self, plan: Plan) -> Plan | None:
        """Before a forward under `plan` while none is outstanding: return the plan to follow from now on, if it is
        another. The comparison ends if `plan` is not the one that is timed."""
        if self._comparison is None or self._plan is None:
            return None
        if plan.schedules != self._plan.schedules:
            self._comparison = None
            self._profiler.stop()
            return None
        if not self.is_due:
            return None
        try:
            found = next(self._comparison)
        except StopIteration:
            self._comparison = None
            return None
        self._plan = found or self._plan
        return found

    def _compare(self, plan: Plan) -> Generator[Plan | None]:
        always, first_s = self._mode == "always", self._run_s
        plan_s = yield from self._timed(None)
        if not (always or plan_s > (1 + TOLERANCE) * plan.prediction.step_s):
            return
        if not always and self._run_s < first_s / MOST_SHARE:
            self._due_after_s = first_s / MOST_SHARE
            yield None
        rule = self._rival()
        if rule is None or not (always or rule.prediction.step_s < RIVAL_SHARE * plan_s):
            return
        rule_s = yield from self._timed(rule)
        is_taken = rule_s < KEPT_SHARE * plan_s
        result = f"{rule.planner} is taken" if is_taken else "the plan is kept"
        self._say(f"guard     {rule.planner} {format_s(rule_s)}, plan {format_s(plan_s)}: {result}   {plan.name}")
        if not is_taken:
            self._due_after_s = 0.0  # the comparison ends before the next forward
            yield plan

    def _timed(self, follow: Plan | None) -> Generator[Plan | None, None, float]:
        """Return the period of the steps from now on, under the plan `follow`, or the one in use if it is None."""
        self._profiler.measure_again()
        self._due_after_s = math.inf
        yield follow
        period_s, self.period_s = self.period_s, None
        assert period_s is not None, "the comparison goes on once the steps were timed"
        return period_s
