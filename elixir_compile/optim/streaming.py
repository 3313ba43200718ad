"""Streamed updates: state that lives on the host is updated on the device, a piece at a time, on three lanes at once.

    h2d       | in 0 | in 1 | in 2 | in 3 |                in: statistics; weights and gradients too if their home is
    compute          | 0 |  | 1 |  | 2 |  | 3 |                the host
    d2h                  | out 0 | out 1 | out 2 | ...     out: statistics, and weights if their home is the host

A piece holds the same elements of all tensors that pass. Update rules are element-wise, so they give the bits that they
give for whole tensors. Pieces pass through rooms in turn. All rooms together take no more than the plan counts for the
largest streamed bucket (`step.bucket_bytes.streamed`), but for gaps of less than `pieces.ALIGN_BYTES` per tensor.

Lanes wait for each other by events, and the host waits for none of them, with three exceptions for optimizer classes
that are not AdamW: numbers and statistics that a class makes on the device, which no dry step had foreseen, are copied
to the host at once; and so are counters that its kernels keep on the device, in the first step and whenever they count
more than steps. Step counters stay on the host: each piece gets the number of the step as a constant on the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from elixir_compile.ir import BucketId, BucketRef, Lane, StateRef, Verb, label
from elixir_compile.ir.staging import streamed_rooms
from elixir_compile.optim.layout import is_alike
from elixir_compile.optim.pieces import CUT_NUMEL, MemoryRow, Segment, aligned, pieces, update
from elixir_compile.optim.rule import GroupSlice, UpdateRule
from elixir_compile.runtime.lanes import CopyLane, Event, Lanes
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.slab import flat

_HOST = torch.device("cpu")
_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with the one whose values it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """The streamed update of a bucket."""

    bucket: BucketId
    rule: UpdateRule
    parts: tuple[GroupSlice, ...]
    is_away: bool
    """Whether the home of weights and gradients is the host too."""

    def rows(self, part: GroupSlice) -> Iterator[MemoryRow]:
        """Yield a row for each parameter of `part`."""
        made = part.buffers or ({},) * len(part.params)
        for param, each, own in zip(part.params, part.updates, made, strict=True):
            layouts = self.rule.state_layouts(param, part.group)
            yield MemoryRow(each, layouts, own, is_away=self.is_away, home=_HOST)

    @property
    def must_reorder_gradients(self) -> bool:
        """Whether a gradient on the host must be copied there, because its elements are in another order."""
        each = (each for part in self.parts for each in part.updates)
        return self.is_away and not all(is_alike(grad, weight) for weight, grad, _ in each)


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
        rows = [[[*update.rows(part)] for part in update.parts] for update in updates]
        self._allocate(rows)
        if updates:
            self._ledger.takes(label(Verb.GATHER, StateRef(updates[0].bucket)), self._rooms[:1])
        with self._lanes.h2d.beside_compute(arrived):  # all copies of the lane from now on are behind it
            pass
        try:
            for update, of_parts in zip(updates, rows, strict=True):
                piece = 0
                for part, members in zip(update.parts, of_parts, strict=True):
                    for segments in pieces(members, self._rooms[0].nbytes):
                        self._pass(segments, update, part, piece)
                        piece += 1
        except BaseException:  # memory must not be used again while a copy still reads or writes it
            self._lanes.h2d.synchronize()
            self._lanes.d2h.synchronize()
            raise
        landed = self._lanes.d2h.mark()
        self._lanes.compute_waits(landed)  # compute frees the rooms
        self._rooms.clear()
        on_host = tuple(
            [tensor for members in of_parts for row in members for tensor in row.passing] for of_parts in rows
        )
        return Passed(landed, on_host)

    def _allocate(self, rows: Sequence[Sequence[Sequence[MemoryRow]]]) -> None:
        each = [row for of_parts in rows for members in of_parts for row in members]
        most_bytes = max((sum(row.nbytes(row.numel) for members in of for row in members) for of in rows), default=0)
        least_bytes = max((row.nbytes(min(CUT_NUMEL, row.numel)) for row in each), default=0)
        num_rooms, room_bytes = streamed_rooms(most_bytes)
        room_bytes = max(room_bytes, least_bytes)
        memory = self._lanes.empty(num_rooms * room_bytes)
        self._rooms = [memory[at * room_bytes : (at + 1) * room_bytes] for at in range(num_rooms)]
        self._left = [self._lanes.mark_compute()] * num_rooms

    def _pass(self, segments: Sequence[Segment[MemoryRow]], streamed: Streamed, part: GroupSlice, piece: int) -> None:
        """Issue the copies in, the update and the copies out of the piece number `piece` of the bucket."""
        lanes = self._lanes
        state, name = StateRef(streamed.bucket), label(Verb.UPDATE, BucketRef(streamed.bucket))
        at = self._num_pieces % len(self._rooms)
        self._num_pieces += 1
        arriving = _placed(segments, self._rooms[at])
        with lanes.h2d.beside_compute(self._left[at]):
            self._copy(lanes.h2d, Lane.H2D, label(Verb.GATHER, state), arriving, piece)
        lanes.compute_waits(lanes.h2d.mark())
        with self._ledger.span(Lane.COMPUTE, name, times=int(piece == 0), piece=piece, graph=""):
            written = [here for segment in segments for here in (segment.weight, *segment.statistics.values())]
            lanes.touches([segment.grad for segment in segments], written)
            update(segments, streamed.rule, part.group, lanes.device)
        leaving = [pair for segment in segments for pair in _leaving(segment)]
        with lanes.d2h.behind_compute():
            self._copy(lanes.d2h, Lane.D2H, label(Verb.OFFLOAD, state), leaving, piece)
        self._mark_left(at)

    def _copy(self, lane: CopyLane, on: Lane, name: str, pairs: _Pairs, piece: int) -> None:
        nbytes = sum(target.nbytes for target, _ in pairs)
        with self._ledger.span(on, name, nbytes, times=0, piece=piece, graph=""):
            for target, source in pairs:
                lane.copy(target, source)

    def _mark_left(self, at: int) -> None:
        self._left[at] = self._lanes.d2h.mark()


def _placed(segments: Sequence[Segment[MemoryRow]], room: torch.Tensor) -> _Pairs:
    """Give the tensors of `segments` that pass their places in `room`; return those to be copied in, with homes."""
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    offset = 0

    def place(home: torch.Tensor, *, has_values: bool = True) -> torch.Tensor:
        nonlocal offset
        here = room[offset : offset + home.nbytes].view(home.dtype)
        offset += aligned(home.nbytes)
        if has_values:
            arriving.append((here, home))
        return here

    for segment in segments:
        row = segment.row
        away = [place(segment.of(own)) for own in ((row.weight, row.grad) if row.is_away else ())]
        homes = {name: row.home_of(name, segment.start, segment.stop) for name in row.layouts}
        segment.put({name: place(home, has_values=name in row.begun) for name, home in homes.items()}, *away)
    return arriving


def _leaving(segment: Segment[MemoryRow]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the homes that the update of `segment` changes, each with its new value."""
    if segment.row.is_away:
        yield segment.of(segment.row.weight), flat(segment.weight)
    for name in segment.made:
        yield segment.row.home_of(name, segment.start, segment.stop), flat(segment.statistics[name])
