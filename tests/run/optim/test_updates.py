"""The worker of the updates, and updates for every placement, streamed share and moment: bitwise those of torch."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.adamw import adamw

import elixir_compile as elixir
from elixir_compile.base.errors import GradientsChanged
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier, Update, Verb
from elixir_compile.runtime import updates
from elixir_compile.runtime.updates import UpdateLine
from tests.covering import covering
from tests.run.training import Run, assert_same_tensors, by_elixir, fused_adamw, hybrid_adamw, loss_of, tight_bytes
from tests.run.updating import (
    Ladder,
    Several,
    accumulate,
    assert_equal,
    buckets_of,
    closure_step,
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
# The worker: order, exceptions, the end of the process, forks, and what it leaves behind.


def test_updates_run_in_the_order_in_which_they_were_queued() -> None:
    lines, ran = [UpdateLine(), UpdateLine()], []
    for number in range(20):
        lines[number % 2].queue(lambda number=number: ran.append(number), f"update b{number}")
    for line in lines:
        line.wait()
    assert ran == list(range(20))


def test_only_one_thread_runs_updates_and_it_is_not_the_caller() -> None:
    line, threads = UpdateLine(), set()
    for _ in range(3):
        line.queue(lambda: threads.add(threading.current_thread().name), "update b0").wait()
    assert threads == {"elixir updates"}


def boom() -> None:
    raise ArithmeticError("it fell over")


def test_an_exception_raises_once_and_drops_later_updates() -> None:
    line, other, ran = UpdateLine(), UpdateLine(), []
    gate = threading.Event()

    def hold() -> None:
        gate.wait(30)

    line.queue(hold, "update b0")
    line.queue(boom, "update b1")
    behind = line.queue(lambda: ran.append("behind"), "update b2")
    beside = other.queue(lambda: ran.append("beside"), "update b3")
    gate.set()
    with pytest.raises(ArithmeticError, match="it fell over") as raised:
        behind.wait()
    frames = [entry.name for entry in raised.traceback]
    assert "boom" in frames
    assert "`update b1`" in raised.value.__notes__[0]
    beside.wait()
    line.wait()
    assert ran == ["beside"]
    line.queue(lambda: ran.append("again"), "update b0").wait()
    assert ran == ["beside", "again"]


def test_the_switch_interval_is_short_only_during_updates() -> None:
    usual, line, seen = sys.getswitchinterval(), UpdateLine(), []
    line.queue(lambda: seen.append(sys.getswitchinterval()), "update b0").wait()
    updates._worker.drain()
    assert seen == [pytest.approx(5e-4)]
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_an_idle_worker_holds_no_tensors() -> None:
    line, tensor = UpdateLine(), torch.ones(3)
    reference = weakref.ref(tensor)

    def work(tensor: torch.Tensor = tensor) -> None:
        tensor.add_(1)

    line.queue(work, "update b0").wait()
    del tensor, work
    updates._worker.drain()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("numel", [1, 15, 1023, 70_001])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_bits_of_the_worker_do_not_depend_on_threads(numel: int, num_threads: int) -> None:
    """Chunks of the fused kernel end where vectors do, so their number changes nothing."""

    def tensors() -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(numel)
        return [[torch.randn(numel, generator=generator)] for _ in range(3)]

    def update(values: list[list[torch.Tensor]]) -> None:
        weights, grads, means = values
        squares, steps = [means[0].square()], [torch.zeros(())]
        for _ in range(3):
            adamw(
                weights, grads, means, squares, [], steps, fused=True, amsgrad=False, lr=1e-2, beta1=0.9,
                beta2=0.999, weight_decay=0.01, eps=1e-8, maximize=False,
            )  # fmt: skip

    usual = torch.get_num_threads()
    here, there, seen = tensors(), tensors(), []
    try:
        torch.set_num_threads(1)
        update(here)
        torch.set_num_threads(num_threads)
        line = UpdateLine()
        line.queue(lambda: seen.append(torch.get_num_threads()), "update b0")
        line.queue(lambda: update(there), "update b0")
        line.wait()
    finally:
        torch.set_num_threads(usual)
    assert seen == [num_threads]
    for first, second in zip(here, there, strict=True):
        assert torch.equal(first[0], second[0])


SLOW = """
import sys, time, threading
from elixir_compile.runtime.updates import UpdateLine
line = UpdateLine()
line.queue(lambda: time.sleep(0.3), "update b0")
line.queue(lambda: print("ran", flush=True), "update b1")
"""


def test_a_process_that_ends_runs_queued_updates_and_logs_an_exception_that_was_never_raised() -> None:
    code = SLOW + "line.queue(lambda: 1 / 0, 'update b2')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "ran\n"
    assert "an update of the last step failed" in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_waits_and_the_child_gets_its_own_worker() -> None:
    line, ran = UpdateLine(), []
    before = line.queue(lambda: time.sleep(0.1) or ran.append("before"), "update b0")
    child = os.fork()
    if child == 0:
        is_right = ran == ["before"] and before.is_done
        line.queue(lambda: ran.append("in the child"), "update b1").wait()
        os._exit(0 if is_right and ran == ["before", "in the child"] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    line.queue(lambda: ran.append("in the parent"), "update b2").wait()
    assert ran == ["before", "in the parent"]


def test_many_threads_may_queue_and_wait() -> None:
    counts = [0] * 8

    def work(index: int) -> None:
        line = UpdateLine()
        for _ in range(50):
            before = counts[index]
            line.queue(lambda: counts.__setitem__(index, counts[index] + 1), f"update b{index}").wait()
            assert counts[index] == before + 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert counts == [50] * 8


# ----------------------------------------------------------------------------------------------------------------------
# Bitwise `torch.optim.AdamW(fused=True)`: for every placement, streamed share and moment of the update.


STEPS = 20
COMBINATIONS = [
    *((home, update, 0.0) for home in ("device", "split", "host") for update in Update),
    *(("host", Update.ACROSS_STEPS, share) for share in (0.5, 1.0)),
    ("split", Update.ACROSS_STEPS, 0.5),
    *(pytest.param("host", Update.ACROSS_STEPS, share, marks=pytest.mark.slow) for share in (0.25, 0.75)),
    pytest.param("split", Update.ACROSS_STEPS, 1.0, marks=pytest.mark.slow),
    ("host", Update.IN_BACKWARD, 0.5),
    ("split", Update.AFTER_BACKWARD, 0.5),
]


@pytest.mark.parametrize(("home", "update", "share"), COMBINATIONS)
def test_bitwise_equal_to_torch_after_twenty_steps(home: str, update: Update, share: float) -> None:
    model, batches = ladder(), rows(STEPS)
    expected = eager_run(model).train(batches)
    with nan_staging(), hybrid_run(model, batches[0], home=home, update=update, share=share) as run:
        run.train(batches)
        assert [bucket.update for bucket in buckets_of(run)] == [update] * 4
        streamed = sum(bucket.placement.streamed for bucket in buckets_of(run))
        assert streamed == (0 if home == "device" else round(share * 4))
        assert_equal(expected, run)


@pytest.mark.parametrize("update", list(Update))
def test_schedulers_groups_and_frozen_parameters(update: Update) -> None:
    model, batches = ladder(), rows(8)
    model.steps[1].requires_grad_(False)

    def train(run: Run) -> Run:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=9)
        for batch in batches:
            run.train([batch])
            scheduler.step()
        return run

    expected = train(eager_run(model))
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        assert_equal(expected, train(run))


@pytest.mark.parametrize(("update", "num_backwards"), covering(list(Update), [1, 2, 4, 8]))
def test_accumulation(update: Update, num_backwards: int) -> None:
    model, batches = ladder(), rows(16 if num_backwards == 8 else 12)
    expected = accumulate(eager_run(model), batches, num_backwards)
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        assert_equal(expected, accumulate(run, batches, num_backwards))


def clipped_step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    loss.backward()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    torch.nn.utils.clip_grad_norm_(params, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("update", [Update.AFTER_BACKWARD, Update.ACROSS_STEPS])
def test_clipping(update: Update) -> None:
    model, batches = ladder(), rows(6)
    expected = eager_run(model).train(batches, clipped_step)
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        assert_equal(expected, run.train(batches, clipped_step))


def test_clipping_after_an_update_in_the_backward_is_refused() -> None:
    model, batches = ladder(), rows(2)
    with (
        hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run,
        pytest.raises(GradientsChanged, match=r"steps\.\d.* update=\"after_backward\""),
    ):
        run.train(batches, clipped_step)


@pytest.mark.parametrize("change", ["gradient", "lr"])
def test_changes_after_an_update_in_the_backward_are_refused(change: str) -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="split", update=Update.IN_BACKWARD) as run:
        run.train(batches[:1])
        loss_of(run.compiled, batches[1]).backward()
        if change == "lr":
            run.optimizer.param_groups[0]["lr"] = 0.5
        else:
            run.model.steps[0]._parameters["weight"].grad = torch.zeros(13, 13)
        with pytest.raises(GradientsChanged, match=change if change == "gradient" else "hyperparameter"):
            run.optimizer.step()


def test_a_second_backward_before_the_step_is_refused() -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        loss_of(run.compiled, batches[0]).backward()
        with pytest.raises(GradientsChanged, match=r"with optimizer\.accumulating"):
            loss_of(run.compiled, batches[1]).backward()


def test_gradients_stay_published_during_updates_in_the_backward() -> None:
    model, batches = ladder(), rows(10)
    expected = eager_run(model)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        run.train(batches[:2])
        expected.train(batches[:2])
        assert {bucket.closes for bucket in buckets_of(run)} == {Verb.OFFLOAD, Verb.RELEASE}
        started_early = False
        for batch in batches[2:]:
            recording = executor_of(run.model).ledger.start_recording()
            loss_of(run.compiled, batch).backward()
            loss_of(expected.compiled, batch).backward()
            theirs, ours = (
                {name: param.grad for name, param in own.model.named_parameters()} for own in (expected, run)
            )
            assert None not in ours.values()
            assert_same_tensors(theirs, ours)
            run.optimizer.step()
            expected.optimizer.step()
            run.optimizer.zero_grad()
            expected.optimizer.zero_grad()
            spans = recording.stop()
            last_run_s = max(span.end_s for span in spans if span.label.startswith("run bwd"))
            started_early |= any(span.start_s < last_run_s for span in spans if span.label.startswith("update"))
        assert started_early  # in at least one step: on a busy machine the thread of the updates may start late
        assert_equal(expected, run)


@pytest.mark.parametrize("home", ["host", "split"])
def test_delays_of_the_worker_change_nothing_in_the_backward(home: str) -> None:
    model, batches = ladder(), rows(40)
    expected = eager_run(model).train(batches)
    with (
        controlled_worker() as worker,
        nan_staging(),
        hybrid_run(model, batches[0], home=home, update=Update.IN_BACKWARD) as run,
    ):
        worker.delay_s = random_delay(5)
        assert_equal(expected, run.train(batches))
        assert worker.num_updates == 40 * 4


def test_closures() -> None:
    model, batches = ladder(), rows(5)

    expected = eager_run(model).train(batches, closure_step)
    for update in Update:
        with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
            assert_equal(expected, run.train(batches, closure_step))


def test_a_bucket_of_two_optimizers() -> None:
    """The weights have one, the biases another."""

    def both(make: Callable[..., torch.optim.Optimizer], params: Any) -> Several:
        params = list(params)
        return Several(make([p for p in params if p.dim() == dims]) for dims in (1, 2))

    model, batches = ladder(), rows(6)
    expected = eager_run(model, lambda params: both(fused_adamw, params)).train(batches)
    options = {"optimizer": lambda params: both(hybrid_adamw, params)}
    for update in Update:
        with nan_staging(), hybrid_run(model, batches[0], home="host", update=update, **options) as run:
            run.train(batches)
            assert_same_tensors(weights_of(expected), weights_of(run))


def test_two_models_at_once() -> None:
    batches = rows(6)
    expected = eager_run(ladder()).train(batches)
    runs: list[Run] = []
    for home in ("split", "split"):  # the budget of "host" has no room for another model
        with hybrid_run(ladder(), batches[0], home=home, update=Update.ACROSS_STEPS) as run:
            runs.append(run.train(batches[:1]))
    for batch in batches[1:]:
        for run in runs:
            run.train([batch])
    assert [in_flight(run) for run in runs] == [4, 4]
    for run in runs:
        assert_equal(expected, run)


@pytest.mark.parametrize(("option", "update"), [("auto", Update.ACROSS_STEPS), ("in_backward", Update.IN_BACKWARD)])
def test_the_update_option_selects_the_mode(option: str, update: Update) -> None:
    model, batches = ladder(), rows(1)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0]), update=option).train(batches)
    plan = elixir.compilations(run.model)[0].plan
    assert plan.update is update
    assert all(placement.update is Tier.HOST for placement in plan.placements)
    assert by_elixir(Ladder()).train(batches).compiled is not None
