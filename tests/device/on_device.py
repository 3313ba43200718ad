"""Fixtures of the tests in `on_device_*.py`, which run in a process that has the device type `fakegpu`.

python -m tests.device.on_device [files and options of pytest]
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = tuple(sorted(path.name for path in FOLDER.glob("on_device_*.py")))
AT_MOST_S = 1800


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with `arguments` in a process that has the device type, and return what it said."""
    command = [sys.executable, "-m", "tests.device.on_device", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=AT_MOST_S, cwd=FOLDER.parents[1], check=False
    )


def main(arguments: Sequence[str]) -> int:
    """Start the device, and run pytest here."""
    from tests.device import fakegpu

    fakegpu.start()
    named = [argument for argument in arguments if ".py" in argument]
    files = [] if named else [str(FOLDER / name) for name in FILES]
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
