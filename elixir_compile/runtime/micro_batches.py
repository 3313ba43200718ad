"""Run a region once per micro-batch: slices of its inputs go in, whole tensors and sums come out.

```text
  for each micro-batch j      body(slice j of each input)  -->  slice j of each whole result, part j of each sum
```

Parts of 16 bits add up in fp32, and their sum is rounded once. Offloaded activations leave the device and arrive on it
slice by slice, if the plan counts on it (see `slices`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from elixir_compile.ir import Lane
from elixir_compile.rewrite.divided_graph import DividedGraph, Filled, Read, Summed
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.lowering import CompiledRegion
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.runtime.slices import ArrivingView, LeavingStorage, LeavingView, View

_SEED_STEP = 0x9E3779B9
"""The seeds of two micro-batches differ by a multiple of this: 2**32 over the golden ratio, as in Philox."""
_SHORT = (torch.bfloat16, torch.float16)


class DividedRegion(torch.nn.Module):
    """A region at its place in a program that runs in micro-batches; a run is a span of the compute lane."""

    def __init__(
        self,
        divided: DividedGraph,
        parts: tuple[CompiledRegion | None, CompiledRegion, CompiledRegion | None],
        ledger: Ledger,
        label: str,
        saved: SavedActivations,
    ) -> None:
        """`parts` are the compiled head, body and tail of `divided`; activations leave the device through `saved`."""
        super().__init__()
        self._divided = divided
        self._head, self._body, self._tail = parts
        self._ledger = ledger
        self._label = label
        self._saved = saved

    def forward(self, box: list[Any]) -> Any:
        with self._ledger.span(Lane.COMPUTE, self._label):
            return self._run(box)

    def _run(self, box: list[Any]) -> tuple[Any, ...]:
        divided = self._divided
        values = list(box)
        box.clear()
        if self._head is not None:
            values += self._head.run([values[place] for place in divided.head_reads])
        arriving = list(dict.fromkeys(value.source for value in values if isinstance(value, ArrivingView)))
        results = _Results(divided, self._saved)
        for number in range(divided.micro_batches):
            for storage in arriving:
                storage.begin(number)
            inputs = [slice_of(values[read.place], read, number, divided.micro_batches) for read in divided.body_reads]
            for storage in arriving:
                storage.release()
            results.add(number, list(self._body.run(inputs)))
        values += results.finished()
        if self._tail is not None:
            values += self._tail.run([values[place] for place in divided.tail_reads])
        return tuple(values[place] for place in divided.outputs)

    def extra_repr(self) -> str:
        return f"{self._divided.micro_batches} micro-batches"


class _Results:
    """The results of the micro-batches so far."""

    def __init__(self, divided: DividedGraph, saved: SavedActivations) -> None:
        self._divided = divided
        self._saved = saved
        self._wholes: list[torch.Tensor | None] = []
        """The memory of each whole tensor; None if it leaves in slices."""
        self._leaving: dict[int, LeavingStorage] = {}
        """The storages that leave in slices, by the index of their memory."""
        self._values: list[Any] = [None] * len(divided.results)
        self._dtypes: list[torch.dtype | None] = [None] * len(divided.results)

    def add(self, number: int, parts: list[Any]) -> None:
        """Add the results of micro-batch `number`, and empty `parts`."""
        if number == 0:
            self._allocate()
        for place, storage in self._leaving.items():
            storage.begin(self._divided.wholes[place].device)
        seen: set[int] = set()
        for place, result in enumerate(self._divided.results):
            part, parts[place] = parts[place], None
            if isinstance(result, Filled):
                self._fill(place, result, number, part)
            elif isinstance(result, Summed):
                self._sum(place, number, part, seen)
            else:
                self._values[place] = part
        for storage in self._leaving.values():
            storage.send(number)

    def _allocate(self) -> None:
        num = self._divided.micro_batches
        for place, memory in enumerate(self._divided.wholes):
            if memory.group:
                nbytes = memory.numel * memory.dtype.itemsize
                self._leaving[place] = self._saved.begin_leaving(memory.group, nbytes, num)
                self._wholes.append(None)
            else:
                self._wholes.append(torch.empty(memory.numel, dtype=memory.dtype, device=memory.device))

    def _fill(self, place: int, result: Filled, number: int, part: torch.Tensor) -> None:
        memory, leaving = self._wholes[result.whole], self._leaving.get(result.whole)
        if number == 0 and memory is not None:
            self._values[place] = memory.as_strided(result.shape, result.stride, result.offset)
        elif number == 0 and leaving is not None:
            dtype = self._divided.wholes[result.whole].dtype
            self._values[place] = LeavingView(leaving, View(0, dtype, result.shape, result.stride, result.offset))
        if result.is_copied:
            rows, value = part.shape[result.dim], self._values[place]
            if isinstance(value, LeavingView):
                slice_of_whole = value.source.part(value.view, result.dim)
            else:
                slice_of_whole = value.narrow(result.dim, number * rows, rows)
            for dim, (size, stride) in enumerate(zip(result.shape, result.stride, strict=True)):
                if stride == 0 and size > 1:  # an expanded dimension has the memory of one entry
                    slice_of_whole, part = slice_of_whole.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
            slice_of_whole.copy_(part)

    def _sum(self, place: int, number: int, part: torch.Tensor, seen: set[int]) -> None:
        """Add `part` to a sum. `seen` are the addresses of the memory of the sums before it, of this micro-batch."""
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


def slice_of(value: Any, read: Read, number: int, num: int) -> Any:
    """Return what micro-batch `number` reads of `value`."""
    if isinstance(value, ArrivingView):
        assert read.dim is not None, "a value that arrives in slices is read in slices"
        return value.source.slice(value.view, read.dim)
    if read.is_seed:
        return value + number * _SEED_STEP
    if read.dim is None:
        return value
    rows = value.shape[read.dim] // num
    return value.narrow(read.dim, number * rows, rows)
