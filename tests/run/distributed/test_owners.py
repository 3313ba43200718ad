"""Ranks that own whole parameters, for classes that update whole tensors: bits, bytes, checkpoints, errors."""

from pathlib import Path
from typing import Any

import pytest

from tests.run import owners_checks
from tests.run.owners_checks import NUM_STEPS, OTHER, WIDTH
from tests.run.processes import in_turn, spawn

LIMIT_S = 240.0


def on_ranks(num_ranks: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns on each rank."""
    how = {"folder": folder, "limit_s": LIMIT_S, "timeout_s": LIMIT_S}
    return spawn(in_turn, num_ranks, owners_checks.__name__, checks, **how)


def trains(name: str, num_layers: int, home: str, update: str) -> list[Any]:
    return ["has_the_bits_of_the_class", name, num_layers, home, update]


def assert_owned(of_ranks: list[dict[str, Any]], *, sees: bool) -> None:
    """Fail unless each matrix has one owner, ranks own as many matrices give or take one, and plans count what is
    held."""
    owners = of_ranks[0]["owners"]
    assert owners.pop() is None  # the small one
    counts = [owners.count(rank) for rank in range(len(of_ranks))]
    assert max(counts) - min(counts) <= 1
    for rank, found in enumerate(of_ranks):
        assert len(found["shapes"]) == counts[rank]
        assert all(sorted(shape) == [OTHER, WIDTH] for shape in found["shapes"])
        assert found["state_bytes"] == found["held_bytes"]
        assert found["flops"] * max(counts) == of_ranks[0]["flops"] * counts[rank]
        if sees:
            assert sorted(found["seen"]) == sorted(NUM_STEPS * found["shapes"])


QUICK = (("Muon", "device", "after_backward"), ("Adafactor", "host", "across_steps"))
SLOW = (
    *(("Muon", home, update) for home in ("host", "streamed") for update in ("in_backward", "across_steps")),
    *(("Soap", "streamed", update) for update in ("after_backward", "across_steps")),
    ("Adafactor", "streamed", "in_backward"),
)


@pytest.mark.parametrize(
    ("num_ranks", "num_layers", "cases"),
    [
        pytest.param(2, 3, QUICK, id="two ranks"),
        pytest.param(3, 2, (("Muon", "streamed", "across_steps"),), id="more ranks than matrices"),
        pytest.param(2, 5, SLOW, id="two ranks, each home", marks=pytest.mark.slow),
        pytest.param(3, 5, SLOW, id="three ranks, each home", marks=pytest.mark.slow),
    ],
)
def test_owners_update_with_the_bits_of_the_class(
    num_ranks: int, num_layers: int, cases: tuple[tuple[str, str, str], ...], tmp_path: Path
) -> None:
    checks = [trains(name, num_layers, home, update) for name, home, update in cases]
    for (name, home, _), of_ranks in zip(cases, zip(*on_ranks(num_ranks, tmp_path, *checks), strict=True), strict=True):
        assert_owned(list(of_ranks), sees=name == "Muon")
        assert all(found["homes"] == (["device"] if home == "device" else ["host"]) for found in of_ranks)


def test_owners_train_as_one_process(tmp_path: Path) -> None:
    """But for the order in which gradients are added up: the bf16 of Muon amplifies it, so its bits are compared."""
    adamw, adafactor = ["updates_elements_too"], ["trains_as_one_process", "Adafactor"]
    for elements, whole in on_ranks(2, tmp_path, adamw, adafactor):
        assert elements < 1e-12
        assert whole < 1e-6


@pytest.mark.slow  # 10 s of CPU time each
@pytest.mark.parametrize("name", ["Adafactor", "Soap"])
def test_the_state_of_two_owners_is_loaded_by_three_and_by_one(name: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, ["saves", name, str(tmp_path)])
    of_three = on_ranks(3, tmp_path, ["loads", name, str(tmp_path), 2])
    (of_one,) = on_ranks(1, tmp_path, ["loads", name, str(tmp_path), 2])
    assert of_three == [[2], [2], [2]]  # the small one is everywhere
    assert of_one == [4]


def test_what_cannot_be_owned_whole_is_refused(tmp_path: Path) -> None:
    for [(unknown, axes, other)] in on_ranks(2, tmp_path, ["refuses"]):
        assert unknown.startswith("InvalidOption: option whole: got 'layers.0.bias', expected names of parameters")
        assert axes.startswith("UnsupportedModel: the mesh")
        assert "beside it there is one of copies of each part" in axes
        assert other.startswith("RanksDiffer")
        assert "1 whole parameters" in other
