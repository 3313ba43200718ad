"""The ring of staging buffers: aligned, reused, and no waiting for what cannot come."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elixir_compile.base.errors import DiskFailed
from elixir_compile.runtime.disk_store import DiskStore, StagingBuffers

PAGE = 4096
HUGE_PAGE = 2 << 20


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Nothing here compiles, and resetting the compiler before each test would take most of the time."""


@pytest.mark.parametrize(
    ("nbytes", "multiple"), [(1, PAGE), (PAGE + 1, PAGE), (HUGE_PAGE, HUGE_PAGE), (5 << 20, HUGE_PAGE)]
)
def test_buffers_are_aligned_and_share_nothing(nbytes: int, multiple: int) -> None:
    ring = StagingBuffers(3, nbytes)
    tensors = [ring.acquire().tensor for _ in range(3)]
    assert [tensor.data_ptr() % multiple for tensor in tensors] == [0, 0, 0]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [(len(tensor), tensor.unique().tolist()) for tensor in tensors] == [(nbytes, [value]) for value in range(3)]


def test_a_buffer_is_used_again() -> None:
    ring = StagingBuffers(1, PAGE)
    with ring.acquire() as first:
        address = first.tensor.data_ptr()
    second = ring.acquire()
    assert second.tensor.data_ptr() == address
    first.release()  # given back already: it belongs to `second`
    with pytest.raises(RuntimeError, match="holds 1 of 1 staging buffers"):
        ring.acquire()


def test_a_waiting_thread_gets_a_released_buffer() -> None:
    ring = StagingBuffers(1, PAGE)
    held = ring.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.acquire)
        while not ring._waiting:
            assert not waiting.done()
        held.release()
        assert waiting.result(30).tensor.data_ptr() == held.tensor.data_ptr()


def test_a_deadlock_of_waiting_threads_is_an_error() -> None:
    ring = StagingBuffers(2, PAGE)
    both_hold = threading.Barrier(2, timeout=30)

    def take_two() -> str:
        with ring.acquire():
            both_hold.wait()
            try:
                with ring.acquire():
                    return "two"
            except RuntimeError as error:
                return str(error)[:38]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(take_two), pool.submit(take_two)
        assert {first.result(30), second.result(30)} == {"two", "this thread holds 1 of 2 staging buffe"}


def test_a_buffer_comes_back_when_it_is_written(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    region = store.allocate("b0", PAGE)
    ring = StagingBuffers(1, PAGE)
    for value in range(20):
        with ring.acquire() as buffer:  # one buffer: waits for the write before
            buffer.release_after(region.write_from(buffer.tensor.fill_(value)))
            buffer.release()  # on its way back already
    with pytest.raises(ValueError, match="given back already"):
        buffer.release_after(region.read_into(buffer.tensor))
    with ring.acquire() as buffer:
        region.read_into(buffer.tensor.zero_()).wait()
        assert buffer.tensor.eq(19).all()
    store.close()


def test_a_failed_write_keeps_its_buffer_and_stops_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    gate = threading.Event()

    def fail(*_: object) -> int:
        gate.wait(30)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    ring = StagingBuffers(1, PAGE)
    buffer = ring.acquire()
    buffer.tensor.fill_(3)
    buffer.release_after(store.allocate("b0", PAGE).write_from(buffer.tensor))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.acquire)
        while not ring._waiting:
            assert not waiting.done()
        gate.set()
        with pytest.raises(DiskFailed, match="Input/output error"):
            waiting.result(30)
    with pytest.raises(DiskFailed, match="Input/output error"):
        ring.acquire()
    assert buffer.tensor.eq(3).all()
    store.close()


@pytest.mark.parametrize(("num_buffers", "nbytes"), [(0, 1), (1, -1)])
def test_no_buffers_and_negative_sizes_are_refused(num_buffers: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="needs at least 1 buffer"):
        StagingBuffers(num_buffers, nbytes)
