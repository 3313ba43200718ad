"""Optimizer state that lives on disk: a file per bucket and statistic, and what reads and writes it.

    b1.exp_avg      |--- weight ---|- bias -|        the bucket's parameters one after another, as a slab has them
    b1.exp_avg_sq   |--- weight ---|- bias -|

`state[p]` is then a `DiskState`: a statistic is read into a new tensor each time it is asked for, and written when it
is assigned; changing the tensor that was read changes nothing. All else, as the step count, is in memory.

After a write that failed, and after an update that ended in the middle, the state of the bucket is neither old nor new:
it is used no more, and whoever asks for it gets DiskFailed, until a checkpoint is loaded.
"""

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_compile.errors import DiskFailed
from elixir_compile.runtime import disk_file
from elixir_compile.runtime.disk import DiskRegion, DiskStore
from elixir_compile.runtime.read_ahead import Piece
from elixir_compile.runtime.slab import Slab, aligned_bytes


class Room:
    """Where one parameter is in each file of its bucket, and the shape that it has there."""

    def __init__(self, param: torch.Tensor, start_bytes: int) -> None:
        # In memory order, whatever the parameter is a view of; a slab has the same strides.
        like = torch.empty_like(param, device="meta", memory_format=torch.preserve_format)
        self.shape, self.strides, self.dtype = like.shape, like.stride(), like.dtype
        self.numel = param.numel()
        self.start_bytes = start_bytes
        self.end_bytes = start_bytes + self.numel * param.element_size()

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of `flat` in the shape of the parameter."""
        return flat.as_strided(self.shape, self.strides)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, shaped like the parameter, as its elements in order: a view if it has the same strides."""
        if tensor.stride() != self.strides:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype).copy_(tensor)
        return tensor.as_strided((self.numel,), (1,))


class DiskHome:
    """The state of one bucket's parameters in files of `store`; the space for it is taken at once.

    Raises DiskFull where there is none.
    """

    def __init__(self, store: DiskStore, label: str, params: Iterable[torch.Tensor], names: Sequence[str]) -> None:
        self.label = label
        self._store = store
        self._rooms: dict[int, Room] = {}
        self._nbytes = 0
        for param in params:
            room = Room(param.detach(), aligned_bytes(self._nbytes))
            self._rooms[id(param)], self._nbytes = room, room.end_bytes
        self._regions: dict[str, DiskRegion] = {}
        self._written: set[int] = set()
        self._left: set[int] = set()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self.require(names)

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics on disk."""
        return tuple(self._regions)

    def require(self, names: Iterable[str]) -> None:
        """Take the space of those of `names` that there is none for; DiskFull where that is all."""
        for name in names:
            if name not in self._regions:
                self._regions[name] = self._store.allocate(f"{self.label}.{name}", self._nbytes)

    def fail(self, error: BaseException) -> None:
        """Use the state no more, because of `error`."""
        with self._lock:
            self._failure = self._failure or error

    def check(self, operation: str) -> None:
        """Raise DiskFailed where the state is used no more."""
        if self._failure is not None:
            because = (
                f"the optimizer state of {self.label} is neither that before nor that after an update that failed "
                f"({self._failure}). What checkpoints hold is safe: load one"
            )
            raise DiskFailed(self._store.path, operation, because) from self._failure

    def room(self, param: int) -> Room:
        """Return where the parameter with this id is."""
        return self._rooms[param]

    def read(self, name: str, param: int) -> torch.Tensor:
        """Return a copy of one statistic of one parameter."""
        self.check("read")
        buffer, room, start_bytes = self._around(param)
        self._regions[name].read_into(buffer, start_bytes).wait()
        own = buffer[room.start_bytes - start_bytes : room.end_bytes - start_bytes].view(room.dtype)
        return torch.empty_strided(room.shape, room.strides, dtype=room.dtype).copy_(room.shaped(own))

    def write(self, name: str, param: int, value: torch.Tensor) -> None:
        """Write one statistic of one parameter."""
        self.check("write")
        buffer, room, start_bytes = self._around(param)
        region = self._regions[name]
        if buffer.nbytes > room.end_bytes - room.start_bytes:
            region.read_into(buffer, start_bytes).wait()  # what else is in its first block and its last
        own = buffer[room.start_bytes - start_bytes : room.end_bytes - start_bytes].view(room.dtype)
        room.shaped(own).copy_(value)
        self._written.add(param)
        try:
            region.write_from(buffer, start_bytes).wait()
        except BaseException as error:
            self.fail(error)
            raise

    def clear(self, param: int) -> None:
        """Let the state of a parameter be zeros, as it is at first."""
        if param in self._written:
            zeros = torch.zeros((), dtype=self._rooms[param].dtype)
            for name in self.names:
                self.write(name, param, zeros)

    def pieces(self, params: Iterable[int], nbytes: int) -> tuple[Piece, ...]:
        """Return the pieces that hold any of `params`, of at most `nbytes` in memory, in order."""
        block_bytes = disk_file.DISK_BLOCK_BYTES
        size_bytes = max(nbytes // max(len(self._regions), 1) // block_bytes, 1) * block_bytes
        rooms = [self._rooms[param] for param in params]
        found: list[Piece] = []
        for start_bytes in range(0, self._nbytes, size_bytes):
            end_bytes = min(start_bytes + size_bytes, self._nbytes)
            if any(room.start_bytes < end_bytes and start_bytes < room.end_bytes for room in rooms):
                found.append(Piece(list(self._regions.values()), start_bytes, end_bytes, size_bytes))
        return tuple(found)

    def note_update(self, params: Iterable[int]) -> None:
        """Remember that the state of `params` is not that of the beginning any more."""
        self._written.update(params)

    def leave(self, param: int) -> None:
        """Give the space back once every parameter has left."""
        self._left.add(param)
        if self._left.issuperset(self._rooms):
            self.free()

    def free(self) -> None:
        """Give the space back; nothing may be in flight."""
        regions, self._regions = self._regions, {}
        for region in regions.values():
            self._store.free(region)

    def _around(self, param: int) -> tuple[torch.Tensor, Room, int]:
        """Return memory for the whole blocks that hold `param`, its room, and where the first of them begins."""
        room, block_bytes = self._rooms[param], disk_file.DISK_BLOCK_BYTES
        start_bytes = room.start_bytes // block_bytes * block_bytes
        end_bytes = min(-(-room.end_bytes // block_bytes) * block_bytes, self._nbytes)
        nbytes = max(end_bytes - start_bytes, 0)
        slab = Slab(nbytes, pin=False)
        slab.keep_from_children()
        return slab.tensor(torch.uint8, (nbytes,), 0), room, start_bytes


class DiskState(MutableMapping[str, Any]):
    """The state of one parameter: statistics on disk, all else in memory."""

    def __init__(self, home: DiskHome, param: nn.Parameter, names: Sequence[str], rest: Mapping[str, Any]) -> None:
        self.home = home
        self.names = tuple(names)
        """The statistics that it has; others in its bucket may have more."""
        self.param = id(param)
        self.rest = dict(rest)
        """What is in memory."""

    def __getitem__(self, name: str) -> Any:
        return self.home.read(name, self.param) if name in self.names else self.rest[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.names:
            self.home.write(name, self.param, value)
        else:
            self.rest[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self.names:
            raise TypeError(f"{name} is on disk, where the plan wants it: it can be written, not deleted")
        del self.rest[name]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.names, *self.rest)

    def __len__(self) -> int:
        return len(self.names) + len(self.rest)

    def __repr__(self) -> str:
        return f"DiskState({self.home.label}: {', '.join(self.names)} on disk, {self.rest})"

    # A copy, and what is pickled, is an ordinary state in memory: files belong to one process.

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
