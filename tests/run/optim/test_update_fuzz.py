"""Random delays of the worker, and random reads between steps, change nothing."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir_compile.ir import Update
from tests.run.training import Run, assert_same_tensors, loss_of
from tests.run.updating import (
    controlled_worker,
    eager_run,
    hybrid_run,
    ladder,
    nan_staging,
    random_delay,
    rows,
    weights_of,
)

BATCHES = rows(8)


def _params(run: Run) -> list[torch.nn.Parameter]:
    return list(run.model.parameters())


def _scale_gradients(run: Run) -> None:
    for param in _params(run):
        if param.grad is not None:
            param.grad.mul_(0.5)


def _eager(run: Run) -> Any:
    with torch.no_grad():
        return [run.model(BATCHES[0])]


def _shrink(run: Run) -> None:
    with torch.no_grad():
        _params(run)[2].mul_(0.9)


def _change_lr(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.99


def _states(run: Run) -> Any:
    state = run.optimizer.state_dict()["state"]
    return [state[index][name].clone() for index in sorted(state) for name in sorted(state[index])]


def _reload(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def _norm(run: Run) -> Any:
    return [torch.nn.utils.clip_grad_norm_(_params(run), 1e-2)]


BETWEEN: dict[str, Callable[[Run], Any]] = {
    "nothing": lambda run: None,
    "one": lambda run: [_params(run)[3].sum()],
    "all": lambda run: [param.detach().clone() for param in _params(run)],
    "first": lambda run: [_params(run)[0].detach().clone()],
    "gradient": lambda run: [g.clone() for p in _params(run)[:2] if (g := p.grad) is not None],
    "scale": _scale_gradients,
    "norm": _norm,
    "state": _states,
    "reload": _reload,
    "eager": _eager,
    "shrink": _shrink,
    "lr": _change_lr,
    "step again": lambda run: run.optimizer.step(),
    "zero": lambda run: run.optimizer.zero_grad(),
    "fill with zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "deepcopy": lambda run: [copy.deepcopy(_params(run)[1])],
}


def interleave(seed: int, num_steps: int, home: str, share: float) -> None:
    """Train `num_steps` steps with random calls before, between and behind backward and step."""
    chance, model = random.Random(seed), ladder()
    expected = eager_run(model)
    with (
        controlled_worker() as worker,
        nan_staging(),
        hybrid_run(model, BATCHES[0], home=home, share=share, update=Update.ACROSS_STEPS) as run,
    ):
        run.train(BATCHES[:1])
        expected.train(BATCHES[:1])
        worker.delay_s = random_delay(seed)
        for number in range(num_steps):
            batch = BATCHES[number % len(BATCHES)]
            calls = [chance.choice(list(BETWEEN)) for _ in range(3)]
            clears = chance.random() < 0.8
            seen = [one_step(each, batch, calls, clears=clears) for each in (expected, run)]
            for name, right, got in zip(calls, *seen, strict=True):
                assert all(map(torch.equal, right, got)), f"{name} in step {number} of {calls}"
        assert_same_tensors(weights_of(expected), weights_of(run))


def one_step(run: Run, batch: torch.Tensor, calls: list[str], *, clears: bool) -> list[list[torch.Tensor]]:
    """Return what each of `calls` read: before the backward, before the step, behind it."""
    seen = [BETWEEN[calls[0]](run) or []]
    loss_of(run.compiled, batch).backward()
    seen.append(BETWEEN[calls[1]](run) or [])
    run.optimizer.step()
    if clears:
        run.optimizer.zero_grad()
    seen.append(BETWEEN[calls[2]](run) or [])
    return seen


@pytest.mark.parametrize(("home", "share", "seed"), [("host", 0.0, 1), ("split", 0.25, 2), ("host", 0.5, 3)])
def test_random_interleavings(home: str, share: float, seed: int) -> None:
    """80 steps each, every one another interleaving."""
    interleave(seed, 80, home, share)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_more_random_interleavings(seed: int) -> None:
    for home, share in (("host", 0.0), ("split", 0.0), ("host", 0.75), ("split", 0.5)):
        interleave(100 + seed, 400, home, share)
