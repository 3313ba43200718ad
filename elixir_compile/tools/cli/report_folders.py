"""What `elixir-compile report` shows of a folder: the folder of an observed run, or that of a study."""

from dataclasses import dataclass
from pathlib import Path

from elixir_compile.base.errors import TraceFileError
from elixir_compile.ir import Plan
from elixir_compile.search.question import Question
from elixir_compile.session.saved import load_answered
from elixir_compile.tools.report.observed_run import ObservedRun, observed_run
from elixir_compile.tools.study.study import Study, read_study, study_path
from elixir_compile.tools.study.trace_files import meta_path, plan_path, read_full_step, read_trace


@dataclass(frozen=True, slots=True)
class FoundRun:
    """An observed run, and the plan of its last step with its question, if its folder has both."""

    run: ObservedRun
    plan: Plan | None
    question: Question | None


def read_folder(folder: Path) -> Study | FoundRun:
    """Return the study or the observed run in `folder`.

    Raises TraceFileError if the folder holds neither, or if a file in it is damaged.
    """
    if study_path(folder).is_file():
        return read_study(folder)
    if meta_path(folder).is_file():
        return read_run(folder)
    raise TraceFileError(str(folder), "study.json of a study, or meta.json of an observed run", "neither")


def read_run(folder: Path) -> FoundRun:
    """Return the observed run in `folder`, and its plan if its last step had only one and the folder has its question.

    Raises TraceFileError if no step has ended in the run, or if a file is damaged.
    """
    trace = read_trace(folder)
    steps = {rank: own for rank, own in trace.steps.items() if own}
    if not steps:
        raise TraceFileError(str(folder), "the summary of at least one step", "none: no step has ended")
    first = min(steps)
    full = [read_full_step(path) for (rank, _), path in trace.records.items() if rank == first]
    keys = (full[-1].summary if full else steps[first][-1]).plans
    path = plan_path(folder, keys[0]) if len(keys) == 1 else None
    plan, question = (None, None) if path is None or not path.is_file() else load_answered(path)
    cluster = None if question is None else question.problem.cluster
    run = observed_run(folder.resolve().name, trace.meta, steps, full, plan, cluster)
    return FoundRun(run, plan, question)
