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


@pytest.mark.slow  # a minute of sleep, or 30 s of CPU time
@pytest.mark.parametrize("kind", ["sleep", "eager", "elixir"])
def test_the_step_and_the_bubble_of_each_schedule_are_within_15_percent(kind: str, tmp_path: Path) -> None:
    """The second fastest step of each schedule predicts the fastest: other processes on the cores delay the others."""
    found, _ = spawn(compared, 2, kind, 7, folder=tmp_path, limit_s=500, timeout_s=400)
    assert found.keys() == {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"}
    for schedule, own in found.items():
        assert own["fastest_step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["step_s"])
        assert own["fastest_bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["bubble"])
