"""Update parameters piece by piece: a piece comes from its source into a room, is updated there, and goes to its sink.

    piece     | weight 0, bias 0, start of weight 1 | rest of weight 1 |    segments: the part of a parameter in a piece

    streamed  host memory            -> a room on the device         -> host memory                         `streaming`
    on disk   files                  -> a staging buffer             -> files                            `disk.updates`
    in bf16   statistics             -> a block of them in fp32      -> statistics               `generic.class_rule`

A segment holds the same elements of all tensors that pass. If a parameter passes whole, the rule sees its tensors in
the shape of the parameter. One that is cut passes as flat tensors: update rules are element-wise, and dry steps
(`generic.dry_step`) have found that a class gives flat parts the bits of the whole.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from elixir_compile.optim.layout import StatisticLayout, flat_order, in_order_of
from elixir_compile.optim.rule import ParamUpdate, State, UpdateRule
from elixir_compile.optim.step_counts import note_num_steps
from elixir_compile.runtime.slab import flat

ALIGN_BYTES = 16
"""Kernels load as many bytes at once."""
CUT_NUMEL = 256
"""Tensors are cut at multiples of this many elements, as the tasks of torch's fused kernels are."""


class Row:
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

    def keep_unforeseen(self, segment: "Segment[Row]", name: str, value: torch.Tensor) -> None:
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


class MemoryRow(Row):
    """A parameter with its state in memory."""

    def __init__(
        self,
        of: ParamUpdate,
        layouts: Mapping[str, StatisticLayout],
        made: Mapping[str, torch.Tensor],
        *,
        is_away: bool = False,
        home: torch.device | None = None,
    ) -> None:
        """`made` has memory for statistics that the update may make. `is_away` says that weight and gradient pass
        through the room too."""
        weight, _, state = of
        homes = dict(made)
        begun = [
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and (name in layouts or (weight.dim() and value.shape == weight.shape))
        ]
        for name in begun:
            if name not in layouts or layouts[name].block == 1:
                state[name] = in_order_of(state[name], weight)
            homes[name] = state[name]
        own = {name: layouts.get(name) or StatisticLayout(value.dtype) for name, value in homes.items()}
        super().__init__(of, own, begun)
        self.homes = homes
        """The statistics; those that no dry step had made are added when the update makes them."""
        self.is_away = is_away
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

    def numel_within(self, nbytes: int) -> int:
        """Return a number of elements, a multiple of `CUT_NUMEL`, that fit into `nbytes`."""
        return nbytes // max(self.nbytes(CUT_NUMEL), 1) * CUT_NUMEL  # as `CUT_NUMEL` elements of any dtype leave no gap

    def keep_unforeseen(self, segment: "Segment[Row]", name: str, value: torch.Tensor) -> None:
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


R = TypeVar("R", bound=Row, covariant=True)


class Segment(Generic[R]):
    """The elements `start` to `stop` of a row, in a piece."""

    weight: torch.Tensor
    """In the shape that the rule sees, as all tensors of the segment."""
    grad: torch.Tensor
    statistics: Mapping[str, torch.Tensor]
    """In the room, by name."""

    def __init__(self, row: R, start: int, stop: int) -> None:
        self.row, self.start, self.stop = row, start, stop
        self.made: set[str] = set()
        """The names of the statistics that the update has left in the room."""

    @property
    def is_last(self) -> bool:
        """Whether the row ends with the segment."""
        return self.stop == self.row.numel

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of the flat `tensor` of the row that are in the segment."""
        return tensor[self.start : self.stop]

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat `tensor`, a value for each element of the segment, in the shape that the rule sees.

        That is the shape of the parameter if the row passes whole; else it is flat.
        """
        like = self.row.like
        return tensor.as_strided(like.shape, like.stride()) if self.start == 0 and self.is_last else tensor

    def put(
        self,
        statistics: Mapping[str, torch.Tensor],
        weight: torch.Tensor | None = None,
        grad: torch.Tensor | None = None,
    ) -> "Segment[R]":
        """Take the flat tensors in the room, and return the segment; weight and gradient stay at home if not given."""
        layouts = self.row.layouts
        self.weight = self.shaped(self.of(self.row.weight) if weight is None else weight)
        self.grad = self.shaped(self.of(self.row.grad) if grad is None else grad)
        self.statistics = {
            name: self.shaped(here) if layouts[name].block == 1 else here for name, here in statistics.items()
        }
        return self

    def given(self, rule: UpdateRule, group: Mapping[str, Any], device: torch.device) -> State:
        """Return the state with which `rule` updates the segment on `device`: its statistics, and copies of all else.

        Copies, because the rule counts each piece of a parameter as a step.
        """
        row = self.row
        found = {name: here for name, here in self.statistics.items() if name in row.begun}
        for name, value in row.entries.items():
            if name in row.begun or (name == "step" and row_counts(row, rule, group)):
                continue
            if isinstance(value, torch.Tensor):
                there = device if rule.moves_with_update(name, group) else None
                found[name] = torch.empty_like(value, device=there).copy_(value)
            else:
                found[name] = copy.deepcopy(value)
        return found

    def keep(self, state: State, *, is_counted: bool) -> None:
        """Put what the rule made or replaced into the room, and all else of `state` into its home."""
        row = self.row
        for name, value in state.items():
            here = self.statistics.get(name)
            if here is not None and value is here:
                self.made.add(name)
            elif isinstance(value, torch.Tensor) and (here is not None or value.dim()):
                if here is not None and _is_like(here, value):
                    here.copy_(value)
                    self.made.add(name)
                else:
                    row.keep_unforeseen(self, name, value)
            elif self.is_last and name == "step" and is_counted:
                row.entries["step"].add_(1)
            elif self.is_last:
                row.keep_other(name, value)
        row.made |= self.made
        if self.is_last:  # not before: the next piece begins with the state that this piece began with
            row.finish()


def update(segments: Sequence[Segment[Row]], rule: UpdateRule, group: Mapping[str, Any], device: torch.device) -> None:
    """Update `segments`, which are in their room on `device`."""
    if not segments:
        return
    states = [segment.given(rule, group, device) for segment in segments]
    counted = [index for index, segment in enumerate(segments) if row_counts(segment.row, rule, group)]
    counters = [segments[index].row.entries["step"] for index in counted]
    for index, step in zip(counted, _steps_on(device, counters), strict=True):
        states[index]["step"] = step
    given = zip(segments, states, strict=True)
    rule.update([ParamUpdate(segment.weight, segment.grad, state) for segment, state in given], group)
    for index, (segment, state) in enumerate(zip(segments, states, strict=True)):
        segment.keep(state, is_counted=index in counted)


def row_counts(row: Row, rule: UpdateRule, group: Mapping[str, Any]) -> bool:
    """Return whether `rule` only counts with the entry `step` of a row, which is on the host, so that it counts too."""
    step = row.entries.get("step")
    return isinstance(step, torch.Tensor) and step.device.type == "cpu" and rule.counts_steps(group)


def _steps_on(device: torch.device, counters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the numbers of `counters`, which are on the host, as constants on `device`."""
    numbers = [float(counter) for counter in counters]
    if numbers and len(set(numbers)) == 1:
        whole = torch.full((len(numbers),), numbers[0], dtype=counters[0].dtype, device=device)
        # `data`: a view would share the version of the whole, which each of its neighbours raises.
        made = [row.data for row in whole.unbind()]
    else:
        made = [
            torch.full((), number, dtype=counter.dtype, device=device)
            for number, counter in zip(numbers, counters, strict=True)
        ]
    for counter, number in zip(made, numbers, strict=True):
        note_num_steps(counter, int(number))
    return made


def pieces(rows: Sequence[MemoryRow], room_bytes: int) -> Iterator[list[Segment[MemoryRow]]]:
    """Yield the segments of each piece; together they fit a room of `room_bytes`."""
    piece: list[Segment[MemoryRow]] = []
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
            piece.append(Segment(row, start, start + num))
            left_bytes -= row.nbytes(num)
            start += num
            is_done = start == row.numel
    if piece:
        yield piece


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to the places of tensors in a room."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
