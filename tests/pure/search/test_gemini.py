"""`benchmarks/gemini.py`: the size of chunks, what fills them, and which of them stay on the device."""

import importlib
import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.options import Fractions
from elixir_compile.base.units import GIB
from elixir_compile.ir import Plan, Saving, Tier, Verb
from elixir_compile.search import Problem, plan
from elixir_compile.step import verify
from elixir_compile.tools.report.explain import explain
from tests.pure.search.test_planner import CLUSTERS, problem_of
from tests.pure.strategies import Layer, chain, examples

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


@pytest.mark.parametrize("cluster", ["cuda", "2 x cuda"])
def test_auto_is_never_slower_than_gemini(cluster: str) -> None:
    problem = large(3, cluster)
    whole_bytes = plan(problem, "keep_all").prediction.device_peak_bytes
    num_compared = 0
    for share in (1.0, 0.7, 0.45):
        tight = replace(problem, budget_bytes=int(share * whole_bytes))
        auto = plan(tight, timeout_s=1.0)
        for asked in (None, Fractions(), Fractions(offload_optim=0.5), Fractions(offload_optim=1.0, offload_param=0.5)):
            theirs = gemini.plan_by_gemini(replace(tight, fractions=asked))
            if theirs is None:
                continue
            num_compared += 1
            ours = auto if asked is None else plan(replace(tight, fractions=asked), timeout_s=1.0)
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
