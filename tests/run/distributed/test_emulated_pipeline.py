"""Steps and bubbles of torch's pipeline schedules, over an **emulated** link, are as the simulation says."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.processes import spawn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def compared(rank: int, world_size: int, kind: str, rounds: int) -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import pipeline

    return pipeline.compared(kind, rounds)


@pytest.mark.slow  # a minute of sleep
def test_stages_that_sleep_take_the_simulated_step_and_have_its_bubble(tmp_path: Path) -> None:
    found, _ = spawn(compared, 2, "sleep", 5, folder=tmp_path, limit_s=400, timeout_s=300)
    assert found.keys() == {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"}
    for schedule, own in found.items():
        assert own["step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own)
        assert own["bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own)


@pytest.mark.slow  # 30 s of CPU time
@pytest.mark.parametrize("kind", ["eager", "elixir"])
def test_stages_that_compute_do_too(kind: str, tmp_path: Path) -> None:
    """The seconds of each stage are those of the step before, so other processes on the cores change the ratios from
    step to step; medians over steps remain."""
    found, _ = spawn(compared, 2, kind, 9, folder=tmp_path, limit_s=500, timeout_s=400)
    for schedule, own in found.items():
        assert own["step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own)
        assert own["bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own)
