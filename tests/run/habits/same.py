"""Train the same model by eager PyTorch and by Elixir, with one step of the user's, and compare bit for bit."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tests.run.training import Run, assert_same, fused_adamw

BUDGETS: Mapping[str, Mapping[str, object]] = {
    "free": {},
    "offload": {"planner": "zero3_offload"},
}
"""Options by name: everything stays on the device; every parameter lives on the host."""

Step = Callable[[Run, Any], torch.Tensor]
"""One training step of a run on a batch; returns the loss."""


def eager(model: nn.Module, optimizer: Any = fused_adamw) -> Run:
    """Return a run of a copy of `model` that nothing compiles."""
    own = copy.deepcopy(model)
    return Run(model=own, compiled=own, optimizer=optimizer(own.parameters()))


def compiled(model: nn.Module, options: Mapping[str, object], optimizer: Any = fused_adamw) -> Run:
    """Return a run of a copy of `model` that the backend compiles at its first call, op by op."""
    own = copy.deepcopy(model)
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "report": False, **options}
    run = torch.compile(own, backend="elixir", options=options)
    return Run(model=own, compiled=run, optimizer=optimizer(own.parameters()))


def assert_trains_as_eager(
    model: nn.Module, step: Step, batches: Iterable[Any], *, budget: str, optimizer: Any = fused_adamw
) -> None:
    """Fail unless losses and weights after `batches` equal those of eager PyTorch, under `BUDGETS[budget]`."""
    batches = list(batches)
    runs = [eager(model, optimizer), compiled(model, BUDGETS[budget], optimizer)]
    for run in runs:
        torch.manual_seed(0)
        for batch in batches:
            run.losses.append(step(run, batch).detach().clone())
    assert_same(*runs)
