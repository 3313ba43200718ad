"""The states of values in micro-batches, and one call of a captured graph with the states of what it reads."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import tensor_of, value_of
from elixir_compile.ir import Batched


@dataclass(frozen=True, slots=True)
class State:
    """How a value is made of its values in micro-batches, and where its slices are."""

    batched: Batched
    dim: int = 0
    """The dimension of the slices if `batched` is EACH, else 0."""
    is_total: bool = False
    """Whether the value, which is SAME, is computed from a sum over the micro-batches. Within the lap of the sum it
    exists only behind the last micro-batch; for later laps it is as any other SAME value."""

    @property
    def is_each(self) -> bool:
        """Whether the value has one slice per micro-batch."""
        return self.batched is Batched.EACH


SAME = State(Batched.SAME)
SUM = State(Batched.SUM)
TOTAL = State(Batched.SAME, is_total=True)
States = State | tuple[State, ...]
"""The state of a node: one state, or one for each of its results."""


def each(dim: int) -> State:
    """Return the state of a value with its slices along `dim`."""
    return State(Batched.EACH, dim)


def states_in(states: States) -> tuple[State, ...]:
    """Return the state of each result of a node."""
    return (states,) if isinstance(states, State) else states


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
