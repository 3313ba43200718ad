"""The uniform modes are listed several times in one search, above all if nothing fits."""

import pytest

from elixir_compile.search.evaluator import Evaluator, leanest, uniform_modes
from elixir_compile.search.space import memory as min_memory
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.memory import MemoryModel
from tests.pure.search.test_best import instances


def test_a_second_list_of_uniform_modes_is_the_same_without_a_new_search_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_made = 0

    def counted(*arguments: object) -> MemoryModel:
        nonlocal num_made
        num_made += 1
        return MemoryModel(*arguments)  # pyright: ignore[reportArgumentType] (handed on)

    monkeypatch.setattr(min_memory, "MemoryModel", counted)
    for _, problem in instances(6, num_layers=6):
        evaluator, before = Evaluator(gather_facts(problem)), num_made
        if not evaluator.facts.layers:
            continue
        first = list(uniform_modes(evaluator))
        assert num_made > before, "no modes are looked for layer by layer"
        after = num_made
        assert list(uniform_modes(evaluator)) == first
        assert leanest(evaluator).floor_bytes == min(
            at.memory.peak_bytes(at.min_memory_levels, ahead=0) for at in first
        )
        assert num_made == after
    assert num_made
