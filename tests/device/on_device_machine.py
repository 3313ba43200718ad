"""What Elixir asks a device that is neither CPU nor CUDA, inside and outside of a capture."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from elixir_compile.problem.machine import library_bytes
from tests.device import fakegpu

DEVICE = torch.device(fakegpu.NAME, 0)


def test_the_workspaces_of_libraries_are_measured_with_real_tensors_inside_a_capture() -> None:
    with FakeTensorMode():
        inside_bytes = library_bytes.__wrapped__(DEVICE)
    assert inside_bytes == library_bytes.__wrapped__(DEVICE) == 0


def test_a_workspace_that_a_product_leaves_is_counted_for_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = torch.accelerator.memory_allocated

    def allocated_bytes(device: torch.device) -> int:
        """Return the bytes; a library allocates its workspace of 8 MiB between the first call and the second."""
        before_bytes = real(device)
        kept.append(torch.empty(8 << 20, dtype=torch.uint8, device=device))
        return before_bytes

    monkeypatch.setattr(torch.accelerator, "memory_allocated", allocated_bytes)
    with FakeTensorMode():
        assert library_bytes.__wrapped__(DEVICE) == 2 * (8 << 20)
