"""The worker: order, exceptions, the end of the process, forks, and what it leaves behind."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch.optim.adamw import adamw

from elixir_compile.runtime import updates
from elixir_compile.runtime.updates import UpdateLine


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


def test_a_process_that_ends_runs_queued_updates() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "ran\n"


def test_an_exception_that_was_never_raised_is_logged_at_exit() -> None:
    code = SLOW + "line.queue(lambda: 1 / 0, 'update b2')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
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
