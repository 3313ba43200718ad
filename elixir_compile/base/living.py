"""Sets of objects that they do not keep alive, for several threads."""

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """The objects added to it that are alive, in the order in which they were added.

    Threads may add and discard objects while others iterate, which get the objects of the moment when they began. A
    `weakref.WeakSet` raises RuntimeError then: "Set changed size during iteration". Objects are told apart by identity.
    """

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, thing: T) -> None:
        """Add `thing`, unless it is there."""
        self._by_id.setdefault(id(thing), thing)

    def discard(self, thing: T) -> None:
        """Remove `thing` if it is there."""
        self._by_id.pop(id(thing), None)

    def __contains__(self, thing: object) -> bool:
        return self._by_id.get(id(thing)) is thing

    def __iter__(self) -> Iterator[T]:
        # `valuerefs` copies the references in one operation of a dictionary; other iterators go through the dictionary.
        living = [thing for reference in self._by_id.valuerefs() if (thing := reference()) is not None]
        return iter(living)

    def __len__(self) -> int:
        return sum(1 for _ in self)
