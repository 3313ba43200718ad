"""Models that several ranks train, and their batches, of which each rank takes its rows."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

NUM_WORDS = 211
LENGTH = 16


class Causal(nn.Module):
    """A Hugging Face causal model with the loss in the dtype of its logits: transformers computes it in fp32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.inner(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt2(num_layers: int = 2) -> nn.Module:
    """Return a tiny GPT-2: its vocabulary and its width are odd multiples, so most parts are uneven."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=66, n_head=6, vocab_size=NUM_WORDS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return Causal(GPT2LMHeadModel(config))


def llama(num_layers: int = 2) -> nn.Module:
    """Return a tiny Llama whose output layer is its embedding, with norms in the dtype of the model: transformers
    computes them in fp32, where the gradient of a third of a loss is not a third of the gradient."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = LlamaConfig(
        hidden_size=60, intermediate_size=130, num_hidden_layers=num_layers, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=NUM_WORDS, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, LlamaRMSNorm):
                setattr(module, name, nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))
    return Causal(model)


class Odd(nn.Module):
    """Shapes that are hard to cut: fewer rows than ranks, rows that do not divide, no dimension, tied, frozen, a
    buffer, and one whose gradient is the very tensor that the backward goes on with."""

    def __init__(self, width: int = 100) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.words.weight.data.mul_(0.1)
        self.few = nn.Parameter(torch.randn(2, 90 * width) * 0.1)
        self.up = nn.Linear(width, 4 * width + 1)
        self.down = nn.Linear(4 * width + 1, width)
        self.still = nn.Linear(width, width)
        self.still.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.head = nn.Linear(width, NUM_WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("offset", torch.linspace(-1, 1, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.offset
        few = self.few.view(2, 90, -1).sum(1)
        x = x * few[0] + few[1]
        x = self.scale * x + self.down(functional.gelu(self.up(self.still(x))))
        x = x.mean(0) + self.shift  # no batch any more: the gradient of `shift` is that of the sum
        return functional.cross_entropy(self.head(x), ids[0])


def odd() -> nn.Module:
    """Return an `Odd`, the same weights every time."""
    torch.manual_seed(0)
    return Odd()


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of low rank, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.into = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) * 0.02)
        self.out = nn.Parameter(torch.randn(base.out_features, rank, dtype=base.weight.dtype) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.into.T @ self.out.T


def adapted() -> nn.Module:
    """Return a tiny Llama of which only corrections of its projections are trained."""
    model = llama().requires_grad_(False)
    for layer in model.inner.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name), rank=3))
    return model


def by_peft() -> nn.Module:
    """Return a tiny Llama of which only the adapters that peft puts on its projections are trained."""
    from peft import LoraConfig, get_peft_model

    model = llama(num_layers=1)
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by names that will change
        model.inner = get_peft_model(model.inner, lora)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros, behind which nothing of A has a gradient
            nn.init.normal_(param, std=0.02)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2, "gpt2 of one layer": lambda: gpt2(num_layers=1), "llama": llama,
    "llama of one layer": lambda: llama(num_layers=1), "odd": odd, "adapted": adapted, "peft": by_peft,
}  # fmt: skip


def batches(num_batches: int = 3, rows: int = 48) -> list[torch.Tensor]:
    """Return batches of different random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, NUM_WORDS, (rows, LENGTH), generator=generator) for _ in range(num_batches)]
