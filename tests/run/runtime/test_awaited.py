"""Reads, writes and gathers while an update is queued: who waits for it, and who does not."""

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Bucket, BucketId, Placement, Shards, StorageId, Tier, Update, Verb
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.updates import UpdateLine
from tests.run.training import Run, assert_same_tensors, loss_of
from tests.run.updating import (
    Worker,
    buckets_of,
    controlled_worker,
    eager_run,
    hybrid_run,
    in_flight,
    ladder,
    nan_staging,
    random_delay,
    rows,
    weights_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# Whatever reads a parameter or a state while its update is queued waits for it, and only for it.


BATCHES = rows(6)


@contextmanager
def queued_run(model: nn.Module, home: str = "host") -> Iterator[tuple[Run, Worker]]:
    """Yield a run of a copy of `model` whose updates are queued across steps, and the worker that does them."""
    with (
        controlled_worker() as worker,
        nan_staging(),
        hybrid_run(model, BATCHES[0], home=home, update=Update.ACROSS_STEPS) as run,
    ):
        yield run, worker


@pytest.fixture(params=["host", "split"])
def flying(request: pytest.FixtureRequest) -> Iterator[tuple[Run, Run, Worker]]:
    """Yield a run by torch and a hybrid one, three steps in, whose third update is queued behind a closed gate."""
    model = ladder()
    expected = eager_run(model).train(BATCHES[:3])
    with queued_run(model, request.param) as (run, worker):
        run.train(BATCHES[:2])
        run.optimizer.wait()
        worker.gate.clear()
        run.train(BATCHES[2:3])
        assert in_flight(run) == 4
        yield expected, run, worker


def open_soon(worker: Worker) -> None:
    threading.Timer(0.05, worker.gate.set).start()


def first_weight(run: Run) -> nn.Parameter:
    return run.model.steps[0]._parameters["weight"]


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "item": lambda p: torch.tensor(p.detach()[0, 0].item()),
    "linear": lambda p: nn.functional.linear(torch.eye(13), p),
    "cat": lambda p: torch.cat([p, p]),
    "out": lambda p: torch.empty(13, 13).copy_(p.detach()),
    "foreach": lambda p: torch._foreach_add([p], 1.0)[0],  # ATen's own operator
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": lambda p: saved_and_loaded(p),
    "repr": lambda p: torch.tensor(len(repr(p))),
    "keyword": lambda p: torch.add(input=torch.zeros(13, 13), other=p),
}


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_each_way_to_read_a_parameter() -> None:
    model = ladder()
    expected = eager_run(model)
    with queued_run(model) as (run, worker):
        run.train(BATCHES[:1])
        expected.train(BATCHES[:1])
        for number, (name, read) in enumerate(READS.items()):
            run.optimizer.wait()
            worker.gate.clear()
            batch = BATCHES[number % 6]
            run.train([batch])
            expected.train([batch])
            param = first_weight(run)
            assert isinstance(param, nn.Parameter), name
            assert type(param) is not nn.Parameter, name
            open_soon(worker)
            got, right = read(param), read(expected.model.steps[0].weight)
            assert torch.equal(got, right), name
            assert type(got) is type(right), name
            assert type(param) is nn.Parameter, name


def test_shape_and_dtype_do_not_wait_for_an_update(flying: tuple[Run, Run, Worker]) -> None:
    _, run, _ = flying
    param = first_weight(run)
    assert (param.shape, param.dtype, param.device.type) == ((13, 13), torch.float32, "cpu")
    assert (param.numel(), param.dim(), param.stride(), param.element_size()) == (169, 2, (13, 1), 4)
    assert param.requires_grad
    assert param.is_leaf
    assert sum(p.numel() for p in run.model.parameters()) == 715
    assert hash(param) == id(param)
    assert in_flight(run) == 4


def test_only_the_bucket_that_is_read_is_waited_for(flying: tuple[Run, Run, Worker]) -> None:
    expected, run, worker = flying
    open_soon(worker)
    assert torch.equal(first_weight(run), expected.model.steps[0].weight)
    assert in_flight(run) == 3
    assert torch.equal(run.model.steps[3]._parameters["bias"], expected.model.steps[3].bias)
    assert in_flight(run) == 2


def test_zero_grad_waits_for_nothing(flying: tuple[Run, Run, Worker]) -> None:
    _, run, _ = flying
    run.optimizer.zero_grad()
    assert in_flight(run) == 4


def test_state_during_updates_equals_a_synchronous_run(
    flying: tuple[Run, Run, Worker],
) -> None:
    expected, run, worker = flying
    open_soon(worker)
    got = saved_and_loaded({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})
    assert_same_tensors(weights_of(expected), got["model"])
    right = expected.optimizer.state_dict()["state"]
    for index, entry in got["optimizer"]["state"].items():
        assert_same_tensors(dict(sorted(right[index].items())), dict(sorted(entry.items())))
    continued = eager_run(ladder())
    continued.model.load_state_dict(got["model"])
    continued.optimizer.load_state_dict(got["optimizer"])
    assert_same_tensors(weights_of(expected.train(BATCHES[3:])), weights_of(continued.train(BATCHES[3:])))


def test_a_state_dict_loads_in_mid_flight(flying: tuple[Run, Run, Worker]) -> None:
    expected, run, worker = flying
    open_soon(worker)
    run.model.load_state_dict({name: value.clone() for name, value in expected.model.state_dict().items()})
    run.optimizer.load_state_dict(copy.deepcopy(expected.optimizer.state_dict()))
    assert_same_tensors(weights_of(expected.train(BATCHES[3:])), weights_of(run.train(BATCHES[3:])))


def test_copies_of_model_and_optimizer(flying: tuple[Run, Run, Worker]) -> None:
    expected, run, worker = flying
    open_soon(worker)
    twin = copy.deepcopy(run.model)
    assert_same_tensors(weights_of(expected), {name: p.detach() for name, p in twin.named_parameters()})
    assert {type(param) for param in twin.parameters()} == {nn.Parameter}
    assert isinstance(copy.deepcopy(run.optimizer), elixir.HybridAdamW)
    assert len(pickle.loads(pickle.dumps(run.optimizer)).state) == 7


def test_gradients_wait(flying: tuple[Run, Run, Worker]) -> None:
    expected, run, worker = flying
    open_soon(worker)
    loss_of(run.compiled, BATCHES[3]).backward()
    loss_of(expected.compiled, BATCHES[3]).backward()
    run.optimizer.wait()
    worker.gate.clear()
    run.optimizer.step()
    expected.optimizer.step()
    open_soon(worker)
    for param, right in zip(run.model.parameters(), expected.model.parameters(), strict=True):
        param.grad.mul_(0)
        right.grad.mul_(0)
    assert_same_tensors(weights_of(expected), weights_of(run))


def test_an_eager_forward_another_optimizer_and_moving_the_model(flying: tuple[Run, Run, Worker]) -> None:
    expected, run, worker = flying
    open_soon(worker)
    with torch.no_grad():
        assert torch.equal(expected.model(BATCHES[3]), run.model(BATCHES[3]))
    worker.gate.clear()
    open_soon(worker)
    for each in (expected, run):
        loss_of(each.compiled, BATCHES[4]).backward()
        each.optimizer.step()
        torch.optim.SGD(each.model.parameters(), lr=0.1).step()
        each.optimizer.zero_grad()
    worker.gate.clear()
    open_soon(worker)
    for each in (expected, run):
        each.train(BATCHES[5:])
        each.model.to("cpu")
    assert_same_tensors(weights_of(expected), weights_of(run))


def test_the_next_forward_gathers_each_bucket_behind_its_own_update() -> None:
    """By the recorded spans: offload of the gradient, update, gather of the next forward, for each bucket and step."""
    model = ladder()
    expected = eager_run(model).train(BATCHES[:5])
    with queued_run(model) as (run, worker):
        run.train(BATCHES[:2])
        run.optimizer.wait()
        worker.delay_s = lambda: 0.01
        recording = executor_of(run.model).ledger.start_recording()
        run.train(BATCHES[2:5])
        run.optimizer.wait()
        spans = recording.stop()
    assert_same_tensors(weights_of(expected), weights_of(run))
    for bucket in buckets_of(run):
        name = bucket.spec.id
        updates = [span for span in spans if span.label == f"update {name}"]
        gathers = [span for span in spans if span.label == f"gather {name}"]
        offloads = [span for span in spans if span.label == f"offload {name}.grad"]
        assert len(updates) == len(offloads) == 3
        for update, offload in zip(updates, offloads, strict=True):
            assert update.start_s >= offload.end_s
        for update, following in pairwise(updates):
            # Its gathers of the same step come before its gradient, all others behind its update.
            between = [
                gather for gather in gathers if update.start_s < gather.end_s and gather.start_s < following.end_s
            ]
            assert between
            assert all(gather.start_s >= update.end_s for gather in between)
    order = sorted((span.start_s, span.label) for span in spans if span.label.startswith("update"))
    assert [label for _, label in order] == [f"update b{number}" for _ in range(3) for number in range(4)]


def test_no_capture_is_made_again_and_no_guard_fails(flying: tuple[Run, Run, Worker]) -> None:
    expected, run, worker = flying
    num_graphs = len(elixir.compilations(run.model, inference=True))
    open_soon(worker)
    with torch._dynamo.config.patch(error_on_recompile=True):  # documented under this path
        run.train(BATCHES[3:])
    assert len(elixir.compilations(run.model, inference=True)) == num_graphs
    assert_same_tensors(weights_of(expected.train(BATCHES[3:])), weights_of(run))


def test_a_compiled_function_of_parameters_waits() -> None:
    @torch.compile(backend="eager")
    def total(params: list[nn.Parameter]) -> torch.Tensor:
        return sum((param.detach() * 2).sum() for param in params)

    model = ladder()
    expected = eager_run(model).train(BATCHES[:1])
    with queued_run(model) as (run, worker):
        run.train(BATCHES[:1])
        assert torch.equal(total(list(run.model.parameters())), total(list(expected.model.parameters())))
        for batch in BATCHES[1:4]:
            worker.gate.clear()
            threading.Timer(0.01, worker.gate.set).start()
            run.train([batch])
            expected.train([batch])
            got = total(list(run.model.parameters()))
            assert torch.equal(got, total(list(expected.model.parameters())))
            run.optimizer.wait()


def test_after_a_failed_update_a_load_lets_training_continue() -> None:
    model = ladder()
    expected = eager_run(model).train(BATCHES[:2])
    checkpoint = copy.deepcopy((expected.model.state_dict(), expected.optimizer.state_dict()))
    with queued_run(model) as (run, worker):
        run.train(BATCHES[:2])
        run.optimizer.wait()
        worker.fail_at = worker.num_updates + 1
        run.train(BATCHES[2:3])
        with pytest.raises(ArithmeticError, match="fell over") as raised:
            run.train(BATCHES[3:4])
        assert any(entry.name == "before" for entry in raised.traceback)
        run.model.load_state_dict(checkpoint[0])
        run.optimizer.load_state_dict(checkpoint[1])
        run.train(BATCHES[2:])
        expected.train(BATCHES[2:])
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_gradients_alternate_between_slabs_and_nothing_grows() -> None:
    model = ladder()
    with queued_run(model) as (run, worker):
        run.train(BATCHES[:4])
        run.optimizer.wait()
        before = live_slab_bytes()
        worker.delay_s = lambda: 0.002
        run.train(BATCHES * 2)
        run.optimizer.wait()
        assert live_slab_bytes() <= before
        assert len(run.optimizer._updater.line._queued) == 0


def test_other_threads_may_read_while_the_model_trains() -> None:
    """As with any optimizer they may see a step half done; nothing hangs, and training does not notice."""
    model, batches = ladder(), BATCHES * 5
    expected = eager_run(model).train(batches)
    is_over, num_reads = threading.Event(), [0, 0, 0]
    with queued_run(model) as (run, worker):
        run.train(batches[:1])
        worker.delay_s = random_delay(11)

        def read(index: int) -> None:
            while not is_over.is_set():
                for param in run.model.parameters():
                    assert torch.isfinite(param.detach()).all()
                    num_reads[index] += 1

        readers = [threading.Thread(target=read, args=(index,)) for index in range(3)]
        for reader in readers:
            reader.start()
        try:
            run.train(batches[1:])
        finally:
            is_over.set()
            for reader in readers:
                reader.join(timeout=60)
        assert not any(reader.is_alive() for reader in readers)
        assert min(num_reads) > 7
        assert_same_tensors(weights_of(expected), weights_of(run))


# ----------------------------------------------------------------------------------------------------------------------
# A gather does not wait for the update of its bucket; whoever waits for the gather does.


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
            id=B0,
            params=names,
            numel=8,
            nbytes=32,
            state_nbytes=0,
            dtype="float32",
            trainable=True,
            shard_numels=Shards.of((8,)),
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
