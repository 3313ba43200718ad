"""Every step on a second device is ordered: races, late copies, saved activations, and streams of several threads."""

import functools
import threading

import pytest
import torch

from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Lane, Update
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lanes import StreamLane
from tests.device import emulated
from tests.races.checked import Checked
from tests.run.races.combinations import in_another_thread
from tests.run.races.home import Home
from tests.run.training import Run, assert_same_tensors
from tests.run.updating import accumulate, eager_run, hybrid_run, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# Every step on a second device is ordered: judged by the check of races, on late copies, and by the bits.
#
# The model is on device 1 while device 0 is the current one of every thread that does not say otherwise.


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


# ----------------------------------------------------------------------------------------------------------------------
# Activations of outstanding forwards on a second device: storages that are on the host already stay there.


FIRST_DEVICE = torch.device(emulated.NAME, 0)


def test_a_tensor_that_the_forward_made_on_the_host_comes_back_as_it_was() -> None:
    """As attention with dropout does: its meta kernel says that the seed is on the device."""
    executor = Executor(FIRST_DEVICE, "model")
    seed, values = torch.tensor(17), torch.arange(8.0, device=FIRST_DEVICE)
    executor.wait(executor.offload_saved("h", [values, seed, values[2:4], torch.tensor(3)]))
    ticket = executor.ticket([])
    there, same_seed, part, offset = executor.wait(executor.prefetch(ticket, "h"))
    assert (there.device, part.device) == (FIRST_DEVICE, FIRST_DEVICE)
    assert (same_seed.device.type, offset.device.type) == ("cpu", "cpu")
    assert (int(same_seed), int(offset)) == (17, 3)
    assert same_seed.data_ptr() == seed.data_ptr()
    assert torch.equal(there.cpu(), torch.arange(8.0))
    assert part.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()


def test_offloading_an_outstanding_forward_leaves_its_tensors_on_the_host_alone() -> None:
    executor = Executor(FIRST_DEVICE, "model")
    seed, values = torch.tensor(17), torch.arange(8.0, device=FIRST_DEVICE)
    ticket = executor.ticket([])
    executor.saved.note(ticket, "owner", 32, 0, [values, seed])
    recording = executor.ledger.start_recording()
    assert executor.saved.offload_outstanding()
    assert (values.untyped_storage().nbytes(), int(seed)) == (0, 17)
    executor.saved.restore(ticket)
    assert torch.equal(values.cpu(), torch.arange(8.0))
    found = [(span.lane, span.label, span.nbytes) for span in recording.stop()]
    assert found == [(Lane.D2H, "offload outstanding", 32), (Lane.H2D, "prefetch outstanding", 32)]
    assert [block.label for block in recording.taken] == ["prefetch outstanding"]


# ----------------------------------------------------------------------------------------------------------------------
# Streams and lanes of an accelerator that several threads use.


OTHER = torch.device(emulated.NAME, 1)


def test_the_current_device_and_stream_belong_to_a_thread() -> None:
    seen = []
    with torch.accelerator.device_index(1), torch.Stream(OTHER):
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
        thread.start()
        thread.join()
        assert torch.accelerator.current_device_index() == 1
    assert seen == [0]


def test_two_threads_in_blocks_of_a_lane_get_back_their_own_streams() -> None:
    lane, first = StreamLane(FIRST_DEVICE, "h2d"), torch.Stream(FIRST_DEVICE)
    lane_stream = lane._stream
    first_entered, second_entered, first_left = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, list[torch.Stream]] = {"step": [], "updates": []}

    def enters_first() -> None:
        with first:
            with lane.beside_compute():
                seen["step"].append(torch.accelerator.current_stream(FIRST_DEVICE))
                first_entered.set()
                assert second_entered.wait(10)
            seen["step"].append(torch.accelerator.current_stream(FIRST_DEVICE))
        first_left.set()

    def enters_second() -> None:
        before = torch.accelerator.current_stream(FIRST_DEVICE)
        assert first_entered.wait(10)
        with lane.beside_compute():
            seen["updates"].append(torch.accelerator.current_stream(FIRST_DEVICE))
            second_entered.set()
            assert first_left.wait(10)
        seen["updates"] += [torch.accelerator.current_stream(FIRST_DEVICE), before]

    threads = [threading.Thread(target=enters_first), threading.Thread(target=enters_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen["step"] == [lane_stream, first]
    inside, after, before = seen["updates"]
    assert inside == lane_stream
    assert after == before
