"""Shares of ranks that differ: exact ones, those of rules, what a simulation refines, and unequal shards."""

import itertools
import pickle
import time
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidOption, InvalidPlan, NoFeasiblePlan, NoFeasibleShares, PlanFileError
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir import (
    Activations,
    Batched,
    Bucket,
    BucketId,
    GroupId,
    Phase,
    Saving,
    Shards,
    StepGraph,
    StorageId,
    Tier,
    WholeUpdate,
)
from elixir_compile.ir.cost import op_s, update_s
from elixir_compile.ir.hardware import Cluster, parse_fleet
from elixir_compile.ir.share import (
    Outcome,
    Share,
    Shares,
    largest_remainder,
    owners_by_size,
    shares_from_json,
    shares_to_json,
)
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import deadline_in
from elixir_compile.search.joint.ranks import plan_classes, with_buckets_formed
from elixir_compile.search.outline import Treatment, treatments_of, ways_of
from elixir_compile.search.shares import assign as rules
from elixir_compile.search.shares import choose as offers
from elixir_compile.search.shares.assign import (
    Assignment,
    Offers,
    assign,
    assign_fixed,
    balance_line,
    balanced_rows,
    filled,
    fixed_share,
    most_room,
)
from elixir_compile.search.shares.choose import (
    RULES,
    Ask,
    Budget,
    Choice,
    ShareSearch,
    SimulatedStep,
    State,
    quantum_of,
    refined,
)
from elixir_compile.search.space.buckets import form_buckets, with_smaller_buckets
from elixir_compile.session.rank_facts import classes_of, facts_of, for_all
from elixir_compile.step.as_run import as_run, graph_of_rows
from tests.pure.problems import problem_of
from tests.pure.search.test_ranks_of_a_search import ranks
from tests.pure.search.test_variants import TRAINED
from tests.pure.step.test_as_run import STEP
from tests.pure.strategies import Layer, chain

# ----------------------------------------------------------------------------------------------------------------------
# `search.shares.assign` and `rules`: rows and state of each rank, against brute force and published figures.


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
    found = assign(offers, class_of, 0, equal_shards=True)
    assert found is not None
    assert found.quanta == (13, 13, 33, 5)
    assert found.step_s * 1e3 == pytest.approx(96.46)
    even_s = max(16 * MS_PER_ROW[name] * 1e-3 for name in NAMES)
    assert even_s * 1e3 == pytest.approx(249.60)
    assert even_s / found.step_s == pytest.approx(2.59, abs=0.003)
    coarse = assign(*published(2), 0, equal_shards=True)
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
    found = assign([slow, fast], [0, 1], 50, equal_shards=False)
    assert found is not None
    assert found.quanta == (2, 0)


def test_64_ranks_and_256_quanta_take_less_than_a_second() -> None:
    kinds = [linear(ms, 256, 2) for ms in (1.0, 1.7, 2.9, 4.1, 5.3)]
    class_of = [rank % 5 for rank in range(64)]
    began_s = time.process_time()
    found = assign(kinds, class_of, 0, equal_shards=True)
    assert time.process_time() - began_s < 1.0
    assert found is not None
    assert sum(found.quanta) == 256


def test_ranks_that_wait_for_the_same_collectives_share_evenly() -> None:
    """All steps take 5 s up to four rows, so only the busy seconds tell rows apart."""
    busy_s = np.arange(9, dtype=float)[:, None]
    waiting = Offers(step_s=np.maximum(busy_s, 5.0), busy_s=busy_s, room_bytes=np.zeros((9, 1), dtype=np.int64))
    found = assign([waiting], [0, 0], 0, equal_shards=True)
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


def brute_force_s(offers: list[Offers], state_bytes: int, *, equal_shards: bool) -> float | None:
    """Return the shortest step of all rows in all ways."""
    quanta, ways = offers[0].step_s.shape[0] - 1, range(offers[0].step_s.shape[1])
    found: list[float] = []
    for rows in itertools.product(range(quanta + 1), repeat=len(offers)):
        if sum(rows) != quanta:
            continue
        for chosen in itertools.product(ways, repeat=len(offers)):
            taken = [(offer, row, way) for offer, row, way in zip(offers, rows, chosen, strict=True)]
            rooms = [int(offer.room_bytes[row, way]) for offer, row, way in taken]
            shard_bytes = -(-state_bytes // len(offers))
            if min(rooms) >= (shard_bytes if equal_shards else 0) and sum(rooms) >= state_bytes:
                found.append(max(float(offer.step_s[row, way]) for offer, row, way in taken))
    return min(found, default=None)


def holds(found: Assignment, offers: list[Offers], state_bytes: int) -> None:
    """Check that the rows and shards of `found` add up and fit."""
    assert sum(found.quanta) == offers[0].step_s.shape[0] - 1
    assert abs(sum(found.shards) - 1) < 1e-9
    for offer, count, way, shard in zip(offers, found.quanta, found.ways, found.shards, strict=True):
        assert shard * state_bytes <= offer.room_bytes[count, way] + 1e-6
        assert offer.step_s[count, way] <= found.step_s


@given(questions(), st.booleans())
def test_equal_to_brute_force(question: tuple[list[Offers], int], equal_shards: bool) -> None:
    offers, state_bytes = question
    found = assign(offers, range(len(offers)), state_bytes, equal_shards=equal_shards)
    shortest_s = brute_force_s(offers, state_bytes, equal_shards=equal_shards)
    assert (found is None) == (shortest_s is None)
    if found is not None:
        assert found.step_s == shortest_s
        holds(found, offers, state_bytes)
        rooms = most_room(offers, range(len(offers)))
        assert rooms is not None
        assert sum(rooms) >= state_bytes
        again = assign_fixed(offers, found.quanta, state_bytes, equal_shards=equal_shards)
        assert again is not None
        assert again.step_s == found.step_s
        holds(again, offers, state_bytes)


@given(questions(), st.integers(0, 2))
def test_a_better_rank_never_makes_a_longer_step(question: tuple[list[Offers], int], which: int) -> None:
    offers, state_bytes = question
    numbers = range(len(offers))
    before = assign(offers, numbers, state_bytes, equal_shards=False)
    own = offers[which % len(offers)]
    faster = Offers(step_s=own.step_s / 2, busy_s=own.busy_s / 2, room_bytes=own.room_bytes)
    roomier = Offers(step_s=own.step_s, busy_s=own.busy_s, room_bytes=own.room_bytes + 3)
    for better in (faster, roomier):
        changed = [better if offer is own else offer for offer in offers]
        after = assign(changed, numbers, state_bytes, equal_shards=False)
        assert before is None or (after is not None and after.step_s <= before.step_s)


@given(questions(), st.randoms(use_true_random=False))
def test_ranks_in_another_order_get_the_same_shares(question: tuple[list[Offers], int], random: Random) -> None:
    offers, state_bytes = question
    numbers = list(range(len(offers)))
    random.shuffle(numbers)
    one = assign(offers, range(len(offers)), state_bytes, equal_shards=True)
    other = assign(offers, numbers, state_bytes, equal_shards=True)
    assert (one is None) == (other is None)
    if one is not None and other is not None and len({offer.busy_s.tobytes() for offer in offers}) == len(offers):
        assert [one.quanta[number] for number in numbers] == list(other.quanta)


# ----------------------------------------------------------------------------------------------------------------------
# `step.as_run` and `search.shares`: one capture prices every number of rows, and the best shares fit every
# rank.


MIXED = parse_fleet("2 x l4-24g + 1 x a6000-48g + 1 x p40-24g")
STATE = State(num_elements=2**20, nbytes=16 * MIB)


def budgets(*device_bytes: int, host_bytes: int = 0) -> tuple[Budget, ...]:
    return tuple(Budget(device_bytes=nbytes, host_bytes=host_bytes) for nbytes in device_bytes)


def search(batch: int = 64, device_bytes: tuple[int, ...] = (GIB,) * 4, host_bytes: int = 0, **more) -> ShareSearch:
    own = budgets(*device_bytes, host_bytes=host_bytes)
    return ShareSearch(Ask(graph=TRAINED, fleet=MIXED, budgets=own, state=STATE, batch=batch, **more))


def test_slices_and_flops_follow_the_rows() -> None:
    half = graph_of_rows(STEP, 4)
    assert half.batch == 4
    for now, before in zip(half.storages, STEP.storages, strict=True):
        assert now.nbytes == (before.nbytes // 2 if before.batched is Batched.EACH else before.nbytes)
    flops = {op.id: (op.flops, now.flops) for op, now in zip(STEP.ops, half.ops, strict=True)}
    assert flops["fwd.mm"] == (80, 40)
    moved = {op.id: (op.moved_bytes, now.moved_bytes) for op, now in zip(STEP.ops, half.ops, strict=True)}
    assert moved["fwd.arange"] == (64, 64)
    assert moved["fwd.mm"] == (2440, 1240)  # x and a by half, the 40 bytes of w0 not
    assert graph_of_rows(STEP, 8) is STEP
    with pytest.raises(InvalidPlan, match="0 rows"):
        graph_of_rows(STEP, 0)
    with pytest.raises(InvalidPlan, match="it draws random numbers"):
        graph_of_rows(replace(STEP, undivided="it draws random numbers"), 4)


@pytest.mark.parametrize("graph", [STEP, TRAINED], ids=["step", "wide"])
@pytest.mark.parametrize("rows", [2, 8, 64])
def test_the_arrays_of_a_way_price_as_the_step_of_so_many_rows(graph: StepGraph, rows: int) -> None:
    way = ways_of(graph, treatments_of(graph), 1)[0]
    cluster = MIXED.seen_by(0)
    step = as_run(graph_of_rows(graph, rows))
    dtypes = {storage.id: storage.dtype for storage in step.storages}
    expected_s = sum(
        op_s(op, cluster, dtypes[op.writes[0]] if op.writes else "float32")
        for op in step.ops
        if op.phase is not Phase.UPDATE
    )
    assert way.lap_s([rows], cluster).sum() == pytest.approx(expected_s, rel=1e-6)


def fits(made: Choice, device_bytes: tuple[int, ...]) -> bool:
    return all(rank.peak_bytes <= budget for rank, budget in zip(made.ranks, device_bytes, strict=True))


def test_the_best_shares_are_never_longer_than_those_of_the_rules() -> None:
    for device_bytes in ((GIB,) * 4, (GIB, GIB // 4, GIB // 3, GIB), (GIB // 8,) * 4):
        found = search(device_bytes=device_bytes)
        best = found.best()
        assert sum(best.rows) == 64
        assert 1 not in best.rows
        assert fits(best, device_bytes)
        for other in (found.even(), found.greedy(), found.cephalo()):
            assert other is None or best.step_s <= other.step_s
    # The P40 moves 346 GB/s, the A6000 768, an L4 300.
    rows = search().best().rows
    assert rows[2] > rows[3] > 0
    assert rows[2] > max(rows[:2])


def test_state_lies_where_there_is_room() -> None:
    """Rank 1 has no room beside its rows, so its 4 MiB of the state are on its host, or, without one, on the others."""
    ways = [way for way in search().ways if way.micro_batches <= 2]
    tight_bytes = min(way.peak_bytes([2])[0] + way.in_flight_bytes for way in ways)
    device_bytes = (GIB, int(tight_bytes) + MIB, GIB, GIB)
    with_host = search(device_bytes=device_bytes, host_bytes=GIB).best()
    assert [share.state for share in with_host.shares] == [0.25] * 4
    alone = search(device_bytes=device_bytes).best()
    assert alone.shares[1].state < 0.1
    assert sum(share.state for share in alone.shares) == pytest.approx(1.0, abs=1e-9)


def test_where_nothing_fits_the_room_of_each_class_is_told() -> None:
    with pytest.raises(NoFeasibleShares, match=r"no shares of 64 rows fit the ranks, beside a state of 16\.0 MiB"):
        search(device_bytes=(MIB,) * 4).best()
    short = search(device_bytes=(GIB // 2,) * 4)
    short = ShareSearch(replace(short.ask, state=State(num_elements=2**30, nbytes=16 * GIB)))
    with pytest.raises(NoFeasibleShares, match=r"state 16\.0 GiB, room .* beside 64 rows: l4-24g 2 x .*, a6000"):
        short.best()


def test_ranks_beyond_the_rows_have_none() -> None:
    """Of four rows, two ranks get two each, as no rank gets one."""
    rows = search(batch=4).best().rows
    assert sorted(rows) in ([0, 0, 0, 4], [0, 0, 2, 2])


def test_quanta_have_divisors_and_are_few() -> None:
    assert [quantum_of(batch) for batch in (2, 64, 512, 513 * 2, 4096, 63)] == [1, 1, 2, 6, 16, 1]
    for batch in (1, 0, 521):
        with pytest.raises(InvalidOption, match="option batch"):
            quantum_of(batch)


# ----------------------------------------------------------------------------------------------------------------------
# `balance`: rows by the seconds that ranks were seen to compute.


def longest_s(rows: tuple[int, ...], before: list[int], busy_s: list[float]) -> float:
    """The seconds of the slowest rank."""
    return max(seconds * new / own for new, own, seconds in zip(rows, before, busy_s, strict=True))


@given(st.lists(st.tuples(st.integers(2, 5), st.floats(0.01, 10.0)), min_size=1, max_size=3))
def test_no_other_rows_are_shorter(ranks: list[tuple[int, float]]) -> None:
    rows, busy_s = [own for own, _ in ranks], [seconds for _, seconds in ranks]
    found = balanced_rows(rows, busy_s)
    assert sum(found) == sum(rows)
    assert min(found) >= 2
    others = itertools.product(range(2, sum(rows) + 1), repeat=len(rows))
    least_s = min(longest_s(other, rows, busy_s) for other in others if sum(other) == sum(rows))
    assert longest_s(found, rows, busy_s) == pytest.approx(least_s)


def test_a_rank_that_is_three_times_slower_gets_a_third_of_the_rows() -> None:
    assert balanced_rows([8, 8], [0.08, 0.24]) == (12, 4)
    assert balance_line([8, 8], [0.08, 0.24]) == (
        "uneven    ranks compute 8/8 rows in 80 ms, 240 ms; shares would be 12/4: 50% shorter"
    )


def test_seconds_that_no_row_takes_stay_where_they_are() -> None:
    """Rank 1 has 90 ms of launches: more rows cost it as much as rank 0."""
    assert balanced_rows([8, 8], [0.08, 0.16], [0.0, 0.5625]) == (12, 4)
    assert balanced_rows([8, 8], [0.08, 0.16]) == (11, 5)
    line = balance_line([8, 8], [0.08, 0.16], [0.0, 0.5625])
    assert line is not None
    assert line.endswith("shares would be 12/4: 22% shorter")


def with_launches_of(launch_s: float, cluster: Cluster) -> Cluster:
    (node,) = cluster.nodes
    return replace(cluster, nodes=(replace(node, device=replace(node.device, launch_s=launch_s)),))


def test_launches_and_weights_are_the_fixed_share_of_a_step() -> None:
    cluster = MIXED.seats[0].cluster
    slow_launch, no_launch = (with_launches_of(launch_s, cluster) for launch_s in (1.0, 0.0))
    large = graph_of_rows(TRAINED, 1 << 20)
    assert fixed_share(TRAINED, slow_launch) > 0.99
    assert 0 <= fixed_share(large, no_launch) < 0.001 < fixed_share(TRAINED, cluster)
    assert fixed_share(replace(TRAINED, undivided="it draws random numbers"), cluster) == 0.0


def test_ranks_within_a_tenth_are_left_alone() -> None:
    assert balance_line([8, 8], [1.0, 1.15]) is None
    assert balance_line([2, 2], [1.0, 3.0]) is None  # a rank has at least two rows


def test_a_rank_without_rows_gets_none() -> None:
    assert balanced_rows([0, 6, 6], [0.5, 1.0, 2.0]) == (0, 8, 4)


# ----------------------------------------------------------------------------------------------------------------------
# `search.shares.choose`: rows move by what a simulation sees; the outcome says how the shares were found.


class Simulated:
    """Steps in which rank i computes for `row_s[i]` seconds for each of its rows; keeps the choices it is asked for."""

    def __init__(self, row_s: tuple[float, ...]) -> None:
        self.row_s = row_s
        self.asked: list[tuple[int, ...]] = []

    def step(self, choice: Choice) -> SimulatedStep | None:
        self.asked.append(choice.rows)
        busy_s = tuple(each_s * rows for each_s, rows in zip(self.row_s, choice.rows, strict=True))
        return SimulatedStep(step_s=max(busy_s), busy_s=busy_s)


def seconds_of(found: ShareSearch, choice: Choice) -> tuple[float, ...]:
    """The seconds of a row on each rank that make the formula right."""
    return tuple(rank.busy_s / max(rows, 1) for rank, rows in zip(choice.ranks, choice.rows, strict=True))


def test_rows_move_by_the_simulation_and_no_rule_is_better() -> None:
    own = search()
    right = seconds_of(own, own.best())
    # In the simulation rank 2 is twice as slow as the formula has it.
    simulated = Simulated((right[0], right[1], 2 * right[2], right[3]))
    found = refined(own, simulated.step)
    assert found.choice.rows[2] < own.best().rows[2]
    assert sum(found.choice.rows) == 64
    assert found.outcome.is_complete
    assert found.outcome.num_simulated == len(simulated.asked) == len(set(simulated.asked))
    for rule in RULES:
        other = own.of_rule(rule)
        assert other is not None
        step = simulated.step(other)
        assert step is not None
        assert found.outcome.step_s <= step.step_s
    assert str(found.outcome).startswith(f"the shortest of {found.outcome.num_simulated} choices in the simulation")


def test_a_rule_is_left_out_only_if_the_compute_of_one_rank_is_longer() -> None:
    own = search()
    quick, slow = (Simulated(tuple(factor * each for each in seconds_of(own, own.best()))) for factor in (1e-3, 1e3))
    even = own.even()
    assert even is not None
    assert even.rows != own.best().rows
    refined(own, quick.step)
    assert even.rows not in quick.asked  # even alone computes a thousand times as long as the simulated best
    refined(own, slow.step)
    assert even.rows in slow.asked


def test_without_time_the_outcome_says_what_was_not_simulated() -> None:
    own = search()
    simulated = Simulated(seconds_of(own, own.best()))
    none = refined(own, simulated.step, deadline_in(-1.0))
    assert (none.choice, none.outcome.num_simulated, none.outcome.is_complete) == (own.best(), 0, False)
    assert str(none.outcome) == "the shortest by the formula of the search; nothing was simulated"
    unplanned = refined(own, lambda _: None)
    assert (unplanned.choice, unplanned.outcome.is_complete) == (own.best(), True)
    assert "the ranks have no plans" in str(unplanned.outcome)


def test_each_way_is_priced_once_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that treat some layers are sums of those that treat all or none."""
    priced: list[object] = []
    price = offers._figures

    def counted(*given):
        priced.append(given)
        return price(*given)

    monkeypatch.setattr(offers, "_figures", counted)
    own = search()
    kept = own.ways[0].kept
    group = Activations(id=GroupId("h.0.matmul"), storages=(StorageId("h"),), nbytes=1, saving=Saving.RECOMPUTE)
    treated = replace(kept, treatment=Treatment(text="recomputed", activations=(group,)))
    ways = offers.mixed_ways((kept, treated))
    priced.clear()
    offers.offers_of(ways, [0, 2, 4], own.ask.fleet.seen_by(0), own.ask.budgets[0], own.ask.state, 4)
    assert (len(ways), len(priced)) == (9, 2)


def test_shares_keep_their_outcome_in_json_and_copies() -> None:
    plain = tuple(Share(rank=rank, num_rows=2, state=0.5) for rank in range(2))
    made = Shares(plain, Outcome(step_s=0.5, num_simulated=1, is_complete=False))
    assert made == plain
    for copy in (shares_from_json(shares_to_json(made)), pickle.loads(pickle.dumps(made))):
        assert isinstance(copy, Shares)
        assert (copy, copy.outcome) == (made, made.outcome)
    assert str(made.outcome).endswith("of 1 choice in the simulation of all ranks; there was no time for others")
    assert not isinstance(shares_from_json(shares_to_json(plain)), Shares)
    with pytest.raises(PlanFileError, match="outcome"):
        shares_from_json(shares_to_json(made).replace('"step_s"', '"steps"'))


# ----------------------------------------------------------------------------------------------------------------------
# Unequal shards: rows by largest remainder, and buckets whose flat buffer has no padding.


GRAPH = chain([Layer(f"h.{n}", ((f"w{n}", 3000),), False, 64) for n in range(4)])


def test_rows_go_to_the_largest_remainders_and_ties_to_the_lower_rank() -> None:
    assert largest_remainder(10, (0.7, 0.2, 0.1)) == (7, 2, 1)
    assert largest_remainder(10, (0.0, 0.5, 0.5)) == (0, 5, 5)
    assert largest_remainder(211, (0.6, 0.3, 0.1)) == (127, 63, 21)
    assert largest_remainder(1, (0.2, 0.4, 0.4)) == (0, 1, 0)


def shares_of(*state: float) -> tuple[Share, ...]:
    return tuple(Share(rank=rank, num_rows=1, state=own) for rank, own in enumerate(state))


def bucket(numels: tuple[int, ...], **more: object) -> Bucket:
    numel = sum(numels)
    sizes = {"numel": numel, "nbytes": 4 * numel, "state_nbytes": 8 * numel, "dtype": "float32", "trainable": True}
    return Bucket(id=BucketId("b0"), params=(StorageId("a"),), shard_numels=Shards.of(numels), **sizes, **more)


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


def test_shards_of_the_state_are_one_for_each_rank() -> None:
    problem = problem_of(GRAPH, ranks(3))
    with pytest.raises(InvalidPlan, match="2 shares for 3 ranks with 1 copies of each part"):
        replace(problem, shares=shares_of(0.4, 0.6))


def test_a_rank_counts_its_own_shard_whoever_made_the_buckets_in_force() -> None:
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


# ----------------------------------------------------------------------------------------------------------------------
# Owners of whole parameters: the largest first, and buckets that count what a rank owns.


def test_the_largest_go_first_to_the_rank_that_is_the_least_full() -> None:
    assert owners_by_size([4, 4, 4, 4, 4], (1.0, 1.0)) == (0, 1, 0, 1, 0)
    assert owners_by_size([2, 3, 7, 3, 1], (1.0, 1.0)) == (1, 1, 0, 1, 0)
    assert owners_by_size([6, 6, 6], (0.0, 0.5, 0.5)) == (1, 2, 1)
    assert owners_by_size([4, 4, 4, 4], (0.75, 0.25)) == (0, 0, 0, 1)
    assert owners_by_size([5], (1.0, 1.0, 1.0)) == (0,)
    assert owners_by_size([], (1.0,)) == ()
    with pytest.raises(ValueError, match="all 0"):
        owners_by_size([1], (0.0, 0.0))


@given(st.lists(st.integers(0, 1000), max_size=5), st.integers(1, 3))
def test_the_fullest_owner_has_at_most_four_thirds_of_the_best(sizes: list[int], num_ranks: int) -> None:
    owners = owners_by_size(sizes, (1.0,) * num_ranks)
    fullest = max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(num_ranks))
    choices = itertools.product(range(num_ranks), repeat=len(sizes))
    best = min(
        max(sum(size for size, owner in zip(sizes, each, strict=True) if owner == r) for r in range(num_ranks))
        for each in choices
    )
    assert 3 * fullest <= 4 * best


OWNED = chain([Layer(f"h.{n}", tuple((f"w{n}.{m}", 3000) for m in range(2)), False, 64) for n in range(2)])


def owned_problem(owners: tuple[int, ...]) -> Problem:
    """Return a problem of `OWNED` on three ranks, of which each of `owners` has a parameter whole."""
    problem = problem_of(OWNED, ranks(3))
    whole = WholeUpdate(
        flops=(("float32", 10**9),), moved_bytes=1 << 20, num_kernels=8, most_nbytes=12000, most_state_nbytes=700
    )
    params = {
        name: replace(
            param,
            state_nbytes=700 + place,
            whole_update=whole,
            shard_numels=Shards.of(3000 if rank == owners[place] else 0 for rank in range(3)),
            is_uneven=True,
        )
        for place, (name, param) in enumerate(sorted(problem.params.items()))
    }
    return replace(problem, params=params, bucket_min_bytes=3000, bucket_max_bytes=24000)


def test_a_bucket_counts_the_state_and_the_updates_of_what_a_rank_owns() -> None:
    problem = owned_problem((0, 0, 2, 1))
    first, second = form_buckets(problem)
    assert (tuple(first.shard_numels), tuple(second.shard_numels)) == ((6000, 0, 0), (0, 3000, 3000))
    assert first.is_ragged
    assert second.is_ragged
    assert [first.seen_by(rank).shard_state_nbytes() for rank in range(3)] == [1401, 0, 0]
    assert [second.seen_by(rank).shard_state_nbytes() for rank in range(3)] == [0, 703, 702]
    seconds = [update_s(first.seen_by(rank), Tier.DEVICE, problem.cluster) for rank in range(3)]
    assert seconds[0] == 2 * update_s(second.seen_by(1), Tier.DEVICE, problem.cluster) > 0
    assert seconds[1:] == [0, 0]
    assert {own.rank for own in form_buckets(replace(problem, rank=2))} == {2}


def test_ranks_that_own_other_parameters_have_plans_of_their_own() -> None:
    problem = owned_problem((0, 0, 2, 1))
    facts = [facts_of(problem, (), (), place) for place in range(3)]
    assert classes_of(facts) == ((0,), (1,), (2,))
    assert for_all(replace(problem, rank=2), facts).rank == 0  # it owns the most
    peaks = [plan(replace(problem, rank=rank), "greedy").prediction.device_peak_bytes for rank in range(3)]
    assert peaks[0] > peaks[1]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=10),
    st.sampled_from([(1.0, 1.0), (1.0, 1.0, 1.0), (0.6, 0.4), (0.5, 0.5, 0.0)]),
    st.integers(20, 400),
)
def test_buckets_are_filled_until_no_owner_has_much_more_than_its_part(
    sizes: list[list[int]], weights: tuple[float, ...], max_bytes: int
) -> None:
    graph = chain(
        [
            Layer(f"h.{n}", tuple((f"w{n}.{m}", 4 * size) for m, size in enumerate(own)), False, 64)
            for n, own in enumerate(sizes)
        ]
    )
    problem = problem_of(graph, ranks(len(weights)))
    names = [f"w{n}.{m}" for n, own in enumerate(sizes) for m in range(len(own))]
    numels = dict(zip(names, (4 * size for own in sizes for size in own), strict=True))
    owners = dict(zip(names, owners_by_size(list(numels.values()), weights), strict=True))
    params = {
        name: replace(
            problem.params[name],
            is_uneven=True,
            shard_numels=Shards.of(numel if rank == owners[name] else 0 for rank in range(len(weights))),
        )
        for name, numel in numels.items()
    }
    buckets = form_buckets(replace(problem, params=params, bucket_min_bytes=1, bucket_max_bytes=max_bytes))
    assert sorted(name for bucket in buckets for name in bucket.params) == sorted(names)
    of_all = [sum(numel for name, numel in numels.items() if owners[name] == rank) for rank in range(len(weights))]
    sharing = [name for name in names if 4 * numels[name] <= max_bytes]
    for bucket in buckets:
        after = sharing[sharing.index(bucket.params[-1]) + 1 :] if bucket.params[-1] in sharing else []
        parts = zip(bucket.shard_numels, of_all, strict=True)
        is_even = all(part * sum(of_all) <= 1.5 * bucket.numel * own for part, own in parts)
        assert is_even or not after or bucket.nbytes + 4 * numels[after[0]] > max_bytes


def test_a_bucket_goes_on_until_its_owners_have_their_parts() -> None:
    """Of four equal layers two ranks own two each: of three ranks one owns none in a bucket of at most two."""
    problem = owned_problem((0, 1, 2, 0))
    larger = replace(problem, bucket_min_bytes=3000, bucket_max_bytes=48000)
    assert [tuple(bucket.shard_numels) for bucket in form_buckets(problem)] == [(3000, 3000, 0), (3000, 0, 3000)]
    assert [tuple(bucket.shard_numels) for bucket in form_buckets(larger)] == [(6000, 3000, 3000)]


def test_buckets_of_owned_parameters_are_smaller_where_no_plan_fits() -> None:
    problem = replace(owned_problem((0, 1, 2, 0)), bucket_max_bytes=48000)
    smaller = with_smaller_buckets(problem)
    assert smaller is not None
    assert [len(form_buckets(each)) for each in (problem, smaller)] == [1, 4]
    assert with_smaller_buckets(smaller) is None
    assert with_smaller_buckets(problem_of(OWNED, ranks(3))) is None
    with pytest.raises(NoFeasiblePlan) as raised:
        plan(replace(problem, budget_bytes=1), "greedy")
    small = replace(problem, budget_bytes=5 * 12000 + 4096)
    assert raised.value.needed_bytes < small.budget_bytes
    assert len(plan(small, "greedy").buckets) == 4
    with pytest.raises(NoFeasiblePlan):
        plan(with_buckets_formed(small), "greedy")  # four parameters and their gradients at once
    asked, numbers = [replace(small, rank=rank) for rank in range(3)], range(3)
    search = partial(plan, planner="greedy")
    plans = plan_classes(asked, [(number,) for number in numbers], search, lambda work: [*map(work, numbers)])
    assert [len(made.buckets) for made in plans] == [4] * 3
