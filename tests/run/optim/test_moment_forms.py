"""Moments in fewer bytes: torch's ops against numpy, and what stochastic rounding keeps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.optim import moment_forms
from elixir_compile.optim.moment_forms import MomentForm, Rounding, decode, encode, noise, noise_key
from tests.run.moment_reference import (
    bits_of,
    differences,
    odd_moments,
    reference_decode,
    reference_encode,
    reference_noise,
    spoiled,
)

REDUCED = [MomentForm.BFLOAT16, MomentForm.FLOAT8, MomentForm.INT8]
SHAPES = [(1, 128), (3, 128), (4, 129), (5, 255), (2, 1000), (7, 300), (2, 2048)]


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("form", REDUCED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_spoiled", [False, True])
def test_encode_and_decode_are_the_formula(
    form: MomentForm, rounding: Rounding, shape: tuple[int, int], is_spoiled: bool
) -> None:
    rows, row_numel = shape
    first, second = odd_moments(rows * row_numel, row_numel, seed=row_numel)
    if is_spoiled:
        spoiled(first, second)
    with np.errstate(all="ignore"):
        wanted = reference_encode(first.numpy(), second.numpy(), form, row_numel, rounding, 5, 3)
        values = reference_decode(wanted, form, row_numel)
    found = encode(first, second, form, row_numel=row_numel, rounding=rounding, key=noise_key(5, 3))
    assert (found.exp_avg.dtype, found.exp_avg_sq.dtype) == form.dtypes
    assert not differences(found, wanted)
    for one, other in zip(decode(found, form, row_numel=row_numel), values, strict=True):
        numbers = torch.from_numpy(other)
        assert torch.equal(bits_of(one.nan_to_num(7.0)), bits_of(numbers.nan_to_num(7.0)))
        assert torch.equal(one.isnan(), numbers.isnan())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300),
    st.sampled_from(REDUCED),
    st.sampled_from(Rounding),
    st.integers(0, 2**40),
)
def test_any_bits_are_encoded_as_the_formula_says(
    words: list[int], form: MomentForm, rounding: Rounding, seed: int
) -> None:
    bits = np.array(words, np.uint32)
    first, second = bits.view(np.float32).copy(), (bits[::-1] & 0x7FFFFFFF).view(np.float32).copy()
    # The noise of a number beside a NaN depends on the sign of the NaN, and only bf16 keeps that number.
    is_nan = np.isnan(first) | np.isnan(second)
    first[is_nan], second[is_nan] = np.nan, np.nan
    with np.errstate(all="ignore"):
        wanted = reference_encode(first, second, form, len(words), rounding, seed, 1)
    found = encode(
        torch.from_numpy(first),
        torch.from_numpy(second),
        form,
        row_numel=len(words),
        rounding=rounding,
        key=noise_key(seed, 1),
    )
    assert not differences(found, wanted)


@pytest.mark.parametrize("form", REDUCED)
def test_what_was_decoded_is_encoded_without_loss(form: MomentForm) -> None:
    """int8 may change its scale in the last bit, and then codes by one in few cases; the others change no value."""
    first, second = odd_moments(4096, 512)
    once = encode(first, second, form, row_numel=512)
    values = decode(once, form, row_numel=512)
    twice = encode(*values, form, row_numel=512, key=noise_key(1, 1))
    if form is MomentForm.INT8:
        for name in ("exp_avg", "exp_avg_sq"):
            moved = (getattr(once, name).int() - getattr(twice, name).int()).abs()
            assert moved.max() <= 1
            assert (moved > 0).float().mean() < 1e-3
    else:
        for one, other in zip(values, decode(twice, form, row_numel=512), strict=True):
            assert torch.equal(bits_of(one), bits_of(other))


@pytest.mark.parametrize("form", [MomentForm.FLOAT8, MomentForm.INT8])
@pytest.mark.parametrize("rounding", Rounding)
def test_no_positive_root_becomes_zero(form: MomentForm, rounding: Rounding) -> None:
    second = torch.logspace(-60, 0, 1280, base=2).double().square().float()
    second[::5] = 0.0
    _, found = decode(encode(second, second, form, row_numel=1280, rounding=rounding), form, row_numel=1280)
    assert torch.equal(found > 0, second > 0)


@pytest.mark.parametrize("shape", [(6, 300), (1, 5000), (300, 2), (5, 128)])
@pytest.mark.parametrize("most", [256, 1000, 10**6])
def test_spans_are_whole_rows_or_whole_blocks_of_a_row(shape: tuple[int, int], most: int) -> None:
    rows, row_numel = shape
    numel = rows * row_numel
    found = list(moment_forms.spans(numel, row_numel, most))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == numel
    first, second = odd_moments(numel, row_numel)
    whole = encode(first, second, MomentForm.INT8, row_numel=row_numel)
    parts = [
        encode(first[start:stop], second[start:stop], MomentForm.INT8, row_numel=row_numel) for start, stop in found
    ]
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert all(stop - start <= most for start, stop in found)


def test_noise_is_the_formula_and_differs_by_seed_and_step() -> None:
    first, second = odd_moments(4096, 512)
    found = noise(first, second, noise_key(3, 2))
    wanted = reference_noise(first.numpy(), second.numpy(), 3, 2).astype(np.uint32).view(np.int32)
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
    moments = encode(first, second, form, row_numel=128, key=noise_key(7, 11))
    found = decode(moments, form, row_numel=128)
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
    each = scale.double().repeat_interleave(128)
    if form is MomentForm.INT8:
        return each
    return torch.exp2((exponent - each.log2()).clamp(min=-6) - 3) * each


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
    for rounding in Rounding:
        moments = encode(first, start, form, row_numel=128, rounding=Rounding.NEAREST)
        begin = decode(moments, form, row_numel=128)[1]
        for step in range(steps):
            second = decode(moments, form, row_numel=128)[1] * 0.999
            second[::128] = 4.0
            moments = encode(first, second, form, row_numel=128, rounding=rounding, key=noise_key(0, step))
        kept[rounding] = (decode(moments, form, row_numel=128)[1] / begin).view(128, 128)[:, 1:]
    assert bool((kept[Rounding.NEAREST] == 1.0).all())
    shares = kept[Rounding.STOCHASTIC]
    if form.has_scales:
        shares = shares.sqrt()  # what is rounded is the root
    wanted = 0.999 ** (steps / 2 if form.has_scales else steps)
    spread = float(shares.mean(1).std()) / math.sqrt(128)
    assert abs(float(shares.mean()) - wanted) < 4 * spread + 1e-4
    assert float(shares.std()) < 0.25
