"""Training on a second device type, late copies included, is bitwise what it is when each copy is made at once.

Losses of the free run are also compared with those of `torch.compile` there. It has other buckets, so its sums may have
another order.
"""

from typing import Any

import pytest
import torch
from torch import nn

from elixir_compile.ir import Update
from elixir_compile.runtime.lanes.accelerator import Accelerator
from tests.device import fakegpu
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, assert_offloads, assert_same, by_elixir, by_torch, on_host, tight_bytes
from tests.run.updating import hybrid_run

DEVICE = torch.device(fakegpu.NAME, 0)
PLAIN = {"planner": "greedy", "plan_cache": False, "replan": False}


def model() -> nn.Module:
    return seeded(Stack).to(DEVICE)


def batches(num: int = 3) -> list[torch.Tensor]:
    return [batch.to(DEVICE) for batch in vectors(num)]


def trained(kind: int, seed: int = 0, **options: Any) -> Run:
    with fakegpu.policy(kind, seed):
        return by_elixir(model(), **{**PLAIN, **options}).train(batches())


def test_without_a_budget_it_trains_as_torch_does() -> None:
    expected = by_torch(model()).train(batches())
    got = trained(fakegpu.EARLY)
    torch.testing.assert_close(torch.stack(expected.losses), torch.stack(got.losses))
    assert not on_host(got)


@pytest.mark.parametrize(
    "activations", ["offload", *(pytest.param(each, marks=pytest.mark.slow) for each in ("keep", "recompute"))]
)
def test_under_a_tight_budget_late_copies_change_nothing(activations: str) -> None:
    options = {"activations": activations}
    options["device_memory"] = tight_bytes(model(), batches()[0], **PLAIN, **options)
    before = fakegpu.num_async_copies()
    expected = trained(fakegpu.EARLY, **options)
    assert_offloads(expected)
    assert fakegpu.num_async_copies() > before
    assert_same(expected, trained(fakegpu.LATE, **options))
    for seed in range(2):
        assert_same(expected, trained(fakegpu.RANDOM, seed, **options))


MODES = [(home, update) for home in ("split", "host") for update in Update]
SHORT = ("host", Update.IN_BACKWARD)


@pytest.mark.parametrize(
    ("home", "update"), [pytest.param(*mode, marks=() if mode == SHORT else pytest.mark.slow) for mode in MODES]
)
def test_update_modes_under_late_copies_change_nothing(home: str, update: Update) -> None:
    runs = []
    for kind in (fakegpu.EARLY, fakegpu.LATE, fakegpu.RANDOM):
        # The default planner proves each of its six plans the best, which takes a minute.
        placed = hybrid_run(model(), batches()[0], home=home, update=update, planner="greedy")
        with fakegpu.policy(kind), placed as run:
            runs.append(run.train(batches()))
    for run in runs[1:]:
        assert_same(runs[0], run)


@pytest.mark.slow
def test_a_compute_that_does_not_wait_for_copies_reads_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a missing wait of the runtime fails these tests."""
    options = {"device_memory": tight_bytes(model(), batches()[0], **PLAIN)}
    monkeypatch.setattr(Accelerator, "compute_waits", lambda lanes, event: None)
    assert trained(fakegpu.LATE, **options).losses[0].isnan()
