"""Imported by the server of `processes.py`: compile once, so that no process forked from it is the first to do so.

The first capture of a process imports what torch loads late and builds Dynamo's tables, which takes 0.4 s. No thread is
started, and the default generator draws what it would have drawn.
"""

import torch
from torch import nn


def _warm_up() -> None:
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        ids = torch.zeros(2, 2, dtype=torch.int64)
        torch.compile(model, backend="aot_eager")(ids).square().mean().backward()
    torch._dynamo.reset()


_warm_up()
