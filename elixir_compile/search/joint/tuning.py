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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from elixir_compile.base.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.ir import Plan
from elixir_compile.search.best import relaxed_bound_s
from elixir_compile.search.clock import Clock, Deadline, deadline_in
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.joint.accumulated import again_bound_s, again_record, evaluator_of, limits_of
from elixir_compile.search.joint.settings import Setting
from elixir_compile.search.joint.tuned import Stage, Trial, Tuned, order
from elixir_compile.search.limits import uniform_modes
from elixir_compile.search.problem import Problem

GAIN = 0.01
"""A setting is not searched if its bound shows that it is faster by at most this share."""
_MOST_SLOWER = 2
"""So many numbers of rows in turn may be slower before the search goes on in the order of the bounds."""


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


Report = Callable[[str], None]
"""Called with a line about the progress."""


def tune(
    settings: Sequence[Setting], questions: Questions, timeout_s: float, report: Report = lambda line: None
) -> Tuned:
    """Return all trials of `settings`, searched until no other trial can be faster by more than `GAIN`.

    No search begins after `timeout_s` CPU seconds. `settings` are given for one micro-batch, those with the fewest
    bytes of state first; trials with more micro-batches are added.
    Raises the NoFeasiblePlan with the smallest need if no setting has a plan, InvalidOption if there are no settings.
    """
    if not settings:
        raise InvalidOption("tune", "no settings", "at least one")
    clock = Clock()
    states = list(dict.fromkeys(setting.state_bytes for setting in settings))
    search = _Search(questions, report)
    trials: list[Trial] = []
    for number, state in enumerate(states, start=1):
        own = [setting for setting in settings if setting.state_bytes == state]
        deadline = clock.until(timeout_s * number / len(states))
        trials += search.trials_of(own, trials, deadline)
    if all(trial.plan is None for trial in trials):
        raise _smallest_need(trials, questions).renewed()
    return Tuned(trials=tuple(sorted(trials, key=order)))


def _smallest_need(trials: Sequence[Trial], questions: Questions) -> NoFeasiblePlan:
    """Return the error of the setting that needs the fewest bytes."""
    least = min((trial for trial in trials if trial.stage is Stage.TOO_LARGE), key=lambda trial: trial.needed_bytes)
    if isinstance(least.needed, NoFeasiblePlan):
        return least.needed
    try:
        questions.plan(least.setting)
    except NoFeasiblePlan as error:
        return error.renewed()
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

    def trials_of(self, settings: Sequence[Setting], earlier: Sequence[Trial], deadline: Deadline) -> list[Trial]:
        """Return the trials of `settings`, which have the same state; `earlier` are those with fewer bytes of state."""
        # A bound holds for more bytes of state too.
        bounds_s = {replace(trial.setting, state_bytes=None): trial.bound_s for trial in earlier}
        trials: list[Trial] = []
        for setting in settings:
            for number in self.questions.numbers(setting.rows):
                own = replace(setting, micro_batches=number)
                trials.append(Trial(setting=own, bound_s=bounds_s.get(replace(own, state_bytes=None), 0.0)))
        self._compute_bound_s(max(settings, key=lambda setting: setting.rows))
        start = min((trial for trial in earlier if trial.plan is not None), key=order, default=None)
        self._begin(trials, start, deadline)
        while waiting := self._waiting(trials):
            if deadline.is_over and _best_s(trials) < math.inf:
                for trial in waiting:
                    trial.stage = Stage.NOT_SEARCHED
                break
            self._refine(min(waiting, key=_by_bound), _best_s(trials), deadline)
        return trials

    def _begin(self, trials: Sequence[Trial], start: Trial | None, deadline: Deadline) -> None:
        """Plan a few settings that are likely good.

        These are the setting of `start` with the state of `trials`, or, from the most rows to the fewest, the fewest
        micro-batches that fit, until twice in turn the step did not get faster.
        """
        if start is not None:
            like = replace(start.setting, state_bytes=trials[0].setting.state_bytes)
            if any(self._plan_if_it_fits(trial) for trial in trials if trial.setting == like):
                return
        num_slower = 0
        for rows in sorted({trial.setting.rows for trial in trials}, reverse=True):
            before_s, waiting = _best_s(trials), self._waiting(trials)
            own = sorted((trial for trial in waiting if trial.setting.rows == rows), key=_by_micro_batches)
            any(self._plan_if_it_fits(trial) for trial in own)
            num_slower = num_slower + 1 if _best_s(trials) == before_s < math.inf else 0
            if num_slower == _MOST_SLOWER or (deadline.is_over and _best_s(trials) < math.inf):
                return

    def _waiting(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that may still be better than the best plan; mark the others as not better."""
        best_s = _best_s(trials)
        for trial in trials:
            if trial.stage is Stage.MORE_ROWS:
                trial.bound_s = max(trial.bound_s, self._known_compute_s(trial.setting))
            if trial.stage < Stage.SEARCHED and trial.bound_s / trial.setting.tokens >= best_s * (1 - GAIN):
                trial.stage = Stage.NOT_BETTER
        return [trial for trial in trials if trial.stage < Stage.SEARCHED]

    def _plan_if_it_fits(self, trial: Trial) -> bool:
        """Plan `trial` unless its smallest peak is over the budget; return whether it has a plan."""
        self.report(f"{trial.setting}: plan")
        trial.needed = self._too_large_bytes(trial.setting, _Forms(self.questions.forms(trial.setting)))
        if trial.needed is None:
            self._compute_bound_s(trial.setting)
            self._plan(trial)
        else:
            trial.stage = Stage.TOO_LARGE
        return trial.plan is not None

    def _refine(self, trial: Trial, best_s: float, deadline: Deadline) -> None:
        """Find out the next fact about `trial`. `best_s` are the fewest seconds per token so far, infinite at first."""
        setting = trial.setting
        if trial.stage is Stage.MORE_ROWS:
            trial.bound_s, trial.stage = max(trial.bound_s, self._compute_bound_s(setting)), Stage.COMPUTE
        elif trial.stage is Stage.COMPUTE:
            self.report(f"{setting}: does it fit?")
            # The form in chunks takes a capture of its own, so it is only asked for if its answer counts.
            forms = _Forms(self.questions.forms(setting))
            trial.needed = self._too_large_bytes(setting, forms)
            trial.stage = Stage.FITS if trial.needed is None else Stage.TOO_LARGE
            if trial.stage is Stage.FITS and best_s < math.inf:
                self.report(f"{setting}: bound")
                trial.bound_s = max(trial.bound_s, self._relaxed_s(setting, forms, best_s * setting.tokens, deadline))
        else:
            self.report(f"{setting}: plan")
            self._plan(trial)

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

    def _too_large_bytes(self, setting: Setting, forms: "_Forms") -> int | None:
        """Return the smallest peak of `setting` if it is over the budget, else None; for every state the same, as state
        may leave the device."""
        key = setting.rows, setting.micro_batches
        if key not in self.floors:
            least_bytes: int | None = None
            for _, evaluator in forms:
                over_bytes = _smallest_peak_if_over(evaluator)
                if over_bytes is None:
                    least_bytes = None
                    break
                least_bytes = over_bytes if least_bytes is None else min(least_bytes, over_bytes)
            self.floors[key] = least_bytes
        return self.floors[key]

    def _relaxed_s(self, setting: Setting, forms: "_Forms", best_s: float, deadline: Deadline) -> float:
        """Return the lowest bound over the forms of the loss.

        Return 0 as soon as the bound of a form is not known, or so low that `setting` has to be searched: it may take
        fewer seconds than `best_s`.
        """
        found: list[float] = []
        for problem, evaluator in forms:
            if _smallest_peak_if_over(evaluator) is not None:
                continue
            step_s = relaxed_bound_s(evaluator, max(self.compute_s[setting.rows], 1e-12), deadline)
            more_s = 0.0 if setting.forwards == 1 else again_bound_s(problem, deadline)
            found.append(0.0 if step_s is None else step_s + (setting.forwards - 1) * more_s)
            if found[-1] < best_s * (1 - GAIN):
                return 0.0
        return min(found, default=0.0)

    def _plan(self, trial: Trial) -> None:
        setting = trial.setting
        try:
            plan, problem = self.questions.plan(setting)
        except NoFeasiblePlan as error:
            trial.needed, trial.stage = error.renewed(), Stage.TOO_LARGE
            return
        num_more = setting.forwards - 1
        again, more_bound_s = None, 0.0
        if num_more:
            again = again_record(problem, plan)
            more_bound_s = max(again_bound_s(problem, deadline_in(10.0)), self.compute_s[setting.rows])
        trial.plan, trial.problem, trial.stage = plan, problem, Stage.SEARCHED
        trial.limits = limits_of(problem, plan, again, num_more)
        trial.step_s = plan.prediction.step_s + num_more * (0.0 if again is None else again.step_s)
        if plan.bound_s is not None:
            trial.bound_s = max(trial.bound_s, plan.bound_s + num_more * more_bound_s)
        trial.bound_s = min(trial.bound_s, trial.step_s)


def _best_s(trials: Sequence[Trial]) -> float:
    """Return the fewest seconds per token of a trial with a plan; infinite if none has a plan."""
    return min((trial.step_s / trial.setting.tokens for trial in trials), default=math.inf)


def _by_bound(trial: Trial) -> tuple[float, int, int]:
    """Return a key for the lowest bound; of equal bounds, for the most rows, then for the fewest micro-batches."""
    setting = trial.setting
    return trial.bound_s / setting.tokens, -setting.rows, setting.micro_batches


def _by_micro_batches(trial: Trial) -> int:
    return trial.setting.micro_batches


class _Forms:
    """The problems of a setting with their evaluators, each made when it is first iterated over."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self._rest = iter(problems)
        self._made: list[tuple[Problem, Evaluator]] = []

    def __iter__(self) -> Iterator[tuple[Problem, Evaluator]]:
        yield from self._made
        for problem in self._rest:
            self._made.append((problem, evaluator_of(problem)))
            yield self._made[-1]


def _smallest_peak_if_over(evaluator: Evaluator) -> int | None:
    """Return the smallest peak over the uniform modes if it is over the budget of the problem, else None."""
    budget_bytes, floors = evaluator.facts.problem.budget_bytes, []
    for uniform in uniform_modes(evaluator):
        floors.append(uniform.floor_bytes)
        if floors[-1] <= budget_bytes:
            return None
    return min(floors)
