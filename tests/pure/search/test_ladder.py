"""The ladder is walked several times in one search, above all where nothing fits."""

import pytest

from elixir_compile.search import uniform_modes as ladder_module
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.heuristics.uniform_modes import leanest, uniform_modes
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.memory import MemoryModel
from tests.pure.search.test_best import instances


def test_a_second_walk_of_the_ladder_makes_the_same_rungs_and_looks_for_none_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_made = 0

    def counted(*arguments: object) -> MemoryModel:
        nonlocal num_made
        num_made += 1
        return MemoryModel(*arguments)  # pyright: ignore[reportArgumentType] (handed on)

    monkeypatch.setattr(ladder_module, "MemoryModel", counted)
    for _, problem in instances(6, num_layers=6):
        evaluator, before = Evaluator(gather_facts(problem)), num_made
        if not evaluator.facts.layers:
            continue
        first = list(uniform_modes(evaluator))
        assert num_made > before, "no rung is looked for layer by layer"
        after = num_made
        assert list(uniform_modes(evaluator)) == first
        assert leanest(evaluator).floor_bytes == min(
            rung.memory.peak_bytes(rung.min_memory_levels, ahead=0) for rung in first
        )
        assert num_made == after
    assert num_made
