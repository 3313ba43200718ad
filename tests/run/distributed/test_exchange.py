"""Rows sent from rank to rank give what the collectives of the backend give."""

import os
import time
from pathlib import Path

import pytest
import torch
from processes import spawn
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from elixir_compile.runtime.distributed.exchange import Messenger
from elixir_compile.runtime.distributed.ranks import Ranks

NUMEL = 1000


def exchanges(rank: int, world_size: int) -> bool:
    """Several exchanges under way at once, waited for in another order than they began; gives whether all are right."""
    messenger, other = Messenger(distributed.group.WORLD), Messenger(distributed.group.WORLD)
    assert messenger.new_tag() != other.new_tag()  # of two models on one mesh
    everyone = [
        torch.randint(-8, 8, (world_size, NUMEL), generator=torch.Generator().manual_seed(peer)).double()
        for peer in range(world_size)
    ]
    own = everyone[rank][rank].clone()
    before = [rows.clone() for rows in everyone]
    landings, gathered = [torch.empty(NUMEL, dtype=own.dtype) for _ in range(2)], torch.empty_like(everyone[0])
    first = messenger.reduce_scatter(landings[0], everyone[rank])
    gather = other.all_gather(gathered, own)
    second = messenger.reduce_scatter(landings[1], gathered.new_full((world_size, NUMEL), float(rank)))
    for exchange in (gather, second, first):
        exchange.wait()
    expected = torch.stack([rows[rank] for rows in before]).sum(0).div(world_size)
    return (
        torch.equal(landings[0], expected)
        and bool((landings[1] == (world_size - 1) / 2).all())
        and torch.equal(gathered, torch.stack([rows[peer] for peer, rows in enumerate(before)]))
        and torch.equal(everyone[rank], before[rank])
    )


def allocated_bytes(rank: int, world_size: int) -> list[int]:
    """What the two collectives of `Ranks` allocate beside what they are given."""
    ranks = Ranks(init_device_mesh("cpu", (world_size,)))
    rows, own = torch.ones(world_size, NUMEL), torch.ones(NUMEL)
    found = []
    for begin in (lambda: ranks.all_gather(rows, own, "rows"), lambda: ranks.reduce_scatter(own, rows, "rows")):
        # Without `acc_events` torch 2.11 warns of events that are dropped between cycles.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            begin().wait()
        found.append(max((event.cpu_memory_usage for event in profiler.events()), default=0))
    return found


def ends_without(rank: int, world_size: int, is_dead: bool) -> float:
    """The seconds after which rank 0 is told that the other is dead, or silent."""
    if rank == 1:
        if not is_dead:
            time.sleep(8.0)
        os._exit(1)
    messenger = Messenger(distributed.group.WORLD)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError):
        messenger.reduce_scatter(torch.empty(NUMEL), torch.ones(world_size, NUMEL)).wait()
    return time.monotonic() - began_s


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathered_and_reduced_rows_are_correct(world_size: int, tmp_path: Path) -> None:
    assert spawn(exchanges, world_size, folder=tmp_path) == [True] * world_size


def test_two_ranks_allocate_no_row(tmp_path: Path) -> None:
    for gather_bytes, reduce_bytes in spawn(allocated_bytes, 2, folder=tmp_path):
        assert gather_bytes < 4 * NUMEL
        assert reduce_bytes < 4 * NUMEL


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_rank_that_sends_nothing_is_an_error_within_the_timeout(is_dead: bool, tmp_path: Path) -> None:
    waited_s, _ = spawn(ends_without, 2, is_dead, folder=tmp_path, timeout_s=2.0, lost=[1])
    assert waited_s < 6.0
