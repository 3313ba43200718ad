"""Run the tests that can run on the CUDA stand-in, a part after another, and count them: `make cuda`.

python -m tests.cuda_standin.run [--quick] [names of parts]
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.cuda_standin.build import ROOT, environment, library, missing
from tests.cuda_standin.runs import CANNOT_RUN, MOMENTS, RUNS

_HERE = "tests/cuda_standin"
_AT_MOST_S = 3600


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run in one process."""

    name: str
    arguments: Sequence[str]
    is_quick: bool = False


CANNOT: Mapping[str, str] = {
    "tests/gpu/test_cuda.py::test_sixty_percent_of_gpt2_124m_is_kept_and_copies_hide": "copies hide behind kernels",
    "tests/gpu/test_cuda.py::test_a_measured_device_is_one_that_could_be": "asks for the rates of a GPU",
}
"""Tests of `tests/gpu` that the stand-in cannot run, and what they need that it lacks."""

_ON_DEFAULT = ("-p", "tests.device.on_default", "-m", "not slow")

PARTS = (
    Part("itself", [f"{_HERE}/on_cuda_itself.py"], is_quick=True),
    Part("truth", [f"{_HERE}/on_cuda_truth.py"], is_quick=True),
    Part("waits", [f"{_HERE}/on_cuda_waits.py"]),
    Part("clock", [f"{_HERE}/on_cuda_clock.py", "-m", "not slow"], is_quick=True),
    Part("plans", [f"{_HERE}/on_cuda_clock.py", "-m", "slow"]),
    Part("orders", [*_ON_DEFAULT, f"{_HERE}/on_cuda_orders.py"]),
    Part("gpu", ["tests/gpu", "--ignore=tests/gpu/test_nccl.py", *(f"--deselect={name}" for name in CANNOT)]),
    Part("nccl", [f"{_HERE}/on_cuda_nccl.py", "tests/gpu/test_nccl.py"]),
    Part("device", []),
    Part("devices", [f"{_HERE}/on_cuda_devices.py"]),
    Part("random", [f"{_HERE}/on_cuda_random.py"]),
    Part("reserved", [f"{_HERE}/on_cuda_reserved.py", f"{_HERE}/on_cuda_pipeline.py"]),
    Part("runs", [*_ON_DEFAULT, *RUNS, *(f"--deselect={name}" for names in CANNOT_RUN.values() for name in names)]),
    Part(
        "moments",
        [*_ON_DEFAULT, "--moments", ",".join(["early", "late", *map(str, range(20))]), "-k", "offload", *MOMENTS],
    ),
    Part("kit", [f"{_HERE}/on_cuda_kit.py"]),
)


def main() -> int:
    """Run the parts, print a line for each, and return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[[], *(part.name for part in PARTS)], help="all parts if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="the parts of a minute, for CI")
    options = parser.parse_args()
    if why := missing():
        print(f"cuda: not run: {why}")
        return 0 if options.quick else 1
    chosen = [
        part
        for part in PARTS
        if part.name in options.parts or (not options.parts and (part.is_quick or not options.quick))
    ]
    began_s = time.monotonic()
    variables = dict(environment(library()))
    print(f"cuda: built in {time.monotonic() - began_s:.0f} s", flush=True)
    return max([_run(part, variables) for part in chosen], default=0)


def _run(part: Part, variables: dict[str, str]) -> int:
    """Run one part, and print how many of its tests passed, in how many seconds."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "tests.device.on_device", "-m", "slow or not slow", "-rfE", *part.arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=_AT_MOST_S, check=False
    )
    counts = re.findall(r"^.*\b(?:passed|failed|error)\b.*$", done.stdout, re.MULTILINE)
    print(
        f"cuda: {part.name}: {counts[-1] if counts else 'no test ran'}, {time.monotonic() - began_s:.0f} s", flush=True
    )
    if done.returncode:
        print(done.stdout[-12000:] + done.stderr[-4000:], flush=True)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
