"""The symbols of dynamic sizes: which a size has, numbers that stand in for them, and what torch knows of their
values."""

import functools
import zlib
from typing import Any

import torch

_Size = int | torch.SymInt
_FIRST_STAND_IN = 1 << 60


def is_jagged(value: object) -> bool:
    """Return whether `value` is the length of the jagged dimension of a nested tensor.

    Such a value names the offsets of the tensor, and only stands where a size does: it is no number, it can be compared
    with others of its kind, and no tensor without subclass has it among its sizes.

    `SymNode.is_nested_int`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    return isinstance(value, torch.SymInt) and value.node.is_nested_int()


def symbol_of(size: object) -> str:
    """Return the name of the symbol that `size` is, "" if it is a number, another expression, or anything else.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    if not isinstance(size, torch.SymInt) or is_jagged(size):
        return ""
    return size.node.expr.name if size.node.expr.is_symbol else ""


def symbols_in(number: Any) -> frozenset[str]:
    """Return the names of the symbols in `number`, which may also be a symbolic float or a condition.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) or is_jagged(number):
        return frozenset()
    return frozenset(symbol.name for symbol in number.node.expr.free_symbols)


def stand_in(size: _Size) -> int:
    """Return `size` as a number, without adding a guard: each symbol counts as a large prime number of its own.

    Two sizes have the same number if and only if they have the same expansion, except by a coincidence that sizes
    of tensors, with factors far below 2**60, cannot have.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    return _stand_in(size.node.expr) if isinstance(size, torch.SymInt) else size


@functools.lru_cache(maxsize=4096)
def _stand_in(expression: Any) -> int:
    return int(expression.subs({symbol: _prime(symbol.name) for symbol in expression.free_symbols}))


@functools.lru_cache(maxsize=256)
def _prime(name: str) -> int:
    import sympy

    # Checksums of names are at least 1 apart, so these numbers are at least 2**20 apart: farther than primes are.
    return int(sympy.nextprime(_FIRST_STAND_IN + (zlib.crc32(name.encode()) << 20)))


def is_multiple(size: _Size, symbol: str) -> bool:
    """Return whether `size` is `symbol` times a factor without it.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    return isinstance(size, torch.SymInt) and _is_multiple(size.node.expr, symbol)


@functools.lru_cache(maxsize=4096)
def _is_multiple(expression: Any, name: str) -> bool:
    symbol = next((symbol for symbol in expression.free_symbols if symbol.name == name), None)
    return symbol is not None and not (expression / symbol).expand().has(symbol)


def may_have_any_value_from(least: int, size: torch.SymInt) -> bool:
    """Return whether code that is compiled for `size`, a symbol, is right for each of its values from `least` on.

    It is not if torch knows that the value is larger, or that a number divides an expression with the symbol.

    `ShapeEnv.var_to_range`, `ShapeEnv.divisible`: torch 2.11 to 2.13. Gone: AttributeError if micro-batches divide a
    batch of dynamic size.
    """
    symbol, env = size.node.expr, size.node.shape_env
    return int(env.var_to_range[symbol].lower) <= least and not any(
        symbol in known.free_symbols for known in env.divisible
    )


def unknown_number(like: torch.SymInt) -> torch.SymInt:
    """Return a new symbolic number, of which nothing is known, for the captures of `like`.

    `ShapeEnv.create_unbacked_symint`, `ShapeEnv.ignore_fresh_unbacked_symbols`: torch 2.11 to 2.13. Gone:
    AttributeError if an op of a divided batch of dynamic size reads its number of rows.
    """
    env = like.node.shape_env
    with env.ignore_fresh_unbacked_symbols():
        return env.create_unbacked_symint()
