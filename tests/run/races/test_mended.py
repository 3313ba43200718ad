"""Waits and places of work that a close reading found missing."""

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Update
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.optim.rule import GroupSlice, ParamUpdate, on_host
from elixir_compile.optim.streaming import Stream, Streamed
from elixir_compile.runtime import executor, updates
from elixir_compile.runtime.awaited import QueuedUpdates, begin_update
from elixir_compile.runtime.lanes import Plain
from elixir_compile.runtime.published import GradNormCache
from elixir_compile.runtime.recording import Ledger
from elixir_compile.runtime.updates import LandingUpdate, UpdateLine
from tests.races.checked import Checked
from tests.races.checker import Checker
from tests.run.races.simulated import Simulated
from tests.run.updating import eager_run, hybrid_run, ladder, rows


class Past:
    """An event that is past."""

    def query(self) -> bool:
        return True


class Counting(Plain):
    """Lanes that count the waits of compute, and hand back the event of the work."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waited: list[Any] = []

    def compute_waits(self, event: Any) -> None:
        self.waited.append(event)

    def hand_back(self, event: Any) -> Any:
        return None if event is None else partial(self.compute_waits, event)


def test_every_reader_of_an_updated_bucket_waits_for_its_write_back() -> None:
    lanes, line, queued, written = Counting(), UpdateLine(), QueuedUpdates(()), Past()
    queued.add(line.queue(lambda: written, "update b0", lanes), ())
    for _ in range(3):  # readers on three streams
        queued.wait()
    assert lanes.waited.count(written) >= 3


def test_a_hyperparameter_on_an_accelerator_is_read_before_the_update_is_queued() -> None:
    with FakeTensorMode():
        there, here = torch.tensor(0.1, device="cuda"), torch.tensor(0.1, device="cpu")
        found = on_host((there, 0.9, here))
        assert [value.device.type for value in (found[0], found[2])] == ["cpu", "cpu"]
        assert found[1] == 0.9
        assert found[2] is here


def test_norms_of_leaving_gradients_are_computed_on_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CHECK_RACES", "tests.races.checked")
    lanes_of_norms: list[object] = []
    take, model, batches = GradNormCache.take, ladder(), rows(2)
    with hybrid_run(model, batches[0], home="host", update=Update.AFTER_BACKWARD) as run:

        def noted(self: GradNormCache, moved: Any) -> None:
            lanes = executor_of(run.model).lanes
            assert isinstance(lanes, Checked)
            lanes_of_norms.append(lanes._checker.here.lane)
            take(self, moved)

        monkeypatch.setattr(GradNormCache, "take", noted)
        run.train(batches)
    assert lanes_of_norms
    assert set(lanes_of_norms) == {None}


class NotingThreads(Counting):
    """Lanes that note the threads whose compute waits."""

    def compute_waits(self, event: Any) -> None:
        self.waited.append(threading.current_thread())


class ReadInBetween(QueuedUpdates):
    """Queued updates that another thread waits for at the moment that `wait` has emptied them."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_updates" and value == () and hasattr(self, "_let_compute_wait"):
            reader = threading.Thread(target=self.wait)
            reader.start()
            reader.join()


def test_a_thread_that_finds_no_queued_update_makes_its_compute_wait_for_the_last_one() -> None:
    lanes, line, queued = NotingThreads(), UpdateLine(), ReadInBetween(())
    queued.add(line.queue(Past, "update b1", lanes), ())
    queued.wait()
    assert len(set(lanes.waited)) == 2, "the compute of both threads waits"


class Interrupted(Counting):
    """Lanes whose wait on the host is interrupted by a signal handler that waits for the same updates."""

    def __init__(self, line: UpdateLine) -> None:
        super().__init__()
        self._line = line
        self.depth = 0

    def host_waits(self, event: Any) -> None:
        self.depth += 1
        if self.depth == 1:
            self._line.wait()


def test_a_signal_handler_may_wait_for_the_update_that_it_interrupts() -> None:
    line, finished = UpdateLine(), list[int]()
    lanes = Interrupted(line)
    line.add(LandingUpdate(Past(), lambda: finished.append(1), line, "update b0", lanes))
    waiting = threading.Thread(target=line.wait, daemon=True)
    waiting.start()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    assert (lanes.depth, finished) == (2, [1])


def test_copies_to_the_host_outlive_model_and_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = ladder(), rows(2)
    expected = eager_run(model).train(batches)
    monkeypatch.setattr(executor, "lanes_for", lambda device: Simulated(device, "late"))
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, share=1.0) as run:
        run.train(batches)
        kept, gone = [*run.model.parameters()], weakref.ref(run.optimizer)
        lanes: Any = executor_of(run.model).lanes
        del run
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    assert lanes.d2h.queue.num_done < lanes.d2h.queue.num_issued, "copies to weights and state are under way"
    for want, got in zip(expected.model.parameters(), kept, strict=True):
        assert torch.equal(want, got)
    del got, kept
    gc.collect()
    assert not any(line.landings.memory for line in updates._lines)


def test_memory_of_a_streamed_update_is_given_up_by_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CHECK_RACES", "tests.races.checked")
    model, batches, kept = ladder(), rows(4), list[int]()
    with hybrid_run(model, batches[0], home="split", update=Update.ACROSS_STEPS, share=1.0) as run:
        optimizer: Any = run.optimizer
        for batch in batches:
            run.train([batch])
            kept.append(len(optimizer._updater.line.landings.memory))
    assert kept[-1] == kept[-2] > 0


def test_the_check_of_races_waits_for_no_update() -> None:
    line, checker, may_end = UpdateLine(), Checker(torch.device("cpu")), threading.Event()
    param = torch.nn.Parameter(torch.ones(3))

    def work() -> None:
        assert may_end.wait(10)

    update = line.queue(work, "update b0")
    begin_update(param, (update,))
    checker.touch((param,), ())
    assert not update.is_done
    may_end.set()
    line.wait()


def test_a_gradient_in_another_order_is_read_on_the_host_after_it_arrived() -> None:
    class Arriving(Counting):
        def host_waits(self, event: Any) -> None:
            if event is not None:
                grad.fill_(1.0)

    lanes, weight, grad = Arriving(), torch.zeros(3, 2), torch.zeros(2, 3)
    state = {"exp_avg": torch.zeros(3, 2), "exp_avg_sq": torch.zeros(3, 2), "step": torch.zeros(())}
    param = torch.nn.Parameter(weight)
    group = torch.optim.AdamW([param], lr=0.5, weight_decay=0.0).param_groups[0]
    part = GroupSlice(params=(param,), updates=(ParamUpdate(weight, grad.t(), state),), group=group)
    update = Streamed(bucket="b0", rule=AdamWRule(), parts=(part,), is_away=True)
    Stream(lanes, Ledger(lanes)).issue([update], Past())
    assert torch.allclose(weight, torch.full((3, 2), -0.5))
