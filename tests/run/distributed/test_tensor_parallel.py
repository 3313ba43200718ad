"""A model that torch has cut along a tensor axis trains under a plan as one process does on the whole batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.run import tensor_checks
from tests.run.processes import spawn

LIMIT_S = 240.0
REFUSED = {
    "whole mesh": ("UnsupportedModel: the mesh", "mesh=mesh['data']"),
    "no names": ("UnsupportedModel: the mesh", "mesh_dim_names="),
    "wrong name": ("KeyError", "'data'"),
    "uneven": ("UnsupportedModel: up.weight", "a size that the ranks divide"),
    "twice": ("UnsupportedModel: the model", "one tensor axis"),
    "not prepared": ("NotPrepared", "elixir_compile.prepare"),
}
"""The error of each misuse, and its fix."""


def all_of(world_size: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns, on each rank."""
    found = spawn(tensor_checks.all_of, world_size, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S)
    print(found)
    return [list(each) for each in zip(*found, strict=True)]


def assert_trained(found: list[dict[str, Any]]) -> None:
    """Fail unless every rank trained what one process does, ran the planned collectives, and held what was planned."""
    for own in found:
        assert max(own["loss"], own["norm"], own["weights"]) < 1e-12
        assert own["moved"] > 1e-4
        assert sum(own["executed"].values()) == own["collectives"] > 0
        assert own["measured"] <= own["budget"] + 2048  # the loop keeps a few numbers for clipping, 1.3 KB
        assert own["planned"] == pytest.approx(own["measured"], rel=0.01)


def test_two_ranks_of_a_tensor_axis(tmp_path: Path) -> None:
    checks = ["trains", {"tightness": 1.05}], ["equals_torch", "linear"], ["loads_blocks", None, str(tmp_path)]
    trained, same, loaded, refused = all_of(2, tmp_path, *checks, ["refuses"])
    assert_trained(trained)
    assert "host" in trained[0]["optim"]
    assert all(all(own.values()) for own in (*same, *loaded))
    for said in refused:
        for name, (error, fix) in REFUSED.items():
            assert said[name].startswith(error)
            assert fix in said[name]


def test_two_by_two_ranks(tmp_path: Path) -> None:
    options = {"device_memory": 1_900_000}  # 1.72 MB would do, and all of it takes 3.5 MB
    how = {"shape": [2, 2], "plan": "sequence", "options": options, "clip": "torch"}
    (trained,) = all_of(4, tmp_path, ["trains", how])
    assert_trained(trained)
    assert "host" in trained[0]["optim"]


@pytest.mark.slow
def test_two_ranks_in_micro_batches_and_from_meta(tmp_path: Path) -> None:
    divided = {"micro_batches": 4}
    *trained, same, saved, made = all_of(
        2,
        tmp_path,
        ["trains", {"plan": "linear", "tightness": 1.05, "options": divided}],
        ["trains", {"plan": "sequence", "tightness": 1.05, "options": divided}],
        ["trains", {"plan": "vocabulary", "tightness": 1.05}],
        ["equals_torch", "sequence"],
        ["saves", None, "sequence", str(tmp_path)],
        ["from_meta", None],
    )
    for each in trained:
        assert_trained(each)
    assert trained[0][0]["executed"] == {"all_reduce": 48}  # each of 12 once per micro-batch
    assert trained[1][0]["executed"] == {"reduce_scatter_tensor": 11, "all_gather_into_tensor": 12, "all_reduce": 10}
    assert all(all(own.values()) for own in (*same, *saved))
    for own in made:
        assert own["share"] < 0.52
        assert own["same"]
        assert own["falls"]


@pytest.mark.slow
def test_fractions_of_gemini_along_a_tensor_axis(tmp_path: Path) -> None:
    """Along a tensor axis alone, and with a data axis beside it."""
    fractions = [(1.0, 1.0, 1.0), (0.0, 0.5, 0.0)]
    names = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
    for world_size, shape in ((2, None), (4, [2, 2])):
        checks = [
            [
                "trains",
                {"shape": shape, "options": {"placement_policy": "static", **dict(zip(names, each, strict=True))}},
            ]
            for each in fractions
        ]
        everything, half = all_of(world_size, tmp_path, *checks)
        for own in (*everything, *half):
            assert max(own["loss"], own["norm"], own["weights"]) < 1e-12
            assert own["moved"] > 1e-4
            assert sum(own["executed"].values()) == own["collectives"] > 0
        assert all(own["optim"] == ["host"] for own in everything)
        assert all(own["optim"] == ["device", "host"] for own in half)


@pytest.mark.slow
def test_two_by_two_ranks_by_inductor_and_from_meta(tmp_path: Path) -> None:
    shape = [2, 2]
    compiled = {"inner": "inductor", "micro_batches": 2}
    *trained, saved, loaded, made = all_of(
        4,
        tmp_path,
        ["trains", {"shape": shape, "plan": "sequence", "tightness": 1.1, "options": compiled}],
        ["trains", {"shape": shape, "plan": "linear", "tightness": 1.05}],
        ["saves", shape, "vocabulary", str(tmp_path)],
        ["loads_blocks", shape, str(tmp_path)],
        ["from_meta", shape],
    )
    assert all(all(own.values()) for own in (*saved, *loaded))
    assert_trained(trained[0])
    assert_trained(trained[1])
    for own in made:
        assert own["share"] < 0.4
        assert own["same"]
        assert own["falls"]
