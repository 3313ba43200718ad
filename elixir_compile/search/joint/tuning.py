"""Choose how the tokens of an optimizer step are divided into rows and forwards, together with the plan, for the most
tokens per second.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

from elixir_compile.base.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.ir import Lane, Plan, Record, Update, Verb
from elixir_compile.ir.hardware import Node
from elixir_compile.search.best import relaxed_bound_s
from elixir_compile.search.evaluator import Clock, Deadline, Evaluator, deadline_in, too_large
from elixir_compile.search.outer import answer, is_worth
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import with_larger_buckets
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step.seconds import critical_path, simulate

# ----------------------------------------------------------------------------------------------------------------------
# Divide the tokens of an optimizer step into forwards of so many rows.
#
#   tokens per step  =  rows of one forward  x  tokens of a row  x  forwards  x  ranks


TOLERANCE = 0.025
"""Share by which the tokens of a step may differ from those that were asked for, if these are not a whole number of
rows. So 64k, which is 64,000, allows 64 rows of 1024 tokens."""
_MOST_ROWS = 1 << 16
"""The most rows of one forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run an optimizer step."""

    rows: int
    """Rows of each rank in one forward."""
    forwards: int
    """Forwards, each with its backward, before each update."""
    micro_batches: int = 1
    """Micro-batches of each layer in a forward, of those layers that can be divided."""
    state_bytes: int | None = None
    """Bytes of optimizer state per element; None for the state of HybridAdamW."""
    tokens: int
    """Tokens of the step, over all ranks."""

    def __str__(self) -> str:
        parts = [f"{self.forwards} x {self.rows} rows"]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        parts += [f"{self.state_bytes} bytes of state"] if self.state_bytes is not None else []
        return ", ".join(parts)


def splits(
    tokens: int, seq: int, num_ranks: int = 1, *, rows: int | None = None, divisor: int = 1
) -> list[tuple[int, int]]:
    """Return pairs of rows and forwards whose product with `seq` and `num_ranks` is about `tokens`, most rows first.

    There is at most one pair for each doubling of the rows: the rows with the most factors of two. If `tokens` are a
    whole number of rows, every product is exact; else it differs by at most `TOLERANCE`. If `rows` are given, there is
    no other pair. Rows are multiples of `divisor`. Raises InvalidOption with the nearest numbers of tokens if there is
    no pair.
    """
    unit = seq * num_ranks
    asked = tokens / unit
    allowed = 0.0 if tokens % unit == 0 else TOLERANCE
    most = min(math.floor(asked * (1 + allowed)), _MOST_ROWS)
    found: dict[int, tuple[int, int]] = {}
    for number in range(divisor, most + 1, divisor) if rows is None else (rows,):
        forwards = max(1, round(asked / number))
        is_near = abs(number * forwards - asked) <= allowed * asked and number % divisor == 0
        power = number.bit_length()
        if is_near and (power not in found or _roundness(number) > _roundness(found[power][0])):
            found[power] = number, forwards
    if not found:
        # Multiples of the tokens of so many rows on each rank.
        num_rows = math.lcm(rows or 1, divisor)
        step = unit * num_rows
        near = sorted({max(1, tokens // step) * step, -(-tokens // step) * step})
        of_rows = "a row" if num_rows == 1 else f"{num_rows} rows"
        expected = f"{' or '.join(map(str, near))}: a multiple of {step}, the tokens of {of_rows} on each rank"
        raise InvalidOption("tokens_per_step", tokens, expected)
    return [found[power] for power in sorted(found, reverse=True)]


def _roundness(rows: int) -> int:
    """Return the largest power of two that divides `rows`."""
    return rows & -rows


# ----------------------------------------------------------------------------------------------------------------------
# Simulate an optimizer step of several forwards: the last with its update, the others without.
#
# The module also proves a bound on the seconds of a forward and backward without an update, and says which lanes and
# memories limit a step.


_LEAST_SHARE = 0.05
"""Share of the critical path from which on a lane limits a step."""
_INSTANT = 1e29
"""Elements that are updated per second where updates must take no time."""


def again_record(problem: Problem, plan: Plan) -> Record:
    """Return the simulated record of a forward and backward under `plan` without an update, as between the forwards of
    a step. `problem` is the problem of the plan."""
    schedules = tuple(
        replace(own, actions=tuple(action for action in own.actions if action.verb is not Verb.UPDATE))
        for own in plan.schedules
    )
    without = replace(plan, update=Update.AFTER_BACKWARD, schedules=schedules)
    return simulate(problem.graph, without, problem.cluster, problem.measured)


def limits_of(problem: Problem, plan: Plan, again: Record | None, num_more: int) -> tuple[str, ...]:
    """Return the lanes on the critical path of an optimizer step with their shares, and the memories that are full.

    The step has a forward with the update and `num_more` forwards as recorded in `again`. Lanes with less than
    `_LEAST_SHARE` are left out.
    """
    step = simulate(problem.graph, plan, problem.cluster, problem.measured)
    seconds: dict[Lane, float] = {}
    for record, times in ((step, 1), (again, num_more)):
        for span in critical_path(record) if record is not None else ():
            seconds[span.lane] = seconds.get(span.lane, 0.0) + times * (span.end_s - span.start_s)
    total_s = sum(seconds.values())
    longest = sorted(seconds, key=lambda lane: -seconds[lane])
    lanes = [f"{lane} {seconds[lane] / total_s:.0%}" for lane in longest if seconds[lane] > total_s * _LEAST_SHARE]
    full = [name for name in ("device memory", "host memory") if any(row.startswith(name) for row in plan.binding)]
    return (*lanes, *full)


def again_bound_s(problem: Problem, deadline: Deadline) -> float:
    """Return a bound on the seconds of `again_record` for every plan of `problem`; 0 if the deadline came first.

    It is the relaxed optimum of the step without optimizer state, with updates that take no time.
    """

    def instant(node: Node) -> Node:
        """Return `node` with updates that take no time."""
        device = replace(node.device, update_elements_per_s=_INSTANT)
        host = replace(node.host, update_elements_per_s=_INSTANT, busy_update_elements_per_s=None)
        return replace(node, device=device, host=host)

    cluster = replace(problem.cluster, nodes=tuple(map(instant, problem.cluster.nodes)))
    params = {name: replace(param, state_nbytes=0, whole_update=None) for name, param in problem.params.items()}
    free = replace(problem, cluster=cluster, params=params, hybrid=False, update=None, disk=False)
    evaluator = evaluator_of(free)
    bound_s = relaxed_bound_s(evaluator, max(sum(evaluator.prices.before_s[-1:]), 1e-12), deadline)
    if bound_s is None:
        return 0.0
    # An update that takes no time is still launched once for each bucket.
    return max(0.0, bound_s - len(evaluator.facts.buckets) * problem.cluster.device.launch_s)


def evaluator_of(problem: Problem) -> Evaluator:
    """Return the evaluator with which a search for a plan of `problem` begins."""
    return Evaluator(gather_facts(with_larger_buckets(problem) or problem))


# ----------------------------------------------------------------------------------------------------------------------
# The settings of an optimizer step with what a search found out about them: their plans, or why they have none.


class Stage(IntEnum):
    """What is known of a setting."""

    MORE_ROWS = 0
    """The bound of a forward and backward with more rows."""
    COMPUTE = 1
    """The bound of its own forward and backward in unlimited memory."""
    FITS = 2
    """That it fits, and, unless it is the first, the bound in the memory that is there."""
    SEARCHED = 3
    """Its plan."""
    TOO_LARGE = 4
    """That no plan fits."""
    NOT_BETTER = 5
    """That its bound shows no gain worth a search."""
    NOT_SEARCHED = 6
    """That the time was over before it was searched."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """A setting with all that the search has found out about it."""

    setting: Setting
    bound_s: float = 0.0
    """No plan of the setting takes fewer seconds for the tokens of a step."""
    stage: Stage = Stage.MORE_ROWS
    """The last fact found out."""
    plan: Plan | None = None
    problem: Problem | None = None
    """What `plan` answers."""
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
    """The trials of a search over settings."""

    trials: tuple[Trial, ...]
    """The trials that have a plan, fastest first, then the other trials by their bounds."""

    @property
    def is_complete(self) -> bool:
        """Whether every trial was searched, or shown to be no faster or too large, before the time was over."""
        return all(trial.stage is not Stage.NOT_SEARCHED for trial in self.trials)

    @property
    def best(self) -> Trial:
        return self.trials[0]

    @property
    def gap(self) -> float:
        """The most by which the tokens per second of any trial could exceed those of the best trial, as a share of the
        best trial's."""
        most = max(trial.most_tokens_per_s for trial in self.trials)
        return max(0.0, most / self.best.tokens_per_s - 1.0)

    def of_state(self, state_bytes: int | None) -> "Tuned | None":
        """Return the trials with `state_bytes` alone; None if none of them has a plan."""
        trials = tuple(trial for trial in self.trials if trial.setting.state_bytes == state_bytes)
        return Tuned(trials=trials) if trials and trials[0].plan is not None else None


def order(trial: Trial) -> tuple[bool, float, bool, float]:
    """Return a key that sorts trials with a plan first, the fastest first, then other trials by their bounds."""
    is_fit = trial.stage is not Stage.TOO_LARGE
    return trial.plan is None, trial.step_s / trial.setting.tokens, not is_fit, trial.bound_s / trial.setting.tokens


# ----------------------------------------------------------------------------------------------------------------------
# Choose how the tokens of an optimizer step are divided, together with the plan, for the most tokens per second.
#
#   tokens per step  =  rows of one forward  x  tokens of a row  x  forwards  x  ranks
#   a setting        =  rows, forwards, micro-batches of each layer, bytes of optimizer state per element
#   seconds          =  the step of the plan, with its update  +  (forwards - 1) x its forward and backward alone
#
# Each setting is a problem of its own, and its plan is the plan that the problem gets alone. A setting is searched only
# if its bound leaves room for an improvement. Bounds get sharper in stages, and the setting with the lowest bound
# always comes first:
#
#     compute     the relaxed optimum of the forward and backward alone, in unlimited memory: of more rows, then its own
#     fits        the smallest peak; a setting that does not fit is never searched
#     relaxed     the relaxed optimum of the step, and of the forward and backward alone, in the memory that is there
#
# The best setting of each number of bytes of state is proved apart from the others: state is a choice of precision.


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
        # The error of the setting that needs the fewest bytes.
        too_large = [trial for trial in trials if trial.stage is Stage.TOO_LARGE]
        least = min(too_large, key=lambda trial: trial.needed_bytes)
        error = least.needed
        if not isinstance(error, NoFeasiblePlan):
            error = answer(questions.plan, least.setting)
        assert isinstance(error, NoFeasiblePlan), f"{least.setting} needs {least.needed} bytes, and fits in fewer"
        raise error.renewed()
    return Tuned(trials=tuple(sorted(trials, key=order)))


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
            # The lowest bound; of equal bounds, the most rows, then the fewest micro-batches.
            lowest = min(
                waiting,
                key=lambda own: (own.bound_s / own.setting.tokens, -own.setting.rows, own.setting.micro_batches),
            )
            self._refine(lowest, _best_s(trials), deadline)
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
            own = [trial for trial in waiting if trial.setting.rows == rows]
            own.sort(key=lambda trial: trial.setting.micro_batches)
            any(self._plan_if_it_fits(trial) for trial in own)
            num_slower = num_slower + 1 if _best_s(trials) == before_s < math.inf else 0
            if num_slower == _MOST_SLOWER or (deadline.is_over and _best_s(trials) < math.inf):
                return

    def _waiting(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that may still be better than the best plan; mark the others as not better."""
        best_s = _best_s(trials)
        for trial in trials:
            if trial.stage is Stage.MORE_ROWS:
                # Fewer rows never take fewer seconds per row, so a bound of more rows holds.
                setting = trial.setting
                known = min((rows for rows in self.compute_s if rows >= setting.rows), default=None)
                known_s = 0.0 if known is None else self.compute_s[known] / known * setting.rows * setting.forwards
                trial.bound_s = max(trial.bound_s, known_s)
            if trial.stage < Stage.SEARCHED and not is_worth(trial.bound_s / trial.setting.tokens, best_s):
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
            found: list[int] = []
            for _, evaluator in forms:
                smallest = too_large(evaluator)
                if smallest is None:
                    found = []
                    break
                found.append(smallest.floor_bytes)
            self.floors[key] = min(found, default=None)
        return self.floors[key]

    def _relaxed_s(self, setting: Setting, forms: "_Forms", best_s: float, deadline: Deadline) -> float:
        """Return the lowest bound over the forms of the loss.

        Return 0 as soon as the bound of a form is not known, or so low that `setting` has to be searched: it may take
        fewer seconds than `best_s`.
        """
        found: list[float] = []
        for problem, evaluator in forms:
            if too_large(evaluator) is not None:
                continue
            step_s = relaxed_bound_s(evaluator, max(self.compute_s[setting.rows], 1e-12), deadline)
            more_s = 0.0 if setting.forwards == 1 else again_bound_s(problem, deadline)
            found.append(0.0 if step_s is None else step_s + (setting.forwards - 1) * more_s)
            if is_worth(found[-1], best_s):
                return 0.0
        return min(found, default=0.0)

    def _plan(self, trial: Trial) -> None:
        setting = trial.setting
        found = answer(self.questions.plan, setting)
        if isinstance(found, NoFeasiblePlan):
            trial.needed, trial.stage = found, Stage.TOO_LARGE
            return
        plan, problem = found
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
