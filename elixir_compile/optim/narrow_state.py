"""The entries of a state with moments in fewer bytes than fp32: their names, layouts and conversions.

    float32, bfloat16   exp_avg, exp_avg_sq
    int8                exp_avg_codes, exp_avg_scale, exp_avg_sq_codes, exp_avg_sq_scale

Codes have other names than moments, so that an optimizer which does not know them stops with a KeyError and never takes
codes for moments. The codes of the second moment are those of its square root: see `moment_forms`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elixir_compile.ops.shards import as_dtensor, has_cut_rows, is_dtensor, own_part, part_of_rows
from elixir_compile.optim.disk.state import DiskState
from elixir_compile.optim.layout import StatisticLayout, flat_order
from elixir_compile.optim.moment_forms import BLOCK, MomentForm, Moments, decode, encode

MOMENTS = ("exp_avg", "exp_avg_sq")
_CODED = tuple(f"{moment}_{part}" for moment in MOMENTS for part in ("codes", "scale"))
STORED_NAMES = frozenset((*MOMENTS, *_CODED))
"""The names of all entries of a state that hold a moment in some form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePrecision:
    """How an optimizer stores its state."""

    moments: MomentForm = MomentForm.FLOAT32
    masters: torch.dtype = torch.float32
    """`torch.bfloat16`: a bf16 parameter is its own master, rounded stochastically."""
    seed: int = 0
    """The seed of stochastic rounding."""

    @property
    def is_exact(self) -> bool:
        """Whether moments and masters are in fp32."""
        return self.moments is MomentForm.FLOAT32 and self.masters is torch.float32


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


def layouts_of(form: MomentForm) -> Mapping[str, StatisticLayout]:
    """Return the layouts of both moments in `form`, by name."""
    if not form.has_scales:
        return dict.fromkeys(MOMENTS, StatisticLayout(form.dtypes[0]))
    dtypes = [layout for dtype in form.dtypes for layout in (dtype, torch.float32)]
    return {
        name: StatisticLayout(dtype, BLOCK if name.endswith("_scale") else 1)
        for name, dtype in zip(_CODED, dtypes, strict=True)
    }


def form_of(state: Mapping[str, Any]) -> MomentForm:
    """Return the form of the moments in `state`; FLOAT32 also if it has moments in another dtype, or none yet.

    Raises ValueError if it has codes of no form.
    """
    coded = _dtype_of(state, "exp_avg_codes")
    if coded is torch.int8:
        return MomentForm.INT8
    if coded is not None:
        known = ", ".join(form.value for form in MomentForm)
        raise ValueError(
            f"the state dict has moments in {str(coded).removeprefix('torch.')}, which this version does not have; it "
            f"has {known}. With the version that saved them, save `state_dict(as_float32=True)`"
        )
    return MomentForm.BFLOAT16 if _dtype_of(state, "exp_avg") is torch.bfloat16 else MomentForm.FLOAT32


def _dtype_of(state: Mapping[str, Any], name: str) -> torch.dtype | None:
    """Return the dtype of the statistic `name`, None if there is none; a statistic on disk is not read."""
    if name not in state:
        return None
    return state.kinds[name].dtype if isinstance(state, DiskState) else state[name].dtype


def stored_moments(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of both moments in `state`, in the order of `layouts_of`."""
    return [state[name] for name in layouts_of(form_of(state))]


def as_moments(stored: Sequence[torch.Tensor]) -> Moments:
    """Return the tensors of `stored_moments` as moments of a form."""
    if len(stored) == len(MOMENTS):
        return Moments(exp_avg=stored[0], exp_avg_sq=stored[1])
    codes, scale, root_codes, root_scale = stored
    return Moments(exp_avg=codes, exp_avg_sq=root_codes, exp_avg_scale=scale, exp_avg_sq_scale=root_scale)


def as_stored(moments: Moments) -> list[torch.Tensor]:
    """Return the tensors of `moments` in the order of `layouts_of`: the inverse of `as_moments`."""
    each = (moments.exp_avg, moments.exp_avg_scale, moments.exp_avg_sq, moments.exp_avg_sq_scale)
    return [tensor for tensor in each if tensor is not None]


def with_form(state: Mapping[str, Any], form: MomentForm, like: torch.Tensor) -> dict[str, Any]:
    """Return `state`, of a parameter whose own part is `like`, with its moments in `form`, rounded to the nearest.

    Entries without moments are as they were, and so are moments that are in `form` already.
    """
    if form_of(state) is form or not STORED_NAMES.intersection(state):
        return dict(state)
    moments = encode(*_wide(state, like), form, key=None)
    stored = zip(layouts_of(form).items(), as_stored(moments), strict=True)
    found = {name: layout.shaped(value, like) for (name, layout), value in stored}
    return {**found, **{name: value for name, value in state.items() if name not in STORED_NAMES}}


def _wide(state: Mapping[str, Any], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments of `state` in fp32, flat, in the memory order of `like`."""
    stored = [flat_order(tensor, like) if tensor.shape == like.shape else tensor for tensor in stored_moments(state)]
    return decode(as_moments(stored), form_of(state))


def saved_name(name: str, param: torch.Tensor) -> str | None:
    """Return the name under which a state dict holds the entry `name` of the state of `param`; None if it does not.

    A state dict can be loaded by any number of ranks, each with some rows of `param`. If a row is not a whole number of
    blocks, a block has elements of two rows, and if a tensor axis cuts rows, other ranks cut them elsewhere: then a
    state dict holds moments in fp32. To store these in the same form again gives the same bits.
    """
    if name not in _CODED or has_whole_rows(param):
        return name
    return name.removesuffix("_codes") if name.endswith("_codes") else None


def saved_value(state: Mapping[str, Any], name: str, param: torch.Tensor) -> Any:
    """Return what a state dict holds for the entry `name` in the `state` of `param`; see `saved_name`.

    Scales get the shape (rows of the parameter, blocks of a row).
    """
    if name in _CODED and not has_whole_rows(param):
        like = own_part(param).detach()
        first, second = _wide(state, like)
        return (first if name == "exp_avg_codes" else second).as_strided(like.shape, like.stride())
    value = state[name]
    is_scale = name in _CODED and name.endswith("_scale")
    return value.view(own_part(param).shape[0], _row_numel(param) // BLOCK) if is_scale else value


def saved_moments(state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return `state`, of `param`, as a state dict holds it."""
    names = {name: saved_name(name, param) for name in state}
    return {saved: saved_value(state, name, param) for name, saved in names.items() if saved is not None}


def has_whole_rows(param: torch.Tensor) -> bool:
    """Return whether each row of `param`, its elements at the same first index, is a whole number of blocks in memory.

    The same on all ranks. False if an axis cuts the rows.
    """
    return _row_numel(param) % BLOCK == 0 and param.is_contiguous() and not has_cut_rows(param)


def _row_numel(param: torch.Tensor) -> int:
    return math.prod(param.shape[1:])


def loaded_moments(state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return `state` with flat scales: the inverse of `saved_moments`, once each rank has its own part of `param`.

    The moments are in fp32 if `state` has the scales of whole rows, and an axis cuts the rows of `param`.
    """
    if has_cut_rows(param) and form_of(state).has_scales:
        first, root = (
            state[f"{moment}_codes"].float() * part_of_rows(_of_elements(state[f"{moment}_scale"], param), param)
            for moment in MOMENTS
        )
        kept = {name: value for name, value in state.items() if name not in STORED_NAMES}
        return {"exp_avg": first, "exp_avg_sq": root * root, **kept}
    return {
        name: value.reshape(-1) if name in _CODED and name.endswith("_scale") else value
        for name, value in state.items()
    }


def _of_elements(scale: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element of whole rows of `param`, given those of the blocks of each row."""
    return scale.repeat_interleave(BLOCK, dim=1).view(-1, *param.shape[1:])


def as_sharded(state: Mapping[str, Any], param: torch.Tensor, names: Iterable[str]) -> dict[str, Any]:
    """Return `state` with the plain tensors under `names` as DTensors if `param` is a DTensor."""
    if not is_dtensor(param):
        return dict(state)
    known = set(names)
    return {
        name: as_dtensor(value, param) if name in known and type(value) is torch.Tensor else value
        for name, value in state.items()
    }
