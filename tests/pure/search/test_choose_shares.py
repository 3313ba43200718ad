"""`step.batch_rows` and `search.shares`: one capture prices every number of rows, and the best shares fit every
rank."""

from dataclasses import replace

import pytest

from elixir_compile.base.errors import InvalidOption, InvalidPlan, NoFeasibleShares
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir import Batched, Phase, StepGraph
from elixir_compile.ir.cost import op_s
from elixir_compile.ir.hardware import parse_fleet
from elixir_compile.search.shares.choose import (
    Ask,
    Budget,
    Choice,
    ShareSearch,
    State,
    quantum_of,
    treatments_of,
    ways_of,
)
from elixir_compile.step.as_run import as_run
from elixir_compile.step.batch_rows import graph_of_rows
from tests.pure.analysis.test_micro_batches import STEP
from tests.pure.search.test_micro_batch_count import TRAINED

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
        op_s(op, cluster.device, dtypes[op.writes[0]] if op.writes else "float32")
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
