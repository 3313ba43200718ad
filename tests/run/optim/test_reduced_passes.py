"""Host passes with moments in fewer bytes: the arithmetic of fp32 moments, and the formula of each form around it."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elixir_compile.optim.host import HostThreads, bf16_adamw, flat_step, mixed_adamw, passes, split_adamw
from elixir_compile.optim.host.kernel import GRAIN
from elixir_compile.optim.host.passes import _kernel
from elixir_compile.optim.precision import MomentForm, Moments, noise_key
from tests.run.moment_reference import (
    bits_of,
    differences,
    odd_moments,
    reference_bfloat16,
    reference_decode,
    reference_encode,
    reference_noise,
    spoiled,
    zero_moments,
)

SCALARS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
REDUCED = [MomentForm.BFLOAT16, MomentForm.INT8]
WEIGHTS = ["fp32", "master and bf16", "master and fp16", "split", "bf16 alone"]
SEED = 2**35 + 9
KEY = noise_key(SEED, 3)


def extras_of(moments: Moments, form: MomentForm) -> dict[str, Any]:
    """The keyword arguments of a pass with `moments`."""
    scales = {"exp_avg_scale": moments.exp_avg_scale, "exp_avg_sq_scale": moments.exp_avg_sq_scale}
    return {**SCALARS, **scales, "form": form, "seed": SEED}


class Case:
    """A parameter with random weights, moments in a form, and gradients."""

    def __init__(self, numel: int, form: MomentForm, *, is_spoiled: bool = False) -> None:
        self.form = form
        torch.manual_seed(numel)
        first, second = odd_moments(numel, seed=numel)
        if is_spoiled:
            spoiled(first, second)
        with np.errstate(all="ignore"):
            self.moments = (
                Moments(exp_avg=first, exp_avg_sq=second)
                if form is MomentForm.FLOAT32
                else reference_encode(first.numpy(), second.numpy(), form, noise_key(1, 1))
            )
        self.master = torch.randn(numel)
        self.grad = (torch.randn(numel) * 0.01).bfloat16()
        if is_spoiled:
            self.grad[3], self.grad[numel // 2], self.grad[numel - 1] = math.nan, math.inf, 3e38
            self.master[7], self.master[11] = math.inf, 3.4e38
        if not is_spoiled:
            self.grad[: numel // 3] = 0.0

    def weights(self, kind: str) -> tuple[Callable[..., None], list[torch.Tensor]]:
        """The pass for weights of `kind`, and new tensors: what is updated, and the parameter beside it."""
        if kind == "bf16 alone":
            return bf16_adamw, [self.master.bfloat16()]
        if kind == "split":
            high, low = torch.empty_like(self.grad), torch.empty(len(self.grad), dtype=torch.int16)
            flat_step.split(self.master, high, low)
            return split_adamw, [low, high]
        if kind == "fp32":
            return mixed_adamw, [self.master.clone()]
        dtype = torch.bfloat16 if kind == "master and bf16" else torch.float16
        return mixed_adamw, [self.master.clone(), torch.empty(len(self.grad), dtype=dtype)]

    def run(self, kind: str, threads: HostThreads | None = None) -> tuple[Moments, list]:
        """The moments and the weights after step 3."""
        moments = copied(self.moments)
        update, tensors = self.weights(kind)
        extras = extras_of(moments, self.form)
        pair = (moments.exp_avg, moments.exp_avg_sq)
        param = [] if update is bf16_adamw else [tensors[1] if len(tensors) > 1 else None]
        update(tensors[0], *pair, self.grad, *param, 3, threads=threads, **extras)
        return moments, tensors

    def wanted(self, kind: str) -> tuple[Moments, list]:
        """The same by the pass for exact moments, between numpy's decoding and encoding."""
        pair = (self.moments.exp_avg, self.moments.exp_avg_sq)
        if self.form is not MomentForm.FLOAT32:
            with np.errstate(all="ignore"):
                pair = tuple(map(torch.from_numpy, reference_decode(self.moments, self.form)))
        first, second = (each.clone() for each in pair)
        update, tensors = self.weights(kind)
        if update is bf16_adamw:
            tensors = [tensors[0].float()]
            update = mixed_adamw
        update(tensors[0], first, second, self.grad, tensors[1] if len(tensors) > 1 else None, 3, **SCALARS)
        values = (first.numpy(), second.numpy())
        with np.errstate(all="ignore"):
            moments = (
                Moments(exp_avg=first, exp_avg_sq=second)
                if self.form is MomentForm.FLOAT32
                else reference_encode(*values, self.form, KEY)
            )
            if kind == "bf16 alone":
                tensors = [self._rounded(tensors[0].numpy(), *values)]
        return moments, tensors

    def _rounded(self, weights: np.ndarray, first: np.ndarray, second: np.ndarray) -> torch.Tensor:
        second = np.sqrt(second) if self.form.has_scales else second
        mixed = reference_noise(first, second, KEY) ^ weights.view(np.uint32).astype(np.uint64)
        noise = mixed * np.uint64(0x85EBCA77) % 2**32 // 2**16
        return torch.from_numpy(reference_bfloat16(weights, noise).view(np.int16)).view(torch.bfloat16)


def copied(moments: Moments) -> Moments:
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    tensors = {name: getattr(moments, name) for name in names}
    return Moments(**{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()})


def check(case: Case, kind: str) -> None:
    moments, tensors = case.run(kind)
    wanted, weights = case.wanted(kind)
    assert not differences(moments, wanted)
    for found, other in zip(tensors, weights, strict=True):
        assert torch.equal(bits_of(found), bits_of(other))


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("form", REDUCED)
def test_a_pass_is_the_exact_pass_between_the_formulas(form: MomentForm, kind: str) -> None:
    for numel in (1, 77, 128, 129, 383, 2000, 2560):
        check(Case(numel, form), kind)


def test_bf16_weights_with_exact_moments() -> None:
    check(Case(1233, MomentForm.FLOAT32), "bf16 alone")


@pytest.mark.parametrize("form", REDUCED)
def test_nan_infinity_and_the_largest_numbers(form: MomentForm) -> None:
    """Blocks with scales take the noise of finite values only. In bf16, so does a second moment beside a NaN."""
    case = Case(3072, form, is_spoiled=True)
    moments, _ = case.run("split")
    wanted, _ = case.wanted("split")
    if form is MomentForm.BFLOAT16:
        beside = moments.exp_avg.isnan() & ~moments.exp_avg_sq.isnan()
        for each in (moments, wanted):
            each.exp_avg_sq[beside] = 0.0
    assert not differences(moments, wanted)
    assert moments.exp_avg.float().isnan().any() or moments.exp_avg_scale.isnan().any()


@pytest.fixture(params=["cc -O1", "cc -mno-avx512f", "cc -mno-avx -mno-fma -mno-f16c"])
def other_build(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel as it is compiled for processors without some instructions."""
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", request.param)
    _kernel.cache_clear()
    yield
    _kernel.cache_clear()


@pytest.mark.usefixtures("other_build")
def test_other_processors_give_the_same_bits() -> None:
    for form in REDUCED:
        for numel in (768, 999):
            check(Case(numel, form), "split")
            check(Case(numel, form), "bf16 alone")


@pytest.mark.parametrize("form", [*REDUCED, MomentForm.FLOAT32])
def test_threads_change_no_bit(form: MomentForm) -> None:
    numel = 2 * GRAIN + 4321
    moments = zero_moments((numel,), form)
    torch.manual_seed(0)
    param = torch.randn(numel).bfloat16()
    grads = [torch.randn(numel).bfloat16() for _ in range(2)]
    found = []
    for num_threads in (1, 2, 3):
        state, weights = copied(moments), param.clone()
        extras = extras_of(state, form)
        pair = (state.exp_avg.view(-1), state.exp_avg_sq.view(-1))
        for step, grad in enumerate(grads, start=1):
            bf16_adamw(weights, *pair, grad, step, threads=HostThreads(num_threads), **extras)
        found.append((state, weights))
    for state, weights in found[1:]:
        assert not differences(state, found[0][0])
        assert torch.equal(weights, found[0][1])
    assert not torch.equal(found[0][1], param)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("form", [*REDUCED, MomentForm.FLOAT32])
def test_without_a_compiler_the_formulas_are_around_torchs_update(
    form: MomentForm, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fused AdamW rounds otherwise than the kernel in its last bits; numpy encodes what it computed."""
    monkeypatch.setattr(passes, "kernel", lambda: None)
    check(Case(1200, form), kind)
    monkeypatch.setattr(flat_step, "BLOCK", 640)
    check(Case(2560, form), kind)


def test_a_split_master_with_reduced_moments_is_the_whole_master() -> None:
    case = Case(1500, MomentForm.INT8)
    whole, master = case.run("fp32")
    halves, (low, high) = case.run("split")
    assert not differences(whole, halves)
    assert torch.equal(flat_step.joined(high, low), master[0])


def _given() -> dict[str, Any]:
    state = zero_moments((400,), MomentForm.INT8)
    return {
        "master": torch.zeros(400),
        "exp_avg": state.exp_avg.view(-1),
        "exp_avg_sq": state.exp_avg_sq.view(-1),
        "grad": torch.zeros(400),
        "param": None,
        "step": 1,
        **extras_of(state, MomentForm.INT8),
    }


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("exp_avg", torch.zeros(400), "exp_avg has dtype torch.float32: needs torch.int8"),
        ("exp_avg_sq", torch.zeros(400, dtype=torch.int8), "exp_avg_sq has dtype torch.int8: needs torch.uint8"),
        ("exp_avg_scale", None, "exp_avg_scale None: moments in int8 have scales"),
        ("exp_avg_sq_scale", torch.zeros(5), "exp_avg_sq_scale has 5 elements: needs 4"),
        ("exp_avg_scale", torch.zeros(4).half(), "exp_avg_scale has dtype torch.float16: needs torch.float32"),
        ("max_exp_avg_sq", torch.zeros(400), "AMSGrad needs moments in float32"),
    ],
)
def test_what_does_not_fit_the_form_is_refused(name: str, wrong: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mixed_adamw(**{**_given(), name: wrong})


def test_bf16_adamw_refuses_other_parameters() -> None:
    zeros = torch.zeros(8)
    with pytest.raises(ValueError, match=r"param has dtype torch\.float32: needs torch.bfloat16"):
        bf16_adamw(zeros, zeros, zeros, zeros, 1, **SCALARS)
    with pytest.raises(ValueError, match="AMSGrad needs moments in float32 and a master"):
        bf16_adamw(zeros.bfloat16(), zeros, zeros, zeros, 1, max_exp_avg_sq=zeros, **SCALARS)


def test_autograd_sees_every_tensor_that_is_written() -> None:
    given = _given()
    mixed_adamw(**given)
    names = ("master", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    assert [given[name]._version for name in names] == [1] * 5
