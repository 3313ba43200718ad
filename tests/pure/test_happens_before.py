"""Vector clocks: which accesses are ordered, and which accesses a cell may forget."""

import pytest

from tests.races.happens_before import Actor, Cell, Source, shown

HERE = Source("an action", 1, "file.py", 1)


def test_accesses_of_an_actor_are_ordered() -> None:
    actor, cell = Actor("a"), Cell()
    assert cell.add(actor, "writes", (0, 8), HERE) is None
    assert cell.add(actor, "reads", (0, 8), HERE) is None
    assert cell.add(actor, "writes", (0, 8), HERE) is None


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [("reads", "reads", False), ("reads", "writes", True), ("writes", "reads", True), ("writes", "writes", True)],
)
def test_accesses_of_two_actors_have_no_order(first: str, second: str, is_race: bool) -> None:
    one, other, cell = Actor("a"), Actor("b"), Cell()
    assert cell.add(one, first, (0, 8), HERE) is None
    assert (cell.add(other, second, (4, 12), HERE) is not None) == is_race
    assert cell.add(other, "writes", (8, 12), HERE) is None  # not the bytes of the first


def test_an_actor_that_learned_a_clock_is_behind_it_and_all_before() -> None:
    one, other, third, cell = Actor("a"), Actor("b"), Actor("c"), Cell()
    cell.add(one, "writes", (0, 8), HERE)
    other.learn(one.clock)
    third.learn(other.clock)
    assert cell.add(third, "writes", (0, 8), HERE) is None
    assert cell.add(other, "reads", (0, 8), HERE) is not None


def test_what_an_actor_did_after_its_clock_was_taken_is_not_known() -> None:
    one, other, cell = Actor("a"), Actor("b"), Cell()
    taken = dict(one.clock)
    cell.add(one, "writes", (0, 8), HERE)
    other.learn(taken)
    found = cell.add(other, "reads", (0, 8), HERE)
    assert found is not None
    assert [access.actor for access in found] == ["a", "b"]


def test_a_free_is_a_write_of_every_byte() -> None:
    one, other, cell = Actor("a"), Actor("b"), Cell()
    cell.add(one, "reads", (4, 8), HERE)
    assert cell.free(other, HERE) is not None
    assert Cell().free(other, HERE) is None


def test_reads_of_many_actors_are_all_kept_until_a_write_is_behind_them() -> None:
    one, other, writer, cell = Actor("a"), Actor("b"), Actor("c"), Cell()
    cell.add(one, "reads", (0, 8), HERE)
    cell.add(other, "reads", (0, 8), HERE)
    writer.learn(other.clock)
    assert cell.add(writer, "writes", (0, 8), HERE) is not None  # not behind the first


def test_the_schedule_marks_the_actions() -> None:
    cell, one, other = Cell(), Actor("a"), Actor("b")
    cell.add(one, "writes", (0, 8), Source("gather b1", 3, "file.py", 1))
    found = cell.add(other, "writes", (0, 8), Source("update b1", 20, "file.py", 2))
    assert found is not None
    lines = shown([(moment, f"action {moment}") for moment in range(1, 25)], found).splitlines()
    assert [line.split()[:2] for line in lines if line.endswith("<-- here")] == [["action", "3"], ["action", "20"]]
    assert "    ..." in lines
    assert len(lines) == 7 + 1 + 9
