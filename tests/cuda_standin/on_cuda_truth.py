"""What the stand-in computes is what the CPU computes, and Elixir on it what torch computes on it, bit for bit.

Ops run on the CPU's kernels, so models without attention by one kernel give the CPU's bits. Attention is written by
hand for the stand-in, in float: it is compared within a few roundings.
"""

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from elixir_compile.session.machine import library_bytes
from tests.cuda_standin import device as standin
from tests.gpu.accelerator import Attention, gpt2
from tests.run.models import WIDTH, Stack, hf_batches, seeded, small_gpt2, small_llama, vectors
from tests.run.training import Run, assert_offloads, assert_same, by_elixir, by_torch, planned_peak_bytes, tight_bytes

DEVICE = torch.device("cuda", 0)


def placed(batch: Any) -> Any:
    return {name: value.to(DEVICE) for name, value in batch.items()} if isinstance(batch, dict) else batch.to(DEVICE)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Any]]]] = {
    "mlp": (functools.partial(seeded, Stack), vectors),
    "gpt2": (functools.partial(small_gpt2, attn_implementation="eager"), hf_batches),
    "gpt2 sdpa": (functools.partial(small_gpt2, attn_implementation="sdpa"), hf_batches),
    "llama": (functools.partial(small_llama, tied=False), hf_batches),
    "batch norm": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), seeded(Stack)), vectors),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_the_cpu(name: str) -> None:
    make, batches = MODELS[name]
    model, given = make(), batches(3)
    expected = by_torch(model).train(given)
    got = by_torch(copy.deepcopy(model).to(DEVICE)).train(map(placed, given))
    losses = [torch.stack(run.losses).cpu() for run in (expected, got)]
    if name in ("mlp", "gpt2", "batch norm"):
        assert torch.equal(*losses)
        assert all(torch.equal(weight.cpu(), expected.weights[name]) for name, weight in got.weights.items())
    torch.testing.assert_close(*losses, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
def test_autocast_computes_as_on_the_cpu(name: str) -> None:
    make, batches = MODELS[name]
    model, given = make(), batches(1)[0]
    found = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(model).to(device)
        with torch.autocast(device, torch.bfloat16):
            out = (
                own(**{key: value.to(device) for key, value in given.items()}).loss
                if isinstance(given, dict)
                else own(given.to(device))
            )
        out.backward()
        found.append((out.detach().float().cpu(), next(own.parameters()).grad.cpu()))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-2, atol=0.0)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0.1, atol=2e-2 * found[0][1].abs().max().item())


def test_dropout_scales_what_it_keeps_and_repeats_by_its_seed() -> None:
    values = torch.ones(4000, device=DEVICE, requires_grad=True)
    torch.manual_seed(5)
    dropped = nn.functional.dropout(values, 0.25)
    dropped.sum().backward()
    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert 0.7 < (dropped != 0).float().mean().item() < 0.8
    assert torch.equal(values.grad, dropped)
    torch.manual_seed(5)
    assert torch.equal(nn.functional.dropout(values, 0.25), dropped)


KERNELS = {
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "efficient bf16": (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", ["plain", "causal", "mask"])
def test_attention_is_what_products_and_a_softmax_give(kernel: str, case: str) -> None:
    backend, dtype = KERNELS[kernel]
    if backend is SDPBackend.FLASH_ATTENTION and case == "mask":
        pytest.skip("flash attention takes no mask")
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 24, 16) for _ in "qkv"]
    options: dict[str, Any] = {"is_causal": case == "causal"}
    mask = torch.randn(2, 4, 24, 24) if case == "mask" else None
    wanted = [each.to(dtype).double().requires_grad_() for each in given]
    expected = nn.functional.scaled_dot_product_attention(
        *wanted, attn_mask=None if mask is None else mask.to(dtype).double(), **options
    )
    ours = [each.to(DEVICE, dtype).requires_grad_() for each in given]
    with sdpa_kernel(backend):
        got = nn.functional.scaled_dot_product_attention(
            *ours, attn_mask=None if mask is None else mask.to(DEVICE, dtype), **options
        )
    weights = torch.randn(2, 4, 24, 16)
    (expected * weights).sum().backward()
    (got * weights.to(DEVICE, dtype)).sum().backward()
    close = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(got.double().cpu(), expected, rtol=close, atol=close)
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine.grad.double().cpu(), theirs.grad, rtol=close, atol=close)


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_drops_the_same_shares_in_its_backward(kernel: str) -> None:
    """The output is linear in the values: its gradient, times the values, is the output."""
    backend, dtype = KERNELS[kernel]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 16, device=DEVICE, dtype=dtype, requires_grad=True) for _ in "qkv")
    with sdpa_kernel(backend):
        out = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        weights = torch.randn_like(out)
        (to_v,) = torch.autograd.grad((out * weights).sum(), v, retain_graph=True)
    torch.testing.assert_close((to_v * v).sum(), (out * weights).sum(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "gpt2 sdpa", "llama"])
@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("kind", [standin.LATE, standin.RANDOM])
def test_elixir_trains_on_cuda_as_torch_does_bit_for_bit(name: str, is_tight: bool, kind: int) -> None:
    make, batches = MODELS[name]
    model, given = make().to(DEVICE), [placed(batch) for batch in batches(4)]
    # Llama asks whether it is compiled, and passes attention a mask or none.
    expected = by_torch(model, backend="aot_eager" if name == "llama" else None).train(given)
    options = {"device_memory": tight_bytes(model, given[0])} if is_tight else {}
    with standin.policy(kind, seed=7), standin.ordered():
        got = by_elixir(model, **options).train(given)
        assert_same(expected, on_cuda(got))
        if is_tight:
            assert_offloads(got)


def on_cuda(run: Run) -> Run:
    """Return `run` with all weights on the device."""
    return Run(model=run.model.to(DEVICE), compiled=run.compiled, optimizer=run.optimizer, losses=run.losses)


@pytest.mark.parametrize("is_tight", [False, True])
def test_a_step_takes_what_is_planned(is_tight: bool) -> None:
    model = gpt2(2, 64, 128).to(DEVICE)
    batches = [placed(batch) for batch in hf_batches(4)]
    options = {"device_memory": tight_bytes(model, batches[0])} if is_tight else {}
    gc.collect()
    before_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"] - library_bytes(DEVICE)
    run = by_elixir(model, replan=False, **options).train(batches[:2])
    torch.cuda.reset_peak_memory_stats()
    run.train(batches[2:])
    peak_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before_bytes
    assert 0.95 * planned_peak_bytes(run) <= peak_bytes <= planned_peak_bytes(run) + (1 << 14)


def test_attention_with_dropout_trains_without_a_race() -> None:
    model = seeded(Attention).to(DEVICE)
    batches = [torch.randn(2, 32, 128, device=DEVICE) for _ in range(3)]
    with standin.policy(standin.LATE), standin.ordered():
        run = by_elixir(model).train(batches)
    assert all(loss.isfinite() for loss in run.losses)
