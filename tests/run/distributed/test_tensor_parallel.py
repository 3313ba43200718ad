"""A model that torch has cut along a tensor axis trains under a plan as one process does on the whole batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.run import tensor_checks
from tests.run.processes import spawn

LIMIT_S = 150.0
REFUSED = {
    "whole mesh": ("UnsupportedModel: the mesh", "mesh=mesh['data']"),
    "no names": ("UnsupportedModel: the mesh", "mesh_dim_names="),
    "wrong name": ("KeyError", "'data'"),
    "uneven": ("UnsupportedModel: up.weight", "a size that the ranks divide"),
    "not prepared": ("NotPrepared", "elixir_compile.prepare"),
}
"""The error of each misuse, and its fix."""


def all_of(world_size: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns, on each rank."""
    found = spawn(tensor_checks.all_of, world_size, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S)
    print(found)
    return [list(each) for each in zip(*found, strict=True)]


def assert_trained(found: list[dict[str, Any]], *, is_tight: bool = True) -> None:
    """Fail unless every rank trained what one process does, ran the planned collectives, and held what was planned."""
    for own in found:
        assert max(own["loss"], own["norm"], own["weights"]) < 1e-12
        assert own["moved"] > 1e-4
        assert sum(own["executed"].values()) == own["collectives"] > 0
        if is_tight:
            assert own["measured"] <= own["budget"]
            assert own["planned"] == pytest.approx(own["measured"], rel=0.01)


def test_two_ranks_of_a_tensor_axis(tmp_path: Path) -> None:
    checks = ["trains", {"tightness": 1.05}], ["equals_torch", "linear"], ["refuses"]
    trained, same, refused = all_of(2, tmp_path, *checks)
    assert_trained(trained)
    assert "host" in trained[0]["optim"]
    assert all(all(own.values()) for own in same)
    for said in refused:
        for name, (error, fix) in REFUSED.items():
            assert said[name].startswith(error)
            assert fix in said[name]


def test_two_by_two_ranks(tmp_path: Path) -> None:
    shape = [2, 2]
    trained, saved = all_of(
        4,
        tmp_path,
        ["trains", {"shape": shape, "plan": "sequence", "tightness": 1.1, "clip": "torch"}],
        ["saves", shape, "vocabulary", str(tmp_path)],
    )
    assert_trained(trained, is_tight=False)
    assert all(all(own.values()) for own in saved)
