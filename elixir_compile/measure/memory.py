"""Measure the bytes of CPU tensors before a step, and the peak of the step from the events of the allocator."""

import gc
import heapq
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

import torch

from elixir_compile.ops.shards import own_part
from elixir_compile.runtime.slab import is_slab_memory


def peak_bytes(
    resident: Mapping[int, int], freed: Iterable[tuple[int, int]], allocations: Iterable[tuple[int, int, int]]
) -> int:
    """Return the peak of live bytes in a step.

    `resident` has the bytes of the blocks at the start of the step, by address, and `freed` (time, address) for each
    freed resident block. `allocations` are (time, address, bytes) in order, on the same clock; bytes are
    negative if the block was freed.

    A block is known only by its address. torch reports the end of a resident block only if an earlier profiler saw its
    allocation, and then it may report a stale size.
    """
    before, during = dict(resident), dict[int, int]()
    live = most = sum(before.values())
    deaths = sorted((at, address, 0) for at, address in freed)
    for _, address, nbytes in heapq.merge(deaths, allocations, key=lambda event: event[0]):
        if nbytes > 0:
            # An earlier block at this address was freed, whether or not torch reported it.
            live += nbytes - during.pop(address, 0) - before.pop(address, 0)
            during[address] = nbytes
            most = max(most, live)
        elif nbytes < 0 and address in during:
            live -= during.pop(address)
        else:
            live -= before.pop(address, 0)
    return most


class Resident:
    """The storages of all CPU tensors alive at its creation, without slabs.

    Until `close` it records freed storages.
    """

    def __init__(self) -> None:
        self.nbytes_at: dict[int, int] = {}
        """Bytes of each block, by its address."""
        self.freed: list[tuple[int, int]] = []
        """(time on the clock of `time.time_ns`, address) of each block that was freed since."""
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        gc.collect()
        for storage in _cpu_storages():
            address = storage.data_ptr()
            if storage.nbytes() and address not in self.nbytes_at and not is_slab_memory(address):
                self.nbytes_at[address] = storage.nbytes()
                self._watches.append(weakref.ref(storage, self._on_death(address)))

    @property
    def nbytes(self) -> int:
        """Bytes of all storages at the start."""
        return sum(self.nbytes_at.values())

    def close(self) -> None:
        """Stop recording freed storages."""
        self._watches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_death(self, address: int) -> Callable[[object], None]:
        freed = self.freed
        return lambda _: freed.append((time.time_ns(), address))


def _cpu_storages() -> Iterator[torch.UntypedStorage]:
    for tensor in _tensors():
        # The memory of a DTensor is the memory of its local tensor.
        own = own_part(tensor)
        try:
            storage = own.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse and opaque tensors have no storage
            continue
        if storage.device.type == "cpu":  # the storage of a fake tensor is on `meta`, whatever its device says
            yield storage


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # Not `isinstance`: it reads `__class__`, and lazy modules import themselves at this read.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:  # a gradient may have no Python object among those of `gc` yet
                yield thing.grad
