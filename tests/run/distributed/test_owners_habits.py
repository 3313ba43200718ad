"""Ranks that own whole parameters in the hands of users: the bits of the class, and faults that nothing says."""

from pathlib import Path
from typing import Any

import pytest

from tests.run import owners_habits
from tests.run.owners_checks import WITH_MASTERS
from tests.run.owners_habits import CHANGES_GRADIENTS, CLASSES, FAULTS, HABITS, UPDATES, matrices
from tests.run.processes import in_turn, spawn

LIMIT_S = 560.0


def on_ranks(num_ranks: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns on each rank."""
    how = {"folder": folder, "limit_s": LIMIT_S, "timeout_s": LIMIT_S}
    return spawn(in_turn, num_ranks, owners_habits.__name__, checks, **how)


def cases_of(name: str) -> list[tuple[str, str, str]]:
    """Return the class, the home of the state and the time of the update of each case."""
    at_once = "after_backward" if name in CHANGES_GRADIENTS else "in_backward"
    return [("Muon", "host", at_once), ("Soap", "streamed", "across_steps"), ("Adafactor", "disk", "after_backward")]


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, num_ranks, marks=() if (name, num_ranks) == ("some matrices", 2) else pytest.mark.slow)
        for name in HABITS
        for num_ranks in (2, 3)
    ],
)
def test_the_bits_of_the_class_in_the_hands_of_users(name: str, num_ranks: int, tmp_path: Path) -> None:
    """Each matrix has one owner. Ranks without any train too."""
    cases = cases_of(name)[:1] if name == "some matrices" and num_ranks == 2 else cases_of(name)
    checks: list[list[Any]] = []
    for number, case in enumerate(cases):
        folder = tmp_path / f"state-{number}"
        folder.mkdir()
        checks.append(["keeps_its_bits", name, *case, str(folder)])
    for shapes in zip(*on_ranks(num_ranks, tmp_path, *checks), strict=True):
        assert sum(map(len, shapes)) == len(matrices(HABITS[name].model(), HABITS[name].whole))


@pytest.mark.slow  # `test_owners` has the quick ones
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_muon_is_muon(num_ranks: int, tmp_path: Path) -> None:
    """Not another class, on flat tensors, or in each micro-batch: each rank would see it."""
    found = on_ranks(num_ranks, tmp_path, *(["is_muon", fault] for fault in FAULTS))
    for of_rank in found:
        are_right = dict(zip(FAULTS, of_rank, strict=True))
        assert are_right.pop("none") == [True, True]
        assert not any(any(each) for each in are_right.values()), are_right


@pytest.mark.slow  # one to two minutes each
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", [*CLASSES, f"Muon{WITH_MASTERS}", f"Adafactor{WITH_MASTERS}"])
def test_the_bits_of_the_class_under_budgets(name: str, num_ranks: int, tmp_path: Path) -> None:
    """On all ranks a plan fits 60 % of what a step takes that keeps all on the device. Two gathered matrices, their
    gradients and the work space of an update are more than a quarter of it for some classes."""
    for (found,) in on_ranks(num_ranks, tmp_path, ["under_budgets", name]):
        for asked, each in found.items():
            percent = int(asked.split()[0])
            assert each.get("is equal", "needs" in each), found
            assert each.get("takes", percent) <= percent < each.get("needs", 100), found
        assert all("takes" in found[f"60 {update}"] for update in UPDATES), found
