"""Collectives that only a stream waits for, as of NCCL, are looked at before the host waits for the device."""

import time
from datetime import timedelta

import pytest
from torch import distributed

from elixir_compile.runtime.distributed.control import ControlChannel, PeerFailed
from elixir_compile.runtime.distributed.unfinished import UnfinishedCollectives


class StreamWork(distributed.Work):
    """A collective whose `wait` returns at once, as NCCL's does."""

    def __init__(self, looks: int, error: Exception | None = None) -> None:
        super().__init__()
        self.looks, self.error = looks, error

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def exception(self) -> Exception | None:
        return self.error


def unfinished(timeout_s: float = 60.0) -> UnfinishedCollectives:
    return UnfinishedCollectives(ControlChannel(None, (0, 1), 0), timedelta(seconds=timeout_s))


def test_the_host_waits_until_all_are_finished() -> None:
    found, works = unfinished(), [StreamWork(3), StreamWork(0), StreamWork(5)]
    for work in works:
        found.add(work, "gradients")
    found.add(object(), "an exchange of our own, which its wait finishes")
    found.settle()
    assert all(work.looks < 0 for work in works)
    found.settle()


def test_an_error_of_the_process_group_names_what_did_not_arrive() -> None:
    found = unfinished()
    found.add(StreamWork(2, RuntimeError("remote process exited or there was a network error")), "gradients of b1")
    with pytest.raises(PeerFailed, match="gradients of b1"):
        found.settle()


def test_a_silent_rank_is_an_error_after_the_timeout() -> None:
    found = unfinished(timeout_s=0.2)
    found.add(StreamWork(10**9), "gradients of b1")
    began_s = time.monotonic()
    with pytest.raises(PeerFailed, match="gradients of b1"):
        found.settle()
    assert time.monotonic() - began_s < 10
