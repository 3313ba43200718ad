"""The peak that `plan_stages` counts for a stage is that of the plan which the stage gets when it runs."""

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.ir.pipeline import TorchSchedule
from tests.run.cli.test_cli_stages import Net, planned

NUM = 4
"""Micro-batches."""


class Last(nn.Module):
    """The layers of the last stage; returns the loss."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = Net().layers[first:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.slow  # 10 s of CPU time
@pytest.mark.parametrize(("schedule", "outstanding"), [(TorchSchedule.GPIPE, NUM), (TorchSchedule.ONE_F_ONE_B, 1)])
def test_the_plan_of_a_stage_that_runs_has_the_peak_that_was_planned(schedule: TorchSchedule, outstanding: int) -> None:
    """Within 5 %, and not above it: the stage is called here without torch's stage, whose buffers the former counts."""
    made = planned(NUM, schedule=schedule, activations="keep")
    own = made.stages[-1]
    assert own.outstanding == outstanding
    stage = elixir.prepare(Last(8 - len(own.layers)), outstanding=outstanding, calls=NUM)
    options = {"inner": "aot_eager", "plan_cache": False, "report": False, "activations": "keep"}
    compiled = torch.compile(stage, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(stage.parameters())
    inputs = [torch.randn(16 // NUM, 512, 256, requires_grad=True) for _ in range(NUM)]
    waiting = [compiled(x) for x in inputs[:outstanding]]
    for x in inputs[outstanding:]:
        waiting.pop(0).backward()
        waiting.append(compiled(x))
    for loss in waiting:
        loss.backward()
    optimizer.step()
    plan = elixir.compilations(stage)[-1].plan
    assert plan is not None
    assert own.peak_bytes == pytest.approx(plan.prediction.device_peak_bytes, rel=0.05)
    assert own.peak_bytes >= plan.prediction.device_peak_bytes
