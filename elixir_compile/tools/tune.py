"""Find the fastest setting of an optimizer step of a model, and ask the question of a plan again under other device
budgets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.base.errors import InvalidOption, NoFeasiblePlan, UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.ir import Plan
from elixir_compile.ir.graph import MOST_BYTES
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search import Problem, plan
from elixir_compile.search.joint.tuning import Setting, Tuned, splits, tune
from elixir_compile.search.joint.variants import Chunks, candidates
from elixir_compile.search.question import Question
from elixir_compile.session.cache import plan_for
from elixir_compile.tools.plan import plan_with_loss, question
from elixir_compile.tools.preview.capture import Capture
from elixir_compile.tools.preview.models import BatchCaptures
from elixir_compile.tools.report.figures import CurvePoint

# ----------------------------------------------------------------------------------------------------------------------
# Ask the question of a plan again under other device budgets: the curve of step time over memory.
#
#   budgets   from the smallest with a plan to that of everything on the device, and the plan's own budget between them
#   step_s    a plan for less memory fits more memory too, so the curve never rises with the budget
#   bound_s   what no plan within a budget beats, no plan within a smaller budget beats either


def budget_curve(
    question: Question, num_points: int, report: Callable[[str], None] = lambda line: None
) -> tuple[CurvePoint, ...]:
    """Return the step under `num_points` budgets, in rising order, and under the question's own budget if it is between
    them.

    Each point is a search of its own, unless its plan is in the plan cache. Budgets for which the host has too little
    memory have no point. `report` is called with a line before each search. Raises NoFeasiblePlan if no budget has a
    plan.
    """
    least, most = _least_bytes(question), _most_bytes(question)
    budgets = {least + (most - least) * number // (num_points - 1) for number in range(num_points)}
    own = question.problem.budget_bytes
    budgets |= {own} if least < own < most else set()
    found: list[tuple[int, Plan]] = []
    for number, budget_bytes in enumerate(sorted(budgets), start=1):
        report(f"budget {number} of {len(budgets)}")
        try:
            found.append((budget_bytes, _plan_within(question, budget_bytes)))
        except NoFeasiblePlan:
            if number == len(budgets) and not found:
                raise
    return _points(found, own)


def _least_bytes(question: Question) -> int:
    """Return the smallest budget with a plan, or the question's own if the host has too little memory for less."""
    try:
        return _plan_within(question, 0).prediction.device_peak_bytes
    except NoFeasiblePlan as error:
        return error.needed_bytes if error.memory == "device" else question.problem.budget_bytes


def _most_bytes(question: Question) -> int:
    """Return the bytes of everything on the device."""
    roomy = replace(question.problem, budget_bytes=MOST_BYTES)
    return plan(roomy, "keep_all").prediction.device_peak_bytes


def _plan_within(question: Question, budget_bytes: int) -> Plan:
    problem = question.problem
    # Every memory is given, so plans of other runs come from the cache only if their budgets are equal.
    options = replace(question.options, device_memory=budget_bytes, host_memory=problem.host_budget_bytes)
    return plan_for(replace(problem, budget_bytes=budget_bytes), options)


def _points(found: list[tuple[int, Plan]], own: int) -> tuple[CurvePoint, ...]:
    steps = [plan.prediction.step_s for _, plan in found]
    bounds = [plan.bound_s for _, plan in found]
    points: list[CurvePoint] = []
    for at, (budget_bytes, made) in enumerate(found):
        proved = [bound_s for bound_s in bounds[at:] if bound_s is not None]
        points.append(
            CurvePoint(
                budget_bytes=budget_bytes,
                step_s=min(steps[: at + 1]),
                planned_s=made.prediction.step_s,
                bound_s=max(proved, default=None),
                is_own=budget_bytes == own,
            )
        )
    return tuple(points)


# ----------------------------------------------------------------------------------------------------------------------
# Ask the planner about all settings of an optimizer step of one model: captures, problems, plans.


_TIMEOUT_S = 120.0
"""CPU seconds after which no other setting is searched, if the user names none."""
_MASTERS = {"bfloat16": 10, "float16": 12}
"""By the dtype of parameters, the bytes of state of HybridAdamW with fp32 masters and moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The optimizer states to compare, as bytes per element; None stands for the state of HybridAdamW."""

    choices: tuple[int | None, ...]
    own_bytes: int
    """Bytes of the state of HybridAdamW for parameters of the dtype."""
    dtype: str
    """The dtype of the parameters of the step."""

    @classmethod
    def of(cls, dtype: str, options: Options, asked: Sequence[int]) -> "States":
        """Return the states that are `asked` for, else those that HybridAdamW can have for parameters of `dtype`."""
        cast = options.param_dtype
        if cast is not None:
            own_bytes, choices = _MASTERS[cast], (None,)
        else:
            own_bytes = {"float64": 16, "float32": 8}.get(dtype, 4)
            choices = (None, _MASTERS[dtype]) if dtype in _MASTERS else (None,)
        if asked:
            choices = tuple(None if nbytes == own_bytes else nbytes for nbytes in sorted(set(asked)))
        return cls(choices=choices, own_bytes=own_bytes, dtype=cast or dtype)

    def short(self, state_bytes: int | None) -> str:
        """Return the bytes of a state as a cell of a table."""
        return f"{self.own_bytes if state_bytes is None else state_bytes} B"

    def text(self, state_bytes: int | None) -> str:
        """Return the bytes of a state as words, with their meaning if HybridAdamW can have it."""
        nbytes = self.own_bytes if state_bytes is None else state_bytes
        masters = ", fp32 masters and moments" if self._has_masters(state_bytes) else ""
        return f"{nbytes} bytes of state per element{masters}"

    def preparation(self, state_bytes: int | None, options: dict[str, object]) -> Iterator[str]:
        """Yield the lines of Python before `torch.compile` that a state needs, and add its options to `options`."""
        cast = options.get("param_dtype")
        if cast is None and self._has_masters(state_bytes):
            options["param_dtype"] = cast = self.dtype
        if cast is not None:
            yield f'model = elixir.prepare(model, param_dtype="{cast}")'

    def remark(self, state_bytes: int | None) -> str:
        """Return a comment of Python if HybridAdamW cannot have the state; else nothing."""
        if state_bytes is None or self._has_masters(state_bytes):
            return ""
        return f"  # keeps {self.own_bytes} bytes per element: for {state_bytes}, another optimizer with hybrid(cls)"

    def _has_masters(self, state_bytes: int | None) -> bool:
        return state_bytes is not None and _MASTERS.get(self.dtype) == state_bytes


@dataclass(slots=True, kw_only=True)
class Tuning:
    """The questions of `search.joint.tuning` about one model; captures are kept."""

    capture_with: Callable[[int, Chunks | None], Capture]
    """Captures the step of a batch of so many rows, with its loss whole or in chunks."""
    options: Options
    """The options of the user, except `micro_batches`."""
    micro_batches: int | None
    """The number of micro-batches of every setting; None if it is searched."""
    is_timed: bool
    """Whether the user gave the limit of the search, which is then the limit of all searches together."""
    cluster: Cluster | None
    """The machine; None for this machine."""
    seq: int
    """Tokens of a row."""
    _captures: BatchCaptures | None = None
    _chunked: dict[tuple[int, int], Capture] = field(default_factory=dict)
    _numbers: dict[int, Sequence[int]] = field(default_factory=dict)

    def tuned(
        self,
        tokens: int,
        states: Sequence[int | None],
        *,
        rows: int | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> Tuned:
        """Return the best ways to run a step of about `tokens` tokens with each of `states`.

        `rows` are the rows of one forward, if they are fixed. Raises InvalidOption if the tokens cannot be divided so,
        and NoFeasiblePlan if nothing fits.
        """
        num_ranks = 1 if self.cluster is None else self.cluster.num_ranks
        pairs = splits(tokens, self.seq, num_ranks, rows=rows, divisor=self.micro_batches or 1)
        settings = [
            Setting(
                rows=number,
                forwards=forwards,
                state_bytes=state,
                tokens=number * forwards * self.seq * num_ranks,
            )
            for state in states
            for number, forwards in pairs
        ]

        made: dict[int, Capture] = {}

        def capture(number: int) -> Capture:
            report(f"capturing {number} rows")
            made[number] = self.capture_with(number, None)
            _require_other_steps(made)
            return made[number]

        self._captures = BatchCaptures(capture=capture, rows=[number for number, _ in pairs], options=self.options)
        timeout_s = self.options.search_timeout if self.is_timed else _TIMEOUT_S
        found = tune(settings, self, timeout_s, report)
        if self._captures.is_as_derived(found.best.setting.rows):
            return found
        return tune(settings, self, timeout_s, report)

    def forms(self, setting: Setting) -> Iterator[Problem]:
        """Yield the problem of `setting` with the loss whole, then with the loss in chunks if it can be chunked."""
        capture = self._capture(setting.rows, None)
        yield self._question(capture, setting)[0]
        if capture.chunks is not None:
            yield self._question(self._capture(setting.rows, capture.chunks), setting)[0]

    def numbers(self, rows: int) -> Sequence[int]:
        """Return the numbers of micro-batches to try for `rows`, in rising order: the fixed number, or 1 and those
        that a search would try."""
        if self.micro_batches is not None:
            return [self.micro_batches]
        if rows == 1:
            return [1]
        if rows not in self._numbers:
            whole = Setting(rows=rows, forwards=1, tokens=rows)
            self._numbers[rows] = [1, *candidates(self._question(self._capture(rows, None), whole)[0])]
        return self._numbers[rows]

    def plan(self, setting: Setting) -> tuple[Plan, Problem]:
        """Return the plan that `setting` gets alone, and its problem. Raises NoFeasiblePlan."""
        return plan_with_loss(
            lambda chunks: self._capture(setting.rows, chunks),
            lambda capture, options: self._question(capture, setting, options),
            plan_for,
            self._options_of(setting),
        )

    def _options_of(self, setting: Setting) -> Options:
        return replace(
            self.options,
            micro_batches=setting.micro_batches,
            accumulate=True if setting.forwards > 1 else self.options.accumulate,
            # A search for one setting has the limit of a search alone, so it finds the same plan.
            search_timeout=min(self.options.search_timeout, Options().search_timeout),
        )

    def _question(self, capture: Capture, setting: Setting, options: Options | None = None) -> tuple[Problem, Options]:
        own = options or self._options_of(setting)
        return question(capture, own, self.cluster, state_bytes_per_element=setting.state_bytes)

    def _capture(self, rows: int, chunks: Chunks | None) -> Capture:
        if self._captures is None:
            raise InvalidOption("tune", None, "a call of `tuned` first")
        if chunks is None:
            return self._captures.at(rows)
        key = rows, chunks.num_chunks
        if key not in self._chunked:
            self._chunked[key] = self.capture_with(rows, chunks)
        return self._chunked[key]


def _require_other_steps(captures: Mapping[int, Capture]) -> None:
    """Raise UnsupportedModel unless each of `captures`, by its rows, is of a step with so many rows."""
    first, *others = captures.values()
    for rows, capture in captures.items():
        if capture.graph.batch not in (1, rows) or any(other.graph == first.graph for other in others):
            because = f"its step does not have the {rows} rows asked for: its function has to return the model alone"
            raise UnsupportedModel(capture.graph.name, because)
