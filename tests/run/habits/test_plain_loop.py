"""The training loop that every tutorial shows."""

from typing import Any

import pytest
import torch

from tests.run.habits.habit import habit
from tests.run.habits.same import BUDGETS, assert_trains_as_eager
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run


def clipped_step(run: Run, batch: Any) -> torch.Tensor:
    loss = run.compiled(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


@habit("`loss.backward()`, `clip_grad_norm_`, `optimizer.step()`, `optimizer.zero_grad()`", area="Training loops")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_loop_of_the_tutorials_trains_as_eager(budget: str) -> None:
    assert_trains_as_eager(seeded(Stack), clipped_step, vectors(4), budget=budget)
