"""AdamW on a device for parameters with a master: many parameters at once, in two scratch tensors of a bounded size.

```text
  grads  -> | wide   a | b |    c    |      fp32, scaled
  halves -> | master a | b |    c    |      joined from bf16 high halves and int16 low halves
              fused AdamW on the pieces of both; the moments are read and written in place
  master -> | wide   a | b |    c    | ->   high and low halves
```

A batch holds whole parameters, or `BLOCK` elements of a larger one. Shifts, scaling and the test for NaN run once for a
batch and not once for a parameter. An fp16 parameter keeps its whole master as state, so it needs `wide` alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elixir_compile.optim.rule import State

BLOCK = 1 << 22
"""Elements of a scratch tensor. Two of 16 MiB and a mask of 4 MiB are beside the budget's bytes then, and a kernel
still moves more bytes than its launch takes time for."""
_ALIGN = 4
"""Pieces begin at multiples of this many fp32 elements, which kernels load at once."""

Update = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[State], Mapping[str, Any]], None]
"""The fused AdamW of tensors in fp32; it adds 1 to the step of each state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatUpdate:
    """The flat tensors of a parameter with a master, all in the same order of elements."""

    high: torch.Tensor
    """The parameter in 16 bits."""
    grad: torch.Tensor
    rest: torch.Tensor
    """The int16 low half of the master, or the fp32 master itself."""
    moments: Mapping[str, torch.Tensor]
    step: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    of: FlatUpdate
    start: int
    stop: int
    at: int
    """The place of its first element in the scratch tensors."""

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of the piece in `tensor`, one of the parameter's."""
        return tensor[self.start : self.stop]

    def place(self, scratch: torch.Tensor) -> torch.Tensor:
        """Return the elements of the piece in a scratch tensor."""
        return scratch[self.at : self.at + self.stop - self.start]


def update_masters(
    updates: Sequence[FlatUpdate], scale: float, group: Mapping[str, Any], update: Update, block: int | None = None
) -> None:
    """Update parameters, masters, moments and steps in place; gradients are multiplied by `scale` first.

    All `updates` are on the same device and keep the same kind of rest. `block` is the size of a batch in elements;
    None: `BLOCK`.
    """
    block = BLOCK if block is None else block
    is_split = updates[0].rest.dtype == torch.int16
    numel = min(block, sum(_aligned(each.high.numel()) for each in updates))
    device = updates[0].high.device
    wide = torch.empty(numel, dtype=torch.float32, device=device)
    bits = torch.empty(numel if is_split else 0, dtype=torch.int32, device=device)
    for pieces, length in _batches(updates, block):
        _update_batch(pieces, wide[:length], bits[:length], scale, group, update)
    for each in updates:
        each.step.add_(1)


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN


def _batches(updates: Sequence[FlatUpdate], block: int) -> Iterator[tuple[list[_Piece], int]]:
    """Yield the pieces of each batch, and the elements of scratch tensors that they take."""
    pieces: list[_Piece] = []
    end = 0
    for each in updates:
        for start in range(0, each.high.numel(), block):
            stop = min(start + block, each.high.numel())
            if pieces and end + stop - start > block:
                yield pieces, end
                pieces, end = [], 0
            pieces.append(_Piece(each, start, stop, end))
            end = min(_aligned(end + stop - start), block)
    if pieces:
        yield pieces, end


def _update_batch(
    pieces: Sequence[_Piece],
    wide: torch.Tensor,
    bits: torch.Tensor,
    scale: float,
    group: Mapping[str, Any],
    update: Update,
) -> None:
    is_split = bits.numel() > 0
    for piece in pieces:
        piece.place(wide).copy_(piece.cut(piece.of.grad))
    if scale != 1.0:
        wide.mul_(scale)
    if is_split:
        _join(pieces, bits)
    masters = [piece.place(bits).view(torch.float32) if is_split else piece.cut(piece.of.rest) for piece in pieces]
    # A copy, because the update of each piece adds 1.
    states: list[State] = [
        {**{name: piece.cut(moment) for name, moment in piece.of.moments.items()}, "step": piece.of.step.clone()}
        for piece in pieces
    ]
    update(masters, [piece.place(wide) for piece in pieces], states, group)
    if is_split:
        _split(pieces, bits, wide.view(torch.int32))
        return
    for piece, master in zip(pieces, masters, strict=True):
        piece.cut(piece.of.high).copy_(master)


def _join(pieces: Sequence[_Piece], bits: torch.Tensor) -> None:
    """Fill `bits` with the bits of the fp32 masters; see `optim.host.flat_step.joined`."""
    for piece in pieces:
        piece.place(bits).copy_(piece.cut(piece.of.high).view(torch.int16))
    bits.bitwise_left_shift_(16)
    for piece in pieces:
        piece.place(bits).add_(piece.cut(piece.of.rest))


def _split(pieces: Sequence[_Piece], bits: torch.Tensor, room: torch.Tensor) -> None:
    """Split the masters in `bits` into their halves by way of `room`; see `optim.host.flat_step.split`."""
    master = bits.view(torch.float32)
    master.masked_fill_(master.isnan(), torch.nan)
    for piece in pieces:
        low = piece.cut(piece.of.rest)
        low.copy_(piece.place(bits))  # the low 16 bits
        torch.sub(piece.place(bits), low, out=piece.place(room))
    room.bitwise_right_shift_(16)
    for piece in pieces:
        piece.cut(piece.of.high).view(torch.int16).copy_(piece.place(room))
