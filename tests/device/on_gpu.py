"""Run on the GPU of this machine the tests of `tests/run` that run on the CUDA stand-in.

python -m tests.device.on_gpu [--newer] [options of pytest]

`--newer` runs the files of `runs.NEWER` instead.
Losses and weights are close to torch's there, not bitwise equal: host and GPU round an update otherwise.
"""

import sys

import pytest

from tests.cuda_standin.runs import CANNOT_RUN, NEWER, RUNS

_ABOUT_THE_HOST = (
    "tests/run/optim/test_updates.py::test_the_bits_of_the_worker_do_not_depend_on_threads",
    "tests/run/habits/test_budgets.py::test_micro_batches_keep_the_budget",
    "tests/run/habits/test_budgets.py::test_zeroed_gradients_keep_the_budget",
)
"""Tests whose tensors are of the host's generator or update. The stand-in does not mind that they are on the device."""


def main() -> int:
    """Run them, each on the device that torch makes tensors on by default."""
    options = [option for option in sys.argv[1:] if option != "--newer"]
    files = RUNS if len(options) == len(sys.argv[1:]) else NEWER
    left_out = [f"--deselect={name}" for names in (*CANNOT_RUN.values(), _ABOUT_THE_HOST) for name in names]
    return int(pytest.main(["-p", "tests.device.on_default", *files, *left_out, *options]))


if __name__ == "__main__":
    sys.exit(main())
