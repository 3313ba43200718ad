"""How torch's CPU kernels compute the element-wise ops of optimizers in fp32, as C expressions, to the last bit.

    torch.add(a, b, alpha=s)     fmaf(s, b, a)    or    a + s * b

Which of several ways a torch build takes on this processor is found out, not assumed: each is compiled and compared
with torch once. An op that no way reproduces has none, and neither has an op that is not here: exp, say, or a norm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

BY_MKL = "vmsSqrt"
"""A way that is no expression: MKL's vector square root, which is up to 0.75 ulp off and what torch has where it is
built with MKL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One op on one element; `{0}`, `{1}` and so on are its operands."""

    ways: tuple[str, ...]
    """Expressions that torch may use; they are the same number but for rounding."""
    is_mask: bool = False
    """Whether the result is true or false."""
    takes_masks: bool = False
    """Whether operands may all be true or false."""
    eager: Callable[..., torch.Tensor] | None = None
    """The op, called with tensors and then numbers, where there are several ways."""
    num_tensors: int = 0
    numbers: tuple[tuple[float, ...], ...] = ()
    """What it is called with behind the tensors, in turn."""


def _plain(expression: str) -> Formula:
    return Formula(ways=(expression,))


def _mask(expression: str, *, takes_masks: bool = False) -> Formula:
    return Formula(ways=(expression,), is_mask=True, takes_masks=takes_masks)


def _root(eager: Callable[..., torch.Tensor]) -> Formula:
    return Formula(ways=("sqrtf({0})", BY_MKL), eager=eager, num_tensors=1, numbers=((),))


_FACTORS = ((-0.1,), (0.001000000000001,), (3.7,))
_LARGER = "({0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? {0} : {1})"

FORMULAS: Mapping[str, Formula] = {
    "value": Formula(ways=("{0}",)),
    "mask": _mask("{0}", takes_masks=True),
    "number": Formula(ways=("(float){0}",), takes_masks=True),
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
        ways=("fmaf({2}, {1}, {0})", "{0} + {2} * {1}"),
        eager=lambda a, b, s: torch.add(a, b, alpha=s),
        num_tensors=2,
        numbers=_FACTORS,
    ),
    "div by a number": Formula(
        ways=("{0} / {1}", "{0} * (1.0f / {1})"), eager=torch.div, num_tensors=1, numbers=_FACTORS
    ),
    "addcmul": Formula(
        ways=(
            "{0} + {3} * {1} * {2}",
            "fmaf({3} * {1}, {2}, {0})",
            "fmaf({3}, {1} * {2}, {0})",
            "{0} + {3} * ({1} * {2})",
        ),
        eager=lambda a, b, c, s: torch.addcmul(a, b, c, value=s),
        num_tensors=3,
        numbers=_FACTORS,
    ),
    "addcmul of 1": Formula(  # some versions add the product in one rounding
        ways=("{0} + {1} * {2}", "fmaf({1}, {2}, {0})"), eager=torch.addcmul, num_tensors=3, numbers=((),)
    ),
    "addcdiv": Formula(
        ways=("{0} + {3} * {1} / {2}", "{0} + {3} * ({1} / {2})", "fmaf({3}, {1} / {2}, {0})"),
        eager=lambda a, b, c, s: torch.addcdiv(a, b, c, value=s),
        num_tensors=3,
        numbers=_FACTORS,
    ),
    "lerp below half": Formula(
        ways=("fmaf({2}, {1} - {0}, {0})", "{0} + {2} * ({1} - {0})"),
        eager=torch.lerp,
        num_tensors=2,
        numbers=((0.09999999999999998,), (0.49,), (-0.2,)),
    ),
    "lerp": Formula(
        ways=(
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
    """Return flat fp32 tensors of all magnitudes an optimizer sees, some values zero, huge, infinite or no number."""
    made: list[Any] = []
    generator = torch.Generator().manual_seed(7)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, float("inf"), float("nan")])
    for index in range(num_tensors):
        size = torch.rand(numel, generator=generator) * 8 - 6
        values = torch.randn(numel, generator=generator) * 10.0**size
        # At another stride in each, so that they meet one another and plain numbers.
        places = slice(index, None, 5 + 2 * index)
        count = len(values[places])
        values[places] = torch.where(
            torch.rand(count, generator=generator) < 0.3, special.repeat(count // 8 + 1)[:count], values[places]
        )
        made.append(values)
    return made


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two fp32 tensors have the same bits; which NaN a NaN is does not count, torch's own kernels differ in
    that from one element to the next."""
    return bool(torch.all((one.view(torch.int32) == other.view(torch.int32)) | (one.isnan() & other.isnan())))
