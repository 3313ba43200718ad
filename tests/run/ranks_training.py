"""Models that several ranks train, by torch alone on the whole batch and on several ranks, and how far they are
apart."""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Lane
from elixir_compile.runtime.lowering import PlacedRegion

# ----------------------------------------------------------------------------------------------------------------------
# Models that several ranks train, and their batches, of which each rank takes its rows.


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


# ----------------------------------------------------------------------------------------------------------------------
# Train one model by torch alone on the whole batch and on several ranks in turn, and say how far they are apart.


Make = Callable[[Any], torch.optim.Optimizer]
CLIP = 0.5


@dataclass(kw_only=True)
class Pair:
    """A model on this rank and its double, which torch trains alone on the whole batch."""

    model: nn.Module
    compiled: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    double: nn.Module
    double_optimizer: torch.optim.Optimizer

    def step(self, batch: torch.Tensor, *, num_micro_batches: int = 1) -> dict[str, float]:
        """Train both for one step, and return how far losses and clip norms are apart."""
        loss, norm = self.own_step(batch, num_micro_batches)
        expected_loss, expected_norm = self.double_step(batch, num_micro_batches)
        return {"loss": abs(loss - expected_loss), "norm": abs(norm - expected_norm)}

    def own_step(self, batch: torch.Tensor, num_micro_batches: int = 1) -> tuple[float, float]:
        """Train this rank's rows, and return the loss of all ranks and the clip norm."""
        total = self.own_backward(batch, num_micro_batches)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, full(norm).item()

    def own_backward(self, batch: torch.Tensor, num_micro_batches: int = 1) -> float:
        """Run this rank's rows forward and backward, and return the loss of all ranks."""
        total = 0.0
        for ids in batch.chunk(num_micro_batches):
            loss = self.compiled(own_rows(ids)) / num_micro_batches
            loss.backward()
            total += mean_over_ranks(loss)
        return total

    def double_step(self, batch: torch.Tensor, num_micro_batches: int = 1) -> tuple[float, float]:
        """Train the whole batch; the loss is the mean of that of each rank's rows, which a model may mix."""
        total = self.double_backward(batch, num_micro_batches)
        norm = nn.utils.clip_grad_norm_(self.double.parameters(), CLIP)
        self.double_optimizer.step()
        self.double_optimizer.zero_grad()
        return total, norm.item()

    def double_backward(self, batch: torch.Tensor, num_micro_batches: int = 1) -> float:
        """Run the whole batch forward and backward, and return the loss."""
        total = 0.0
        for ids in batch.chunk(num_micro_batches):
            rows = ids.chunk(distributed.get_world_size())
            loss = torch.stack([self.double(own) for own in rows]).mean() / num_micro_batches
            loss.backward()
            total += loss.item()
        return total

    @torch.no_grad()
    def apart(self) -> float:
        """Return the largest difference between a weight and its double's."""
        own, other = self.model.state_dict(), self.double.state_dict()
        assert list(own) == list(other)
        return max((full(value) - other[name]).abs().max().item() for name, value in own.items())


def own_rows(batch: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of `batch`."""
    return batch.chunk(distributed.get_world_size())[distributed.get_rank()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a plain one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of the ranks' losses."""
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    return mean.item() / distributed.get_world_size()


@contextmanager
def slower(seconds: Callable[[], float]) -> Iterator[None]:
    """Inside, each region of this rank computes for `seconds()` more by `time.perf_counter`, which times regions.

    **Emulated**: the clock jumps, and nobody waits.
    """
    passed_s, real, run = 0.0, time.perf_counter, PlacedRegion.forward

    def forward(region: PlacedRegion, box: list[Any]) -> Any:
        nonlocal passed_s
        with region._ledger.span(Lane.COMPUTE, region._label, times=0):
            passed_s += seconds()
        return run(region, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: real() + passed_s)
        patch.setattr(PlacedRegion, "forward", forward)
        yield


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh of CPUs."""
    return init_device_mesh("cpu", tuple(shape))


def hybrid(params: Any) -> torch.optim.Optimizer:
    """Return Elixir's AdamW. With so large an eps an update is smooth in its gradient: rounding stays rounding."""
    return elixir.HybridAdamW(params, lr=1e-3, eps=1e-3)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-3)


def compiled_with(model: nn.Module, **options: object) -> Callable[..., Any]:
    """Return `model` compiled by Elixir, op by op."""
    torch._dynamo.reset()
    quick = {"search_timeout": 1.0}  # the first rank searches while the others wait; a plan that is good enough will do
    options = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, **quick, **options}
    return torch.compile(model, backend="elixir", options=options)


def pair_of(
    name: str, shape: Sequence[int], *, dtype: torch.dtype = torch.float64, make: Make = hybrid, **options: object
) -> Pair:
    """Return the model called `name` on a mesh of `shape`, and its double."""
    double = MODELS[name]().to(dtype)
    model = elixir.prepare(MODELS[name]().to(dtype), mesh=mesh_of(shape))
    return Pair(
        model=model,
        compiled=compiled_with(model, **options),
        optimizer=make(model.parameters()),
        double=double,
        double_optimizer=adamw(double.parameters()),
    )


def least_bytes(
    name: str, batch: torch.Tensor, shape: Sequence[int], *, dtype: torch.dtype = torch.float64, **options: object
) -> int:
    """Return the smallest budget under which a step of the model called `name` trains its whole batch, as the error
    names it.

    It takes a capture to know, so it is kept in a file for other processes of the same run of tests. All ranks look for
    the file before the first of them writes it: a capture ends when all have captured.
    """
    asked = [name, list(batch.shape), list(shape), str(dtype), str(torch.get_default_device()), sorted(options.items())]
    text = json.dumps(asked, default=str)
    kept = Path(os.environ["ELIXIR_CACHE_DIR"], "..", f"least-{hashlib.sha256(text.encode()).hexdigest()}").resolve()
    if kept.exists():
        return int(kept.read_text(encoding="ascii"))
    pair = pair_of(name, shape, dtype=dtype, **{**options, "device_memory": 1, "micro_batches": 1})
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        pair.compiled(own_rows(batch))
    distributed.barrier()
    if distributed.get_rank() == 0:
        written = kept.with_suffix(".part")
        written.write_text(str(caught.value.needed_bytes), encoding="ascii")
        written.rename(kept)
    return caught.value.needed_bytes


def homes(model: nn.Module) -> dict[str, list[str]]:
    """Return on which sides parameters and optimizer state are, of buckets that are cut over the ranks."""
    placed = executor_of(model).buckets.in_force(for_training=True)
    own = [placement for bucket, placement in placed if bucket.is_sharded]
    return {
        "param": sorted({placement.param.value for placement in own}),
        "optim": sorted({placement.optim.value for placement in own}),
    }
