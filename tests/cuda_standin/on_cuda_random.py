"""Random training runs on the stand-in: bitwise those of torch, in their budgets by the genuine allocator."""

import pytest
import torch

from tests.cuda_standin import device as standin
from tests.run.random_runs import Draw, outcome_of

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_run_keeps_its_budget_and_its_prediction(seed: int) -> None:
    with standin.policy(standin.RANDOM, seed), standin.ordered():
        outcome = outcome_of(Draw.of(seed), DEVICE)
    assert outcome.faults == [], outcome


@pytest.mark.parametrize("seed", [101, 102, 105, 111])
def test_a_random_run_of_other_kernels_keeps_its_budget(seed: int) -> None:
    """Convolutions, frequencies, branches and graph breaks."""
    with standin.policy(standin.RANDOM, seed), standin.ordered():
        outcome = outcome_of(Draw.of_others(seed), DEVICE)
    assert outcome.faults == [], outcome
