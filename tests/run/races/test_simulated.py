"""The simulated lanes notice what they are for, and steps of every kind have the bits of plain lanes on them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Update
from elixir_compile.runtime.updates import UpdateLine
from tests.run.optim.test_streamed_updates import use_small_rooms
from tests.run.races.combinations import ALL, SHORT, Combination, assert_bits_are_those_of_plain_lanes, simulate
from tests.run.races.simulated import Simulated, SimulatedLane
from tests.run.updating import assert_equal, eager_run, hybrid_run, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# The simulated lanes notice what they are for: waits that are missing, and a thread with another current device.


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


# ----------------------------------------------------------------------------------------------------------------------
# Steps of every kind have the bits of plain lanes, whatever the moments of copies and compute.


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in SHORT else pytest.mark.slow) for case in ALL]
)
def test_every_schedule_has_the_bits_of_plain_lanes(
    case: Combination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_bits_are_those_of_plain_lanes(case, tmp_path, monkeypatch)
