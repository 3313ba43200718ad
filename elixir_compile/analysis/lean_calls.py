"""Which outstanding forwards are beside each half of a call, in a step with full and lean calls.

```text
                    F1 F2 f3 f4 B1 B2 b3 b4       4 calls, 4 outstanding, at most 2 full: a small letter is a lean one
  full beside        0  1  2  2  1  0  0  0
  lean beside        0  0  0  1  2  2  1  0
```

The program of a half and its place in the step decide what it holds itself, and what waits beside it is so many times
the bytes of a full and of a lean forward. So of all halves of one kind only the one with the most beside it counts. If
the order of the backward passes is not known, these are the most in any order.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from elixir_compile.analysis.calls import CallKind, outputs_beside
from elixir_compile.analysis.plan_rows import PlanRows
from elixir_compile.ir import BackwardOrder, Calls, Kind, Plan, StepGraph


class Half(NamedTuple):
    """A kind of forwards or of backward passes: their program, and their place among those of the step."""

    is_lean: bool
    is_backward: bool
    is_first: bool
    is_last: bool


class Beside(NamedTuple):
    """The outstanding forwards beside a half, and the backward passes before it."""

    num_full: int
    num_lean: int
    num_done: int


Steps = Iterator[tuple[Half, Beside]]


def halves(calls: Calls, num_full: int) -> Steps:
    """Yield what may be beside each half of a step of `calls`, of which `num_full` full ones wait at most."""
    if calls.backward_order is not BackwardOrder.ANY:
        yield from walked(calls, num_full)
    elif calls.alternate:
        yield from _of_alternate(calls, num_full)
    else:
        yield from (found for found in walked(calls, num_full) if not found[0].is_backward)
        yield from _of_any_backward(calls, num_full)


def walked(calls: Calls, num_full: int) -> Steps:
    """Yield the halves of a step one after another: `calls.outstanding` forwards, then a backward and a forward in
    turn, then the other backward passes. A step in any order is taken to be first-first."""
    waiting: deque[bool] = deque()
    num_started = num_done = num_lean = 0
    take = waiting.pop if calls.backward_order is BackwardOrder.LAST_FIRST else waiting.popleft
    while num_done < calls.num:
        is_backward = len(waiting) == calls.outstanding or num_started == calls.num
        is_lean = take() if is_backward else len(waiting) - num_lean >= num_full
        num_lean -= is_backward and is_lean
        number = num_done if is_backward else num_started
        half = Half(is_lean, is_backward, number == 0, number == calls.num - 1)
        yield half, Beside(len(waiting) - num_lean, num_lean, num_done)
        if is_backward:
            num_done += 1
        else:
            waiting.append(is_lean)
            num_lean += is_lean
            num_started += 1


def num_full_calls(calls: Calls, num_full: int) -> int:
    """Return how many calls of a step are full."""
    return sum(not half.is_lean and not half.is_backward for half, _ in walked(calls, num_full))


def _of_alternate(calls: Calls, num_full: int) -> Steps:
    """Yield the most beside each half, if forwards and backward passes alternate in an unknown order."""
    none, num_lean = Beside(0, 0, calls.num - 1), calls.outstanding - num_full
    full, lean = Beside(num_full - 1, num_lean, calls.num - 1), Beside(num_full, num_lean - 1, calls.num - 1)
    for is_first, is_last in ((True, False), (False, False), (False, True)):
        yield Half(False, False, is_first, is_last), Beside(0, 0, 0) if is_first else full
        yield Half(False, True, is_first, is_last), none if is_last else full
        yield Half(True, True, is_first, is_last), none if is_last else lean
        if not is_first:
            yield Half(True, False, is_first, is_last), lean


def _of_any_backward(calls: Calls, num_full: int) -> Steps:
    """Yield the fewest and the most full forwards that may be beside each backward, if all forwards come first."""
    for num_done in range(calls.num):
        num_beside = calls.num - 1 - num_done
        for is_lean in (False, True):
            most_full = num_full - (not is_lean)
            most_lean = calls.num - num_full - is_lean
            half = Half(is_lean, True, num_done == 0, num_done == calls.num - 1)
            for full in {max(0, num_beside - most_lean), min(most_full, num_beside)}:
                yield half, Beside(full, num_beside - full, num_done)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BesideBytes:
    """The bytes of one outstanding forward beside a half, and of what the caller holds for it."""

    full: int
    lean: int
    outputs: int
    inputs: int

    def of(self, calls: Calls, half: Half, beside: Beside) -> int:
        """Return the bytes of all that is `beside` a half."""
        num_outputs = outputs_beside(beside.num_full + beside.num_lean, calls, is_backward=half.is_backward)
        num_inputs = _input_grads(calls, beside) if half.is_backward or calls.alternate else 0
        own = beside.num_full * self.full + beside.num_lean * self.lean
        return own + num_outputs * self.outputs + num_inputs * self.inputs


class TwoPrograms:
    """The bytes of steps of `plan` on `rank` beside lean calls, which run as `lean_plan` does, a plan of the same
    buckets."""

    def __init__(self, graph: StepGraph, plan: Plan, lean_plan: Plan, rank: int = 0) -> None:
        self._calls = plan.calls
        self.rows: Sequence[PlanRows] = (PlanRows(graph, plan, rank), PlanRows(graph, lean_plan, rank))
        """The rows of a full call and of a lean one."""

    @cached_property
    def _beside(self) -> _BesideBytes:
        step, outputs, shared = self.rows[0].step, set(self.rows[0].step.outputs), self._calls.shared
        full, lean = (sum(rows.waiting_bytes.values()) for rows in self.rows)
        saved = (Kind.SAVED, Kind.TEMP)
        return _BesideBytes(
            full=full,
            lean=lean,
            outputs=sum(own.nbytes for own in step.storages if own.id in outputs and own.kind in saved),
            inputs=sum(own.nbytes for own in step.storages if own.kind is Kind.INPUT and own.id not in shared),
        )

    def most(self, num_full: int) -> Mapping[Half, Beside]:
        """Return, for each half, what takes the most bytes beside it if at most `num_full` full forwards wait."""
        found: dict[Half, Beside] = {}
        for half, beside in dict.fromkeys(halves(self._calls, num_full)):
            before = found.get(half)
            if before is None or self._bytes(half, beside) > self._bytes(half, before):
                found[half] = beside
        return found

    def rows_of(self, half: Half, beside: Beside) -> PlanRows:
        """Return the rows of a call with `beside` it; they are those of the ops of `half`."""
        num_beside = beside.num_full + beside.num_lean
        num_others = beside.num_full if half.is_lean else beside.num_lean
        call = CallKind(
            is_first=half.is_first,
            is_last=half.is_last,
            alternate=self._calls.alternate,
            beside_forward=num_beside,
            beside_backward=num_beside,
            input_grads=_input_grads(self._calls, beside),
            others_beside_forward=num_others,
            others_beside_backward=num_others,
        )
        return self.rows[half.is_lean].in_call(call, self.rows[not half.is_lean].waiting_bytes)

    def _bytes(self, half: Half, beside: Beside) -> int:
        return self._beside.of(self._calls, half, beside)


def _input_grads(calls: Calls, beside: Beside) -> int:
    return min(beside.num_done, calls.input_grads - 1)
