"""A rank that trains a GPT-2 in micro-batches by Elixir, or in a loop under `fully_shard` (FSDP2).

    group = Group(DividedCase(by="fsdp"), micro_batches_ranks.__file__)      as in `ranks_worker`

The loop under `fully_shard` reduces gradients in its last micro-batch only (`set_requires_gradient_sync`), and gathers
each block one block ahead of its forward.
"""

import ctypes
import gc
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import quiet  # noqa: F401  before torch
import torch
from activations_worker import OnlyLoss
from emulated_link import Lane, emulate_network, emulate_network_of
from ranks_worker import NUM_RANKS, Case, fsdp, ours, peaks, timed_apart, worst
from torch import distributed
from worker import plan_figures

import elixir_compile as elixir
from elixir_compile.step.divide import micro_batches_of

LAYERS, WIDTH, VOCABULARY, LENGTH = 6, 512, 8192, 128
QUICK_LAYERS, QUICK_WIDTH, QUICK_VOCABULARY, QUICK_LENGTH = 2, 64, 256, 16
NUM_FIRST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedCase(Case):
    """A training on two ranks in micro-batches."""

    rows: int = 8
    """Rows of the batch of each rank."""
    micro_batches: int = 4
    network_bytes_per_s: float | None = None
    """The rate of an emulated network between the ranks; None: gloo as it is."""


def model_of(case: DividedCase) -> torch.nn.Module:
    """Return a small GPT-2 with random weights from seed 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    layers, width, vocabulary = LAYERS, WIDTH, VOCABULARY
    if case.quick:
        layers, width, vocabulary = QUICK_LAYERS, QUICK_WIDTH, QUICK_VOCABULARY
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64 * 2, vocab_size=vocabulary, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def tokens_of(case: DividedCase, vocabulary: int, rank: int) -> torch.Tensor:
    """Return random tokens with `rank` as their seed."""
    shape = (case.rows, QUICK_LENGTH if case.quick else LENGTH)
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(rank))


def loop_of(
    case: DividedCase, model: torch.nn.Module, tokens: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], torch.optim.Optimizer, Lane]:
    """Return the forward and backward of a step by `fully_shard`, its optimizer, and the lane of its network."""
    compiled, optimizer = fsdp(case, model)
    for block, after in itertools.pairwise(model.transformer.h):
        block.set_modules_to_forward_prefetch([after])
    lane = emulate_network_of(model, case.network_bytes_per_s)
    parts = tokens.chunk(case.micro_batches)

    def backward() -> torch.Tensor:
        total = torch.zeros(())
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = compiled(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
            total += loss.detach()
        lane.last().synchronize()
        return total

    return backward, optimizer, lane


def divided_of(
    case: DividedCase, model: torch.nn.Module, tokens: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], torch.optim.Optimizer, Lane, Callable]:
    """Return what `loop_of` returns for a step by Elixir, and the compiled model."""
    lane = emulate_network(case.network_bytes_per_s)
    compiled, optimizer = ours(case, OnlyLoss(model), micro_batches=case.micro_batches)

    def backward() -> torch.Tensor:
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return backward, optimizer, lane, compiled


def work(case: DividedCase, rank: int, port: int) -> None:
    """Print the figures of the first steps, then take as many steps as each line of standard input says."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS, timeout=timedelta(minutes=10)
    )
    model = model_of(case)
    tokens = tokens_of(case, model.config.vocab_size, rank)
    param_bytes = sum(param.nbytes for param in model.parameters())
    compiled = None
    if case.by == "fsdp":
        backward, optimizer, lane = loop_of(case, model, tokens)
    else:
        backward, optimizer, lane, compiled = divided_of(case, model, tokens)
    del model

    def keep_grads() -> torch.Tensor:
        loss = backward()
        optimizer.step()
        return loss

    def step() -> torch.Tensor:
        loss = keep_grads()
        optimizer.zero_grad()
        return loss

    losses = []
    for _ in range(NUM_FIRST):
        loss = step()
        distributed.all_reduce(loss)
        losses.append(float(loss) / NUM_RANKS)
    gc.collect()
    sent, nbytes = lane.num_sent, lane.nbytes
    figures: dict[str, object] = dict(worst(peaks(keep_grads, optimizer, case)))
    figures |= {"collectives": lane.num_sent - sent, "received_bytes": lane.nbytes - nbytes, "losses": losses}
    optimizer.zero_grad()
    if compiled is not None:
        (made, *_) = elixir.compilations(compiled)
        figures |= {"plan": plan_figures(made.plan), "ran_micro_batches": micro_batches_of(made.plan)}
    ctypes.CDLL(None).malloc_trim(0)  # several cases share the memory of the machine
    figures |= {"param_bytes": param_bytes, "num_tokens": NUM_RANKS * tokens.numel()}
    print(json.dumps(figures), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed_apart(step, int(line))), flush=True)


if __name__ == "__main__":
    own_case, own_rank, own_port = sys.argv[1:]
    work(DividedCase(**json.loads(own_case)), int(own_rank), int(own_port))
