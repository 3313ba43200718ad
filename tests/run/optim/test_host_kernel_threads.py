"""The threads of a host pass: how many, where, and that the thread that launches goes on beside them."""

import gc
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base import process as control_groups
from elixir_compile.base.process import allowed_cores, num_usable_cores
from elixir_compile.compat.platforms.host import cores_of_node, num_host_threads
from elixir_compile.ir import Update
from elixir_compile.optim import update as updates
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.optim.host import HostThreads, host_threads_for, mixed_adamw
from elixir_compile.optim.host.kernel import GRAIN, parts
from elixir_compile.runtime.updates import UpdateLine
from tests.run.updating import hybrid_run, ladder, rows

SCALARS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


@given(st.integers(0, 20 * GRAIN), st.integers(1, 9))
def test_parts_cover_all_in_order_and_evenly(numel: int, num_threads: int) -> None:
    spans = parts(numel, num_threads)
    assert len(spans) <= num_threads
    assert [start for start, _ in spans] == ([0] + [stop for _, stop in spans[:-1]] if numel else [])
    assert numel == (spans[-1][1] if spans else 0)
    assert all(start < stop and start % GRAIN == 0 for start, stop in spans)
    lengths = [stop - start for start, stop in spans]
    assert not lengths or max(lengths) - min(lengths) <= 2 * GRAIN


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "most", "wanted"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (16, 1, 16, 15), (64, 4, 64, 15), (128, 1, 64, 64), (4, 8, 4, 1)],
)
def test_one_core_is_left_for_the_launcher(num_cores: int, num_ranks: int, most: int, wanted: int) -> None:
    assert num_host_threads(num_cores, num_ranks, most) == wanted


def test_the_cores_beside_a_device(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:c1:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("4-6,12,14-15\n")
    assert cores_of_node("0000:c1:00.0", tmp_path) == {4, 5, 6, 12, 14, 15}
    (device / "numa_node").write_text("-1\n")
    assert cores_of_node("0000:c1:00.0", tmp_path) == set()
    assert cores_of_node("0000:c2:00.0", tmp_path) == set()


def test_the_number_of_threads_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    host_threads_for.cache_clear()
    num_cores = num_usable_cores()
    with caplog.at_level(logging.INFO, "elixir_compile"):
        threads = host_threads_for()
        assert host_threads_for() is threads
    assert threads.num_threads == max(num_cores - 1, 1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{threads.num_threads} threads of {num_cores} cores for 1 local ranks" in line
    host_threads_for.cache_clear()


def test_host_threads_respect_the_cpu_quota(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    memberships = tmp_path / "cgroup"
    memberships.write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("450000 100000\n")
    monkeypatch.setattr(control_groups, "MEMBERSHIPS", memberships)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    host_threads_for.cache_clear()
    with caplog.at_level(logging.INFO, "elixir_compile"):
        assert host_threads_for().num_threads == 3
    assert "3 threads of 4 cores (a CPU quota: there are 64) for 1 local ranks" in caplog.text
    host_threads_for.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_only_host_threads_are_bound_to_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    threads = HostThreads(2, [core])
    found = threads.run(2 * GRAIN, lambda start, stop: (threading.get_ident(), os.sched_getaffinity(0)))
    assert [cores for _, cores in found] == [{core}, {core}]
    assert threading.get_ident() not in [thread for thread, _ in found]
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_the_update_thread_is_bound_to_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before, main = os.sched_getaffinity(0), threading.get_ident()
    core = max(before)
    found: list[tuple[bool, set[int], set[int]]] = []
    update = AdamWRule.update

    def watched(*args: Any) -> None:
        started: list[set[int]] = []
        thread = threading.Thread(target=lambda: started.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        found.append((threading.get_ident() == main, os.sched_getaffinity(0), *started))
        update(*args)

    monkeypatch.setattr(AdamWRule, "update", watched)
    monkeypatch.setattr(updates, "host_threads_for", lambda device: HostThreads(1, [core]))
    batches = rows(2)
    try:
        with hybrid_run(ladder(), batches[0], home="host", update=Update.ACROSS_STEPS) as run:
            run.train(batches)
            run.optimizer.wait()
    finally:  # there is one worker for all tests
        UpdateLine().queue(lambda: os.sched_setaffinity(0, before), "unbind").wait()
    assert found
    assert all(one == (False, {core}, {core}) for one in found)
    assert os.sched_getaffinity(0) == before


def test_all_parts_end_before_one_raises() -> None:
    ended = []

    def part(start: int, stop: int) -> int:
        if start == 0:
            raise RuntimeError("the first part")
        time.sleep(0.02)
        ended.append(start)
        return start

    threads = HostThreads(3)
    with pytest.raises(RuntimeError, match="the first part"):
        threads.run(3 * GRAIN, part)
    assert sorted(ended) == [GRAIN, 2 * GRAIN]
    assert threads.run(3 * GRAIN, lambda start, stop: stop) == [GRAIN, 2 * GRAIN, 3 * GRAIN]


def test_two_passes_at_once_share_the_host_threads() -> None:
    threads = HostThreads(2)
    found: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: found.append(threads.run(2 * GRAIN, lambda start, stop: stop)))
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[GRAIN, 2 * GRAIN]] * 8


def test_threads_end_when_host_threads_are_collected() -> None:
    before = set(threading.enumerate())
    threads = HostThreads(3)
    threads.run(3 * GRAIN, lambda start, stop: None)
    own = set(threading.enumerate()) - before  # others of the process may end meanwhile
    assert len(own) == 3
    del threads
    gc.collect()
    for thread in own:
        thread.join(2.0)
    assert not any(thread.is_alive() for thread in own)


def test_fork_and_exit_with_host_threads() -> None:
    code = (
        "import atexit, os\n"
        "from elixir_compile.optim.host import HostThreads\n"
        "from elixir_compile.optim.host.kernel import GRAIN\n"
        "threads = HostThreads(2)\n"
        "go = lambda: threads.run(2 * GRAIN, lambda start, stop: stop)\n"
        "atexit.register(go)\n"
        "assert go() == [GRAIN, 2 * GRAIN]\n"
        "child = os.fork()\n"
        "assert go() == [GRAIN, 2 * GRAIN]\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=60, check=False)
    assert done.returncode == 0


def _large(numel: int) -> list[torch.Tensor]:
    flat = [torch.zeros(numel) for _ in range(3)]
    return [*flat, torch.ones(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)]


def test_the_caller_goes_on_while_a_pass_runs() -> None:
    """With the GIL held for the pass, nothing at all would run between its begin and its end."""
    tensors = _large(8 << 20)
    mixed_adamw(*tensors, 1, **SCALARS)
    spans: list[tuple[float, float]] = []

    def passes() -> None:
        for step in range(2, 6):
            began_s = time.perf_counter()
            mixed_adamw(*tensors, step, threads=HostThreads(1), **SCALARS)
            spans.append((began_s, time.perf_counter()))

    worker = threading.Thread(target=passes)
    worker.start()
    ticks = []
    small = torch.zeros(64)
    while worker.is_alive():
        small.add_(1.0)
        ticks.append(time.perf_counter())
    worker.join()
    inside = [sum(began < tick < ended for tick in ticks) for began, ended in spans]
    assert statistics.median(inside) > 100


@pytest.mark.slow
@pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
def test_the_caller_keeps_half_of_its_rate() -> None:
    """Windows with and without a pass in turn, so that both see the same neighbours."""
    tensors = _large(32 << 20)
    small = torch.zeros(64)
    stop, go = threading.Event(), threading.Event()

    def passes() -> None:
        step = 1
        while not stop.is_set():
            if go.wait(0.01):
                mixed_adamw(*tensors, step, threads=HostThreads(1), **SCALARS)
                step += 1

    def rate_per_s() -> float:
        began_s, num = time.perf_counter(), 0
        while time.perf_counter() - began_s < 0.15:
            small.add_(1.0)
            num += 1
        return num / (time.perf_counter() - began_s)

    worker = threading.Thread(target=passes)
    worker.start()
    ratios = []
    for _ in range(9):
        go.clear()
        time.sleep(0.1)
        alone = rate_per_s()
        go.set()
        time.sleep(0.02)
        ratios.append(rate_per_s() / alone)
    stop.set()
    go.set()
    worker.join()
    assert statistics.median(ratios) >= 0.5
