"""What every test needs to know about the machine."""

import os

import pytest

# Read when torch is loaded. Threads that spin while they wait make tests ten times slower beside another process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; they are never faked."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch  # the planning half's tests run without it

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
