"""What Elixir asks a device that is neither CPU nor CUDA, inside and outside of a capture."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from elixir_compile.platforms.accelerator import AcceleratorPlatform
from elixir_compile.problem.machine import library_bytes
from tests.device import fakegpu

DEVICE = torch.device(fakegpu.NAME, 0)


def test_the_workspaces_of_libraries_are_measured_with_real_tensors_inside_a_capture() -> None:
    with FakeTensorMode():
        inside_bytes = library_bytes.__wrapped__(DEVICE)
    assert inside_bytes == library_bytes.__wrapped__(DEVICE) == 0


def test_a_workspace_that_a_product_leaves_is_counted_for_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = AcceleratorPlatform.allocated_bytes

    def allocated_bytes(platform: AcceleratorPlatform, device: torch.device) -> int:
        """Return the bytes; a library allocates its workspace of 8 MiB between the first call and the second."""
        before_bytes = real(platform, device)
        kept.append(torch.empty(8 << 20, dtype=torch.uint8, device=device))
        return before_bytes

    monkeypatch.setattr(AcceleratorPlatform, "allocated_bytes", allocated_bytes)
    with FakeTensorMode():
        assert library_bytes.__wrapped__(DEVICE) == 2 * (8 << 20)
