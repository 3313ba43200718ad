"""Ranks that own whole parameters, for classes that update whole tensors: bits, bytes, checkpoints, errors."""

from pathlib import Path
from typing import Any

import pytest

from elixir_compile.ir.share import owners_by_size
from tests.run import owners_checks
from tests.run.owners_checks import NUM_STEPS, OTHER, WIDTH, Shares
from tests.run.processes import in_turn, spawn

LIMIT_S = 240.0
PAGES_BYTES = 1 << 15
"""The most bytes of pages that files do not fill."""


def on_ranks(num_ranks: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns on each rank."""
    how = {"folder": folder, "limit_s": LIMIT_S, "timeout_s": LIMIT_S}
    return spawn(in_turn, num_ranks, owners_checks.__name__, checks, **how)


def assert_owned(of_ranks: list[dict[str, Any]], shares: Shares, *, sees: bool) -> None:
    """Fail unless each matrix has one owner, by the shares of the state, and plans count what is held."""
    owners = of_ranks[0]["owners"]
    assert owners.pop() is None  # the small one
    parts = [part for _, part in shares] or [1.0] * len(of_ranks)
    assert tuple(owners) == owners_by_size([WIDTH * OTHER] * len(owners), parts)
    counts = [owners.count(rank) for rank in range(len(of_ranks))]
    for rank, found in enumerate(of_ranks):
        assert len(found["shapes"]) == counts[rank]
        assert all(sorted(shape) == [OTHER, WIDTH] for shape in found["shapes"])
        assert found["state_bytes"] == found["held_bytes"]
        assert found["flops"] * max(counts) == max(each["flops"] for each in of_ranks) * counts[rank]
        if sees:
            assert sorted(found["seen"]) == sorted(NUM_STEPS * found["shapes"])


Case = tuple[str, str, str]
"""The class, the home of its state, and when it updates."""
QUICK: tuple[Case, ...] = (
    ("Muon with masters", "streamed", "across_steps"),
    ("Soap", "disk", "across_steps"),
)
SLOW: tuple[Case, ...] = (
    *(("Muon", home, update) for home in ("host", "streamed", "disk") for update in ("in_backward", "across_steps")),
    *(("Soap", home, update) for home in ("streamed", "disk") for update in ("after_backward", "across_steps")),
    *(("Adafactor", home, update) for home, update in (("host", "across_steps"), ("streamed", "in_backward"))),
    ("Adafactor", "disk", "in_backward"),
    ("Muon", "device", "after_backward"),
    *(
        (f"{name} with masters", home, update)
        for name in ("Muon", "Adafactor", "Soap")
        for home, update in (("device", "in_backward"), ("host", "across_steps"), ("disk", "across_steps"))
    ),
)
UNEQUAL: tuple[Case, ...] = (
    ("Muon", "device", "in_backward"),
    ("Soap", "streamed", "across_steps"),
    ("Adafactor", "disk", "after_backward"),
)


@pytest.mark.parametrize(
    ("num_layers", "shares", "cases"),
    [
        pytest.param(3, ((3, 0.5), (3, 0.5)), QUICK, id="two ranks"),
        pytest.param(2, ((4, 0.3), (2, 0.5), (0, 0.2)), QUICK[:1], id="more ranks than matrices, and unequal ones"),
        pytest.param(5, ((3, 0.5), (3, 0.5)), SLOW, id="two ranks, each home", marks=pytest.mark.slow),
        pytest.param(5, ((2, 1 / 3),) * 3, SLOW, id="three ranks, each home", marks=pytest.mark.slow),
        pytest.param(5, ((4, 0.75), (2, 0.25)), UNEQUAL, id="two unequal ranks", marks=pytest.mark.slow),
        pytest.param(5, ((2, 1.0), (4, 0.0)), UNEQUAL, id="all state on one of two ranks", marks=pytest.mark.slow),
        pytest.param(5, ((0, 0.6), (4, 0.2), (2, 0.2)), UNEQUAL, id="three unequal ranks", marks=pytest.mark.slow),
    ],
)
def test_owners_update_with_the_bits_of_the_class(
    num_layers: int, shares: Shares, cases: tuple[Case, ...], tmp_path: Path
) -> None:
    """Ranks with as many rows and as much of the state have no shares."""
    given = shares if len(set(shares)) > 1 else ()
    checks: list[list[Any]] = []
    for number, (name, home, update) in enumerate(cases):
        folder = tmp_path / f"state-{number}"
        folder.mkdir()
        checks.append(["has_the_bits_of_the_class", name, num_layers, home, update, str(folder), given])
    for (name, home, _), each in zip(cases, zip(*on_ranks(len(shares), tmp_path, *checks), strict=True), strict=True):
        of_ranks = list(each)
        assert_owned(of_ranks, given, sees=name.startswith("Muon"))
        expected = {"streamed": "host"}.get(home, home)
        assert all(found["homes"] == [expected] for found in of_ranks)
        assert all(found["on_disk"] is (home == "disk") for found in of_ranks)
        for found in of_ranks:
            least_bytes = found["all_held_bytes"] if home == "disk" else 0
            assert least_bytes <= found["disk_bytes"] <= 2 * least_bytes + (PAGES_BYTES if home == "disk" else 0)


def test_owners_train_as_one_process(tmp_path: Path) -> None:
    """But for the order in which gradients are added up: the bf16 of Muon amplifies it, so its bits are compared."""
    adamw, adafactor = ["updates_elements_too"], ["trains_as_one_process", "Adafactor"]
    for elements, whole in on_ranks(2, tmp_path, adamw, adafactor):
        assert elements < 1e-12
        assert whole < 1e-6


@pytest.mark.slow  # 10 s of CPU time each
@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("Adafactor", ("device",) * 3),
        ("Soap", ("device",) * 3),
        ("Soap", ("disk", "disk", "device")),
        ("Muon", ("host", "device", "disk")),
        ("Soap with masters", ("host", "disk", "device")),
    ],
)
def test_the_state_of_two_owners_is_loaded_by_three_and_by_one(
    name: str, homes: tuple[str, str, str], tmp_path: Path
) -> None:
    """From the first home to the second on three ranks, which are unequal, and to the third on one."""
    folder = str(tmp_path)
    on_ranks(2, tmp_path, ["saves", name, homes[0], folder])
    of_three = on_ranks(3, tmp_path, ["loads", name, homes[1], folder, 2, ((2, 0.5), (2, 0.25), (2, 0.25))])
    ((of_one,),) = on_ranks(1, tmp_path, ["loads", name, homes[2], folder, 2, ()])
    assert [found for (found,) in of_three] == [3, 2, 1]  # the small one is everywhere
    assert of_one == 4


def test_what_cannot_be_owned_whole_is_refused(tmp_path: Path) -> None:
    for [(unknown, axes, other)] in on_ranks(2, tmp_path, ["refuses"]):
        assert unknown.startswith("InvalidOption: option whole: got 'layers.0.bias', expected names of parameters")
        assert axes.startswith("UnsupportedModel: the mesh")
        assert "beside it there is one of copies of each part" in axes
        assert other.startswith("RanksDiffer")
        assert "1 whole parameters" in other
