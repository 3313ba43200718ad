"""Run on the GPU of this machine the tests of `tests/run` that run on the CUDA stand-in.

python -m tests.device.on_gpu [options of pytest]
"""

import sys

import pytest

from tests.cuda_standin.runs import CANNOT_RUN, RUNS


def main() -> int:
    """Run them, each on the device that torch makes tensors on by default."""
    left_out = [f"--deselect={name}" for names in CANNOT_RUN.values() for name in names]
    return int(pytest.main(["-p", "tests.device.on_default", *RUNS, *left_out, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
