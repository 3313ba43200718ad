"""`search.shares.assign` and `rules`: rows and state of each rank, against brute force and published figures."""

import itertools
import time
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.search.shares import assign as rules
from elixir_compile.search.shares.assign import Assignment, Offers, assign, assign_fixed, filled, most_room

MS_PER_ROW = {"l4": 7.42, "a6000": 2.84, "p40": 15.6}
"""Published by Cephalo (arXiv 2411.01075): a row of the forward of a GPT of 2.7B at 512 tokens."""
NAMES = ("l4", "l4", "a6000", "p40")
HUGE = 2**50


def linear(ms_per_row: float, quanta: int, quantum: int = 1, room_bytes: int = HUGE) -> Offers:
    seconds = ms_per_row * 1e-3 * quantum * np.arange(quanta + 1, dtype=float)[:, None]
    return Offers(step_s=seconds, busy_s=seconds, room_bytes=np.full(seconds.shape, room_bytes, dtype=np.int64))


def published(quantum: int) -> tuple[list[Offers], list[int]]:
    kinds = list(MS_PER_ROW)
    return [linear(MS_PER_ROW[kind], 64 // quantum, quantum) for kind in kinds], [kinds.index(name) for name in NAMES]


def test_the_published_profile_has_the_published_rows() -> None:
    offers, class_of = published(1)
    found = assign(offers, class_of, 0, equal_parts=True)
    assert found is not None
    assert found.quanta == (13, 13, 33, 5)
    assert found.step_s * 1e3 == pytest.approx(96.46)
    even_s = max(16 * MS_PER_ROW[name] * 1e-3 for name in NAMES)
    assert even_s * 1e3 == pytest.approx(249.60)
    assert even_s / found.step_s == pytest.approx(2.59, abs=0.003)
    coarse = assign(*published(2), 0, equal_parts=True)
    assert coarse is not None
    assert [2 * count for count in coarse.quanta] == [12, 12, 34, 6]
    assert coarse.step_s * 1e3 == pytest.approx(96.56)


def test_the_published_program_has_the_published_rows_too() -> None:
    offers, class_of = published(1)
    rows = rules.cephalo(offers, class_of, [1], 0)
    assert rows is not None
    assert sum(rows) == 64
    seconds = [MS_PER_ROW[name] * count for name, count in zip(NAMES, rows, strict=True)]
    assert max(seconds) == pytest.approx(96.46)
    assert rules.greedy(offers, class_of) == (13, 12, 33, 6)
    assert rules.even(4, 64) == (16,) * 4


def test_the_published_program_adds_up_memory_that_no_device_has() -> None:
    """The second rank is fast, but its rows do not fit it: their sum does."""
    seconds = np.array([[0.0], [1.0], [2.0]])
    slow = Offers(step_s=10 * seconds, busy_s=10 * seconds, room_bytes=np.array([[90], [80], [70]]))
    fast = Offers(step_s=seconds, busy_s=seconds, room_bytes=np.array([[10], [-5], [-20]]))
    assert rules.cephalo([slow, fast], [0, 1], [1], 50) == (1, 1)
    found = assign([slow, fast], [0, 1], 50, equal_parts=False)
    assert found is not None
    assert found.quanta == (2, 0)


def test_64_ranks_and_256_quanta_take_less_than_a_second() -> None:
    kinds = [linear(ms, 256, 2) for ms in (1.0, 1.7, 2.9, 4.1, 5.3)]
    class_of = [rank % 5 for rank in range(64)]
    began_s = time.process_time()
    found = assign(kinds, class_of, 0, equal_parts=True)
    assert time.process_time() - began_s < 1.0
    assert found is not None
    assert sum(found.quanta) == 256


def test_ranks_that_wait_for_the_same_collectives_share_evenly() -> None:
    """All steps take 5 s up to four rows, so only the busy seconds tell rows apart."""
    busy_s = np.arange(9, dtype=float)[:, None]
    waiting = Offers(step_s=np.maximum(busy_s, 5.0), busy_s=busy_s, room_bytes=np.zeros((9, 1), dtype=np.int64))
    found = assign([waiting], [0, 0], 0, equal_parts=True)
    assert found is not None
    assert found.quanta == (4, 4)


def test_state_is_filled_smallest_room_first() -> None:
    assert filled([10, 10, 10], 30) == (1 / 3,) * 3
    assert filled([6, 1, 100], 24) == (6 / 24, 1 / 24, 17 / 24)
    assert filled([0, 0], 0) == (0.5, 0.5)


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Offers], int]:
    """Up to three ranks, each its own class, with up to 8 quanta in up to two ways."""
    quanta = draw(st.integers(1, 8))
    num_ranks = draw(st.integers(1, 3)) if quanta <= 5 else draw(st.integers(1, 2))
    num_ways = draw(st.integers(1, 2))
    offers: list[Offers] = []
    for _ in range(num_ranks):
        per_row, floor = draw(st.sampled_from([1.0, 2.0, 3.7])), draw(st.sampled_from([0.0, 4.0]))
        room, taken = draw(st.integers(0, 30)), draw(st.integers(0, 4))
        slower = np.array([1.0, 1.5])[:num_ways]
        busy_s = per_row * np.arange(quanta + 1, dtype=float)[:, None] * slower
        leaner = np.array([1, 2])[:num_ways]
        room_bytes = room - taken * np.arange(quanta + 1)[:, None] // leaner
        offers.append(Offers(step_s=np.maximum(busy_s, floor), busy_s=busy_s, room_bytes=room_bytes.astype(np.int64)))
    return offers, draw(st.integers(0, 40))


def brute_force_s(offers: list[Offers], state_bytes: int, *, equal_parts: bool) -> float | None:
    """Return the shortest step of all rows in all ways."""
    quanta, ways = offers[0].step_s.shape[0] - 1, range(offers[0].step_s.shape[1])
    found: list[float] = []
    for rows in itertools.product(range(quanta + 1), repeat=len(offers)):
        if sum(rows) != quanta:
            continue
        for chosen in itertools.product(ways, repeat=len(offers)):
            taken = [(offer, row, way) for offer, row, way in zip(offers, rows, chosen, strict=True)]
            rooms = [int(offer.room_bytes[row, way]) for offer, row, way in taken]
            part_bytes = -(-state_bytes // len(offers))
            if min(rooms) >= (part_bytes if equal_parts else 0) and sum(rooms) >= state_bytes:
                found.append(max(float(offer.step_s[row, way]) for offer, row, way in taken))
    return min(found, default=None)


def holds(found: Assignment, offers: list[Offers], state_bytes: int) -> None:
    """Check that the rows and parts of `found` add up and fit."""
    assert sum(found.quanta) == offers[0].step_s.shape[0] - 1
    assert abs(sum(found.parts) - 1) < 1e-9
    for offer, count, way, part in zip(offers, found.quanta, found.ways, found.parts, strict=True):
        assert part * state_bytes <= offer.room_bytes[count, way] + 1e-6
        assert offer.step_s[count, way] <= found.step_s


@given(questions(), st.booleans())
def test_equal_to_brute_force(question: tuple[list[Offers], int], equal_parts: bool) -> None:
    offers, state_bytes = question
    found = assign(offers, range(len(offers)), state_bytes, equal_parts=equal_parts)
    shortest_s = brute_force_s(offers, state_bytes, equal_parts=equal_parts)
    assert (found is None) == (shortest_s is None)
    if found is not None:
        assert found.step_s == shortest_s
        holds(found, offers, state_bytes)
        rooms = most_room(offers, range(len(offers)))
        assert rooms is not None
        assert sum(rooms) >= state_bytes
        again = assign_fixed(offers, found.quanta, state_bytes, equal_parts=equal_parts)
        assert again is not None
        assert again.step_s == found.step_s
        holds(again, offers, state_bytes)


@given(questions(), st.integers(0, 2))
def test_a_better_rank_never_makes_a_longer_step(question: tuple[list[Offers], int], which: int) -> None:
    offers, state_bytes = question
    numbers = range(len(offers))
    before = assign(offers, numbers, state_bytes, equal_parts=False)
    own = offers[which % len(offers)]
    faster = Offers(step_s=own.step_s / 2, busy_s=own.busy_s / 2, room_bytes=own.room_bytes)
    roomier = Offers(step_s=own.step_s, busy_s=own.busy_s, room_bytes=own.room_bytes + 3)
    for better in (faster, roomier):
        changed = [better if offer is own else offer for offer in offers]
        after = assign(changed, numbers, state_bytes, equal_parts=False)
        assert before is None or (after is not None and after.step_s <= before.step_s)


@given(questions(), st.randoms(use_true_random=False))
def test_ranks_in_another_order_get_the_same_shares(question: tuple[list[Offers], int], random: Random) -> None:
    offers, state_bytes = question
    numbers = list(range(len(offers)))
    random.shuffle(numbers)
    one = assign(offers, range(len(offers)), state_bytes, equal_parts=True)
    other = assign(offers, numbers, state_bytes, equal_parts=True)
    assert (one is None) == (other is None)
    if one is not None and other is not None and len({offer.busy_s.tobytes() for offer in offers}) == len(offers):
        assert [one.quanta[number] for number in numbers] == list(other.quanta)
