"""Moments in fewer bytes: torch's ops against numpy, and what stochastic rounding keeps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.optim.precision import MomentForm, decode, encode, noise, noise_key
from tests.run.moment_reference import (
    bits_of,
    differences,
    odd_moments,
    reference_decode,
    reference_encode,
    reference_noise,
    spoiled,
)

REDUCED = [MomentForm.BFLOAT16, MomentForm.INT8]
KEYS = [None, noise_key(5, 3)]
"""To the nearest, as conversions are, and with noise, as updates are."""
SIZES = [1, 128, 129, 255, 1000, 2300, 4096]


@pytest.mark.parametrize("key", KEYS, ids=["nearest", "noise"])
@pytest.mark.parametrize("form", REDUCED)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("is_spoiled", [False, True])
def test_encode_and_decode_are_the_formula(form: MomentForm, key: int | None, numel: int, is_spoiled: bool) -> None:
    first, second = odd_moments(numel, seed=numel)
    if is_spoiled:
        spoiled(first, second)
    with np.errstate(all="ignore"):
        wanted = reference_encode(first.numpy(), second.numpy(), form, key)
        values = reference_decode(wanted, form)
    found = encode(first, second, form, key=key)
    assert (found.exp_avg.dtype, found.exp_avg_sq.dtype) == form.dtypes
    assert not differences(found, wanted)
    for one, other in zip(decode(found, form), values, strict=True):
        numbers = torch.from_numpy(other)
        assert torch.equal(bits_of(one.nan_to_num(7.0)), bits_of(numbers.nan_to_num(7.0)))
        assert torch.equal(one.isnan(), numbers.isnan())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300),
    st.sampled_from(REDUCED),
    st.none() | st.integers(0, 2**32 - 1),
)
def test_any_bits_are_encoded_as_the_formula_says(words: list[int], form: MomentForm, key: int | None) -> None:
    bits = np.array(words, np.uint32)
    first, second = bits.view(np.float32).copy(), (bits[::-1] & 0x7FFFFFFF).view(np.float32).copy()
    # The noise of a number beside a NaN depends on the sign of the NaN, and only bf16 keeps that number.
    is_nan = np.isnan(first) | np.isnan(second)
    first[is_nan], second[is_nan] = np.nan, np.nan
    with np.errstate(all="ignore"):
        wanted = reference_encode(first, second, form, key)
    found = encode(torch.from_numpy(first), torch.from_numpy(second), form, key=key)
    assert not differences(found, wanted)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 2000),
    st.floats(-40, 30),
    st.sampled_from(REDUCED),
    st.sampled_from(KEYS),
)
def test_what_was_decoded_is_encoded_again_bit_for_bit(
    seed: int, numel: int, power: float, form: MomentForm, key: int | None
) -> None:
    torch.manual_seed(seed)
    first, second = odd_moments(numel, seed=seed)
    first, second = first * 10.0**power, second * 10.0 ** (2 * min(power, 19.0))
    once = encode(first, second, form, key=key)
    assert not differences(once, encode(*decode(once, form), form, key=None))


@pytest.mark.parametrize("is_root", [False, True])
def test_every_largest_value_of_a_block_comes_back(is_root: bool) -> None:
    """Largest values over two powers of two, and at both ends of the range, each beside 127 values up to it."""
    torch.manual_seed(0)
    ends = [2.0**-90, 1.75 * 2.0**127] if not is_root else [2.0**-50, 2.0**63]
    near = torch.tensor(ends).view(torch.int32)[:, None] + torch.arange(-40, 41, dtype=torch.int32)
    largest = torch.cat([torch.linspace(1, 4, 4000), near.view(torch.float32).flatten()])
    values = largest[:, None] * torch.rand(len(largest), 128)
    values[:, 5] = largest
    first = torch.zeros_like(values) if is_root else values
    second = values.square() if is_root else torch.zeros_like(values)
    once = encode(first, second, MomentForm.INT8, key=noise_key(1, 1))
    assert not differences(once, encode(*decode(once, MomentForm.INT8), MomentForm.INT8, key=None))
    found = once.exp_avg_sq_scale if is_root else once.exp_avg_scale
    assert found is not None
    assert bool((found > 0)[:4000].all())
    assert int((found == 0).sum()) > 20


@pytest.mark.parametrize("key", KEYS, ids=["nearest", "noise"])
def test_no_positive_root_becomes_zero(key: int | None) -> None:
    second = torch.logspace(-40, 0, 1280, base=2).double().square().float()
    second[::5] = 0.0
    _, found = decode(encode(second, second, MomentForm.INT8, key=key), MomentForm.INT8)
    assert torch.equal(found > 0, second > 0)


def test_parts_that_begin_at_blocks_are_encoded_alone() -> None:
    first, second = odd_moments(1000)
    whole = encode(first, second, MomentForm.INT8, key=9)
    parts = [encode(first[part], second[part], MomentForm.INT8, key=9) for part in (slice(384), slice(384, None))]
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_noise_is_the_formula_and_differs_by_seed_and_step() -> None:
    first, second = odd_moments(4096)
    found = noise(first, second, noise_key(3, 2))
    wanted = reference_noise(first.numpy(), second.numpy(), noise_key(3, 2)).astype(np.uint32).view(np.int32)
    assert torch.equal(found, torch.from_numpy(wanted))
    keys = {noise_key(seed, step) for seed in (0, 1, 2**32, 2**33) for step in range(1000)}
    assert len(keys) >= 3999  # of 2^32


def values_of(kind: str, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second moments as they come in training: after one step, after many, and where gradients are zero.

    Few are equal in both: equal elements get equal noise, and count as one.
    """
    torch.manual_seed(1)
    grad = torch.randn(numel).mul_(torch.randn(numel).exp_()).mul_(0.01)
    if kind == "first step":
        return grad * 0.1, grad * grad * 0.001
    if kind == "equal second":
        return grad * 0.1, torch.full((numel,), 1e-6)
    if kind == "equal first":
        return torch.full((numel,), 1e-3), grad.square() * 0.001
    return grad.bfloat16().float() * 0.9, (grad.square() * torch.rand(numel)).bfloat16().float() * 0.999


@pytest.mark.parametrize("form", REDUCED)
@pytest.mark.parametrize("kind", ["first step", "equal second", "equal first", "decayed"])
def test_stochastic_rounding_is_unbiased_over_values(form: MomentForm, kind: str) -> None:
    """The mean error, in steps between two numbers, lies within 4 standard errors of zero, for elements of one step.

    So do the products of the error with what was rounded off below, with the noise of the other moment's error, and
    with the neighbour's error.
    """
    numel = 1 << 16
    first, second = values_of(kind, numel)
    moments = encode(first, second, form, key=noise_key(7, 11))
    found = decode(moments, form)
    roots = [each.sqrt() for each in (found[1], second)] if form.has_scales else [found[1], second]
    errors = []
    for stored, exact, scale in (
        (found[0], first, moments.exp_avg_scale),
        (*roots, moments.exp_avg_sq_scale),
    ):
        nearest = steps_of(exact, form, scale)
        error = (stored.double() - exact.double()) / nearest
        below = (exact.double().abs() / nearest) % 1.0
        # Roots that had to become positive are the one bias that is wanted.
        is_free = (below > 0) & (exact.abs() / nearest > 1)
        error = torch.where(is_free, error, 0.0)
        errors.append(error)
        if len(exact.unique()) == 1:
            continue  # the scale of each block is made for this value
        assert error.abs().max() < 1.01
        for products in (error, error * (below - 0.5), error * error.roll(1)):
            spread = float(products.std()) / math.sqrt(numel)
            assert abs(float(products.mean())) < 4 * spread
    both = errors[0] * errors[1]
    assert abs(float(both.mean())) <= 4 * float(both.std()) / math.sqrt(numel)


def test_the_noise_of_a_value_is_uniform_over_steps() -> None:
    """Over 4096 steps, the mean noise of each of 64 values is 1/2, and that of successive steps has no correlation."""
    first, second = values_of("decayed", 64)
    bits = torch.stack([noise(first, second, noise_key(0, step)) for step in range(1, 4097)])
    for part in (bits & 0xFFFF, bits >> 16 & 0xFFFF):
        share = part.double() / 65536 - 0.5
        spread = math.sqrt(1 / 12 / 4096)
        assert float(share.mean(0).abs().max()) < 4.5 * spread
        assert float((share[1:] * share[:-1]).mean(0).abs().max()) < 4.5 / 12 / 64


def steps_of(exact: torch.Tensor, form: MomentForm, scale: torch.Tensor | None) -> torch.Tensor:
    """The distance between the two numbers of the form around each value."""
    exponent = exact.abs().double().frexp()[1].double() - 1
    if form is MomentForm.BFLOAT16:
        return torch.exp2(exponent - 7)
    assert scale is not None
    return scale.double().repeat_interleave(128)


@pytest.mark.parametrize("form", REDUCED)
def test_a_decaying_second_moment_keeps_its_mean_and_nearest_rounding_stalls(form: MomentForm) -> None:
    """400 steps of v <- 0.999 v: the mean over blocks is within 4 standard errors of 0.999^400; nearest stays at 1.

    In int8 the scale decays with the largest value, so codes stay and the block decays as it should, rounded or not.
    The largest value of each block therefore stays as it is.
    """
    numel, steps = 128 * 128, 400
    torch.manual_seed(0)
    start = torch.rand(numel).add_(0.5)
    start[::128] = 4.0
    first = torch.randn(numel)  # differs between elements, so their noise does
    kept = {}
    for is_noisy in (False, True):
        moments = encode(first, start, form, key=None)
        begin = decode(moments, form)[1]
        for step in range(steps):
            second = decode(moments, form)[1] * 0.999
            second[::128] = 4.0
            moments = encode(first, second, form, key=noise_key(0, step) if is_noisy else None)
        kept[is_noisy] = (decode(moments, form)[1] / begin).view(128, 128)[:, 1:]
    assert bool((kept[False] == 1.0).all())
    shares = kept[True]
    if form.has_scales:
        shares = shares.sqrt()  # what is rounded is the root
    wanted = 0.999 ** (steps / 2 if form.has_scales else steps)
    spread = float(shares.mean(1).std()) / math.sqrt(128)
    assert abs(float(shares.mean()) - wanted) < 4 * spread + 1e-4
    assert float(shares.std()) < 0.25
