"""In which precision the state of a parameter is stored: the names and layouts of its entries, and their conversion.

    float32, bfloat16   exp_avg, exp_avg_sq
    int8                exp_avg_codes, exp_avg_sq_codes, exp_avg_scale, exp_avg_sq_scale
    master_low          the int16 low half of the fp32 master of a bf16 parameter, which is the high half
    master              the fp32 master of an fp16 parameter

Codes have other names than moments, so that an optimizer which does not know them stops with a KeyError and never takes
codes for moments. The codes of the second moment are those of its square root: see `moment_forms`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elixir_compile.graph.ops.masters import REST_NAMES, take_rest
from elixir_compile.graph.ops.shards import own_part
from elixir_compile.optim.disk.state import DiskState
from elixir_compile.optim.layout import StatisticLayout, flat_order
from elixir_compile.optim.moment_forms import BLOCK, MomentForm, Moments, decode, encode

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
    """Return `state`, of a parameter whose own part is `like`, with its moments in `form`, rounded to the nearest.

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


# -- masters ----------------------------------------------------------------------------------------------------------


def rest_name_of(state: Mapping[str, Any]) -> str | None:
    """Return the name under which `state` has the rest of a master; None if the parameter has no master there."""
    return next((name for name in REST_NAMES.values() if name in state), None)


def begin_master_rest(param: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Write the rest of the master of `param` to `state`, from the bits kept by `prepare` if there are any."""
    target, rest = state[REST_NAMES[param.dtype]], take_rest(param)
    if rest is not None:
        target.copy_(rest)
    elif target.dtype == torch.int16:
        target.zero_()
    else:
        target.copy_(own_part(param).detach())
