"""A plan carried over to another graph of the same model: by names, with as few changes as make it fit."""

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan, PlanMismatch
from elixir_compile.ir import Kind, Op, OpId, Phase, Plan, Saving, StepGraph, Storage, StorageId, fingerprint
from elixir_compile.search import Problem, plan
from elixir_compile.search.follow import SUBJECT, start_of, started
from elixir_compile.search.space.buckets import Level, form_buckets, level_of
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step import verify
from tests.pure.problems import CLUSTERS, between, chain_of, mlp_chain, needed_bytes, problem_of, problems
from tests.pure.strategies import Layer, chain, examples


def with_other_attention(graph: StepGraph) -> StepGraph:
    """Return `graph` with another name for each op and activation, and in each layer that saves something one more op,
    which saves twice as many bytes for the backward."""
    kinds = {storage.id: storage.kind for storage in graph.storages}

    def name(storage: StorageId) -> StorageId:
        return StorageId(f"other.{storage}") if kinds[storage] in (Kind.SAVED, Kind.TEMP) else storage

    storages = {storage.id: replace(storage, id=name(storage.id)) for storage in graph.storages}
    weights: dict[str, StorageId] = {}
    ops: list[Op] = []
    more: list[Storage] = []
    for op in graph.ops:
        reads, writes = tuple(map(name, op.reads)), tuple(map(name, op.writes))
        if op.phase is Phase.BACKWARD and op.module in weights:
            reads = (*reads, weights[op.module])
        if op.phase is not Phase.UPDATE:
            op = replace(op, id=OpId(f"{op.id}_other"))
        ops.append(replace(op, reads=reads, writes=writes))
        saved = next((own for own in op.writes if kinds[own] is Kind.SAVED), None)
        if op.phase is Phase.FORWARD and saved is not None and op.module not in weights:
            weight = StorageId(f"weights.{op.module}")
            weights[op.module] = weight
            more.append(replace(storages[saved], id=weight, nbytes=2 * storages[saved].nbytes))
            target = "aten._scaled_dot_product_flash_attention.default"
            nbytes = 3 * storages[saved].nbytes
            facts = {"target": target, "flops": 8 * nbytes, "moved_bytes": nbytes, "module": op.module}
            reads, writes = (name(saved),), (weight,)
            ops.append(Op(id=OpId(f"fwd.attend.{op.module}"), phase=Phase.FORWARD, reads=reads, writes=writes, **facts))
    outputs = tuple(map(name, graph.outputs))
    return replace(graph, ops=tuple(ops), storages=(*storages.values(), *more), outputs=outputs)


def elsewhere(problem: Problem) -> Problem:
    """Return `problem` with another attention."""
    return replace(problem, graph=with_other_attention(problem.graph))


def levels_of(made: Plan) -> Mapping[StorageId, Level]:
    pairs = zip(made.buckets, made.placements, strict=True)
    return {name: level_of(home) for bucket, home in pairs for name in bucket.params}


def said(made: Plan) -> str:
    """Return the decision of `made` about the plan that was given, in words."""
    (found,) = [own for own in made.decisions if own.subject == SUBJECT]
    return f"{found.choice}: {found.because}"


@given(problems(training=True), st.floats(0, 1), st.floats(0, 1))
@examples(15)
def test_any_plan_is_followed_or_refused(problem: Problem, share: float, share_here: float) -> None:
    """Here the device may be slower, and its budget smaller; every plan is verified as it is made."""
    made = plan(between(problem, share), "greedy")
    here = elsewhere(problem)
    most_bytes = 2 * made.prediction.device_peak_bytes
    here = replace(here, budget_bytes=needed_bytes(here) + int(share_here * most_bytes))
    followed = plan(started(here, made, follows=True))
    verify(here.graph, followed)
    assert followed.prediction.device_peak_bytes <= here.budget_bytes
    assert "follows t: it was made for" in said(followed)
    found = plan(started(here, made, follows=False), "greedy")
    assert "starts from t: it was made for" in said(found)
    # Where everything fits, nothing moves for a shorter step.
    is_kept = all(level is Level.ON_DEVICE for level in levels_of(found).values()) and not found.activations
    assert is_kept or found.prediction.step_s <= followed.prediction.step_s * (1 + 1e-9)
    with pytest.raises(NoFeasiblePlan):
        plan(started(replace(here, budget_bytes=here.base_bytes), made, follows=True))


# ----------------------------------------------------------------------------------------------------------------------
# What is carried over: the level of each parameter, and how the bytes of each layer are treated.


PROBLEM = problem_of(mlp_chain(4))
HERE = elsewhere(PROBLEM)


def pressed(graph: StepGraph = PROBLEM.graph, share: float = 0.2) -> Plan:
    """Return a plan of `graph` that moves buckets and recomputes or offloads activations."""
    problem = problem_of(graph)
    least, most = needed_bytes(problem), plan(problem, "keep_all").prediction.device_peak_bytes
    made = plan(replace(problem, budget_bytes=least + int(share * (most - least))), "greedy")
    return replace(made, name="plan.json")


MADE = pressed()


def test_with_enough_memory_nothing_is_changed() -> None:
    assert MADE.graph != fingerprint(HERE.graph)
    followed = plan(started(HERE, MADE, follows=True))
    assert levels_of(followed) == levels_of(MADE)
    assert {Level.ON_DEVICE} < set(levels_of(MADE).values())
    treated = {group.id: group.saving for group in followed.activations}
    assert any(saving is not Saving.KEEP for saving in treated.values())
    assert {name: treated[name] for name in treated if name in {own.id for own in MADE.activations}} == {
        group.id: group.saving for group in MADE.activations
    }
    assert said(followed) == (
        f"follows plan.json: it was made for 1 x cuda and graph {MADE.graph}; 4 of 4 buckets as in it; 4 of 4 layers "
        "as in it"
    )
    assert (followed.bound_s, followed.planner, followed.update) == (None, "greedy", MADE.update)
    moved = [own.because for own in followed.decisions if own.subject.startswith("b")]
    assert moved
    assert all(because.startswith("so is it in plan.json") for because in moved)


def test_with_less_memory_the_changes_are_counted() -> None:
    levels, modes = start_of(gather_facts(started(HERE, MADE, follows=True)))
    least = needed_bytes(HERE)
    followed = plan(started(replace(HERE, budget_bytes=least), MADE, follows=True))
    now = levels_of(followed)
    buckets = form_buckets(HERE)
    num_moved = sum(now[bucket.params[0]] is not level for bucket, level in zip(buckets, levels, strict=True))
    found = re.search(
        r"(\d) of 4 buckets as in it(?:, (\d) moved further so that it fits)?; (\d) of 4 layers", said(followed)
    )
    assert found is not None
    assert int(found[2] or 0) == num_moved == 4 - int(found[1])
    assert int(found[3]) < len(modes)
    assert "with fewer bytes so that it fits" in said(followed)


def test_a_search_from_a_plan_is_no_slower_than_the_plan() -> None:
    here = replace(HERE, budget_bytes=needed_bytes(HERE) + 20 * 1024)
    followed = plan(started(here, MADE, follows=True))
    for planner in ("greedy", "milp"):
        found = plan(started(here, MADE, follows=False), planner, 0.5)
        assert found.prediction.step_s <= followed.prediction.step_s
        assert "starts from plan.json" in said(found)
        assert found.planner == planner


def test_a_good_start_is_kept_where_the_search_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a long search is the start of one that has no time."""
    here = elsewhere(replace(PROBLEM, budget_bytes=MADE.budget_bytes + 40 * 1024))
    best = replace(plan(here, timeout_s=2.0), name="best.json")
    (first,) = [plan(started(here, best, follows=False), "greedy")]
    assert first.prediction.step_s <= best.prediction.step_s * (1 + 1e-9)
    assert first.prediction.step_s < plan(here, "greedy").prediction.step_s


@pytest.mark.parametrize(("planned_bytes", "here_bytes"), [(4096, 256), (256, 4096)], ids=["split", "joined"])
def test_buckets_of_other_sizes_take_the_level_of_most_of_their_bytes(planned_bytes: int, here_bytes: int) -> None:
    graph = chain([Layer(f"h.{i}", ((f"a{i}", 400), (f"b{i}", 100)), frozen=False, act_numel=64) for i in range(8)])
    problem = replace(problem_of(graph), bucket_min_bytes=planned_bytes, bucket_max_bytes=2 * planned_bytes)
    kept = plan(problem, "keep_all")
    made = plan(replace(problem, budget_bytes=int(0.6 * kept.prediction.device_peak_bytes)), "greedy")
    here = replace(elsewhere(problem), bucket_min_bytes=here_bytes, bucket_max_bytes=2 * here_bytes)
    followed = plan(started(here, made, follows=True))
    assert len(followed.buckets) != len(made.buckets)
    before, after = levels_of(made), levels_of(followed)
    assert len(set(before.values())) > 1
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    for bucket in followed.buckets:
        (level,) = {after[name] for name in bucket.params}
        held = {own: sum(nbytes[name] for name in bucket.params if before[name] is own) for own in Level}
        assert held[level] == max(held.values())


def test_state_that_cannot_leave_alone_stays_or_goes_with_its_parameters() -> None:
    """An optimizer that is not the hybrid one keeps its state beside its parameters."""
    made = plan(PROBLEM, "zero_offload")
    assert set(levels_of(made).values()) == {Level.STATE_OFF}
    followed = plan(started(replace(HERE, hybrid=False), made, follows=True))
    assert set(levels_of(followed).values()) == {Level.ALL_OFF}


def test_shards_of_ranks_are_those_of_the_ranks_here() -> None:
    graph = chain_of(6)
    problem = problem_of(graph, CLUSTERS["2 x cuda"])
    made = plan(
        replace(problem, budget_bytes=int(0.7 * plan(problem, "keep_all").prediction.device_peak_bytes)), "greedy"
    )
    numels = {StorageId(f"p{i}"): (300, 100) for i in range(6)}
    here = problem_of(with_other_attention(graph), CLUSTERS["2 x cuda"], shard_numels=numels)
    facts = {name: replace(param, is_uneven=True) for name, param in here.params.items()}
    here = replace(here, params=facts)
    followed = plan(started(here, made, follows=True))
    assert followed.buckets == form_buckets(here)
    assert {bucket.shard_numels for bucket in followed.buckets}.isdisjoint(b.shard_numels for b in made.buckets)
    assert levels_of(followed) == levels_of(made)


# ----------------------------------------------------------------------------------------------------------------------
# Names: a prefix more or less is the same model; other parameters, sizes and shapes are refused.


def renamed(graph: StepGraph, change: Mapping[str, str] | str) -> StepGraph:
    """Return `graph` with a prefix for all parameters and modules, or with other names for some parameters."""

    def name(own: str) -> str:
        return f"{change}{own}" if isinstance(change, str) else change.get(own, own)

    params = {storage.id: StorageId(name(storage.id)) for storage in graph.storages if storage.kind is Kind.PARAM}

    def here(names: tuple[StorageId, ...]) -> tuple[StorageId, ...]:
        return tuple(params.get(own, own) for own in names)

    def module(op: Op) -> str:
        return name(op.module) if op.module and isinstance(change, str) else op.module

    storages = tuple(
        replace(own, id=params.get(own.id, own.id), of=None if own.of is None else params.get(own.of, own.of))
        for own in graph.storages
    )
    ops = tuple(replace(op, reads=here(op.reads), writes=here(op.writes), module=module(op)) for op in graph.ops)
    return replace(graph, ops=ops, storages=storages)


PEFT = "base_model.model."


@pytest.mark.parametrize("is_planned", [True, False], ids=["in the plan", "here"])
def test_names_may_have_a_prefix_more(is_planned: bool) -> None:
    wrapped = renamed(PROBLEM.graph, PEFT)
    made, graph = (pressed(wrapped), PROBLEM.graph) if is_planned else (MADE, wrapped)
    followed = plan(started(problem_of(with_other_attention(graph)), made, follows=True))
    assert "4 of 4 buckets as in it; 4 of 4 layers as in it" in said(followed)
    before = {name.removeprefix(PEFT): level for name, level in levels_of(made).items()}
    assert {name.removeprefix(PEFT): level for name, level in levels_of(followed).items()} == before
    assert followed.activations


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        (mlp_chain(6), "The plan has no parameter up4, down4, up5 and 1 more, which this model reads"),
        (mlp_chain(2), "This model reads no parameter up2, down2, up3 and 1 more, which the plan has"),
        (renamed(PROBLEM.graph, {"up0": "x.up", "up1": "y.up"}), "The plan has no parameter x.up, y.up, which"),
        (renamed(PROBLEM.graph, {"up0": "lm_head"}), "The plan has no parameter lm_head, which this model reads"),
        (mlp_chain(4, numel=1024), "All groups of activations have other bytes, as h.0.* the batch has another shape"),
    ],
    ids=["a layer more", "a layer less", "suffixes", "a head that is not tied", "another batch"],
)
@pytest.mark.parametrize("follows", [True, False])
def test_another_model_is_refused_with_names(graph: StepGraph, sentence: str, follows: bool) -> None:
    with pytest.raises(PlanMismatch, match=sentence.replace("*", ".*")):
        started(problem_of(with_other_attention(graph)), MADE, follows=follows)


def test_other_bytes_of_a_parameter_are_refused() -> None:
    storages = tuple(
        replace(own, nbytes=2 * own.nbytes) if own.id == "up0" or own.of == "up0" else own
        for own in HERE.graph.storages
    )
    with pytest.raises(PlanMismatch, match=r"The parameters up0, down0 had 800 B and have 1\.2 KiB here"):
        started(problem_of(replace(HERE.graph, storages=storages)), MADE, follows=True)


def test_a_plan_that_keeps_all_shows_no_shape_and_needs_none() -> None:
    made = replace(plan(PROBLEM, "keep_all"), name="plan.json")
    here = problem_of(with_other_attention(mlp_chain(4, numel=1024)))
    assert not plan(started(here, made, follows=True)).activations


def test_the_start_fits_with_all_recomputed_or_not_at_all() -> None:
    """Where single changes do not help, a followed plan is the first that fits, and says so."""
    made = replace(plan(PROBLEM, "keep_all"), name="plan.json")
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(started(replace(HERE, budget_bytes=1), made, follows=True))
    assert caught.value.needed_bytes == needed_bytes(HERE)
    followed = plan(started(replace(HERE, budget_bytes=caught.value.needed_bytes), made, follows=True))
    assert followed.prediction.device_peak_bytes <= caught.value.needed_bytes


def test_a_host_that_is_too_small_says_how_much_is_enough() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(started(replace(HERE, budget_bytes=needed_bytes(HERE), host_budget_bytes=1), MADE, follows=True))
    assert caught.value.memory == "host"
    enough = replace(HERE, budget_bytes=needed_bytes(HERE), host_budget_bytes=caught.value.needed_bytes)
    assert plan(started(enough, MADE, follows=True)).prediction.host_peak_bytes <= caught.value.needed_bytes
