"""A model gets another plan: after the first steps, or if it is compiled again with other options."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile import search
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import Lane, Plan, Saving, Span, Tier
from elixir_compile.ir.hardware import Cluster
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.gradients import Reducers
from elixir_compile.search import Problem
from elixir_compile.search.joint.replan import Correction, Outcome, StepStats, correct, replan
from elixir_compile.session import graph_planner, guard, planning
from elixir_compile.session.neighbours import Neighbours
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED, StepProfiler
from elixir_compile.step.as_run import as_run
from elixir_compile.step.prices import prices
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, assert_same, by_elixir, least_bytes, loss_of, on_host, planned_peak_bytes

# ----------------------------------------------------------------------------------------------------------------------
# After the first steps a plan is corrected: once, without a capture, with the same weights.


WIDTH = 128
NUM_WATCHED = STEPS_SKIPPED + STEPS_TIMED
PLAIN = {"planner": "greedy", "plan_cache": False}
# The budget under which links a hundred times slower lead to a plan that is worth changing.
SHARE = 0.5


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """Return `cluster` with links that overlap compute and are `factor` times slower."""
    nodes = tuple(
        replace(
            node,
            h2d=replace(node.h2d, bytes_per_s=node.h2d.bytes_per_s / factor, overlaps_compute=True),
            d2h=replace(node.d2h, bytes_per_s=node.d2h.bytes_per_s / factor, overlaps_compute=True),
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def seen_on(cluster: Cluster, problem: Problem, plan: Plan, *, device_peak_bytes: int | None = None) -> StepStats:
    """Return what two steps of `plan` would show on `cluster`."""
    price = prices(problem.graph, plan.buckets, cluster, activations=plan.activations)
    index = {op.id: i for i, op in enumerate(as_run(problem.graph, plan.activations).ops)}
    seconds = {
        **{f"run {r.id}": (Lane.COMPUTE, price.run_s(index[r.first], index[r.last])) for r in plan.regions},
        **{f"gather {name}": (Lane.H2D, own_s) for name, own_s in price.h2d_s.items()},
        **{f"offload {name}.grad": (Lane.D2H, own_s) for name, own_s in price.d2h_s.items()},
    }
    for bucket, home in zip(plan.buckets, plan.placements, strict=True):
        if home.optim is Tier.DEVICE:
            seconds[f"update {bucket.id}"] = (Lane.COMPUTE, price.device_update_s[bucket.id])
        else:
            seconds[f"update {bucket.id}"] = (Lane.HOST, price.host_update_s[bucket.id])
    spans = [
        Span(lane=lane, label=label, start_s=step, end_s=step + own_s)
        for step in (0.0, 1000.0)
        for label, (lane, own_s) in seconds.items()
    ]
    return StepStats(period_s=1.0, spans=tuple(spans), device_peak_bytes=device_peak_bytes)


@dataclass
class Machine:
    """A machine that the profile calls a hundred times slower than it is; steps take what it really needs."""

    problems: list[Problem] = field(default_factory=list)

    @property
    def truth(self) -> Cluster:
        return slowed(self.problems[0].cluster, 0.01)


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Plan for links a hundred times too slow, and let spans show the truth."""
    return mistake(monkeypatch)


def mistake(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine whose links are planned to be a hundred times too slow, and whose spans show the truth."""
    machine, real_machine, real_plan_for = Machine(), planning.machine, graph_planner.plan_for

    def plan_for(problem: Problem, options: Options) -> Plan:
        machine.problems.append(problem)
        return real_plan_for(problem, options)

    def correct_by_truth(problem: Problem, plan: Plan, stats: StepStats) -> Correction | None:
        assert {span.label for span in stats.spans} >= {f"run {region.id}" for region in plan.regions}
        return correct(problem, plan, seen_on(machine.truth, problem, plan))

    monkeypatch.setattr(planning, "machine", lambda *args: slowed(real_machine(*args), 100))
    monkeypatch.setattr(graph_planner, "plan_for", plan_for)
    monkeypatch.setattr(graph_planner, "correct", correct_by_truth)
    return machine


def model() -> torch.nn.Module:
    return seeded(Stack, WIDTH, 8)


def batches(num_batches: int) -> list[torch.Tensor]:
    return vectors(num_batches, rows=32, width=WIDTH)


@pytest.fixture(scope="module")
def tight() -> int:
    """A budget under which half of the model has to move."""
    run = by_elixir(model(), **PLAIN).train(batches(1))
    return int(SHARE * planned_peak_bytes(run))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The one problem that a first step on a mistaken machine asked the planner, and its answer."""

    machine: Machine
    problem: Problem
    plan: Plan


@pytest.fixture(scope="module")
def asked(tight: int) -> Asked:
    """What the tests of `correct` and `replan` begin with; they change none of it."""
    with pytest.MonkeyPatch.context() as patch:
        machine = mistake(patch)
        by_elixir(model(), device_memory=tight, **PLAIN).train(batches(1))
    (problem,) = machine.problems
    return Asked(machine=machine, problem=problem, plan=by_rules(problem))


def by_rules(problem: Problem) -> Plan:
    """Return the plan that the first step and the next follow; a proof that none is better takes 6 s more."""
    return search.plan(problem, "greedy")


def homes(run: Run) -> dict[str, tuple[Tier, Tier]]:
    placed = executor_of(run.model).buckets.in_force(for_training=True)
    return {bucket.id: (placement.param, placement.optim) for bucket, placement in placed}


def test_a_wrong_profile_causes_one_new_search_and_no_new_capture(
    mistaken: Machine, tight: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    run = by_elixir(model(), device_memory=tight, report=True, **PLAIN).train(batches(NUM_WATCHED))
    (record,) = elixir.compilations(run.model)
    before, before_homes, num_searches = record.plan, homes(run), len(mistaken.problems)
    run.train(batches(NUM_WATCHED + 3)[NUM_WATCHED:])
    assert elixir.compilations(run.model) == [record]
    assert len(model_of(run.model).compilations) == 1
    assert len(mistaken.problems) == num_searches + 1
    (line,) = [line for line in caplog.messages if line.startswith("replanned: step is")]
    assert "regions measured" in line
    assert homes(run) != before_homes
    assert record.plan.prediction.step_s < before.prediction.step_s
    again = by_elixir(model(), device_memory=tight, replan=False, **PLAIN).train(batches(NUM_WATCHED + 3))
    assert homes(again) == before_homes
    assert_same(again, run)


def test_the_new_plan_stays_inside_the_budget(mistaken: Machine, tight: int) -> None:
    run = by_elixir(model(), device_memory=tight, **PLAIN).train(batches(NUM_WATCHED + 2))
    assert len(mistaken.problems) == 2
    record = elixir.measure_step(lambda: run.train(batches(1)))
    (compilation,) = elixir.compilations(run.model)
    verbs = ("gather", "release", "reduce", "offload", "run")
    planned = [action.verb for action in compilation.plan.schedules[0].actions]
    assert {verb: record.counts[verb] for verb in verbs} == {verb: planned.count(verb) for verb in verbs}
    assert on_host(run)


def test_a_plan_that_moves_nothing_is_only_repriced() -> None:
    # Nothing here computes as fast as that.
    run = by_elixir(model(), **PLAIN, hardware="h100-80g").train(batches(NUM_WATCHED))
    (record,) = elixir.compilations(run.model)
    before, programs = record.plan, (record.forward, record.backward)
    run.train(batches(1))
    assert (record.forward, record.backward) == programs
    assert record.plan.placements == before.placements
    assert record.plan.prediction.step_s != before.prediction.step_s
    assert not executor_of(run.model).ledger._recordings


class Turned(nn.Module):
    """Saves results whose strides are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x).t())
        return x.square().mean()


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_replan_from_several_regions_to_one_trains_the_same(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets and their optimizer state come back; the whole backward reads what a whole forward saves."""
    monkeypatch.setattr(graph_planner, "replan", lambda problem, plan, correction, search: _whole(problem, search))
    options = {"inner": inner, "replan": True, **PLAIN}
    whole = by_elixir(seeded(Turned), **{**options, "replan": False}).train(vectors(NUM_WATCHED + 2, rows=64))
    run = by_elixir(seeded(Turned), device_memory=int(SHARE * planned_peak_bytes(whole)), **options)
    run.train(vectors(NUM_WATCHED, rows=64))
    (record,) = elixir.compilations(run.model)
    assert len(record.plan.regions) > 2
    assert on_host(run)
    run.train(vectors(NUM_WATCHED + 2, rows=64)[NUM_WATCHED:])
    assert len(record.plan.regions) == 2
    assert not on_host(run)
    if inner == "aot_eager":
        assert_same(whole, run)
    for want, got in zip(whole.losses, run.losses, strict=True):
        # Inductor fuses a whole phase differently from its pieces.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _whole(problem: Problem, search: Callable[[Problem], Plan]) -> Outcome:
    free = replace(problem, budget_bytes=2**40, buckets=(), placements=())
    return Outcome(plan=search(free), is_new=True, line="")


def test_a_right_profile_changes_nothing(asked: Asked) -> None:
    problem, plan = asked.problem, asked.plan
    correction = correct(problem, plan, seen_on(problem.cluster, problem, plan))
    assert correction.cluster.h2d.bytes_per_s == pytest.approx(problem.cluster.h2d.bytes_per_s)
    assert correction.cluster.host.update_elements_per_s == pytest.approx(problem.cluster.host.update_elements_per_s)
    assert replan(problem, plan, correction, None) is None


def test_corrected_rates_equal_the_measured_rates(asked: Asked) -> None:
    problem, plan = asked.problem, asked.plan
    correction = correct(problem, plan, seen_on(asked.machine.truth, problem, plan))
    assert correction.cluster.h2d.bytes_per_s == pytest.approx(asked.machine.truth.h2d.bytes_per_s, rel=0.05)
    assert correction.cluster.d2h.bytes_per_s == pytest.approx(asked.machine.truth.d2h.bytes_per_s, rel=0.05)
    assert correction.cluster.name == problem.cluster.name


def test_a_peak_above_the_plan_becomes_base_bytes(asked: Asked) -> None:
    problem, plan = asked.problem, asked.plan
    peak_bytes = plan.budget_bytes + 1000
    correction = correct(problem, plan, seen_on(problem.cluster, problem, plan, device_peak_bytes=peak_bytes))
    assert correction.excess_bytes == peak_bytes - plan.prediction.device_peak_bytes
    foreign = replace(seen_on(problem.cluster, problem, plan, device_peak_bytes=peak_bytes), foreign_bytes=1000)
    assert correct(problem, plan, foreign).excess_bytes == 0
    outcome = replan(problem, plan, correction, by_rules)
    assert outcome.is_new
    assert outcome.plan.base_bytes == plan.base_bytes + correction.excess_bytes
    assert outcome.plan.prediction.device_peak_bytes <= plan.budget_bytes
    assert "above the plan" in outcome.line


def test_the_plan_stays_if_nothing_fits_at_the_corrected_prices(asked: Asked) -> None:
    problem, plan = asked.problem, asked.plan
    correction = correct(problem, plan, seen_on(problem.cluster, problem, plan, device_peak_bytes=2**40))
    outcome = replan(problem, plan, correction, search.plan)
    assert not outcome.is_new
    assert outcome.plan.placements == plan.placements
    assert outcome.plan.prediction.device_peak_bytes == 2**40


def test_a_region_without_a_span_prevents_the_correction(asked: Asked) -> None:
    problem, plan = asked.problem, asked.plan
    stats = seen_on(problem.cluster, problem, plan)
    spans = tuple(span for span in stats.spans if span.label != f"run {plan.regions[-1].id}")
    assert correct(problem, plan, replace(stats, spans=spans)) is None


def test_the_step_profiler_returns_stats_once_and_then_stops_recording(asked: Asked) -> None:
    executor = Executor(torch.device("cpu"), "m")
    watch = StepProfiler(executor, "m", Options(), records=True)
    answers = []
    for _ in range(NUM_WATCHED + 3):
        answers.append(watch.forward_begins(asked.problem))
        with executor.ledger.span(Lane.COMPUTE, "run fwd.0"):
            pass
    assert [answer is not None for answer in answers] == [False] * NUM_WATCHED + [True, False, False]
    assert len(answers[NUM_WATCHED].spans) == STEPS_TIMED
    assert not executor.ledger._recordings


def test_a_step_profiler_gives_up_if_other_forwards_end_its_measurements(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    """As evaluations do after each step or two: on an accelerator each measurement reads the allocator's history."""
    executor = Executor(torch.device("cpu"), "m")
    watch = StepProfiler(executor, "m", Options(), records=True)
    began = []
    with caplog.at_level("INFO", "elixir_compile"):
        for _ in range(STEPS_SKIPPED + 6):
            watch.forward_begins(asked.problem)
            began.append(bool(executor.ledger._recordings))
            watch.restart()
    assert began == [False] * STEPS_SKIPPED + [True] * 3 + [False] * 3
    assert [record.message for record in caplog.records] == [
        f"no step is measured: other forwards run between any {STEPS_TIMED} steps   m"
    ]


def test_a_stopped_step_profiler_returns_no_stats(asked: Asked) -> None:
    executor = Executor(torch.device("cpu"), "m")
    watch = StepProfiler(executor, "m", Options(), records=True)
    for _ in range(STEPS_SKIPPED + 1):
        assert watch.forward_begins(asked.problem) is None
    assert executor.ledger._recordings
    watch.stop()
    assert not executor.ledger._recordings
    assert all(watch.forward_begins(asked.problem) is None for _ in range(NUM_WATCHED))


# ----------------------------------------------------------------------------------------------------------------------
# A prepared model that is compiled again with other options gets a plan of these options.


OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, "planner": "greedy"}
BATCH = vectors(1, rows=64)[0]


def compiled(model: torch.nn.Module, **options: object) -> Any:
    return torch.compile(model, backend="elixir", options={**OPTIONS, **options})


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: object) -> elixir.Plan:
    """Take two steps under `options`, and return the plan."""
    step = compiled(model, **options)
    for _ in range(2):
        step(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return elixir.compilations(step)[-1].plan


@pytest.fixture(scope="module")
def tight_for_a_stack() -> int:
    return int(1.05 * least_bytes(seeded(Stack), BATCH))


def test_a_smaller_budget_moves_parameters_away_and_a_larger_budget_brings_them_back(tight_for_a_stack: int):
    model = seeded(Stack)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    twin = seeded(Stack)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for budget, home in ((None, Tier.DEVICE), (tight_for_a_stack, Tier.HOST), (1 << 30, Tier.DEVICE)):
        plan = trained(model, optimizer, **({} if budget is None else {"device_memory": budget}))
        assert home in {placement.param for placement in plan.placements}
        assert budget is None or plan.prediction.device_peak_bytes <= budget
        trained_by_torch(twin, other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert len(elixir.compilations(model)) == 1


def trained_by_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()


OTHERS: dict[str, tuple[dict[str, object], Callable[[elixir.Plan], bool]]] = {
    "number": ({"micro_batches": 4}, lambda plan: max(region.micro_batches for region in plan.regions) == 4),
    "update": ({"update": "after_backward"}, lambda plan: plan.update == "after_backward"),
    "activations": (
        {"activations": "offload"},
        lambda plan: all(group.saving is not Saving.RECOMPUTE for group in plan.activations),
    ),
    "planner": ({"planner": "zero3_offload"}, lambda plan: plan.planner == "zero3_offload"),
}


def test_each_option_that_shapes_plans_shapes_the_next_plan_and_the_first_options_give_the_first_plan_back(
    tight_for_a_stack: int,
):
    model = seeded(Stack)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    first = trained(model, optimizer, device_memory=2 * tight_for_a_stack)
    for name, (option, changed) in OTHERS.items():
        assert not changed(first) or name == "activations"
        assert changed(trained(model, optimizer, device_memory=2 * tight_for_a_stack, **option)), name
        assert len(elixir.compilations(model)) == 1
    last = trained(model, optimizer, device_memory=2 * tight_for_a_stack)
    assert (last.regions, last.placements, last.schedules) == (first.regions, first.placements, first.schedules)


def test_options_that_shape_no_plan_keep_it():
    model = seeded(Stack)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    before = trained(model, optimizer)
    assert trained(model, optimizer, replan=True) is before


# ----------------------------------------------------------------------------------------------------------------------
# Each cause of a new plan: what it changes of the problem, what the log says, and what is measured anew.


OF_CAUSES = {
    "inner": "aot_eager",
    "device_memory": 1 << 20,
    "host_memory": 1 << 30,
    "planner": "zero3_offload",
    "plan_cache": False,
    "report": True,
}


def small(rows: int = 8) -> torch.Tensor:
    return vectors(1, rows=rows, width=16)[0]


def _crowded(run: Run) -> Any:
    return [loss_of(run.compiled, small()) for _ in range(2)]


def _short(run: Run) -> Any:
    real, calls = Executor.ticket, []

    def ticket(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB.")
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "ticket", ticket)
        return loss_of(run.compiled, small())


def _staying(run: Run) -> Any:
    loss_of(run.compiled, small()).backward()
    return loss_of(run.compiled, small())


def _other_options(run: Run) -> Any:
    other = torch.compile(run.model, backend="elixir", options={**OF_CAUSES, "update": "after_backward"}, dynamic=True)
    loss_of(other, small()).backward()
    run.optimizer.zero_grad()


def _returned(run: Run) -> Any:
    _other_options(run)
    return loss_of(run.compiled, small())


def _reduced(run: Run) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reducers, "__bool__", lambda reducers: True)
        return loss_of(run.compiled, small())


def _moved(run: Run) -> Any:
    buckets = executor_of(run.model).buckets
    in_force = buckets.in_force(for_training=True)
    buckets.move([bucket for bucket, _ in in_force], [replace(home, param=Tier.DEVICE) for _, home in in_force])
    return loss_of(run.compiled, small())


def _beside_plain_state(run: Run) -> Any:
    executor = executor_of(run.model)
    executor.plain_state.note(run.optimizer, {"head.weight": 1000})
    executor.plain_state.is_counted = True
    return loss_of(run.compiled, small())


def _in_turn(run: Run) -> Any:
    more_bytes = (1 << 20) - planned_peak_bytes(run) + 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Neighbours, "bytes_in_turn", lambda neighbours, leaving_out=(): more_bytes)
        return loss_of(run.compiled, small())


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a cause changes."""

    happens: Callable[[Run], Any]
    """A forward, and what comes before it."""
    fields: tuple[frozenset[str], ...]
    """For each new plan, the fields of its problem that differ from those of the first, besides the buckets in force
    and their homes."""
    opens: bool = False
    """Whether the homes of the buckets are open."""
    says: tuple[str, ...] = ("planned",)
    """The first word of each line of the log."""
    num_restarts: int = 0
    """How often the measurement of the steps begins anew."""
    num_blocks: int = 0
    """Of the model, which is captured in half the time without any."""


CAUSES = {
    "none": Change(happens=lambda run: loss_of(run.compiled, small()), fields=(), says=()),
    "grown sizes": Change(
        happens=lambda run: loss_of(run.compiled, small(rows=16)), fields=(frozenset({"graph"}),), num_restarts=1
    ),
    "crowded": Change(happens=_crowded, fields=(frozenset({"base_bytes"}),)),
    "early shortage": Change(
        happens=_short, fields=(frozenset({"base_bytes"}),), says=("Stack", "planned"), num_restarts=1
    ),
    "staying gradients": Change(
        happens=_staying,
        fields=(frozenset({"accumulates", "params"}),),
        opens=True,
        says=("accumulates:", "planned"),
        num_restarts=1,
    ),
    "other options": Change(happens=_other_options, fields=(frozenset({"name", "graph", "update"}),), opens=True),
    "outdated": Change(
        happens=_returned,
        fields=(frozenset({"name", "graph", "update"}), frozenset()),
        opens=True,
        says=("planned", "planned"),
    ),
    "a wrapper reduces gradients": Change(happens=_reduced, fields=(frozenset({"params_stay"}),)),
    "buckets were moved": Change(happens=_moved, fields=(frozenset(),)),
    "plain state": Change(happens=_beside_plain_state, fields=(frozenset({"base_bytes", "params"}),)),
    "models in turn": Change(  # a head alone has nothing to move that makes so much room
        happens=_in_turn, fields=(frozenset({"base_bytes"}),), opens=True, num_blocks=1
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_of_a_new_plan_changes_its_part_of_the_problem(
    cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change = CAUSES[cause]
    problems: list[Problem] = []
    are_open: list[bool] = []
    restarted: list[StepProfiler] = []
    real_plan_for = graph_planner.plan_for

    def plan_for(problem: Problem, options: Options) -> Plan:
        problems.append(problem)
        are_open.append({home.bucket: (home.param, home.optim) for home in problem.placements} != homes(run))
        return real_plan_for(problem, options)

    monkeypatch.setattr(graph_planner, "plan_for", plan_for)
    run = by_elixir(seeded(Stack, 16, change.num_blocks), dynamic=True, **OF_CAUSES)
    run.train([small()] * 3)
    (first,) = problems
    caplog.set_level(logging.INFO, logger="elixir_compile")
    caplog.clear()
    monkeypatch.setattr(StepProfiler, "restart", lambda profiler: restarted.append(profiler))
    change.happens(run)
    besides = {"buckets", "placements"}
    names = [own.name for own in fields(Problem) if own.name not in besides]
    found = [frozenset(name for name in names if getattr(each, name) != getattr(first, name)) for each in problems[1:]]
    assert tuple(found) == change.fields
    assert are_open[1:] == [change.opens] * len(found)
    assert tuple(line.split()[0] for line in caplog.messages) == change.says
    assert len(restarted) == change.num_restarts


# ----------------------------------------------------------------------------------------------------------------------
# The guard times the plan once against a rule, and keeps the faster of both.


@pytest.mark.parametrize(("kept_share", "is_taken"), [(0.0, False), (math.inf, True)])
def test_a_rule_is_tried_once_and_stays_if_it_is_faster(
    kept_share: float, is_taken: bool, tight: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    monkeypatch.setattr(guard, "KEPT_SHARE", kept_share)
    run = by_elixir(model(), device_memory=tight, report=True, guard="always", **PLAIN)
    run.train(batches(2 * NUM_WATCHED + 1))
    before = homes(run)
    run.train(batches(2 * NUM_WATCHED + 2)[-1:])
    tried = homes(run)
    assert tried != before
    run.train(batches(4 * NUM_WATCHED)[2 * NUM_WATCHED + 2 :])
    assert homes(run) == (tried if is_taken else before)
    (line,) = [line for line in caplog.messages if line.startswith("guard")]
    assert ("is taken" in line) == is_taken
    assert ("the plan is kept" in line) != is_taken
    plain = by_elixir(model(), device_memory=tight, replan=False, guard="off", **PLAIN)
    assert_same(plain.train(batches(4 * NUM_WATCHED)), run)
    record = elixir.measure_step(lambda: run.train(batches(1)))
    assert record.device_peak_bytes <= tight


@dataclass
class Clocked:
    """A guard of a plan, whose steps take what the test says."""

    mode: str
    plan: Plan
    rule: Plan
    asked: int = 0

    def __post_init__(self) -> None:
        self.profiler = SimpleNamespace(is_on=False, is_stopped=False)
        self.profiler.measure_again = lambda: setattr(self.profiler, "is_on", True)
        self.profiler.stop = lambda: setattr(self.profiler, "is_stopped", True)
        self.said: list[str] = []
        self.guard = guard.Guard(self.mode, self.profiler, self._rival, self.said.append)
        self.guard._made_at_s -= 2.0  # the first steps took two seconds
        self.guard.begin(self.plan)

    def _rival(self) -> Plan:
        self.asked += 1
        return self.rule

    def next(self, period_s: float | None = None, plan: Plan | None = None) -> Plan | None:
        """Begin a step under `plan`, after steps of `period_s` if they are known."""
        self.guard.period_s = period_s
        return self.guard.next_plan(plan or self.plan)


@pytest.fixture
def rule(asked: Asked) -> Plan:
    """Another plan than that of the problem, which is planned to take half of its time."""
    other = search.plan(asked.problem, "zero3_offload")
    assert other.schedules != asked.plan.schedules
    return replace(other, prediction=replace(other.prediction, step_s=asked.plan.prediction.step_s / 2))


def test_no_rule_is_tried_if_steps_take_what_is_planned_or_if_the_guard_is_off(asked: Asked, rule: Plan) -> None:
    own_s = asked.plan.prediction.step_s
    for mode, period_s in (("auto", 1.05 * own_s), ("off", 9 * own_s)):
        clocked = Clocked(mode, asked.plan, rule)
        clocked.guard._made_at_s -= 1e9
        assert [clocked.next(), clocked.next(period_s), clocked.next()] == [None] * 3
        assert not clocked.guard.is_on
        assert clocked.asked == 0


@pytest.mark.parametrize(("rule_share", "is_taken"), [(0.97, True), (0.99, False), (1.5, False)])
def test_a_trial_waits_until_it_takes_a_hundredth_of_the_run(
    rule_share: float, is_taken: bool, asked: Asked, rule: Plan
) -> None:
    plan_s = 2 * asked.plan.prediction.step_s
    clocked = Clocked("auto", asked.plan, rule)
    assert clocked.next() is None
    assert clocked.next(plan_s) is None
    assert clocked.next() is None
    assert clocked.asked == 0
    clocked.guard._made_at_s -= 199.0
    assert clocked.next() is rule
    assert clocked.next(plan=rule) is None
    assert clocked.next(rule_share * plan_s, rule) is (None if is_taken else asked.plan)
    assert clocked.next(plan=rule if is_taken else asked.plan) is None
    assert not clocked.guard.is_on
    assert len(clocked.said) == clocked.asked == 1


def test_a_rule_that_is_planned_to_be_no_faster_is_not_tried(asked: Asked, rule: Plan) -> None:
    plan_s = 2 * asked.plan.prediction.step_s
    slow = replace(rule, prediction=replace(rule.prediction, step_s=0.98 * plan_s))
    clocked = Clocked("auto", asked.plan, slow)
    clocked.guard._made_at_s -= 1e9
    assert clocked.next(plan_s) is None
    assert not clocked.guard.is_on


def test_another_plan_ends_the_comparison(asked: Asked, rule: Plan) -> None:
    clocked = Clocked("always", asked.plan, rule)
    assert clocked.next(plan=rule) is None
    assert not clocked.guard.is_on
    assert clocked.profiler.is_stopped
