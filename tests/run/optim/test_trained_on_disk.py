"""Trained parameters on disk, beside their state: bitwise what they are in memory, and what goes wrong is told."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elixir_compile.ir import Tier, Update
from tests.run.updating import assert_equal, buckets_of, eager_run, hybrid_run, ladder, nan_staging, rows, small_pieces


@pytest.fixture(autouse=True)
def pieces() -> Iterator[None]:
    """Two or three pieces per bucket, the last one short, for gathers and for updates."""
    with small_pieces():
        yield


@pytest.mark.parametrize("update", list(Update))
def test_bitwise_equal_to_torch_after_twenty_steps(update: Update, tmp_path: Path) -> None:
    model, batches = ladder(), rows(20)
    expected = eager_run(model).train(batches)
    options = {"disk_path": tmp_path, "disk_check": update is Update.ACROSS_STEPS}
    with nan_staging(), hybrid_run(model, batches[0], home="disk", update=update, **options) as run:
        run.train(batches)
        homes = [bucket.placement.param for bucket in buckets_of(run)]
        assert homes.count(Tier.DISK) >= 3
        assert [bucket.update for bucket in buckets_of(run)] == [update] * 4
        assert_equal(expected, run)
