"""Each wait of an executor, called without a model: the check of races sees the order that it makes."""

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elixir_compile.compat import MemoryView
from elixir_compile.ir import Tier
from elixir_compile.runtime.executor import Executor, synchronize_executors
from elixir_compile.runtime.saved import ArrivingView, LeavingView, View
from elixir_compile.runtime.updates import finish_updates
from tests.races.checker import Race
from tests.run.races.home import B0, CPU, Home
from tests.run.races.simulated import Simulated
from tests.run.training import hybrid_adamw


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CHECK_RACES", "tests.races.checked")


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.gate.set()


READERS: dict[str, Callable[[Home], object]] = {
    "a read": lambda home: home.own[0].sum(),
    "a copy": lambda home: copy.deepcopy(home.own[1]),
    "a pickle": lambda home: pickle.dumps(home.own[0]),
    "another plan": lambda home: home.adopt(for_training=True),
    "a dropped plan": lambda home: home.executor.buckets.drop(home.slots),
    "a replaced parameter": lambda home: home.executor.buckets.place_replaced(home.slots[:1]),
    "a moved parameter": lambda home: home.move_away(),
    "the optimizer": lambda home: home.updater.wait(),
    "the queue": lambda home: home.bucket.queued.wait(),
}
"""What waits for a queued update."""


@pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.ElixirWarning")  # the test holds the memory of before
@pytest.mark.parametrize("reader", READERS)
def test_readers_wait_for_a_queued_update(reader: str) -> None:
    home = Home(for_training=reader != "another plan")
    home.queue()
    weights = home.values
    open_soon(home)
    READERS[reader](home)
    home.lanes.touches((), weights)
    assert [weight.tolist() for weight in weights] == [[2.0] * 3, [2.0] * 5]


def test_an_update_at_once_is_behind_a_queued_one(home: Home) -> None:
    optimizer = hybrid_adamw(home.own.parameters())
    for param in home.own:
        param.grad = torch.ones_like(param)
    home.queue()
    open_soon(home)
    optimizer.step()
    home.line.wait()


@pytest.mark.parametrize("asks", ["wait", "check"])
def test_a_failed_update_is_raised_where_somebody_asks(asks: str, home: Home) -> None:
    update = home.queue(fails=True)
    home.gate.set()
    while not update.is_done:
        time.sleep(1e-3)
    with pytest.raises(ArithmeticError, match="fell over"):
        getattr(home.bucket.queued, asks)()


def test_the_end_of_all_updates_is_waited_for(home: Home) -> None:
    home.queue()
    weights = home.values
    open_soon(home)
    finish_updates()
    assert [weight.tolist() for weight in weights] == [[2.0] * 3, [2.0] * 5]


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


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("num_graphs", [1, 2])
def test_users_read_and_write_gradients_and_parameters_after_a_backward(
    num_graphs: int, waits: bool, home: Home
) -> None:
    home.executor.wait(home.executor.gather(B0))
    for num_backwards in (1, 2):
        home.backward(num_graphs, waits=waits)
        home.lanes.touches((), home.values)
        grads = [param.grad for param in home.own]
        home.lanes.touches(grads)
        assert [grad.unique().tolist() for grad in grads] == [[float(num_backwards * num_graphs)]] * 2
        del grads
    home.race_free()


@pytest.mark.parametrize("has_hooks", [False, True])
def test_a_backward_adds_to_gradients_behind_the_update_that_reads_them(has_hooks: bool, home: Home) -> None:
    home.backward(waits=True)
    grads = [param.grad for param in home.own]
    if has_hooks:  # so that autograd adds the gradients
        for param in home.own:
            param.register_hook(lambda grad: grad)
    home.queue([grad for grad in grads if grad is not None])
    open_soon(home)
    # As if the loss is of a subclass of torch.Tensor: no read of a parameter waits by its `__torch_function__`.
    with torch.DisableTorchFunctionSubclass():
        home.backward(waits=True, reads=False, has_gate=has_hooks)
    home.line.wait()
    assert [grad.unique().tolist() for grad in grads if grad is not None] == [[2.0]] * 2


@pytest.mark.parametrize("waits", [True, False])
def test_autograd_takes_gradients_that_are_on_the_host(waits: bool, home: Home) -> None:
    home.backward(waits=True)
    for param in home.own:
        param.register_hook(lambda grad: grad)
    home.backward(waits=waits, has_gate=True)
    assert [param.grad.unique().tolist() for param in home.own if param.grad is not None] == [[2.0]] * 2


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


def in_slices(executor: Executor, *, waits: bool) -> tuple[Any, View]:
    """Let a storage of four rows leave in two slices, and return its ticket and its view."""
    lanes = executor.lanes
    view = View(0, MemoryView(dtype=torch.float32, shape=(4, 16), stride=(16, 1), offset=0))
    storage = executor.saved.begin_leaving("h", 4 * 64, 2)
    for number in range(2):
        storage.begin()
        storage.part(view, 0).fill_(number)
        storage.send(number)
    transfer = executor.offload_saved("h", [LeavingView(storage, view)])
    if waits:
        executor.wait(transfer)
    lanes.touches((), (lanes.empty(8),))
    return executor.ticket([]), view


@pytest.mark.parametrize("waits", [True, False])
def test_slices_leave_and_come_back_in_order(waits: bool) -> None:
    executor = Executor(CPU, "saved")
    ticket, view = in_slices(executor, waits=waits)
    (value,) = executor.wait(executor.prefetch(ticket, "h", [(0, 2)]))
    assert isinstance(value, ArrivingView)
    for number in range(2):
        value.source.begin(number)
        part = value.source.slice(view, 0)
        executor.lanes.touches((part,))
        assert torch.equal(part, torch.full((2, 16), float(number)))
        del part
        value.source.release()
    executor.lanes.touches((executor.lanes.empty(8),))


def test_a_slice_that_leaves_is_kept_if_an_exception_ends_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir_compile.runtime.executor.lanes_for", lambda device: Simulated(device, "late"))
    executor = Executor(CPU, "saved")
    storage = executor.saved.begin_leaving("h", 4 * 64, 2)
    storage.begin()
    storage.send(0)
    del storage
    executor.abandon()


@pytest.mark.parametrize("leaves", [True, False], ids=["leaving", "arriving"])
def test_slabs_are_unmapped_behind_their_copies(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir_compile.runtime.executor.lanes_for", lambda device: Simulated(device, "late"))
    executor = Executor(CPU, "saved")
    transfer = executor.offload_saved("h", [torch.ones(64)])
    ticket = executor.ticket([])
    if not leaves:
        executor.wait(transfer)
        executor.lanes.d2h.synchronize()
        transfer = executor.prefetch(ticket, "h")
    del ticket
    executor.begin()
    other = executor.lanes.h2d if leaves else executor.lanes.d2h
    with monkeypatch.context() as patch:
        patch.setattr(other, "synchronize", lambda: None)  # which does all compute here, and thereby what it waits for
        executor.saved.drop_free_slabs()
    executor.wait(transfer)
    executor.lanes.synchronize()  # copies whose memory is gone fail at the latest here


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_parameters_move_behind_the_copies_from_and_to_their_old_memory(
    lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elixir_compile.runtime.executor.lanes_for", lambda device: Simulated(device, "late"))
    home, updated = Home(), torch.full((3,), 2.0)
    if lane == "h2d":
        home.executor.wait(home.executor.gather(B0))
    else:  # as a streamed update does
        home.lanes.d2h.copy(home.values[0], updated)
    other = home.lanes.d2h if lane == "h2d" else home.lanes.h2d
    monkeypatch.setattr(other, "synchronize", lambda: None)  # which does all compute here, and what it waits for
    home.adopt(Tier.DEVICE, for_training=True)
    assert home.values[0].tolist() == [1.0 if lane == "h2d" else 2.0] * 3
    home.lanes.synchronize()  # a copy whose memory is gone fails at the latest here


def test_a_forward_that_is_dropped_with_copies_in_flight_keeps_its_memory_until_the_next() -> None:
    executor = Executor(CPU, "saved")
    executor.offload_saved("h", [torch.ones(64)])
    executor.ticket([])
    executor.lanes.touches((executor.lanes.empty(8),))
    executor.begin()
    executor.lanes.touches((executor.lanes.empty(8),))
    executor.offload_saved("h", [torch.ones(64)])  # to the same slab
    executor.lanes.touches((executor.lanes.empty(8),))


def test_a_missing_wait_of_compute_is_seen() -> None:
    executor = Executor(CPU, "saved")
    executor.offload_saved("h", [torch.ones(64)])
    ticket = executor.ticket([])
    transfer = executor.prefetch(ticket, "h")
    with pytest.raises(Race, match="prefetch h"):
        executor.lanes.touches(transfer.values)
    executor.wait(transfer)
