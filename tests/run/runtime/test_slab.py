"""Slabs of host memory: storages, alignment and lifetime, and pages that are locked for an accelerator."""

import gc
import io
import mmap
import os
import threading
from collections.abc import Callable

import pytest
import torch

from elixir_compile.compat.platforms import Platform
from elixir_compile.compat.platforms import host as cores
from elixir_compile.runtime import bucket as slabs
from elixir_compile.runtime.bucket import (
    ALIGN_BYTES,
    Slab,
    aligned_bytes,
    is_slab_memory,
    live_slab_bytes,
    peak_slab_bytes,
    pinned_slab_bytes,
    reset_peak_slab_bytes,
)

# ----------------------------------------------------------------------------------------------------------------------
# Slabs: storages, alignment, lifetime.


PAGE_BYTES = 4096


def test_a_slab_is_whole_pages_of_zeros() -> None:
    slab = Slab(PAGE_BYTES + 1, pin=False)
    assert slab.nbytes == 2 * PAGE_BYTES
    assert not slab.tensor(torch.uint8, (slab.nbytes,), 0).any()


def test_each_tensor_has_its_own_storage_of_its_own_bytes() -> None:
    slab = Slab(1 << 20, pin=False)
    first = slab.tensor(torch.float32, (3, 5), 0)
    second = slab.tensor(torch.bfloat16, (7,), ALIGN_BYTES)
    assert first.untyped_storage().nbytes() == 60
    assert second.untyped_storage().nbytes() == 14
    assert second.data_ptr() - first.data_ptr() == ALIGN_BYTES
    assert second.storage_offset() == 0


def test_saving_one_tensor_does_not_save_the_slab() -> None:
    file = io.BytesIO()
    torch.save(Slab(1 << 20, pin=False).tensor(torch.float32, (4,), 0), file)
    assert len(file.getvalue()) < 4096


def test_tensors_share_the_memory_of_the_slab() -> None:
    slab = Slab(256, pin=False)
    slab.tensor(torch.float32, (4,), ALIGN_BYTES).fill_(1.5)
    assert slab.tensor(torch.float32, (2, 2), ALIGN_BYTES).tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert slab.tensor(torch.float32, (4,), 0).tolist() == [0.0] * 4


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_tensors_work(shape: tuple[int, ...]) -> None:
    empty = Slab(0, pin=False).tensor(torch.float32, shape, 0)
    assert tuple(empty.shape) == shape


def test_a_scalar_works() -> None:
    assert Slab(64, pin=False).tensor(torch.float64, (), 0).item() == 0.0


@pytest.mark.parametrize(
    ("shape", "offset_bytes", "sentence"),
    [
        ((1,), 4, f"multiple of {ALIGN_BYTES}"),
        ((1,), -ALIGN_BYTES, "0 or more"),
        ((2048,), 0, "do not fit"),
        ((1,), 4096, "do not fit"),
    ],
)
def test_a_tensor_that_does_not_fit_the_slab_is_refused(
    shape: tuple[int, ...], offset_bytes: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Slab(100, pin=False).tensor(torch.float32, shape, offset_bytes)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Slab(-1, pin=False)


def test_aligned_bytes_rounds_up() -> None:
    assert [aligned_bytes(nbytes) for nbytes in (0, 1, ALIGN_BYTES, ALIGN_BYTES + 1)] == [
        0,
        ALIGN_BYTES,
        ALIGN_BYTES,
        2 * ALIGN_BYTES,
    ]


def test_a_tensor_keeps_the_memory_and_the_last_one_frees_it() -> None:
    gc.collect()
    before_bytes = live_slab_bytes()
    slab = Slab(PAGE_BYTES, pin=False)
    tensor = slab.tensor(torch.float32, (8,), 0)
    address = tensor.data_ptr()
    del slab
    assert live_slab_bytes() == before_bytes + PAGE_BYTES
    assert is_slab_memory(address)
    view = tensor.fill_(2.0)[4:]
    del tensor
    assert view.tolist() == [2.0] * 4
    del view
    assert live_slab_bytes() == before_bytes
    assert not is_slab_memory(address)


def test_memory_held_in_a_cycle_is_freed_by_the_collector() -> None:
    gc.collect()
    before_bytes = live_slab_bytes()
    cycle: list[object] = [Slab(PAGE_BYTES, pin=False)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert live_slab_bytes() == before_bytes


def test_peak_is_the_most_at_once() -> None:
    gc.collect()
    reset_peak_slab_bytes()
    base_bytes = live_slab_bytes()
    Slab(2 * PAGE_BYTES, pin=False)
    Slab(3 * PAGE_BYTES, pin=False)
    assert peak_slab_bytes() == base_bytes + 3 * PAGE_BYTES
    reset_peak_slab_bytes()
    assert peak_slab_bytes() == base_bytes


def test_other_memory_is_not_slab_memory() -> None:
    slab = Slab(PAGE_BYTES, pin=False)
    start = slab.tensor(torch.uint8, (1,), 0).data_ptr()
    assert is_slab_memory(start + PAGE_BYTES - 1)
    assert not is_slab_memory(torch.empty(16).data_ptr())


def test_slab_counts_are_thread_safe() -> None:
    gc.collect()
    before_bytes = live_slab_bytes()

    def cut() -> None:
        for _ in range(50):
            Slab(PAGE_BYTES, pin=False).tensor(torch.uint8, (1,), 0)

    threads = [threading.Thread(target=cut) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert live_slab_bytes() == before_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA only")
def test_without_cuda_a_pinned_slab_is_pageable() -> None:
    assert not Slab(PAGE_BYTES, pin=True).is_pinned


@pytest.mark.gpu
@pytest.mark.cuda
def test_a_pinned_slab_copies_asynchronously_and_unpins() -> None:
    for _ in range(3):  # the same pages are often mapped again: registering them twice would be refused
        slab = Slab(1 << 22, pin=True)
        tensor = slab.tensor(torch.float32, (1024,), ALIGN_BYTES).fill_(3.0)
        assert slab.is_pinned
        assert tensor.is_pinned()
        assert tensor.to("cuda", non_blocking=True).sum().item() == 3072.0
        del slab, tensor


# ----------------------------------------------------------------------------------------------------------------------
# Slabs that are page-locked for an accelerator: forked children do not have them, and pages are near the device.


CORES = sorted(os.sched_getaffinity(0))


class FakePlatform(Platform):
    """An accelerator that pins, and notes the cores and the current device of the thread that does."""

    cores: frozenset[int] = frozenset()
    pinned_with: torch.device | None = None

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._of_thread = threading.local()

    def current(self) -> torch.device:
        return getattr(self._of_thread, "device", torch.device("cuda", 0))

    def make_current(self, device: torch.device) -> None:
        self._of_thread.device = device

    def pin(self, address: int, nbytes: int) -> Callable[[int], object]:
        self.cores = frozenset(os.sched_getaffinity(0))
        self.pinned_with = self.current()
        return lambda address: None


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> FakePlatform:
    made = FakePlatform("fake")
    monkeypatch.setattr(slabs, "accelerator_platform", lambda: made)
    monkeypatch.setattr(slabs, "cores_beside", lambda device: frozenset(CORES[:1]))
    return made


def flags_of(slab: Slab) -> list[str]:
    """Return what the kernel knows of the mapping of `slab`; `dc`: a fork does not copy it."""
    at = slab.tensor(torch.uint8, (1,), 0).data_ptr()
    is_found = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                first, last = (int(end, 16) for end in words[0].split("-"))
                is_found = first <= at < last
            elif is_found and words[0] == "VmFlags:":
                return words[1:]
    raise AssertionError("no mapping at the address of the slab")


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="needs Linux")
def test_a_pinned_slab_is_not_copied_to_forked_children_and_any_other_is(platform: FakePlatform) -> None:
    before_bytes = pinned_slab_bytes()
    pinned = Slab(1 << 16, pin=True)
    assert pinned.is_pinned
    assert pinned_slab_bytes() == before_bytes + pinned.nbytes
    assert "dc" in flags_of(pinned)
    assert "dc" not in flags_of(Slab(1 << 16, pin=False))
    del pinned
    assert pinned_slab_bytes() == before_bytes


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_pages_are_locked_by_a_thread_on_the_cores_beside_the_device(platform: FakePlatform) -> None:
    Slab(1 << 16, pin=True)
    assert platform.cores == {CORES[0]}
    assert sorted(os.sched_getaffinity(0)) == CORES, "the caller's thread is not bound"


def test_the_thread_that_locks_pages_has_the_current_device_of_its_caller(platform: FakePlatform) -> None:
    platform.make_current(torch.device("cuda", 1))
    Slab(1 << 16, pin=True)
    assert platform.pinned_with == torch.device("cuda", 1), "with device 0, the driver would open a context there"


def test_cores_that_this_process_may_not_use_are_left_out() -> None:
    assert cores.on_cores({10**6}, lambda: sorted(os.sched_getaffinity(0))) == CORES
    with pytest.raises(ZeroDivisionError):
        cores.on_cores(CORES[:1], lambda: 1 // 0)
