"""Steps and bubbles of torch's pipeline schedules, over an **emulated** link, are as the simulation says."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.processes import spawn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CORE_SHARE = 0.9
"""CPU seconds over seconds of stages from which on a machine counts as free of other work."""


def compared(rank: int, world_size: int, kind: str, rounds: int) -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import pipeline

    return pipeline.compared(kind, rounds)


@pytest.mark.slow  # a minute of sleep
def test_stages_that_sleep_take_the_simulated_step_and_have_its_bubble(tmp_path: Path) -> None:
    """The seconds of stages in the second fastest step predict the fastest: other processes delay the rest."""
    found, _ = spawn(compared, 2, "sleep", 7, folder=tmp_path, limit_s=500, timeout_s=400)
    assert found.keys() == {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"}
    for schedule, own in found.items():
        assert own["fastest_step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["step_s"])
        assert own["fastest_bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["bubble"])


@pytest.mark.slow  # 30 s of CPU time
@pytest.mark.parametrize("kind", ["eager", "elixir"])
def test_stages_that_compute_do_too_if_each_rank_has_a_core(kind: str, tmp_path: Path) -> None:
    """The seconds of stages in a step predict the next, by medians. Without a core for each rank they change from step
    to step, and ranks wait for cores too."""
    found, _ = spawn(compared, 2, kind, 9, folder=tmp_path, limit_s=500, timeout_s=400)
    share = min(own["core_share"] for own in found.values())
    if share < CORE_SHARE:
        pytest.skip(f"other processes had the cores: stages had one for {share:.0%} of their seconds")
    for schedule, own in found.items():
        assert own["step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["step_s"])
        assert own["bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["bubble"])
