"""Everything in `on_device_*.py`, on a device type that is neither CPU nor CUDA, in one process of its own.

The device is made of host memory, but torch and Elixir see an accelerator: copies are late, freed memory is poisoned,
autograd runs the backward in a thread of the device. What only a real device can show is in `tests/gpu`.
"""

import pytest

from tests.device.on_device import in_a_process


def test_on_a_second_device() -> None:
    assert_passed()


@pytest.mark.slow
def test_on_a_second_device_at_length() -> None:
    assert_passed("-m", "slow")


@pytest.mark.slow
def test_the_tests_of_accelerators_on_a_second_device() -> None:
    assert_passed("tests/gpu/test_accelerator.py", "-m", "gpu and not cuda")


def assert_passed(*arguments: str) -> None:
    done = in_a_process(*arguments)
    said = done.stdout[-8000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    assert " passed" in said
    assert "skipped" not in said
