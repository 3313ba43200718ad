"""Plans with full and lean calls, made by hand in place of a search."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elixir_compile.base.options import Options
from elixir_compile.ir import Plan
from elixir_compile.search import Problem
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.layers import Layer, deepest
from elixir_compile.session import graph_planner
from elixir_compile.session.cache import plan_for
from elixir_compile.step import Depth
from tests.pure.lean_pairs import pair_of


def most(layer: Layer, lean: str) -> int:
    """Return the mode of `layer` that recomputes or offloads the most."""
    return deepest(layer, Depth.FIXED if lean == "recompute" else Depth.KEPT, leaves=lean == "offload")


@contextmanager
def pairs_by_hand(lean: str, num_full: int) -> Iterator[list[Plan]]:
    """Inside, plans keep activations in full calls, of which `num_full` wait at most, and save less in lean ones."""
    made: list[Plan] = []

    def by_hand(problem: Problem, options: Options) -> Plan:
        if problem.calls.num == 1:  # a graph that does not train
            return plan_for(problem, options)
        layers = gather_facts(problem).layers
        kept, saved = [0] * len(layers), [most(layer, lean) for layer in layers]
        made.append(pair_of(problem, kept, saved, num_full))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_planner, "plan_for", by_hand)
        yield made
