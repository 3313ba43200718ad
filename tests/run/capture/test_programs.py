"""`session.programs`: programs stay for as long as a forward of theirs may have a backward."""

import gc
import weakref
from typing import Any

import pytest

from elixir_compile.ir import Saving
from elixir_compile.session.programs import Programs
from elixir_compile.step import Depth, Group
from tests.fx.handmade import keep, planned, to_depth
from tests.run.models import Stack, seeded, vectors
from tests.run.training import by_elixir

NUM_FORWARDS = 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Programs]]:
    """Every `Programs` that is made."""
    found: list[weakref.ref[Programs]] = []
    original = Programs.__init__

    def init(self: Programs, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        found.append(weakref.ref(self))

    monkeypatch.setattr(Programs, "__init__", init)
    return found


def num_alive(made: list[weakref.ref[Programs]]) -> int:
    gc.collect()
    return sum(programs() is not None for programs in made)


def test_programs_are_freed_with_the_last_forward_that_needs_them(
    made: list[weakref.ref[Programs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward beside more of them is planned anew."""
    model, (batch, *_) = seeded(Stack), vectors()

    def choose(group: Group) -> Saving | None:
        return (keep if len(plans) % 2 else to_depth(Depth.POINTWISE))(group)

    with planned(monkeypatch, choose) as plans:
        run = by_elixir(model).train([batch])
        losses = [run.compiled(batch) for _ in range(NUM_FORWARDS)]
        num_held = num_alive(made)
        assert num_held >= NUM_FORWARDS
        while losses:
            losses.pop(0).backward()
        run.compiled(batch).backward()
        assert num_alive(made) == 1
