"""The seconds that a layer adds alone, counted for several layers in one step."""

import random

import pytest

from elixir_compile.search.space import profiles as profiles_module
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import _far_apart, _places, profiles
from tests.pure.search.test_best import machine
from tests.pure.search.test_levels_at_modes import cast_chain
from tests.pure.search.test_planner import problem_of
from tests.pure.strategies import Layer, chain


def test_layers_far_apart_in_one_step_add_what_each_adds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0
    added_alone = profiles_module._RecomputedStep._added_alone

    def counted(self: profiles_module._RecomputedStep, *arguments: object) -> object:
        nonlocal num_steps
        num_steps += 1
        return added_alone(self, *arguments)  # pyright: ignore[reportArgumentType] (handed on)

    monkeypatch.setattr(profiles_module._RecomputedStep, "_added_alone", counted)
    num_shared = 0
    for seed in range(4):
        draw = random.Random(seed)
        numels = draw.sample(range(100, 600), 12)  # no two layers add the same
        problem = problem_of(cast_chain(numels, 64, [True] * 12), machine(draw, 1))
        layers = gather_facts(problem).layers
        before = num_steps
        together = profiles(problem, layers)
        num_together, before = num_steps - before, num_steps
        with monkeypatch.context() as patch:
            patch.setattr(profiles_module, "_CLOSE", len(layers))
            one_by_one = profiles(problem, layers)
        num_shared += num_steps - before > num_together
        for own, other in zip(together, one_by_one, strict=True):
            for mode, same in zip(own, other, strict=True):
                assert dict(mode.added_s) == pytest.approx(dict(same.added_s), rel=1e-9)
    assert num_shared, "no two layers were looked at in one step"


def test_distances_between_layers_are_those_in_the_model() -> None:
    """The last of eight layers is numbered second, as in a Llama: it is far from the first, and close to the sixth."""
    names = [f"h.{i}" for i in (0, 7, 1, 2, 3, 4, 5, 6)]
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 100),), frozen=False, act_numel=16) for i in range(8)]
    places = _places(chain(layers), {name: number for number, name in enumerate(names)})
    assert places == [0, 7, 1, 2, 3, 4, 5, 6]
    assert _far_apart([0, 1, 6], places) == [[0, 1], [6]]


def test_seconds_do_not_depend_on_the_order_in_which_layers_are_numbered() -> None:
    """Layers are numbered by their first group, so neighbours in the model may have numbers far apart."""
    for seed in range(4):
        draw = random.Random(seed)
        problem = problem_of(cast_chain(draw.sample(range(100, 600), 12), 64, [True] * 12), machine(draw, 1))
        layers = gather_facts(problem).layers
        order = draw.sample(range(len(layers)), len(layers))
        in_order, shuffled = profiles(problem, layers), profiles(problem, [layers[i] for i in order])
        for number, i in enumerate(order):
            for mode, same in zip(shuffled[number], in_order[i], strict=True):
                assert dict(mode.added_s) == pytest.approx(dict(same.added_s), rel=1e-9)
