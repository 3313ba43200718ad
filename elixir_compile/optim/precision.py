"""The precision of optimizer statistics: the forms in which they are stored, and how a parameter chooses them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from elixir_compile.optim.disk import DiskState
from elixir_compile.optim.rule import StatisticLayout, flat_order

# ----------------------------------------------------------------------------------------------------------------------
# AdamW's moments in fewer bytes: how each form is encoded and decoded, in torch's ops.
#
# form       exp_avg      exp_avg_sq             scale of each block of 128 values                       bytes
# float32    fp32         fp32                   none                                                    8
# bfloat16   bf16         bf16                   none                                                    4
# int8       -127 .. 127  its root in 0 .. 255   largest magnitude / 127, or / 255                       2.06
#
# Blocks follow the flat memory of a tensor: element `i` has scale `i // 128`, and the last block may be short.
# `optim/host/moments.c` does the same in C, with the same bits. Decoded values are encoded without loss: rounded to
# nearest, codes and scales come back bit for bit.
#
# [Note: Why the root] The second moment spans twice the powers of two that gradients span. In 20,000
# blocks of magnitudes drawn as exp(2 * normal), 83 % of the second moments are below half a step of 8-bit linear codes,
# and 31 % of their roots. The update takes the root in any case.
#
# [Note: Rounding] Near a steady state the second moment changes by less than 1/1000 per step, far less than the
# distance between two numbers in 16 or 8 bits: rounded to nearest, it stays where it is for ever. Stochastic rounding
# goes up with the probability that keeps the mean. The noise is a function of the values that are rounded, of the seed
# and of the step, and of no position: so ranks, pieces and threads change no bit. The key enters by xor and all that
# follows is a bijection of 32 bits, so over keys the noise of any value is uniform.
#
# Edges: in a block whose largest magnitude is below 2^-90 (8e-28; roots: 2^-50), scale and codes are 0. A block with a
# NaN, an infinity or more than 1.75 * 2^127 (roots: 2^63) has the scale NaN and decodes to NaN everywhere; its codes
# are 0. bf16 keeps infinities, and has one NaN. A positive root never gets the code 0: the next step would divide the
# rest of the first moment by eps.


BLOCK = 128
"""The number of values that share a scale."""


class MomentForm(Enum):
    """How the moments of AdamW are stored."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @property
    def has_scales(self) -> bool:
        """Return whether each block of values has a scale."""
        return self is MomentForm.INT8

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of `exp_avg` and `exp_avg_sq`."""
        return _DTYPES[self]


_DTYPES = {
    MomentForm.FLOAT32: (torch.float32, torch.float32),
    MomentForm.BFLOAT16: (torch.bfloat16, torch.bfloat16),
    MomentForm.INT8: (torch.int8, torch.uint8),
}


class Moments(NamedTuple):
    """The moments of a parameter, or of whole blocks of it, as they are stored."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    """The second moment in fp32 or bf16; its root in forms with scales."""
    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None

    def part(self, start: int, stop: int) -> "Moments":
        """Return the moments of elements `start` to `stop` of flat ones, as views; `start` is that of a block."""
        blocks = slice(start // BLOCK, num_scales(stop))
        values = (value[start:stop] for value in (self.exp_avg, self.exp_avg_sq))
        scales = (self.exp_avg_scale, self.exp_avg_sq_scale)
        return Moments(*values, *(None if scale is None else scale[blocks] for scale in scales))


_LEAST = {False: 37 << 23, True: 77 << 23}
"""By whether it is of roots: the fp32 bits of the least magnitude that the largest decoded value of a block may have.

So scales, their inverses and the squares of roots are no subnormal numbers of few bits."""
_GREATEST = {False: 0x7F600000, True: 190 << 23}
"""The same for the greatest magnitude: its codes decode to finite values."""
_LARGEST_CODE = {False: 127.0, True: 255.0}


def num_scales(numel: int) -> int:
    """Return the number of blocks of `numel` elements."""
    return -(-numel // BLOCK)


# -- noise ------------------------------------------------------------------------------------------------------------


def noise_key(seed: int, step: int) -> int:
    """Return the key of the noise of step number `step` in a run with `seed`: 32 bits."""
    key = 0
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, step & 0xFFFFFFFF):
        # lowbias32 of Wellons, "Hash Function Prospector", after adding a constant.
        key = ((key ^ word) + 0x9E3779B9) & 0xFFFFFFFF
        key = ((key ^ key >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        key = ((key ^ key >> 15) * 0x846CA68B) & 0xFFFFFFFF
        key ^= key >> 16
    return key


def noise(first: torch.Tensor, second: torch.Tensor, key: int) -> torch.Tensor:
    """Return 32 bits of noise for each element, as int32; `first` and `second` are the fp32 values that get rounded.

    The upper bits, which depend on all bits of both values, serve the second moment, which keeps its rounding errors
    longer; the lower bits serve the first. Each is read from its upper end, so what two share hardly decides. Means of
    errors, and of their products with each other, with what was rounded off and with a neighbour's, were as near to 0
    as with a hash of three times the operations (lowbias32).
    """
    words = second.view(torch.int32)
    rotated = (words << 16) | _shifted(words, 16)
    return (first.view(torch.int32) ^ rotated ^ _signed(key)) * _signed(0x9E3779B1)


def weight_noise(moments_noise: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return 16 bits of noise for each fp32 `weight` from the noise of its moments, as int32."""
    return _shifted((moments_noise ^ weight.view(torch.int32)) * _signed(0x85EBCA77), 16)


def _signed(word: int) -> int:
    """Return the int32 with the bits of `word`."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Return int32 `words` shifted right, with zeros from the left."""
    return (words >> by) & ((1 << (32 - by)) - 1)


# -- encode and decode ------------------------------------------------------------------------------------------------


def encode(
    first: torch.Tensor,
    second: torch.Tensor,
    form: MomentForm,
    *,
    key: int | None,
) -> Moments:
    """Return the fp32 moments `first` and `second` in `form`, in the same shape; the scales are flat.

    The tensors begin at the first element of a block. `key` is that of `noise_key`; None for the nearest values, ties
    to even, which gives moments that were decoded their codes again.
    """
    if form is MomentForm.FLOAT32:
        return Moments(exp_avg=first, exp_avg_sq=second)
    values = (first.contiguous(), root_of(second) if form.has_scales else second.contiguous())
    bits = None if key is None else noise(*values, key)
    if form is MomentForm.BFLOAT16:
        halves = (None, None) if bits is None else (bits & 0xFFFF, _shifted(bits, 16))
        exp_avg, exp_avg_sq = (rounded_to_bfloat16(value, half) for value, half in zip(values, halves, strict=True))
        return Moments(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    parts = (None, None) if bits is None else (bits & 0x7FFF, _shifted(bits, 17) & 0x7FFE)
    (exp_avg, scale), (exp_avg_sq, root_scale) = (
        _encode_blocks(value, part, is_root) for value, part, is_root in zip(values, parts, (False, True), strict=True)
    )
    return Moments(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, exp_avg_scale=scale, exp_avg_sq_scale=root_scale)


def decode(moments: Moments, form: MomentForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second moment in fp32, in the shape of the stored ones.

    In `MomentForm.FLOAT32` they are the stored tensors themselves.
    """
    values = (moments.exp_avg.to(torch.float32), moments.exp_avg_sq.to(torch.float32))
    if not form.has_scales:
        return values
    assert moments.exp_avg_scale is not None
    assert moments.exp_avg_sq_scale is not None
    scales = (moments.exp_avg_scale, moments.exp_avg_sq_scale)
    first, root = (
        value * _per_element(scale, value.numel()).view(value.shape)
        for value, scale in zip(values, scales, strict=True)
    )
    return first, root * root


def store(stored: Moments, first: torch.Tensor, second: torch.Tensor, form: MomentForm, key: int) -> None:
    """Write the fp32 moments `first` and `second` into `stored`, in `form`, with the noise of `key`."""
    if form is MomentForm.FLOAT32:
        return  # they are its own tensors
    for target, values in zip(stored, encode(first, second, form, key=key), strict=True):
        if target is not None and values is not None:
            target.copy_(values)


def rounded_weights(
    weights: torch.Tensor, first: torch.Tensor, second: torch.Tensor, form: MomentForm, key: int
) -> torch.Tensor:
    """Return fp32 `weights` in bf16, with the noise of their moments as these get rounded to `form`."""
    bits = noise(first, root_of(second) if form.has_scales else second, key)
    return rounded_to_bfloat16(weights, weight_noise(bits, weights))


def root_of(second: torch.Tensor) -> torch.Tensor:
    """Return the fp32 root of `second`, correctly rounded, as C and accelerators compute it.

    On a CPU, torch calls a square root of MKL that is off by a bit for 1 of 5 values. The root of the same value in
    double is never as near to the middle between two fp32 numbers as its own rounding error.
    """
    return second.double().sqrt().float() if second.device.type == "cpu" else second.sqrt()


def rounded_to_bfloat16(values: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """Return fp32 `values` in bf16, rounded with 16 `bits` of noise (int32), or to nearest even if there are none."""
    words = values.view(torch.int32)
    up = (_shifted(words, 16) & 1) + 0x7FFF if bits is None else bits
    # The low half of the result as int16, with the sign of the upper bit.
    rounded = ((words + up) >> 16).masked_fill_(values.isnan(), 0x7FC0)
    return rounded.to(torch.int16).view(torch.bfloat16)


def _encode_blocks(values: torch.Tensor, bits: torch.Tensor | None, is_root: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scales of `values`, with 15 `bits` of noise."""
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    flat = magnitudes.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    most = [flat[:whole].view(-1, BLOCK).amax(1)] if whole else []
    most += [flat[whole:].amax(0, keepdim=True)] if whole < flat.numel() else []
    largest = (torch.cat(most) if most else flat).view(torch.float32)
    # Two tensors: torch multiplies by an inverse if either side is a Python number.
    codes_of = torch.full_like(largest, _LARGEST_CODE[is_root])
    scale, inverse = largest / codes_of, codes_of / largest
    decoded = (scale * codes_of).view(torch.int32)
    is_kept = (decoded >= _LEAST[is_root]) & (decoded <= _GREATEST[is_root])
    scale = torch.where(is_kept, scale, torch.where(decoded < _LEAST[is_root], 0.0, torch.nan))
    kept = _per_element(is_kept, values.numel()).view(values.shape)
    value = torch.where(kept, values * _per_element(inverse, values.numel()).view(values.shape), 0.0)
    if bits is None:
        codes = value.round().to(torch.int32) & 0xFF
    else:
        # Numbers from 256 to 512 have 15 bits behind the point: 15 bits of noise are added there. The largest root is
        # 255 within 2^-16, a tie that goes to even: its noise has an even last bit, so it gets the code 255, always.
        above = (bits | (0x43800000 if is_root else 0x43C00000)).view(torch.float32)
        codes = ((value + above).view(torch.int32) >> 15) & 0xFF
        codes = codes if is_root else codes ^ 0x80
    if is_root:
        codes = codes.maximum(magnitudes.clamp(max=1))
    return codes.masked_fill_(~kept, 0).to(torch.uint8).view(torch.uint8 if is_root else torch.int8), scale


def _per_element(of_blocks: torch.Tensor, numel: int) -> torch.Tensor:
    """Return `numel` flat values: for each element the value of its block."""
    return of_blocks.repeat_interleave(BLOCK)[:numel]


# ----------------------------------------------------------------------------------------------------------------------
# In which precision the state of a parameter is stored: the names and layouts of its entries, and their conversion.
#
#     float32, bfloat16   exp_avg, exp_avg_sq
#     int8                exp_avg_codes, exp_avg_sq_codes, exp_avg_scale, exp_avg_sq_scale
#     master_low          the int16 low half of the fp32 master of a bf16 parameter, which is the high half
#     master              the fp32 master of an fp16 parameter
#
# Codes have other names than moments, so that an optimizer which does not know them stops with a KeyError and never
# takes codes for moments. The codes of the second moment are those of its square root: see [Note: Why the root].


MOMENTS = ("exp_avg", "exp_avg_sq")
CODED = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale", "exp_avg_sq_scale")
STORED_NAMES = frozenset((*MOMENTS, *CODED))
"""The names of all entries of a state that hold a moment in some form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePrecision:
    """How an optimizer stores its state."""

    moments: MomentForm = MomentForm.FLOAT32
    masters: torch.dtype = torch.float32
    """If bfloat16, a bf16 parameter is its own master, and the low half of an exact one is not kept."""
    seed: int = 0
    """The seed of stochastic rounding."""

    @property
    def is_exact(self) -> bool:
        """Whether moments and masters are in fp32."""
        return self.moments is MomentForm.FLOAT32 and self.masters is torch.float32


EXACT = StatePrecision()


def state_precision(moments: str, masters: str, seed: int) -> StatePrecision:
    """Return the precision that a user asked for by words. Raises ValueError for an unknown word."""
    forms = [form.value for form in MomentForm]
    for name, value, known in (
        ("state_dtype", moments, forms),
        ("master_dtype", masters, ["float32", "bfloat16"]),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
    dtype = torch.float32 if masters == "float32" else torch.bfloat16
    return StatePrecision(moments=MomentForm(moments), masters=dtype, seed=seed)


# -- moments ----------------------------------------------------------------------------------------------------------


def layouts_of(form: MomentForm) -> Mapping[str, StatisticLayout]:
    """Return the layouts of both moments in `form` by name, in the order of the fields of `Moments`."""
    layouts = [StatisticLayout(dtype) for dtype in form.dtypes]
    if not form.has_scales:
        return dict(zip(MOMENTS, layouts, strict=True))
    return dict(zip(CODED, (*layouts, *[StatisticLayout(torch.float32, BLOCK)] * 2), strict=True))


def form_of(state: Mapping[str, Any]) -> MomentForm:
    """Return the form of the moments in `state`; FLOAT32 also if it has moments in another dtype, or none yet.

    Raises ValueError if it has codes of no form.
    """
    coded = _dtype_of(state, CODED[0])
    if coded is torch.int8:
        return MomentForm.INT8
    if coded is not None:
        known = ", ".join(form.value for form in MomentForm)
        raise ValueError(
            f"the state dict has moments in {str(coded).removeprefix('torch.')}, which this version does not have; it "
            f"has {known}. With the version that saved them, save `state_dict(as_float32=True)`"
        )
    return MomentForm.BFLOAT16 if _dtype_of(state, MOMENTS[0]) is torch.bfloat16 else MomentForm.FLOAT32


def _dtype_of(state: Mapping[str, Any], name: str) -> torch.dtype | None:
    """Return the dtype of the statistic `name`, None if there is none; a statistic on disk is not read."""
    if name not in state:
        return None
    return state.kinds[name].dtype if isinstance(state, DiskState) else state[name].dtype


def with_form(state: Mapping[str, Any], form: MomentForm, like: torch.Tensor) -> dict[str, Any]:
    """Return `state`, of a parameter whose own shard is `like`, with its moments in `form`, rounded to the nearest.

    Entries without moments are as they were, and so are moments that are in `form` already.
    """
    if form_of(state) is form or not STORED_NAMES.intersection(state):
        return dict(state)
    stored = zip(layouts_of(form).items(), encode(*wide_moments(state, like), form, key=None), strict=False)
    found = {name: layout.shaped(value, like) for (name, layout), value in stored if value is not None}
    return {**found, **{name: value for name, value in state.items() if name not in STORED_NAMES}}


def wide_moments(state: Mapping[str, Any], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments of `state` in fp32, flat, in the memory order of `like`."""
    form = form_of(state)
    stored = (state[name] for name in layouts_of(form))
    moments = Moments(*(flat_order(value, like) if value.shape == like.shape else value for value in stored))
    return decode(moments, form)
