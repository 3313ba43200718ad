"""The order of a plan's works as a graph of networkx: the works are the same, the closure is searched.

`GraphOrder` keeps only the works that are directly before a work, and `closure` finds all others by paths. `unordered`
compares every two works that touch the same memory.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx

from elixir_compile.ir import Plan, RegionId
from elixir_compile.step.lane_order import KEPT, Cell, Order, Ordered, Touch, works_of
from elixir_compile.step.works import Work


class Nodes(frozenset[int]):
    """A moment as the works that are directly before it."""

    def __or__(self, other: Any) -> "Nodes":
        return Nodes(frozenset.__or__(self, other or frozenset()))

    __ror__ = __or__


class GraphOrder(Order):
    """An order whose moments are sets of works."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: Any = nx.DiGraph()

    def issue(self, work: Work, step: int, before: Any) -> Any:
        number = len(self.found)
        super().issue(work, step, 0)
        self.graph.add_node(number)
        self.graph.add_edges_from((other, number) for other in before or ())
        return Nodes({number})


def graph_of(plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> GraphOrder:
    """Return the works of two steps of `plan`, and the graph of those that are directly before another."""
    order = GraphOrder()
    order.run_steps(works_of(plan, touches))
    return order


def closure(works: GraphOrder) -> set[tuple[int, int]]:
    """Return the pairs of works of which the first is before the second."""
    return set(nx.transitive_closure_dag(works.graph).edges)


def unordered(works: Sequence[Ordered], before: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs of works with accesses to a cell that are not ordered as they must be.

    A read before the first write is one of them, unless the memory keeps its values from step to step.
    """
    accesses: dict[Cell, list[tuple[int, bool, bool]]] = {}
    for number, work in enumerate(works):
        for cell in dict.fromkeys((*work.reads, *work.writes, *work.frees)):
            is_freed = cell in work.frees
            accesses.setdefault(cell, []).append((number, is_freed or cell in work.writes, is_freed))
    found: list[tuple[int, int]] = []
    for cell, own in accesses.items():
        begin = next((number for number, writes, _ in own if writes), -1)
        found += [(number, begin) for number, _, _ in own if number < begin and cell.memory not in KEPT]
        for (first, writes, frees), (second, writes_too, _) in itertools.combinations(own, 2):
            if (writes or writes_too) and ((first, second) not in before or frees):
                found.append((first, second))
    return found
