"""Everything in `on_device_*.py`, on a device type that is neither CPU nor CUDA, in one process of its own.

The device is made of host memory, but torch and Elixir see an accelerator: copies are late, freed memory is poisoned,
autograd runs the backward in a thread of the device. What only a real device can show is in `tests/gpu`.
"""

import pytest

from tests.device.on_device import FILES, in_a_process


def test_there_are_files() -> None:
    assert "on_device_itself.py" in FILES


@pytest.mark.parametrize("name", FILES)
def test_on_a_second_device(name: str) -> None:
    done = in_a_process(f"tests/device/{name}")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
