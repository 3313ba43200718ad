"""A rank that is three times slower, **emulated**: shares find it in the profiles, and train faster than equal rows."""

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.processes import spawn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def compared(rank: int, world_size: int, rounds: int) -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import emulated_skew

    return emulated_skew.compared(rounds)


@pytest.mark.slow  # 25 s of CPU time
def test_shares_are_three_to_one_and_at_least_one_and_a_half_times_as_fast(tmp_path: Path) -> None:
    """1.5 times the throughput of equal rows, by the CPU seconds of the rank with the most of them in each case.

    By wall time it is asked only if both ranks had cores of their own, which a median step with shares tells: it takes
    less than 1.2 times its CPU seconds. With shares both ranks compute at once and need two cores; with equal rows the
    quick rank waits two thirds of the step, so a machine with other work slows the step with shares alone.
    """
    found, other = spawn(compared, 2, 7, folder=tmp_path, limit_s=400, timeout_s=300)
    assert found["rows"] == other["rows"] == [12, 4]
    equal, shared = found["runs"]["equal rows"], found["runs"]["shares"]
    for loss, expected in zip(shared["losses"], equal["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
    assert found["cpu_ratio"] >= 1.5, (equal["cpu_s"], shared["cpu_s"])
    # With shares both ranks compute at once, so on a machine with other work they wait for cores, equal rows do not.
    has_its_cores = statistics.median(shared["wall_s"]) < 1.2 * statistics.median(shared["cpu_s"])
    assert found["throughput_ratio"] >= 1.5 or not has_its_cores, (equal["wall_s"], shared["wall_s"])
