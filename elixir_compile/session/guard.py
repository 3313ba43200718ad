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

import time
from collections.abc import Callable, Generator

from elixir_compile.base.options import Guard as GuardMode
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

    @property
    def is_on(self) -> bool:
        """Whether a plan is being compared."""
        return self._comparison is not None

    def begin(self, plan: Plan) -> None:
        """Compare `plan` with a rule from the next forward on, if the mode is not `off`."""
        if self._mode != "off":
            self._plan, self._comparison = plan, self._compare(plan)
            next(self._comparison)

    def next_plan(self, plan: Plan) -> Plan | None:
        """Before each forward under `plan` while none is outstanding: return the plan to follow from now on, if it is
        another. The comparison ends if `plan` is not the one that is timed."""
        if self._comparison is None or self._plan is None:
            return None
        found = None
        try:
            if plan.schedules == self._plan.schedules:
                found = next(self._comparison)
                self._plan = found or self._plan
            else:
                self._comparison = None
                self._profiler.stop()
        except StopIteration:
            self._comparison = None
        return found

    def _compare(self, plan: Plan) -> Generator[Plan | None]:
        always, first_s = self._mode == "always", time.perf_counter() - self._made_at_s
        plan_s = yield from self._timed()
        if not (always or plan_s > (1 + TOLERANCE) * plan.prediction.step_s):
            return
        while not always and first_s > MOST_SHARE * (time.perf_counter() - self._made_at_s):
            yield None
        rule = self._rival()
        if rule is None or not (always or rule.prediction.step_s < RIVAL_SHARE * plan_s):
            return
        yield rule
        rule_s = yield from self._timed()
        is_taken = rule_s < KEPT_SHARE * plan_s
        result = f"{rule.planner} is taken" if is_taken else "the plan is kept"
        self._say(f"guard     {rule.planner} {format_s(rule_s)}, plan {format_s(plan_s)}: {result}   {plan.name}")
        if not is_taken:
            yield plan

    def _timed(self) -> Generator[None, None, float]:
        """Return the period of the steps from now on."""
        self._profiler.measure_again()
        self.period_s = None
        while self.period_s is None:
            yield None
        return self.period_s
