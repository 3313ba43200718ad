"""Steps on a device whose copies and results come at the worst legal moment have the bits of torch."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir_compile.capture.modules import executor_of
from elixir_compile.ir import Update
from elixir_compile.runtime import executor
from elixir_compile.runtime.updates import UpdateLine
from tests.run.optim.test_streamed_pieces import use_small_rooms
from tests.run.races.simulated import Simulated, SimulatedLane
from tests.run.training import Run, loss_of, on_host
from tests.run.updating import accumulate, assert_equal, eager_run, hybrid_run, ladder, rows

NUM_SEEDS = int(os.environ.get("ELIXIR_RACE_SEEDS", "1"))
POLICIES = ["early", "late", *(f"random {seed}" for seed in range(NUM_SEEDS))]
CASES = [
    ("split", Update.IN_BACKWARD, 0.0),
    ("host", Update.AFTER_BACKWARD, 0.5),
    ("host", Update.IN_BACKWARD, 0.0),
    ("host", Update.IN_BACKWARD, 0.5),
    ("host", Update.ACROSS_STEPS, 0.0),
    pytest.param("host", Update.IN_BACKWARD, 0.75, marks=pytest.mark.slow),
    pytest.param("split", Update.ACROSS_STEPS, 1.0, marks=pytest.mark.slow),
]


def simulate(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Let executors made from now on have simulated lanes."""
    kind, _, seed = policy.partition(" ")
    monkeypatch.setattr(executor, "lanes_for", lambda device: Simulated(device, kind, int(seed or 0)))


def step_with_another_thread(compiled: Callable[..., Any], optimizer: Any, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def were_late(run: Run) -> None:
    lanes = executor_of(run.model).lanes
    assert isinstance(lanes, Simulated)
    assert lanes.num_hidden
    assert lanes.h2d.queue.num_done or not on_host(run)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("home", "update", "share"), CASES)
def test_steps_have_the_same_bits(
    home: str, update: Update, share: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, policy)
    model, batches = ladder(), rows(5)
    expected = eager_run(model).train(batches)
    with hybrid_run(model, batches[0], home=home, update=update, share=share) as run:
        run.train(batches[:3]).train(batches[3:], step_with_another_thread)
        assert_equal(expected, run)
    were_late(run)


@pytest.mark.parametrize("policy", ["late", pytest.param("random 5", marks=pytest.mark.slow)])
def test_streamed_updates_in_small_pieces_have_the_same_bits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, policy)
    use_small_rooms(monkeypatch)
    model, batches = ladder(), rows(4)
    expected = eager_run(model).train(batches)
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, share=1.0) as run:
        assert_equal(expected, run.train(batches))


def test_a_step_with_streamed_updates_returns_before_their_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, "late")
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, share=1.0) as run:
        run.train(batches)
        lanes = executor_of(run.model).lanes
        assert isinstance(lanes, Simulated)
        assert lanes.d2h.queue.num_done < lanes.d2h.queue.num_issued
        run.optimizer.wait()
        assert lanes.d2h.queue.num_done == lanes.d2h.queue.num_issued


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("update", list(Update))
def test_accumulated_steps_have_the_same_bits(update: Update, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, policy)
    model, batches = ladder(), rows(6)
    expected = accumulate(eager_run(model), batches, 3)
    with hybrid_run(model, batches[0], home="host", update=update) as run:
        assert_equal(expected, accumulate(run, batches, 3))


@pytest.mark.parametrize("missing", ["copies behind compute", "waits of compute"])
def test_a_missing_wait_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, "early" if missing == "copies behind compute" else "late")
    if missing == "copies behind compute":
        monkeypatch.setattr(SimulatedLane, "behind_compute", SimulatedLane.beside_compute)
    else:
        monkeypatch.setattr(Simulated, "compute_waits", lambda self, event: None)
    model, batches = ladder(), rows(4)
    expected = eager_run(model).train(batches)
    with (
        hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run,
        pytest.raises(AssertionError),
    ):
        assert_equal(expected, run.train(batches))


def test_the_worker_makes_the_device_current_before_it_uses_lanes() -> None:
    lanes: Any = Simulated(torch.device("cpu"), "late")
    line = UpdateLine()
    with pytest.raises(AssertionError, match="device 0"):
        line.queue(lanes.h2d.mark, "update b0").wait()
    line.queue(lanes.h2d.mark, "update b0", lanes).wait()
