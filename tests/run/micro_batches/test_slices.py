"""Offloaded activations that leave and come back in slices: the same gradients, fewer bytes on the device."""

from collections import Counter
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Lane, Plan, Saving
from elixir_compile.runtime import micro_batches as runtime
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.executor import Executor
from tests.fx.handmade import Choice, from_host, offload, planned
from tests.run.micro_batches.stepping import Rows, batch_of, compiled, gradients, loop

NUM, BLOCKS = 8, 3


def executor(model: Rows) -> Executor:
    found = executor_of(model)
    assert found is not None
    return found


def stepped(choose: Choice, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Rows, Any, Plan]:
    """Return a model after one step under a plan by hand, with its compiled form and the plan."""
    with planned(monkeypatch, choose, **options) as plans:
        model = Rows(num_blocks=BLOCKS)
        step = compiled(model, NUM)
        step(*batch_of(64)).backward()
    model.zero_grad()
    return model, step, plans[-1]


@pytest.mark.parametrize(
    ("choose", "waits_late"), [(offload, False), (offload, True), (from_host, False)], ids=["all", "late", "inputs"]
)
def test_gradients_and_counts_are_those_of_wholes_and_the_peak_is_the_planned(
    choose: Choice, waits_late: bool, monkeypatch: pytest.MonkeyPatch
):
    model, step, plan = stepped(choose, monkeypatch, waits_late=waits_late)
    batch, ledger = batch_of(64), executor(model).ledger
    times, nbytes = Counter(ledger.times), Counter(ledger.bytes)
    record = elixir.measure_step(lambda: step(*batch).backward())
    times, nbytes = Counter(ledger.times) - times, Counter(ledger.bytes) - nbytes
    away = [group for group in plan.activations if group.saving is Saving.OFFLOAD]
    for lane, verb in ((Lane.D2H, "offload"), (Lane.H2D, "prefetch")):
        assert {f"{verb} {group.id}": 1 for group in away} == {k: n for k, n in times.items() if k.startswith(verb)}
        assert all(nbytes[lane, f"{verb} {group.id}"] == group.nbytes for group in away)
    # The plan counts the state of an optimizer, which this step does not have.
    planned_bytes = plan.prediction.device_peak_bytes - plan.buckets[0].state_nbytes
    assert record.device_peak_bytes == pytest.approx(planned_bytes, rel=1e-3)
    found = gradients(model)
    twin = Rows(num_blocks=BLOCKS)
    twin.load_state_dict(model.state_dict())
    wanted = loop(twin, NUM, *batch)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_second_backward_of_one_forward_reads_the_slices_again(monkeypatch: pytest.MonkeyPatch):
    model, step, _ = stepped(offload, monkeypatch)
    loss = step(*batch_of(64))
    loss.backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    loss.backward()
    twice = gradients(model)
    assert all(torch.equal(twice[name], once[name]) for name in once)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_an_exception_in_the_second_micro_batch_leaves_no_slice_behind(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
):
    model, step, _ = stepped(offload, monkeypatch)
    batch, own = batch_of(64), runtime.slice_of
    step(*batch).backward()
    wanted, slab_bytes = gradients(model), live_slab_bytes()
    model.zero_grad()

    def failing(value: object, read: runtime.Read, number: int, num: int) -> object:
        if number == 1:
            raise RuntimeError("no more memory")
        return own(value, read, number, num)

    for _ in range(3):
        loss = step(*batch) if in_backward else None
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "slice_of", failing)
            with pytest.raises(RuntimeError, match="no more memory"):
                step(*batch) if loss is None else loss.backward()
        del loss
        model.zero_grad()
    assert executor(model).saved.num_outstanding == 0
    step(*batch).backward()
    found = gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert live_slab_bytes() == slab_bytes
