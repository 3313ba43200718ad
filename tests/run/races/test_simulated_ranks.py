"""Two ranks whose copies, compute and collectives come at the worst legal moments have the bits of plain lanes."""

from pathlib import Path

import pytest

from tests.run.processes import spawn
from tests.run.races.combinations import POLICIES
from tests.run.races.simulated_ranks import bits_under

pytest.importorskip("transformers")

UPDATES = ("after_backward", "in_backward", "across_steps")


@pytest.mark.slow
@pytest.mark.parametrize("is_tight", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("update", UPDATES)
def test_two_ranks_have_the_bits_of_plain_lanes(update: str, is_tight: bool, tmp_path: Path) -> None:
    options = {"update": update, "is_tight": is_tight}
    assert all(spawn(bits_under, 2, options, list(POLICIES), folder=tmp_path, limit_s=900.0, timeout_s=300.0))
