"""Models that torch cuts along a tensor axis, and their plans for `parallelize_module`."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

NUM_WORDS, WIDTH, LENGTH = 96, 96, 8


class Attention(nn.Module):
    """Causal attention with heads of 8 columns, as many as the projections have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a transformer; `first` and `second` are its norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A tiny transformer that returns the loss of the next word."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.register_buffer("order", torch.arange(LENGTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(self.order)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def decoder(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> Decoder:
    """Return a decoder, whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return Decoder().to(dtype)


def linear_plan() -> dict[str, ParallelStyle]:
    """Return the plan that cuts the linear layers of each block, and leaves everything else whole and plain."""
    return {
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }


def vocabulary_plan() -> dict[str, ParallelStyle]:
    """Return `linear_plan` with the words and the head cut too."""
    return {
        **linear_plan(),
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan() -> dict[str, ParallelStyle]:
    """Return the plan in which activations between the linear layers are cut along the sequence."""
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "layers.*.first": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.second": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


PLANS = {"none": dict, "linear": linear_plan, "vocabulary": vocabulary_plan, "sequence": sequence_plan}


def parallel(model: nn.Module, mesh: DeviceMesh, plan: str = "linear") -> nn.Module:
    """Return `model` cut along the axis `mesh` by the plan called `plan`."""
    return parallelize_module(model, mesh, PLANS[plan]())


def batch(number: int = 0, rows: int = 8) -> torch.Tensor:
    """Return rows of random words."""
    return torch.randint(0, NUM_WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(number))
