"""Models whose activations are most of the peak: many tokens or pixels, few parameters. Each with its batches."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.run.models import seeded, tokens

WIDTH = 32
NUM_WORDS = 128

Case = tuple[nn.Module, list[Any]]
"""A model and three batches, each a tensor or keyword arguments."""


def gpt2(*, num_layers: int = 3, dropout: float = 0.0, checkpointed: bool = False) -> Case:
    """Return a GPT-2; `checkpointed` recomputes every layer but the first, as its user says."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=WIDTH, n_head=4, vocab_size=NUM_WORDS, n_positions=64, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = seeded(GPT2LMHeadModel, config)
    if checkpointed:
        for block in model.transformer.h[1:]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model.train(), [{"input_ids": ids, "labels": ids} for ids in _tokens()]


def gpt2_wide() -> Case:
    """Return a GPT-2 whose logits are 2 MiB; an activation is 256 KiB."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=128, n_head=2, vocab_size=1024, n_positions=128, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (4, 128), generator=torch.Generator().manual_seed(0))
    return seeded(GPT2LMHeadModel, config).train(), [{"input_ids": ids, "labels": ids}]


def llama() -> Case:
    """Return a Llama of three layers whose embedding is its output layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3, num_attention_heads=4, use_cache=False,
        num_key_value_heads=2, vocab_size=NUM_WORDS, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return seeded(LlamaForCausalLM, config).train(), [{"input_ids": ids, "labels": ids} for ids in _tokens()]


def t5() -> Case:
    """Return a T5 of two layers each way."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=4, vocab_size=NUM_WORDS, dropout_rate=0.0,
        use_cache=False, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    sources, targets = _tokens(), _tokens(length=32)
    batches = [{"input_ids": ids, "labels": labels} for ids, labels in zip(sources, targets, strict=True)]
    return seeded(T5ForConditionalGeneration, config).train(), batches


def resnet() -> Case:
    """Return a ResNet of two stages, whose batch norms keep running statistics."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    batches = [
        {
            "pixel_values": torch.randn(8, 3, 32, 32, generator=generator),
            "labels": torch.randint(0, 10, (8,), generator=generator),
        }
        for _ in range(3)
    ]
    return seeded(ResNetForImageClassification, config).train(), batches


def selective() -> Case:
    """Return blocks that the user recomputes but for their matrix products, between two others."""
    return seeded(_Selective), _vectors()


def blocks(*, num_blocks: int = 3, dropout: float = 0.0) -> Case:
    """Return residual blocks with dropout in and behind each."""
    return seeded(_Blocks, dropout, num_blocks), _vectors()


def broken() -> Case:
    """Return residual blocks with graph breaks between them: three graphs per step."""
    return seeded(_Broken), _vectors()


def routed(*, breaks: bool = False) -> Case:
    """Return two layers of four experts of which each token takes two, all computed and masked in one graph; with
    `breaks` only those taken, picked by index, which no single graph holds."""
    return seeded(_Routed, breaks=breaks), _vectors()


class _Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.dropout(functional.gelu(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(inner)


class _Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False, context_fn=_save_products) if 1 <= number <= 4 else block(x)
        return x.square().mean()


class _Blocks(nn.Module):
    def __init__(self, dropout: float, num_blocks: int = 3) -> None:
        super().__init__()
        self.dropout = dropout
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = functional.dropout(block(x), self.dropout, self.training)
        return x.square().mean()


class _Broken(_Blocks):
    def __init__(self) -> None:
        super().__init__(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.blocks[2](x).square().mean()


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _save_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


class _Experts(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(_Block() for _ in range(4))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, taken = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.breaks:
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                row, place = torch.where(taken == number)
                result = result.index_add(0, row, expert(x[row]) * weights[row, place, None])
            return result
        gates = torch.zeros(x.shape[0], 4, dtype=x.dtype, device=x.device).scatter(1, taken, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return x + (outputs * gates[..., None]).sum(1)


class _Routed(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Experts(breaks) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _tokens(length: int = 64) -> list[torch.Tensor]:
    return tokens(rows=8, length=length, num_words=NUM_WORDS)


def _vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(512, WIDTH, generator=generator) for _ in range(3)]


CASES: Mapping[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "gpt2_checkpointed": lambda: gpt2(num_layers=6, checkpointed=True),
    "gpt2_dropout": lambda: gpt2(dropout=0.1),
    "gpt2_checkpointed_dropout": lambda: gpt2(dropout=0.1, checkpointed=True),
    "gpt2_deep": lambda: gpt2(num_layers=5),
    "blocks": blocks,
    "broken": broken,
    "blocks_dropout": lambda: blocks(dropout=0.1),
    "two_blocks_dropout": lambda: blocks(num_blocks=2, dropout=0.1),
    "llama": llama,
    "t5": t5,
    "resnet": resnet,
    "selective": selective,
    "routed": routed,
    "routed_by_index": lambda: routed(breaks=True),
}
