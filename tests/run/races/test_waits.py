"""Each wait of an executor, called without a model: the check of races sees the order that it makes."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elixir_compile.errors import Race
from elixir_compile.ir import Bucket, BucketId, Placement, StorageId, Tier
from elixir_compile.runtime.executor import Executor, synchronize_executors
from elixir_compile.runtime.updates import UpdateLine

CPU = torch.device("cpu")
B0 = BucketId("b0")
LONG_S = 5.0


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CHECK_RACES", "1")


class Home(nn.Module):
    """One bucket of two parameters, and updates that wait for `gate` and add one to each element."""

    def __init__(self, tier: Tier = Tier.HOST) -> None:
        super().__init__()
        self.executor = Executor(CPU, "home")
        self.own = nn.ParameterList(torch.full((size,), 1.0) for size in (3, 5))
        for index, param in enumerate(self.own):
            self.executor.add_slot(f"p{index}", param)
        spec = Bucket(
            id=B0, params=(StorageId("p0"), StorageId("p1")), numel=8, nbytes=32, state_nbytes=0, dtype="float32",
            trainable=True, shard_numels=(8,),
        )  # fmt: skip
        placement = Placement(bucket=B0, param=tier, optim=Tier.HOST, resident=False)
        self.executor.buckets.adopt([spec], [placement], for_training=True)
        self.line = UpdateLine()
        self.gate = threading.Event()

    @property
    def lanes(self) -> Any:
        return self.executor.lanes

    @property
    def bucket(self) -> Any:
        return self.executor.buckets[B0]

    @property
    def values(self) -> list[torch.Tensor]:
        with torch.DisableTorchFunctionSubclass():
            return [param.detach() for param in self.own]

    def queue(self) -> None:
        weights, lanes, read = self.values, self.lanes, self.bucket.home_read

        def work() -> None:
            assert self.gate.wait(LONG_S)
            lanes.host_waits(read)
            lanes.touches((), weights)
            for weight in weights:
                weight.add_(1)

        self.bucket.queued.add(self.line.queue(work, "update b0", lanes), self.own)

    def race_free(self) -> None:
        """Raise a race that a free has shown."""
        self.lanes.touches((self.lanes.empty(8),))


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.gate.set()


def open_soon(home: Home) -> None:
    """Open the gate as soon as another thread may wait for it."""
    threading.Timer(0.05, home.gate.set).start()


def test_a_gather_is_between_two_updates(home: Home) -> None:
    home.gate.set()
    for step in (2.0, 3.0):
        home.queue()
        found = home.executor.wait(home.executor.gather(B0))
        home.lanes.touches(found)
        assert [copy.tolist() for copy in found] == [[step] * 3, [step] * 5]
    home.executor.end()
    home.lanes.touches((), home.values)


def test_the_wait_for_a_gather_waits_for_the_update_before_it(home: Home) -> None:
    home.queue()
    late = home.executor.gather(B0)
    open_soon(home)
    assert [copy.tolist() for copy in home.executor.wait(late)] == [[2.0] * 3, [2.0] * 5]
    home.line.wait()


@pytest.mark.parametrize("verb", ["gather", "whole"])
def test_a_bucket_on_the_device_is_read_behind_its_update(verb: str) -> None:
    home = Home(Tier.DEVICE)
    home.queue()
    open_soon(home)
    found = home.executor.wait(home.executor.gather(B0)) if verb == "gather" else home.executor.whole(B0)
    home.lanes.touches(found)
    assert [copy.tolist() for copy in found] == [[2.0] * 3, [2.0] * 5]


def test_a_called_off_gather_is_never_issued(home: Home) -> None:
    home.queue()
    late = home.executor.gather(B0)
    home.executor.abandon()
    home.gate.set()
    home.line.wait()
    assert home.executor.ledger.counts.get("gather", 0) == 0
    del late
    home.race_free()


def test_users_write_parameters_after_the_program(home: Home) -> None:
    home.executor.wait(home.executor.gather(B0))
    home.executor.end()
    home.lanes.touches((), home.values)


def test_checkpoints_read_after_all_copies(home: Home) -> None:
    home.executor.wait(home.executor.gather(B0))
    synchronize_executors(home)
    home.lanes.touches((), home.values)


def test_memory_of_an_abandoned_gather_is_freed_behind_its_copy(home: Home) -> None:
    transfer = home.executor.gather(B0)
    home.executor.abandon()
    del transfer
    home.race_free()
    home.lanes.touches((), home.values)


def test_memory_of_an_abandoned_offload_is_freed_behind_its_copy(home: Home) -> None:
    transfer = home.executor.offload_saved("h", [torch.ones(64)])
    home.executor.abandon()
    del transfer
    home.race_free()


def test_a_gathered_bucket_is_read_behind_its_copy(home: Home) -> None:
    home.lanes.touches(home.executor.wait(home.executor.gather(B0)))


def test_activations_leave_and_come_back_in_order() -> None:
    executor = Executor(CPU, "saved")
    lanes, value = executor.lanes, torch.ones(64)
    lanes.touches((), (value,))
    executor.wait(executor.offload_saved("h", [value]))
    lanes.touches((), (value,))
    ticket = executor.ticket([])
    for _ in range(2):
        (back,) = executor.wait(executor.prefetch(ticket, "h"))
        lanes.touches((back,))
        del back
    lanes.touches((lanes.empty(8),))


def test_activations_in_flight_are_kept() -> None:
    executor = Executor(CPU, "saved")
    transfer = executor.offload_saved("h", [torch.ones(64)])
    executor.lanes.touches((executor.lanes.empty(8),))
    executor.wait(transfer)


def test_a_missing_wait_of_compute_is_seen() -> None:
    executor = Executor(CPU, "saved")
    executor.offload_saved("h", [torch.ones(64)])
    ticket = executor.ticket([])
    transfer = executor.prefetch(ticket, "h")
    with pytest.raises(Race, match="prefetch h"):
        executor.lanes.touches(transfer.values)
    executor.wait(transfer)
