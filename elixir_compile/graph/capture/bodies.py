"""Count what a function of torch that runs graphs, its bodies, allocates beside its results, and what it computes.

A run of a body has a peak of p bytes, and results of r bytes. With n rows, and w bytes of results of the function:

    cond              p                           of the larger branch
    while_loop        r + p                       the values of a turn are there while the next one runs
    map               (n-1) r + p, or n r + w     the results of all rows are kept, then stacked
    scan              w + the results of two turns and their indices + p
    associative_scan  less than 3 w               at the last level w/2 four times, then w too

These are the loops of `torch._higher_order_ops`, which call the bodies op by op. A turn of a `while_loop` counts once,
because nobody knows how many there are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.graph.capture.node_facts import dense_tensors_of, outputs_of, tensor_of
from elixir_compile.ir import Kind, StepGraph, sizes
from elixir_compile.ir.cost import is_free
from elixir_compile.step.fusion import fused
from elixir_compile.step.liveness import liveness

_INDEX_BYTES = 8
"""Of an index by which `scan` writes an element of its results."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes or flops, and the number as an expression of the graph's symbols; empty if it is constant."""

    number: int
    text: str = ""

    def __add__(self, other: "Size") -> "Size":
        return Size(self.number + other.number, self._joined(other, "+"))

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.number - other.number, self._joined(other, "-"))

    def __mul__(self, other: "Size") -> "Size":
        return Size(self.number * other.number, self._joined(other, "*"))

    def _joined(self, other: "Size", sign: str) -> str:
        return f"({self}) {sign} ({other})" if self.text or other.text else ""

    def __str__(self) -> str:
        return self.text or str(self.number)

    def or_more(self, other: "Size") -> "Size":
        """Return the larger of both."""
        text = f"Max({self}, {other})" if self.text or other.text else ""
        return Size(max(self.number, other.number), text)

    def simplified(self) -> "Size":
        """Return an equal size with a short text, or a constant one if the text is too long to be a size."""
        try:
            return Size(self.number, sizes.canonical(self.text) if self.text else "")
        except InvalidPlan:
            return Size(self.number)


NOTHING = Size(0)
Count = Callable[[Any], Size]
"""From a size of the capture, a number or symbolic, to a `Size`."""


def total(parts: Iterable[Size]) -> Size:
    """Return the sum of `parts`."""
    found = NOTHING
    for part in parts:
        found = found + part if part.number or part.text else found
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What the bodies of a node add to its own reads and writes."""

    workspace: Size
    """Bytes that are live at once in the node, beside its inputs and results."""
    flops: Size
    moved_bytes: int
    launches: int
    """Kernels that the node launches."""


NOTHING_INSIDE = Inside(workspace=NOTHING, flops=NOTHING, moved_bytes=0, launches=1)
"""Of a node that runs no graph: it launches its own kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One run of a graph that a node runs."""

    peak: Size
    """The most bytes of results that are live at once, results of the graph included."""
    results: tuple[Size, ...]
    """The bytes of each result of the graph."""
    indices: tuple[Size, ...]
    """The bytes of an index for each element of each result."""
    flops: Size
    moved_bytes: int
    launches: int


def body_of(graph: fx.Graph, step: StepGraph, count: Count, *, is_fused: bool) -> Body:
    """Return one run of `graph`, whose ops and storages are those of `step`. If `is_fused`, a compiler fuses its ops.

    The text of the peak is that of the op with the most bytes at the sizes of the capture.
    """
    step = fused(step) if is_fused else step
    bytes_of = {s.id: Size(s.nbytes, s.size) for s in step.storages if s.kind in (Kind.TEMP, Kind.WORKSPACE)}
    lives = {name: life for name, life in liveness(step).lives.items() if name in bytes_of}
    live = [
        [bytes_of[name] for name, life in lives.items() if life.first <= at <= life.last] for at in range(len(step.ops))
    ]
    tensors = [dense_tensors_of(node) if isinstance(node, fx.Node) else [] for node in outputs_of(graph)]
    ops = [op for op in step.ops if not is_free(op)]
    return Body(
        peak=max(map(total, live), key=lambda size: size.number, default=NOTHING),
        results=tuple(total(count(value.untyped_storage().nbytes()) for value in values) for values in tensors),
        indices=tuple(total(count(_INDEX_BYTES * value.numel()) for value in values) for values in tensors),
        flops=total(Size(op.flops, op.flops_size) for op in ops),
        moved_bytes=sum(op.moved_bytes for op in ops),
        launches=sum(op.launches for op in ops),
    )


def inside_of(node: fx.Node, bodies: Sequence[Body], count: Count) -> Inside:
    """Return what `bodies`, in the order in which `node` names them, add to `node`."""
    results = total(count(value.untyped_storage().nbytes()) for value in dense_tensors_of(node))
    peak, turns = _PEAKS.get(str(node.target), _branches)(node, bodies, results, count)
    return Inside(
        workspace=(peak - results).or_more(NOTHING).simplified(),
        flops=(turns * largest(body.flops for body in bodies)).simplified(),
        moved_bytes=turns.number * max(body.moved_bytes for body in bodies),
        launches=max(1, turns.number * max(body.launches for body in bodies)),
    )


def largest(parts: Iterable[Size]) -> Size:
    """Return the largest of `parts`, 0 if there are none."""
    found = NOTHING
    for part in parts:
        found = found.or_more(part)
    return found


_Found = tuple[Size, Size]
"""The most bytes that are live at once, results included, and the number of runs of a body."""


def _branches(node: fx.Node, bodies: Sequence[Body], results: Size, count: Count) -> _Found:
    return largest(body.peak for body in bodies), Size(1)


def _while_loop(node: fx.Node, bodies: Sequence[Body], results: Size, count: Count) -> _Found:
    return total(bodies[-1].results) + largest(body.peak for body in bodies), Size(1)


def _map(node: fx.Node, bodies: Sequence[Body], results: Size, count: Count) -> _Found:
    (body,), rows = bodies, _rows(node.args[1], count)
    row = total(body.results)
    return ((rows - Size(1)) * row + body.peak).or_more(rows * row + results), rows


def _scan(node: fx.Node, bodies: Sequence[Body], results: Size, count: Count) -> _Found:
    init: Any = node.args[1]
    given = node.args[2]
    (body,), rows, num_carried = bodies, _rows(given, count), len(init)
    carried, made = total(body.results[:num_carried]), body.results[num_carried:]
    indices = body.indices[num_carried:]
    # All rows of the results and their indices, the first row and the one before, and the values carried to this one.
    kept = rows * total(made) + total(indices) + total(made) + total(made) + carried
    return kept + body.peak.or_more(largest(indices)), rows


def _associative_scan(node: fx.Node, bodies: Sequence[Body], results: Size, count: Count) -> _Found:
    # The pairs of neighbours, their scan, the values between, these with the first one, and both interleaved. A level
    # above has half of the rows, so all together have twice those of the last.
    return results * Size(3), Size(2)


def _rows(given: Any, count: Count) -> Size:
    """Return the number of rows of the first tensor in `given`, over whose rows a node loops; 1 without a tensor."""
    return count(tensor_of(given[0]).shape[0]) if given else Size(1)


_PEAKS: dict[str, Callable[[fx.Node, Sequence[Body], Size, Count], _Found]] = {
    "associative_scan": _associative_scan,
    "while_loop": _while_loop,
    "map_impl": _map,
    "scan": _scan,
}
