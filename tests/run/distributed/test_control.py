"""The control channel: texts of every length reach all ranks, and a rank that does not answer is an error in time."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from elixir_compile import compat
from elixir_compile.runtime.distributed.control import ControlChannel, OwnThread, new_control_channel
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer
from tests.run.processes import spawn

LENGTHS = [0, 1, 63, 64, 65, 5000]
TIMEOUT_S = 2.0
"""Of groups that lose a rank: longer than ranks on a busy machine are apart."""


def talk_of(world_size: int) -> ControlChannel:
    return new_control_channel(range(world_size))


def text_of(rank: int, length: int) -> str:
    return "abcdefgh"[rank] * length


def swaps(rank: int, world_size: int) -> list[list[str]]:
    """Texts of each length on all ranks, then a long one on one rank, then a mixture; also while tensors are fake."""
    control = talk_of(world_size)
    given = [[length] * world_size for length in LENGTHS]
    given += [[300 if place == source else source for place in range(world_size)] for source in range(world_size)]
    given += [[place * 40 for place in range(world_size)]]
    found = [list(control.exchange(text_of(rank, lengths[rank]), "letters")) for lengths in given]

    def traced(example: torch.Tensor) -> torch.Tensor:
        found.append(list(control.exchange(f"rank {rank} été " * 9, "letters")))
        return example + 1

    make_fx(traced, tracing_mode="fake")(torch.ones(1))
    assert [thread.name for thread in threading.enumerate()].count("elixir control") == 1
    assert found[:-1] == [[text_of(place, length) for place, length in enumerate(lengths)] for lengths in given]
    return found[-1:]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_texts_of_every_length_arrive_in_the_order_of_ranks(tmp_path: Path, world_size: int) -> None:
    found = spawn(swaps, world_size, folder=tmp_path)
    assert found == [[[f"rank {rank} été " * 9 for rank in range(world_size)]]] * world_size


def test_collectives_of_gloo_share_a_thread_that_ends_with_its_owner() -> None:
    own = OwnThread()
    first, second = (own.run(threading.current_thread) for _ in range(2))
    assert first is second is not threading.current_thread()
    assert not own.run(torch.is_grad_enabled)
    del own
    first.join(timeout=10)
    assert not first.is_alive()


def test_an_exception_of_a_collective_does_not_end_its_thread() -> None:
    def fall_over() -> None:
        raise ArithmeticError("the work fell over")

    own = OwnThread()
    first = own.run(threading.current_thread)
    with pytest.raises(ArithmeticError, match="fell over"):
        own.run(fall_over)
    assert own.run(threading.current_thread) is first


def test_work_on_the_own_thread_may_do_more_of_it() -> None:
    own, found = OwnThread(), list[int]()
    work = threading.Thread(target=lambda: found.append(own.run(lambda: own.run(lambda: 7))), daemon=True)
    work.start()
    work.join(timeout=10)
    assert found == [7]


def test_a_fork_starts_a_thread_of_its_own() -> None:
    own = OwnThread()
    own.run(int)
    child = os.fork()
    if child == 0:
        os._exit(own.run(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def out_of_step(rank: int, world_size: int) -> list[Any]:
    """The last rank exchanges something else; then all go on."""
    control = talk_of(world_size)
    with pytest.raises(RanksDiffer) as caught:
        control.exchange("x" * 100 * rank, "steps" if rank == world_size - 1 else "plans")
    return [caught.value.ranks, str(caught.value), control.exchange(str(rank), "steps")]


def test_ranks_out_of_step_all_know(tmp_path: Path) -> None:
    found = spawn(out_of_step, 3, folder=tmp_path)
    assert found == [found[0]] * 3
    odd, text, later = found[0]
    assert odd == [2]
    assert "rank 0 exchanges plans" in text
    assert "rank 2 exchanges steps" in text
    assert later == ["0", "1", "2"]


def some_talk(rank: int, world_size: int) -> list[Any]:
    """Ranks 1 and 3 of four talk to each other, and so do the others."""
    control = new_control_channel([3, 1] if rank % 2 else [0, 2], timedelta(seconds=5))
    return [control.ranks, control.rank, control.exchange(f"rank {rank}", "names")]


def test_some_of_the_ranks_can_talk(tmp_path: Path) -> None:
    even, odd = [[0, 2], ["rank 0", "rank 2"]], [[1, 3], ["rank 1", "rank 3"]]
    found = spawn(some_talk, 4, folder=tmp_path)
    assert [[ranks, names] for ranks, _, names in found] == [even, odd, even, odd]
    assert [place for _, place, _ in found] == [0, 0, 1, 1]


def loses_one(rank: int, world_size: int, how: str, before: str) -> list[Any]:
    """Rank 1 dies or goes silent before the group is made, before an exchange, or between its two collectives."""
    timeout = timedelta(seconds=TIMEOUT_S)
    control = None if before == "group" else new_control_channel(range(world_size), timeout)
    if control is not None:
        control.exchange("here", "greetings")
    began_s = time.monotonic()
    if rank == 1:
        if before == "second collective":
            # As a rank does whose text is long, up to where it would send it.
            control._completed = lambda *_: gone(how)
            control.exchange("y" * 100, "letters")
        gone(how)
    with pytest.raises(PeerFailed) as caught:
        (control or new_control_channel(range(world_size), timeout)).exchange("x" * 100, "letters")
    error = caught.value
    return [error.ranks, error.during, error.waited_s, time.monotonic() - began_s, str(error)]


def gone(how: str) -> None:
    if how == "dies":
        os._exit(1)
    time.sleep(60.0)


LOSSES = [(how, before) for how in ("dies", "is silent") for before in ("group", "exchange", "second collective")]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """What three ranks saw of every loss; all at once, because they mostly wait."""

    def lose(loss: tuple[str, str]) -> list[Any]:
        return spawn(loses_one, 3, *loss, folder=folders[loss], lost=[1])

    folders = {loss: tmp_path_factory.mktemp("ranks") for loss in LOSSES}
    with ThreadPoolExecutor(len(LOSSES)) as pool:
        return dict(zip(LOSSES, pool.map(lose, LOSSES), strict=True))


@pytest.mark.parametrize(("how", "before"), LOSSES)
def test_a_rank_that_is_lost_is_an_error_on_all_others_in_time(
    losses: dict[tuple[str, str], list[Any]], how: str, before: str
) -> None:
    found = losses[how, before]
    assert found[1] is None
    for rank in (0, 2):
        others, during, waited_s, whole_s, text = found[rank]
        assert others == [other for other in range(3) if other != rank]
        assert during == ("addresses" if before == "group" else "letters")
        assert 0 < waited_s <= whole_s < TIMEOUT_S + 5.0
        assert f"no answer from one of ranks {others[0]}" in text
        assert "raise the timeout" in text
        assert "typically" not in text
        assert ".cc" not in text


def test_one_rank_talks_to_itself() -> None:
    control = new_control_channel([5], timedelta(seconds=5))
    assert control.is_echo
    assert (control.ranks, control.rank) == ((5,), 0)
    assert control.exchange("x" * 100, "letters") == ("x" * 100,)


def test_the_fake_group_answers_for_any_number_of_ranks() -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=7, world_size=1024)
    try:
        control = new_control_channel(range(1024))
    finally:
        distributed.destroy_process_group()
    assert control.is_echo
    assert control.rank == 7
    assert control.exchange("alike", "words") == ("alike",) * 1024


def test_only_errors_of_the_process_group_become_peer_failed() -> None:
    control = new_control_channel([5])
    for error in (
        RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Read error"),
        RuntimeError("Application timeout caused pair closure"),
        distributed.DistBackendError("unhandled system error"),
    ):
        with pytest.raises(PeerFailed), control.raising_peer_failed("letters"):
            raise error
    for error in (
        torch.OutOfMemoryError("out of memory; PyTorch and NCCL have 3 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ):
        with pytest.raises(RuntimeError) as caught, control.raising_peer_failed("letters"):
            raise error
        assert caught.value is error


def timeouts(rank: int, world_size: int) -> float:
    return compat.default_timeout().total_seconds()


def test_the_timeout_is_that_of_the_default_group(tmp_path: Path) -> None:
    assert spawn(timeouts, 1, folder=tmp_path, timeout_s=12.0) == [12.0]


def fails(rank: int, world_size: int) -> None:
    distributed.all_reduce(torch.zeros(1))  # a rank that ends before another has joined would keep it from joining
    print(f"printed by {rank}")
    torch.zeros(2)[rank + 2]


def test_a_failure_shows_the_output_of_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"fails on 2 ranks: failed on \[0, 1\]") as caught:
        spawn(fails, 2, folder=tmp_path)
    assert all(f"printed by {rank}" in str(caught.value) for rank in range(2))
    assert str(caught.value).count("IndexError: index") == 2


def test_ranks_that_do_not_end_are_killed(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(AssertionError, match=r"not done in 0.5 s"):
        spawn(sleeps, 2, folder=tmp_path, limit_s=0.5)
    assert time.monotonic() - began_s < 10.0


def sleeps(rank: int, world_size: int) -> None:
    time.sleep(60.0)
