"""Unequal parts: rows by largest remainder, and buckets whose flat buffer has no padding."""

from dataclasses import replace

import pytest

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Bucket, BucketId, StorageId
from elixir_compile.ir.share import Share, largest_remainder
from elixir_compile.search import plan
from elixir_compile.search.space.buckets import form_buckets
from elixir_compile.session.rank_facts import classes_of, facts_of, for_all
from tests.pure.search.test_planner import problem_of
from tests.pure.search.test_shards import ranks
from tests.pure.strategies import Layer, chain

GRAPH = chain([Layer(f"h.{n}", ((f"w{n}", 3000),), False, 64) for n in range(4)])


def test_rows_go_to_the_largest_remainders_and_ties_to_the_lower_rank() -> None:
    assert largest_remainder(10, (0.7, 0.2, 0.1)) == (7, 2, 1)
    assert largest_remainder(10, (0.0, 0.5, 0.5)) == (0, 5, 5)
    assert largest_remainder(211, (0.6, 0.3, 0.1)) == (127, 63, 21)
    assert largest_remainder(1, (0.2, 0.4, 0.4)) == (0, 1, 0)


def shares_of(*state: float) -> tuple[Share, ...]:
    return tuple(Share(rank=rank, num_rows=1, state=part) for rank, part in enumerate(state))


def bucket(shard_numels: tuple[int, ...], **more: object) -> Bucket:
    numel = sum(shard_numels)
    sizes = {"numel": numel, "nbytes": 4 * numel, "state_nbytes": 8 * numel, "dtype": "float32", "trainable": True}
    return Bucket(id=BucketId("b0"), params=(StorageId("a"),), shard_numels=shard_numels, **sizes, **more)


def test_a_ragged_bucket_has_no_padding() -> None:
    padded, ragged = bucket((60, 30, 10)), bucket((60, 30, 10), is_ragged=True)
    assert (padded.flat_nbytes, ragged.flat_nbytes) == (4 * 180, 4 * 100)
    assert (padded.shards_text, ragged.shards_text) == ("60 30 10", "60 30 10 ragged")
    assert [ragged.seen_by(rank).home_nbytes for rank in range(3)] == [240, 120, 40]
    assert [padded.seen_by(rank).home_nbytes for rank in range(3)] == [240, 240, 240]
    for each in (padded, ragged):
        assert [each.seen_by(rank).shard_state_nbytes() for rank in range(3)] == [480, 240, 80]


def test_a_single_parameter_is_copied_out_of_a_padded_buffer_only() -> None:
    assert bucket((60, 30, 10)).is_unpacked
    assert not bucket((60, 30, 10), is_ragged=True).is_unpacked
    assert not bucket((60, 30, 10), is_ragged=True).is_packed
    assert not bucket((40, 40, 20)).is_unpacked
    assert not bucket((50, 50, 0)).is_unpacked


def test_a_bucket_of_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="is of rank 3, but has 3 shards"):
        bucket((60, 30, 10), rank=3)


@pytest.mark.parametrize(("state", "is_ragged"), [((0.6, 0.3, 0.1), True), ((0.4, 0.3, 0.3), False)])
def test_a_bucket_is_ragged_where_padding_costs_more(state: tuple[float, ...], is_ragged: bool) -> None:
    problem = replace(problem_of(GRAPH, ranks(3)), shares=shares_of(*state), rank=1)
    made = form_buckets(problem)
    assert {own.is_ragged for own in made} == {is_ragged}
    assert {own.rank for own in made} == {1}
    assert all(own.rank == 0 and not own.is_ragged for own in form_buckets(replace(problem, shares=())))


def test_parts_of_the_state_are_one_for_each_rank() -> None:
    problem = problem_of(GRAPH, ranks(3))
    with pytest.raises(InvalidPlan, match="2 shares for 3 ranks with 1 copies of each part"):
        replace(problem, shares=shares_of(0.4, 0.6))


def test_a_rank_counts_its_own_part_whoever_made_the_buckets_in_force() -> None:
    problem = replace(problem_of(GRAPH, ranks(3)), shares=shares_of(0.1, 0.2, 0.7))
    made = plan(problem, "greedy")
    assert [own.seen_by(1) for own in made.buckets] == list(made.buckets)
    again = replace(problem, buckets=made.buckets, placements=made.placements, rank=2)
    assert {own.rank for own in form_buckets(again)} == {2}
    others = replace(problem, shares=shares_of(0.6, 0.2, 0.2))
    facts = [facts_of(others, (), (), place) for place in range(3)]
    assert classes_of(facts) == ((0,), (1, 2))
    assert for_all(problem, facts).rank == 2
    peaks = [plan(replace(problem, rank=rank), "greedy").prediction.device_peak_bytes for rank in range(3)]
    assert peaks == sorted(set(peaks))
