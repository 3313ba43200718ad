"""Sets of objects that they do not keep alive."""

import pytest

from elixir_compile.base.process import Living


class Thing:
    """An object that equals all others."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.fixture
def things() -> list[Thing]:
    return [Thing() for _ in range(3)]


@pytest.fixture
def living(things: list[Thing]) -> Living[Thing]:
    made: Living[Thing] = Living()
    for thing in things:
        made.add(thing)
    return made


def test_objects_come_once_each_in_their_order_by_identity(living: Living[Thing], things: list[Thing]) -> None:
    living.add(things[1])
    assert [id(thing) for thing in living] == [id(thing) for thing in things]
    assert len(living) == 3
    assert things[2] in living
    assert Thing() not in living


def test_an_object_that_is_gone_is_not_there(living: Living[Thing], things: list[Thing]) -> None:
    del things[0]
    assert len(living) == 2
    things.clear()
    assert not living


def test_an_object_may_come_and_another_go_while_somebody_iterates(living: Living[Thing], things: list[Thing]) -> None:
    """As a thread does between any two steps of the iteration; a `WeakSet` raises RuntimeError."""
    late = Thing()
    seen = []
    for thing in living:
        seen.append(id(thing))
        living.add(late)
        living.discard(things[0])
    assert seen == [id(thing) for thing in things]
    assert [id(thing) for thing in living] == [id(things[1]), id(things[2]), id(late)]
