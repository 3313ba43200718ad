"""Several ranks, in real processes, train what one process trains: the whole step, updates, and micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import elixir_compile as elixir
from tests.run import ranks_checks, ranks_updates
from tests.run.processes import in_turn, spawn
from tests.run.ranks_training import batches, full, pair_of
from tests.run.training import divided_regions

pytest.importorskip("transformers")


# ----------------------------------------------------------------------------------------------------------------------
# Several ranks, in real processes, train what one process trains on the whole batch, and hold what they should.


LIMIT_S = 120.0


def all_of(world_size: int, folder: Path, *checks: list[Any]) -> list[Any]:
    """Return what each of `checks` returns on the first rank; what was trained must be right on all."""
    found = spawn(in_turn, world_size, ranks_checks.__name__, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S)
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
    found = all_of(2, tmp_path, *checks, ["read_and_reduce_apart"], ["clips_what_has_arrived"])[2]
    assert found["most_slabs"] <= 2 * found["module"]  # the next one may be there before the last one is gone
    assert found["slabs"] == 0
    assert found["held"] < found["whole"] / 2 + found["module"]
    assert found["held"] / 2 < found["most"] < found["held"] + 12 * found["module"]


def test_two_ranks_run_the_collectives_of_their_plan_and_evaluate_and_generate(tmp_path: Path) -> None:
    (found,) = all_of(2, tmp_path, ["runs_the_collectives_of_the_plan", 2])
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


# ----------------------------------------------------------------------------------------------------------------------
# Several ranks update when their plan says and keep state where it says: the bits of updates after the backward.


def test_the_moment_of_the_update_changes_no_bit(tmp_path: Path) -> None:
    for found in spawn(ranks_updates.updates_when_asked, 2, "odd", folder=tmp_path, limit_s=LIMIT_S):
        assert found["apart"] < ranks_updates.CLOSE
        assert found["queued"] > 0
        for how in ("in_backward, False", "auto, True"):
            assert "host" in found[how]["optim"]
            assert found[how]["says"]
            assert found[how]["update"] == ("in_backward" if how.startswith("in") else "across_steps")


def test_reads_wait_and_gathers_come_in_one_order(tmp_path: Path) -> None:
    checks = [["reads_wait"], ["gathers_in_one_order"], ["refuses_changed_gradients"]]
    spawn(in_turn, 2, ranks_updates.__name__, checks, folder=tmp_path, limit_s=LIMIT_S)


@pytest.mark.parametrize("when", ["before", "in it"])
def test_an_update_that_fails_on_one_rank_is_an_error_on_all(when: str, tmp_path: Path) -> None:
    others, own = spawn(ranks_updates.fails_on_one, 2, when, folder=tmp_path, timeout_s=20.0)
    assert own == ["ArithmeticError", "the kernel fell over"]
    assert others[0] == "PeerFailed"
    assert "rank 1" in others[1]
    if when == "before":
        assert "ArithmeticError: the kernel fell over" in others[1]


@pytest.mark.slow
def test_state_on_disk_with_an_empty_shard(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for found in spawn(ranks_updates.keeps_state_on_disk, 3, str(disk), folder=tmp_path, limit_s=LIMIT_S):
        assert "disk" in found["homes"]
        assert found["folders"] == ["rank0", "rank1", "rank2"]
        assert 0 < found["held"] <= found["planned"] + 2 * 4096 * found["files"]
        assert found["left"] == []


@pytest.mark.parametrize(
    ("name", "with_params"),
    [("AdamW", False), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("Lion", False), ("AdamW", True)))],
)
def test_masters_in_memory_and_on_disk(name: str, with_params: bool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    how = str(disk), name, with_params
    for in_memory, on_disk in spawn(ranks_updates.keeps_masters, 2, *how, folder=tmp_path, limit_s=LIMIT_S):
        assert "host" in in_memory
        assert "disk" in on_disk


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    others, own = spawn(ranks_updates.has_no_room, 2, str(disk), folder=tmp_path)
    assert own[0] == "DiskFull"
    assert others[0] == "PeerFailed"
    assert "DiskFull" in others[1]


# ----------------------------------------------------------------------------------------------------------------------
# Ranks that run their batches in micro-batches train the same numbers and send the same bytes.


def trains_divided(rank: int, world_size: int) -> dict[str, Any]:
    """Train a Llama on two ranks in one micro-batch and in four; return how far it is from its double, and counts."""
    found: dict[str, Any] = {"apart": [], "counts": [], "micro_batches": []}
    for number in (1, 4):
        pair = pair_of("llama of one layer", (world_size,), micro_batches=number)
        (batch,) = batches(1, rows=16)
        differences = pair.step(batch)
        found["apart"].append(max(*differences.values(), pair.apart()))
        found["micro_batches"].append(sorted(set(divided_regions(pair.compiled))))
        distributed.barrier()
        record = elixir.measure_step(lambda pair=pair, batch=batch: pair.own_backward(batch))
        found["counts"].append({verb: record.counts.get(verb, 0) for verb in ("gather", "reduce", "release")})
    return found


def test_two_ranks_in_four_micro_batches_train_as_one_process_and_reduce_as_often(tmp_path: Path):
    for found in spawn(trains_divided, 2, folder=tmp_path, limit_s=120.0, timeout_s=120.0):
        assert max(found["apart"]) < 1e-10
        assert found["micro_batches"] == [[1], [1, 4]]  # the mean over tokens runs on the whole batch of a rank
        assert found["counts"][0]["reduce"] == found["counts"][1]["reduce"] > 0


def needed_bytes(micro_batches: object, world_size: int, ids: torch.Tensor) -> int:
    pair = pair_of("llama", (world_size,), micro_batches=micro_batches, device_memory=1)
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        pair.compiled(ids)
    return caught.value.needed_bytes


def trains_what_does_not_fit(rank: int, world_size: int) -> dict[str, Any]:
    """Train batches of 8 and 12 rows on two ranks that do not fit whole; return how far gradients are from their
    double."""
    (batch,) = batches(1, rows=20)
    parts = (batch[:8], batch[8:])
    budget_bytes = sum(needed_bytes(number, world_size, parts[rank]) for number in (1, "auto")) // 2
    pair = pair_of("llama", (world_size,), micro_batches="auto", device_memory=budget_bytes)
    pair.compiled(parts[rank]).backward()
    torch.stack([pair.double(ids) for ids in parts]).mean().backward()
    grads = zip(pair.model.parameters(), pair.double.parameters(), strict=True)
    plan = elixir.compilations(pair.compiled)[-1].plan
    return {
        "apart": max((full(own.grad) - other.grad).abs().max().item() for own, other in grads),
        "micro_batches": sorted(set(divided_regions(pair.compiled))),
        "within": plan.prediction.device_peak_bytes <= budget_bytes,
    }


@pytest.mark.slow
def test_ranks_agree_on_a_number_that_divides_both_of_their_batches(tmp_path: Path):
    found = spawn(trains_what_does_not_fit, 2, folder=tmp_path, limit_s=120.0, timeout_s=120.0)
    assert found[0]["micro_batches"] == found[1]["micro_batches"]
    assert found[0]["micro_batches"][-1] in (2, 4)
    assert all(rank["within"] and rank["apart"] < 1e-10 for rank in found)
