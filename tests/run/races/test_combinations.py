"""Steps of every kind have the bits of plain lanes, whatever the moments of copies and compute."""

from pathlib import Path

import pytest

from tests.run.races.combinations import ALL, SHORT, Combination, assert_bits_are_those_of_plain_lanes


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in SHORT else pytest.mark.slow) for case in ALL]
)
def test_every_schedule_has_the_bits_of_plain_lanes(
    case: Combination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_bits_are_those_of_plain_lanes(case, tmp_path, monkeypatch)
