"""Which outstanding forwards are beside each half of a call, in a step with full and lean calls.

```text
                    F1 F2 f3 f4 B1 B2 b3 b4       4 calls, 4 outstanding, at most 2 full: a small letter is a lean one
  full beside        0  1  2  2  1  0  0  0
  lean beside        0  0  0  1  2  2  1  0
```

The program of a half and its place in the step decide the bytes that it holds itself; beside it, so many full and lean
forwards hold the bytes of each. So of all halves of one kind only the one with the most beside it counts. If
the order of the backward passes is not known, these are the most in any order.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import BackwardOrder, Calls
from elixir_compile.step.call_bytes import CallKind, call_kinds, input_bytes, output_bytes, outputs_beside
from elixir_compile.step.plan_rows import PlanRows


class Half(NamedTuple):
    """A kind of forwards or of backward passes: their program, and their place among those of the step."""

    is_lean: bool
    is_backward: bool
    is_first: bool
    is_last: bool
    is_after_backward: bool
    """Whether a backward has run before, which leaves sums of gradients."""

    def call(self, calls: Calls) -> CallKind:
        """Return the kind of calls of this half, alone in a step of `calls`."""
        # Before the first backward, a forward holds no more than if all forwards came first.
        alternate = calls.alternate and (self.is_backward or self.is_after_backward)
        return CallKind(is_first=self.is_first, is_last=self.is_last, alternate=alternate)


class Beside(NamedTuple):
    """The outstanding forwards beside a half, and the backward passes before it."""

    num_full: int
    num_lean: int
    num_done: int


Steps = Iterator[tuple[Half, Beside]]


def halves(calls: Calls, num_full: int) -> Steps:
    """Yield the forwards that can be beside each half of a step of `calls`, if at most `num_full` full ones wait."""
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
        half = Half(is_lean, is_backward, number == 0, number == calls.num - 1, num_done > 0)
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
        place = is_first, is_last, not is_first
        yield Half(False, False, *place), Beside(0, 0, 0) if is_first else full
        yield Half(False, True, *place), none if is_last else full
        yield Half(True, True, *place), none if is_last else lean
        if not is_first:
            yield Half(True, False, *place), lean


def _of_any_backward(calls: Calls, num_full: int) -> Steps:
    """Yield the fewest and the most full forwards that may be beside each backward, if all forwards come first."""
    for num_done in range(calls.num):
        num_beside = calls.num - 1 - num_done
        for is_lean in (False, True):
            most_full = num_full - (not is_lean)
            most_lean = calls.num - num_full - is_lean
            half = Half(is_lean, True, num_done == 0, num_done == calls.num - 1, num_done > 0)
            for full in {max(0, num_beside - most_lean), min(most_full, num_beside)}:
                yield half, Beside(full, num_beside - full, num_done)


class Halves:
    """The forwards that may be beside each half of a step of `calls`, if at most `num_full` full forwards wait."""

    def __init__(self, calls: Calls, num_full: int) -> None:
        self.calls = calls
        found: dict[Half, dict[Beside, None]] = {}
        for half, beside in halves(calls, num_full):
            found.setdefault(half, {})[beside] = None
        self._beside = {half: np.array(list(own), dtype=np.int64) for half, own in found.items()}

    def most(self, own: "BesideBytes") -> Mapping[Half, tuple[Beside, int]]:
        """Return for each half the forwards that hold the most bytes beside it, and how many more bytes these are than
        with no other outstanding forward."""
        found: dict[Half, tuple[Beside, int]] = {}
        for half, beside in self._beside.items():
            nbytes = self._nbytes(half, beside, own)
            at = int(nbytes.argmax())
            nothing = self._nbytes(half, np.zeros((1, 3), dtype=np.int64), own)
            found[half] = Beside(*beside[at].tolist()), int(nbytes[at] - nothing[0])
        return found

    def _nbytes(self, half: Half, beside: NDArray[np.int64], own: "BesideBytes") -> NDArray[np.int64]:
        calls, num_beside = self.calls, beside[:, 0] + beside[:, 1]
        nbytes = own.full * beside[:, 0] + own.lean * beside[:, 1]
        nbytes += own.outputs * outputs_beside(num_beside, calls, is_backward=half.is_backward)
        if half.is_backward or calls.alternate:
            nbytes += own.inputs * np.minimum(beside[:, 2], calls.input_grads - 1)
        return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideBytes:
    """The bytes of one outstanding forward beside a half, and of the tensors that the caller holds for it."""

    full: int
    lean: int
    outputs: int
    inputs: int


class CallBytes:
    """The bytes of the calls that run the same program: that of full calls, or that of lean calls."""

    def __init__(self, rows: PlanRows) -> None:
        self.rows = rows
        """The rows of a call; those beside it are added for a kind of calls."""
        self.waiting_bytes = sum(rows.waiting_bytes.values())
        """Bytes that a forward leaves for its backward, without outputs."""
        self._alone: dict[CallKind, NDArray[np.int64]] = {}
        self._ops = rows.axis.ops

    def alone(self, half: Half) -> tuple[int, int]:
        """Return the most bytes at any op of `half` if no other forward waits, and at any op of the update."""
        call, ops = half.call(self.rows.plan.calls), self._ops
        if call not in self._alone:
            self._alone[call] = self.rows.in_call(call, {}).nbytes
        live_bytes = self._alone[call]
        span = slice(ops.num_forward, ops.num_run) if half.is_backward else slice(0, ops.num_forward)
        return int(live_bytes[span].max(initial=0)), int(live_bytes[ops.num_run :].max(initial=0))

    def peak_bytes(self) -> int:
        """Return the most bytes at any op if all calls of a step run this program, as `plan_timeline` counts them."""
        kinds = call_kinds(self.rows.plan.calls)
        return max(int(self.rows.in_call(call, {}).nbytes.max(initial=0)) for call in kinds)


class TwoPrograms:
    """The bytes of steps whose calls run one of two programs with the same buckets: that of full or of lean calls."""

    def __init__(self, full: CallBytes, lean: CallBytes) -> None:
        self.full, self.lean = full, lean
        self._calls = full.rows.plan.calls
        self._beside = BesideBytes(
            full=full.waiting_bytes,
            lean=lean.waiting_bytes,
            outputs=output_bytes(full.rows.step),
            inputs=input_bytes(full.rows.step, self._calls),
        )

    def fullest(self, beside: Halves) -> Iterator[tuple[Half, PlanRows]]:
        """Yield each half with the rows of a call that has the most bytes beside it. Only the ops of the half count."""
        for half, (most, _) in beside.most(self._beside).items():
            yield half, self._rows_of(half, most)

    def peak_bytes(self, beside: Halves) -> int:
        """Return the most bytes at any op, as `plan_timeline` counts them."""
        peak_bytes = 0
        for half, (_, more_bytes) in beside.most(self._beside).items():
            alone_bytes, update_bytes = (self.lean if half.is_lean else self.full).alone(half)
            peak_bytes = max(peak_bytes, alone_bytes + more_bytes, update_bytes if half.is_backward else 0)
        return peak_bytes

    def _rows_of(self, half: Half, beside: Beside) -> PlanRows:
        num_beside = beside.num_full + beside.num_lean
        num_others = beside.num_full if half.is_lean else beside.num_lean
        call = replace(
            half.call(self._calls),
            beside_forward=num_beside,
            beside_backward=num_beside,
            input_grads=min(beside.num_done, self._calls.input_grads - 1),
            others_beside_forward=num_others,
            others_beside_backward=num_others,
        )
        own, other = (self.lean, self.full) if half.is_lean else (self.full, self.lean)
        return own.rows.in_call(call, other.rows.waiting_bytes)
