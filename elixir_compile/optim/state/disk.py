"""Optimizer state that lives on disk: a file per bucket and statistic, and what reads and writes it.

    b1.exp_avg      |--- weight ---|- bias -|        the bucket's parameters one after another, as a slab has them
    b1.exp_avg_sq   |--- weight ---|- bias -|

The files of a statistic hold it in its own dtype, so the same element is at another byte in each.

`state[p]` is then a `DiskState`: a statistic is read into a new tensor each time it is asked for, and written when it
is assigned; changing the tensor that was read changes nothing. All else, as the step count, is in memory.

After a write that failed, and after an update that ended in the middle, the state of the bucket is neither old nor new:
it is used no more, and whoever asks for it gets DiskFailed, until a checkpoint is loaded.
"""

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any

import torch
from torch import nn

from elixir_compile.errors import DiskFailed
from elixir_compile.ops.shards import own_part
from elixir_compile.runtime.disk import disk_file
from elixir_compile.runtime.disk.disk_store import DiskRegion, DiskStore
from elixir_compile.runtime.disk.read_ahead import Piece
from elixir_compile.runtime.slab import ALIGN_BYTES, Slab, flat

Kind = tuple[str, torch.dtype]
"""A statistic; parameters of one bucket may keep it in different dtypes."""


class Extent:
    """Which elements of each file of its bucket are one parameter's, and the shape that they have."""

    def __init__(self, param: torch.Tensor, start: int) -> None:
        # In memory order, whatever the parameter is a view of; a slab has the same strides.
        like = torch.empty_like(param, device="meta", memory_format=torch.preserve_format)
        self.shape, self.strides = like.shape, like.stride()
        self.start = start
        self.end = start + param.numel()

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """Return `elements`, which are flat, in the shape of the parameter."""
        return elements.as_strided(self.shape, self.strides)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, shaped like the parameter, as its elements in order: a view if it has the same strides."""
        if tensor.stride() != self.strides:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype).copy_(tensor)
        return flat(tensor)


class DiskHome:
    """The state of one bucket's parameters in files of `store`."""

    def __init__(self, store: DiskStore, label: str, params: Iterable[torch.Tensor]) -> None:
        self.label = label
        self._store = store
        self._extents: dict[int, Extent] = {}
        self._numel = 0
        for param in params:
            # As a slab does it, so that neighbours are updated as one here too: see `neighbours`.
            step = max(ALIGN_BYTES // param.element_size(), 1)
            extent = Extent(own_part(param).detach(), -(-self._numel // step) * step)
            self._extents[id(param)], self._numel = extent, extent.end
        self._regions: dict[Kind, DiskRegion] = {}
        self._written: set[tuple[int, Kind]] = set()
        self._inside: set[int] = set()
        self.is_free = False
        """Whether the space was given back."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The statistics on disk."""
        return tuple(self._regions)

    def require(self, kinds: Iterable[Kind]) -> None:
        """Take the space of those of `kinds` that there is none for; DiskFull where that is all."""
        for name, dtype in kinds:
            if (name, dtype) not in self._regions:
                region = self._store.allocate(f"{self.label}.{name}", self._numel * dtype.itemsize)
                self._regions[name, dtype] = region

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

    def extent(self, param: int) -> Extent:
        """Return where the parameter with this id is."""
        return self._extents[param]

    def read(self, kind: Kind, param: int) -> torch.Tensor:
        """Return a copy of one statistic of one parameter."""
        self.check("read")
        extent = self._extents[param]
        blocks, own, start_bytes = self._around(extent, kind[1])
        self._regions[kind].read_into(blocks, start_bytes).wait()
        return torch.empty_strided(extent.shape, extent.strides, dtype=kind[1]).copy_(extent.shaped(own))

    def write(self, kind: Kind, param: int, value: torch.Tensor) -> None:
        """Write one statistic of one parameter."""
        self.check("write")
        extent, region = self._extents[param], self._regions[kind]
        blocks, own, start_bytes = self._around(extent, kind[1])
        if blocks.nbytes > own.nbytes:
            region.read_into(blocks, start_bytes).wait()  # what else is in its first block and its last
        extent.shaped(own).copy_(value)
        self._written.add((param, kind))
        try:
            region.write_from(blocks, start_bytes).wait()
        except BaseException as error:
            self.fail(error)
            raise

    def clear(self, kind: Kind, param: int) -> None:
        """Let one statistic of a parameter be zeros, as it is at first."""
        if (param, kind) in self._written:
            self.write(kind, param, torch.zeros((), dtype=kind[1]))

    @property
    def least_bytes(self) -> int:
        """The memory of the smallest pieces."""
        return self._unit * sum(self._sizes_bytes)

    def pieces(self, params: Iterable[int], nbytes: int) -> tuple[Piece, ...]:
        """Return the pieces that hold any of `params`, of at most `nbytes` in memory unless the smallest have more, in
        order."""
        stride = max(nbytes // max(self.least_bytes, 1), 1) * self._unit
        columns = list(zip(self._regions.values(), self._sizes_bytes, strict=True))
        extents = [self._extents[param] for param in params]
        found: list[Piece] = []
        for start in range(0, self._numel, stride):
            end = min(start + stride, self._numel)
            if any(extent.start < end and start < extent.end for extent in extents):
                found.append(Piece(columns, start, end, stride))
        return tuple(found)

    def note_update(self, params: Iterable[int]) -> None:
        """Remember that the state of `params` is not that of the beginning any more."""
        self._written.update((param, kind) for param in params for kind in self._regions)

    def enter(self, param: int) -> None:
        """Note that the state of a parameter is here."""
        self._inside.add(param)

    def leave(self, param: int) -> None:
        """Note that the state of a parameter is elsewhere; give the space back after the last one. Nothing may be in
        flight."""
        self._inside.discard(param)
        if not self._inside:
            regions, self._regions, self.is_free = self._regions, {}, True
            for region in regions.values():
                self._store.free(region)

    @property
    def _sizes_bytes(self) -> list[int]:
        return [dtype.itemsize for _, dtype in self._regions]

    @property
    def _unit(self) -> int:
        """The fewest elements that are whole blocks in each file: sizes are powers of two."""
        return disk_file.DISK_BLOCK_BYTES // min(self._sizes_bytes, default=1)

    def _around(self, extent: Extent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return memory for the whole blocks that hold `room` in the file of a statistic, its own part of it, and the
        byte of the file that the blocks begin with."""
        block_bytes = disk_file.DISK_BLOCK_BYTES
        first_bytes, last_bytes = extent.start * dtype.itemsize, extent.end * dtype.itemsize
        start_bytes = first_bytes // block_bytes * block_bytes
        end_bytes = min(-(-last_bytes // block_bytes) * block_bytes, self._numel * dtype.itemsize)
        nbytes = max(end_bytes - start_bytes, 0)
        slab = Slab(nbytes, pin=False)
        slab.keep_from_children()
        blocks = slab.tensor(torch.uint8, (nbytes,), 0)
        return blocks, blocks[first_bytes - start_bytes : last_bytes - start_bytes].view(dtype), start_bytes


class DiskState(MutableMapping[str, Any]):
    """The state of one parameter: statistics on disk, all else in memory."""

    def __init__(
        self, home: DiskHome, param: nn.Parameter, kinds: Mapping[str, torch.dtype], rest: Mapping[str, Any]
    ) -> None:
        self.home = home
        self.param = id(param)
        self.kinds = dict(kinds)
        """The statistics that have room on disk, with their dtypes; others in its bucket may have more."""
        self.made: set[str] = set()
        """Those of them that there are; an optimizer class may make one at its first update, or later."""
        self.rest = dict(rest)
        """What is in memory."""
        home.enter(self.param)

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics that there are."""
        return tuple(name for name in self.kinds if name in self.made)

    def begin(self, name: str) -> None:
        """Let a statistic be there, zeros unless it is written."""
        self.home.clear((name, self.kinds[name]), self.param)
        self.made.add(name)

    def finish_update(self, made: Set[str], rest: Mapping[str, Any]) -> None:
        """Note which statistics there are after an update, and keep what is in memory."""
        for name, value in rest.items():
            before = self.rest.get(name)
            if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
                before.copy_(value)
            else:
                self.rest[name] = value
        self.made |= made
        for name in made & self.rest.keys():
            del self.rest[name]

    def __getitem__(self, name: str) -> Any:
        return self.home.read((name, self.kinds[name]), self.param) if name in self.made else self.rest[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.kinds and isinstance(value, torch.Tensor):
            self.home.write((name, self.kinds[name]), self.param, value)
            self.made.add(name)
            self.rest.pop(name, None)
        else:
            self.rest[name] = value
            self.made.discard(name)

    def __delitem__(self, name: str) -> None:
        if name in self.made:
            raise TypeError(f"{name} is on disk, where the plan wants it: it can be written, not deleted")
        del self.rest[name]

    def __contains__(self, name: object) -> bool:
        return name in self.made or name in self.rest

    def __iter__(self) -> Iterator[str]:
        yield from (*self.names, *self.rest)

    def __len__(self) -> int:
        return len(self.made) + len(self.rest)

    def __repr__(self) -> str:
        return f"DiskState({self.home.label}: {', '.join(self.names)} on disk, {self.rest})"

    # A copy, and what is pickled, is an ordinary state in memory: files belong to one process.

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
