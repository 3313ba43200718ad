"""`elixir-compile plan --tune`: plan an optimizer step in many ways, and print the fastest and a loop that runs it."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elixir_compile.base.errors import ElixirError, InvalidOption, NoFeasiblePlan, UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.base.units import COUNT_EXAMPLE, format_bytes, parse_count
from elixir_compile.ir import Plan, plan_to_json
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search import Problem
from elixir_compile.search.joint.tuning import Setting, Stage, Trial, Tuned, splits, tune
from elixir_compile.search.joint.variants import Chunks, numbers_to_try
from elixir_compile.search.outer import GAIN
from elixir_compile.search.problem import question_of
from elixir_compile.session.cache import plan_for
from elixir_compile.session.plan_files import save_plan
from elixir_compile.tools.cli.plan import Request, status_line
from elixir_compile.tools.cli.report import fail
from elixir_compile.tools.plan import plan_with_loss, question
from elixir_compile.tools.preview.capture import Capture
from elixir_compile.tools.preview.models import BatchCaptures

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
        row_tokens = self.seq * num_ranks
        settings = [
            Setting(rows=number, forwards=forwards, state_bytes=state, tokens=number * forwards * row_tokens)
            for state in states
            for number, forwards in pairs
        ]

        made: dict[int, Capture] = {}

        def capture(number: int) -> Capture:
            report(f"capturing {number} rows")
            made[number] = self.capture_with(number, None)
            first, *others = made.values()
            for rows, each in made.items():
                if each.graph.batch not in (1, rows) or any(other.graph == first.graph for other in others):
                    because = f"its step does not have the {rows} rows asked for: its function has to return the model"
                    raise UnsupportedModel(each.graph.name, f"{because} alone")
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
            self._numbers[rows] = [1, *numbers_to_try(self._question(self._capture(rows, None), whole)[0])]
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


# ----------------------------------------------------------------------------------------------------------------------
# Print the settings, the fastest first, and a loop that trains with it.


_MOST_SHOWN = 14
"""Rows of the table."""
_FILE_WIDTH = 110
"""Columns of the output if it is no terminal."""
_LEAST_OTHERS = 4
"""Rows of the table without a plan, if there are so many."""
_STATUS = {
    Stage.SEARCHED: "planned",
    Stage.NOT_BETTER: "not better by their bounds",
    Stage.TOO_LARGE: "too large",
    Stage.NOT_SEARCHED: "not searched",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """The arguments of `plan --tune`, as typed."""

    plan: Request
    """The arguments of `plan`; its batch is not used."""
    batch: int | None
    """Rows of one forward, if the user fixes them."""
    tokens: str | None
    """Tokens per step; None for a single forward of `batch` rows, 8 if there is no `batch`."""
    states: Sequence[int]
    """Bytes of optimizer state per element; empty for the choices of HybridAdamW."""

    def num_tokens(self, num_ranks: int) -> int:
        """Return the tokens of a step. Raises InvalidOption."""
        if self.tokens is None:
            return (self.batch or self.plan.batch) * self.plan.seq * num_ranks
        try:
            return parse_count(self.tokens)
        except ValueError as error:
            raise InvalidOption("tokens_per_step", self.tokens, COUNT_EXAMPLE) from error

    def options_of(self, setting: Setting) -> Options:
        """Return the options of the plan of `setting` alone."""
        return replace(self.plan.parsed_options(), micro_batches=setting.micro_batches)


def run_tune(request: TuneRequest, *, output: Path | None, as_json: bool) -> int:
    """Search the settings of `request`, print them, and write the plan of the best to `output`.

    Return the exit code: 2 if no setting has a plan, 1 on errors. If `as_json`, stdout gets one JSON object.
    """
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        tuned, states = _tuned(request, notes)
        best = tuned.best
        if output is not None and best.plan is not None:
            asked = None if best.problem is None else question_of(best.problem, request.options_of(best.setting))
            save_plan(best.plan, output, asked)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    except OSError as error:
        notes.print(f"error: cannot write {output}: {error.strerror}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(json.dumps(_as_json(tuned, request), indent=1) + "\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        _show(
            tuned,
            states,
            request,
            console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=_FILE_WIDTH),
        )
    if output is not None:
        notes.print(f"plan: {output}", markup=False)
    return 0


def _tuned(request: TuneRequest, notes: Console) -> tuple[Tuned, States]:
    plan = request.plan
    options, cluster = plan.parsed_options(), plan.cluster()
    num_tokens = request.num_tokens(1 if cluster is None else cluster.num_ranks)
    states = States.of(plan.dtype, options, request.states)
    given = plan.given_options()
    number = given.get("micro_batches")
    tuning = Tuning(
        capture_with=lambda rows, chunks: replace(plan, batch=rows).capture(chunks=chunks),
        options=options,
        micro_batches=number if isinstance(number, int) else None,
        is_timed="search_timeout" in given,
        cluster=cluster,
        seq=plan.seq,
    )
    with status_line(notes) as report:
        return tuning.tuned(num_tokens, states.choices, rows=request.batch, report=report), states


def _show(tuned: Tuned, states: States, request: TuneRequest, console: Console) -> None:
    console.print(tune_table(tuned, states))
    counts = {name: sum(trial.stage is stage for trial in tuned.trials) for stage, name in _STATUS.items()}
    named = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lines = [f"settings      {len(tuned.trials)}: {named}"]
    share = "" if tuned.best.plan is None else tuned.best.plan.on_share
    lines.append(f"bound         no setting and no plan is more than {tuned.gap:.1%} faster than the first row{share}")
    if not tuned.is_complete:
        lines.append("time          the search ended early; a longer --search-timeout searches the rest")
    for line in lines:
        console.print(line, markup=False)
    for state in dict.fromkeys(trial.setting.state_bytes for trial in tuned.trials):
        own = tuned.of_state(state)
        if own is not None and state != tuned.best.setting.state_bytes:
            rate = f"{own.best.tokens_per_s:,.0f} tokens/s"
            console.print(f"best with {states.text(state)}: {rate}, {own.best.setting}", markup=False)
    console.print()
    console.print(command_of(tuned.best.setting, request), markup=False)
    console.print()
    console.print(loop_of(tuned.best.setting, states, request), markup=False)


def tune_table(tuned: Tuned, states: States) -> Table:
    """Return a table of the fastest settings with a plan, then of others with the reason that they have none.

    Settings that differ in their micro-batches alone, and have no plan for the same reason, share a trial.
    """
    best = tuned.best
    name = f"{best.plan.name} on {best.plan.cluster}" if best.plan is not None else ""
    table = Table(title=f"{name}, {best.setting.tokens:,} tokens per step", title_justify="left")
    for column in ("forwards", "micro", "state", "tokens/s", "device", "host"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("limited by")
    planned = [[trial] for trial in tuned.trials if trial.plan is not None]
    others: dict[tuple[object, ...], list[Trial]] = {}
    for trial in tuned.trials:
        if trial.plan is None:
            key = trial.stage, trial.setting.rows, trial.setting.forwards, trial.setting.state_bytes
            others.setdefault(key, []).append(trial)
    shown = planned[:_MOST_SHOWN]
    for trials in (*shown, *list(others.values())[: max(_LEAST_OTHERS, _MOST_SHOWN - len(shown))]):
        setting, numbers = trials[0].setting, sorted(trial.setting.micro_batches for trial in trials)
        micro = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        forwards = f"{setting.forwards} x {setting.rows} rows"
        # About their plan, or about the reason that they have none.
        trial, device, host = trials[0], "", ""
        if trial.plan is not None:
            made = trial.plan.prediction
            device, host = format_bytes(made.device_peak_bytes), format_bytes(made.host_peak_bytes)
            rate, because = f"{trial.tokens_per_s:,.0f}", ", ".join(trial.limits)
        elif trial.stage is Stage.TOO_LARGE:
            least = min(trials, key=lambda trial: trial.needed_bytes)
            memory = least.needed.memory if isinstance(least.needed, NoFeasiblePlan) else "device"
            needed, rate, because = f"> {format_bytes(least.needed_bytes - 1)}", "", "does not fit"
            device, host = needed if memory == "device" else "", needed if memory == "host" else ""
        else:
            rate = f"≤ {max(trial.most_tokens_per_s for trial in trials):,.0f}"
            is_slower = trial.stage is Stage.NOT_BETTER
            because = "not better, by its bound" if is_slower else "not searched: the time was over"
        table.add_row(forwards, micro, states.short(setting.state_bytes), rate, device, host, because)
    return table


def command_of(setting: Setting, request: TuneRequest) -> str:
    """Return the command that plans `setting` alone."""
    plan = request.plan
    words = ["elixir-compile", "plan", plan.model]
    words += [] if plan.hardware is None else ["--hardware", plan.hardware]
    words += ["--ranks", str(plan.ranks)] if plan.ranks != 1 else []
    words += ["--batch", str(setting.rows), "--seq", str(plan.seq)]
    words += ["--dtype", plan.dtype] if plan.dtype != "bfloat16" else []
    words += ["--recompute"] if plan.recompute else []
    chosen = {"micro_batches": setting.micro_batches if setting.micro_batches > 1 else None}
    given = {name: value for name, value in plan.given_options().items() if name != "search_timeout"}
    for name, value in {**given, **chosen}.items():
        if value is not None and name != "accumulate":
            words += [f"--{name.replace('_', '-')}", str(value)]
    timeout_s = plan.parsed_options().search_timeout
    words += ["--search-timeout", str(timeout_s)] if timeout_s < Options().search_timeout else []
    words += ["--accumulate"] if setting.forwards > 1 or plan.given_options().get("accumulate") else []
    words += [] if setting.state_bytes is None else ["--state-bytes", str(setting.state_bytes)]
    return shlex.join(words)


def loop_of(setting: Setting, states: States, request: TuneRequest) -> str:
    """Return Python code that trains with `setting`."""
    options: dict[str, object] = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in request.plan.given_options().items()
        if name not in ("search_timeout", "micro_batches")
    }
    if setting.micro_batches > 1:
        options["micro_batches"] = setting.micro_batches
    if setting.forwards > 1:
        options["accumulate"] = True
    lines = list(states.preparation(setting.state_bytes, options))
    cluster = request.plan.cluster()
    if cluster is not None and cluster.num_ranks > 1:
        lines.insert(0, "# on each rank, after elixir.prepare(model, mesh=...)")
    literal = ", ".join(
        f'"{name}": ' + (f'"{value}"' if isinstance(value, str) else repr(value)) for name, value in options.items()
    )
    lines += [
        f'compiled = torch.compile(model, backend="elixir", options={{{literal}}})',
        f"optimizer = elixir.HybridAdamW(model.parameters()){states.remark(setting.state_bytes)}",
        "",
        f"for number, batch in enumerate(loader, start=1):  # {setting.rows} x {request.plan.seq} tokens on each rank",
    ]
    share = f" / {setting.forwards}" if setting.forwards > 1 else ""
    lines.append(
        f"    (compiled(**batch).loss{share}).backward()" if share else "    compiled(**batch).loss.backward()"
    )
    indent = "    "
    if setting.forwards > 1:
        lines.append(f"    if number % {setting.forwards} == 0:")
        indent = "        "
    return "\n".join([*lines, f"{indent}optimizer.step()", f"{indent}optimizer.zero_grad()"])


def _as_json(tuned: Tuned, request: TuneRequest) -> dict[str, object]:
    best = tuned.best
    settings: list[dict[str, object]] = []
    for trial in tuned.trials:
        setting, made = trial.setting, None if trial.plan is None else trial.plan.prediction
        settings.append(
            {
                "rows": setting.rows,
                "forwards": setting.forwards,
                "micro_batches": setting.micro_batches,
                "state_bytes": setting.state_bytes,
                "tokens": setting.tokens,
                "status": trial.stage.name.lower(),
                "tokens_per_s": None if made is None else trial.tokens_per_s,
                "most_tokens_per_s": trial.most_tokens_per_s,
                "step_s": None if made is None else trial.step_s,
                "bound_s": trial.bound_s,
                "device_peak_bytes": None if made is None else made.device_peak_bytes,
                "host_peak_bytes": None if made is None else made.host_peak_bytes,
                "needed_bytes": trial.needed_bytes if trial.stage is Stage.TOO_LARGE else None,
                "limits": list(trial.limits),
            }
        )
    return {
        "tokens_per_step": best.setting.tokens,
        "gap": tuned.gap,
        "is_complete": tuned.is_complete,
        "gain": GAIN,
        "command": command_of(best.setting, request),
        "settings": settings,
        "plan": None if best.plan is None else json.loads(plan_to_json(best.plan)),
    }
