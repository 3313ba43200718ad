"""Streamed updates: state that lives on the host is updated on the device, a piece at a time, on three lanes at once.

    h2d       | in 0 | in 1 | in 2 | in 3 |                in: statistics; weights and gradients too if their home is
    compute          | 0 |  | 1 |  | 2 |  | 3 |                the host
    d2h                  | out 0 | out 1 | out 2 | ...     out: statistics, and weights if their home is the host

A piece holds the same elements of all tensors that pass. Update rules are element-wise, so they give the bits that they
give for whole tensors. Pieces pass through rooms in turn. All rooms together take no more than the plan counts for the
largest streamed bucket (`analysis.bucket_bytes.streamed`), but for gaps of less than `_ALIGN_BYTES` per tensor. Nothing
here blocks the host: lanes wait for each other by events.

The step counters of AdamW stay on the host: each piece gets the number of the step as a constant on the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elixir_compile.analysis.staging import streamed_rooms
from elixir_compile.ir import Lane
from elixir_compile.optim.rule import GroupSlice, State, UpdateRule
from elixir_compile.runtime.lanes import Event, Lanes
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.slab import flat

_ALIGN_BYTES = 16
"""Kernels load as many bytes at once."""
_CUT = 256
"""Tensors are cut at multiples of this many elements, as the tasks of torch's fused kernels are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """The streamed update of a bucket."""

    bucket: str
    rule: UpdateRule
    parts: tuple[GroupSlice, ...]
    is_away: bool
    """Whether the home of weights and gradients is the host too."""


class Stream:
    """Issues streamed updates on the lanes of one executor."""

    def __init__(self, lanes: Lanes, ledger: Ledger) -> None:
        self._lanes, self._ledger = lanes, ledger
        self._rooms: list[torch.Tensor] = []
        self._left: list[Event | None] = []
        """By room: past when the last copy out of it is done."""
        self._num_pieces = 0

    def issue(self, updates: Sequence[Streamed], arrived: Event | None) -> Event | None:
        """Issue `updates` in their order, and return an event after their last copy to the host.

        Gradients are on the host after `arrived`; None if they are there already. Compute that is issued from now on
        waits for the last copy.
        """
        rows = [[[*_rows(update, part)] for part in update.parts] for update in updates]
        self._allocate(rows)
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
        return landed

    def _allocate(self, rows: "Sequence[Sequence[Sequence[_Row]]]") -> None:
        each = [row for of_parts in rows for members in of_parts for row in members]
        most_bytes = max((sum(row.nbytes(row.numel) for members in of for row in members) for of in rows), default=0)
        least_bytes = max((row.nbytes(min(_CUT, row.numel)) for row in each), default=0)
        num_rooms, room_bytes = streamed_rooms(most_bytes)
        room_bytes = max(room_bytes, least_bytes)
        memory = self._lanes.empty(num_rooms * room_bytes)
        self._rooms = [memory[at * room_bytes : (at + 1) * room_bytes] for at in range(num_rooms)]
        self._left = [self._lanes.mark_compute()] * num_rooms

    def _issue_one(self, update: Streamed, rows: "Sequence[Sequence[_Row]]") -> None:
        is_first = True
        for part, members in zip(update.parts, rows, strict=True):
            for segments in _pieces(members, self._rooms[0].nbytes):
                self._pass(segments, update, part, times=int(is_first))
                is_first = False

    def _pass(self, segments: "Sequence[_Segment]", update: Streamed, part: GroupSlice, *, times: int) -> None:
        """Issue the copies in, the update and the copies out of a piece; `times` is 0 if its update is counted."""
        lanes, ledger = self._lanes, self._ledger
        at = self._num_pieces % len(self._rooms)
        self._num_pieces += 1
        _cut(self._rooms[at], segments)
        with (
            lanes.h2d.beside_compute(self._left[at]),
            ledger.span(Lane.H2D, f"gather {update.bucket}.state", times=0),
        ):
            for segment in segments:
                for here, home in segment.arriving():
                    lanes.h2d.copy(here, home)
        lanes.compute_waits(lanes.h2d.mark())
        with ledger.span(Lane.COMPUTE, f"update {update.bucket}", times=times):
            _update(segments, update.rule, part, lanes)
        with lanes.d2h.behind_compute(), ledger.span(Lane.D2H, f"offload {update.bucket}.state", times=0):
            for segment in segments:
                for home, here in segment.leaving():
                    lanes.d2h.copy(home, here)
        self._mark_left(at)

    def _mark_left(self, at: int) -> None:
        self._left[at] = self._lanes.d2h.mark()


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """The flat tensors of a parameter in their homes."""

    like: torch.Tensor
    """The weight in its shape."""
    weight: torch.Tensor
    grad: torch.Tensor
    statistics: dict[str, torch.Tensor]
    """By name, those to be made by this update too."""
    homes: dict[str, torch.Tensor]
    """The statistics in their shape."""
    state: State
    is_away: bool

    @property
    def numel(self) -> int:
        return self.weight.numel()

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a room for `numel` elements of all tensors that pass."""
        away = (self.weight, self.grad) if self.is_away else ()
        return sum(_aligned(numel * tensor.element_size()) for tensor in (*away, *self.statistics.values()))

    def numel_within(self, nbytes: int) -> int:
        """Return a number of elements, a multiple of `_CUT`, that fit into `nbytes`."""
        return nbytes // max(self.nbytes(_CUT), 1) * _CUT  # as `_CUT` elements of any dtype leave no gap


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _rows(update: Streamed, part: GroupSlice) -> Iterator[_Row]:
    buffers = part.buffers or ({},) * len(part.params)
    members = zip(part.params, part.weights, part.grads, part.states, buffers, strict=True)
    for param, weight, grad, state, made in members:
        names = update.rule.state_dtypes(param, part.group)
        homes = dict(made)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (name in names or (weight.dim() and value.shape == weight.shape)):
                homes[name] = state[name] = _like(value, weight)
        yield _Row(
            like=weight,
            weight=flat(weight),
            grad=flat(_like(grad, weight)),
            statistics={name: flat(home) for name, home in homes.items()},
            homes=homes,
            state=state,
            is_away=update.is_away,
        )


def _like(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with its elements in the order of those of `weight`; a copy if they are in another order."""
    strides = zip(tensor.stride(), weight.stride(), weight.shape, strict=True)
    is_alike = all(own == other for own, other, size in strides if size > 1)
    return tensor if is_alike else torch.empty_like(weight, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(slots=True, eq=False)
class _Segment:
    """The elements of a row from `start` to `stop`, in a piece."""

    row: _Row
    start: int
    stop: int
    weight: torch.Tensor = field(init=False)
    grad: torch.Tensor = field(init=False)
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    """In the room, by name."""
    made: set[str] = field(default_factory=set)
    """The names of the statistics that the update has left."""

    def arriving(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tensors to be copied in: each with its home."""
        row = self.row
        if row.is_away:
            yield self.weight, self.of(row.weight)
            yield self.grad, self.of(row.grad)
        for name, here in self.statistics.items():
            if name in row.state:
                yield here, self.of(row.statistics[name])

    def leaving(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the homes to be written, each with its new value."""
        if self.row.is_away:
            yield self.of(self.row.weight), self.weight
        for name in self.made:
            yield self.of(self.row.statistics[name]), self.statistics[name]

    def of(self, home: torch.Tensor) -> torch.Tensor:
        """Return the elements of the flat tensor `home` that are in the segment."""
        return home[self.start : self.stop]


def _pieces(rows: Sequence[_Row], room_bytes: int) -> Iterator[list[_Segment]]:
    """Yield the segments of each piece; those of a piece fit a room of `room_bytes`."""
    piece: list[_Segment] = []
    left_bytes = room_bytes
    for row in rows:
        start, is_done = 0, False
        while not is_done:
            num = row.numel - start
            if row.nbytes(num) > left_bytes:
                num = min(num, row.numel_within(left_bytes))
                if num == 0:
                    yield piece
                    piece, left_bytes = [], room_bytes
                    continue
            piece.append(_Segment(row, start, start + num))
            left_bytes -= row.nbytes(num)
            start += num
            is_done = start == row.numel
    if piece:
        yield piece


def _cut(room: torch.Tensor, segments: Sequence[_Segment]) -> None:
    """Give the tensors of `segments` their places in `room`."""
    offset = 0

    def place(home: torch.Tensor, numel: int) -> torch.Tensor:
        nonlocal offset
        nbytes = numel * home.element_size()
        here = room[offset : offset + nbytes].view(home.dtype)
        offset += _aligned(nbytes)
        return here

    for segment in segments:
        row, numel = segment.row, segment.stop - segment.start
        segment.weight = place(row.weight, numel) if row.is_away else segment.of(row.weight)
        segment.grad = place(row.grad, numel) if row.is_away else segment.of(row.grad)
        segment.statistics = {name: place(home, numel) for name, home in row.statistics.items()}


def _update(segments: Sequence[_Segment], rule: UpdateRule, part: GroupSlice, lanes: Lanes) -> None:
    """Update `segments`, which are in their room, on compute."""
    weights, grads = [segment.weight for segment in segments], [segment.grad for segment in segments]
    states = _states(segments, rule, part, lanes.device)
    written = [here for segment in segments for here in segment.statistics.values()]
    lanes.touches(grads, (*weights, *written))
    rule.update(weights, grads, states, part.group)
    for segment, state in zip(segments, states, strict=True):
        _keep(segment, state, rule)


def _states(
    segments: Sequence[_Segment], rule: UpdateRule, part: GroupSlice, device: torch.device
) -> list[dict[str, Any]]:
    """Return the states with which the rule updates `segments`: their statistics, and copies of all else."""
    steps = _steps_on(device, [segment.row.state for segment in segments]) if rule.counts_steps else None

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


def _steps_on(device: torch.device, states: Sequence[State]) -> Sequence[torch.Tensor]:
    """Return the steps of `states`, which are on the host, as constants on `device`."""
    numbers, dtype = [float(state["step"]) for state in states], states[0]["step"].dtype
    if len(set(numbers)) == 1:
        return torch.full((len(numbers),), numbers[0], dtype=dtype, device=device).unbind()
    return [torch.full((), number, dtype=dtype, device=device) for number in numbers]


def _keep(segment: _Segment, state: State, rule: UpdateRule) -> None:
    """Put statistics that the rule made or replaced into the room, and all else of `state` into its home."""
    row, is_last = segment.row, segment.stop == segment.row.numel
    for name, value in state.items():
        here = segment.statistics.get(name)
        if here is not None:
            segment.made.add(name)
            if value is not here:
                here.copy_(value)
        elif isinstance(value, torch.Tensor) and value.shape == segment.weight.shape:
            _keep_unforeseen(segment, name, value)
        elif is_last and name == "step" and rule.counts_steps:
            row.state["step"].add_(1)
        elif is_last:
            _keep_other(row.state, name, value)
    if is_last:
        for name in segment.made - row.state.keys():
            row.state[name] = row.homes[name]


def _keep_unforeseen(segment: _Segment, name: str, value: torch.Tensor) -> None:
    """Keep a statistic that no dry step had made, and for which there is no room, on the host."""
    row = segment.row
    if name not in row.homes:
        row.homes[name] = row.state[name] = torch.empty_like(row.like, dtype=value.dtype, device="cpu")
    segment.of(flat(row.homes[name])).copy_(value)


def _keep_other(state: State, name: str, value: Any) -> None:
    """Put `value`, which is no statistic, into `state`; a tensor on the host, because its home is there."""
    target = state.get(name)
    if not isinstance(value, torch.Tensor):
        state[name] = value
    elif isinstance(target, torch.Tensor) and (target.shape, target.dtype) == (value.shape, value.dtype):
        target.copy_(value)
    else:
        state[name] = value.to("cpu")
