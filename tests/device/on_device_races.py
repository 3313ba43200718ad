"""Every step on a second device is ordered: judged by the check of races, on late copies, and by the bits.

The model is on device 1 while device 0 is the current one of every thread that does not say otherwise.
"""

import functools

import pytest
import torch

from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Lane, Update
from elixir_compile.runtime.executor import Executor
from tests.device import emulated
from tests.races.checked import Checked
from tests.run.races.combinations import in_another_thread
from tests.run.races.home import Home
from tests.run.training import Run, assert_same_tensors
from tests.run.updating import accumulate, eager_run, hybrid_run, ladder, rows

DEVICE = torch.device(emulated.NAME, 1)
SHORT = ("split", Update.ACROSS_STEPS, 0.5), ("host", Update.IN_BACKWARD, 0.0)
MODES = (
    *SHORT, ("split", Update.AFTER_BACKWARD, 0.0), ("split", Update.IN_BACKWARD, 0.0),
    ("split", Update.ACROSS_STEPS, 0.0), ("host", Update.AFTER_BACKWARD, 0.0), ("host", Update.ACROSS_STEPS, 0.0),
    ("host", Update.AFTER_BACKWARD, 0.5),
)  # fmt: skip


def batches(num: int) -> list[torch.Tensor]:
    return [batch.to(DEVICE) for batch in rows(num)]


def test_a_recording_starts_and_ends_with_an_idle_device() -> None:
    executor = Executor(DEVICE, "timed")
    with emulated.policy(emulated.LATE):
        executor.wait(executor.offload_saved("h", [torch.ones(64, device=DEVICE)]))
        recording = executor.ledger.start_recording()
        assert emulated.num_pending() <= 1, "the event of the begin"
        ticket = executor.ticket([])
        executor.prefetch(ticket, "h")
        (span,) = recording.stop()
        assert span.label == "prefetch h"
        executor.abandon()


@pytest.mark.parametrize("kind", [emulated.EARLY, emulated.LATE])
def test_the_gradients_of_two_graphs_add_up_behind_the_copy_of_the_first(kind: int) -> None:
    home = Home(device=DEVICE)
    with emulated.policy(kind):
        recording = home.executor.ledger.start_recording()
        home.backward(2, waits=False)
        found = {(span.lane, span.label): span.nbytes for span in recording.stop()}
    assert [param.grad.tolist() for param in home.own] == [[2.0] * 3, [2.0] * 5]
    assert found[Lane.D2H, "offload b0.grad"] == 32
    assert found[Lane.H2D, "prefetch b0.grad"] in (12, 20), "the last of two parameters that come back"


@functools.cache
def by_torch_on_the_host() -> Run:
    given = rows(8)
    return accumulate(eager_run(ladder()).train(given[:5]), given[5:], 3)


@pytest.mark.parametrize(
    ("home", "update", "share"),
    [pytest.param(*mode, marks=() if mode in SHORT else pytest.mark.slow) for mode in MODES],
)
def test_late_copies_are_ordered_and_change_no_bit(
    home: str, update: Update, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train by steps, then by steps whose backward runs in another thread, then by accumulation."""
    monkeypatch.setenv("ELIXIR_CHECK_RACES", "tests.races.checked")
    model, given = ladder().to(DEVICE), batches(8)
    with (
        emulated.policy(emulated.LATE),
        hybrid_run(model, given[0], home=home, update=update, share=share) as run,
    ):
        accumulate(run.train(given[:3]).train(given[3:5], in_another_thread), given[5:], 3)
    assert isinstance(executor_of(run.model).lanes, Checked)
    assert [loss.item() for loss in run.losses] == [loss.item() for loss in by_torch_on_the_host().losses]
    assert_same_tensors(by_torch_on_the_host().weights, {name: weight.cpu() for name, weight in run.weights.items()})
