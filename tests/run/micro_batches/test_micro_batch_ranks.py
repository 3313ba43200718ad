"""Ranks that run their batches in micro-batches train the same numbers and send the same bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import elixir_compile as elixir
from tests.run.micro_batches.stepping import divided_regions
from tests.run.processes import spawn
from tests.run.ranks_models import batches
from tests.run.ranks_training import full, pair_of

pytest.importorskip("transformers")


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
