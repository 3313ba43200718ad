"""The peak that `plan_stages` counts for a rank is that of the plans that its stages get, and the measured one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import elixir_compile as elixir
from elixir_compile.ir.pipeline import parse_schedule
from tests.run.pipeline_checks import DEFAULTS, NUM_MICRO_BATCHES, Block
from tests.run.processes import spawn

WIDTH, ROWS = 64, 256
OPTIONS = {"inner": "aot_eager", "activations": "keep", "device_memory": "1GiB"}


class Layers(nn.Module):
    """Some layers of the model; the last returns the loss."""

    def __init__(self, layers: Sequence[Block], *, has_loss: bool = True) -> None:
        super().__init__()
        self.h, self.has_loss = nn.ModuleList(layers), has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean().reshape(1) if self.has_loss else x


def peaks(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Run the stages that `plan_stages` chose by the schedule `name`, and return the peaks of this rank."""
    num_stages = world_size * (2 if parse_schedule(name).is_looped else 1)
    with torch.device("meta"):
        whole, x = Layers([Block(WIDTH) for _ in range(8)]), torch.empty(ROWS, WIDTH)
    made = elixir.plan_stages(
        whole,
        (x,),
        stages=num_stages,
        schedule=name,
        micro_batches=NUM_MICRO_BATCHES,
        ranks=world_size,
        options=OPTIONS,
    )
    own = [stage for stage in made.stages if stage.rank == rank]
    modules = [
        Layers([Block(WIDTH) for name in stage.layers if name.startswith("h.")], has_loss=stage is made.stages[-1])
        for stage in own
    ]
    compiled = [torch.compile(elixir.prepare(m), backend="elixir", options={**DEFAULTS, **OPTIONS}) for m in modules]
    stages = [
        PipelineStage(module, stage.stage, num_stages, torch.device("cpu"))
        for module, stage in zip(compiled, own, strict=True)
    ]
    kind = getattr(pipelining, name)
    schedule = kind(stages if num_stages > world_size else stages[0], NUM_MICRO_BATCHES, loss_fn=lambda out, _: out)
    for module in modules:
        elixir.prepare(module, outstanding=schedule)
    optimizers = [elixir.HybridAdamW(module.parameters()) for module in modules]
    inputs = [torch.randn(ROWS, WIDTH)] if rank == 0 else []
    targets = {"target": torch.zeros(ROWS)} if rank == world_size - 1 else {}

    def step() -> None:
        schedule.step(*inputs, **targets)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    step()
    record = elixir.measure_step(step, device="cpu")
    return {
        "stages": made.ranks[rank].peak_bytes,
        "plans": elixir.compilations(modules[0])[-1].rank_peak_bytes,
        "measured": record.device_peak_bytes - sum(target.nbytes for target in targets.values()),
    }


@pytest.mark.slow  # 10 s each
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_the_peak_of_each_rank_is_that_of_its_stages_when_they_run(tmp_path: Path, name: str) -> None:
    for found in spawn(peaks, 2, name, folder=tmp_path, limit_s=120):
        print(found)
        assert found["stages"] == pytest.approx(found["plans"], rel=0.01)
        assert found["stages"] == pytest.approx(found["measured"], rel=0.01)
