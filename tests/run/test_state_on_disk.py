"""Optimizer state on disk: bitwise what it is in memory, and what goes wrong is told."""

from pathlib import Path

import pytest
import torch

from elixir_compile.ir import Tier, Update
from elixir_compile.optim import disk_states
from elixir_compile.runtime import disk, disk_file, disk_queue
from tests.run import updating
from tests.run.training import Run, assert_same_tensors
from tests.run.updating import buckets_of, eager_run, hybrid_run, ladder, nan_staging, rows, weights_of

PAGE = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (disk, disk_file, disk_queue):
        monkeypatch.setattr(module, "DISK_BLOCK_BYTES", PAGE)
    monkeypatch.setattr(disk_states, "_STAGING_BYTES", 2 * PAGE)
    monkeypatch.setattr(updating, "WIDTH", 53)  # three pieces per bucket, the last one short


def state_of(run: Run) -> dict[str, torch.Tensor]:
    state = run.optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in sorted(state.items()) for name, value in sorted(entry.items())}


def assert_equal(expected: Run, got: Run) -> None:
    """Fail unless losses, weights and optimizer state are bitwise equal."""
    assert [loss.item() for loss in expected.losses] == [loss.item() for loss in got.losses]
    assert_same_tensors(weights_of(expected), weights_of(got))
    assert_same_tensors(state_of(expected), state_of(got))


@pytest.mark.parametrize("update", list(Update))
@pytest.mark.parametrize("home", ["split disk", "host disk"])
def test_bitwise_equal_to_torch_after_twenty_steps(home: str, update: Update, tmp_path: Path) -> None:
    model, batches = ladder(), rows(20)
    expected = eager_run(model).train(batches)
    with nan_staging(), hybrid_run(model, batches[0], home=home, update=update, disk_path=tmp_path) as run:
        run.train(batches)
        assert [bucket.placement.optim for bucket in buckets_of(run)] == [Tier.DISK] * 4
        assert [bucket.update for bucket in buckets_of(run)] == [update] * 4
        assert_equal(expected, run)
