"""Every step runs with checked accesses: no two without an order; and each wait is needed for that."""

import threading
from typing import Any

import pytest
import torch

from elixir_compile.base.errors import InvalidOption
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Update
from elixir_compile.optim.streaming import Stream
from elixir_compile.runtime.bucket import RunningBucket, Slab
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.updates import UpdateLine
from tests.races.checked import Checked, CheckedLane
from tests.races.checker import Race
from tests.run.optim.test_streamed_updates import use_small_rooms
from tests.run.races.combinations import Shared
from tests.run.updating import accumulate, assert_equal, eager_run, hybrid_run, ladder, rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CHECK_RACES", "tests.races.checked")


def ignore(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Make the method `name` of `owner` do nothing."""
    monkeypatch.setattr(owner, name, lambda *args: None)


@pytest.mark.parametrize(
    ("home", "update", "share"),
    [
        ("device", Update.AFTER_BACKWARD, 0.0),
        ("split", Update.IN_BACKWARD, 0.0),
        ("host", Update.AFTER_BACKWARD, 0.5),
        ("host", Update.IN_BACKWARD, 0.0),
        ("host", Update.IN_BACKWARD, 0.5),
        ("host", Update.ACROSS_STEPS, 0.0),
        pytest.param("host", Update.ACROSS_STEPS, 0.5, marks=pytest.mark.slow),
        pytest.param("split", Update.ACROSS_STEPS, 1.0, marks=pytest.mark.slow),
    ],
)
def test_steps_have_no_race_and_the_same_bits(home: str, update: Update, share: float) -> None:
    model, batches = ladder(), rows(4)
    expected = eager_run(model).train(batches)
    with hybrid_run(model, batches[0], home=home, update=update, share=share) as run:
        run.train(batches)
        assert isinstance(executor_of(run.model).lanes, Checked)
        assert_equal(expected, run)


def test_a_sum_with_an_earlier_gradient_waits_for_the_offloaded_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = ladder(), rows(4)
    expected = accumulate(eager_run(model), batches, 2)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        assert_equal(expected, accumulate(run, batches, 2))
        ignore(monkeypatch, Checked, "host_waits")
        with pytest.raises(Race, match=r"offload b\d.grad, on d2h, writes the memory"):
            accumulate(run, batches, 2)


def test_gradients_of_two_graphs_and_hooks_wait_for_offloaded_gradients() -> None:
    torch.manual_seed(7)
    model, batches = Shared(), rows(3)
    runs = [eager_run(model)]
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run:
        runs.append(run)
        for each in runs:
            dict(each.model.named_parameters())["last.weight"].register_hook(lambda grad: 2 * grad)
            each.train(batches)
        assert_equal(*runs)


def test_an_update_in_the_backward_waits_for_the_last_gather_of_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = ladder(), rows(4)
    monkeypatch.setattr(
        RunningBucket, "home_read", property(lambda self: None, lambda self, event: None), raising=False
    )
    with (
        hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run,
        pytest.raises(Race, match=r"(?s)gather b\d, on h2d, reads.*'elixir updates', writes.*<-- here"),
    ):
        run.train(batches)


def test_a_streamed_update_in_the_backward_waits_for_gradients_that_leave_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batches, issue = ladder(), rows(3), Stream.issue
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD, share=1.0) as run:
        run.train(batches[:2])
        monkeypatch.setattr(Stream, "issue", lambda stream, updates, arrived: issue(stream, updates, None))
        with pytest.raises(Race, match=r"(?s)offload b\d.grad, on d2h, writes.*gather b\d.state, on h2d, reads"):
            run.train(batches[2:])


def test_a_piece_waits_until_the_copies_out_of_its_room_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = ladder(), rows(3)
    use_small_rooms(monkeypatch)
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, share=1.0) as run:
        run.train(batches[:2])
        monkeypatch.setattr(Stream, "_mark_left", lambda stream, at: stream._lanes.d2h.mark())
        with pytest.raises(Race, match=r"(?s)offload b\d.state, on d2h, reads.*gather b\d.state, on h2d, writes"):
            run.train(batches[2:])


def test_users_may_write_parameters_after_a_forward_and_read_gradients_after_a_backward() -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="host", update=Update.AFTER_BACKWARD) as run:
        run.train(batches[:1])
        loss = run.compiled(batches[1])
        own = executor_of(run.model).lanes
        own.touches((), [param.detach() for param in run.model.parameters()])
        loss.backward()
        own.touches([param.grad for param in run.model.parameters() if param.grad is not None])


@pytest.fixture
def lanes() -> Any:
    return lanes_for(CPU)


def on_host(numel: int) -> torch.Tensor:
    return Slab(4 * numel, pin=False).tensor(torch.float32, (numel,), 0)


def test_a_read_of_a_copy_without_a_wait_is_a_race(lanes: Any) -> None:
    home, flat = on_host(64), lanes.empty(256)
    with lanes.h2d.beside_compute(lanes.mark_compute()):
        lanes.h2d.copy(flat, home.view(torch.uint8))
    with pytest.raises(Race, match="on h2d, writes") as raised:
        lanes.touches((flat,))
    assert raised.value.nbytes == 256
    assert "test_races.py" in raised.value.first
    lanes.compute_waits(lanes.h2d.mark())


def test_a_read_of_a_copy_behind_its_event_is_no_race(lanes: Any) -> None:
    home, flat = on_host(64), lanes.empty(256)
    with lanes.h2d.beside_compute(lanes.mark_compute()):
        lanes.h2d.copy(flat, home.view(torch.uint8))
    lanes.compute_waits(lanes.h2d.mark())
    lanes.touches((flat,))
    home_again = home.view(torch.uint8)
    with pytest.raises(Race, match="the program, writes"):
        lanes.touches((), (home_again,))  # only compute waited, not the host


def test_a_copy_to_memory_that_compute_still_uses_is_a_race(lanes: Any) -> None:
    home, flat = on_host(64), lanes.empty(256)
    with lanes.h2d.beside_compute(), pytest.raises(Race, match="compute, writes"):
        lanes.h2d.copy(flat, home.view(torch.uint8))


def test_memory_that_is_freed_before_its_copy_is_done_is_a_race(lanes: Any) -> None:
    home, gone = on_host(64), lanes.empty(256)
    with lanes.d2h.behind_compute():
        lanes.d2h.copy(home.view(torch.uint8), gone)
    del gone
    with pytest.raises(Race, match="frees the memory"):
        lanes.touches((lanes.empty(8),))


def test_memory_that_is_freed_behind_its_copy_is_no_race(lanes: Any) -> None:
    home, kept = on_host(64), lanes.empty(256)
    with lanes.d2h.behind_compute():
        lanes.d2h.copy(home.view(torch.uint8), kept)
    lanes.compute_waits(lanes.d2h.mark())
    del kept
    lanes.touches((lanes.empty(8),))


@pytest.mark.parametrize("name", ["1", "tests.races.missing", "json", ".checked"])
def test_a_module_without_checks_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CHECK_RACES", name)
    with pytest.raises(InvalidOption, match=r"option ELIXIR_CHECK_RACES: got .*PYTHONPATH"):
        lanes_for(CPU)


def test_without_the_variable_the_lanes_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELIXIR_CHECK_RACES")
    plain = lanes_for(CPU)
    assert not isinstance(plain.h2d, CheckedLane)
    run = len
    assert plain.computes(run) is run


def test_what_another_thread_knows_of_the_host_orders_no_compute(lanes: Any) -> None:
    home, kept = on_host(64), lanes.empty(256)
    with lanes.d2h.behind_compute():
        lanes.d2h.copy(home.view(torch.uint8), kept)
    arrived = lanes.d2h.mark()

    def update() -> None:
        lanes.host_waits(arrived)
        lanes.touches((), (home,))

    line, is_done = UpdateLine(), threading.Event()
    queued = line.queue(update, "update b0", lanes)
    if queued.then(is_done.set):
        assert is_done.wait(5.0)
    with pytest.raises(Race, match="on d2h, reads"):
        lanes.touches((), (kept,))
    lanes.compute_waits(arrived)
