"""Two ranks over NCCL, each with a GPU of its own."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from tests.run.models import Stack, seeded, vectors
from tests.run.processes import spawn
from tests.run.shares_checks import shards_of
from tests.run.training import Run, by_torch, hybrid_adamw, on_host, scaled_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]

WIDTH, NUM_STEPS = 256, 9


def trained(rank: int, world_size: int, share: float, state: list[float]) -> list[float]:
    """Train on the same batches on all ranks, whose mean gradients are those of one; return the losses.

    The ranks own the parts `state` of the parameters, equal ones if it is empty.
    """
    torch.cuda.set_device(rank)
    group = distributed.new_group(backend="nccl", timeout=timedelta(seconds=60))
    mesh = DeviceMesh.from_group(group, "cuda")
    batches = [batch.cuda() for batch in vectors(NUM_STEPS, width=WIDTH)]
    expected = by_torch(seeded(Stack, WIDTH).cuda()).train(batches)
    torch._dynamo.reset()
    with shards_of(state):
        model = elixir.prepare(seeded(Stack, WIDTH).cuda(), mesh=mesh)
    peak_bytes = torch.cuda.max_memory_allocated()
    budget = scaled_bytes(model, peak_bytes, share) if share else None
    options = {"inner": "aot_eager", "report": False, "device_memory": budget}
    compiled = torch.compile(model, backend="elixir", options=options)
    got = Run(model=model, compiled=compiled, optimizer=hybrid_adamw(model.parameters())).train(batches)
    assert executor_of(model).ledger.counts["gather"] > 0
    assert executor_of(model).device == torch.device("cuda", rank)
    assert bool(on_host(got)) == bool(share)
    torch.testing.assert_close(torch.stack(got.losses), torch.stack(expected.losses), rtol=1e-3, atol=0.0)
    return [loss.item() for loss in got.losses]


@pytest.mark.parametrize(
    ("share", "state"), [(0.0, []), (0.6, []), (0.0, [0.7, 0.3]), (0.6, [0.55, 0.45]), (0.0, [0.0, 1.0])]
)
def test_two_gpus_train_as_one(share: float, state: list[float], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    found = spawn(trained, 2, share, state, folder=tmp_path, limit_s=300.0)
    assert found[0] == found[1]
