"""Several ranks whose forwards wait for their backward: what waits makes room on all of them, and nothing is lost."""

from pathlib import Path
from typing import Any

import torch

from elixir_compile.graph.capture.modules import executor_of
from tests.run.processes import spawn
from tests.run.ranks_models import batches
from tests.run.ranks_training import least_bytes, own_rows, pair_of


def crowds(rank: int, world_size: int) -> dict[str, Any]:
    """Train steps of two forwards before their backwards, where the device has room for one."""
    steps = [batch.chunk(2) for batch in batches(3)]
    options: dict[str, Any] = {"activations": "keep"}
    options["device_memory"] = int(1.05 * least_bytes("odd", steps[0][0], [world_size], **options))
    pair = pair_of("odd", [world_size], **options)
    saved, made = executor_of(pair.model).saved, []
    offload_outstanding = saved.offload_outstanding
    saved.offload_outstanding = lambda: (made.append(offload_outstanding()), made[-1])[1]
    rooms, waiting = [], []
    for halves in steps:
        made.clear()
        losses = [pair.compiled(own_rows(half)) for half in halves]
        waiting.append(saved.num_outstanding)
        torch.stack(losses).mean().backward()
        for half in halves:
            rows = half.chunk(world_size)
            (torch.stack([pair.double(own) for own in rows]).mean() / len(halves)).backward()
        for optimizer in (pair.optimizer, pair.double_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        rooms.append(sum(made))
    return {"apart": pair.apart(), "rooms": rooms, "waiting": waiting}


def test_outstanding_forwards_are_offloaded_on_all_ranks(tmp_path: Path) -> None:
    found = spawn(crowds, 2, folder=tmp_path, limit_s=120)
    assert max(own["apart"] for own in found) < 1e-12
    for own in found:
        assert own["waiting"] == [2, 2, 2]
        assert min(own["rooms"]) > 0
