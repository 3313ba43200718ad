"""Ranks that run their batches in micro-batches train the same numbers and send the same bytes."""

from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import elixir_compile as elixir
from tests.run.micro_batches.stepping import divided_regions
from tests.run.processes import spawn
from tests.run.ranks_models import batches
from tests.run.ranks_training import pair_of

pytest.importorskip("transformers")


def trains_divided(rank: int, world_size: int) -> dict[str, Any]:
    """Train a Llama on two ranks in one micro-batch and in four; return how far it is from its double, and counts."""
    found: dict[str, Any] = {"apart": [], "counts": [], "micro_batches": []}
    for number in (1, 4):
        pair = pair_of("llama", (world_size,), micro_batches=number)
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
