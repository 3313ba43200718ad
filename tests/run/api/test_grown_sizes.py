"""A batch that does not fit is refused each time, not only the first time it is seen."""

import pytest
import torch
from torch import nn

import elixir_compile as elixir

WIDTH, SMALL, LARGE = 32, 8, 100_000
OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False, "planner": "greedy", "device_memory": "1MiB"}


def test_a_batch_that_does_not_fit_is_refused_again_and_a_small_batch_still_trains() -> None:
    model = elixir.prepare(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)))
    compiled = torch.compile(model, backend="elixir", options=OPTIONS, dynamic=True)
    compiled(torch.ones(SMALL, WIDTH)).sum().backward()
    for _ in range(2):
        with pytest.raises(elixir.NoFeasiblePlan):
            compiled(torch.ones(LARGE, WIDTH))
    compiled(torch.ones(SMALL, WIDTH)).sum().backward()
    (compilation,) = elixir.compilations(compiled)
    assert [value for _, value in compilation.graph.symbols] == [SMALL]
