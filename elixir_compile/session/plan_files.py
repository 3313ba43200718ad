"""Plans with their questions, and records, as files (never pickle); the check of the folder for state on disk."""

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elixir_compile.base.errors import InvalidOption, PlanFileError, PlanMismatch, QuestionFileError
from elixir_compile.base.folders import write_whole
from elixir_compile.base.options import Options, PlanUse
from elixir_compile.ir import (
    BackwardOrder,
    Plan,
    Record,
    Tier,
    fingerprint,
    plan_from_json,
    plan_to_json,
    record_from_json,
)
from elixir_compile.ir.hardware import Cluster, is_name_of
from elixir_compile.search.follow import started
from elixir_compile.search.joint.joint_budget import rebased
from elixir_compile.search.problem import MOST_UNPACKED_BYTES, Problem, Question, question_from_bytes, question_to_bytes
from elixir_compile.search.reasons import predicted
from elixir_compile.step import plan_at, verify
from elixir_compile.step.legality import require_same_graph

if TYPE_CHECKING:
    from elixir_compile.session.model import Compilation

log = logging.getLogger("elixir_compile")

_REMEDY = "remove the file, or save the plan with its question again"


def disk_of(options: Options) -> tuple[Path, bool] | None:
    """Return the folder for state on disk and whether its checksums are verified; None if there is no folder."""
    return None if options.disk_path is None else (options.disk_path, options.disk_check)


def require_disk(plan: Plan, disk: tuple[Path, bool] | None) -> None:
    """Raise InvalidOption if `plan` keeps optimizer state on disk and `disk` names no folder for it.

    Not for frozen parameters there: they may lie in files of their own.
    """
    homes = zip(plan.buckets, plan.placements, strict=True)
    there = [bucket.id for bucket, home in homes if home.optim is Tier.DISK and bucket.trainable]
    if there and disk is None:
        some = ", ".join(there[:4]) + (f" and {len(there) - 4} more" if len(there) > 4 else "")
        raise InvalidOption(
            "disk_path", None, f"a folder, as plan {plan.name} keeps the optimizer state of {some} on disk"
        )


def save_plan(plan: "Plan | Compilation", path: "str | Path", question: Question | None = None) -> None:
    """Write `plan` as JSON to `path`, and `question`, which it answers, beside it.

    A compilation stands for its plan and its question. With both files, `elixir-compile explain` and `verify` need no
    model. Without a question, a question file of another plan that is beside `path` is removed.

    Example:
        elixir.save_plan(elixir.compilations(compiled)[-1], "plan.json")
        again = torch.compile(model, backend="elixir", options={"plan": "plan.json"})
    """
    if not isinstance(plan, Plan):
        if plan.plan is None:
            raise InvalidOption("plan", plan.name, "a compilation with a plan; this one was not planned yet")
        plan, question = plan.plan, plan.question
    Path(path).write_text(plan_to_json(plan), encoding="utf-8")
    beside = question_path(path)
    if question is not None:
        if Path(path).is_file():  # a plan may be written to a pipe, which has nothing beside it
            write_whole(beside, question_to_bytes(question))
        return
    with suppress(QuestionFileError):  # what is no question file is somebody's, and stays
        earlier = _read_question(beside)
        if earlier is not None and _other_question(earlier, plan):
            beside.unlink()


class PlanKeys:
    """The keys of plans: 12 digits of the SHA-256 of their JSON. Equal plans have equal keys."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Plan, str]] = {}
        """By the id of each plan that was asked for, the plan, so that its id stays its own, and its key."""

    def knows(self, plan: Plan) -> bool:
        """Return whether the key of this object was asked for before."""
        return id(plan) in self._known

    def of(self, plan: Plan) -> str:
        """Return the key of `plan`, computed once for each object."""
        if id(plan) not in self._known:
            self._known[id(plan)] = (plan, hashlib.sha256(plan_to_json(plan).encode()).hexdigest()[:12])
        return self._known[id(plan)][1]


def question_path(path: "str | Path") -> Path:
    """Return the path of the question file beside the plan at `path`: `plan.question.json.gz` for `plan.json`."""
    plan = Path(path)
    return plan.with_name(plan.name.removesuffix(".json") + ".question.json.gz")


def load_plan(path: "str | Path") -> Plan:
    """Return the plan that `save_plan` wrote to `path`.

    Raises PlanFileError with the name of the wrong field, or of the missing file.

    Example:
        plan = elixir.compilations(compiled)[-1].plan
        elixir.save_plan(plan, "plan.json")
        assert elixir.load_plan("plan.json") == plan
    """
    return plan_from_json(_read(path))


def load_question(path: "str | Path", plan: Plan) -> Question | None:
    """Return the question in the file beside the plan at `path`; None if there is no such file.

    Raises QuestionFileError if the file cannot be read, or if `plan` answers another question: one about another graph,
    machine or budget of the device.
    """
    beside = question_path(path)
    question = _read_question(beside)
    if question is not None and (found := _other_question(question, plan)) is not None:
        what, of_plan, of_question = found
        wanted = f"the question about {what} {of_plan}, which {Path(path).name} answers; {_REMEDY}"
        raise QuestionFileError(str(beside), wanted, f"{what} {of_question}")
    return question


def _read_question(beside: Path) -> Question | None:
    try:
        with beside.open("rb") as file:
            content = file.read(MOST_UNPACKED_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise QuestionFileError(str(beside), "a file that can be read", error.strerror) from error
    try:
        return question_from_bytes(content)
    except QuestionFileError as error:
        raise QuestionFileError(f"{beside}, {error.field}", f"{error.expected}; {_REMEDY}", error.got) from error


def _other_question(question: Question, plan: Plan) -> tuple[str, object, object] | None:
    """Return what differs between `plan` and the plans that answer `question`, of the plan and of the question; None if
    `plan` may be one of them."""
    problem = question.problem
    pairs = {
        "graph": (plan.graph, fingerprint(problem.graph)),
        "machine": (plan.cluster, problem.cluster.name),
        "number of ranks": (plan.num_ranks * plan.num_copies, problem.cluster.num_ranks),
        "budget of bytes": (plan.budget_bytes, problem.budget_bytes),
        "number of bytes beside the plan": (plan.base_bytes, problem.base_bytes),
    }
    return next(((what, *pair) for what, pair in pairs.items() if pair[0] != pair[1]), None)


def load_answered(path: "str | Path", plan: Plan | None = None) -> tuple[Plan, Question | None]:
    """Return the plan in the file at `path`, and the question in the file beside it, None if there is no such file.

    `plan` is the plan in the file if it was read before; the file is then not read again. With a question the plan is
    legal for its graph. Raises the errors of `load_plan`, `load_question` and `verify`.
    """
    plan = load_plan(path) if plan is None else plan
    question = load_question(path, plan)
    if question is not None:
        plan = plan_at(question.problem.graph, plan)
        verify(question.problem.graph, plan)
    return plan, question


def load_plan_or_record(path: "str | Path") -> Plan | Record:
    """Return the plan or the record of a step in the file at `path`. Raises PlanFileError as `load_plan` does."""
    text = _read(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None  # reading it as a plan then raises an error with the fault
    is_record = isinstance(data, dict) and data.get("elixir") == "record"
    return record_from_json(text) if is_record else plan_from_json(text)


def load_plan_for(path: "str | Path", problem: Problem, use: PlanUse = "exact") -> Plan | Problem:
    """Return the plan in the file at `path`, verified, if it answers `problem` as it is; else, unless the `use` is
    `exact`, the problem with a start at this plan, to be searched or followed (see `search.follow`).

    A plan for the graph of the problem is used on another machine too, with a new prediction, if it fits there.

    Raises PlanMismatch with the value in the file and the value here if the model, the number of ranks, the number of
    copies or the calls of a step differ, or if the plan has lean calls and counts its bytes for another order of
    backward passes; if the `use` is `exact`, also if the graph or the machine does.
    """
    plan, graph, cluster, calls = load_plan(path), problem.graph, problem.cluster, problem.calls
    require_same_ranks(plan, cluster)
    if plan.num_copies != problem.num_copies:
        raise PlanMismatch("number of copies", str(plan.num_copies), str(problem.num_copies))
    if (plan.calls.num, plan.calls.outstanding) != (calls.num, calls.outstanding):
        raise PlanMismatch("number of calls in a step", str(plan.calls), str(calls))
    if plan.lean is not None and plan.calls.backward_order not in (BackwardOrder.ANY, calls.backward_order):
        raise PlanMismatch("order of backward passes", plan.calls.backward_order, calls.backward_order)
    if use == "exact":
        require_same_graph(plan, graph)
        require_same_machine(plan, cluster)
    name, is_here, is_same = Path(path).name, is_name_of(plan.cluster, cluster), plan.graph == fingerprint(graph)
    if not is_here:
        log.info("%s was made for %s, here is %s", name, plan.cluster, cluster.name)
    if is_same:
        found = plan_at(graph, plan)
        found = found if is_here else _moved_to(found, problem)
        if found is not None:
            verify(graph, found)
            return found
    asked = started(problem, plan, follows=use == "follow", name=name)
    why = "does not fit here" if is_same else "was made for another graph of this model"
    does = "it is followed as far as it fits" if use == "follow" else "the search starts from it"
    log.info("%s %s: %s", name, why, does)
    return asked


def _moved_to(plan: Plan, problem: Problem) -> Plan | None:
    """Return `plan`, for the graph of `problem` on another machine, with the prediction here; None if it does not fit
    the budgets, or keeps something on a disk that is not there."""
    if not problem.disk and any(home.optim is Tier.DISK for home in plan.placements):
        return None
    asked = {"cluster": problem.cluster.name, "budget_bytes": problem.budget_bytes, "base_bytes": problem.base_bytes}
    found = replace(rebased(plan, problem.base_bytes), **asked, bound_s=None, binding=(), gib_bound_s=None)
    found = replace(found, prediction=predicted(problem, found)[0])
    expected = found.prediction
    if expected.device_peak_bytes > problem.budget_bytes or expected.host_peak_bytes > problem.host_budget_bytes:
        return None
    return found


def require_same_ranks(plan: Plan, cluster: Cluster) -> None:
    """Raise PlanMismatch if `plan` is for another number of ranks than `cluster` has."""
    num_ranks = plan.num_ranks * plan.num_copies
    if num_ranks != cluster.num_ranks:
        here = f"{cluster.num_ranks} ({cluster.name})"
        raise PlanMismatch("number of ranks", f"{num_ranks} ({plan.cluster})", here)


def require_same_machine(plan: Plan, cluster: Cluster) -> None:
    """Raise PlanMismatch if `plan` is for another number of ranks or another machine than `cluster`.

    A plan for a common machine, as `h100-80g`, is for a device with that chip and memory.
    """
    require_same_ranks(plan, cluster)
    if not is_name_of(plan.cluster, cluster):
        raise PlanMismatch("machine", plan.cluster, cluster.name)


def _read(path: "str | Path") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanFileError(str(path), "a file that can be read", error.strerror) from error
    except UnicodeDecodeError as error:
        raise PlanFileError(str(path), "a text file", f"byte {error.start} that is no UTF-8") from error
