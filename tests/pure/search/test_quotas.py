"""`search.space.buckets`: the fractions of Gemini as limits of the search, whatever the planner."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import ContradictingFractions, InvalidOption, NoFeasiblePlan, StateNotApart
from elixir_compile.base.options import Fractions
from elixir_compile.ir import Bucket, Placement, Plan, Tier
from elixir_compile.search import Problem, plan
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step import verify
from elixir_compile.tools.report.explain import explain
from tests.pure.exhaustive import best_of_all
from tests.pure.search.test_planner import CLUSTERS, chain_of, problem_of
from tests.pure.strategies import Layer, chain, examples

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


@pytest.mark.parametrize("cluster", ["cuda", "2 x cuda"])
def test_auto_is_never_slower_than_fixed_fractions_and_the_solver_never_than_trying_all(cluster: str) -> None:
    """At three budgets from all that training takes down to half of it, for every legal combination that fits."""
    problem = problem_of(chain_of(3), CLUSTERS[cluster], moves_what_fits=True)
    whole_bytes = plan(problem, "keep_all").prediction.device_peak_bytes
    num_compared = 0
    for share in (1.0, 0.7, 0.5):
        tight = replace(problem, budget_bytes=int(share * whole_bytes))
        auto = plan(tight, timeout_s=1.0)
        for asked in legal():
            fixed = replace(tight, fractions=asked)
            best = best_of_all(fixed)
            if best is None:
                continue
            num_compared += 1
            made = plan(fixed, timeout_s=1.0)
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
