"""Evaluate sizes with dynamic dimensions, given as text in sympy's form, and expand them into sums of products.

```text
  "4*s0*(s1 - 1) + 4*s0"   terms -> s0*s1: 4
  "8*Max(1, s0)"           terms -> (8 * Max(1, s0)): 1      not a polynomial: the text is one opaque term
```

The text is parsed with Python's grammar, and only the nodes below are accepted, so a file cannot run code. (The parser
of sympy calls `eval`.) sympy can parse the texts written here.
"""

import ast
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.schedule import most_rows

Terms = tuple[tuple[str, int], ...]
"""The terms of a sum as (product of symbols, coefficient), highest degree first; the constant has the product `""`."""

_Number = int | Fraction
_Polynomial = dict[tuple[str, ...], int]
_MAX_EXPONENT = 16
_MAX_VALUE = 1 << 62
_MAX_NUMBER = (1 << 63) - 1
"""The largest number in a text: bytes are added up in 64 bits."""
_MAX_BITS = 4096
"""The most bits of an intermediate result; a product of 64 symbols has fewer."""
_MAX_LENGTH = 1 << 20
"""The most characters of a text; the longest formula of a peak seen so far had 4,000."""
_MAX_DEPTH = 200
"""The most nested operations: each is a nested Python call, and Python allows 1,000."""
_MAX_DEGREE = 64
"""The most symbols in a product; sizes of tensors have five."""
_MAX_STEPS = 1 << 17
"""The most products computed to expand a text, about 0.1 s; sizes of tensors need about ten."""

_MICRO_BATCH_ROWS = "MicroBatchRows"
"""The function `rows.most_rows` in texts: of a symbol and the most micro-batches. It is never negative, so a product
with it may be a summand."""

# The functions of sympy and of torch.utils._sympy that occur in sizes of tensors.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Abs": abs,
    "CeilDiv": lambda a, b: -(-a // b),
    "CeilToInt": math.ceil,
    "CleanDiv": lambda a, b: a // b,
    "FloorDiv": lambda a, b: a // b,
    "FloorToInt": math.floor,
    "IntTrueDiv": lambda a, b: Fraction(a) / b,
    "Max": max,
    _MICRO_BATCH_ROWS: most_rows,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "PythonMod": lambda a, b: a % b,
    "TruncToInt": math.trunc,
    "ceiling": math.ceil,
    "floor": math.floor,
}
_OPERATORS: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: Fraction(a) / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}


class _NotPolynomialError(Exception):
    """The expression is not a sum of products of symbols."""


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """Return the size at `values` of its symbols. Raises InvalidPlan if a value is missing or the size is not whole."""
    try:
        number = _number(_parsed(text), values)
    except (ZeroDivisionError, KeyError, TypeError, OverflowError) as error:
        raise InvalidPlan(f"the size {_shown(text)} has no value at {dict(values)}: {error}.") from error
    if number != int(number):
        raise InvalidPlan(f"the size {_shown(text)} is {number} at {dict(values)}; expected a whole number.")
    return int(number)


def check_text(text: str) -> None:
    """Raise InvalidPlan if `text` is not a size, or takes too many steps to expand."""
    terms(text)


@functools.lru_cache(maxsize=4096)
def symbols_of(text: str) -> tuple[str, ...]:
    """Return the names of the symbols in `text`, sorted."""
    functions = {id(node.func) for node in ast.walk(_parsed(text)) if isinstance(node, ast.Call)}
    names = {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name) and id(node) not in functions}
    return tuple(sorted(names))


@functools.lru_cache(maxsize=4096)
def terms(text: str) -> Terms:
    """Return `text` as a sum of products, or as an opaque term if it is not a polynomial."""
    parsed = _parsed(text)
    try:
        expanded = _Expansion(text).of(parsed)
    except _NotPolynomialError:
        return ((f"({ast.unparse(parsed)})", 1),)
    ordered = sorted(expanded.items(), key=lambda item: (-len(item[0]), item[0]))
    return tuple((_product(factors), coefficient) for factors, coefficient in ordered if coefficient)


def sum_text(summands: Iterable[tuple[str, int]]) -> str:
    """Return the sum of `summands`, pairs of product and coefficient, as text: `4*s0*s1 - 8`. Zero terms are left
    out."""
    parts: list[str] = []
    for product, coefficient in summands:
        if coefficient == 0:
            continue
        number = abs(coefficient)
        factors = ([] if number == 1 and product else [str(number)]) + ([product] if product else [])
        sign = "-" if coefficient < 0 else "+"
        parts += [sign, "*".join(factors)] if parts else [("-" if coefficient < 0 else "") + "*".join(factors)]
    return " ".join(parts) or "0"


def canonical(text: str, names: Mapping[str, str] | None = None) -> str:
    """Return a text that is equal for all texts with the same expansion, with symbols renamed by `names`."""
    if names:
        text = re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found.group(), found.group()), text)
    return sum_text(terms(text))


def of_micro_batch(text: str, rows: str, most: int) -> str:
    """Return the size `text` with the rows of a micro-batch in place of the symbol `rows`, see `rows.most_rows`.

    Returns `text` if it is not a sum of products with one factor `rows` each: that is never less.
    """
    try:
        found = _Expansion(text).of(_parsed(text))
    except _NotPolynomialError:
        return text
    if any(factors.count(rows) != 1 for factors in found):
        return text
    part = f"{_MICRO_BATCH_ROWS}({rows}, {most})"
    return sum_text((_product(tuple(part if name == rows else name for name in key)), found[key]) for key in found)


def divided(text: str, number: int) -> str:
    """Return the size `text` divided by `number`, rounded up."""
    parts = terms(text)
    if any(coefficient % number for _, coefficient in parts):
        return f"CeilDiv({text}, {number})"
    return sum_text((product, coefficient // number) for product, coefficient in parts)


def times(text: str, number: int) -> str:
    """Return the size `text` times `number`."""
    return sum_text((product, number * coefficient) for product, coefficient in terms(text))


def largest(text: str, symbol: str, values: Mapping[str, int], limit_bytes: int) -> int | None:
    """Return the largest value of `symbol` for which the size is at most `limit_bytes`; other symbols have `values`.

    Returns 0 if the size is above the limit at 1 already, and None if it is within the limit at every value. The result
    is exact for sizes that do not shrink as the symbol grows, which holds for bytes: it is found by bisection on whole
    numbers, because a root of the polynomial would have to be rounded.
    """

    def fits(value: int) -> bool:
        return evaluate(text, {**values, symbol: value}) <= limit_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > _MAX_VALUE:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    """Return the syntax tree of `text`. Raises InvalidPlan if it is not a size, or beyond the limits above."""
    if len(text) > _MAX_LENGTH:
        raise InvalidPlan(f"the size {_shown(text)} has {len(text)} characters; expected at most {_MAX_LENGTH}.")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidPlan(f"the size {_shown(text)} is not an expression.") from error
    level: list[ast.AST] = [tree]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise InvalidPlan(f"the size {_shown(text)} nests more than {_MAX_DEPTH} operations.")
    for node in ast.walk(tree):
        if not _is_known(node):
            shown = _shown(ast.unparse(node) or type(node).__name__)
            raise InvalidPlan(f"the size {_shown(text)} holds {shown}.")
    if _degree(tree) > _MAX_DEGREE:
        raise InvalidPlan(f"the size {_shown(text)} multiplies more than {_MAX_DEGREE} symbols.")
    return tree


def _degree(node: ast.AST) -> int:
    """Return the largest number of symbols in a product of `node`."""
    match node:
        case ast.Name():
            return 1
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            return _degree(left) * exponent
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _degree(left) + _degree(right)
    return max(map(_degree, ast.iter_child_nodes(node)), default=0)


def _shown(text: str) -> str:
    """Return the first 200 characters of `text`, quoted, for an error."""
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def _is_known(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) is int and value <= _MAX_NUMBER
        case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            return exponent <= _MAX_EXPONENT
        case ast.BinOp(op=op):
            return type(op) in _OPERATORS and not isinstance(op, ast.Pow)
        case ast.Call(func=ast.Name(id=name), keywords=[], args=args):
            return name in _FUNCTIONS and bool(args) and not any(isinstance(arg, ast.Starred) for arg in args)
    return isinstance(node, ast.Name | ast.UnaryOp | ast.USub | ast.Load | ast.operator)


def _number(node: ast.expr, values: Mapping[str, int]) -> _Number:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(operand=operand):
            return -_number(operand, values)
        case ast.BinOp(left=left, op=op, right=right):
            number = _OPERATORS[type(op)](_number(left, values), _number(right, values))
            if max(number.numerator.bit_length(), number.denominator.bit_length()) > _MAX_BITS:
                raise OverflowError(f"a number of more than {_MAX_BITS} bits")
            return number
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_number(arg, values) for arg in args))
    raise TypeError(ast.unparse(node))


class _Expansion:
    """Expands a text into a sum of products, and counts the steps."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._num_steps = 0

    def of(self, node: ast.expr) -> _Polynomial:
        """Return `node` as a sum of products.

        Raises _NotPolynomialError if it is not a sum of products, and InvalidPlan if expanding takes more than
        `_MAX_STEPS`.
        """
        match node:
            case ast.Constant(value=int(value)):
                return {(): value}
            case ast.Name(id=name):
                return {(name,): 1}
            case ast.Call(func=ast.Name(id=name)) if name == _MICRO_BATCH_ROWS:
                return {(ast.unparse(node),): 1}
            case ast.UnaryOp(operand=operand):
                return self._times({(): -1}, self.of(operand))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._plus(self.of(left), self.of(right))
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return self._plus(self.of(left), self._times({(): -1}, self.of(right)))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self._times(self.of(left), self.of(right))
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
                return functools.reduce(self._times, [self.of(left)] * exponent, {(): 1})
        raise _NotPolynomialError

    def _plus(self, left: _Polynomial, right: _Polynomial) -> _Polynomial:
        self._take(len(left) + len(right))
        return {factors: left.get(factors, 0) + right.get(factors, 0) for factors in (*left, *right)}

    def _times(self, left: _Polynomial, right: _Polynomial) -> _Polynomial:
        self._take(len(left) * len(right))
        product: _Polynomial = {}
        for left_factors, left_coefficient in left.items():
            for right_factors, right_coefficient in right.items():
                factors = tuple(sorted((*left_factors, *right_factors)))
                product[factors] = product.get(factors, 0) + left_coefficient * right_coefficient
        return product

    def _take(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise InvalidPlan(f"the size {_shown(self._text)} has too many products to expand.")


def _product(factors: tuple[str, ...]) -> str:
    counts = {factor: factors.count(factor) for factor in factors}
    return "*".join(factor if count == 1 else f"{factor}**{count}" for factor, count in counts.items())
