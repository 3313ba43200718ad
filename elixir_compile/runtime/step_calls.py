"""Which call of a step runs: the first gathers buckets, the last releases them and reduces the gradients of all.

```text
  forward    number 1 2 3 4           = backward passes that have ended + forwards that wait + 1
  backward   number 1 2 3 4           = backward passes that have ended + 1
```

The numbers follow from the forwards that wait and the backward passes that have ended, so a forward whose result is
dropped, or whose backward asks for gradients of inputs alone, is no call of the step. torch's pipelines run such a
forward to learn the shapes of tensors.
"""

import contextlib
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from elixir_compile.base.errors import IncompleteStep, TooManyForwards
from elixir_compile.ir.calls import ONCE, Calls


@dataclass(slots=True)
class _Progress:
    """The calls of the running step of a graph."""

    num_done: int = 0
    """Backward passes that have ended."""
    waiting: set[int] = field(default_factory=set)
    """The numbers of the forwards whose backward has not begun; a forward that was dropped may still be among them."""
    full: set[int] = field(default_factory=set)
    """The numbers of full forwards (see `ir.lean_calls`), of which some may wait no longer."""


class StepCalls:
    """The calls of the steps of an executor, counted for each of its graphs."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the model in messages."""
        self.spec: Calls = ONCE
        """How often each step calls the model."""
        self.is_last = True
        """Whether the program that runs now is the last of its half in the step."""
        self.trains = True
        """Whether the backward that runs now asks for gradients of parameters; else none is summed or reduced."""
        self.num_steps = 0
        """Steps of several calls that have ended."""
        self._running = self._ended_at = 0
        """The number of the last call that ran, and of the one in which an exception ended the step before, or 0."""
        self._name = name
        self._last: _Progress | None = None
        """The calls to which the forward that ran last belongs."""
        self._progress: weakref.WeakKeyDictionary[object, _Progress] = weakref.WeakKeyDictionary()

    @property
    def is_under_way(self) -> bool:
        """Whether a step has had its first backward, and not its last."""
        return any(progress.num_done for progress in list(self._progress.values()))

    def has_begun(self, graph: object, alive: Collection[int]) -> bool:
        """Return whether a step of `graph` has begun and not ended; `alive` are the numbers of outstanding forwards."""
        progress = self._progress.get(graph)
        return progress is not None and (progress.num_done > 0 or not progress.waiting.isdisjoint(alive))

    def require_whole_step(self, alive: Collection[int]) -> None:
        """Raise IncompleteStep if a step of any graph has begun and not ended: not all its gradients are summed up."""
        for graph, progress in list(self._progress.items()):
            if progress.num_done and self.has_begun(graph, alive):
                num_waiting = len(progress.waiting.intersection(alive))
                raise IncompleteStep(self._name, progress.num_done, num_waiting, self.spec.num)

    def number_of_forward(self, graph: object | None, alive: Collection[int]) -> int:
        """Return the number in its step of the forward of `graph` that is about to run.

        0 if no calls are counted: a step has one, or `graph` is None because it does not train. `alive` are the numbers
        of outstanding forwards.
        """
        if graph is None or self.spec.num == 1:
            return 0
        progress = self._progress.get(graph, _Progress())
        return progress.num_done + len(progress.waiting.intersection(alive)) + 1

    def number_of_backward(self, graph: object, number: int) -> int:
        """Return the number in its step of the backward of the forward `number` of `graph`.

        0 if it is none of the step: that forward had its backward, or an exception ended its step.
        """
        progress = self._progress.get(graph)
        return progress.num_done + 1 if progress is not None and number in progress.waiting else 0

    def words(self, number: int) -> str:
        """Return the call `number` in words for a message that begins with the name of the model; empty for 0."""
        if number == 0:
            return ""
        ended = f"; an exception in call {self._ended_at} ended the step before" if self._ended_at else ""
        return f" (call {number} of {self.spec.num}{ended})"

    @contextlib.contextmanager
    def forward(self, graph: object, alive: Collection[int]) -> Iterator[None]:
        """Run the program of a forward of `graph`.

        `alive` are the numbers of outstanding forwards. Raises TooManyForwards if more of them wait than `prepare` was
        told.
        """
        progress = self._progress.setdefault(graph, _Progress())
        progress.waiting &= set(alive)
        progress.full &= progress.waiting
        number = self._running = self.number_of_forward(graph, alive)
        if number > self.spec.num or len(progress.waiting) >= self.spec.outstanding:
            numbers = (len(progress.waiting), progress.num_done, self.spec.num, self.spec.outstanding)
            raise TooManyForwards(self._name, *numbers)
        with self._as(is_last=number == self.spec.num, trains=True):
            yield
        self._last = progress

    def waits(self, graph: object, number: int) -> bool:
        """Return whether the forward `number` of `graph` waits for its backward."""
        progress = self._progress.get(graph)
        return progress is not None and number in progress.waiting

    def num_full(self, graph: object | None, alive: Collection[int]) -> int:
        """Return how many full forwards of `graph` wait for their backward; `alive` are the numbers of outstanding
        forwards, and `graph` is None for inference."""
        progress = None if graph is None else self._progress.get(graph)
        return 0 if progress is None else len((progress.waiting & progress.full).intersection(alive))

    def note_forward(self, number: int, *, is_lean: bool) -> None:
        """Note that the forward that ran last, number `number` of all, waits for its backward, and whether it is a
        lean one."""
        if self._last is not None:
            self._last.waiting.add(number)
            if not is_lean:
                self._last.full.add(number)

    @contextlib.contextmanager
    def backward(self, graph: object, number: int, *, trains: bool) -> Iterator[None]:
        """Run the program of the backward of the forward `number` of `graph`.

        If it does not train, because it asks for no gradient of a parameter, it is no call of the step.
        """
        progress = self._progress.setdefault(graph, _Progress())
        is_call = trains and number in progress.waiting
        progress.waiting.discard(number)
        self._running = progress.num_done + is_call
        is_alone = not is_call and not progress.num_done and not progress.waiting
        with self._as(is_last=is_alone or (is_call and progress.num_done + 1 == self.spec.num), trains=trains):
            yield
        if is_call:
            progress.num_done += 1
        if progress.num_done == self.spec.num:
            progress.num_done = 0
            self.num_steps += 1
            self._ended_at = 0

    def abandon(self) -> None:
        """Begin a new step with the next forward; called after an exception."""
        if self._progress:
            self._ended_at = self._running
        self._progress.clear()
        self._last = None

    @contextlib.contextmanager
    def _as(self, *, is_last: bool, trains: bool) -> Iterator[None]:
        before = self.is_last, self.trains
        self.is_last, self.trains = is_last, trains
        try:
            yield
        finally:
            self.is_last, self.trains = before
