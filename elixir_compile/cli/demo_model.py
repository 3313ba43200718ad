"""A small GPT over bytes, as one would write it by hand: nothing in it knows that it is compiled."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the model is: 14.8 million parameters by default."""

    num_layers: int = 6
    width: int = 448
    num_heads: int = 7
    context: int = 128


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class ByteGPT(nn.Module):
    """Predicts the next byte; returns the mean cross entropy in nats."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTES, bias=False)
        self.apply(_initialise)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
