"""The fractions of Gemini as limits of the search, and `benchmarks/gemini.py` to compare with."""

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import ContradictingFractions, InvalidOption, NoFeasiblePlan, StateNotApart
from elixir_compile.base.options import Fractions
from elixir_compile.base.units import GIB
from elixir_compile.ir import Bucket, Placement, Plan, Saving, Tier, Verb
from elixir_compile.search import Problem, plan
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step import verify
from elixir_compile.tools.report.explain import explain
from tests.pure.problems import CLUSTERS, best_of_all, chain_of, problem_of
from tests.pure.strategies import Layer, chain, examples

# ----------------------------------------------------------------------------------------------------------------------
# `search.space.buckets`: the fractions of Gemini as limits of the search, whatever the planner.


SEARCHES: dict[str, Callable[[Problem], Plan | None]] = {
    "milp": lambda problem: plan(problem, timeout_s=0.5),
    "greedy": lambda problem: plan(problem, "greedy"),
    "all placements": best_of_all,
}
TOLERANCE = 1e-3
"""The search ends if no plan can be shorter by more than this share."""


def legal(values: tuple[float, ...] = (0.0, 0.5, 1.0)) -> Iterator[Fractions]:
    """Every combination of `values` that Gemini documents as useful."""
    for shard, optim, param in itertools.product(values, repeat=3):
        if param == 0.0 or shard == optim == 1.0:
            yield Fractions(shard_param=shard, offload_optim=optim, offload_param=param)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A chain of up to five layers of other sizes on one or two ranks; frozen layers have no state."""
    layers = [
        Layer(
            module=f"h.{i}",
            params=((f"p{i}", draw(st.integers(64, 600))),),
            frozen=draw(st.booleans()) and i > 0,
            act_numel=64,
        )
        for i in range(draw(st.integers(1, 5)))
    ]
    return problem_of(chain(layers), CLUSTERS[draw(st.sampled_from(["cpu", "cuda", "2 x cuda"]))])


SHARES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.75, 1.0])


@st.composite
def fractions(draw: st.DrawFn) -> Fractions:
    if draw(st.booleans()):
        return Fractions(shard_param=1.0, offload_optim=1.0, offload_param=draw(SHARES))
    return Fractions(shard_param=draw(SHARES), offload_optim=draw(SHARES))


def assert_met(fraction: float, counted: list[tuple[Bucket, Placement]], met: list[bool], what: str) -> None:
    """Say that whole buckets meet `fraction` of the elements `counted`, and less than the largest bucket more."""
    total = sum(bucket.numel for bucket, _ in counted)
    amount = sum(bucket.numel for (bucket, _), is_met in zip(counted, met, strict=True) if is_met)
    asked = Fraction(str(fraction)) * total
    largest = max((bucket.numel for bucket, _ in counted), default=0)
    assert asked <= amount < math.ceil(asked) + max(1, largest), what
    if fraction in (0.0, 1.0):
        assert amount == asked, what


def assert_keeps(made: Plan, problem: Problem) -> None:
    """Say by the placements of `made` that it keeps the fractions of `problem`."""
    asked = problem.fractions
    assert asked is not None
    placed = list(zip(made.buckets, made.placements, strict=True))
    with_state = [(bucket, placement) for bucket, placement in placed if bucket.state_nbytes]
    assert_met(asked.offload_param, placed, [own.param is Tier.HOST for _, own in placed], "parameters")
    assert_met(asked.offload_optim, with_state, [own.optim is Tier.HOST for _, own in with_state], "state")
    windows = dict(zip([bucket.id for bucket in made.buckets], gather_facts(problem).windows, strict=True))
    twice = [(bucket, own) for bucket, own in placed if bucket.is_sharded and len(windows[bucket.id]) > 1]
    assert_met(asked.shard_param, twice, [not own.resident for _, own in twice], "sharded")
    assert not any(own.resident for _, own in placed if own.param is Tier.HOST)


@given(problems(), fractions(), st.sampled_from(sorted(SEARCHES)))
@examples(40)
def test_every_search_keeps_the_fractions(problem: Problem, asked: Fractions, name: str) -> None:
    problem = replace(problem, fractions=asked)
    made = SEARCHES[name](problem)
    assert made is not None
    verify(problem.graph, made)
    assert_keeps(made, problem)
    tighter = replace(problem, budget_bytes=made.prediction.device_peak_bytes * 9 // 10)
    try:
        again = SEARCHES[name](tighter)
    except NoFeasiblePlan:
        return
    if again is None:
        return
    assert again.prediction.device_peak_bytes <= tighter.budget_bytes
    assert_keeps(again, tighter)


@given(problems(), fractions())
@examples(60)
def test_the_nearest_and_the_furthest_levels_meet_all_quotas(problem: Problem, asked: Fractions) -> None:
    facts = gather_facts(replace(problem, fractions=asked))
    for levels in (facts.start_levels, facts.furthest_levels):
        assert facts.allows(levels)
        assert all(level in own for level, own in zip(levels, facts.choices, strict=True))
    for quota in facts.quotas:
        assert quota.least <= quota.met(facts.start_levels) <= quota.met(facts.furthest_levels) <= quota.most


@pytest.mark.parametrize("cluster", [pytest.param("cuda", marks=pytest.mark.slow), "2 x cuda"])
def test_auto_is_never_slower_than_fixed_fractions_and_the_solver_never_than_trying_all(cluster: str) -> None:
    """At three budgets from all that training takes down to half of it, for every legal combination that fits."""
    problem = problem_of(chain_of(3), CLUSTERS[cluster], moves_what_fits=True)
    whole_bytes = plan(problem, "keep_all").prediction.device_peak_bytes
    num_compared = 0
    for share in (1.0, 0.7, 0.5):
        tight = replace(problem, budget_bytes=int(share * whole_bytes))
        auto = plan(tight, timeout_s=30.0)
        for asked in legal():
            fixed = replace(tight, fractions=asked)
            best = best_of_all(fixed)
            if best is None:
                continue
            num_compared += 1
            made = plan(fixed, timeout_s=30.0)
            assert auto.prediction.step_s <= best.prediction.step_s, (share, asked)
            assert made.prediction.step_s <= best.prediction.step_s * (1 + TOLERANCE), (share, asked)
            assert (made.bound_s or math.inf) <= best.prediction.step_s * (1 + 1e-9), (share, asked)
    assert num_compared >= 18


def test_the_legal_combinations_are_eleven_and_all_others_are_refused() -> None:
    assert len(list(legal())) == 11
    legal_ones = {(own.shard_param, own.offload_optim, own.offload_param) for own in legal()}
    others = set(itertools.product((0.0, 0.5, 1.0), repeat=3)) - legal_ones
    assert len(others) == 16
    for shard, optim, param in others:
        with pytest.raises(ContradictingFractions) as caught:
            Fractions(shard_param=shard, offload_optim=optim, offload_param=param)
        assert f"offload_param_frac={param} is useful only if" in str(caught.value)
        assert f"got shard_param_frac={shard} and offload_optim_frac={optim}. Set both to 1.0" in str(caught.value)


def test_a_fraction_of_unequal_buckets_ends_less_than_the_largest_above() -> None:
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 300 + i),), frozen=False, act_numel=8) for i in range(4)]
    problem = problem_of(chain(layers), fractions=Fractions(offload_optim=0.1))
    (quota,) = gather_facts(problem).quotas
    assert quota.numels == (300, 301, 302, 303)
    assert (quota.least, quota.most) == (121, 121 + 303 - 1)  # a tenth of 1206, rounded up
    made = plan(problem)
    assert [placement.optim for placement in made.placements].count(Tier.HOST) == 1


def test_state_cannot_leave_its_parameters_without_the_hybrid_optimizer() -> None:
    problem = problem_of(chain_of(3), hybrid=False)
    with pytest.raises(StateNotApart, match=r"offload_optim_frac=0\.5 .* all of the 1200 trained elements"):
        plan(replace(problem, fractions=Fractions(offload_optim=0.5)))
    with pytest.raises(StateNotApart):
        plan(replace(problem, fractions=Fractions(offload_optim=1.0, offload_param=0.5)))
    made = plan(replace(problem, fractions=Fractions(offload_optim=1.0, offload_param=1.0)))
    assert {(own.param, own.optim) for own in made.placements} == {(Tier.HOST, Tier.HOST)}


def test_a_rule_planner_keeps_no_fractions() -> None:
    with pytest.raises(InvalidOption, match='"milp" or "greedy", which keep fractions'):
        plan(problem_of(chain_of(2), fractions=Fractions()), "zero_offload")


def test_buckets_in_force_that_moved_stay_and_count() -> None:
    problem = problem_of(chain_of(4), fractions=Fractions(offload_optim=0.5))
    buckets = gather_facts(problem).buckets

    def in_force(*on_host: int) -> Problem:
        placements = tuple(
            Placement(
                bucket=bucket.id, param=Tier.DEVICE, optim=Tier.HOST if i in on_host else Tier.DEVICE, resident=True
            )
            for i, bucket in enumerate(buckets)
        )
        return replace(problem, buckets=buckets, placements=placements)

    for there, expected in (((3,), 2), ((1, 2), 2), ((0, 1, 3), 3)):
        homes = [own.optim for own in plan(in_force(*there)).placements]
        assert homes.count(Tier.HOST) == expected
        assert all(homes[i] is Tier.HOST for i in there)


def test_buckets_in_force_stay_in_a_graph_that_does_not_train() -> None:
    """It has no optimizer that could say how its state may move, and uses what the training left where it is."""
    asked = Fractions(offload_optim=1.0, offload_param=0.5)
    made = plan(problem_of(chain_of(4), fractions=asked))
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 400),), frozen=False, act_numel=64) for i in range(4)]
    graph = chain(layers, training=False)
    used = problem_of(
        graph, hybrid=False, state_nbytes={}, fractions=asked, buckets=made.buckets, placements=made.placements
    )
    assert plan(used).placements == made.placements


def test_a_plan_says_what_the_policy_fixed() -> None:
    made = plan(problem_of(chain_of(4), fractions=Fractions(offload_optim=0.5)))
    text = explain(made)
    assert "placement_policy: static, shard_param_frac 1.0, offload_optim_frac 0.5, offload_param_frac 0.0" in text
    assert "50.0% of 1600 elements with their state on the host" in text
    for bucket in made.buckets:
        reason = explain(made, bucket.id)
        assert "by placement_policy static: offload_optim_frac 0.5" in reason
        assert "one of the 2 of 4 buckets with their state on the host" in reason
    whole = plan(problem_of(chain_of(4), fractions=Fractions(offload_optim=1.0)))
    assert "by placement_policy static: offload_optim_frac 1.0, offload_param_frac 0.0" in explain(whole, "b0")


def test_a_budget_too_small_for_the_fractions_names_the_policy() -> None:
    problem = problem_of(chain_of(4), fractions=Fractions())
    kept_bytes = plan(problem).prediction.device_peak_bytes
    with pytest.raises(NoFeasiblePlan, match='or other fractions or placement_policy="auto"') as caught:
        plan(replace(problem, budget_bytes=kept_bytes - 1))
    assert caught.value.needed_bytes == kept_bytes
    assert plan(replace(problem, budget_bytes=kept_bytes - 1, fractions=None)).prediction.device_peak_bytes < kept_bytes


# ----------------------------------------------------------------------------------------------------------------------
# `benchmarks/gemini.py`: the size of chunks, what fills them, and which of them stay on the device.


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    gemini: Any = importlib.import_module("gemini")
MIN_NUMEL, chunk_size, chunks, one_each = gemini.MIN_NUMEL, gemini.chunk_size, gemini.chunks, gemini.one_each


def planned(problem: Problem) -> Plan:
    """Return the plan of the rule, which fits."""
    made = gemini.plan_by_gemini(problem)
    assert made is not None
    return made


def unused_of(numels: list[int], size: int) -> int:
    """Fill chunks one by one, and count what is left of each."""
    chunks: list[int] = []
    for numel in numels:
        if not chunks or chunks[-1] + numel > size:
            chunks.append(0)
        chunks[-1] += numel
    return sum(size - filled for filled in chunks)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 3), st.integers(1, 7))
@examples(100)
def test_the_size_is_the_smallest_that_leaves_the_fewest_elements_unused(
    numels: list[int], num_ranks: int, interval: int
) -> None:
    found = chunk_size(numels, num_ranks, min_numel=40, span=50, interval=interval)
    if sum(numels) < 40:
        assert (found.numel, found.unused, found.num_tried) == (sum(numels), 0, 1)
        return
    usual = [numel for numel in numels if numel <= np.mean(numels) + 3 * np.std(numels)]
    first = next(size for size in itertools.count(0, interval) if size >= max(40, *usual))
    sizes = range(first, first + 51, interval)
    best = min(sizes, key=lambda size: unused_of(usual, size))
    assert (found.first, found.last, found.num_tried) == (sizes[0], sizes[-1], len(sizes))
    assert found.unused == unused_of(usual, best)
    assert best <= found.numel < best + num_ranks
    assert found.numel % num_ranks == 0


def test_sizes_are_counted_in_elements_from_32_mi_on() -> None:
    """Of three parameters of 20 Mi elements, chunks of 40 Mi leave 20 Mi unused, and a chunk of 60 Mi none."""
    found = chunk_size([20 << 20] * 3)
    assert (found.first, found.num_tried) == (32 << 20, 32 * 1024 + 1)
    assert (found.numel, found.unused) == (60 << 20, 0)
    assert chunk_size([20 << 20]).numel == 20 << 20  # a model below the smallest chunk is one


def test_a_parameter_far_larger_than_others_does_not_set_the_size() -> None:
    found = chunk_size([50] * 20 + [5000], min_numel=40, span=60, interval=10)
    assert (found.numel, found.unused) == (50, 0)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(20, 100))
@examples(60)
def test_chunks_are_filled_in_the_order_of_first_use(numels: list[int], size: int) -> None:
    layers = [
        Layer(module=f"h.{i}", params=((f"p{i}", numel),), frozen=False, act_numel=8) for i, numel in enumerate(numels)
    ]
    buckets = chunks(one_each(problem_of(chain(layers))), size)
    assert [param for bucket in buckets for param in bucket.params] == [f"p{i}" for i in range(len(numels))]
    assert all(bucket.numel <= size or len(bucket.params) == 1 for bucket in buckets)
    for bucket, following in itertools.pairwise(buckets):
        first = numels[int(following.params[0].removeprefix("p"))]
        assert bucket.numel + first > max(size, bucket.numel)


def large(num_layers: int, cluster: str = "cuda") -> Problem:
    """A chain of layers of one smallest chunk each, on a machine with room for all."""
    layers = [
        Layer(module=f"h.{i}", params=((f"p{i}", MIN_NUMEL),), frozen=False, act_numel=64) for i in range(num_layers)
    ]
    problem = problem_of(chain(layers), CLUSTERS[cluster], moves_what_fits=True)
    return replace(problem, budget_bytes=64 * GIB, host_budget_bytes=64 * GIB, savings=frozenset({Saving.KEEP}))


def fewest_loads(num_layers: int, room: int) -> int:
    """Try every way to evict: the fewest loads of a chain that runs forward and back with `room` chunks at once."""
    uses = (*range(num_layers), *reversed(range(num_layers)))

    @cache
    def loads(at: int, held: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        if uses[at] in held:
            return loads(at + 1, held)
        left = [held] if len(held) < room else [held - {one} for one in held]
        return 1 + min(loads(at + 1, rest | {uses[at]}) for rest in left)

    return loads(0, frozenset())


@pytest.mark.parametrize("room", [2, 3, 4])
def test_belady_loads_as_few_chunks_as_any_eviction(room: int) -> None:
    problem, chunk_bytes = large(5), 4 * MIN_NUMEL
    # The gradient of the chunk in use is beside its copy, and a tenth of the device stays free.
    tight = replace(problem, budget_bytes=int((room + 2) * chunk_bytes / 0.9) - chunk_bytes // 2)
    made = planned(tight)
    verify(tight.graph, made)
    num_loads = sum(action.verb is Verb.GATHER for action in made.schedules[0].actions)
    kept = [own.resident for own in made.placements]
    assert num_loads == 2 * 5 - kept.count(True)
    assert kept == [i >= 5 - kept.count(True) for i in range(5)]  # what is used furthest ahead left
    assert num_loads == fewest_loads(5, kept.count(True))
    assert f"{num_loads} loads per step" in explain(made)


def test_more_memory_keeps_more_chunks() -> None:
    problem, chunk_bytes = large(5), 4 * MIN_NUMEL
    made = [planned(replace(problem, budget_bytes=share * chunk_bytes)) for share in (3, 4, 5, 6, 9)]
    counts = [[own.resident for own in each.placements].count(True) for each in made]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 5


@pytest.mark.parametrize("cluster", [pytest.param("cuda", marks=pytest.mark.slow), "2 x cuda"])
def test_auto_is_never_slower_than_gemini(cluster: str) -> None:
    problem = large(3, cluster)
    whole_bytes = plan(problem, "keep_all").prediction.device_peak_bytes
    num_compared = 0
    for share in (1.0, 0.7, 0.45):
        tight = replace(problem, budget_bytes=int(share * whole_bytes))
        auto = plan(tight, timeout_s=30.0)
        for asked in (None, Fractions(), Fractions(offload_optim=0.5), Fractions(offload_optim=1.0, offload_param=0.5)):
            theirs = gemini.plan_by_gemini(replace(tight, fractions=asked))
            if theirs is None:
                continue
            num_compared += 1
            ours = auto if asked is None else plan(replace(tight, fractions=asked), timeout_s=30.0)
            assert ours.prediction.step_s <= theirs.prediction.step_s * 1.001, (share, asked)
            assert auto.prediction.step_s <= ours.prediction.step_s
    assert num_compared >= 6


def test_static_fractions_take_the_first_chunks() -> None:
    made = planned(replace(large(4), fractions=Fractions(offload_optim=1.0, offload_param=0.3)))
    assert [own.param for own in made.placements] == [Tier.HOST, Tier.HOST, Tier.DEVICE, Tier.DEVICE]
    assert {own.optim for own in made.placements} == {Tier.HOST}
    assert "by placement_policy static" in explain(made, "b0")


def test_a_model_below_the_smallest_chunk_stays_on_the_device() -> None:
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 400),), frozen=False, act_numel=64) for i in range(3)]
    made = planned(problem_of(chain(layers)))
    (bucket,) = made.buckets
    assert bucket.numel == 1200
    assert made.placements[0].optim is Tier.DEVICE
    text = explain(made)
    assert "chunks: 1 of at most 1200 elements" in text
    assert f"1200 elements are fewer than {MIN_NUMEL}, the smallest chunk" in text


def test_the_waste_of_chunks_is_told() -> None:
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 700),), frozen=False, act_numel=8) for i in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gemini, "chunk_size", lambda numels, num_ranks: chunk_size(numels, num_ranks, min_numel=1500, span=0)
        )
        made = planned(problem_of(chain(layers)))
    assert [bucket.numel for bucket in made.buckets] == [1400, 700]
    assert "of 1 sizes from 2048 to 2048 elements it leaves the fewest unused: 1996 beside 2100" in explain(made)
