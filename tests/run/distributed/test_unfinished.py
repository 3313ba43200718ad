"""Collectives that only a stream waits for, as of NCCL, are looked at while the host waits for the device."""

import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed

from elixir_compile.runtime.distributed.control import ControlChannel, PeerFailed
from elixir_compile.runtime.distributed.ranks import Collective, Ranks, UnfinishedCollectives
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lanes import Event, Lanes

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
    return cast("Ranks", SimpleNamespace(unfinished=found, control=found._control, under_way={}))


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
