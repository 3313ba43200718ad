"""Streamed updates: state that lives on the host is updated on the device, a piece at a time, on three lanes at once.

    h2d       | in 0 | in 1 | in 2 | in 3 |                in: statistics; weights and gradients too if their home is
    compute          | 0 |  | 1 |  | 2 |  | 3 |                the host
    d2h                  | out 0 | out 1 | out 2 | ...     out: statistics, and weights if their home is the host

A piece holds the same elements of all tensors that pass. Update rules are element-wise, so they give the bits that they
give for whole tensors. Pieces pass through rooms in turn. All rooms together take no more than the plan counts for the
largest streamed bucket (`analysis.bucket_bytes.streamed`), but for gaps of less than `pieces.ALIGN_BYTES` per tensor.

Lanes wait for each other by events, and the host waits for none of them, with three exceptions for optimizer classes
that are not AdamW: numbers and statistics that a class makes on the device, which no dry step had foreseen, are copied
to the host at once; and so are counters that its kernels keep on the device, in the first step and whenever they count
more than steps. Step counters stay on the host: each piece gets the number of the step as a constant on the device.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elixir_compile.analysis.staging import streamed_rooms
from elixir_compile.ir import BucketId, BucketRef, Lane, StateRef, Verb, label
from elixir_compile.optim.layout import is_alike
from elixir_compile.optim.pieces import CUT_NUMEL, Row, Segment, cut, pieces, rows_of
from elixir_compile.optim.rule import GroupSlice, State, UpdateRule
from elixir_compile.optim.step_counts import note_num_steps
from elixir_compile.runtime.lanes import Event, Lanes
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.slab import flat

_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """The streamed update of a bucket."""

    bucket: BucketId
    rule: UpdateRule
    parts: tuple[GroupSlice, ...]
    is_away: bool
    """Whether the home of weights and gradients is the host too."""

    @property
    def must_reorder_gradients(self) -> bool:
        """Whether a gradient on the host must be copied there, because its elements are in another order."""
        pairs = (pair for part in self.parts for pair in zip(part.grads, part.weights, strict=True))
        return self.is_away and not all(is_alike(grad, weight) for grad, weight in pairs)


class Passed(NamedTuple):
    """Streamed updates that were issued."""

    landed: Event | None
    """Past when the last results are on the host; None if they are there."""
    on_host: Sequence[Sequence[torch.Tensor]]
    """By update, the tensors on the host that copies read and write before `landed`."""


class Stream:
    """Issues streamed updates on the lanes of one executor."""

    def __init__(self, lanes: Lanes, ledger: Ledger) -> None:
        self._lanes, self._ledger = lanes, ledger
        self._rooms: list[torch.Tensor] = []
        self._left: list[Event | None] = []
        """By room: past when the last copy out of it is done."""
        self._num_pieces = 0

    def issue(self, updates: Sequence[Streamed], arrived: Event | None) -> Passed:
        """Issue `updates` in their order, and return when they are over and which memory they use until then.

        Gradients are on the host after `arrived`; None if they are there already. Compute that is issued from now on
        waits for the last copy.
        """
        if any(update.must_reorder_gradients for update in updates):
            self._lanes.host_waits(arrived)  # the host reads them here
        rows = [[[*rows_of(part, update.rule, is_away=update.is_away)] for part in update.parts] for update in updates]
        self._allocate(rows)
        if updates:
            self._ledger.takes(label(Verb.GATHER, StateRef(updates[0].bucket)), self._rooms[:1])
        with self._lanes.h2d.beside_compute(arrived):  # all copies of the lane from now on are behind it
            pass
        try:
            for update, of_parts in zip(updates, rows, strict=True):
                self._issue_one(update, of_parts)
        except BaseException:  # memory must not be used again while a copy still reads or writes it
            self._lanes.h2d.synchronize()
            self._lanes.d2h.synchronize()
            raise
        landed = self._lanes.d2h.mark()
        self._lanes.compute_waits(landed)  # compute frees the rooms
        self._rooms.clear()
        on_host = tuple(
            [tensor for members in of_parts for row in members for tensor in row.on_host] for of_parts in rows
        )
        return Passed(landed, on_host)

    def _allocate(self, rows: "Sequence[Sequence[Sequence[Row]]]") -> None:
        each = [row for of_parts in rows for members in of_parts for row in members]
        most_bytes = max((sum(row.nbytes(row.numel) for members in of for row in members) for of in rows), default=0)
        least_bytes = max((row.nbytes(min(CUT_NUMEL, row.numel)) for row in each), default=0)
        num_rooms, room_bytes = streamed_rooms(most_bytes)
        room_bytes = max(room_bytes, least_bytes)
        memory = self._lanes.empty(num_rooms * room_bytes)
        self._rooms = [memory[at * room_bytes : (at + 1) * room_bytes] for at in range(num_rooms)]
        self._left = [self._lanes.mark_compute()] * num_rooms

    def _issue_one(self, update: Streamed, rows: "Sequence[Sequence[Row]]") -> None:
        piece = 0
        for part, members in zip(update.parts, rows, strict=True):
            for segments in pieces(members, self._rooms[0].nbytes):
                self._pass(segments, update, part, piece)
                piece += 1

    def _pass(self, segments: "Sequence[Segment]", update: Streamed, part: GroupSlice, piece: int) -> None:
        """Issue the copies in, the update and the copies out of the piece number `piece` of the bucket."""
        lanes, state = self._lanes, StateRef(update.bucket)
        at = self._num_pieces % len(self._rooms)
        self._num_pieces += 1
        cut(self._rooms[at], segments)
        arriving = [pair for segment in segments for pair in segment.arriving()]
        with (
            lanes.h2d.beside_compute(self._left[at]),
            self._span(Lane.H2D, label(Verb.GATHER, state), piece, arriving),
        ):
            for here, home in arriving:
                lanes.h2d.copy(here, home)
        lanes.compute_waits(lanes.h2d.mark())
        name = label(Verb.UPDATE, BucketRef(update.bucket))
        with self._ledger.span(Lane.COMPUTE, name, times=int(piece == 0), piece=piece, graph=""):
            _update(segments, update.rule, part, lanes)
        leaving = [pair for segment in segments for pair in segment.leaving()]
        with lanes.d2h.behind_compute(), self._span(Lane.D2H, label(Verb.OFFLOAD, state), piece, leaving):
            for home, here in leaving:
                lanes.d2h.copy(home, here)
        self._mark_left(at)

    def _span(self, lane: Lane, name: str, piece: int, pairs: _Pairs) -> AbstractContextManager[object]:
        """Return the span of the copies of `pairs`, target and source."""
        nbytes = sum(target.nbytes for target, _ in pairs)
        return self._ledger.span(lane, name, nbytes, times=0, piece=piece, graph="")

    def _mark_left(self, at: int) -> None:
        self._left[at] = self._lanes.d2h.mark()


def _update(segments: Sequence[Segment], rule: UpdateRule, part: GroupSlice, lanes: Lanes) -> None:
    """Update `segments`, which are in their room, on compute."""
    weights, grads = [segment.weight for segment in segments], [segment.grad for segment in segments]
    states = _states(segments, rule, part, lanes.device)
    written = [here for segment in segments for here in segment.statistics.values()]
    lanes.touches(grads, (*weights, *written))
    rule.update(weights, grads, states, part.group)
    for segment, state in zip(segments, states, strict=True):
        _keep(segment, state, rule, part)


def _states(
    segments: Sequence[Segment], rule: UpdateRule, part: GroupSlice, device: torch.device
) -> list[dict[str, Any]]:
    """Return the states with which the rule updates `segments`: their statistics, and copies of all else."""
    given = [segment.row.state for segment in segments]
    is_counted = all(_is_counted(state, rule, part) for state in given)
    steps = _steps_on(device, given) if is_counted else None

    def other(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # The rule counts each piece of a parameter as a step, so each piece gets a copy of the counter.
        return torch.empty_like(value, device=device if rule.moves_with_update(name, part.group) else None).copy_(value)

    found: list[dict[str, Any]] = []
    for index, segment in enumerate(segments):
        state = {
            name: segment.statistics[name] if name in segment.statistics else other(name, value)
            for name, value in segment.row.state.items()
            if steps is None or name != "step"
        }
        found.append(state if steps is None else {**state, "step": steps[index]})
    return found


def _is_counted(state: State, rule: UpdateRule, part: GroupSlice) -> bool:
    """Return whether `state` has an entry `step` with which `rule` only counts, so that the host can count too."""
    return isinstance(state.get("step"), torch.Tensor) and rule.counts_steps(part.group)


def _steps_on(device: torch.device, states: Sequence[State]) -> Sequence[torch.Tensor]:
    """Return the steps of `states`, which are on the host, as constants on `device`."""
    numbers, dtype = [float(state["step"]) for state in states], states[0]["step"].dtype
    if len(set(numbers)) == 1:
        # `data`: a view would share the version of the whole, which each of its neighbours raises.
        made = [row.data for row in torch.full((len(numbers),), numbers[0], dtype=dtype, device=device).unbind()]
    else:
        made = [torch.full((), number, dtype=dtype, device=device) for number in numbers]
    for counter, number in zip(made, numbers, strict=True):
        note_num_steps(counter, int(number))
    return made


def _keep(segment: Segment, state: State, rule: UpdateRule, part: GroupSlice) -> None:
    """Put statistics that the rule made or replaced into the room, and all else of `state` into its home."""
    row, is_last = segment.row, segment.is_last
    is_counted = _is_counted(row.state, rule, part)
    for name, value in state.items():
        here = segment.statistics.get(name)
        if here is not None:
            segment.made.add(name)
            if value is not here:
                here.copy_(value)
        elif isinstance(value, torch.Tensor) and value.dim() and value.shape == segment.weight.shape:
            _keep_unforeseen(segment, name, value)
        elif is_last and name == "step" and is_counted:
            row.state["step"].add_(1)
        elif is_last:
            _keep_other(row.state, name, value)
    if is_last:  # not before: the next piece begins with the state that this piece began with
        for name in (row.homes.keys() & state.keys()) - row.state.keys():
            row.state[name] = row.homes[name]


def _keep_unforeseen(segment: Segment, name: str, value: torch.Tensor) -> None:
    """Keep a statistic that no dry step had made, and for which there is no room, on the host."""
    row = segment.row
    if name not in row.homes:
        row.homes[name] = torch.empty_like(row.like, dtype=value.dtype, device="cpu")
    segment.shaped(segment.of(flat(row.homes[name]))).copy_(value)


def _keep_other(state: State, name: str, value: Any) -> None:
    """Put `value`, which is no statistic, into `state`; a tensor on the host, because its home is there."""
    target = state.get(name)
    if not isinstance(value, torch.Tensor):
        state[name] = value
    elif isinstance(target, torch.Tensor) and (target.shape, target.dtype) == (value.shape, value.dtype):
        target.copy_(value)
    else:
        state[name] = value.to("cpu")
