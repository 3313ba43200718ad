"""Every kind of step on the genuine streams and events, with late copies: no access is without an order.

The plugin `tests.device.on_default` puts all on the device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.ir import Tier, Update
from elixir_compile.runtime.executor import Executor, synchronize_executors
from tests.run.races.combinations import SHORT, Combination, assert_does, batches_of, in_another_thread, run_of
from tests.run.races.home import B0, Home, in_backward
from tests.run.training import Run
from tests.run.updating import accumulate, move_state

DEVICE = torch.device("cuda", 0)
CASES = (
    *SHORT,
    Combination(update=Update.ACROSS_STEPS, home="split", share=0.5),
    Combination(update=Update.IN_BACKWARD, num_backwards=3),
    Combination(update=Update.AFTER_BACKWARD, has_hooks=True),
    Combination(update=Update.ACROSS_STEPS, activations="offload", micro_batches=4, is_mixed=True),
)


def trained(run: Run, case: Combination) -> Run:
    """Train by steps, some of them with a backward in another thread, or by accumulation."""
    given = batches_of(case, 6)
    if case.num_backwards > 1:
        return accumulate(run, given, case.num_backwards)
    return run.train(given[:3]).train(given[3:], in_another_thread)


def assert_finite(run: Run) -> None:
    """Fail if anything read freed memory, which is NaN."""
    run.optimizer.wait()
    assert all(map(torch.isfinite, run.losses))
    assert all(param.isfinite().all() for param in run.model.parameters())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_access_of_a_step_has_an_order(case: Combination, tmp_path: Path) -> None:
    with run_of(case, tmp_path) as run:
        assert_finite(trained(run, case))
        assert_does(run, case)


def test_each_access_of_a_measured_step_has_an_order(tmp_path: Path) -> None:
    case = SHORT[0]
    with run_of(case, tmp_path) as run:
        trained(run, case)
        elixir.measure_step(lambda: run.train(batches_of(case, 1)), device="cuda")
        assert_finite(run)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("update", Update)
def test_what_eager_code_reads_and_writes_between_steps_has_an_order(
    update: Update, share: float, tmp_path: Path
) -> None:
    case = Combination(update=update, share=share)
    with run_of(case, tmp_path) as run:
        for batch in batches_of(case, 3):
            run.train([batch])
            with torch.no_grad():
                dict(run.model.named_parameters())["steps.2.weight"].mul_(0.5)
            assert run.model.steps[1].weight.sum().isfinite()
        assert_finite(run)


def test_graphs_of_one_backward_whose_forwards_had_streams_of_their_own_have_an_order(tmp_path: Path) -> None:
    case = Combination(update=Update.IN_BACKWARD, home="split")
    with run_of(case, tmp_path) as run:
        run.train(batches_of(case, 1))
        compute, losses, given = torch.cuda.current_stream(), [], batches_of(case, 2)  # alive behind the backward
        for batch in given:
            stream = torch.cuda.Stream()
            stream.wait_stream(compute)
            with torch.cuda.stream(stream):
                losses.append(run.compiled(batch))
            compute.wait_stream(stream)
        torch.stack(losses).sum().backward()
        run.optimizer.step()
        assert_finite(run)


@pytest.mark.parametrize("num_graphs", [1, 2])
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_may_write_parameters_and_read_gradients_behind_a_backward(num_graphs: int, waits: bool) -> None:
    home = Home(device=DEVICE)
    home.backward(num_graphs, waits=waits)
    home.lanes.touches([param.grad for param in home.own], home.values)
    assert [param.grad.tolist() for param in home.own] == [[float(num_graphs)] * 3, [float(num_graphs)] * 5]


def test_memory_of_what_is_abandoned_goes_behind_its_copies() -> None:
    home = Home(device=DEVICE)
    home.executor.gather(B0)
    home.executor.offload_saved("h", [torch.ones(64)])
    home.executor.abandon()


def test_the_host_may_write_what_copies_read_that_it_has_waited_for() -> None:
    home = Home(device=DEVICE)
    home.executor.gather(B0)
    synchronize_executors(home)
    home.lanes.touches((), home.values)
    home.executor.abandon()


def test_an_update_on_the_host_is_behind_the_last_gather_of_what_it_writes() -> None:
    home = Home(device=DEVICE)
    home.gate.set()
    gathered = home.executor.gather(B0)
    home.queue()
    home.line.wait()
    home.executor.wait(gathered)
    assert [weight.tolist() for weight in home.values] == [[2.0] * 3, [2.0] * 5]
    home.executor.abandon()


def test_compute_is_behind_what_an_update_copies_to_the_device() -> None:
    home, weight = Home(device=DEVICE), torch.zeros(3)
    lanes, made = home.lanes, home.lanes.mark_compute()

    def work() -> torch.Event:
        with lanes.h2d.beside_compute(made):
            lanes.h2d.copy(weight, home.values[0])
        return lanes.h2d.mark()

    home.line.queue(work, "update b0", lanes).wait()
    assert weight.sum().item() == 3.0


def test_the_host_may_write_parameters_behind_a_forward() -> None:
    home = Home(device=DEVICE)
    home.executor.wait(home.executor.gather(B0))
    home.executor.end()
    home.lanes.touches((), home.values)


def test_gradients_that_a_backward_made_on_another_stream_are_read_behind_it() -> None:
    home, stream = Home(Tier.DEVICE, device=DEVICE), torch.cuda.Stream()
    ticket = home.executor.ticket([])

    def program(args: list[Any]) -> None:
        # No default device is in force inside a backward.
        home.executor.reduce(B0, [0, 1], [torch.ones(size, device=DEVICE) for size in (3, 5)])

    def run() -> None:
        with torch.cuda.stream(stream):  # as autograd, for a forward on this stream
            home.executor.run_backward(home, ticket, "backward", program, [])

    in_backward(home.executor, run)
    assert [param.grad.sum().item() for param in home.own] == [3.0, 5.0]
    torch.cuda.synchronize()  # the gradients are memory of the other stream


def test_activations_come_back_behind_the_copy_that_took_them_away() -> None:
    executor = Executor(DEVICE, "saved")
    executor.offload_saved("h", [torch.ones(64)])  # compute is not behind the copy, so only its event is
    ticket = executor.ticket([])
    (back,) = executor.wait(executor.prefetch(ticket, "h"))
    assert back.sum().item() == 64.0
    executor.wait(executor.leaving(ticket, "h"))


def test_memory_of_a_dropped_forward_is_used_again_behind_its_copies() -> None:
    executor = Executor(DEVICE, "saved")
    executor.offload_saved("h", [torch.ones(64)])
    executor.ticket([])
    executor.begin()


def test_a_slice_that_leaves_is_kept_if_an_exception_ends_its_region() -> None:
    executor = Executor(DEVICE, "saved")
    storage = executor.saved.begin_leaving("h", 4 * 64, 2)
    slab = storage.slab  # if it were unpinned, the driver would wait for the copy
    storage.begin()
    storage.send(0)
    del storage
    executor.abandon()
    del slab


def test_state_that_moves_between_steps_has_an_order(tmp_path: Path) -> None:
    case = Combination(update=Update.IN_BACKWARD, home="split")
    with run_of(case, tmp_path) as run:
        for tier in (Tier.HOST, Tier.DEVICE, Tier.HOST):
            trained(run, case)
            move_state(run, tier)
        assert_finite(trained(run, case))
