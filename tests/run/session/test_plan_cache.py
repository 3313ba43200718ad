"""`cache`: the second search for the same is no search, and everything that decides makes it another; and how often a
first step captures, partitions, converts, searches and compiles.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.base.options import Fractions, Options
from elixir_compile.base.units import GIB
from elixir_compile.graph.capture import additions
from elixir_compile.ir import Plan, StepGraph, StorageId, Tier, Update
from elixir_compile.ir.cost import Stretch
from elixir_compile.ir.hardware import profile_for
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.search import Problem, plan
from elixir_compile.search.follow import started
from elixir_compile.search.joint.variants import plan_as_asked
from elixir_compile.search.reasons import predicted
from elixir_compile.session import backend, cache, planned_graph, planning, programs
from elixir_compile.session.cache import cached_plan, plan_for, plan_key, store_plan
from elixir_compile.step import verify
from tests.pure.problems import chain_of, problem_of, tight_problem
from tests.pure.strategies import with_facts
from tests.run.models import Stack
from tests.run.training import by_elixir, by_elixir_unprepared

OPTIONS = Options(planner="greedy", device_memory=GIB, host_memory=GIB)
FREE = Options(planner="greedy")
PROBLEM = tight_problem()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the plans, which no test shares."""
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Return the problems that were searched, in order."""
    problems: list[Problem] = []

    def count(problem: Problem, options: Options) -> Plan:
        problems.append(problem)
        return plan_as_asked(problem, options)

    monkeypatch.setattr(cache, "plan_as_asked", count)
    return problems


def cached_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_cached_plan_is_returned_without_a_search(searched: list[Problem], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "elixir_compile"):
        first = plan_for(PROBLEM, OPTIONS)
        assert "plan from cache" not in caplog.text
        assert plan_for(PROBLEM, OPTIONS) == first
        assert "plan from cache   t" in caplog.text
    assert len(searched) == 1


def test_without_the_cache_every_call_searches(searched: list[Problem], folder: Path) -> None:
    options = replace(OPTIONS, plan_cache=False)
    assert plan_for(PROBLEM, options) == plan_for(PROBLEM, options)
    assert len(searched) == 2
    assert not folder.exists()


def test_nothing_is_cached_if_no_plan_is_feasible(folder: Path) -> None:
    with pytest.raises(elixir.NoFeasiblePlan):
        plan_for(replace(PROBLEM, budget_bytes=1), OPTIONS)
    assert not folder.exists()


def with_flops(graph: StepGraph) -> StepGraph:
    """Return the graph with other costs; its fingerprint stays."""
    return replace(graph, ops=tuple(replace(op, flops=op.flops + 1) for op in graph.ops))


def with_ids(graph: StepGraph) -> StepGraph:
    """Return the graph with other ids of ops, which regions name; its fingerprint stays."""
    *ops, update = graph.ops
    return replace(graph, ops=(*(replace(op, id=f"{op.id}_other") for op in ops), update))


STRETCH = Stretch(first=PROBLEM.graph.ops[0].id, last=PROBLEM.graph.ops[1].id, run_s=1.0)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda p: replace(p, budget_bytes=p.budget_bytes + 1), OPTIONS),
        (lambda p: replace(p, host_budget_bytes=p.host_budget_bytes + 1), OPTIONS),
        (lambda p: replace(p, graph=chain_of(5)), OPTIONS),
        (lambda p: replace(p, graph=with_flops(p.graph)), OPTIONS),
        (lambda p: replace(p, graph=with_ids(p.graph)), OPTIONS),
        (lambda p: replace(p, cluster=profile_for("cuda", GIB, GIB, "another")), OPTIONS),
        (lambda p: replace(p, cluster=profile_for("cuda", 2 * GIB, GIB, p.cluster.device.name)), OPTIONS),
        (lambda p: replace(p, base_bytes=1), OPTIONS),
        (lambda p: replace(p, disk=True), OPTIONS),
        (lambda p: replace(p, fractions=Fractions()), OPTIONS),
        (lambda p: replace(p, update=Update.AFTER_BACKWARD), OPTIONS),
        (lambda p: replace(p, params=with_facts(p.params, group={StorageId("p0"): 1})), OPTIONS),
        (lambda p: replace(p, host_base_bytes=1), OPTIONS),
        (lambda p: replace(p, hybrid=False), OPTIONS),
        (lambda p: replace(p, params=with_facts(p.params, state_nbytes={StorageId("p0"): 4})), OPTIONS),
        (lambda p: replace(p, measured=(STRETCH,)), OPTIONS),
        (lambda p: replace(p, bucket_max_bytes=4096), OPTIONS),
        (lambda p: replace(p, **in_force(p)), OPTIONS),
        (lambda p: p, replace(OPTIONS, planner="keep_all")),
        (lambda p: p, replace(OPTIONS, search_timeout=5.0)),
        (lambda p: p, FREE),
        (lambda p: p, replace(OPTIONS, host_memory=None)),
    ],
)
def test_inputs_of_the_search_change_the_key(change: Callable[[Problem], Problem], options: Options) -> None:
    store_plan(plan(PROBLEM, "greedy"), PROBLEM, OPTIONS)
    assert cached_plan(change(PROBLEM), options) is None
    assert plan_key(change(PROBLEM), options) != plan_key(PROBLEM, OPTIONS)


def in_force(problem: Problem) -> dict[str, object]:
    made = plan(problem, "greedy")
    return {"buckets": made.buckets, "placements": made.placements}


def test_a_plan_with_state_on_disk_under_free_memory_is_not_cached(folder: Path) -> None:
    """Another run may have room for that state, and the file would say disk."""
    placements = plan(PROBLEM, "greedy").placements
    off = [placement.bucket for placement in placements if placement.optim is not Tier.DEVICE]
    made = plan(PROBLEM, "greedy")
    made = replace(made, placements=tuple(replace(p, optim=Tier.DISK) if p.bucket in off else p for p in placements))
    store_plan(made, PROBLEM, FREE)
    assert not folder.exists()
    store_plan(made, PROBLEM, OPTIONS)
    assert cached_file(folder)


def test_names_and_source_lines_do_not_change_the_key() -> None:
    graph = replace(PROBLEM.graph, ops=tuple(replace(op, source="moved.py:1") for op in PROBLEM.graph.ops))
    params = dict(reversed(PROBLEM.params.items()))
    same = replace(PROBLEM, name="other", graph=replace(graph, name="other"), params=params)
    options = replace(OPTIONS, report=False, inner="aot_eager")
    store_plan(plan(PROBLEM, "greedy"), PROBLEM, OPTIONS)
    found = cached_plan(same, options)
    assert found is not None
    assert found.name == "other"


def test_other_source_code_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_key(PROBLEM, OPTIONS)
    monkeypatch.setattr(cache, "source_digest", lambda *patterns: "edited")
    assert plan_key(PROBLEM, OPTIONS) != before


@pytest.mark.parametrize(
    ("device_share", "host_share", "is_used"),
    [(1.0, 1.0, True), (1.05, 2.0, True), (0.99, 1.0, True), (2.0, 1.0, False), (0.1, 1.0, False), (1.0, 1e-6, False)],
)
def test_under_free_memory_a_plan_is_used_if_it_fits_and_is_likely_the_best(
    device_share: float, host_share: float, is_used: bool
) -> None:
    """A plan that offloads fits any larger device, where there would be a quicker one."""
    made = replace(plan(PROBLEM, "greedy"), bound_s=0.0)
    problem = replace(PROBLEM, budget_bytes=made.prediction.device_peak_bytes + 500)
    store_plan(replace(made, budget_bytes=problem.budget_bytes), problem, FREE)
    budget_bytes = int(device_share * problem.budget_bytes)
    host_bytes = int(host_share * problem.host_budget_bytes)
    found = cached_plan(replace(problem, budget_bytes=budget_bytes, host_budget_bytes=host_bytes), FREE)
    assert (found is not None) == is_used
    assert found is None or found.budget_bytes == budget_bytes
    if found is not None:
        # What was proved for less memory is not proved here.
        assert (found.bound_s is None) == (device_share > 1)


def test_under_free_memory_a_plan_that_moves_nothing_is_used_on_any_larger_device() -> None:
    problem = replace(PROBLEM, budget_bytes=GIB)
    store_plan(plan(problem, "greedy"), problem, FREE)
    assert cached_plan(replace(problem, budget_bytes=100 * GIB), FREE) is not None


def test_a_plan_that_fills_the_free_host_memory_is_not_cached(folder: Path) -> None:
    made = plan(PROBLEM, "greedy")
    tight = replace(PROBLEM, host_budget_bytes=made.prediction.host_peak_bytes)
    store_plan(made, tight, FREE)
    assert not folder.exists()
    store_plan(made, tight, OPTIONS)
    assert cached_file(folder).exists()


def half(path: Path) -> None:
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def unreadable(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


def illegal(path: Path) -> None:
    made = elixir.load_plan(path)
    prediction = replace(made.prediction, device_peak_bytes=made.prediction.device_peak_bytes - 1)
    elixir.save_plan(replace(made, prediction=prediction), path)


def foreign(path: Path) -> None:
    elixir.save_plan(plan(problem_of(chain_of(2)), "greedy"), path)


@pytest.mark.parametrize("spoil", [half, unreadable, illegal, foreign])
def test_a_broken_file_is_removed_with_a_warning(
    spoil: Callable[[Path], None], folder: Path, searched: list[Problem]
) -> None:
    first = plan_for(PROBLEM, OPTIONS)
    path = cached_file(folder)
    spoil(path)
    with pytest.warns(elixir.ElixirWarning, match="not usable and is removed") as caught:
        assert cached_plan(PROBLEM, OPTIONS) is None
    assert str(path) in str(caught[0].message)
    assert not path.exists()
    assert plan_for(PROBLEM, OPTIONS) == first
    assert len(searched) == 2


# Plans of other budgets and rates are incumbents.


LARGER = replace(PROBLEM, budget_bytes=PROBLEM.budget_bytes + 4096)


@pytest.fixture
def slow_search(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem, Options], Plan]:
    """Let the search for any budget but that of `PROBLEM` find the plan of the smallest budget; return it."""
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        plan(replace(PROBLEM, budget_bytes=0), "greedy")
    slow = plan(replace(PROBLEM, budget_bytes=caught.value.needed_bytes), "greedy")

    def search(problem: Problem, options: Options) -> Plan:
        if problem.budget_bytes == PROBLEM.budget_bytes and problem.cluster == PROBLEM.cluster:
            return plan_as_asked(problem, options)
        found = replace(slow, budget_bytes=problem.budget_bytes)
        return replace(found, prediction=predicted(problem, found)[0], bound_s=0.0)

    monkeypatch.setattr(cache, "plan_as_asked", search)
    assert search(LARGER, OPTIONS).prediction.step_s > plan(PROBLEM, "greedy").prediction.step_s
    return search


@pytest.mark.parametrize("comes_first", [PROBLEM, LARGER], ids=["less memory first", "more memory first"])
def test_more_memory_never_makes_a_slower_plan(
    comes_first: Problem, slow_search: Callable[[Problem, Options], Plan]
) -> None:
    plan_for(comes_first, OPTIONS)
    less, more = plan_for(PROBLEM, OPTIONS), plan_for(LARGER, OPTIONS)
    assert more.prediction == less.prediction
    assert more.placements == less.placements
    assert (more.budget_bytes, more.bound_s) == (LARGER.budget_bytes, 0.0)
    (said,) = [own for own in more.decisions if own.subject == "search"]
    assert "found a step that is" in said.because
    verify(LARGER.graph, more)
    assert plan_for(LARGER, OPTIONS) == more  # kept, with one such decision


def test_a_faster_link_never_makes_a_slower_plan(slow_search: Callable[[Problem, Options], Plan]) -> None:
    node = PROBLEM.cluster.nodes[0]
    links = {
        name: replace(link, bytes_per_s=2 * link.bytes_per_s) for name, link in (("h2d", node.h2d), ("d2h", node.d2h))
    }
    faster = replace(PROBLEM, cluster=replace(PROBLEM.cluster, nodes=(replace(node, **links),)))
    before = plan_for(PROBLEM, OPTIONS)
    found = plan_for(faster, OPTIONS)
    assert found.placements == before.placements
    assert found.prediction == predicted(faster, before)[0]
    assert found.prediction.step_s <= before.prediction.step_s < slow_search(faster, OPTIONS).prediction.step_s


def test_plans_that_do_not_fit_and_those_of_rules_are_no_incumbents(
    slow_search: Callable[[Problem, Options], Plan],
) -> None:
    plan_for(PROBLEM, OPTIONS)
    smaller = replace(PROBLEM, budget_bytes=plan(PROBLEM, "greedy").prediction.device_peak_bytes - 1)
    assert plan_for(smaller, OPTIONS) == slow_search(smaller, OPTIONS)
    short = replace(LARGER, host_budget_bytes=1)
    assert plan_for(short, OPTIONS) == slow_search(short, OPTIONS)
    rule = replace(OPTIONS, planner="zero_offload")
    store_plan(plan(PROBLEM, "greedy"), PROBLEM, rule)
    assert plan_for(LARGER, rule) == slow_search(LARGER, rule)
    other = replace(LARGER, graph=with_flops(LARGER.graph))
    assert plan_for(other, OPTIONS) == slow_search(other, OPTIONS)


@pytest.mark.parametrize(("share", "is_taken"), [(0.995, False), (0.98, True)])
def test_everything_stays_on_the_device_unless_a_plan_that_moves_some_is_worth_it(share: float, is_taken: bool) -> None:
    everything = plan(replace(PROBLEM, budget_bytes=GIB), "greedy")
    made = plan_for(PROBLEM, OPTIONS)
    prediction = replace(made.prediction, step_s=share * everything.prediction.step_s)
    store_plan(replace(made, prediction=prediction), PROBLEM, OPTIONS)
    found = plan_for(replace(PROBLEM, budget_bytes=GIB), OPTIONS)
    assert (found.placements != everything.placements) == is_taken


@pytest.mark.parametrize(("gap", "least_bytes"), [(0.1, 0.97), (0.01, 1.0)])
def test_without_a_cache_a_plan_with_a_large_gap_is_compared_with_that_of_less_memory(
    gap: float, least_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller budget is the same for all budgets between it and the next, and its plan is taken if it is faster."""
    asked: list[int] = []

    def search(problem: Problem, options: Options) -> Plan:
        asked.append(problem.budget_bytes)
        found = plan(replace(PROBLEM, budget_bytes=problem.budget_bytes), "greedy")
        step_s = found.prediction.step_s * (1.0 if len(asked) == 1 else 0.9)
        return replace(found, prediction=replace(found.prediction, step_s=step_s), bound_s=step_s * (1 - gap))

    monkeypatch.setattr(cache, "plan_as_asked", search)
    found = plan_for(LARGER, replace(OPTIONS, plan_cache=False))
    assert asked[0] == LARGER.budget_bytes == found.budget_bytes
    assert all(least_bytes * LARGER.budget_bytes < budget < LARGER.budget_bytes for budget in asked[1:])
    assert (len(asked) == 2) == any(own.subject == "search" for own in found.decisions) == (gap > 0.02)


@pytest.mark.parametrize("spoil", [half, unreadable, illegal, foreign])
def test_a_broken_incumbent_is_left_out(
    spoil: Callable[[Path], None], folder: Path, slow_search: Callable[[Problem, Options], Plan]
) -> None:
    plan_for(PROBLEM, OPTIONS)
    spoil(cached_file(folder))
    assert plan_for(LARGER, OPTIONS) == slow_search(LARGER, OPTIONS)


def test_a_followed_plan_is_no_searched_one() -> None:
    """The plan that the user chose is followed, however fast an earlier plan for the same step is."""
    slow, fast = (plan(PROBLEM, planner) for planner in ("zero3_offload", "greedy"))
    for follows in (True, False):
        asked = started(LARGER, slow, follows=follows)
        store_plan(fast, replace(asked, budget_bytes=PROBLEM.budget_bytes), OPTIONS)
        found = plan_for(asked, OPTIONS)
        assert (found.placements == slow.placements) == follows
        assert (found.prediction.step_s > fast.prediction.step_s) == follows


def test_a_cache_folder_that_cannot_be_made_warns(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with pytest.warns(elixir.ElixirWarning, match="plans cannot be cached"):
        store_plan(plan(PROBLEM, "greedy"), PROBLEM, OPTIONS)


def test_only_the_plans_used_last_are_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_PLANS", 2)
    made = plan(PROBLEM, "greedy")
    others = [replace(PROBLEM, bucket_max_bytes=4096 + n) for n in range(2)]
    for age, problem in enumerate((PROBLEM, *others)):
        store_plan(made, problem, OPTIONS)
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (age, age))
        if age == 1:
            assert cached_plan(PROBLEM, OPTIONS) is not None  # and is now the one used last
    assert len(list(folder.iterdir())) == 2
    assert cached_plan(PROBLEM, OPTIONS) is not None
    assert cached_plan(others[0], OPTIONS) is None


def test_only_json_files_stay_in_the_folder(folder: Path) -> None:
    plan_for(PROBLEM, OPTIONS)
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_a_second_training_run_reads_its_plan_from_the_cache(searched: list[Problem]) -> None:
    def train() -> tuple[list[float], list[Plan]]:
        torch.manual_seed(0)
        run = by_elixir(Stack(num_blocks=2)).train([torch.randn(4, 64)] * 2)
        # Free memory is another number each time, and no other field of the plan is.
        plans = [replace(record.plan, budget_bytes=0) for record in elixir.compilations(run.model)]
        return [loss.item() for loss in run.losses], plans

    first = train()
    num_searched = len(searched)
    assert num_searched > 0
    assert train() == first
    assert len(searched) == num_searched


# ----------------------------------------------------------------------------------------------------------------------
# The work of a first step, whose seconds are those of a machine: `benchmarks/first_step.py` prints them.


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how often each part of a first step was done so far."""
    done: Counter[str] = Counter()

    def count(owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            done[part] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(compat, "min_cut_partition", "partitions")
    count(planned_graph, "captured_step", "captures")
    count(additions, "step_graph", "conversions")
    count(planning, "step_graph", "conversions")
    count(backend, "_compile", "compilations")
    count(cache, "plan_as_asked", "searches")
    count(programs, "write_program", "programs")
    count(RegionCompiler, "_compile", "regions")
    return done


@pytest.mark.parametrize(
    ("num_blocks", "is_prepared", "options", "num_regions"),
    [
        (2, False, {"device_memory": 900_000}, 2),
        # Of 14 regions, and of 18, seven differ.
        (6, True, {"compile_by": "layer"}, 7),
        (8, True, {"compile_by": "layer"}, 7),
    ],
    ids=["plain, within a budget", "six layers", "eight layers"],
)
def test_a_first_step_does_each_part_once_and_later_steps_none(
    work: Counter[str], num_blocks: int, is_prepared: bool, options: dict[str, object], num_regions: int
) -> None:
    """Equal layers are compiled once, however many there are."""
    make = by_elixir if is_prepared else by_elixir_unprepared
    run = make(Stack(num_blocks=num_blocks), plan_cache=False, **options)
    parts = ("compilations", "captures", "partitions", "conversions", "searches")
    for _ in range(2):
        run.train([torch.randn(4, 64)])
        assert work == {**dict.fromkeys(parts, 1), "programs": 2, "regions": num_regions}
