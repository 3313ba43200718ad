"""Slabs that are page-locked for an accelerator: forked children do not have them, and pages are near the device."""

import mmap
import os
import threading
from collections.abc import Callable

import pytest
import torch

from elixir_compile.compat.platforms import Platform
from elixir_compile.compat.platforms import host as cores
from elixir_compile.runtime import bucket as slabs
from elixir_compile.runtime.bucket import Slab, pinned_slab_bytes

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
