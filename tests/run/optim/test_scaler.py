"""Loss scaling of an fp32 model: an overflow leaves everything as it was, and no update in the backward is lost on a
scaled gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir_compile.base.errors import GradientsChanged
from elixir_compile.ir import Update
from tests.run.training import Run, assert_same_tensors, loss_of
from tests.run.updating import eager_run, hybrid_run, in_flight, ladder, nan_staging, rows, weights_of

SCALE = 2.0**10


def scaled_step(scaler: torch.amp.GradScaler, *, unscales: bool = False) -> Callable[..., torch.Tensor]:
    def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def everything(run: Run) -> dict[str, torch.Tensor]:
    """Return copies of weights and state, the step count with it."""
    state = run.optimizer.state_dict()["state"]
    flat = {f"{index}.{name}": value.clone() for index, entry in state.items() for name, value in entry.items()}
    return dict(sorted({**weights_of(run), **flat}.items()))


@pytest.mark.parametrize(("update", "unscales"), [(Update.AFTER_BACKWARD, False), (Update.ACROSS_STEPS, True)])
def test_an_overflow_leaves_weights_and_state_bitwise_untouched(update: Update, unscales: bool) -> None:
    model, batches = ladder(), rows(5)

    def train(run: Run) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        step = scaled_step(scaler, unscales=unscales)
        run.train(batches[:2], step)
        before = everything(run)
        run.train([batches[2] * float("inf")], step)
        assert_same_tensors(before, everything(run))
        assert scaler.get_scale() == SCALE / 2
        return run.train(batches[3:], step)

    expected = train(eager_run(model))
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        train(run)
        assert in_flight(run) == (4 if update is Update.ACROSS_STEPS else 0)
        assert_same_tensors(everything(expected), everything(run))


def test_a_scaler_with_updates_in_the_backward_is_refused_first() -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        before = weights_of(run)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        with pytest.raises(GradientsChanged, match=r"steps\.\d.* GradScaler .* update=\"after_backward\""):
            run.train(batches, scaled_step(scaler, unscales=True))
        assert_same_tensors(before, weights_of(run))
        assert run.optimizer.state_dict()["state"] == {}
        run.optimizer.zero_grad()
        expected = eager_run(model).train(batches)
        run.train(batches)
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_a_scaler_added_later_is_refused_at_its_first_step() -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="split", update=Update.IN_BACKWARD) as run:
        run.train(batches)
        with pytest.raises(GradientsChanged, match="GradScaler"):
            run.train(batches, scaled_step(torch.amp.GradScaler("cpu", init_scale=SCALE)))


def test_a_disabled_scaler_works_with_updates_in_the_backward() -> None:
    model, batches = ladder(), rows(3)
    expected = eager_run(model).train(batches)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        run.train(batches, scaled_step(torch.amp.GradScaler("cpu", enabled=False)))
        assert_same_tensors(weights_of(expected), weights_of(run))
