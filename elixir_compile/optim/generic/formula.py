"""C expressions for the element-wise fp32 ops of optimizers, bitwise equal to torch's CPU kernels.

    torch.add(a, b, alpha=s)     fmaf(s, b, a)    or    a + s * b

torch's rounding depends on its build and on the processor, so `code` compiles each expression and compares it with
torch once. Steps with other ops, such as exp or a norm, or with an op that no expression reproduces, are not compiled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

BY_MKL = "vmsSqrt"
"""Stands for a call of MKL's vector square root, up to 0.75 ulp off, which torch uses if it is built with MKL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An element-wise op as C text; `{0}`, `{1}` and so on are its operands."""

    expressions: tuple[str, ...]
    """The expressions torch may use; they differ only in rounding."""
    is_mask: bool = False
    """Whether the result is a mask: true or false."""
    takes_masks: bool = False
    """Whether all operands may be masks."""
    eager: Callable[..., torch.Tensor] | None = None
    """torch's op, called with tensors and then numbers; None if there is only a single expression."""
    num_tensors: int = 0
    numbers: tuple[tuple[float, ...], ...] = ()
    """The numbers with which `eager` is compared, a tuple for each call."""


def _plain(expression: str) -> Formula:
    return Formula(expressions=(expression,))


def _mask(expression: str, *, takes_masks: bool = False) -> Formula:
    return Formula(expressions=(expression,), is_mask=True, takes_masks=takes_masks)


def _root(eager: Callable[..., torch.Tensor]) -> Formula:
    return Formula(expressions=("sqrtf({0})", BY_MKL), eager=eager, num_tensors=1, numbers=((),))


_FACTORS = ((-0.1,), (0.001000000000001,), (3.7,))
_LARGER = "({0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? {0} : {1})"

FORMULAS: Mapping[str, Formula] = {
    "value": Formula(expressions=("{0}",)),
    "mask": _mask("{0}", takes_masks=True),
    "number": Formula(expressions=("(float){0}",), takes_masks=True),
    "mul": _plain("{0} * {1}"),
    "div": _plain("{0} / {1}"),
    "neg": _plain("-{0}"),
    "abs": _plain("fabsf({0})"),
    "sqrt": _root(torch.sqrt),
    "rsqrt": _plain("1.0f / sqrtf({0})"),
    "reciprocal": _plain("1.0f / {0}"),
    "sign": _plain("(float)(({0} > 0.0f) - ({0} < 0.0f))"),
    "pow 2": _plain("{0} * {0}"),
    "pow 3": _plain("{0} * {0} * {0}"),
    "pow 0.5": _root(lambda a: torch.pow(a, 0.5)),
    "pow -0.5": _plain("1.0f / sqrtf({0})"),
    "pow -1": _plain("1.0f / {0}"),
    "maximum": _plain(_LARGER),
    "minimum": _plain(_LARGER.replace(">", "<")),
    "clamp_min": _plain("({0} < {1} ? {1} : {0})"),
    "clamp_max": _plain("({0} > {1} ? {1} : {0})"),
    "gt": _mask("{0} > {1}"),
    "ge": _mask("{0} >= {1}"),
    "lt": _mask("{0} < {1}"),
    "le": _mask("{0} <= {1}"),
    "eq": _mask("{0} == {1}"),
    "ne": _mask("{0} != {1}"),
    "not": _mask("!{0}", takes_masks=True),
    "and": _mask("{0} & {1}", takes_masks=True),
    "or": _mask("{0} | {1}", takes_masks=True),
    "where": _plain("({0} ? {1} : {2})"),
    "add": Formula(
        expressions=("fmaf({2}, {1}, {0})", "{0} + {2} * {1}"),
        eager=lambda a, b, s: torch.add(a, b, alpha=s),
        num_tensors=2,
        numbers=_FACTORS,
    ),
    "div by a number": Formula(
        expressions=("{0} / {1}", "{0} * (1.0f / {1})"), eager=torch.div, num_tensors=1, numbers=_FACTORS
    ),
    "addcmul": Formula(
        expressions=(
            "{0} + {3} * {1} * {2}",
            "fmaf({3} * {1}, {2}, {0})",
            "fmaf({3}, {1} * {2}, {0})",
            "{0} + {3} * ({1} * {2})",
        ),
        eager=lambda a, b, c, s: torch.addcmul(a, b, c, value=s),
        num_tensors=3,
        numbers=_FACTORS,
    ),
    "addcmul of 1": Formula(  # some versions of torch round only once here
        expressions=("{0} + {1} * {2}", "fmaf({1}, {2}, {0})"), eager=torch.addcmul, num_tensors=3, numbers=((),)
    ),
    "addcdiv": Formula(
        expressions=("{0} + {3} * {1} / {2}", "{0} + {3} * ({1} / {2})", "fmaf({3}, {1} / {2}, {0})"),
        eager=lambda a, b, c, s: torch.addcdiv(a, b, c, value=s),
        num_tensors=3,
        numbers=_FACTORS,
    ),
    "lerp below half": Formula(
        expressions=("fmaf({2}, {1} - {0}, {0})", "{0} + {2} * ({1} - {0})"),
        eager=torch.lerp,
        num_tensors=2,
        numbers=((0.09999999999999998,), (0.49,), (-0.2,)),
    ),
    "lerp": Formula(
        expressions=(
            "fmaf({0} - {1}, 1.0f - {2}, {1})",
            "fmaf({1} - {0}, {2} - 1.0f, {1})",
            "{1} - ({1} - {0}) * (1.0f - {2})",
        ),
        eager=torch.lerp,
        num_tensors=2,
        numbers=((0.9,), (0.5,), (1.3,)),
    ),
}


def samples(num_tensors: int, numel: int) -> list[torch.Tensor]:
    """Return `num_tensors` flat fp32 tensors of all magnitudes seen in training, with zeros, infinities and NaNs."""
    made: list[Any] = []
    generator = torch.Generator().manual_seed(7)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, float("inf"), float("nan")], device="cpu")
    for index in range(num_tensors):
        size = torch.rand(numel, generator=generator, device="cpu") * 8 - 6
        values = torch.randn(numel, generator=generator, device="cpu") * 10.0**size
        # With another stride in each tensor, so that special values meet each other and ordinary values.
        places = slice(index, None, 5 + 2 * index)
        count = len(values[places])
        values[places] = torch.where(
            torch.rand(count, generator=generator, device="cpu") < 0.3,
            special.repeat(count // 8 + 1)[:count],
            values[places],
        )
        made.append(values)
    return made


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two fp32 tensors have the same bits; all NaNs count as equal.

    torch's own kernels give NaNs with different bits from element to element.
    """
    return bool(torch.all((first.view(torch.int32) == second.view(torch.int32)) | (first.isnan() & second.isnan())))
