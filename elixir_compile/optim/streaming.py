"""Streamed updates: state that lives on the host is updated on the device, cut into pieces that fit a room there, on
three lanes at once.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from elixir_compile.ir import BucketId, BucketRef, Lane, StateRef, Verb, label
from elixir_compile.ir.bucket import NUM_WHOLE_ROOMS
from elixir_compile.ir.cost import streamed_rooms
from elixir_compile.optim.rule import (
    GroupSlice,
    ParamUpdate,
    State,
    StatisticLayout,
    UpdateRule,
    flat_order,
    is_alike,
    note_num_steps,
)
from elixir_compile.runtime.bucket import flat
from elixir_compile.runtime.lanes import CopyLane, Event, Lanes
from elixir_compile.runtime.recording import Ledger

# ----------------------------------------------------------------------------------------------------------------------
# Update parameters piece by piece: a piece comes from its source into a room, is updated there, and goes to its sink.
#
#     piece     | weight 0, bias 0, start of weight 1 | rest of weight 1 |    segment: a parameter in a piece
#
#     streamed  host memory            -> a room on the device         -> host memory
#     on disk   files                  -> a staging buffer             -> files
#     in bf16   statistics             -> a block of them in fp32      -> statistics               `generic.class_rule`
#
# A segment holds the same elements of all tensors that pass. If a parameter passes whole, the rule sees its tensors in
# the shape of the parameter. One that is cut passes as flat tensors: its rule is element-wise, and dry steps
# (`generic.dry_step`) have found that a class gives flat parts the bits of the whole. Parameters of other classes are
# never cut.


ALIGN_BYTES = 16
"""Kernels load as many bytes at once."""
CUT_NUMEL = 256
"""Tensors are cut at multiples of this many elements, as the tasks of torch's fused kernels are."""


class PassingParam:
    """A parameter whose update passes in pieces."""

    home: torch.device | None = None
    """Where the state belongs; None if it may be wherever it is."""

    def __init__(self, of: ParamUpdate, layouts: Mapping[str, StatisticLayout], begun: Collection[str]) -> None:
        self.like = of.weight
        self.weight, self.grad = flat(of.weight), flat_order(of.grad, of.weight)
        self.entries = of.state
        """The state, or what of it is no statistic."""
        self.layouts = layouts
        """The statistics that have a place in a piece, those to be made by this update too."""
        self.begun = frozenset(begun)
        """The names of the statistics that existed before the update."""
        self.made: set[str] = set()
        """The names of the statistics that the update has left."""

    @property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return self.weight.numel()

    def keep_unforeseen(self, segment: "Segment[PassingParam]", name: str, value: torch.Tensor) -> None:
        """Keep a tensor that does not fit its place in the piece, or has none."""
        raise NotImplementedError

    def keep_other(self, name: str, value: Any) -> None:
        """Put `value`, which is no statistic, into the state, in its home."""
        target = self.entries.get(name)
        if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and _is_like(target, value):
            target.copy_(value)
        else:
            self.entries[name] = value.to(device=self.home) if isinstance(value, torch.Tensor) else value

    def finish(self) -> None:
        """Note what the update made; called once its last segment is updated."""


class MemoryParam(PassingParam):
    """A parameter with its state in memory."""

    def __init__(
        self,
        of: ParamUpdate,
        layouts: Mapping[str, StatisticLayout],
        *,
        is_away: bool = False,
        is_whole: bool = False,
        home: torch.device | None = None,
    ) -> None:
        """`is_away` says that weight and gradient pass through the room too, `is_whole` that the parameter is not
        cut."""
        weight, state, homes = of.weight, of.state, dict(of.places)
        begun = [
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and (name in layouts or (weight.dim() and value.shape == weight.shape))
        ]
        for name in begun:
            layout = layouts.get(name) or StatisticLayout(state[name].dtype)
            homes[name] = state[name] = layout.in_order(state[name], weight)
        own = {name: layouts.get(name) or StatisticLayout(value.dtype) for name, value in homes.items()}
        super().__init__(of, own, begun)
        self.homes = homes
        """The statistics; those that no dry step had made are added when the update makes them."""
        self.is_away, self.is_whole = is_away, is_whole
        self.home = home
        self._flat = {name: flat(value) for name, value in homes.items()}

    @property
    def passing(self) -> list[torch.Tensor]:
        """The tensors that pass through rooms."""
        return [*self.homes.values(), *((self.weight, self.grad) if self.is_away else ())]

    def home_of(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the values of the statistic `name` in its home that belong to the elements `start` to `stop`."""
        return self._flat[name][self.layouts[name].span(start, stop)]

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a room for `numel` elements of all tensors that pass."""
        sizes = [numel * tensor.element_size() for tensor in ((self.weight, self.grad) if self.is_away else ())]
        return sum(map(aligned, (*sizes, *(layout.nbytes(numel) for layout in self.layouts.values()))))

    @property
    def least_nbytes(self) -> int:
        """Return the bytes of the smallest room that it can pass."""
        return self.nbytes(self.numel if self.is_whole else min(CUT_NUMEL, self.numel))

    def numel_within(self, nbytes: int) -> int:
        """Return a number of elements, a multiple of `CUT_NUMEL`, that fit into `nbytes`; 0 if it is not cut."""
        if self.is_whole:
            return 0
        return nbytes // max(self.nbytes(CUT_NUMEL), 1) * CUT_NUMEL  # as `CUT_NUMEL` elements of any dtype leave no gap

    def keep_unforeseen(self, segment: "Segment[PassingParam]", name: str, value: torch.Tensor) -> None:
        """Keep a statistic that no dry step had made, and for which there is no room, in its home at once."""
        if name in segment.statistics:
            segment.statistics[name].copy_(value)
            segment.made.add(name)
        elif value.shape == segment.weight.shape:
            if name not in self.homes:
                self.homes[name] = torch.empty_like(self.like, dtype=value.dtype, device=self.home)
            segment.shaped(flat(self.homes[name])[segment.start : segment.stop]).copy_(value)
            self.made.add(name)
        elif segment.is_last:
            self.keep_other(name, value)

    def finish(self) -> None:
        """Put the statistics that the update made into the state."""
        for name in self.made - self.begun:
            self.entries[name] = self.homes[name]


R = TypeVar("R", bound=PassingParam, covariant=True)


class Segment(Generic[R]):
    """The elements `start` to `stop` of a parameter, in a piece."""

    weight: torch.Tensor
    """In the shape that the rule sees, as all tensors of the segment."""
    grad: torch.Tensor
    statistics: Mapping[str, torch.Tensor]
    """In the room, by name."""

    def __init__(self, param: R, start: int, stop: int) -> None:
        self.param, self.start, self.stop = param, start, stop
        self.made: set[str] = set()
        """The names of the statistics that the update has left in the room."""

    @property
    def is_last(self) -> bool:
        """Whether the parameter ends with the segment."""
        return self.stop == self.param.numel

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of the flat `tensor` of the parameter that are in the segment."""
        return tensor[self.start : self.stop]

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat `tensor`, a value for each element of the segment, in the shape that the rule sees.

        That is the shape of the parameter if it passes whole; else it is flat.
        """
        like = self.param.like
        return tensor.as_strided(like.shape, like.stride()) if self.start == 0 and self.is_last else tensor

    def put(
        self,
        statistics: Mapping[str, torch.Tensor],
        weight: torch.Tensor | None = None,
        grad: torch.Tensor | None = None,
    ) -> "Segment[R]":
        """Take the flat tensors in the room, and return the segment; weight and gradient stay at home if not given."""
        layouts = self.param.layouts
        self.weight = self.shaped(self.of(self.param.weight) if weight is None else weight)
        self.grad = self.shaped(self.of(self.param.grad) if grad is None else grad)
        self.statistics = {
            name: self.shaped(here) if layouts[name].is_by_element else layouts[name].shaped(here, here)
            for name, here in statistics.items()
        }
        return self

    @property
    def places(self) -> Mapping[str, torch.Tensor]:
        """Memory in the room for the statistics that the update may make."""
        return {name: here for name, here in self.statistics.items() if name not in self.param.begun}

    def given(self, rule: UpdateRule, group: Mapping[str, Any], device: torch.device) -> State:
        """Return the state with which `rule` updates the segment on `device`: its statistics, and copies of all else.

        Copies, because the rule counts each piece of a parameter as a step.
        """
        param = self.param
        found = {name: here for name, here in self.statistics.items() if name in param.begun}
        for name, value in param.entries.items():
            if name in param.begun or (name == "step" and counts_beside(param, rule, group)):
                continue
            if isinstance(value, torch.Tensor):
                there = device if rule.moves_with_update(name, group) else None
                found[name] = torch.empty_like(value, device=there).copy_(value)
            else:
                found[name] = copy.deepcopy(value)
        return found

    def keep(self, state: State, *, is_counted: bool) -> None:
        """Put what the rule made or replaced into the room, and all else of `state` into its home."""
        param = self.param
        for name, value in state.items():
            here = self.statistics.get(name)
            if here is not None and value is here:
                self.made.add(name)
            elif isinstance(value, torch.Tensor) and (here is not None or value.dim()):
                if here is not None and _is_like(here, value):
                    here.copy_(value)
                    self.made.add(name)
                else:
                    param.keep_unforeseen(self, name, value)
            elif self.is_last and name == "step" and is_counted:
                param.entries["step"].add_(1)
            elif self.is_last:
                param.keep_other(name, value)
        param.made |= self.made
        if self.is_last:  # not before: the next piece begins with the state that this piece began with
            param.finish()


def update(
    segments: Sequence[Segment[PassingParam]], rule: UpdateRule, group: Mapping[str, Any], device: torch.device
) -> None:
    """Update `segments`, which are in their room on `device`."""
    if not segments:
        return
    states = [segment.given(rule, group, device) for segment in segments]
    counted = [index for index, segment in enumerate(segments) if counts_beside(segment.param, rule, group)]
    counters = [segments[index].param.entries["step"] for index in counted]
    numbers = [float(counter) for counter in counters]
    # Each counter on the host becomes a constant on the device.
    if numbers and len(set(numbers)) == 1:
        whole = torch.full((len(numbers),), numbers[0], dtype=counters[0].dtype, device=device)
        # `data`: a view would share the version of the whole, which each of its neighbours raises.
        steps = [row.data for row in whole.unbind()]
    else:
        values = zip(numbers, counters, strict=True)
        steps = [torch.full((), number, dtype=counter.dtype, device=device) for number, counter in values]
    for index, step, number in zip(counted, steps, numbers, strict=True):
        note_num_steps(step, int(number))
        states[index]["step"] = step
    given = zip(segments, states, strict=True)
    rule.update([ParamUpdate(segment.weight, segment.grad, state, segment.places) for segment, state in given], group)
    for index, (segment, state) in enumerate(zip(segments, states, strict=True)):
        segment.keep(state, is_counted=index in counted)


def counts_beside(param: PassingParam, rule: UpdateRule, group: Mapping[str, Any]) -> bool:
    """Return whether `rule` only counts with the entry `step` of `param`, on the host, so that it counts too."""
    step = param.entries.get("step")
    return isinstance(step, torch.Tensor) and step.device.type == "cpu" and rule.counts_steps(group)


def pieces(params: Sequence[MemoryParam], room_bytes: int) -> Iterator[list[Segment[MemoryParam]]]:
    """Yield the segments of each piece; together they fit a room of `room_bytes`."""
    piece: list[Segment[MemoryParam]] = []
    left_bytes = room_bytes
    for param in params:
        start, is_done = 0, False
        while not is_done:
            num = param.numel - start
            if param.nbytes(num) > left_bytes:
                num = min(num, param.numel_within(left_bytes))
                if num == 0:
                    yield piece
                    piece, left_bytes = [], room_bytes
                    continue
            piece.append(Segment(param, start, start + num))
            left_bytes -= param.nbytes(num)
            start += num
            is_done = start == param.numel
    if piece:
        yield piece


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to the places of tensors in a room."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


# ----------------------------------------------------------------------------------------------------------------------
# Streamed updates: state that lives on the host is updated on the device, a piece at a time, on three lanes at once.
#
#     h2d       | in 0 | in 1 | in 2 | in 3 |                in: statistics; weights and gradients too if their home is
#     compute          | 0 |  | 1 |  | 2 |  | 3 |                the host
#     d2h                  | out 0 | out 1 | out 2 | ...     out: statistics, and weights if their home is the host
#
# A piece holds the same elements of all tensors that pass. Update rules are element-wise, so they give the bits that
# they give for whole tensors. Pieces pass through rooms in turn. All rooms together take no more than the plan counts
# for the largest streamed bucket (`step.bucket_bytes.streamed`), but for gaps of less than `pieces.ALIGN_BYTES` per
# tensor.
#
# Lanes wait for each other by events, and the host waits for none of them, with three exceptions for optimizer classes
# that are not AdamW: numbers and statistics that a class makes on the device, which no dry step had foreseen, are
# copied to the host at once; and so are counters that its kernels keep on the device, in the first step and whenever
# they count more than steps. Step counters stay on the host: each piece gets the number of the step as a constant on
# the device.


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
    is_whole: bool = False
    """Whether the rule updates whole tensors."""

    def params(self, part: GroupSlice) -> Iterator[MemoryParam]:
        """Yield each parameter of `part`."""
        for param, each in zip(part.params, part.updates, strict=True):
            layouts = self.rule.state_layouts(param, part.group)
            yield MemoryParam(each, layouts, is_away=self.is_away, is_whole=self.is_whole, home=_HOST)

    @property
    def must_reorder_gradients(self) -> bool:
        """Whether a gradient on the host must be copied there, because its elements are in another order."""
        each = (each for part in self.parts for each in part.updates)
        return self.is_away and not all(is_alike(one.grad, one.weight) for one in each)


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
        params = [[[*update.params(part)] for part in update.parts] for update in updates]
        self._allocate(params)
        if updates:
            self._ledger.takes(label(Verb.GATHER, StateRef(updates[0].bucket)), self._rooms[:1])
        with self._lanes.h2d.beside_compute(arrived):  # all copies of the lane from now on are behind it
            pass
        try:
            for update, of_parts in zip(updates, params, strict=True):
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
            [tensor for members in of_parts for param in members for tensor in param.passing] for of_parts in params
        )
        return Passed(landed, on_host)

    def _allocate(self, params: Sequence[Sequence[Sequence[MemoryParam]]]) -> None:
        each = [param for of_parts in params for members in of_parts for param in members]
        most_bytes = max(
            (sum(param.nbytes(param.numel) for members in of for param in members) for of in params), default=0
        )
        num_rooms, room_bytes = streamed_rooms(most_bytes)
        if any(param.is_whole for param in each):
            num_rooms, room_bytes = min(num_rooms, NUM_WHOLE_ROOMS), 0
        room_bytes = max(room_bytes, max((param.least_nbytes for param in each), default=0))
        memory = self._lanes.empty(num_rooms * room_bytes)
        self._rooms = [memory[at * room_bytes : (at + 1) * room_bytes] for at in range(num_rooms)]
        self._left = [self._lanes.mark_compute()] * num_rooms

    def _pass(self, segments: Sequence[Segment[MemoryParam]], streamed: Streamed, part: GroupSlice, piece: int) -> None:
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
        leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for segment in segments:
            if segment.param.is_away:
                leaving.append((segment.of(segment.param.weight), flat(segment.weight)))
            for made in segment.made:
                home = segment.param.home_of(made, segment.start, segment.stop)
                leaving.append((home, flat(segment.statistics[made])))
        with lanes.d2h.behind_compute():
            self._copy(lanes.d2h, Lane.D2H, label(Verb.OFFLOAD, state), leaving, piece)
        self._mark_left(at)

    def _mark_left(self, at: int) -> None:
        self._left[at] = self._lanes.d2h.mark()

    def _copy(self, lane: CopyLane, on: Lane, name: str, pairs: _Pairs, piece: int) -> None:
        nbytes = sum(target.nbytes for target, _ in pairs)
        with self._ledger.span(on, name, nbytes, times=0, piece=piece, graph=""):
            for target, source in pairs:
                lane.copy(target, source)


def _placed(segments: Sequence[Segment[MemoryParam]], room: torch.Tensor) -> _Pairs:
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
        param = segment.param
        away = [place(segment.of(own)) for own in ((param.weight, param.grad) if param.is_away else ())]
        homes = {name: param.home_of(name, segment.start, segment.stop) for name in param.layouts}
        segment.put({name: place(home, has_values=name in param.begun) for name, home in homes.items()}, *away)
    return arriving
