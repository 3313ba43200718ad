"""`elixir-compile plan --tune`: plan an optimizer step in many ways, and print the fastest and a loop that runs it."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from elixir_compile.base.errors import ElixirError, InvalidOption, NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import COUNT_EXAMPLE, format_bytes, parse_count
from elixir_compile.ir import plan_to_json
from elixir_compile.search.joint.tuning import GAIN, Setting, Stage, Trial, Tuned
from elixir_compile.search.question import question_of
from elixir_compile.session.saved import save_plan
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.cli.report import fail
from elixir_compile.tools.tune import States, Tuning

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
    with _progress(notes) as report:
        return tuning.tuned(num_tokens, states.choices, rows=request.batch, report=report), states


@contextmanager
def _progress(notes: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line on a terminal until the next line; the last one disappears."""
    if not notes.is_terminal:
        yield lambda line: None
        return
    with Live("", console=notes, transient=True, auto_refresh=False) as live:
        yield lambda line: live.update(f"{line} ...", refresh=True)


def _show(tuned: Tuned, states: States, request: TuneRequest, console: Console) -> None:
    console.print(tune_table(tuned, states))
    for line in _summary(tuned):
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
        table.add_row(forwards, micro, states.short(setting.state_bytes), *_found(trials))
    return table


def _found(trials: Sequence[Trial]) -> tuple[str, str, str, str]:
    """Return the cells of `trials` about their plan, or about the reason that they have none."""
    trial = trials[0]
    if trial.plan is not None:
        made = trial.plan.prediction
        sizes = format_bytes(made.device_peak_bytes), format_bytes(made.host_peak_bytes)
        return f"{trial.tokens_per_s:,.0f}", *sizes, ", ".join(trial.limits)
    if trial.stage is Stage.TOO_LARGE:
        least = min(trials, key=lambda trial: trial.needed_bytes)
        memory = least.needed.memory if isinstance(least.needed, NoFeasiblePlan) else "device"
        needed = f"> {format_bytes(least.needed_bytes - 1)}"
        return "", needed if memory == "device" else "", needed if memory == "host" else "", "does not fit"
    because = "not better, by its bound" if trial.stage is Stage.NOT_BETTER else "not searched: the time was over"
    return f"≤ {max(trial.most_tokens_per_s for trial in trials):,.0f}", "", "", because


def _summary(tuned: Tuned) -> list[str]:
    """Return lines that count the settings, and say how far the best is proved."""
    counts = {name: sum(trial.stage is stage for trial in tuned.trials) for stage, name in _STATUS.items()}
    named = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lines = [f"settings      {len(tuned.trials)}: {named}"]
    proved = f"no setting and no plan is more than {tuned.gap:.1%} faster than the first row"
    lines.append(f"bound         {proved}")
    if not tuned.is_complete:
        lines.append("time          the search ended early; a longer --search-timeout searches the rest")
    return lines


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
    lines += [
        f'compiled = torch.compile(model, backend="elixir", options={_literal(options)})',
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


def _literal(options: dict[str, object]) -> str:
    """Return `options` as Python source with double quotes."""
    entries = (
        f'"{name}": ' + (f'"{value}"' if isinstance(value, str) else repr(value)) for name, value in options.items()
    )
    return "{" + ", ".join(entries) + "}"


def _as_json(tuned: Tuned, request: TuneRequest) -> dict[str, object]:
    best = tuned.best
    return {
        "tokens_per_step": best.setting.tokens,
        "gap": tuned.gap,
        "is_complete": tuned.is_complete,
        "gain": GAIN,
        "command": command_of(best.setting, request),
        "settings": [_trial_json(trial) for trial in tuned.trials],
        "plan": None if best.plan is None else json.loads(plan_to_json(best.plan)),
    }


def _trial_json(trial: Trial) -> dict[str, object]:
    setting, made = trial.setting, None if trial.plan is None else trial.plan.prediction
    return {
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
