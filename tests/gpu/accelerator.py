"""The accelerator of this process, and what its tests share: CUDA, or the second device type of `tests/device`.

Tests that any accelerator can pass take `DEVICE` and have the marker `gpu`. Those of CUDA alone have the marker `cuda`
too: the profiler, memory fractions, pinned pages, NCCL.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.compat.platforms import accelerator
from tests.cuda_standin import device as standin
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run

DEVICE = accelerator() or torch.device("cuda", 0)
IS_CUDA = DEVICE.type == "cuda"
IS_EMULATED = DEVICE.type == "fakegpu" or standin.is_here()
"""Whether the device is made of host memory: the second device type, or CUDA over its stand-in."""
WIDTH = 64 if IS_EMULATED else 512
"""Of matrices: large enough that a GPU is late, small enough for a device made of host memory."""
INNER = "aot_eager" if IS_EMULATED else "inductor"
"""What compiles regions where a test is about kernels; a device made of host memory runs none of Inductor's."""
LOSS_RTOL = 1e-4
STARTED_RATE = 1e-3


def lag() -> None:
    """Let the device lag behind the host. The copies of a device made of host memory are late anyway."""
    if IS_CUDA:
        torch.cuda._sleep(20_000_000)


def stack() -> nn.Module:
    return seeded(Stack, WIDTH).to(DEVICE)


def inputs(num_batches: int = 3) -> list[torch.Tensor]:
    return [batch.to(DEVICE) for batch in vectors(num_batches, width=WIDTH)]


def gpt2(num_layers: int, width: int, num_words: int) -> nn.Module:
    """Return a GPT-2 without dropout; its attention is of plain products, whose backward is deterministic."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=8, vocab_size=num_words, n_positions=256, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return seeded(GPT2LMHeadModel, config).train()


def texts(num_batches: int, num_words: int, *, rows: int = 4, length: int = 128) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(0, num_words, (rows, length), generator=generator).to(DEVICE) for _ in range(num_batches)]
    return [{"input_ids": each, "labels": each} for each in ids]


def assert_close(expected: Run, got: Run, rtol: float = LOSS_RTOL) -> None:
    torch.testing.assert_close(torch.stack(got.losses), torch.stack(expected.losses), rtol=rtol, atol=0.0)


def gradients(run: Run, backward: Callable[[Run], None]) -> dict[str, torch.Tensor]:
    """Return the gradients that `backward` leaves, on the host, and drop them."""
    backward(run)
    found = {name: p.grad.cpu() for name, p in run.model.named_parameters() if p.grad is not None}
    run.optimizer.zero_grad()
    return found


def assert_same_gradients(expected: Run, got: Run, backward: Callable[[Run], None]) -> None:
    theirs, ours = gradients(expected, backward), gradients(got, backward)
    assert list(theirs) == list(ours)
    different = [name for name in theirs if not torch.equal(theirs[name], ours[name])]
    assert not different


def started(model: nn.Module, inner: str, budget: int | None) -> dict[str, Any]:
    """Prepare `model`, which is on the host, for the device, compile it and make its optimizer.

    At ten times `STARTED_RATE` the losses of GPT-2 124M grow to 15 in five steps, and roundings with them.
    """
    elixir.prepare(model, device=DEVICE)
    compiled = torch.compile(
        model, backend="elixir", options={"inner": inner, "device_memory": budget, "report": False}
    )
    return {"model": model, "compiled": compiled, "optimizer": elixir.HybridAdamW(model.parameters(), lr=STARTED_RATE)}


class Attention(nn.Module):
    """Two layers of attention with dropout, each with an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(128, 384), "out": nn.Linear(128, 128)}) for _ in "ab"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer["qkv"](x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(*heads, dropout_p=0.1)
            x = x + layer["out"](seen.transpose(1, 2).flatten(2))
        return x.square().mean()
