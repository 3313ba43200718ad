"""Several ranks, in real processes, train what one process trains on the whole batch, and hold what they should."""

from pathlib import Path
from typing import Any

import pytest

from tests.run import ranks_checks
from tests.run.processes import spawn

pytest.importorskip("transformers")

LIMIT_S = 120.0


def all_of(world_size: int, folder: Path, *checks: list[Any]) -> list[Any]:
    """Return what each of `checks` returns on the first rank; what was trained must be right on all."""
    found = spawn(ranks_checks.all_of, world_size, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S)
    print(found)
    for own in found:
        for (name, *arguments), result in zip(checks, own, strict=True):
            if name == "trains":
                is_single = arguments[1].get("dtype") == "float32"
                assert_trained(result, close=1e-6 if is_single else 1e-12)
    return found[0]


def assert_trained(found: dict[str, Any], *, close: float = 1e-12) -> None:
    """Fail unless losses, clip norms and weights are `close`, after steps that moved the weights."""
    assert max(found[what] for what in ("loss", "norm", "weights")) < close
    assert found["moved"] > 1e-4


def test_two_ranks_hold_the_planned_bytes_and_recover(tmp_path: Path) -> None:
    (held, _) = all_of(2, tmp_path, ["keeps_what_the_formula_says"], ["recovers", 1.1])
    # Beside it: one element per parameter that stands for it in autograd, and whole pages of host memory.
    assert 0 <= held["device"] - held["expected_device"] < 1024
    assert 0 <= held["host"] - held["expected_host"] < 4096 * held["slabs"]
    assert held["expected_host"] > 0
    assert held["expected_device"] + held["expected_host"] < 0.55 * 4 * held["whole"]


def test_two_ranks_with_state_hooks_and_replicated_parameters(tmp_path: Path) -> None:
    checks = ["has_states"], ["keeps_habits"], ["prepares"], ["averages_what_is_whole"], ["hands_out_new_means"]
    found = all_of(2, tmp_path, *checks, ["read_and_reduce_apart"], ["clips_what_has_landed"])[2]
    assert found["most_slabs"] <= 2 * found["module"]  # the next one may be there before the last one is gone
    assert found["slabs"] == 0
    assert found["held"] < found["whole"] / 2 + found["module"]
    assert found["held"] / 2 < found["most"] < found["held"] + 12 * found["module"]


def test_two_ranks_run_the_collectives_of_their_plan(tmp_path: Path) -> None:
    found, _ = all_of(2, tmp_path, ["runs_the_collectives_of_the_plan", 2], ["evaluates_and_generates"])
    assert found["verbs"] == ["gather", "reduce"]
    assert "host" in found["optim"]


@pytest.mark.slow
def test_three_ranks_in_single_precision_with_batches_of_other_sizes(tmp_path: Path) -> None:
    llama = {"dtype": "float32", "tightness": 1.15}
    _, found = all_of(3, tmp_path, ["weighs_uneven_batches"], ["trains", "llama of one layer", llama])
    assert_trained(found, close=1e-6)
    assert found["param"] == ["device", "host"]


@pytest.mark.slow
def test_four_ranks_one_rank_and_two_copies_of_two_parts(tmp_path: Path) -> None:
    uneven = {"tightness": 1.2, "num_micro_batches": 4}
    copies = {"shape": [2, 2], "optimizer": "adamw"}
    ledger = ["runs_the_collectives_of_the_plan", 2, 2]
    *found, ran = all_of(4, tmp_path, ["trains", "odd", uneven], ["trains", "odd", copies], ledger)
    for each in found:
        assert_trained(each)
    assert "host" in found[0]["optim"]
    assert ran["verbs"] == ["average", "gather", "reduce"]
    assert ran["copies"] == 2


@pytest.mark.slow
def test_low_rank_corrections_of_frozen_layers(tmp_path: Path) -> None:
    (found,) = all_of(2, tmp_path, ["trains", "adapted", {"tightness": 1.1}])
    assert_trained(found)


def test_adapters_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (found,) = all_of(2, tmp_path, ["trains", "peft", {}])
    assert_trained(found)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_number_of_ranks(name: str, world_size: int, tmp_path: Path) -> None:
    options = [
        {"dtype": "float64", "optimizer": "hybrid", "tightness": 1.15},
        {"dtype": "float64", "optimizer": "adamw", "num_micro_batches": 4},
        {"dtype": "float32", "optimizer": "hybrid", "num_micro_batches": 4, "tightness": 1.15},
    ]
    found = all_of(world_size, tmp_path, *(["trains", name, how] for how in options))
    for each, how in zip(found, options, strict=True):
        assert_trained(each, close=1e-6 if how["dtype"] == "float32" else 1e-12)
    if world_size > 1:
        assert "host" in found[0]["optim"]
