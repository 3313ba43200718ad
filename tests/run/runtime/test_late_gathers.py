"""A gather does not wait for the update of its bucket; whoever waits for the gather does."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Bucket, BucketId, Placement, StorageId, Tier, Update, Verb
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.updates import UpdateLine
from tests.run.training import Run, assert_same_tensors, loss_of
from tests.run.updating import Worker, controlled_worker, eager_run, hybrid_run, ladder, rows, weights_of

B0 = BucketId("b0")
LONG_S = 5.0


class Home:
    """One bucket on the host, whose update waits for `gate`, adds one to each element, and then may fail."""

    def __init__(self) -> None:
        self.executor = Executor(torch.device("cpu"), "late")
        self.params = [torch.nn.Parameter(torch.full((size,), 1.0)) for size in (3, 5)]
        for index, param in enumerate(self.params):
            self.executor.add_slot(f"p{index}", param)
        names = (StorageId("p0"), StorageId("p1"))
        spec = Bucket(
            id=B0, params=names, numel=8, nbytes=32, state_nbytes=0, dtype="float32", trainable=True, shard_numels=(8,)
        )
        placement = Placement(bucket=B0, param=Tier.HOST, optim=Tier.HOST, resident=False)
        self.executor.buckets.adopt([spec], [placement], for_training=True)
        self.bucket = self.executor.buckets[B0]
        self.line = UpdateLine()
        self.gate = threading.Event()

    def queue(self, *, fails: bool = False) -> None:
        weights = [param.detach() for param in self.params]

        def work() -> None:
            if not self.gate.wait(LONG_S):
                raise TimeoutError
            for weight in weights:
                weight.add_(1)
            if fails:
                raise ArithmeticError("the kernel fell over")

        self.bucket.queued.add(self.line.queue(work, "update b0"), self.params)

    @property
    def num_gathers(self) -> int:
        return self.executor.ledger.counts.get("gather", 0)


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.gate.set()


def values(copies: tuple[torch.Tensor, ...]) -> list[list[float]]:
    return [copy.tolist() for copy in copies]


def test_a_gather_during_an_update_brings_the_updated_values(home: Home) -> None:
    home.queue()
    late = home.executor.gather(B0)
    assert not home.bucket.queued.is_empty
    assert home.num_gathers == 0
    home.gate.set()
    assert values(home.executor.wait(late)) == [[2.0] * 3, [2.0] * 5]
    assert home.num_gathers == 1
    assert home.bucket.queued.is_empty
    assert {type(param) for param in home.params} == {torch.nn.Parameter}
    assert home.executor.whole(B0) is late.values


def test_each_of_two_gathers_brings_the_updated_values(home: Home) -> None:
    home.queue()
    first, second = home.executor.gather(B0), home.executor.gather(B0)
    home.gate.set()
    assert values(home.executor.wait(second)) == values(home.executor.wait(first)) == [[2.0] * 3, [2.0] * 5]


def test_an_early_reader_leaves_the_gather_correct(home: Home) -> None:
    home.queue()
    late = home.executor.gather(B0)
    home.gate.set()
    assert home.params[0].sum().item() == 6
    assert values(home.executor.wait(late)) == [[2.0] * 3, [2.0] * 5]


def test_an_outdated_gathered_copy_is_not_reused(home: Home) -> None:
    home.queue()
    late = home.executor.gather(B0)
    home.gate.set()
    with torch.no_grad():
        home.params[0].add_(1)
    home.executor.wait(late)
    assert values(home.executor.whole(B0)) == [[3.0] * 3, [2.0] * 5]


def test_the_wait_raises_the_workers_exception_with_its_frames(home: Home) -> None:
    home.queue(fails=True)
    late = home.executor.gather(B0)
    home.gate.set()
    with pytest.raises(ArithmeticError, match="fell over") as raised:
        home.executor.wait(late)
    assert "work" in [entry.name for entry in raised.traceback]
    assert "`update b0`" in raised.value.__notes__[0]
    assert home.num_gathers == 0
    assert {type(param) for param in home.params} == {torch.nn.Parameter}
    home.executor.abandon()
    assert values(home.executor.wait(home.executor.gather(B0))) == [[2.0] * 3, [2.0] * 5]


def test_the_wait_copies_if_the_failure_was_raised_before(home: Home) -> None:
    home.queue(fails=True)
    late = home.executor.gather(B0)
    home.gate.set()
    with pytest.raises(ArithmeticError):
        home.line.wait()
    assert values(home.executor.wait(late)) == [[2.0] * 3, [2.0] * 5]


def test_an_abandoned_gather_copies_nothing_and_keeps_nothing(home: Home) -> None:
    home.queue()
    late = home.executor.gather(B0)
    home.executor.abandon()
    del late
    home.gate.set()
    home.line.wait()
    assert home.num_gathers == 0
    assert not home.executor._gathers._late
    assert values(home.executor.wait(home.executor.gather(B0))) == [[2.0] * 3, [2.0] * 5]


def test_a_gather_called_off_elsewhere_copies_at_its_wait(home: Home) -> None:
    home.queue()
    late = home.executor.gather(B0)
    home.executor.abandon()
    home.gate.set()
    assert values(home.executor.wait(late)) == [[2.0] * 3, [2.0] * 5]


def test_a_copy_that_fails_is_raised_by_the_wait(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.queue()
    late = home.executor.gather(B0)

    def broken() -> torch.Tensor:
        raise MemoryError("no copy")

    monkeypatch.setattr(home.bucket, "flat_home", broken)
    home.gate.set()
    with pytest.raises(MemoryError, match="no copy"):
        home.executor.wait(late)
    assert home.bucket.queued.is_empty


def begun_early(run: Run) -> str:
    """Return the last region that runs between the gather of the second bucket and the wait for it."""
    compiled = next(found for found in elixir.compilations(run.model) if found.plan.update is Update.ACROSS_STEPS)
    actions = [(action.verb, str(action.target)) for action in compiled.plan.schedules[0].actions]
    begun, waited = actions.index((Verb.GATHER, "b1")), actions.index((Verb.WAIT, "b1"))
    return [what for verb, what in actions[begun:waited] if verb is Verb.RUN][-1]


@contextmanager
def late_run() -> Iterator[tuple[Run, Worker, list[bool]]]:
    """Yield a run two steps old whose worker updates the second bucket once a region ran that does not read it, but
    whose program stands behind the bucket's gather; the list tells whether that came to be."""
    model, batches = ladder(), rows(2)
    with (
        hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run,
        controlled_worker() as worker,
    ):
        run.train(batches)
        run.optimizer.wait()
        executor: Any = executor_of(run.model)
        label, seen = f"run {begun_early(run)}", []
        num_runs, first = executor.ledger.times[label], worker.num_updates

        def delay_s() -> float:
            until_s = time.monotonic() + (LONG_S if worker.num_updates == first + 1 else 0.0)
            # The step that queues this update runs the region once before.
            while executor.ledger.times[label] < num_runs + 2 and time.monotonic() < until_s:
                time.sleep(0.001)
            if worker.num_updates == first + 1:
                seen.append(executor.ledger.times[label] >= num_runs + 2)
            return 0.0

        worker.delay_s = delay_s
        yield run, worker, seen


def test_regions_run_while_an_early_gather_awaits_its_update() -> None:
    batches = rows(4)
    expected = eager_run(ladder()).train(rows(2)).train(batches)
    with late_run() as (run, _, seen):
        run.train(batches)
        assert seen == [True]
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_a_failed_update_raises_at_the_wait_and_training_resumes() -> None:
    batches = rows(2)
    with late_run() as (run, worker, seen):
        worker.fail_at = worker.num_updates + 1
        loss_of(run.compiled, batches[0]).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()  # gradients that stay would be planned, which waits for all updates
        with pytest.raises(ArithmeticError, match="fell over"):
            run.compiled(batches[1])
        assert seen == [True]
        run.optimizer.wait()
        run.optimizer.zero_grad()
        run.train(batches)
        assert all(param.isfinite().all() for param in run.model.parameters())
