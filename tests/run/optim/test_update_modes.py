"""Bitwise `torch.optim.AdamW(fused=True)`: for every placement, streamed share and moment of the update."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.errors import GradientsChanged
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier, Update, Verb
from tests.covering import covering
from tests.run.training import Run, assert_same_tensors, by_elixir, fused_adamw, hybrid_adamw, loss_of, tight_bytes
from tests.run.updating import (
    Ladder,
    Several,
    accumulate,
    assert_equal,
    buckets_of,
    closure_step,
    controlled_worker,
    eager_run,
    hybrid_run,
    in_flight,
    ladder,
    nan_staging,
    random_delay,
    rows,
    weights_of,
)

STEPS = 20
COMBINATIONS = [
    *((home, update, 0.0) for home in ("device", "split", "host") for update in Update),
    *(("host", Update.ACROSS_STEPS, share) for share in (0.5, 1.0)),
    ("split", Update.ACROSS_STEPS, 0.5),
    *(pytest.param("host", Update.ACROSS_STEPS, share, marks=pytest.mark.slow) for share in (0.25, 0.75)),
    pytest.param("split", Update.ACROSS_STEPS, 1.0, marks=pytest.mark.slow),
    ("host", Update.IN_BACKWARD, 0.5),
    ("split", Update.AFTER_BACKWARD, 0.5),
]


@pytest.mark.parametrize(("home", "update", "share"), COMBINATIONS)
def test_bitwise_equal_to_torch_after_twenty_steps(home: str, update: Update, share: float) -> None:
    model, batches = ladder(), rows(STEPS)
    expected = eager_run(model).train(batches)
    with nan_staging(), hybrid_run(model, batches[0], home=home, update=update, share=share) as run:
        run.train(batches)
        assert [bucket.update for bucket in buckets_of(run)] == [update] * 4
        streamed = sum(bucket.placement.streamed for bucket in buckets_of(run))
        assert streamed == (0 if home == "device" else round(share * 4))
        assert_equal(expected, run)


@pytest.mark.parametrize("update", list(Update))
def test_schedulers_groups_and_frozen_parameters(update: Update) -> None:
    model, batches = ladder(), rows(8)
    model.steps[1].requires_grad_(False)

    def train(run: Run) -> Run:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=9)
        for batch in batches:
            run.train([batch])
            scheduler.step()
        return run

    expected = train(eager_run(model))
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        assert_equal(expected, train(run))


@pytest.mark.parametrize(("update", "num_backwards"), covering(list(Update), [1, 2, 4, 8]))
def test_accumulation(update: Update, num_backwards: int) -> None:
    model, batches = ladder(), rows(16 if num_backwards == 8 else 12)
    expected = accumulate(eager_run(model), batches, num_backwards)
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        assert_equal(expected, accumulate(run, batches, num_backwards))


def clipped_step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    loss.backward()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    torch.nn.utils.clip_grad_norm_(params, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("update", [Update.AFTER_BACKWARD, Update.ACROSS_STEPS])
def test_clipping(update: Update) -> None:
    model, batches = ladder(), rows(6)
    expected = eager_run(model).train(batches, clipped_step)
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        assert_equal(expected, run.train(batches, clipped_step))


def test_clipping_after_an_update_in_the_backward_is_refused() -> None:
    model, batches = ladder(), rows(2)
    with (
        hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run,
        pytest.raises(GradientsChanged, match=r"steps\.\d.* update=\"after_backward\""),
    ):
        run.train(batches, clipped_step)


@pytest.mark.parametrize("change", ["gradient", "lr"])
def test_changes_after_an_update_in_the_backward_are_refused(change: str) -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="split", update=Update.IN_BACKWARD) as run:
        run.train(batches[:1])
        loss_of(run.compiled, batches[1]).backward()
        if change == "lr":
            run.optimizer.param_groups[0]["lr"] = 0.5
        else:
            run.model.steps[0]._parameters["weight"].grad = torch.zeros(13, 13)
        with pytest.raises(GradientsChanged, match=change if change == "gradient" else "hyperparameter"):
            run.optimizer.step()


def test_a_second_backward_before_the_step_is_refused() -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        loss_of(run.compiled, batches[0]).backward()
        with pytest.raises(GradientsChanged, match=r"with optimizer\.accumulating"):
            loss_of(run.compiled, batches[1]).backward()


def test_gradients_stay_published_during_updates_in_the_backward() -> None:
    model, batches = ladder(), rows(10)
    expected = eager_run(model)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        run.train(batches[:2])
        expected.train(batches[:2])
        assert {bucket.closes for bucket in buckets_of(run)} == {Verb.OFFLOAD, Verb.RELEASE}
        started_early = False
        for batch in batches[2:]:
            recording = executor_of(run.model).ledger.start_recording()
            loss_of(run.compiled, batch).backward()
            loss_of(expected.compiled, batch).backward()
            theirs, ours = (
                {name: param.grad for name, param in own.model.named_parameters()} for own in (expected, run)
            )
            assert None not in ours.values()
            assert_same_tensors(theirs, ours)
            run.optimizer.step()
            expected.optimizer.step()
            run.optimizer.zero_grad()
            expected.optimizer.zero_grad()
            spans = recording.stop()
            last_run_s = max(span.end_s for span in spans if span.label.startswith("run bwd"))
            started_early |= any(span.start_s < last_run_s for span in spans if span.label.startswith("update"))
        assert started_early  # in at least one step: on a busy machine the thread of the updates may start late
        assert_equal(expected, run)


@pytest.mark.parametrize("home", ["host", "split"])
def test_delays_of_the_worker_change_nothing_in_the_backward(home: str) -> None:
    model, batches = ladder(), rows(40)
    expected = eager_run(model).train(batches)
    with (
        controlled_worker() as worker,
        nan_staging(),
        hybrid_run(model, batches[0], home=home, update=Update.IN_BACKWARD) as run,
    ):
        worker.delay_s = random_delay(5)
        assert_equal(expected, run.train(batches))
        assert worker.num_updates == 40 * 4


def test_closures() -> None:
    model, batches = ladder(), rows(5)

    expected = eager_run(model).train(batches, closure_step)
    for update in Update:
        with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
            assert_equal(expected, run.train(batches, closure_step))


def test_a_bucket_of_two_optimizers() -> None:
    """The weights have one, the biases another."""

    def both(make: Callable[..., torch.optim.Optimizer], params: Any) -> Several:
        params = list(params)
        return Several(make([p for p in params if p.dim() == dims]) for dims in (1, 2))

    model, batches = ladder(), rows(6)
    expected = eager_run(model, lambda params: both(fused_adamw, params)).train(batches)
    options = {"optimizer": lambda params: both(hybrid_adamw, params)}
    for update in Update:
        with nan_staging(), hybrid_run(model, batches[0], home="host", update=update, **options) as run:
            run.train(batches)
            assert_same_tensors(weights_of(expected), weights_of(run))


def test_two_models_at_once() -> None:
    batches = rows(6)
    expected = eager_run(ladder()).train(batches)
    runs: list[Run] = []
    for home in ("split", "split"):  # the budget of "host" has no room for another model
        with hybrid_run(ladder(), batches[0], home=home, update=Update.ACROSS_STEPS) as run:
            runs.append(run.train(batches[:1]))
    for batch in batches[1:]:
        for run in runs:
            run.train([batch])
    assert [in_flight(run) for run in runs] == [4, 4]
    for run in runs:
        assert_equal(expected, run)


@pytest.mark.parametrize(("option", "update"), [("auto", Update.ACROSS_STEPS), ("in_backward", Update.IN_BACKWARD)])
def test_the_update_option_selects_the_mode(option: str, update: Update) -> None:
    model, batches = ladder(), rows(1)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0]), update=option).train(batches)
    plan = elixir.compilations(run.model)[0].plan
    assert plan.update is update
    assert all(placement.update is Tier.HOST for placement in plan.placements)
    assert by_elixir(Ladder()).train(batches).compiled is not None
