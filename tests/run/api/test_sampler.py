"""`ShareSampler`: the rows of all ranks are the batch of one process, whatever the shares are."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

import elixir_compile as elixir
from elixir_compile.ir.share import Share


def shares_of(rows: list[int]) -> list[Share]:
    return [Share(rank=rank, num_rows=count, state=1 / len(rows)) for rank, count in enumerate(rows)]


def samplers_of(num_samples: int, rows: list[int], **more: int | bool) -> list[elixir.ShareSampler]:
    shares = shares_of(rows)
    return [elixir.ShareSampler(num_samples, shares, rank=rank, **more) for rank in range(len(rows))]


def whole_batches(num_samples: int, batch: int, **more: int | bool) -> list[list[int]]:
    (alone,) = samplers_of(num_samples, [batch], **more)
    return list(alone)


ROWS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(ROWS, st.integers(0, 60), st.booleans(), st.booleans())
def test_the_rows_of_all_ranks_are_the_batch_of_one_process(
    rows: list[int], num_samples: int, shuffle: bool, drop_last: bool
) -> None:
    batch = sum(rows)
    how = {"seed": 3, "shuffle": shuffle, "drop_last": drop_last}
    expected = whole_batches(num_samples, batch, **how)
    samplers = samplers_of(num_samples, rows, **how)
    of_ranks = [list(sampler) for sampler in samplers]
    for number, whole in enumerate(expected):
        counts = samplers[0].rows_of_batch(number)
        own = [of_ranks[rank][number] for rank in range(len(rows))]
        assert [index for count, mine in zip(counts, own, strict=True) for index in mine[:count]] == whole
        assert [len(mine) for mine in own] == [count or min(2, len(whole)) for count in counts]
        if len(whole) == batch:
            assert list(counts) == rows
        assert all(abs(count - len(whole) * share / batch) < 1 for count, share in zip(counts, rows, strict=True))
    assert {len(batches) for batches in of_ranks} == {len(expected)} == {len(samplers[0])}
    if not drop_last:
        assert sorted(index for whole in expected for index in whole) == list(range(num_samples))


def test_a_run_goes_on_under_other_shares_in_the_middle_of_an_epoch() -> None:
    expected = whole_batches(40, 8, seed=5)
    first = samplers_of(40, [5, 2, 1], seed=5)
    iterators = [iter(sampler) for sampler in first]
    done = [[next(iterator) for iterator in iterators] for _ in range(2)]
    state = first[0].state_dict()
    assert state == {"epoch": 0, "next_batch": 2}
    rest = samplers_of(40, [3, 5], seed=5)
    for sampler in rest:
        sampler.load_state_dict(state)
    later = list(zip(*rest, strict=True))
    assert [list(chain(*own)) for own in [*done, *later]] == expected
    # A new epoch begins with its first batch.
    assert len(list(rest[0])) == 5


def test_epochs_differ_and_ranks_agree_on_them() -> None:
    samplers = samplers_of(24, [3, 1], seed=0)
    epochs: list[list[int]] = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([index for own in zip(*samplers, strict=True) for mine in own for index in mine])
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_other_shares_are_taken_from_the_next_batch_on() -> None:
    expected = whole_batches(24, 8, shuffle=False)
    samplers = samplers_of(24, [4, 4], shuffle=False)
    iterators = [iter(sampler) for sampler in samplers]
    first = list(chain(*map(next, iterators)))
    for sampler in samplers:
        sampler.take(shares_of([7, 1]))
    second = [next(iterator) for iterator in iterators]
    assert [first, list(chain(*second))] == expected[:2]
    assert [len(own) for own in second] == [7, 1]
    with pytest.raises(elixir.InvalidOption, match="rows of the batch of 8 in all"):
        samplers[0].take(shares_of([7, 2]))


def test_shares_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(elixir.InvalidOption, match="option shares"):
        elixir.ShareSampler(10, shares_of([1, 2])[:1], rank=1)
    with pytest.raises(elixir.InvalidOption, match="sums to 1"):
        elixir.ShareSampler(10, [Share(rank=0, num_rows=1, state=0.5)], rank=0)
