"""Arithmetic in fp32 on 16-bit parameters: gradients and masters in scratch tensors that many parameters share.

```text
  grads  -> | wide   a | b |    c    |      fp32, scaled
  halves -> | bits   a | b |    c    |      masters, joined from bf16 high halves and int16 low halves
              the update, on the pieces of both
  halves <- | bits   a | b |    c    |
```

A batch holds whole parameters, or a block of a larger one. Shifts, scaling and the test for NaN run once for a batch
and not once for a parameter. Of a float16 parameter the rest is the master itself, which is updated where it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from elixir_compile.graph.ops.optimizers import REST_DTYPES, REST_NAMES, has_master, take_rest
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.optim.rule import GRAD_SCALE, State, StatisticLayout

BLOCK = 1 << 22
"""Elements of a scratch tensor. Two of 16 MiB and a mask of 4 MiB are beside the budget's bytes then, and a kernel
still moves more bytes than its launch takes time for."""
NOISY_BLOCK = 1 << 20
"""Elements of a batch that is decoded or rounded with noise: its scratch tensors take 40 MiB then."""
_SCRATCH_BYTES_PER_ELEMENT = {torch.bfloat16: 8, torch.float16: 4}
"""Bytes of the scratch tensors of a batch for each of its elements, by the dtype of parameters with masters."""
_MORE_BYTES_PER_ELEMENT = {torch.bfloat16: 4, torch.float16: 0}
"""Bytes beside them while masters are joined and split: on a CPU torch converts the int16 halves to int32 before it
adds or subtracts them (measured: 12 bytes in all), elsewhere a mask takes one."""
_ALIGN = 4
"""Pieces begin at multiples of this many fp32 elements, which kernels load at once."""


# -- the rest of a master in optimizer state --------------------------------------------------------------------------


def rest_layouts(param: torch.Tensor) -> Mapping[str, StatisticLayout]:
    """Return the layout of the rest of the master of `param` by its name in optimizer state; empty if it has none."""
    return {REST_NAMES[param.dtype]: StatisticLayout(REST_DTYPES[param.dtype])} if has_master(param) else {}


def begin_rest(param: torch.Tensor, state: State, target: torch.Tensor) -> None:
    """Add the rest of the master of `param` to `state`, in the memory of `target`: the bits kept by `prepare`, or those
    of the parameter itself if there are none."""
    rest = take_rest(param)
    if rest is not None:
        target.copy_(rest)
    elif target.dtype == torch.int16:
        target.zero_()
    else:
        target.copy_(own_shard(param).detach())
    state[REST_NAMES[param.dtype]] = target


def rest_name_of(state: Mapping[str, Any]) -> str | None:
    """Return the name under which `state` has the rest of a master; None if the parameter has no master there."""
    return next((name for name in REST_NAMES.values() if name in state), None)


def scratch_nbytes(dtype: torch.dtype, numel: int, work_nbytes: int = 0) -> int:
    """Return the most bytes that an update of `numel` elements in `dtype` with masters takes at once beside weights,
    gradients and state, if it takes `work_nbytes` in fp32 between join and split."""
    return numel * _SCRATCH_BYTES_PER_ELEMENT[dtype] + max(numel * _MORE_BYTES_PER_ELEMENT[dtype], work_nbytes)


def grad_scale(weight: torch.Tensor, group: Mapping[str, Any]) -> float:
    """Return the factor of gradients; 1 for fp32 weights, whose gradients were scaled before the update."""
    return 1.0 if weight.dtype == torch.float32 else group.get(GRAD_SCALE, 1.0)


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wide:
    """The flat tensors of a parameter whose update computes in fp32, all in the same order of elements."""

    weight: torch.Tensor
    grad: torch.Tensor
    rest: torch.Tensor | None
    """The int16 low half of the master, or the fp32 master itself; None if the weight has no master."""


W = TypeVar("W", bound=Wide)


@dataclass(frozen=True, slots=True)
class Piece(Generic[W]):
    """The elements `start` to `stop` of `param`; the first of them is at the place `at` of the scratch tensors."""

    param: W
    start: int
    stop: int
    at: int

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of the piece in `tensor`, one of the parameter's."""
        return tensor[self.start : self.stop]

    def place(self, scratch: torch.Tensor) -> torch.Tensor:
        """Return the elements of the piece in a scratch tensor."""
        return scratch[self.at : self.at + self.stop - self.start]


@dataclass(frozen=True, slots=True)
class Batch(Generic[W]):
    """Pieces of parameters on one device, with equal dtypes and rests, and the scratch tensors that they share."""

    pieces: Sequence[Piece[W]]
    wide: torch.Tensor
    """In fp32, for the gradients."""
    bits: torch.Tensor
    """As int32: the fp32 masters; empty if they are in memory as such."""

    def grads(self, scale: float) -> list[torch.Tensor]:
        """Return the gradient of each piece times `scale`, in `wide`."""
        for piece in self.pieces:
            piece.place(self.wide).copy_(piece.cut(piece.param.grad))
        if scale != 1.0:
            self.wide.mul_(scale)
        return [piece.place(self.wide) for piece in self.pieces]

    def joined(self) -> list[torch.Tensor]:
        """Return the fp32 master of each piece, in `bits` unless it is in memory; see `host.flat_step.joined`."""
        masters = [piece.param.weight if piece.param.rest is None else piece.param.rest for piece in self.pieces]
        if not self.bits.numel():
            return [piece.cut(master) for piece, master in zip(self.pieces, masters, strict=True)]
        for piece in self.pieces:
            piece.place(self.bits).copy_(piece.cut(piece.param.weight).view(torch.int16))
        self.bits.bitwise_left_shift_(16)
        for piece in self.pieces:
            if piece.param.rest is not None:
                piece.place(self.bits).add_(piece.cut(piece.param.rest))
        return [piece.place(self.bits).view(torch.float32) for piece in self.pieces]

    def split(self) -> None:
        """Write the masters that `joined` returned to the weights and their rests; see `host.flat_step.split`.

        The masters in `bits` are used up. A bf16 weight without a rest is not written: see `precision.rounded_weights`.
        """
        rests = [piece.cut(piece.param.rest) for piece in self.pieces if piece.param.rest is not None]
        pairs = [*zip(self.pieces, rests, strict=False)]  # all pieces have one, or none
        if not self.bits.numel():
            for piece, master in pairs:
                piece.cut(piece.param.weight).copy_(master)
        elif pairs:
            masters = self.bits.view(torch.float32)
            masters.masked_fill_(masters.isnan(), torch.nan)
            for piece, low in pairs:
                low.copy_(piece.place(self.bits))  # the low 16 bits
                piece.place(self.bits).sub_(low)
            self.bits.bitwise_right_shift_(16)
            for piece, _ in pairs:
                piece.cut(piece.param.weight).view(torch.int16).copy_(piece.place(self.bits))


def batches(params: Sequence[W], block: int) -> Iterator[Batch[W]]:
    """Yield batches of at most `block` elements, which share their scratch tensors."""
    first = params[0]
    numel = min(block, sum(_aligned(param.weight.numel()) for param in params))
    is_joined = first.weight.dtype == torch.bfloat16
    wide = torch.empty(numel, dtype=torch.float32, device=first.weight.device)
    bits = torch.empty(numel if is_joined else 0, dtype=torch.int32, device=first.weight.device)
    pieces: list[Piece[W]] = []
    end = 0
    for param in params:
        for start in range(0, param.weight.numel(), block):
            stop = min(start + block, param.weight.numel())
            if pieces and end + stop - start > block:
                yield Batch(pieces, wide[:end], bits[:end])
                pieces, end = [], 0
            pieces.append(Piece(param, start, stop, end))
            end = min(_aligned(end + stop - start), block)
    if pieces:
        yield Batch(pieces, wide[:end], bits[:end])


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN
