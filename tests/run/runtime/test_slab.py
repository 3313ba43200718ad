"""Slabs: storages, alignment, lifetime."""

import gc
import io
import threading

import pytest
import torch

from elixir_compile.runtime.bucket import (
    ALIGN_BYTES,
    Slab,
    aligned_bytes,
    is_slab_memory,
    live_slab_bytes,
    peak_slab_bytes,
    reset_peak_slab_bytes,
)

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
