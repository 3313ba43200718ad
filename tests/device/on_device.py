"""Run pytest in a process that has a device made of host memory: the type `fakegpu`, or CUDA over its stand-in.

python -m tests.device.on_device [files and options of pytest]
python -m tests.cuda_standin.build -m tests.device.on_device [files and options of pytest]
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = tuple(sorted(path.name for path in FOLDER.glob("on_device_*.py")))
OF_FAKEGPU = ("on_device_itself.py",)
"""Tests of what `fakegpu` is and lacks."""
AT_MOST_S = 1800


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with `arguments` in a process that has the device type, and return what it said."""
    command = [sys.executable, "-m", "tests.device.on_device", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=AT_MOST_S, cwd=FOLDER.parents[1], check=False
    )


def main(arguments: Sequence[str]) -> int:
    """Start the device, and run pytest here."""
    from tests.device import emulated
    from tests.run.processes import leave_out_what_is_logged

    emulated.start()
    leave_out_what_is_logged()
    named = [argument for argument in arguments if argument.startswith("tests/")]
    names = [name for name in FILES if emulated.NAME == "fakegpu" or name not in OF_FAKEGPU]
    files = [] if named else [str(FOLDER / name) for name in names]
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
