"""A save beside the training holds the moment it was called at, and says what failed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.checkpoint import dcp
from elixir_compile.ir import Update
from tests.run.checkpointing import Training, assert_resumed, eager, everything, other
from tests.run.training import assert_same_tensors
from tests.run.updating import controlled_worker, hybrid_run, in_flight, ladder, rows

BATCHES = rows(6)


@contextmanager
def held_writer() -> Iterator[threading.Event]:
    """Yield what lets a save go on that has begun to write."""
    usual, gate = dcp.write, threading.Event()

    def write(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return usual(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "write", write)
        try:
            yield gate
        finally:
            gate.set()


def test_training_during_an_asynchronous_save_does_not_change_the_snapshot(tmp_path: Path) -> None:
    expected = eager(ladder()).train(BATCHES)
    with hybrid_run(ladder(), BATCHES[0], home="host", update=Update.ACROSS_STEPS) as run:
        training = Training(run).train(BATCHES[:3])
        with held_writer() as gate:
            handle = training.save(tmp_path / "run", step=3, asynchronous=True)
            training.train(BATCHES[3:])
            assert not handle.is_done
            assert not (tmp_path / "run").exists()
            gate.set()
            handle.wait()
        assert handle.is_done
        assert_resumed(expected, training, num_steps=6)
    resumed = eager(other(ladder()))
    assert resumed.load(tmp_path / "run").step == 3
    assert_resumed(expected, resumed.train(BATCHES[3:]), num_steps=3)


def test_a_save_waits_for_queued_updates(tmp_path: Path) -> None:
    with (
        controlled_worker() as worker,
        hybrid_run(ladder(), BATCHES[0], home="host", update=Update.ACROSS_STEPS) as run,
    ):
        training = Training(run).train(BATCHES[:2])
        run.optimizer.wait()
        worker.gate.clear()
        loss = run.compiled(BATCHES[2])
        loss.backward()
        run.optimizer.step()
        assert in_flight(run) > 0
        threading.Timer(0.2, worker.gate.set).start()
        elixir.save(tmp_path / "run", *training.parts)
        assert in_flight(run) == 0
        weights = run.weights
    model = other(ladder())
    elixir.load(tmp_path / "run", model)
    assert_same_tensors(weights, model.state_dict())


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    with held_writer() as gate:
        first = elixir.save(tmp_path / "run", ladder(), step=1, asynchronous=True)
        second: list[elixir.SaveHandle] = []
        thread = threading.Thread(target=lambda: second.append(elixir.save(tmp_path / "run", ladder(), step=2)))
        thread.start()
        thread.join(0.2)
        assert not first.is_done
        assert not second
        gate.set()
        thread.join()
    assert first.is_done
    assert second[0].is_done
    assert elixir.load(tmp_path / "run", ladder()).step == 2


def test_wait_raises_the_error_of_a_save_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elixir.save(tmp_path / "run", ladder(), step=1)
    with monkeypatch.context() as patch:

        def failing(*args: Any, **kwargs: Any) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(dcp, "write", failing)
        handle = elixir.save(tmp_path / "run", ladder(), step=2, asynchronous=True)
        with pytest.raises(elixir.DiskFailed, match="Input/output error"):
            handle.wait()
    assert "was not saved" in caplog.text
    assert elixir.load(tmp_path / "run", ladder()).step == 1
    elixir.save(tmp_path / "run", ladder(), step=3, asynchronous=True).wait()
    assert elixir.load(tmp_path / "run", ladder()).step == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_the_snapshot_takes_snapshot_bytes_and_is_freed_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = eager(ladder()).train(BATCHES[:1])
    left: list[int] = []
    usual = torch.save

    def save(*args: Any, **kwargs: Any) -> None:
        left.append(sum(tensor.untyped_storage().nbytes() for tensor in snapshot))
        usual(*args, **kwargs)

    snapshot: list[torch.Tensor] = []
    sizes: list[int] = []
    write = dcp.write

    def noted(folder: Path, sources: Any, **kwargs: Any) -> Any:
        snapshot.extend(sources.values())
        sizes.extend(tensor.nbytes for tensor in snapshot)
        return write(folder, sources, **kwargs)

    monkeypatch.setattr(dcp, "write", noted)
    monkeypatch.setattr(torch, "save", save)
    before = everything(training)
    handle = training.save(tmp_path / "run", asynchronous=True)
    handle.wait()
    assert handle.snapshot_bytes == left[0]
    assert left == sorted(left, reverse=True)
    assert left[-1] in sizes
    assert_same_tensors(before, everything(training))
