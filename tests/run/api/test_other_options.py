"""A prepared model that is compiled again with other options gets a plan of these options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.ir import Saving, Tier
from tests.run.models import Stack, seeded, vectors
from tests.run.training import least_bytes

OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, "planner": "greedy"}
BATCH = vectors(1, rows=64)[0]


def compiled(model: torch.nn.Module, **options: object) -> Any:
    return torch.compile(model, backend="elixir", options={**OPTIONS, **options})


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: object) -> elixir.Plan:
    """Take two steps under `options`, and return the plan."""
    step = compiled(model, **options)
    for _ in range(2):
        step(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return elixir.compilations(step)[-1].plan


@pytest.fixture(scope="module")
def tight() -> int:
    return int(1.05 * least_bytes(seeded(Stack), BATCH))


def test_a_smaller_budget_moves_parameters_away_and_a_larger_budget_brings_them_back(tight: int):
    model = seeded(Stack)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    twin = seeded(Stack)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for budget, home in ((None, Tier.DEVICE), (tight, Tier.HOST), (1 << 30, Tier.DEVICE)):
        plan = trained(model, optimizer, **({} if budget is None else {"device_memory": budget}))
        assert home in {placement.param for placement in plan.placements}
        assert budget is None or plan.prediction.device_peak_bytes <= budget
        trained_by_torch(twin, other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert len(elixir.compilations(model)) == 1


def trained_by_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()


OTHERS: dict[str, tuple[dict[str, object], Callable[[elixir.Plan], bool]]] = {
    "number": ({"micro_batches": 4}, lambda plan: max(region.micro_batches for region in plan.regions) == 4),
    "update": ({"update": "after_backward"}, lambda plan: plan.update == "after_backward"),
    "activations": (
        {"activations": "offload"},
        lambda plan: all(group.saving is not Saving.RECOMPUTE for group in plan.activations),
    ),
    "planner": ({"planner": "zero3_offload"}, lambda plan: plan.planner == "zero3_offload"),
}


def test_each_option_that_shapes_plans_shapes_the_next_plan_and_the_first_options_give_the_first_plan_back(tight: int):
    model = seeded(Stack)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    first = trained(model, optimizer, device_memory=2 * tight)
    for name, (option, changed) in OTHERS.items():
        assert not changed(first) or name == "activations"
        assert changed(trained(model, optimizer, device_memory=2 * tight, **option)), name
        assert len(elixir.compilations(model)) == 1
    last = trained(model, optimizer, device_memory=2 * tight)
    assert (last.regions, last.placements, last.schedules) == (first.regions, first.placements, first.schedules)


def test_options_that_shape_no_plan_keep_it():
    model = seeded(Stack)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    before = trained(model, optimizer)
    assert trained(model, optimizer, replan=True) is before
