"""Windows in which buckets are used, on graphs small enough to read."""

import itertools

import pytest
from hypothesis import given

from elixir_compile.ir import Bucket, Phase, Plan, StepGraph
from elixir_compile.ir.kinds import Kind
from elixir_compile.step import use_windows
from tests.pure.plans import bucket_of, planned_graphs
from tests.pure.strategies import Layer, chain


def buckets_of(graph: StepGraph, *groups: str) -> list[Bucket]:
    """One bucket per group of parameter names."""
    params = {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}
    return [bucket_of(graph, name, [params[n] for n in params if n in name.split("+")]) for name in groups]


def spans(graph: StepGraph, buckets: list[Bucket]) -> dict[str, list[tuple[str, int, int]]]:
    found = use_windows(graph, buckets)
    return {name: [(str(w.phase), w.first, w.last) for w in windows] for name, windows in found.items()}


def stack(*names: str, sizes: dict[str, int] | None = None) -> StepGraph:
    sizes = sizes or {}
    layers = [Layer(module=n, params=((n, sizes.get(n, 10)),), frozen=False, act_numel=1) for n in names]
    return chain(layers)


def test_a_tied_embedding_has_two_windows() -> None:
    """Forward: embed at 0, a at 2, embed at 4. Backward: gradients at 6, 8, 10, uses of parameters at 7, 9, 11."""
    graph = stack("embed", "a", "embed")
    assert spans(graph, buckets_of(graph, "embed", "a")) == {
        "embed": [("forward", 0, 0), ("forward", 4, 4), ("backward", 7, 7), ("backward", 11, 11)],
        "a": [("forward", 2, 2), ("backward", 9, 9)],
    }


def test_uses_with_no_other_bucket_between_are_one_window() -> None:
    """`a` is used at ops 2 and 4 with only a relu between, in the backward at 11 and 13."""
    graph = stack("embed", "a", "a", "b")
    assert spans(graph, buckets_of(graph, "embed", "a", "b"))["a"] == [("forward", 2, 4), ("backward", 11, 13)]


def test_parameters_of_one_bucket_share_its_windows() -> None:
    graph = stack("a", "b", "c")
    assert spans(graph, buckets_of(graph, "a+b", "c"))["a+b"] == [("forward", 0, 2), ("backward", 9, 11)]


@pytest.mark.parametrize(("small", "num_windows"), [(9, 1), (10, 2)])
def test_uses_of_a_bucket_under_a_sixteenth_do_not_end_windows(small: int, num_windows: int) -> None:
    """160 elements against 9 (less than 160 / 16) and against 10 (not less)."""
    graph = stack("big", "small", "big", sizes={"big": 160, "small": small})
    found = use_windows(graph, buckets_of(graph, "big", "small"))
    windows = next(windows for name, windows in found.items() if name == "big")
    assert [sum(w.phase is phase for w in windows) for phase in (Phase.FORWARD, Phase.BACKWARD)] == [num_windows] * 2


def test_an_unused_bucket_has_no_windows() -> None:
    graph = chain([Layer(module="a", params=(("a", 1),), frozen=False, act_numel=1)], unused_numel=3)
    assert spans(graph, buckets_of(graph, "unused", "a"))["unused"] == []


@given(planned_graphs())
def test_windows_cover_every_use_and_are_apart(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    found = use_windows(graph, plan.buckets)
    for bucket in plan.buckets:
        uses = [
            index
            for index, op in enumerate(graph.ops)
            if op.phase is not Phase.UPDATE and set(op.reads) & set(bucket.params)
        ]
        windows = found[bucket.id]
        assert [at for at in uses if any(w.first <= at <= w.last for w in windows)] == uses
        assert {w.first for w in windows} | {w.last for w in windows} <= set(uses)
        assert all(graph.ops[w.first].phase is w.phase is graph.ops[w.last].phase for w in windows)
        others = [other for other in plan.buckets if other is not bucket and other.nbytes * 16 >= bucket.nbytes]
        for one, two in itertools.pairwise(windows):
            between = graph.ops[one.last + 1 : two.first]
            parted = any(set(op.reads) & set(other.params) for op in between for other in others)
            assert parted or one.phase is not two.phase
