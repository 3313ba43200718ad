"""Run a region once per micro-batch: slices of its inputs go in, whole tensors and sums come out.

```text
  for each micro-batch j      body(slice j of each input)  -->  slice j of each whole result, part j of each sum
```

A result that only regions in micro-batches read stays in parts, if the plan counts on it (see `runtime.saved`).

Parts of 16 bits add up in fp32, and their sum is rounded once. Offloaded activations leave the device and arrive on it
slice by slice, if the plan counts on it (see `runtime.saved`).

The number of rows may be dynamic. Each run then cuts its own batch, see `ir.schedule`: the micro-batches of a run
differ by at most one row, and a short batch has fewer of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.graph.rewrite.micro_batches import DividedGraph, Filled, Kept, Read, Size, Summed
from elixir_compile.ir import Lane, sizes
from elixir_compile.ir.schedule import rows_of_micro_batches
from elixir_compile.runtime.lanes import Lanes
from elixir_compile.runtime.lowering import CompiledRegion
from elixir_compile.runtime.recording import Ledger
from elixir_compile.runtime.saved import (
    ArrivingView,
    InParts,
    LeavingStorage,
    LeavingView,
    SavedActivations,
    View,
    copy_into,
    kept_part,
    viewed,
)

_SEED_STEP = 0x9E3779B9
"""The seeds of two micro-batches differ by a multiple of this: 2**32 over the golden ratio, as in Philox."""
_SHORT = (torch.bfloat16, torch.float16)


class DividedRegion(torch.nn.Module):
    """A region at its place in a program that runs in micro-batches; a run is a span of the compute lane."""

    def __init__(
        self,
        divided: DividedGraph,
        parts: tuple[CompiledRegion | None, CompiledRegion, CompiledRegion | None],
        lanes: Lanes,
        ledger: Ledger,
        label: str,
        saved: SavedActivations,
    ) -> None:
        """`parts` are the compiled head, body and tail of `divided`; activations leave the device through `saved`."""
        super().__init__()
        self._divided = divided
        head, body, tail = parts
        self._head = None if head is None else lanes.computes(head.run)
        self._body = lanes.computes(body.run)
        self._tail = None if tail is None else lanes.computes(tail.run)
        self._lanes = lanes
        self._ledger = ledger
        self._label = label
        self._saved = saved

    def forward(self, box: list[Any]) -> Any:
        with self._ledger.span(Lane.COMPUTE, self._label):
            divided = self._divided
            values = list(box)
            box.clear()
            symbols = {name: values[place] for name, place in divided.symbols}
            values += [_at(size, symbols) for size in divided.numbers]
            if self._head is not None:
                values += self._head([_whole(values[place]) for place in divided.head_reads])
            arriving = list(dict.fromkeys(value.source for value in values if isinstance(value, ArrivingView)))
            results = _Results(divided, symbols, self._saved, self._lanes)
            self._lanes.touches(_tensors_in(values))  # slices in other strides are copies, and seeds are sums
            for number, cut in enumerate(cuts_of(divided, symbols)):
                for storage in arriving:
                    storage.begin(number)
                inputs = [slice_of(values[read.place], read, number, cut) for read in divided.body_reads]
                for storage in arriving:
                    storage.release()
                results.add(number, cut, list(self._body(inputs)))
            values += results.finished()
            for view in divided.views:
                values.append(viewed(values[view.place], view.layout, divided.micro_batches))
            if self._tail is not None:
                values += self._tail([_whole(values[place]) for place in divided.tail_reads])
            return tuple(values[place] for place in divided.outputs)

    def extra_repr(self) -> str:
        most = "at most " if isinstance(self._divided.batch, str) else ""
        return f"{most}{self._divided.micro_batches} micro-batches"


class _Results:
    """The results of the micro-batches so far."""

    def __init__(
        self, divided: DividedGraph, symbols: Mapping[str, int], saved: SavedActivations, lanes: Lanes
    ) -> None:
        """`symbols` are the values of the dynamic sizes of the whole batch."""
        self._lanes = lanes
        self._divided = divided
        self._symbols = symbols
        self._saved = saved
        self._wholes: list[torch.Tensor | None] = []
        """The memory of each whole tensor; None if it leaves in slices."""
        self._leaving: dict[int, LeavingStorage] = {}
        """The storages that leave in slices, by the index of their memory."""
        self._values: list[Any] = [None] * len(divided.results)
        self._dtypes: list[torch.dtype | None] = [None] * len(divided.results)

    def add(self, number: int, cut: "Cut", parts: list[Any]) -> None:
        """Add the results of micro-batch `number`, which has the rows of `cut`, and empty `parts`."""
        for place, memory in enumerate(self._divided.wholes if number == 0 else ()):
            numel = _at(memory.numel, self._symbols)
            if memory.group:
                nbytes, num = numel * memory.dtype.itemsize, self._divided.micro_batches
                self._leaving[place] = self._saved.begin_leaving(memory.group, nbytes, num)
                self._wholes.append(None)
            else:
                self._wholes.append(torch.empty(numel, dtype=memory.dtype, device=memory.device))
        for storage in self._leaving.values():
            storage.begin()
        self._lanes.touches(_tensors_in(parts), _tensors_in(self._values))
        kept: dict[int, torch.Tensor] = {}
        seen: set[int] = set()
        for place, result in enumerate(self._divided.results):
            part, parts[place] = parts[place], None
            if isinstance(result, Filled):
                self._fill(place, result, number, cut, part)
            elif isinstance(result, Kept):  # `kept` has a part of this micro-batch for each memory so far
                layout = result.layout
                if number == 0:
                    self._values[place] = InParts([], layout.dim)
                part = kept_part(part, layout, kept.get(layout.memory))
                kept.setdefault(layout.memory, part)
                self._values[place].tensors.append(part)
            elif isinstance(result, Summed):
                self._sum(place, number, part, seen)
            else:
                self._values[place] = part
        for storage in self._leaving.values():
            storage.send(number)

    def _fill(self, place: int, result: Filled, number: int, cut: "Cut", part: torch.Tensor) -> None:
        shape, strides = ([_at(size, self._symbols) for size in sizes] for sizes in (result.shape, result.stride))
        if number == 0:
            self._values[place] = self._whole(result, shape, strides)
        if result.is_copied:
            value = self._values[place]
            if isinstance(value, LeavingView):
                slice_of_whole = value.source.part(value.view, result.dim)
            else:
                slice_of_whole = cut.slice_of(value, result.dim)
            copy_into(slice_of_whole, part, shape, strides)

    def _whole(self, result: Filled, shape: Sequence[int], stride: Sequence[int]) -> "torch.Tensor | LeavingView":
        """Return the whole value of `result`: a tensor to fill, or the view of a storage that leaves in slices."""
        memory, dtype = self._wholes[result.whole], self._divided.wholes[result.whole].dtype
        offset = _at(result.offset, self._symbols)
        view = compat.MemoryView(dtype=dtype, shape=tuple(shape), stride=tuple(stride), offset=offset, bits=result.bits)
        if memory is not None:
            return view.over(memory.untyped_storage())
        return LeavingView(self._leaving[result.whole], View(0, view))

    def _sum(self, place: int, number: int, part: torch.Tensor, seen: set[int]) -> None:
        """Add `part` to a sum. `seen` are the addresses of the memory of the sums before it, of this micro-batch.

        Eight micro-batches of 256 tokens of a Llama with 35 million parameters spend 1.6 % of a step here: 12 bytes for
        each parameter and micro-batch. A matrix product that adds into its result would save most of it, but round
        differently.
        """
        if number > 0:
            self._values[place].add_(part)
            return
        self._dtypes[place] = part.dtype
        # Later parts are added in place, so each sum needs memory of its own. A compiler may return one memory twice.
        address = part.untyped_storage().data_ptr()
        is_alone = address not in seen and 0 not in part.stride()
        seen.add(address)
        self._values[place] = part.float() if part.dtype in _SHORT else part if is_alone else part.clone()

    def finished(self) -> Sequence[Any]:
        """Return the results for the whole batch."""
        for place, dtype in enumerate(self._dtypes):
            if dtype in _SHORT:
                self._values[place] = self._values[place].to(dtype)
        return self._values


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows of one micro-batch."""

    first: int
    rows: int
    batch: int
    """The rows of the whole batch."""
    symbols: Mapping[str, int]
    """The values of dynamic sizes in the micro-batch."""

    def slice_of(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the slice of `value`, a tensor of the whole batch, along `dim`."""
        factor = value.shape[dim] // self.batch
        return value.narrow(dim, self.first * factor, self.rows * factor)


def cuts_of(divided: DividedGraph, symbols: Mapping[str, int]) -> list[Cut]:
    """Return the micro-batches of a run of `divided`, whose dynamic sizes have the values `symbols`."""
    if isinstance(divided.batch, int):
        rows = divided.batch // divided.micro_batches
        return [Cut(number * rows, rows, divided.batch, symbols) for number in range(divided.micro_batches)]
    batch = symbols[divided.batch]
    nums = rows_of_micro_batches(batch, divided.micro_batches)
    firsts = accumulate(nums, initial=0)
    return [Cut(first, num, batch, {**symbols, divided.batch: num}) for first, num in zip(firsts, nums, strict=False)]


def slice_of(value: Any, read: Read, number: int, cut: Cut) -> Any:
    """Return what micro-batch `number`, which has the rows of `cut`, reads of `value`."""
    if isinstance(value, InParts):
        return value.tensors[number]
    if isinstance(value, ArrivingView):
        assert read.dim is not None, "a value that arrives in slices is read in slices"
        return value.source.slice(value.view, read.dim)
    if read.is_seed:
        return value + number * _SEED_STEP
    if read.is_rows:
        return cut.rows
    if read.dim is None:
        return value
    part = cut.slice_of(value, read.dim)
    if not read.strides:
        return part
    strides = [_at(size, cut.symbols) for size in read.strides]
    return torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device).copy_(part)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _whole(value: Any) -> Any:
    """Return `value` as one tensor, for an op that reads the whole batch."""
    return value.joined() if isinstance(value, InParts) else value


def _at(size: Size, symbols: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else sizes.evaluate(size, symbols)
