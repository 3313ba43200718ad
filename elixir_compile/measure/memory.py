"""Bytes on the device before a step, at its peak and after it, from the allocators."""

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
    """Return the most bytes live at once, in a step that began with `resident` bytes by address.

    `freed` are (time, address) of resident blocks that died; `allocations` are (time, address, bytes; below 0 when
    freed) in order, on the same clock. A block is known by its address: torch reports the end of a block from before
    the step in some cases (it was allocated under an earlier profiler) and not in others, and for an address it
    remembers from an earlier profiler it may report a stale size.
    """
    before, during = dict(resident), dict[int, int]()
    live = most = sum(before.values())
    deaths = sorted((at, address, 0) for at, address in freed)
    for _, address, nbytes in heapq.merge(deaths, allocations, key=lambda event: event[0]):
        if nbytes > 0:
            # Whatever was at this address is gone, told or not.
            live += nbytes - during.pop(address, 0) - before.pop(address, 0)
            during[address] = nbytes
            most = max(most, live)
        elif nbytes < 0 and address in during:
            live -= during.pop(address)
        else:
            live -= before.pop(address, 0)
    return most


class Resident:
    """The storages of CPU tensors that are alive when it is made, slabs left out; watches them die until `close`."""

    def __init__(self) -> None:
        self.nbytes_at: dict[int, int] = {}
        """Bytes by address of the block."""
        self.freed: list[tuple[int, int]] = []
        """(time on the clock of `time.time_ns`, address) of every block that died since."""
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        gc.collect()
        for storage in _cpu_storages():
            address = storage.data_ptr()
            if storage.nbytes() and address not in self.nbytes_at and not is_slab_memory(address):
                self.nbytes_at[address] = storage.nbytes()
                self._watches.append(weakref.ref(storage, self._on_death(address)))

    @property
    def nbytes(self) -> int:
        """Bytes that were on the device when this was made."""
        return sum(self.nbytes_at.values())

    def close(self) -> None:
        """Stop watching."""
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
        # A DTensor has no memory but this rank's part.
        own = own_part(tensor)
        try:
            storage = own.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse and opaque tensors have none
            continue
        if storage.device.type == "cpu":  # a fake tensor claims a device, its storage is on `meta`
            yield storage


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # `isinstance` would ask `__class__`, and lazy modules answer that by importing.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:  # a gradient may have no Python object yet
                yield thing.grad
