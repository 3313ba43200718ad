"""The text and the model of the demo: a small GPT over bytes, in plain PyTorch."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from elixir_compile.errors import InvalidOption


def read_text(path: Path | None) -> bytes:
    """Return the bytes of the file `path`, or of the `*.py` files in the folder `path`.

    None stands for the folder of Python's standard library. Raises InvalidOption if there are no bytes.
    """
    place = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise InvalidOption("text", str(place), "a file that is not empty, or a folder with Python files")
    return text


def batches(
    text: bytes, *, size: int, context: int, seed: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs (bytes, following bytes) without end, each int64[size, context], from random places of `text`.

    `text` stays a Python object, because a tensor on a CPU would count as device memory. Raises InvalidOption if `text`
    is too short.
    """
    if len(text) <= context + 1:
        raise InvalidOption("text", f"{len(text)} bytes", f"more than {context + 1} bytes")
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=random).tolist()
        window = b"".join(text[start : start + context + 1] for start in starts)
        both = torch.frombuffer(bytearray(window), dtype=torch.uint8).view(size, context + 1).long()
        yield both[:, :-1].contiguous().to(device), both[:, 1:].contiguous().to(device)


NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of the model; the defaults give 14.8 million parameters."""

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
    """A GPT over bytes; `forward` returns the mean cross entropy of the following bytes in nats."""

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
