"""Moments in fewer bytes, stated in numpy with numbers and not with bits: what the C code and torch's ops must give."""

from collections.abc import Sequence

import numpy as np
import torch

from elixir_compile.optim.precision import BLOCK, MomentForm, Moments, num_scales


def reference_noise(first: np.ndarray, second: np.ndarray, key: int) -> np.ndarray:
    """32 bits for each element, as Python integers would compute them."""
    a, b = (values.view(np.uint32).astype(np.uint64) for values in (first, second))
    swapped = (b % 2**16) * 2**16 + b // 2**16
    return (a ^ swapped ^ np.uint64(key)) * np.uint64(0x9E3779B1) % 2**32


def reference_bfloat16(values: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
    """The bits of bf16: the number below plus, with the probability of the distance to it, one step."""
    bits = values.view(np.uint32).astype(np.int64)
    below, rest = bits // 2**16, bits % 2**16
    up = rest + noise.astype(np.int64) >= 2**16 if noise is not None else rest + below % 2 > 2**15
    found = below + up
    return np.where(np.isnan(values), 0x7FC0, found).astype(np.uint16)


def reference_blocks(values: np.ndarray, noise: np.ndarray | None, is_root: bool) -> tuple[np.ndarray, np.float32]:
    """The codes and the scale of a block, with 32 bits of noise: first moments use the lowest 15."""
    most = np.abs(values).max()
    largest = np.float32(255 if is_root else 127)
    decoded = most / largest * largest
    if decoded < 2.0 ** (-50 if is_root else -90):
        return np.zeros(len(values), np.uint8), np.float32(0)
    if not decoded <= (2.0**63 if is_root else 1.75 * 2.0**127):
        return np.zeros(len(values), np.uint8), np.float32(np.nan)
    scale = most / largest
    scaled = values * (largest / most)
    if noise is None:
        codes = np.rint(scaled) % 256
    elif is_root:
        codes = np.floor(scaled + np.float32(256) + (noise // 2**18 * 2.0**-14).astype(np.float32)) - 256
    else:
        offset = (384 + noise % 2**15 * 2.0**-15).astype(np.float32)
        codes = (np.floor(scaled + offset) - 384) % 256
    if is_root:
        codes = np.maximum(codes, values > 0)
    return codes.astype(np.uint8), scale


def reference_encode(first: np.ndarray, second: np.ndarray, form: MomentForm, key: int | None) -> Moments:
    """The moments in `form`, rounded with the noise of `key`, or to the nearest."""
    values = (first, np.sqrt(second) if form.has_scales else second)
    noise = None if key is None else reference_noise(*values, key)
    if form is MomentForm.BFLOAT16:
        parts = (None, None) if noise is None else (noise % 2**16, noise // 2**16)
        halves = (reference_bfloat16(*pair) for pair in zip(values, parts, strict=True))
        exp_avg, exp_avg_sq = (torch.from_numpy(half.view(np.int16)).view(torch.bfloat16) for half in halves)
        return Moments(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    codes, scales = [[], []], [[], []]
    for start in range(0, len(first), BLOCK):
        block = slice(start, start + BLOCK)
        for index in range(2):
            found = reference_blocks(values[index][block], None if noise is None else noise[block], index == 1)
            codes[index].append(found[0])
            scales[index].append(found[1])
    exp_avg, exp_avg_sq = (
        torch.from_numpy(np.concatenate(each)).view(dtype) for each, dtype in zip(codes, form.dtypes, strict=True)
    )
    scale, root_scale = (torch.tensor(np.array(each, np.float32)) for each in scales)
    return Moments(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, exp_avg_scale=scale, exp_avg_sq_scale=root_scale)


def reference_decode(moments: Moments, form: MomentForm) -> tuple[np.ndarray, np.ndarray]:
    """The fp32 moments."""
    if form is MomentForm.BFLOAT16:
        pair = (moments.exp_avg, moments.exp_avg_sq)
        first, second = ((half.view(torch.int16).numpy().astype(np.uint32) << 16).view(np.float32) for half in pair)
        return first, second
    found = []
    for codes, scale in (
        (moments.exp_avg, moments.exp_avg_scale),
        (moments.exp_avg_sq, moments.exp_avg_sq_scale),
    ):
        assert scale is not None
        bits = codes.view(torch.uint8).numpy()
        numbers = bits.view(np.int8 if codes.dtype == torch.int8 else np.uint8)
        found.append(numbers.astype(np.float32) * scale.numpy()[np.arange(len(bits)) // BLOCK])
    return found[0], found[1] * found[1]


def zero_moments(shape: Sequence[int], form: MomentForm) -> Moments:
    """Moments of zeros in `form` for a parameter of `shape`."""
    first, second = (torch.zeros(tuple(shape), dtype=dtype) for dtype in form.dtypes)
    if not form.has_scales:
        return Moments(exp_avg=first, exp_avg_sq=second)
    scales = [torch.zeros(num_scales(first.numel())) for _ in range(2)]
    return Moments(exp_avg=first, exp_avg_sq=second, exp_avg_scale=scales[0], exp_avg_sq_scale=scales[1])


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def differences(one: Moments, other: Moments) -> list[str]:
    """The tensors of two moments that differ in any bit."""
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    return [
        f"{name}: {int((bits_of(a.view(-1)) != bits_of(b.view(-1))).sum())} of {a.numel()}"
        for name, a, b in pairs
        if a is not None and not torch.equal(bits_of(a.view(-1)), bits_of(b.view(-1)))
    ]


def odd_moments(numel: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of many sizes: blocks of zeros, subnormal numbers, single zeros, ties, powers of two, huge values."""
    rng = np.random.default_rng(seed)
    first = (rng.standard_normal(numel) * np.exp(2 * rng.standard_normal(numel)) * 1e-3).astype(np.float32)
    second = (first.astype(np.float64) ** 2 * np.exp(rng.standard_normal(numel))).astype(np.float32)
    factors = rng.choice([1.0, 1e-30, 1e-37, 1e-43, 0.0, 1e30], size=numel // BLOCK + 1, p=[0.5, *[0.1] * 5])
    first = first * np.repeat(factors, BLOCK)[:numel].astype(np.float32)
    second *= np.repeat(rng.permutation(np.minimum(factors, 1)), BLOCK)[:numel].astype(np.float32)
    second[rng.random(numel) < 0.05] = 0.0
    second[rng.random(numel) < 0.02] = 1e-42
    first[rng.random(numel) < 0.05] = -0.0
    first[rng.random(numel) < 0.05] *= np.float32(1e-6)
    first[::7] = np.round(first[::7] * 64) / 64
    return torch.from_numpy(first.astype(np.float32)), torch.from_numpy(second)


def spoiled(first: torch.Tensor, second: torch.Tensor) -> None:
    """Write NaN, infinities and the largest numbers into a few places."""
    for index, value in enumerate((torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4028234e38, 2.9e38)):
        first[(index * 389 + 5) % first.numel()] = value
    for index, value in enumerate((torch.nan, torch.inf, 3.4028234e38)):
        second[(index * 631 + 9) % second.numel()] = value
