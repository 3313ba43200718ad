"""The control channel and what ranks send: rows, collectives that only a stream waits for, and ranks that are
lost."""

import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.runtime.distributed.control import (
    ControlChannel,
    OwnThread,
    PeerFailed,
    RanksDiffer,
    new_control_channel,
)
from elixir_compile.runtime.distributed.ranks import Collective, Messenger, Ranks, UnfinishedCollectives
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lanes import Event, Lanes, lanes_for
from tests.run.processes import spawn

# ----------------------------------------------------------------------------------------------------------------------
# The control channel: texts of every length reach all ranks, and a rank that does not answer is an error in time.


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


# ----------------------------------------------------------------------------------------------------------------------
# Rows sent from rank to rank give what the collectives of the backend give.


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


def waits_elsewhere(rank: int, world_size: int, sizes: list[int]) -> list[list[float]]:
    """What two reduces, a mean and a gather give on ranks that start them in one order and wait at other places."""
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("copies", "shards")[-len(sizes) :])
    ranks, lanes = Ranks(mesh), lanes_for(torch.device("cpu"))

    def reduce() -> tuple[torch.Tensor, Collective]:
        own = torch.empty(2)
        started = ranks.reduce_scatter(own, torch.arange(2.0 * sizes[-1]).view(sizes[-1], 2) + rank, "rows")
        return own, ranks.average_copies(own, started, lanes.collectives) if len(sizes) > 1 else started

    place = mesh.get_local_rank(len(sizes) - 1)
    (first, reducing), (second, also), gathered = reduce(), reduce(), torch.empty(sizes[-1], 1)
    if rank == world_size - 1:
        also.wait()
        reducing.wait()
    (mean,) = ranks.means([torch.full((1,), float(rank))], torch.float32)
    gather = ranks.all_gather(gathered, torch.full((1,), float(rank)), "rows")
    for left in (gather,) if rank == world_size - 1 else (gather, reducing, also):
        left.wait()
    return [each.flatten().tolist() for each in (first - 2 * place, second - 2 * place, mean)]


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


@pytest.mark.parametrize("sizes", [[3], [2, 2]])
def test_ranks_that_wait_at_other_places_do_not_block_each_other(sizes: list[int], tmp_path: Path) -> None:
    world_size = math.prod(sizes)
    mean = (world_size - 1) / 2
    found = spawn(waits_elsewhere, world_size, sizes, folder=tmp_path, limit_s=40.0)
    assert found == [[[mean, 1 + mean]] * 2 + [[mean]]] * world_size


def test_two_ranks_allocate_no_row(tmp_path: Path) -> None:
    for gather_bytes, reduce_bytes in spawn(allocated_bytes, 2, folder=tmp_path):
        assert gather_bytes < 4 * NUMEL
        assert reduce_bytes < 4 * NUMEL


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_rank_that_sends_nothing_is_an_error_within_the_timeout(is_dead: bool, tmp_path: Path) -> None:
    waited_s, _ = spawn(ends_without, 2, is_dead, folder=tmp_path, timeout_s=2.0, lost=[1])
    assert waited_s < 6.0


# ----------------------------------------------------------------------------------------------------------------------
# Collectives that only a stream waits for, as of NCCL, are looked at while the host waits for the device.


SHARDS, COPIES = (cast("distributed.ProcessGroup", object()) for _ in range(2))


class StreamWork(distributed.Work):
    """A collective whose `wait` returns at once or raises its error, and which keeps its output, as NCCL's does."""

    def __init__(self, looks: int, error: Exception | None = None, output: torch.Tensor | None = None) -> None:
        super().__init__()
        self.looks, self.error, self.output = looks, error, output

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self.error is not None and self.looks < 0:
            raise self.error
        return True


class After:
    """An event that is past when a `work` is finished, and after `looks` looks."""

    def __init__(self, work: StreamWork | None = None, looks: int = 0) -> None:
        self.work, self.looks = work, looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0 and (self.work is None or self.work.looks < 0)


def unfinished(timeout_s: float = 60.0) -> UnfinishedCollectives:
    return UnfinishedCollectives(ControlChannel(None, (0, 1), 0), timedelta(seconds=timeout_s))


def ranks() -> Ranks:
    """Return as much of `Ranks` as a collective uses."""
    found = unfinished()
    ranks = SimpleNamespace(unfinished=found, control=found._control, under_way={}, complete_until=lambda until: None)
    return cast("Ranks", ranks)


@pytest.mark.parametrize("event", [None, After(looks=3)], ids=["no copies", "copies"])
def test_the_host_waits_for_copies_alone(event: Event | None) -> None:
    found, later = unfinished(), StreamWork(10**9)
    found.add(later, "gradients", SHARDS)
    found.add(object(), "an exchange of our own, which its wait finishes", COPIES)
    began_s = time.monotonic()
    found.wait_for(event)
    assert event is None or event.query()
    assert time.monotonic() - began_s < 10
    assert later.looks > 10**9 - 10


def test_a_forward_behind_a_gather_that_never_ends_is_an_error_after_the_timeout() -> None:
    """Gathers are not noted, because that would keep their memory."""
    found, never = unfinished(timeout_s=0.05), After(looks=10**9)
    with pytest.raises(PeerFailed, match=r"parameters of a forward.*not finished after 0 s"):
        found.wait_for(never, "parameters of a forward")
    found.wait_for(After(looks=3), "parameters of a forward")


def test_the_end_of_a_forward_looks_at_the_collectives_while_it_waits_for_copies() -> None:
    executor = Executor(torch.device("cpu"), "model")
    found, stuck = unfinished(), StreamWork(5, distributed.DistBackendError("remote process exited"))
    found.add(stuck, "gradients of b1", SHARDS)
    executor.ranks = cast("Ranks", SimpleNamespace(unfinished=found))
    executor.lanes = cast("Lanes", SimpleNamespace(h2d=SimpleNamespace(mark=lambda: After(looks=10**9))))
    with pytest.raises(PeerFailed, match="gradients of b1"):
        executor.end()


def test_an_error_of_the_process_group_names_what_did_not_arrive() -> None:
    found = unfinished()
    failing = StreamWork(5, distributed.DistBackendError("remote process exited or there was a network error"))
    found.add(failing, "gradients of b1", SHARDS)
    with pytest.raises(PeerFailed, match="gradients of b1"):
        found.wait_for(After(looks=10**9))
    found.wait_for(After())


def test_an_error_of_a_finished_collective_is_raised_by_the_next() -> None:
    found = unfinished()
    found.add(StreamWork(0, RuntimeError("connection closed by peer")), "gradients of b1", SHARDS)
    with pytest.raises(PeerFailed, match="gradients of b1"):
        found.add(StreamWork(5), "gradients of b0", SHARDS)


def test_a_silent_rank_is_an_error_after_the_timeout() -> None:
    found, silent = unfinished(timeout_s=0.2), StreamWork(10**9)
    found.add(silent, "gradients of b1", SHARDS)
    began_s = time.monotonic()
    with pytest.raises(PeerFailed, match="gradients of b1"):
        found.wait_for(After(silent))
    assert time.monotonic() - began_s < 10


def waited_for(group: Any, ranks: Ranks) -> Iterator[weakref.ref[torch.Tensor]]:
    """Wait for collectives whose output nobody else holds, and that the device has not finished."""
    while True:
        output = torch.empty(8)
        gone = weakref.ref(output)
        Collective(StreamWork(10**9, output=output), "a bucket", ranks, group).wait()
        del output
        yield gone


def test_a_released_gather_is_freed_though_the_device_has_not_finished_it() -> None:
    collectives = waited_for(None, ranks())
    assert [next(collectives)() for _ in range(3)] == [None] * 3


def test_the_outputs_of_reduces_are_freed_but_for_the_newest_of_each_process_group() -> None:
    own = ranks()
    shards, copies = waited_for(SHARDS, own), waited_for(COPIES, own)
    outputs = [next(shards), next(shards), next(copies), next(copies)]
    assert [output() is None for output in outputs] == [True, False, True, False]
    own.unfinished.clear()
    assert all(output() is None for output in outputs)


# ----------------------------------------------------------------------------------------------------------------------
# A rank that dies in the middle of a step is an error on the others, in time; no checkpoint, no plan is at stake.


STEP_TIMEOUT_S = 20.0


def loses_one_in_a_step(rank: int, world_size: int, where: str, small_bytes: int | None = None) -> list[object]:
    """Train one step; in the second, the last rank dies `where`. Return what the others got, after how long, and how
    many classes of ranks have plans of their own: two if rank 1 has `small_bytes` of device memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 320), nn.GELU(), nn.Linear(320, 320), nn.GELU(), nn.Linear(320, 8))
    elixir.prepare(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = elixir.HybridAdamW(model.parameters())
    options: dict[str, object] = {"inner": "aot_eager", "report": False, "plan_cache": small_bytes is None}
    if small_bytes is not None:
        options |= {"device_memory": small_bytes if rank == 1 else 10 * small_bytes, "micro_batches": 1}
    compiled = torch.compile(model, backend="elixir", options=options)
    began_s = 0.0
    try:
        for step in range(3):
            began_s = time.monotonic()
            is_last = step == 1 and rank == world_size - 1
            if is_last and where == "before the forward":
                os._exit(1)
            loss = compiled(torch.randn(4, 160)).square().mean()
            if is_last and where == "in the backward":
                loss.register_hook(lambda grad: os._exit(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except elixir.PeerFailed as error:
        late_s = time.monotonic() - began_s
        classes = [len(made.plan.classes) for made in elixir.compilations(model) if made.plan is not None]
        return [step, str(error), late_s, max(classes)]
    return [3, "", 0.0, 0]


def test_a_rank_that_dies_in_a_step_is_an_error_on_the_others(tmp_path: Path) -> None:
    for where in ("before the forward", "in the backward"):
        found = spawn(loses_one_in_a_step, 3, where, folder=tmp_path, timeout_s=STEP_TIMEOUT_S, lost=[2])
        for step, said, waited_s, num_classes in found[:2]:
            assert step == 1
            assert num_classes == 0
            assert "It died, hangs or is late" in said
            assert waited_s < STEP_TIMEOUT_S + 5


@pytest.mark.slow  # 5 s of CPU time
def test_a_rank_that_dies_is_an_error_on_ranks_with_other_plans(tmp_path: Path) -> None:
    """The ranks that are left have plans that differ: one keeps all on its device, one does not."""
    for where in ("before the forward", "in the backward"):
        found = spawn(loses_one_in_a_step, 3, where, 1_200_000, folder=tmp_path, timeout_s=STEP_TIMEOUT_S, lost=[2])
        for step, said, waited_s, num_classes in found[:2]:
            assert (step, num_classes) == (1, 2)
            assert "It died, hangs or is late" in said
            assert waited_s < STEP_TIMEOUT_S + 5
