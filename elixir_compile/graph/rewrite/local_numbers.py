"""Compute dynamic sizes in a part of a divided region: each part computes its own from the symbols among its inputs.

```text
  region   s0, x -> n = mul(s0, 8); y = view(x, [n, 64]); z = div(y, n)
  body     rows of the micro-batch, s0, x' -> n' = mul(rows, 8); y = view(x', [n', 64]); n = mul(s0, 8); z = div(y, n)
```

A captured graph may read a size off a tensor, `sym_size(x, 0)`, that the part does not have. So sizes are written anew
from their expressions.
"""

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import is_number, value_of, values_of_arguments
from elixir_compile.graph.rewrite.divided_graph import Part, Read
from elixir_compile.graph.rewrite.regions import RegionGraph

_OPERATORS: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # sizes are whole numbers: sympy writes `s0 / 2` only if 2 divides s0
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
_WHOLE_ROWS = "elixir_whole_rows"
"""The key in `node.meta` of the symbol of the rows of a batch, for the number that stands for all rows in a body."""


def symbols_of(region: RegionGraph) -> Mapping[str, tuple[int, fx.Node]]:
    """Return the place and the node of each symbol among the inputs of `region`, by name."""
    return {
        name: (place, node)
        for place, node in enumerate(region.module.graph.find_nodes(op="placeholder"))
        if (name := compat.symbol_of(value_of(node)))
    }


class Numbers:
    """Writes numbers into one part of a divided region."""

    def __init__(self, part: Part, rows: str = "") -> None:
        """`rows` is the symbol that has the rows of a micro-batch as its value, empty in a head or tail."""
        self._part = part
        self._rows = rows
        self._symbols = symbols_of(part.source)
        for name in self._symbols:  # a compiler needs each symbol of a shape among the inputs
            self._symbol(name, is_local=True)
        self._sizes: dict[tuple[str, bool], Any] = {}
        self._others: dict[fx.Node, Any] = {}

    def local(self, size: "int | torch.SymInt") -> Any:
        """Return `size` of one micro-batch: a number, or a node of the part."""
        return self._size(size, is_local=True)

    def of(self, node: fx.Node, *, is_local: bool = False) -> Any:
        """Return the value of `node`, a symbolic number of the region, for the whole batch or for one micro-batch."""
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            return self._size(value, is_local=is_local)
        if node not in self._others:
            self._others[node] = self._other(node)
        return self._others[node]

    def _other(self, node: fx.Node) -> fx.Node:
        """Return a float or a condition, computed from sizes of the whole batch, or an input of the region."""
        source, inputs = node, self._part.source.inputs
        placeholders = self._part.source.module.graph.find_nodes(op="placeholder")
        if node.op == "placeholder":
            place = placeholders.index(node)
            source = inputs[place]
            if source.op == "placeholder":
                return self._part.read(Read(place=place), node, value_of(node))
        args = map_arg(source.args, lambda own: self.of(own) if is_number(own) else own)
        return self._call(source.target, args)  # pyright: ignore[reportArgumentType]

    def _size(self, size: "int | torch.SymInt", *, is_local: bool) -> Any:
        text = compat.expression_of(size)[0]
        if not text:
            return int(size)
        is_local = is_local or self._rows not in compat.symbols_in(size)
        if (text, is_local) not in self._sizes:
            tree = ast.parse(text, mode="eval").body
            self._sizes[text, is_local] = self._written(tree, is_local=is_local)
        return self._sizes[text, is_local]

    def _written(self, tree: ast.expr, *, is_local: bool) -> Any:
        match tree:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return self._symbol(name, is_local=is_local)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._call(operator.neg, (self._written(operand, is_local=is_local),))
            case ast.BinOp(left=left, op=op, right=right):
                sides = (self._written(side, is_local=is_local) for side in (left, right))
                return self._call(_OPERATORS[type(op)], tuple(sides))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
                values = [self._written(value, is_local=is_local) for value in args]
                return functools.reduce(lambda left, right: self._call(_FUNCTIONS[name], (left, right)), values)
        raise AssertionError(f"a size of {self._part.source.id} has an expression that is not known: {ast.dump(tree)}")

    def _symbol(self, name: str, *, is_local: bool) -> fx.Node:
        place, node = self._symbols[name]
        if name != self._rows:
            return self._part.read(Read(place=place), node, value_of(node))
        if is_local:
            return self._part.read(Read(place=place, is_rows=True), node, value_of(node))
        meta = self._part.source.inputs[place].meta
        if _WHOLE_ROWS not in meta:
            meta[_WHOLE_ROWS] = compat.unknown_number(meta["val"])
        return self._part.read(Read(place=place, is_unknown=True), node, meta[_WHOLE_ROWS])

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not any(isinstance(arg, fx.Node) for arg in args):
            return target(*args)
        made = self._part.graph.call_function(target, args)
        values, _ = values_of_arguments(made, value_of)
        made.meta = {"val": target(*values)}
        return made
