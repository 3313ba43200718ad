"""Cut the tensors of a streamed update into pieces that fit a room on the device.

    bucket   | weight 0      | bias 0 | weight 1                        |      rows: the tensors of one parameter
    pieces   | weight 0, bias 0, start of weight 1 | rest of weight 1   |      segments: the part of a row in a piece

The tensors of a segment are flat. If a row passes whole, the rule sees them in the shape of the parameter. A row that
is cut passes as flat tensors: dry steps (`generic.dry_step`) have found that the class gives these the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elixir_compile.optim.layout import StatisticLayout, flat_order, in_order_of
from elixir_compile.optim.rule import GroupSlice, State, UpdateRule
from elixir_compile.runtime.slab import flat

ALIGN_BYTES = 16
"""Kernels load as many bytes at once."""
CUT_NUMEL = 256
"""Tensors are cut at multiples of this many elements, as the tasks of torch's fused kernels are."""


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """The flat tensors of a parameter in their homes."""

    like: torch.Tensor
    """The weight in its shape."""
    weight: torch.Tensor
    grad: torch.Tensor
    statistics: Mapping[str, torch.Tensor]
    """By name, those to be made by this update too."""
    layouts: Mapping[str, StatisticLayout]
    """The layout of each of `statistics`."""
    homes: dict[str, torch.Tensor]
    """The statistics in their shape; those that no dry step had made are added when the update makes them."""
    state: State
    is_away: bool
    """Whether the home of weight and gradient is the host too."""

    @property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return self.weight.numel()

    @property
    def on_host(self) -> list[torch.Tensor]:
        """The tensors that copies of the update read or write on the host."""
        return [*self.homes.values(), *((self.weight, self.grad) if self.is_away else ())]

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a room for `numel` elements of all tensors that pass."""
        away = (self.weight, self.grad) if self.is_away else ()
        sizes = [numel * tensor.element_size() for tensor in away]
        return sum(map(_aligned, (*sizes, *(self.layouts[name].nbytes(numel) for name in self.statistics))))

    def numel_within(self, nbytes: int) -> int:
        """Return a number of elements, a multiple of `CUT_NUMEL`, that fit into `nbytes`."""
        return nbytes // max(self.nbytes(CUT_NUMEL), 1) * CUT_NUMEL  # as `CUT_NUMEL` elements of any dtype leave no gap


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def rows_of(part: GroupSlice, rule: UpdateRule, *, is_away: bool) -> Iterator[Row]:
    """Yield a row for each parameter of `part`, which `rule` updates; `is_away` is as in `Row`."""
    buffers = part.buffers or ({},) * len(part.params)
    members = zip(part.params, part.weights, part.grads, part.states, buffers, strict=True)
    for param, weight, grad, state, made in members:
        layouts = rule.state_layouts(param, part.group)
        homes = dict(made)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if name in layouts and layouts[name].block > 1:
                homes[name] = value
            elif name in layouts or (weight.dim() and value.shape == weight.shape):
                homes[name] = state[name] = in_order_of(value, weight)
        yield Row(
            like=weight,
            weight=flat(weight),
            grad=flat_order(grad, weight),
            statistics={name: flat(home) for name, home in homes.items()},
            layouts={name: layouts.get(name) or StatisticLayout(home.dtype) for name, home in homes.items()},
            homes=homes,
            state=state,
            is_away=is_away,
        )


@dataclass(slots=True, eq=False)
class Segment:
    """The elements of a row from `start` to `stop`, in a piece."""

    row: Row
    start: int
    stop: int
    weight: torch.Tensor = field(init=False)
    """In the shape that the rule sees, as all tensors of the segment."""
    grad: torch.Tensor = field(init=False)
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    """In the room, by name."""
    made: set[str] = field(default_factory=set)
    """The names of the statistics that the update has left."""

    def arriving(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tensors to be copied in: each with its home."""
        row = self.row
        if row.is_away:
            yield flat(self.weight), self.of(row.weight)
            yield flat(self.grad), self.of(row.grad)
        for name, here in self.statistics.items():
            if name in row.state:
                yield flat(here), self.home_of(name)

    def leaving(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the homes to be written, each with its new value."""
        if self.row.is_away:
            yield self.of(self.row.weight), flat(self.weight)
        for name in self.made:
            yield self.home_of(name), flat(self.statistics[name])

    @property
    def is_last(self) -> bool:
        """Whether the row ends with the segment."""
        return self.stop == self.row.numel

    def of(self, home: torch.Tensor) -> torch.Tensor:
        """Return the elements of the flat tensor `home` that are in the segment."""
        return home[self.start : self.stop]

    def home_of(self, name: str) -> torch.Tensor:
        """Return the values of the statistic `name` in its home that belong to the segment."""
        return self.row.statistics[name][self.row.layouts[name].span(self.start, self.stop)]

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat `tensor`, a value for each element of the segment, in the shape that the rule sees.

        That is the shape of the parameter if the row passes whole; else it is flat.
        """
        like = self.row.like
        return tensor.as_strided(like.shape, like.stride()) if self.start == 0 and self.is_last else tensor


def pieces(rows: Sequence[Row], room_bytes: int) -> Iterator[list[Segment]]:
    """Yield the segments of each piece; together they fit a room of `room_bytes`."""
    piece: list[Segment] = []
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


def cut(room: torch.Tensor, segments: Sequence[Segment]) -> None:
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
        segment.weight, segment.grad = (
            segment.shaped(place(own, numel) if row.is_away else segment.of(own)) for own in (row.weight, row.grad)
        )
        segment.statistics = {
            name: segment.shaped(place(home, numel)) if layout.block == 1 else place(home, layout.numel(numel))
            for (name, home), layout in zip(row.statistics.items(), row.layouts.values(), strict=True)
        }
