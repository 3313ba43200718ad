"""Small models, each with one thing that compilers get wrong."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

WIDTH = 64


class Block(nn.Module):
    """One pre-norm residual block of two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Four blocks and a head; returns the loss."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).square().mean()


class Tied(nn.Module):
    """An embedding that is the output layer too, with a stack between."""

    def __init__(self, num_words: int = 128, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, num_words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, width: int = WIDTH, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.base(x) + self.up(self.down(x)))


def seeded(make: Callable[..., nn.Module], *args: object, **options: object) -> nn.Module:
    """Return `make(*args, **options)`, the same weights every time."""
    torch.manual_seed(0)
    return make(*args, **options)


def vectors(num_batches: int = 3, *, rows: int = 8, width: int = WIDTH) -> list[torch.Tensor]:
    """Return batches of different random vectors."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator) for _ in range(num_batches)]


def tokens(num_batches: int = 3, *, rows: int = 2, length: int = 16, num_words: int = 128) -> list[torch.Tensor]:
    """Return batches of different random token ids."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, num_words, (rows, length), generator=generator) for _ in range(num_batches)]


def hf_batches(num_batches: int = 3, *, num_words: int = 128) -> list[Mapping[str, torch.Tensor]]:
    """Return batches as Hugging Face causal models take them."""
    return [{"input_ids": ids, "labels": ids} for ids in tokens(num_batches, num_words=num_words)]


def small_gpt2(*, num_layers: int = 3, **options: object) -> nn.Module:
    """Return a GPT-2 without dropout, tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=WIDTH, n_head=4, vocab_size=128, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    return seeded(GPT2LMHeadModel, config)


def small_llama(*, tied: bool, num_layers: int = 3) -> nn.Module:
    """Return a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return seeded(LlamaForCausalLM, config)
