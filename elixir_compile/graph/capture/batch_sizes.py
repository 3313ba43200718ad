"""Sizes of a batch whose number of rows is a symbol, `s0`: a micro-batch runs the same graph with fewer rows as `s0`.

```text
  y = view(x, [8 * s0, 64])      s0 is the rows of the micro-batch
  z = div(y, 8 * s0)             8 * s0 is a number of the whole batch, such as the divisor of a mean
```

So an op can be divided only if each tensor that it reads or makes has the symbol along its slices, as `c * s0`, and in
no other size; and if a number that it reads as anything else than the shape of its result is no size.
"""

from collections.abc import Mapping

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.batch_call import SAME, Mixes, State, States, operands_of, states_in
from elixir_compile.graph.capture.node_facts import leaves_of, tensor_of, value_of

_aten = torch.ops.aten
_SHAPES = {
    _aten.view.default: 1,
    _aten._unsafe_view.default: 1,
    _aten.reshape.default: 1,
    _aten.expand.default: 1,
    _aten.new_empty.default: 1,
    _aten.new_zeros.default: 1,
    _aten.new_ones.default: 1,
    _aten.new_full.default: 1,
    _aten.full.default: 0,
    _aten.zeros.default: 0,
    _aten.ones.default: 0,
    _aten.empty.memory_format: 0,
    _aten.rand.default: 0,
    _aten.randn.default: 0,
    _aten.slice_backward.default: 1,
    _aten.select_backward.default: 1,
}
_SEEDED = {"prims.inductor_random.default": 0, "prims.inductor_randint.default": 2}
"""The place of the shape among the arguments of ops with a shape and a seed, by name: torch has the ops once Inductor
is loaded."""
_NUMS_OF_ROWS = {_aten.native_group_norm.default: 3, _aten.native_group_norm_backward.default: 5}
"""The place of the argument that is the number of rows of the batch."""


def shape_place(node: fx.Node) -> int | None:
    """Return the place of the argument of `node` that is the shape of its result; None if it has no such argument."""
    seeded = _SEEDED.get(str(node.target))
    return _SHAPES.get(node.target) if seeded is None else seeded  # pyright: ignore[reportArgumentType, reportCallIssue]


def rows_place(node: fx.Node) -> int | None:
    """Return the place of the argument of `node` that is the number of rows that it reads; None if it has none."""
    return _NUMS_OF_ROWS.get(node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]


def is_seeded(node: fx.Node) -> bool:
    """Return whether `node` draws random numbers from a seed among its inputs."""
    return str(node.target) in _SEEDED


def ends_at_rows(node: fx.Node) -> bool:
    """Return whether the numbers that `node` reads are sizes of a micro-batch: a slice of all rows ends at their
    number."""
    return node.target in (_aten.slice.Tensor, _aten.slice_backward.default)


def check_sizes(
    node: fx.Node, read: Mapping[fx.Node, State], narrowed: Mapping[fx.Node, int], states: States, symbol: str
) -> None:
    """Raise Mixes if `node`, whose results have `states`, is wrong with fewer rows as `symbol`.

    `read` has the states of what it reads, and `narrowed` the dimensions of the values that it reads in slices. A
    single result that is SAME is computed from whole values.
    """
    if not symbol or states == SAME:
        return
    for operand in operands_of(node):
        state = read[operand]
        _check_shape(tensor_of(operand), state.dim if state.is_each else narrowed.get(operand), symbol)
    values = leaves_of(value_of(node))
    found = states_in(states)
    for value, state in zip(values, found if len(found) == len(values) else [found[0]] * len(values), strict=True):
        if isinstance(value, torch.Tensor):
            _check_shape(value, state.dim if state.is_each else None, symbol)
    _check_numbers(node, symbol)


def has_rows_at(value: torch.Tensor, dim: int | None, symbol: str) -> bool:
    """Return whether `symbol` is in the size of `value` along `dim` alone, as a factor; if `dim` is None, in none."""
    return all(
        compat.is_multiple(size, symbol) if place == dim else symbol not in compat.symbols_in(size)
        for place, size in enumerate(value.shape)
    )


def _check_shape(value: torch.Tensor, dim: int | None, symbol: str) -> None:
    if not has_rows_at(value, dim, symbol):
        sizes = ", ".join(map(str, value.shape))
        raise Mixes(f"the number of rows, {symbol}, is not only the size of slices in a tensor of [{sizes}]")


def _check_numbers(node: fx.Node, symbol: str) -> None:
    """Raise Mixes if `node` reads a number of `symbol` that is neither in the shape of its result nor a factor."""
    arguments = compat.schema_of(node.target).arguments
    given = [*zip(arguments, node.args, strict=False)]
    given += [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
    for place, (argument, value) in enumerate(given):
        numbers = [leaf for leaf in leaves_of(value) if isinstance(leaf, fx.Node)]
        if not any(symbol in compat.symbols_in(value_of(number)) for number in numbers):
            continue
        is_size = "int" in str(argument.type)
        is_local = place in (shape_place(node), rows_place(node)) or ends_at_rows(node)
        if not (is_local if is_size else all(map(_is_computed, numbers))):
            raise Mixes(f"its argument {argument.name} is computed from the number of rows")


def _is_computed(number: fx.Node) -> bool:
    """Return whether `number` is a size, or computed from sizes in its graph, so that a micro-batch can compute it."""
    if isinstance(value_of(number), torch.SymInt):
        return True
    return number.op == "call_function" and all(map(_is_computed, number.all_input_nodes))
