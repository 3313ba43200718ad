"""`search.buckets`: what travels together."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import GIB
from elixir_compile.ir import Bucket, BucketId, Kind, Placement, StepGraph, StorageId, Tier
from elixir_compile.ir.hardware import profile_for
from elixir_compile.search import Problem
from elixir_compile.search.space.buckets import form_buckets
from tests.pure.strategies import Layer, chain, step_graphs

CPU = profile_for("cpu", GIB, GIB, "cpu")


def problem(graph: StepGraph, min_bytes: int = 64, max_bytes: int = 512, **more: object) -> Problem:
    return Problem(
        name="t",
        graph=graph,
        cluster=CPU,
        budget_bytes=GIB,
        host_budget_bytes=GIB,
        bucket_min_bytes=min_bytes,
        bucket_max_bytes=max_bytes,
        **more,  # type: ignore[arg-type]
    )


def layers(*sizes: Sequence[int], frozen: Sequence[int] = ()) -> list[Layer]:
    """One layer per entry with parameters of these many float32 elements."""
    return [
        Layer(
            module=f"h.{number}",
            params=tuple((f"p{number}_{index}", numel) for index, numel in enumerate(numels)),
            frozen=number in frozen,
            act_numel=8,
        )
        for number, numels in enumerate(sizes)
    ]


def names(buckets: Sequence[Bucket]) -> list[str]:
    return [" ".join(bucket.params) for bucket in buckets]


def test_a_bucket_ends_with_a_layer_once_it_is_large_enough() -> None:
    """Layers of 40, 60, 2 x 80 and 400 bytes, at least 41 each: the first is too small alone."""
    graph = chain(layers([10], [15], [20, 20], [100]))
    made = form_buckets(problem(graph, min_bytes=41, max_bytes=512))
    assert names(made) == ["p0_0 p1_0", "p2_0 p2_1", "p3_0"]


def test_buckets_of_a_large_model_keep_the_size_limits() -> None:
    """Twenty layers of 100 bytes, at least 120 and at most 250: two layers each."""
    graph = chain(layers(*[[25]] * 20))
    made = form_buckets(problem(graph, min_bytes=120, max_bytes=250))
    assert [bucket.nbytes for bucket in made] == [200] * 10


def test_a_parameter_above_the_maximum_has_a_bucket_of_its_own() -> None:
    graph = chain(layers(*[[25]] * 10, [25, 250, 25], *[[25]] * 10))
    made = form_buckets(problem(graph, min_bytes=150, max_bytes=400))
    assert "p10_1" in names(made)


def test_a_tied_embedding_has_a_bucket_of_its_own() -> None:
    tied = Layer(module="embed", params=(("embed", 50), ("pos", 5)), frozen=False, act_numel=8)
    head = Layer(module="head", params=(("embed", 50),), frozen=False, act_numel=8)
    graph = chain([tied, *layers(*[[50]] * 12), head])
    made = form_buckets(problem(graph, min_bytes=150, max_bytes=2000))
    assert "embed" in names(made)


def test_small_models_still_have_choices() -> None:
    graph = chain(layers(*[[25]] * 8))
    assert len(form_buckets(problem(graph, min_bytes=16 << 20, max_bytes=128 << 20))) == 8


def test_buckets_in_force_are_kept_and_their_names_not_reused() -> None:
    graph = chain(layers([25], [25]))
    kept = Bucket(
        id=BucketId("b0"),
        params=(StorageId("p1_0"),),
        numel=25,
        nbytes=100,
        state_nbytes=0,
        dtype="float32",
        trainable=True,
        shard_numels=(25,),
    )
    home = Placement(bucket=kept.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True)
    made = form_buckets(problem(graph, buckets=(kept,), placements=(home,)))
    assert made[0] is kept
    assert [(bucket.id, bucket.params) for bucket in made[1:]] == [("b1", ("p0_0",))]


def test_a_dtype_of_unknown_size_is_refused() -> None:
    graph = chain(layers([25]))
    object.__setattr__(graph.storages[1], "dtype", "float7")
    with pytest.raises(InvalidPlan, match="float7"):
        form_buckets(problem(graph))


def test_a_problem_that_contradicts_itself_is_refused() -> None:
    graph = chain(layers([25]))
    with pytest.raises(InvalidPlan, match="in this order"):
        problem(graph, min_bytes=10, max_bytes=5)
    with pytest.raises(InvalidPlan, match="base_bytes"):
        problem(graph, base_bytes=-1)
    with pytest.raises(InvalidPlan, match="one placement per bucket"):
        problem(graph, placements=(Placement(bucket=BucketId("b"), param=Tier.HOST, optim=Tier.HOST, resident=True),))


def test_a_bucket_ends_where_a_param_group_does() -> None:
    """Twenty weights of 100 bytes, at least 120 and at most 250: two each; twenty biases of 8 bytes: 15 and 5."""
    graph = chain(layers(*[[25, 2]] * 20))
    biases = {StorageId(f"p{number}_1"): 3 for number in range(20)}
    made = form_buckets(problem(graph, min_bytes=120, max_bytes=250, groups=biases))
    assert [bucket.nbytes for bucket in made if bucket.group == 0] == [200] * 10
    assert [bucket.nbytes for bucket in made if bucket.group == 3] == [120, 40]
    assert {name for bucket in made if bucket.group == 3 for name in bucket.params} == biases.keys()


@given(step_graphs(), st.data())
@settings(max_examples=60)
def test_every_parameter_is_in_one_bucket_of_its_kind(graph: StepGraph, data: st.DataObject) -> None:
    ids = [storage.id for storage in graph.storages if storage.kind is Kind.PARAM]
    groups = {name: data.draw(st.integers(0, 2)) for name in ids}
    made = form_buckets(problem(graph, min_bytes=256, max_bytes=1024, groups=groups))
    params = {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}
    trained = {storage.of for storage in graph.storages if storage.of is not None}
    assert sorted(name for bucket in made for name in bucket.params) == sorted(params)
    assert len({bucket.id for bucket in made}) == len(made)
    for bucket in made:
        members = [params[name] for name in bucket.params]
        assert {member.dtype for member in members} == {bucket.dtype}
        assert {member.id in trained for member in members} == {bucket.trainable}
        assert {groups[member.id] for member in members} == {bucket.group}
        assert bucket.nbytes == sum(member.nbytes for member in members)
    firsts = [
        next((i for i, op in enumerate(graph.ops) if made_first.params[0] in op.reads), 10**6) for made_first in made
    ]
    assert all(before <= after for before, after in pairwise(firsts))
