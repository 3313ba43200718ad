"""Which bytes were on the device before a step began, and which of them it gave back.

torch.profiler reports what is allocated while it runs, and no block from before; not even when such a block is freed.
So the blocks are looked up before the step, one per storage, and a weak reference to each storage tells when it dies.

Does not see: storages that only C++ holds (activations of a graph that was built before the step), and the moment at
which a storage is shrunk in place: it counts to the step's end.
"""

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Self

import torch

from elixir_compile.ops.shards import own_part
from elixir_compile.runtime.slab import is_slab_memory


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
