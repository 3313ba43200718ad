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
@pytest.mark.parametrize(("kind", "seconds"), [("sleep", "fastest_"), ("eager", "same_"), ("elixir", "same_")])
def test_the_step_and_the_bubble_of_each_schedule_are_within_15_percent(
    kind: str, seconds: str, tmp_path: Path
) -> None:
    """Stages that sleep: the seconds of stages in the second fastest step predict the fastest, as other processes delay
    the rest. Stages that compute: those in each step give that step, as they change from step to step."""
    found, _ = spawn(compared, 2, kind, 7, folder=tmp_path, limit_s=500, timeout_s=400)
    assert found.keys() == {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"}
    for schedule, own in found.items():
        assert own[f"{seconds}step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["step_s"])
        assert own[f"{seconds}bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["bubble"])
