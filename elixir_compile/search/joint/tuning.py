"""Choose how the tokens of an optimizer step are divided, together with the plan, for the most tokens per second.

```text
  tokens per step  =  rows of one forward  x  tokens of a row  x  forwards  x  ranks
  a setting        =  rows, forwards, micro-batches of each layer, bytes of optimizer state per element
  seconds          =  the step of the plan, with its update  +  (forwards - 1) x its forward and backward alone
```

Each setting is a problem of its own, and its plan is the plan that the problem gets alone. A setting is searched only
if its bound leaves room for an improvement. Bounds get sharper in stages, and the setting with the lowest bound always
comes first:

    compute     the relaxed optimum of the forward and backward alone, in unlimited memory: of more rows, then its own
    fits        the smallest peak; a setting that does not fit is never searched
    relaxed     the relaxed optimum of the step, and of the forward and backward alone, in the memory that is there

The best setting of each number of bytes of state is proved apart from the others: state is a choice of precision.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

from elixir_compile.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.ir import Plan
from elixir_compile.search.best import relaxed_bound_s
from elixir_compile.search.clock import Clock, Deadline, deadline_in
from elixir_compile.search.joint.accumulated import again_bound_s, again_record, evaluator_of, limits_of
from elixir_compile.search.joint.settings import Setting
from elixir_compile.search.limits import leanest
from elixir_compile.search.problem import Problem

GAIN = 0.01
"""A setting is not searched if its bound shows that it is faster by at most this share."""


class Questions(Protocol):
    """The problems of the settings, from whoever captures the model."""

    def forms(self, setting: Setting) -> Iterable[Problem]:
        """Yield the problem of `setting` with the loss whole, then with the loss in chunks if it can be chunked."""
        ...

    def numbers(self, rows: int) -> Sequence[int]:
        """Return the numbers of micro-batches to try for `rows`, in rising order."""
        ...

    def plan(self, setting: Setting) -> tuple[Plan, Problem]:
        """Return the plan that `setting` gets alone, and its problem. Raises NoFeasiblePlan."""
        ...


class Stage(IntEnum):
    """What is known of a setting."""

    MORE_ROWS = 0
    """The bound of a forward and backward with more rows."""
    COMPUTE = 1
    """The bound of its own forward and backward in unlimited memory."""
    FITS = 2
    """That its smallest peak fits."""
    RELAXED = 3
    """The bound in the memory that is there."""
    SEARCHED = 4
    """Its plan."""
    TOO_LARGE = 5
    """That no plan fits."""
    NOT_BETTER = 6
    """That its bound shows no gain worth a search."""
    NOT_SEARCHED = 7
    """That the time was over before it was searched."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A setting with all that the search has found out about it."""

    setting: Setting
    bound_s: float
    """No plan of the setting takes fewer seconds for the tokens of a step."""
    stage: Stage = Stage.MORE_ROWS
    """The last fact found out."""
    plan: Plan | None = None
    step_s: float = math.inf
    """Seconds of the optimizer step under `plan`: of all its forwards, backwards and its update."""
    limits: tuple[str, ...] = ()
    """The lanes on the critical path of the step under `plan`, with their shares, and the full memories."""
    needed: NoFeasiblePlan | int | None = None
    """If nothing fits: the error of the search, or the smallest peak in bytes of device memory."""

    @property
    def tokens_per_s(self) -> float:
        return self.setting.tokens / self.step_s

    @property
    def needed_bytes(self) -> int:
        """If nothing fits, the smallest peak that was found, or 0 if it is not known."""
        return self.needed.needed_bytes if isinstance(self.needed, NoFeasiblePlan) else self.needed or 0

    @property
    def most_tokens_per_s(self) -> float:
        """A limit on the tokens per second of the setting under any plan; 0 if no plan fits."""
        return 0.0 if self.stage is Stage.TOO_LARGE else self.setting.tokens / max(self.bound_s, 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The rows of a search over settings."""

    rows: tuple[Row, ...]
    """The rows that have a plan, fastest first, then the other rows by their bounds."""

    @property
    def is_complete(self) -> bool:
        """Whether every row was searched, or shown to be no faster or too large, before the time was over."""
        return all(row.stage is not Stage.NOT_SEARCHED for row in self.rows)

    @property
    def best(self) -> Row:
        return self.rows[0]

    @property
    def gap(self) -> float:
        """The most by which the tokens per second of any row could exceed those of the best row, as a share of the
        best row's."""
        most = max(row.most_tokens_per_s for row in self.rows)
        return max(0.0, most / self.best.tokens_per_s - 1.0)

    def of_state(self, state_bytes: int | None) -> "Tuned | None":
        """Return the rows with `state_bytes` alone; None if none of them has a plan."""
        rows = tuple(row for row in self.rows if row.setting.state_bytes == state_bytes)
        return Tuned(rows=rows) if rows and rows[0].plan is not None else None


Report = Callable[[str], None]
"""Called with a line about the progress."""


def tune(
    settings: Sequence[Setting], questions: Questions, timeout_s: float, report: Report = lambda line: None
) -> Tuned:
    """Return all rows of `settings`, searched until no other row can be faster by more than `GAIN`.

    No search begins after `timeout_s` CPU seconds. `settings` are given for one micro-batch; rows with more are added.
    Raises the NoFeasiblePlan with the smallest need if no setting has a plan, InvalidOption if there are no settings.
    """
    if not settings:
        raise InvalidOption("tune", "no settings", "at least one")
    clock = Clock()
    states = list(dict.fromkeys(setting.state_bytes for setting in settings))
    search = _Search(questions, report)
    rows: list[Row] = []
    for number, state in enumerate(states, start=1):
        own = [setting for setting in settings if setting.state_bytes == state]
        rows += search.rows_of(own, clock.until(timeout_s * number / len(states)))
    if all(row.plan is None for row in rows):
        raise _smallest_need(rows, questions)
    return Tuned(rows=tuple(sorted(rows, key=_order)))


def _order(row: Row) -> tuple[bool, float, bool, float]:
    is_fit = row.stage is not Stage.TOO_LARGE
    return row.plan is None, row.step_s / row.setting.tokens, not is_fit, row.bound_s / row.setting.tokens


def _smallest_need(rows: Sequence[Row], questions: Questions) -> NoFeasiblePlan:
    """Return the error of the setting that needs the fewest bytes."""
    least = min((row for row in rows if row.stage is Stage.TOO_LARGE), key=lambda row: row.needed_bytes)
    if isinstance(least.needed, NoFeasiblePlan):
        return least.needed
    try:
        questions.plan(least.setting)
    except NoFeasiblePlan as error:
        return error.with_traceback(None)
    raise AssertionError(f"{least.setting} needs {least.needed} bytes, and a plan was found in fewer")


@dataclass(slots=True)
class _Search:
    """The search over the settings of one model."""

    questions: Questions
    report: Report
    compute_s: dict[int, float] = field(default_factory=dict)
    """By rows, the bound of a forward and backward in unlimited memory."""
    floors: dict[tuple[int, int], int | None] = field(default_factory=dict)
    """By rows and micro-batches, the smallest peak if it is over the budget, else None."""

    def rows_of(self, settings: Sequence[Setting], deadline: Deadline) -> list[Row]:
        """Return the rows of `settings`, which have the same state."""
        rows = [
            Row(setting=replace(setting, micro_batches=number), bound_s=0.0)
            for setting in settings
            for number in self.questions.numbers(setting.rows)
        ]
        while True:
            best_s = min((row.step_s / row.setting.tokens for row in rows), default=0.0)
            for row in rows:
                if row.stage is Stage.MORE_ROWS:
                    row.bound_s = self._known_compute_s(row.setting)
                if row.stage < Stage.SEARCHED and row.bound_s / row.setting.tokens >= best_s * (1 - GAIN):
                    row.stage = Stage.NOT_BETTER
            waiting = [row for row in rows if row.stage < Stage.SEARCHED]
            if not waiting:
                return rows
            if deadline.is_over and best_s < math.inf:
                for row in waiting:
                    row.stage = Stage.NOT_SEARCHED
                return rows
            # Of equal bounds, the setting with more rows comes first, then that with fewer micro-batches.
            row = min(
                waiting,
                key=lambda row: (row.bound_s / row.setting.tokens, -row.setting.rows, row.setting.micro_batches),
            )
            self._refine(row, best_s, deadline)

    def _refine(self, row: Row, best_s: float, deadline: Deadline) -> None:
        """Find out the next fact about `row`. `best_s` are the fewest seconds per token so far, infinite at first."""
        setting = row.setting
        if row.stage is Stage.MORE_ROWS:
            row.bound_s, row.stage = self._compute_bound_s(setting), Stage.COMPUTE
        elif row.stage is Stage.COMPUTE:
            self.report(f"{setting}: does it fit?")
            row.needed = self._too_large_bytes(setting)
            row.stage = Stage.FITS if row.needed is None else Stage.TOO_LARGE
        elif row.stage is Stage.FITS and best_s < math.inf:
            self.report(f"{setting}: bound")
            row.bound_s = max(row.bound_s, self._relaxed_s(setting, best_s * setting.tokens, deadline))
            row.stage = Stage.RELAXED
        else:
            self.report(f"{setting}: plan")
            self._plan(row)

    def _known_compute_s(self, setting: Setting) -> float:
        """Return the bound on the seconds of `setting` by the forward and backward of the same or the next more rows
        whose bound is known, 0 if there are none: fewer rows never take fewer seconds per row."""
        known = [rows for rows in self.compute_s if rows >= setting.rows]
        if not known:
            return 0.0
        return self.compute_s[min(known)] / min(known) * setting.rows * setting.forwards

    def _compute_bound_s(self, setting: Setting) -> float:
        """Return a bound on the seconds of `setting` for any micro-batches and any state.

        Neither micro-batches nor chunks of the loss make compute shorter.
        """
        if setting.rows not in self.compute_s:
            self.report(f"{setting.rows} rows: compute")
            problem = next(iter(self.questions.forms(setting)))
            unlimited_bytes = problem.budget_bytes + 4 * sum(storage.nbytes for storage in problem.graph.storages)
            problem = replace(problem, budget_bytes=unlimited_bytes, host_budget_bytes=unlimited_bytes)
            self.compute_s[setting.rows] = again_bound_s(problem, deadline_in(10.0))
        return self.compute_s[setting.rows] * setting.forwards

    def _too_large_bytes(self, setting: Setting) -> int | None:
        """Return the smallest peak of `setting` if it is over the budget, else None; for every state the same, as state
        may leave the device."""
        key = setting.rows, setting.micro_batches
        if key not in self.floors:
            least_bytes: int | None = None
            for problem in self.questions.forms(setting):
                floor_bytes = leanest(evaluator_of(problem)).floor_bytes
                if floor_bytes <= problem.budget_bytes:
                    least_bytes = None
                    break
                least_bytes = floor_bytes if least_bytes is None else min(least_bytes, floor_bytes)
            self.floors[key] = least_bytes
        return self.floors[key]

    def _relaxed_s(self, setting: Setting, best_s: float, deadline: Deadline) -> float:
        """Return the lowest bound over the forms of the loss.

        Return 0 as soon as the bound of a form is not known, or so low that `setting` has to be searched: it may take
        fewer seconds than `best_s`.
        """
        found: list[float] = []
        for problem in self.questions.forms(setting):
            evaluator = evaluator_of(problem)
            if leanest(evaluator).floor_bytes > problem.budget_bytes:
                continue
            step_s = relaxed_bound_s(evaluator, max(self.compute_s[setting.rows], 1e-12), deadline)
            more_s = 0.0 if setting.forwards == 1 else again_bound_s(problem, deadline)
            found.append(0.0 if step_s is None else step_s + (setting.forwards - 1) * more_s)
            if found[-1] < best_s * (1 - GAIN):
                return 0.0
        return min(found, default=0.0)

    def _plan(self, row: Row) -> None:
        setting = row.setting
        try:
            plan, problem = self.questions.plan(setting)
        except NoFeasiblePlan as error:
            row.needed, row.stage = error.with_traceback(None), Stage.TOO_LARGE
            return
        num_more = setting.forwards - 1
        again, more_bound_s = None, 0.0
        if num_more:
            again = again_record(problem, plan)
            more_bound_s = max(again_bound_s(problem, deadline_in(10.0)), self.compute_s[setting.rows])
        row.plan, row.stage = plan, Stage.SEARCHED
        row.limits = limits_of(problem, plan, again, num_more)
        row.step_s = plan.prediction.step_s + num_more * (0.0 if again is None else again.step_s)
        if plan.bound_s is not None:
            row.bound_s = max(row.bound_s, plan.bound_s + num_more * more_bound_s)
        row.bound_s = min(row.bound_s, row.step_s)
