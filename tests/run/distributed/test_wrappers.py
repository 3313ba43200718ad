"""Models inside DistributedDataParallel, or cut along a tensor axis, train as under torch; others are refused by
name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.run import ddp_checks, tensor_checks
from tests.run.processes import in_turn, spawn

# ----------------------------------------------------------------------------------------------------------------------
# Models inside DistributedDataParallel train as under `aot_eager`, bit for bit; other wrappers are refused by name.


LIMIT_S = 120.0
VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
HOST_STATE = {"hybrid": True, "options": {"planner": "zero_offload"}}

QUICK: Mapping[str, Mapping[str, Any]] = {
    "compiled inside, gradients are views, the second backward is reduced": {
        "where": "inside",
        "ddp": VIEWS,
        "num_calls": 2,
    },
    "compiled in place, each rank leaves another layer out, a hook of the user": {
        "where": "in place",
        "ddp": UNUSED,
        "branches": True,
        "hook": "user",
    },
    "a graph that Dynamo cuts at the buckets, optimizer state on the host, clipped": {
        "clips": True,
        "width": 520,
        "ddp": {"bucket_cap_mb": 1},
        "lr": 1e-3,
        **HOST_STATE,
    },
}
"""Cases of `ddp_checks.trained`, several habits in each."""

SLOW: Mapping[str, Mapping[str, Any]] = {  # of `tests/run/habits/test_ranks_habits.py`
    "plain": {},
    "no unused parameters, but asked for": {"ddp": UNUSED},
    "static graph": {"ddp": {"static_graph": True}},
    "static graph, compiled inside, views": {"ddp": {"static_graph": True, **VIEWS}, "where": "inside"},
    "gradients are zeroed": {"ddp": VIEWS, "zeroes": True},
    "three backwards": {"num_calls": 3},
    "fp16 hook": {"hook": "fp16"},
    "PowerSGD": {"hook": "powerSGD"},
    "two graphs": {"breaks": True, "num_graphs": 2},
    "two graphs, compiled in place": {"breaks": True, "num_graphs": 2, "where": "in place", "ddp": UNUSED},
    "cut at the buckets, compiled inside": {
        "width": 520,
        "ddp": {"bucket_cap_mb": 1},
        "where": "inside",
        "lr": 1e-3,
    },
    "state on the host, clipped": {**HOST_STATE, "clips": True},
    "state on the host, views": {**HOST_STATE, "ddp": VIEWS},
    "state on the host, views, unused": {**HOST_STATE, "ddp": {**VIEWS, **UNUSED}, "branches": True},
    "everything on the host, were it alone": {"hybrid": True, "options": {"planner": "zero3_offload"}},
    "offloaded activations": {"options": {"activations": "offload", "planner": "zero3_offload"}},
}


def assert_trained(found: list[dict[str, Any]], names: Mapping[str, Any]) -> None:
    """Fail unless each case ended with the bits of `aot_eager`, and with the same on both ranks."""
    assert found == [{name: {"apart": 0.0, "ranks_differ": False} for name in names}] * 2


def test_two_ranks_in_ddp_train_bit_for_bit_as_under_aot_eager(tmp_path: Path) -> None:
    assert_trained(spawn(ddp_checks.trains_as_eager, 2, QUICK, folder=tmp_path, limit_s=LIMIT_S), QUICK)


def test_a_model_that_a_wrapper_takes_after_its_first_step_is_planned_again(tmp_path: Path) -> None:
    assert spawn(ddp_checks.follows_a_late_wrapper, 2, folder=tmp_path) == [0.0, 0.0]


@pytest.mark.parametrize("views", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_in_ddp_keeps_to_the_smallest_budget_with_its_buckets(views: bool, tmp_path: Path) -> None:
    ddp = {"gradient_as_bucket_view": views}
    for found in spawn(ddp_checks.keeps_to_its_budget, 2, ddp, folder=tmp_path):
        # Gradients that are views of the buckets show their memory to Python.
        held_bytes = found["peak"] + (0 if views else found["buckets"])
        assert found["budget"] - 512 < held_bytes <= found["budget"]
        assert found["params"] <= found["buckets"] <= found["counted"] < found["params"] + 512


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(ddp_checks.reports, 2, folder=tmp_path_factory.mktemp("reports"))


REFUSED = {
    "fully_shard": r"UnsupportedWrapper: FSDPNet inside FSDP .*prepare\(model, mesh=mesh\)",
    "fully_shard of layers": r"UnsupportedWrapper: Broken inside FSDP .*prepare\(model, mesh=mesh\)",
    "FullyShardedDataParallel": r"UnsupportedWrapper: Net inside FSDP .*prepare\(model, mesh=mesh\)",
    "its flat parameters": r"UnsupportedWrapper: .* inside FSDP .*prepare\(model, mesh=mesh\)",
    "DeepSpeed": r"UnsupportedWrapper: _Engine inside the engine of DeepSpeed .*prepare\(model, mesh=mesh\)",
    "DeepSpeed around": r"UnsupportedWrapper: .* inside the engine of DeepSpeed .*prepare\(model, mesh=mesh\)",
    "DataParallel": r"UnsupportedWrapper: Net inside DataParallel .*torchrun --nproc-per-node",
    "shared": r"UnsupportedWrapper: Net inside DistributedDataParallel .* `prepare\(model, mesh=...\)` has",
    "shared inside": r"UnsupportedWrapper: Net inside DistributedDataParallel .* `prepare\(model, mesh=...\)` has",
    "update": r"InvalidOption: option update: got 'in_backward', .* DistributedDataParallel reduces gradients when",
    "reduce_dtype": r"InvalidOption: option reduce_dtype: got 'float32', .* DistributedDataParallel",
    "mixed_precision": r"UnsupportedWrapper: Net inside DistributedDataParallel .* `torch.autocast`",
}
"""The text of each error of `ddp_checks.WRONG`."""


@pytest.mark.parametrize("name", ddp_checks.WRONG)
def test_another_wrapper_is_refused_by_name_before_the_first_step(name: str, reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert re.match(REFUSED[name], found["refuses"][name], re.DOTALL), found["refuses"][name]


def test_ranks_that_nothing_brings_together_are_warned_of_once(reports: list[dict[str, Any]]) -> None:
    for found in reports:
        (text,), inside, infers = found["warns_of_ranks_apart"]
        assert re.match(
            r"2 ranks run, but Net is neither .*prepare\(model, mesh=mesh\).*DistributedData", text, re.DOTALL
        )
        assert inside == infers == []


def test_a_model_of_torch_itself_in_ddp_is_captured_or_warned_of(reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert found["wraps_sequential"] == {"around": [0, 1], "inside": [1, 0], "in place": [0, 1]}


def test_moving_a_shared_model_leaves_its_parameters(reports: list[dict[str, Any]]) -> None:
    assert all(found["moves_nothing"] for found in reports)


def test_a_wrapper_that_is_gone_leaves_gradients_and_plans_to_the_model(reports: list[dict[str, Any]]) -> None:
    assert all(found["outlives_a_wrapper"] == [[True, 0.0], [False, 0.0]] for found in reports)


# ----------------------------------------------------------------------------------------------------------------------
# A model that torch has cut along a tensor axis trains under a plan as one process does on the whole batch.


TENSOR_LIMIT_S = 240.0
REFUSED_MESHES = {
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
    found = spawn(
        in_turn,
        world_size,
        tensor_checks.__name__,
        checks,
        folder=folder,
        limit_s=TENSOR_LIMIT_S,
        timeout_s=TENSOR_LIMIT_S,
    )
    print(found)
    return [list(each) for each in zip(*found, strict=True)]


def assert_trained_as_one(found: list[dict[str, Any]]) -> None:
    """Fail unless every rank trained what one process does, ran the planned collectives, and held what was planned."""
    for own in found:
        assert max(own["loss"], own["norm"], own["weights"]) < 1e-12
        assert own["moved"] > 1e-4
        assert sum(own["executed"].values()) == own["collectives"] > 0
        assert own["holds"], [own[what] for what in ("measured", "planned", "budget")]


def test_two_ranks_of_a_tensor_axis(tmp_path: Path) -> None:
    how = {"num_layers": 1, "options": {"device_memory": 1_020_000}}  # 0.97 MB would do, and all of it takes 2.7 MB
    checks = ["trains", how], ["equals_torch", "linear"], ["loads_blocks", None, str(tmp_path)]
    trained, same, loaded, refused = all_of(2, tmp_path, *checks, ["refuses"])
    assert_trained_as_one(trained)
    assert "host" in trained[0]["optim"]
    assert all(all(own.values()) for own in (*same, *loaded))
    for said in refused:
        for name, (error, fix) in REFUSED_MESHES.items():
            assert said[name].startswith(error)
            assert fix in said[name]


def test_two_by_two_ranks(tmp_path: Path) -> None:
    options = {"device_memory": 684_000}  # 0.62 MB would do, and all of it takes 1.6 MB
    how = {"shape": [2, 2], "plan": "sequence", "num_layers": 1, "options": options, "clip": "torch"}
    (trained,) = all_of(4, tmp_path, ["trains", how])
    assert_trained_as_one(trained)
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
        assert_trained_as_one(each)
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
    assert_trained_as_one(trained[0])
    assert_trained_as_one(trained[1])
    for own in made:
        assert own["share"] < 0.4
        assert own["same"]
        assert own["falls"]
