"""Small models: each with one thing that compilers get wrong, with functions that run graphs, or with large
activations."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# ----------------------------------------------------------------------------------------------------------------------
# Small models, each with one thing that compilers get wrong.


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


class ShortStack(Stack):
    """Two blocks and a head, for tests to which more layers say no more: a capture takes two thirds of the time."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 2) -> None:
        super().__init__(width, num_blocks)


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


def small_llama(*, tied: bool, num_layers: int = 3, **options: object) -> nn.Module:
    """Return a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
        **options,
    )  # fmt: skip
    return seeded(LlamaForCausalLM, config)


# ----------------------------------------------------------------------------------------------------------------------
# Models that call functions of torch which run graphs, as `cond` and `scan`, with parameters inside.


CALLING_WIDTH, WIDE, ROWS = 16, 256, 6


class Calling(nn.Module):
    """A wide pair of layers `f` and weights for three rows, which `call` reads inside of bodies; returns the loss."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(CALLING_WIDTH, CALLING_WIDTH)
        self.up, self.down = nn.Linear(CALLING_WIDTH, WIDE), nn.Linear(WIDE, CALLING_WIDTH)
        self.weights = nn.Parameter(torch.randn(3, CALLING_WIDTH, CALLING_WIDTH) / 4)

    def f(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, self.first(x)).square().mean()


def branch(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, model.f, lambda t: model.f(t * 2), (x,))


def branch_of_two_sizes(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, model.f, lambda t: t + 1, (x,))


def branch_not_taken(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() < -1e9, model.f, lambda t: t + 1, (x,))


def branches_in_turn(model: Calling, x: torch.Tensor) -> torch.Tensor:
    """A parameter in a branch that is taken in some steps, beside one in both branches of every step."""
    inside = torch.cond(x.mean() > 0, lambda t: t @ model.weights[0], lambda t: t + 1, (x,))
    return torch.cond(x.mean() < 0, lambda t: model.f(t) @ model.weights[1], lambda t: model.f(t * 2), (inside,))


def branch_not_taken_in_scan(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(carried: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried = torch.cond(weight.sum() < -1e9, lambda c, w: model.f(c @ w), lambda c, w: c @ w, (carried, weight))
        return carried, carried.mean(0)

    last, means = scan(turn, x, model.weights)
    return last + means.sum(0)


def branch_in_branch(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def outer(t: torch.Tensor) -> torch.Tensor:
        return model.f(t) + torch.cond(t.mean() > -1e9, lambda u: u @ model.weights[0], lambda u: model.f(u), (t,))

    return torch.cond(x.sum() > -1e9, outer, lambda t: t + 1, (x,))


def each_row(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return map_rows(model.f, x)


def scan_of_weights(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(carried: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried = carried + model.f(carried @ weight)
        return carried, carried.mean(0)

    last, means = scan(turn, x, model.weights)
    return last + means.sum(0)


def branch_in_scan(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(carried: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried = torch.cond(weight.sum() > -1e9, lambda c, w: model.f(c @ w), lambda c, w: c @ w, (carried, weight))
        return carried, carried.mean(0)

    last, means = scan(turn, x, model.weights)
    return last + means.sum(0)


def loop_without_gradients(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(i: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.tanh(model.f(carried))

    with torch.no_grad():
        _, last = torch.while_loop(lambda i, carried: i.sum() < 3, turn, (x.new_zeros(1), x))
    return x * last


def loop(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(i: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.tanh(model.f(carried))

    return torch.while_loop(lambda i, carried: i < 3, turn, (torch.tensor(0), x))[1]


def associative(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def combine(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return a[0] * b[0], b[0] * a[1] + b[1]

    return associative_scan(combine, (model.f(x).sigmoid(), x), 1, combine_mode="generic")[1]


def seeded_call(call: Callable[..., torch.Tensor]) -> Calling:
    torch.manual_seed(0)
    return Calling(call)


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, 32, CALLING_WIDTH, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------------------
# Models whose activations are most of the peak: many tokens or pixels, few parameters. Each with its batches.


TOKEN_WIDTH = 32
NUM_WORDS = 128

Case = tuple[nn.Module, list[Any]]
"""A model and three batches, each a tensor or keyword arguments."""


def gpt2(*, num_layers: int = 3, dropout: float = 0.0, checkpointed: bool = False) -> Case:
    """Return a GPT-2; `checkpointed` recomputes every layer but the first, as its user says."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=TOKEN_WIDTH, n_head=4, vocab_size=NUM_WORDS, n_positions=64, use_cache=False,
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
        hidden_size=TOKEN_WIDTH, intermediate_size=2 * TOKEN_WIDTH, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, vocab_size=NUM_WORDS, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return seeded(LlamaForCausalLM, config).train(), [{"input_ids": ids, "labels": ids} for ids in _tokens()]


def t5() -> Case:
    """Return a T5 of two layers each way."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=TOKEN_WIDTH, d_kv=8, d_ff=2 * TOKEN_WIDTH, num_layers=2, num_heads=4, vocab_size=NUM_WORDS,
        dropout_rate=0.0, use_cache=False, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
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


def routed(*, breaks: bool = False, num_layers: int = 2) -> Case:
    """Return layers of four experts of which each token takes two, all computed and masked in one graph; with
    `breaks` only those taken, picked by index, which no single graph holds."""
    return seeded(_Routed, breaks, num_layers), _vectors()


class _Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(TOKEN_WIDTH)
        self.up = nn.Linear(TOKEN_WIDTH, 4 * TOKEN_WIDTH)
        self.down = nn.Linear(4 * TOKEN_WIDTH, TOKEN_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.dropout(functional.gelu(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(inner)


class _Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False, context_fn=save_products) if 1 <= number <= 4 else block(x)
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


def _saves_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def save_products() -> Any:
    return create_selective_checkpoint_contexts(_saves_products)


class _Experts(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.router = nn.Linear(TOKEN_WIDTH, 4, bias=False)
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
    def __init__(self, breaks: bool, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Experts(breaks) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _tokens(length: int = 64) -> list[torch.Tensor]:
    return tokens(rows=8, length=length, num_words=NUM_WORDS)


def _vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(512, TOKEN_WIDTH, generator=generator) for _ in range(3)]


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


# ----------------------------------------------------------------------------------------------------------------------
# An op of a user. It is not in the file of its test: pytest loads a test file by one name and files that import from it
# by another, and the second definition frees the op of the first, which still has the parameters of its test. Such a
# call ended in std::bad_alloc in one of three runs.


@torch.library.custom_op("elixir_tests::noted", mutates_args=())
def noted(values: torch.Tensor) -> torch.Tensor:
    """Return a copy. An op of a user may do anything else too."""
    raise AssertionError("nobody but the user's step may run this op")


@noted.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


NOTED = torch.ops.elixir_tests.noted.default
