"""One call of a captured graph, with the states in micro-batches of what it reads, and the sizes of a batch whose
number of rows is a symbol.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.captured import SAME, State, States, states_in
from elixir_compile.graph.capture.node_facts import leaves_of, tensor_of, value_of

# ----------------------------------------------------------------------------------------------------------------------
# One call of a captured graph with the states of what it reads.


def all_results(node: fx.Node, state: State) -> States:
    """Return `state` for each result of `node`."""
    value = value_of(node)
    return tuple(state for _ in value) if isinstance(value, (tuple, list)) else state


class Mixes(Exception):  # noqa: N818 - no error: `batch.walk` catches it
    """Raised by a rule for an op that needs the whole batch. The text says why."""


class Conflict(Mixes):
    """Two values of the op have slices that do not match. Perhaps only one has slices of the batch, and the other has
    as many rows by chance."""


@dataclass(slots=True)
class Call:
    """A call in a captured graph with at least one EACH value among those that it reads."""

    node: fx.Node
    read: Mapping[fx.Node, State]
    """The state of each tensor that the call reads."""
    batch: int
    """The rows of the batch, or the number that stands in for their symbol. The size of each value along its slices is
    a multiple of it."""
    symbol: str = ""
    """The symbol of the number of rows; empty if it is constant."""
    narrowed: dict[fx.Node, int] = field(default_factory=dict)
    """The SAME values of which a micro-batch reads only its slice, with the dimension of the slice."""
    _num_narrowed: dict[fx.Node, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return the argument called `name` in the schema of the op, or its default."""
        for place, (known, default) in enumerate(self.parameters):
            if known == name:
                return self.node.args[place] if place < len(self.node.args) else self.node.kwargs.get(name, default)
        raise KeyError(name)

    @property
    def parameters(self) -> Sequence[tuple[str, object]]:
        """The names and defaults of the arguments of the op."""
        return _parameters(self.node.target)

    def state(self, argument: object) -> State:
        """Return the state of `argument`; constants are SAME."""
        return self.read.get(argument, SAME) if isinstance(argument, fx.Node) else SAME

    def slices_at(self, operand: object, dim: int) -> None:
        """Require that `operand` is read in slices along `dim`.

        A SAME value is then narrowed where it is read. Raises Mixes if the value has slices along another dimension.
        """
        state = self.state(operand)
        if not isinstance(operand, fx.Node):
            return
        if state.is_each:
            if state.dim != dim:
                self.different_dims()
            return
        if self.narrowed.setdefault(operand, dim) != dim:
            self.different_dims()
        self._num_narrowed[operand] = self._num_narrowed.get(operand, 0) + 1

    def check_narrowed(self) -> None:
        """Raise Mixes if the op reads a value both whole and in slices."""
        for operand, times in self._num_narrowed.items():
            if operands_of(self.node).count(operand) != times:
                raise Mixes(f"it reads {operand.name} whole and in slices of the batch")

    def different_dims(self) -> NoReturn:
        """Raise Conflict because two values have their slices along dimensions that do not match."""
        raise Conflict("slices of the batch along different dimensions meet")


@functools.cache
def _parameters(target: Any) -> Sequence[tuple[str, object]]:
    """Return the names and defaults of the arguments of an op."""
    return [(argument.name, argument.default_value) for argument in compat.schema_of(target).arguments]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors among the arguments of `node`, in order; a tensor that is passed twice comes twice."""
    found: list[fx.Node] = []
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, fx.Node):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend(part for part in argument if isinstance(part, fx.Node))
    return [operand for operand in found if isinstance(value_of(operand), torch.Tensor)]


def shape_of(operand: object) -> Sequence[int]:
    """Return the shape of a tensor among the arguments of a call; that of a constant is empty.

    Numbers that belong to no other size stand in for dynamic sizes, see `compat.stand_in`: rules compare sizes, and a
    comparison of symbols would add a guard.
    """
    return known_shape(tensor_of(operand)) if isinstance(operand, fx.Node) else ()


def known_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of `value`, with numbers that stand in for dynamic sizes."""
    return tuple(map(compat.stand_in, value.shape))


def normal_dims(dims: object, ndim: int) -> set[int]:
    """Return `dims`, an integer or a list, as numbers from 0 on; all of `ndim` dimensions if it is None or empty."""
    if isinstance(dims, int):
        dims = [dims]
    return {dim % ndim for dim in dims} if isinstance(dims, (list, tuple)) and dims else set(range(ndim))


# ----------------------------------------------------------------------------------------------------------------------
# Sizes of a batch whose number of rows is a symbol, `s0`: a micro-batch runs the same graph with fewer rows as `s0`.
#
#   y = view(x, [8 * s0, 64])      s0 is the rows of the micro-batch
#   z = div(y, 8 * s0)             8 * s0 is a number of the whole batch, such as the divisor of a mean
#
# So an op can be divided only if each tensor that it reads or makes has the symbol along its slices, as `c * s0`, and
# in no other size; and if a number that it reads as anything else than the shape of its result is no size.


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
    # A number of the symbol must be in the shape of the result, or a factor.
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


def _is_computed(number: fx.Node) -> bool:
    """Return whether `number` is a size, or computed from sizes in its graph, so that a micro-batch can compute it."""
    if isinstance(value_of(number), torch.SymInt):
        return True
    return number.op == "call_function" and all(map(_is_computed, number.all_input_nodes))
