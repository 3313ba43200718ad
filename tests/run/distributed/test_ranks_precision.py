"""Several ranks, in real processes, reduce 16-bit gradients in fp32, and skip together what overflows on one."""

from pathlib import Path
from typing import Any

import pytest

import elixir_compile as elixir
from tests.run import ranks_precision
from tests.run.processes import spawn

LIMIT_S = 120.0


def all_of(world_size: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns, by rank."""
    found = spawn(ranks_precision.all_of, world_size, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S)
    print(found)
    return found


def test_two_ranks_average_and_add_up_in_fp32_as_planned(tmp_path: Path) -> None:
    checks = [
        [name, [2], is_tight] for name in ("holds_what_is_planned", "reduces_in_fp32") for is_tight in (False, True)
    ]
    checks += [["sums_calls_in_fp32", "FFBFBFBB"], ["refuses_other_plans", str(tmp_path)]]
    for held_loose, held_tight, loose, tight, calls, _ in all_of(2, tmp_path, *checks):
        assert calls["apart"] < 1e-6 < calls["narrow"]
        assert loose["is_cut"] == tight["is_cut"] == [False, True]
        assert held_loose["param"] == loose["param"] == ["device"]
        assert "host" in held_tight["param"]
        assert "host" in tight["param"]
        for found in (held_loose, held_tight):
            own_bytes = found["measured"] - found["scratch"]  # the product at the peak may allocate less than the most
            assert 0 < own_bytes <= found["planned"] <= 1.01 * found["measured"]


@pytest.mark.parametrize(
    ("hardware", "reduced"), [pytest.param("2 x a100-40g", "float32", marks=pytest.mark.slow), ("a100-40g", None)]
)
def test_a_plan_without_ranks_counts_them(hardware: str, reduced: str | None) -> None:
    options = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "inner": "aot_eager"}
    (batch,) = ranks_precision.rows(1)
    found = elixir.plan(ranks_precision.Small(), (batch.bfloat16(),), hardware=hardware, options=options)
    assert {bucket.reduce_dtype for bucket in found.buckets} == {reduced}
    plain = elixir.plan(
        ranks_precision.Small(), (batch.bfloat16(),), hardware=hardware, options={**options, "reduce_dtype": None}
    )
    added_bytes = found.prediction.device_peak_bytes - plain.prediction.device_peak_bytes
    assert added_bytes > 0  # on one rank the sums of micro-batches, on several what is reduced


def test_copies_of_parts_are_averaged_in_fp32(tmp_path: Path) -> None:
    for (found,) in all_of(4, tmp_path, ["reduces_in_fp32", [2, 2], True]):
        assert found["is_cut"] == [False, True]
    for (found,) in all_of(2, tmp_path, ["reduces_in_fp32", [2, 1], False]):
        assert found["is_cut"] == [False]


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    checks = [["skips_together", None, True], ["skips_together", "float32", False], ["skips_in_fp32"]]
    for tight, wide, _ in all_of(2, tmp_path, *checks):
        assert "host" in tight["param"]
        for found in (tight, wide):
            assert found["steps"] == [4]
            assert found["scale"] == ranks_precision.SCALE / 2
            assert found["apart"] < 0.02 * found["moved"]
